// Runs one step of an optimizer on CUDA. A small kernel, one thread per tensor, advances the step counts and leaves the
// scalars of each tensor in the workspace; then all elements are updated. Both look at found_inf and leave everything
// as it is where that is set.
#pragma once

#include <initializer_list>

#include "../optimizer_ops.h"
#include "vectorized.cuh"

namespace ampctx::cuda {

// Returns the scalars of the tensors that have elements, in call.workspace.
TensorScalars<float>* advance_steps(const Context& context, const StepCall& call);

// What a step kernel is given besides the table, the scalars and the optimizer.
struct StepParameters {
  FoundInf found_inf;
  KernelFactor inv_scale, lr;
  bool maximize;
  WriteBack write_back;

  explicit StepParameters(const StepCall& call)
      : found_inf(call.found_inf),
        inv_scale(call.inv_scale),
        lr(call.lr),
        maximize(call.maximize),
        write_back(call.write_back) {}
};

// One element for each tensor of the call as lists for for_each_table; offsets count the tensors that have elements.
inline TensorLists one_element_lists(const StepCall& call, std::initializer_list<const PerTensor*> arguments) {
  TensorLists elements;
  for (const PerTensor* argument : arguments) {
    elements.pointer[elements.depth++].assign(argument->begin(), argument->end());
  }
  elements.numel.assign(call.steps.size(), 0);
  for (const int64_t index : call.lists.index) elements.numel[index] = 1;
  return elements;
}

// Weights out of params (list 1) and extras (the last list), and back into them.
template <WriteBack mode, int depth, int n>
__device__ __forceinline__ void load_weights(float (&value)[depth][n]) {
#pragma unroll
  for (int k = 0; k < n; ++k) value[1][k] = load_weight(mode, value[1][k], value[depth - 1][k]);
}

template <WriteBack mode, int depth, int n>
__device__ __forceinline__ void store_weights(DType param, RandomKey key, float (&value)[depth][n],
                                              const Places& places) {
#pragma unroll
  for (int k = 0; k < n; ++k) {
    const uint32_t random = mode == WriteBack::stochastic ? random_bits(key_at(key, places.of(k)), 0) : 0;
    float rest = 0;
    store_weight(mode, param, value[1][k], random, value[1][k], rest);
    if constexpr (has_extras(mode)) value[depth - 1][k] = rest;
  }
}

// The same with a mode of run time; `extras` says whether the last list is that of extras.
template <bool extras, int depth, int n>
__device__ __forceinline__ void load_weights(WriteBack mode, float (&value)[depth][n]) {
  if constexpr (extras) {
    if (mode == WriteBack::split) load_weights<WriteBack::split>(value);
    if (mode == WriteBack::kahan) load_weights<WriteBack::kahan>(value);
  }
}

template <bool extras, int depth, int n>
__device__ __forceinline__ void store_weights(WriteBack mode, DType param, RandomKey key, float (&value)[depth][n],
                                              const Places& places) {
  if constexpr (extras) {
    if (mode == WriteBack::copy) store_weights<WriteBack::copy>(param, key, value, places);
    if (mode == WriteBack::split) store_weights<WriteBack::split>(param, key, value, places);
    if (mode == WriteBack::kahan) store_weights<WriteBack::kahan>(param, key, value, places);
  } else {
    if (mode == WriteBack::stochastic) store_weights<WriteBack::stochastic>(param, key, value, places);
  }
}

// How gradients are scaled. Kernels that store the unscaled ones (`unscales`) take the sign apart; they are others than
// those that do not, as a gradient that is kept until it is stored takes registers.
template <bool unscales>
struct GradientScale {
  float scale, sign;

  __device__ GradientScale(float inv_scale, bool maximize)
      : scale(maximize && !unscales ? -inv_scale : inv_scale), sign(maximize ? -1.0f : 1.0f) {}

  // What the step computes with.
  __device__ __forceinline__ float of(float& grad) const {
    if constexpr (!unscales) return grad * scale;
    grad *= scale;
    return grad * sign;
  }
};

// Lists: grads, params, the states of Optimizer, and extras where the write back has them.
template <class Optimizer, bool extras, bool unscales>
struct StepFunctor {
  static constexpr int kDepth = 2 + Optimizer::kStates + extras;

  Optimizer optimizer;
  GradientScale<unscales> gradient;
  float lr;
  WriteBack write_back;
  DType param;
  TensorScalars<float> tensor{};

  template <int n>
  __device__ __forceinline__ void operator()(float (&value)[kDepth][n], const Places& places) {
    load_weights<extras>(write_back, value);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      float state[Optimizer::kStates + 1];  // not none
#pragma unroll
      for (int s = 0; s < Optimizer::kStates; ++s) state[s] = value[2 + s][k];
      value[1][k] = step_element(optimizer, tensor, lr, gradient.of(value[0][k]), value[1][k], state);
#pragma unroll
      for (int s = 0; s < Optimizer::kStates; ++s) value[2 + s][k] = state[s];
    }
    store_weights<extras>(write_back, param, tensor.key, value, places);
  }
};

template <class Optimizer, bool extras, bool unscales, class Table>
__global__ void __launch_bounds__(kThreads, 2)
    step_kernel(const __grid_constant__ Table table, int64_t share, StepParameters call, Optimizer optimizer,
                const TensorScalars<float>* scalars) {
  if (call.found_inf.is_set()) return;
  StepFunctor<Optimizer, extras, unscales> functor{
      optimizer, {call.inv_scale.get(), call.maximize}, call.lr.get(), call.write_back, table.dtype[1]};
  constexpr int depth = functor.kDepth;
  constexpr unsigned written = first_lists(depth) - (unscales ? 0 : one_of_lists(0));
  constexpr int at_once = unscales && depth == 5 ? kVector / 4 : elements_at_once(depth);  // or registers spill
  const unsigned read = first_lists(extras && !reads_extras(call.write_back) ? depth - 1 : depth);
  for_each_segment(table, share, [&](int tensor, int64_t begin, int64_t size) {
    functor.tensor = scalars[tensor];
    for_each_element<depth, written, at_once>(table, tensor, begin, size, read, functor);
  });
}

template <bool extras, bool unscales, class Optimizer>
void launch_step(const Context& context, const StepCall& call, const Optimizer& optimizer,
                 const TensorScalars<float>* scalars) {
  for_each_table<2 + Optimizer::kStates + extras, !unscales>(context, call.lists, [&](const auto& table) {
    constexpr auto kernel = &step_kernel<Optimizer, extras, unscales, std::decay_t<decltype(table)>>;
    const Split grid = split(table.elements(), resident_blocks<kernel>(context.device));
    AMPCTX_LAUNCH(kernel, grid.blocks, kThreads, context.stream, table, grid.share, StepParameters(call), optimizer,
                  scalars);
    scalars += table.count;
  });
}

// The step itself, with the scalars of advance_steps().
template <class Optimizer>
void update(const Context& context, const StepCall& call, const TensorScalars<float>* scalars,
            const Optimizer& optimizer) {
  const auto launch = [&](auto unscales) {
    has_extras(call.write_back) ? launch_step<true, unscales>(context, call, optimizer, scalars)
                                : launch_step<false, unscales>(context, call, optimizer, scalars);
  };
  call.unscales ? launch(std::true_type{}) : launch(std::false_type{});
}

// Of the functors the one for as many states.
template <class Options, class... Optimizers>
void step(const Context& context, const StepCall& call, const Options& options, Functors<Optimizers...>) {
  const auto step_by = [&](const auto& optimizer) { update(context, call, advance_steps(context, call), optimizer); };
  ((call.states() == Optimizers::kStates ? step_by(Optimizers(options)) : void()), ...);
}

}  // namespace ampctx::cuda
