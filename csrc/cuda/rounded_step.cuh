// The element-wise steps whose states are codes, or are rounded at random: rounded_states.cuh.
#pragma once

#include "rounded_states.cuh"

namespace ampctx::cuda {

template <class Optimizer, class Table>
__global__ void __launch_bounds__(kThreads, kRoundedBlocks)
    rounded_step_kernel(const __grid_constant__ Table table, int64_t share, StepParameters call, Optimizer optimizer,
                        StepCounts counts, RoundingParameters how) {
  constexpr int states = Optimizer::kStates;
  using Lists = RoundedLists<states>;
  if (call.is_skipped()) return;
  __shared__ CodeTable<states> codes;
  codes.fill();
  const StateRounding<states> rounding{codes, how.is_random};
  const GradientScale<true> gradient(call.inv_scale.get(), call.maximize);
  const float lr = call.lr.get();
  for_each_step_segment<Lists::kSteps>(
      table, share, counts, [&](int tensor, int64_t begin, int64_t size, const TensorScalars<float>& scalars) {
        for_each_step_octet(table, tensor, begin, size, rounding, call.write_back, [&](const auto& octet) {
          Weights value;
          float state[states][kVector];
          octet.template load<true>(value, state);
#pragma unroll
          for (int k = 0; k < kVector; ++k) value[0][k] *= gradient.scale;
          if (how.unscales) octet.store_grads(value[0]);
#pragma unroll
          for (int k = 0; k < kVector; ++k) {
            float of_element[states];
#pragma unroll
            for (int s = 0; s < states; ++s) of_element[s] = state[s][k];
            value[1][k] = step_element(optimizer, scalars, lr, value[0][k] * gradient.sign, value[1][k], of_element);
#pragma unroll
            for (int s = 0; s < states; ++s) state[s][k] = of_element[s];
          }
          octet.store_weights(scalars.key, value);
          octet.store_states(scalars.key, state);
        });
      });
}

template <class Optimizer>
void launch_rounded_step(const Context& context, const StepCall& call, const Optimizer& optimizer, StepCounts counts) {
  using Lists = RoundedLists<Optimizer::kStates>;
  StepParameters parameters(call);
  for_each_table<Lists::kDepth>(context, Lists::of(call), [&](const auto& table) {
    constexpr auto kernel = &rounded_step_kernel<Optimizer, std::decay_t<decltype(table)>>;
    launch_over<kernel>(context, table, parameters, optimizer, counts, RoundingParameters(call));
    parameters.skips = {};
    counts.first += table.count;
  });
}

}  // namespace ampctx::cuda
