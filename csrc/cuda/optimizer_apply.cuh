// Runs one step of an optimizer on CUDA in one launch.
#pragma once

#include "rounded_states.cuh"

namespace ampctx::cuda {

// Lists: grads, params, the states of Optimizer, and extras where the write back has them. `rounds`: the states are
// codes, or are rounded at random (rounded_states.cuh); such a kernel serves calls with extras and without, unscaling
// ones and others.
template <class Optimizer, class Held, bool rounds, bool extras, bool unscales>
struct StepFunctor {
  static constexpr int kDepth = 2 + Optimizer::kStates + extras;

  Held optimizer;  // or a pointer to it
  GradientScale<unscales> gradient;
  float lr;
  WriteBack write_back;
  DType param;
  TensorScalars<float> tensor{};

  __device__ __forceinline__ const Optimizer& chosen() const {
    if constexpr (std::is_pointer_v<Held>) return *optimizer;
    if constexpr (!std::is_pointer_v<Held>) return optimizer;
  }
  template <int n, class Indices>
  __device__ __forceinline__ void operator()(float (&value)[kDepth][n], const Indices& indices) {
    load_weights<extras>(write_back, value);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      float state[Optimizer::kStates + 1];  // not none
#pragma unroll
      for (int s = 0; s < Optimizer::kStates; ++s) state[s] = value[2 + s][k];
      value[1][k] = step_element(chosen(), tensor, lr, gradient.of(value[0][k]), value[1][k], state);
#pragma unroll
      for (int s = 0; s < Optimizer::kStates; ++s) value[2 + s][k] = state[s];
    }
    store_weights<extras, rounds>(write_back, param, tensor.key, value, indices);
  }
};

template <class Optimizer, bool rounds, bool extras, bool unscales, class Table>
__global__ void __launch_bounds__(kThreads, rounds ? kRoundedBlocks
                                                   : resident_blocks_for(2 + Optimizer::kStates + extras + unscales))
    step_kernel(const __grid_constant__ Table table, int64_t share, StepParameters call,
                const __grid_constant__ StepNumbers<Optimizer, Table::kRows> numbers) {
  if (is_skipped(call)) return;
  const GradientScale<unscales> scale(call.inv_scale.get(), call.maximize);
  auto held = numbers.optimizer(0);
  const float lr = numbers.lr[0].get();
  StepFunctor<Optimizer, decltype(held), rounds, extras, unscales> functor{held, scale, lr, call.write_back,
                                                                           table.dtype[1]};
  constexpr int depth = functor.kDepth;
  const unsigned read = first_lists(extras && !reads_extras(call.write_back) ? depth - 1 : depth);
  if constexpr (rounds) code_table<Optimizer::kStates>().fill();
  constexpr unsigned written = first_lists(depth) - (unscales ? 0 : one_of_lists(0));
  constexpr int at_once = depth + unscales > 5 ? kVector / 4 : kVector / 2;  // or registers spill
  for_each_step_segment<depth>(
      table, share, numbers, [&](int tensor, int64_t begin, int64_t size, const TensorScalars<float>& scalars) {
        functor.tensor = scalars;
        if constexpr (Table::kRows > 1) {
          const int row = table.row_of(tensor);
          functor.optimizer = numbers.optimizer(row);
          functor.lr = numbers.lr[row].get();
        }
        walk_segment<rounds, written, at_once>(table, tensor, begin, size, read, call, functor);
      });
}

template <class Optimizer, bool rounds, bool extras, bool unscales, class Options>
void launch_step(const Context& context, const StepCall& call, const std::vector<Options>& options) {
  StepParameters parameters = call;
  unsigned* const tickets = call.lists.size() > 0 ? tickets_for(context) : nullptr;
  int64_t first = 0;
  // Up to 32 rows a launch. Kernels that round would spill registers.
  for_each_step_table<rounds, 3 + Optimizer::kStates + extras, rounds ? 1 : 32>(call, [&](const auto& table) {
    using Table = std::decay_t<decltype(table)>;
    constexpr auto kernel = &step_kernel<Optimizer, rounds, extras, unscales, Table>;
    const StepNumbers<Optimizer, Table::kRows> numbers(call, options, table, tickets, first);
    launch_over<kernel>(context, table, parameters, numbers);
    parameters.skips = {};
    first += table.count;
  });
}

template <class Optimizer, class Options>
void update(const Context& context, const StepCall& call, const std::vector<Options>& options) {
  const auto launch = [&](auto unscales) {
    if constexpr (may_round_states<Options>(Optimizer::kStates)) {
      if (rounds_states(call)) return launch_step<Optimizer, true, true, true>(context, call, options);
    }
    has_extras(call.write_back) ? launch_step<Optimizer, false, true, unscales>(context, call, options)
                                : launch_step<Optimizer, false, false, unscales>(context, call, options);
  };
  call.unscales ? launch(std::true_type{}) : launch(std::false_type{});
  advance_empty_steps(context, call);
}

// Of the functors the one for as many states.
template <class Options, class... Optimizers>
void step(const Context& context, const StepCall& call, const std::vector<Options>& options, Functors<Optimizers...>) {
  ((call.states() == Optimizers::kStates ? update<Optimizers>(context, call, options) : void()), ...);
}

}  // namespace ampctx::cuda
