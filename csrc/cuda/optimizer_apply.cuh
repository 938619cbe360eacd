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

// Lists: grads, params, the states of Optimizer, and extras where the write back has them.
template <class Optimizer, bool extras>
struct StepFunctor {
  static constexpr int kDepth = 2 + Optimizer::kStates + extras;

  Optimizer optimizer;
  float grad_scale, lr;
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
      value[1][k] = step_element(optimizer, tensor, lr, value[0][k] * grad_scale, value[1][k], state);
#pragma unroll
      for (int s = 0; s < Optimizer::kStates; ++s) value[2 + s][k] = state[s];
    }
    store_weights<extras>(write_back, param, tensor.key, value, places);
  }
};

template <class Optimizer, bool extras, class Table>
__global__ void __launch_bounds__(kThreads, 2)
    step_kernel(const __grid_constant__ Table table, int64_t share, StepParameters call, Optimizer optimizer,
                const TensorScalars<float>* scalars) {
  if (call.found_inf.is_set()) return;
  const float inv_scale = call.inv_scale.get();
  StepFunctor<Optimizer, extras> functor{optimizer, call.maximize ? -inv_scale : inv_scale, call.lr.get(),
                                         call.write_back, table.dtype[1]};
  constexpr int depth = functor.kDepth;
  const unsigned read = first_lists(extras && !reads_extras(call.write_back) ? depth - 1 : depth);
  for_each_segment(table, share, [&](int tensor, int64_t begin, int64_t size) {
    functor.tensor = scalars[tensor];
    for_each_element<depth, first_lists(depth) - one_of_lists(0)>(table, tensor, begin, size, read, functor);
  });
}

template <bool extras, class Optimizer>
void launch_step(const Context& context, const StepCall& call, const Optimizer& optimizer,
                 const TensorScalars<float>* scalars) {
  for_each_table<2 + Optimizer::kStates + extras>(context, call.lists, [&](const auto& table) {
    constexpr auto kernel = &step_kernel<Optimizer, extras, std::decay_t<decltype(table)>>;
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
  has_extras(call.write_back) ? launch_step<true>(context, call, optimizer, scalars)
                              : launch_step<false>(context, call, optimizer, scalars);
}

// Of the functors the one for as many states.
template <class Options, class... Optimizers>
void step(const Context& context, const StepCall& call, const Options& options, Functors<Optimizers...>) {
  const auto step_by = [&](const auto& optimizer) { update(context, call, advance_steps(context, call), optimizer); };
  ((call.states() == Optimizers::kStates ? step_by(Optimizers(options)) : void()), ...);
}

}  // namespace ampctx::cuda
