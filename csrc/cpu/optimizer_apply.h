// Runs one step of an optimizer over the blocks of tensor lists: step counts, weights out of their parts, the
// optimizer's own loop, weights back into their parts.
#pragma once

#include "../optimizer_ops.h"
#include "multi_tensor_apply.h"

namespace ampctx::cpu {

template <class T>
const OptimizerLoops::Of<T>& optimizer_loops(const Simd& simd) {
  if constexpr (sizeof(T) == sizeof(double)) {
    return simd.optimizers.f64;
  } else {
    return simd.optimizers.f32;
  }
}

// Advances the step counts and fills the workspace, which has a place for each tensor with elements.
template <class T>
const TensorScalars<T>* advance_steps(const StepCall& call) {
  TensorScalars<T>* scalars = static_cast<TensorScalars<T>*>(call.workspace);
  int64_t number = 0;
  double known = 0;  // the step count of `last`; powers are slow, and most tensors agree
  TensorScalars<T> last{};
  for (int64_t i = 0; i < call.lists.total_tensors; ++i) {
    const double t = static_cast<double>(*call.steps[i]) + 1;
    *call.steps[i] = static_cast<float>(t);
    if (number == call.lists.size() || call.lists.index[number] != i) continue;
    if (t != known) last = tensor_scalars<T>(call.rule, t, number);
    known = t;
    scalars[number] = last;
    scalars[number].key = random_key(call.rule.seed, static_cast<int64_t>(t), number);
    ++number;
  }
  return scalars;
}

// loop(StepBlock, optimizer) is one of the inner loops of simd_optimizers.cpp.
template <class T, class Optimizer>
void step(const Context& context, const StepCall& call, const Optimizer& optimizer, StepLoop<T, Optimizer> loop) {
  if (call.found_inf.is_set()) return;
  const TensorScalars<T>* const scalars = advance_steps<T>(call);
  const Simd& simd = cpu::simd();
  const Weights<T>& weights = optimizer_loops<T>(simd).weights;
  const BlockAccess<T> access(call.lists, simd);
  const T inv_scale = static_cast<T>(call.inv_scale.value);
  const DType param_dtype = call.lists.dtype[1];
  const int extra = has_extras(call.write_back) ? call.lists.depth - 1 : 0;

  for_each_block(context, call.lists, [&](const Block& block) {
    typename BlockAccess<T>::Buffer buffers[kMaxLists];
    StepBlock<T> at;
    at.n = block.size;
    at.grad_scale = call.maximize ? -inv_scale : inv_scale;
    at.lr = static_cast<T>(call.lr.value);
    at.tensor = scalars[block.tensor];
    at.grad = access.read(0, block, buffers[0]);
    at.weight = access.update(1, block, buffers[1]);
    for (int state = 0; state < Optimizer::kStates; ++state) {
      at.state[state] = access.update(2 + state, block, buffers[2 + state]);
    }
    T* extras = nullptr;
    if (reads_extras(call.write_back)) {
      extras = access.update(extra, block, buffers[extra]);
      weights.load(call.write_back, at.weight, extras, block.size);
    } else if (extra) {
      extras = access.target(extra, block, buffers[extra]);
    }
    loop(at, optimizer);
    if (call.write_back != WriteBack::nearest) {
      const RandomKey key = key_at(at.tensor.key, block.begin);
      weights.store(call.write_back, param_dtype, at.weight, extras, block.size, key);
    }
    for (int list = 1; list < call.lists.depth; ++list) access.write(list, block, buffers[list]);
  });
}

}  // namespace ampctx::cpu
