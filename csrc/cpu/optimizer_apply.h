// Runs one step of an optimizer over the blocks of tensor lists: step counts, weights out of their parts, the
// optimizer's own loop, weights back into their parts.
#pragma once

#include <limits>

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
TensorScalars<T>* advance_steps(const StepCall& call) {
  TensorScalars<T>* scalars = static_cast<TensorScalars<T>*>(call.workspace);
  int64_t number = 0;
  double known = std::numeric_limits<double>::quiet_NaN();  // the step count of `last`: powers are slow, most agree
  TensorScalars<T> last{};
  for (int64_t i = 0; i < call.lists.total_tensors; ++i) {
    const double t = static_cast<double>(*call.steps[i]) + 1;
    *call.steps[i] = static_cast<float>(t);
    if (number == call.lists.size() || call.lists.index[number] != i) continue;
    if (t != known) last = tensor_scalars<T>(call.rule, t, number);
    known = t;
    scalars[number] = last;
    scalars[number].key = random_key(call.rule.seed, to_int64(t), number);
    ++number;
  }
  return scalars;
}

// The lists of a step, block by block: weights out of their parts, and back.
template <class T>
class StepAccess {
 public:
  struct Buffers {
    typename BlockAccess<T>::Buffer list[kMaxLists];
  };

  StepAccess(const StepCall& call, const TensorScalars<T>* scalars)
      : call_(call),
        scalars_(scalars),
        weights_(optimizer_loops<T>(cpu::simd()).weights),
        access_(call.lists, cpu::simd()) {}

  // Weights and states.
  StepBlock<T> open(const Block& block, Buffers& buffers) const {
    StepBlock<T> at{};
    at.n = block.size;
    at.lr = static_cast<T>(call_.lr.value);
    at.tensor = scalars_[block.tensor];
    at.weight = access_.update(1, block, buffers.list[1]);
    read_states(at, block, buffers);
    const int extra = call_.lists.depth - 1;
    if (reads_extras(call_.write_back)) {
      at.extra = access_.update(extra, block, buffers.list[extra]);
      weights_.load(call_.write_back, at.weight, at.extra, block.size);
    } else if (has_extras(call_.write_back)) {
      at.extra = access_.target(extra, block, buffers.list[extra]);
    }
    return at;
  }

  void read_gradients(StepBlock<T>& at, const Block& block, Buffers& buffers) const {
    const T inv_scale = static_cast<T>(call_.inv_scale.value);
    at.grad_scale = call_.maximize ? -inv_scale : inv_scale;
    at.grad = access_.read(0, block, buffers.list[0]);
  }

  void read_states(StepBlock<T>& at, const Block& block, Buffers& buffers) const {
    for (int state = 0; state < call_.states(); ++state) {
      at.state[state] = access_.update(2 + state, block, buffers.list[2 + state]);
    }
  }

  void write_states(const Block& block, const Buffers& buffers) const {
    for (int state = 0; state < call_.states(); ++state) access_.write(2 + state, block, buffers.list[2 + state]);
  }

  void write_weights(const StepBlock<T>& at, const Block& block, const Buffers& buffers) const {
    if (call_.write_back != WriteBack::nearest) {
      const RandomKey key = key_at(at.tensor.key, block.begin);
      weights_.store(call_.write_back, call_.lists.dtype[1], at.weight, at.extra, block.size, key);
    }
    access_.write(1, block, buffers.list[1]);
    const int extra = call_.lists.depth - 1;
    if (has_extras(call_.write_back)) access_.write(extra, block, buffers.list[extra]);
  }

 private:
  const StepCall& call_;
  const TensorScalars<T>* scalars_;
  const Weights<T>& weights_;
  const BlockAccess<T> access_;
};

// The step itself, with the scalars of advance_steps(). `loop` is one of those of simd_optimizers.cpp.
template <class T, class Optimizer>
void update(const Context& context, const StepCall& call, const TensorScalars<T>* scalars, const Optimizer& optimizer,
            StepLoop<T, Optimizer> loop) {
  const StepAccess<T> access(call, scalars);
  for_each_block(context, call.lists, [&](const Block& block) {
    typename StepAccess<T>::Buffers buffers;
    StepBlock<T> at = access.open(block, buffers);
    access.read_gradients(at, block, buffers);
    loop(at, optimizer);
    access.write_states(block, buffers);
    access.write_weights(at, block, buffers);
  });
}

template <class T, class Optimizer>
void step(const Context& context, const StepCall& call, const Optimizer& optimizer, StepLoop<T, Optimizer> loop) {
  if (call.found_inf.is_set()) return;
  update<T>(context, call, advance_steps<T>(call), optimizer, loop);
}

}  // namespace ampctx::cpu
