// Runs one step of an optimizer on CUDA in one launch.
#pragma once

#include "rounded_states.cuh"

namespace ampctx::cuda {

// Lists: grads, params, the states of Optimizer, and extras where the write back has them. `rounds`: the states are
// codes, or are rounded at random (rounded_states.cuh); such a kernel serves calls with extras and without, unscaling
// ones and others.
template <class Optimizer, bool rounds, bool extras, bool unscales>
struct StepFunctor {
  static constexpr int kDepth = 2 + Optimizer::kStates + extras;

  Optimizer optimizer;
  GradientScale<unscales> gradient;
  float lr;
  WriteBack write_back;
  DType param;
  TensorScalars<float> tensor{};

  template <int n, class Indices>
  __device__ __forceinline__ void operator()(float (&value)[kDepth][n], const Indices& indices) {
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
    store_weights<extras, rounds>(write_back, param, tensor.key, value, indices);
  }
};

constexpr int resident_step_blocks(bool rounds, int lists) {
  return rounds ? kRoundedBlocks : resident_blocks_for(lists);
}

template <class Optimizer, bool rounds, bool extras, bool unscales, class Table>
__global__ void __launch_bounds__(kThreads, resident_step_blocks(rounds, 2 + Optimizer::kStates + extras + unscales))
    step_kernel(const __grid_constant__ Table table, int64_t share, StepParameters call, Optimizer optimizer,
                StepCounts counts) {
  if (is_skipped(call)) return;
  StepFunctor<Optimizer, rounds, extras, unscales> functor{
      optimizer, {call.inv_scale.get(), call.maximize}, call.lr.get(), call.write_back, table.dtype[1]};
  constexpr int depth = functor.kDepth;
  const unsigned read = first_lists(extras && !reads_extras(call.write_back) ? depth - 1 : depth);
  if constexpr (rounds) code_table<Optimizer::kStates>().fill();
  constexpr unsigned written = first_lists(depth) - (unscales ? 0 : one_of_lists(0));
  constexpr int at_once = depth + unscales > 5 ? kVector / 4 : kVector / 2;  // or registers spill
  for_each_step_segment<depth>(
      table, share, counts, [&](int tensor, int64_t begin, int64_t size, const TensorScalars<float>& scalars) {
        functor.tensor = scalars;
        walk_segment<rounds, written, at_once>(table, tensor, begin, size, read, call, functor);
      });
}

template <bool rounds, bool extras, bool unscales, class Optimizer>
void launch_step(const Context& context, const StepCall& call, const Optimizer& optimizer, StepCounts counts) {
  StepParameters parameters = call;
  for_each_step_table<rounds, 3 + Optimizer::kStates + extras>(call, [&](const auto& table) {
    constexpr auto kernel = &step_kernel<Optimizer, rounds, extras, unscales, std::decay_t<decltype(table)>>;
    launch_over<kernel>(context, table, parameters, optimizer, counts);
    parameters.skips = {};
    counts.first += table.count;
  });
}

template <class Options, class Optimizer>
void update(const Context& context, const StepCall& call, const Optimizer& optimizer) {
  StepCounts counts(call);
  if (call.lists.size() > 0) counts.tickets = tickets_for(context);
  const auto launch = [&](auto unscales) {
    if constexpr (may_round_states<Options>(Optimizer::kStates)) {
      if (rounds_states(call)) return launch_step<true, true, true>(context, call, optimizer, counts);
    }
    has_extras(call.write_back) ? launch_step<false, true, unscales>(context, call, optimizer, counts)
                                : launch_step<false, false, unscales>(context, call, optimizer, counts);
  };
  call.unscales ? launch(std::true_type{}) : launch(std::false_type{});
  advance_empty_steps(context, call);
}

// Of the functors the one for as many states.
template <class Options, class... Optimizers>
void step(const Context& context, const StepCall& call, const Options& options, Functors<Optimizers...>) {
  ((call.states() == Optimizers::kStates ? update<Options>(context, call, Optimizers(options)) : void()), ...);
}

}  // namespace ampctx::cuda
