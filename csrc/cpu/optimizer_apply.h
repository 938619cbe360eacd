// Runs one step of an optimizer over the blocks of tensor lists: advances step counts, loads weights from params and
// extras, runs the optimizer's loop, stores weights into params and extras.
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

// Advances the step counts and fills the workspace, one entry per non-empty tensor.
template <class T>
TensorScalars<T>* advance_steps(const StepCall& call) {
  TensorScalars<T>* scalars = static_cast<TensorScalars<T>*>(call.workspace);
  int64_t number = 0;
  double known = std::numeric_limits<double>::quiet_NaN();  // the count of `last`: powers are slow, most counts agree
  TensorScalars<T> last{};
  for (int64_t i = 0; i < call.lists.total_tensors; ++i) {
    const double t = next_step(*call.steps[i]);
    *call.steps[i] = static_cast<float>(t);
    if (number == call.lists.size() || call.lists.index[number] != i) continue;
    if (t != known) last = tensor_scalars<T>(call.rule, t, number);
    known = t;
    scalars[number] = last;
    scalars[number].key = random_key(call.rule.seed, to_int64(t), call.numbers ? call.numbers[number] : number);
    ++number;
  }
  return scalars;
}

// Loads and stores the lists of a step, block by block.
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
        unscale_(arithmetic<T>(cpu::simd()).scale),
        access_(call.lists, cpu::simd()) {
    rounds_states_ = call.stochastic_state;
    for (int state = 0; state < call.states(); ++state) rounds_states_ |= is_code(call.lists.dtype[2 + state]);
  }

  // For weights and states whose memory holds T.
  StepBlock<T> open_in_place(const Block& block, Buffers& unused) const {
    StepBlock<T> at = begin(block);
    at.weight = access_.update(1, block, unused.list[1]);
    read_states(at, block, unused);
    return at;
  }

  // For weights and states of any type.
  StepBlock<T> open(const Block& block, Buffers& buffers) const {
    StepBlock<T> at = begin(block);
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

  // Reads the gradients. An unscaling op also unscales and stores them.
  void read_gradients(StepBlock<T>& at, const Block& block, Buffers& buffers) const {
    if (!call_.unscales) {
      at.grad = access_.read(0, block, buffers.list[0]);
      return;
    }
    T* const grad = access_.update(0, block, buffers.list[0]);
    unscale_(grad, grad, block.size, static_cast<T>(call_.inv_scale.value));
    access_.write(0, block, buffers.list[0]);
    at.grad = grad;
    at.grad_scale = call_.maximize ? -1 : 1;
  }

  void read_states(StepBlock<T>& at, const Block& block, Buffers& buffers) const {
    for (int state = 0; state < call_.states(); ++state) {
      const int list = 2 + state;
      if (is_code(call_.lists.dtype[list])) {
        at.state[state] = buffers.list[list].data;
        read_codes(state, block, at.state[state]);
      } else {
        at.state[state] = access_.update(list, block, buffers.list[list]);
      }
    }
  }

  void write_states(const StepBlock<T>& at, const Block& block, const Buffers& buffers) const {
    if (rounds_states_) return round_states(at, block, buffers);
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

  void* memory(int list, const Block& block) const { return access_.memory(list, block); }

 private:
  float* scales(int state, const Block& block) const {
    if (!is_code(call_.lists.dtype[2 + state])) return nullptr;
    return static_cast<float*>(call_.scales[state][block.tensor]) + block.begin / kCodeBlock;
  }

  // Codes go with fp32 alone, and so do random bits of states.
  void read_codes(int state, const Block& block, T* values) const {
    if constexpr (sizeof(T) == sizeof(float)) {
      const DType type = call_.lists.dtype[2 + state];
      simd().optimizers.decode(type, memory(2 + state, block), scales(state, block), values, block.size);
    }
  }

  void round_states(const StepBlock<T>& at, const Block& block, const Buffers& buffers) const {
    if constexpr (sizeof(T) == sizeof(float)) {
      const OptimizerLoops& loops = simd().optimizers;
      uint32_t random[kBlock];
      if (call_.stochastic_state) loops.draw(key_at(at.tensor.key, block.begin), random, block.size);
      for (int state = 0; state < call_.states(); ++state) {
        const int list = 2 + state;
        const DType type = call_.lists.dtype[list];
        if (is_code(type) || (call_.stochastic_state && type == DType::bf16)) {
          loops.round({type, state, call_.stochastic_state ? random : nullptr}, at.state[state], memory(list, block),
                      scales(state, block), block.size);
        } else {
          access_.write(list, block, buffers.list[list]);
        }
      }
    }
  }

  StepBlock<T> begin(const Block& block) const {
    StepBlock<T> at{};
    at.n = block.size;
    at.lr = static_cast<T>(call_.lr.value);
    const T inv_scale = static_cast<T>(call_.inv_scale.value);
    at.grad_scale = call_.maximize ? -inv_scale : inv_scale;
    at.tensor = scalars_[block.tensor];
    return at;
  }

  const StepCall& call_;
  const TensorScalars<T>* scalars_;
  const Weights<T>& weights_;
  const decltype(Arithmetic<T>::scale) unscale_;
  const BlockAccess<T> access_;
  bool rounds_states_;  // otherwise than by a conversion of each element
};

// The loop over memory that converts gradients and copies, or null. Gradients that were unscaled are fp32.
template <class Optimizer>
MixedLoop<Optimizer> mixed_loop(const StepCall& call, const StepLoopsOf<float, Optimizer>& loops) {
  const TensorLists& lists = call.lists;
  for (int list = 1; list < 2 + call.states(); ++list) {
    if (lists.dtype[list] != DType::f32) return nullptr;
  }
  const bool copies = call.write_back == WriteBack::copy;
  if (!copies && call.write_back != WriteBack::nearest) return nullptr;
  const DType copy = copies ? lists.dtype[lists.depth - 1] : DType::f32;
  if (copies && copy == DType::f32) return nullptr;
  const DType grad = call.unscales ? DType::f32 : lists.dtype[0];
  return loops.mixed[static_cast<int>(grad)][static_cast<int>(copy)];
}

template <class Optimizer>
MixedLoop<Optimizer> mixed_loop(const StepCall&, const StepLoopsOf<double, Optimizer>&) {
  return nullptr;
}

// The step itself, with the scalars of advance_steps(). `loops` come from simd_optimizers.cpp.
template <class T, class Optimizer>
void update(const Context& context, const StepCall& call, const TensorScalars<T>* scalars, const Optimizer& optimizer,
            const StepLoopsOf<T, Optimizer>& loops) {
  const StepAccess<T> access(call, scalars);
  if (const MixedLoop<Optimizer> mixed = mixed_loop(call, loops)) {
    if constexpr (sizeof(T) == sizeof(float)) {
      const auto step_block = [&](const Block& block) {
        typename StepAccess<T>::Buffers buffers;
        StepBlock<T> at = access.open_in_place(block, buffers);
        const void* grad = access.memory(0, block);
        if (call.unscales) {
          access.read_gradients(at, block, buffers);
          grad = at.grad;
        }
        mixed(at, grad, access.memory(call.lists.depth - 1, block), optimizer);
      };
      const bool has_buffers = call.unscales && call.lists.dtype[0] != DType::f32;
      return for_each_block(context, call.lists, step_block, has_buffers ? 1 : kAtOnce);
    }
  }
  for_each_block(context, call.lists, [&](const Block& block) {
    typename StepAccess<T>::Buffers buffers;
    StepBlock<T> at = access.open(block, buffers);
    access.read_gradients(at, block, buffers);
    loops.plain(at, optimizer);
    access.write_states(at, block, buffers);
    access.write_weights(at, block, buffers);
  });
}

// Skips the step if found_inf is set. `loops` come from simd_optimizers.cpp.
template <class T, class Optimizer>
void step(const Context& context, const StepCall& call, const Optimizer& optimizer,
          const StepLoopsOf<T, Optimizer>& loops) {
  if (call.found_inf.is_set()) return;
  update<T>(context, call, advance_steps<T>(call), optimizer, loops);
}

}  // namespace ampctx::cpu
