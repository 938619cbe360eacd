// The element-wise steps whose states are codes, or are rounded at random: rounded_states.cuh.
#pragma once

#include "rounded_states.cuh"

namespace ampctx::cuda {

template <class Optimizer, class Table>
__global__ void __launch_bounds__(kThreads, kRoundedBlocks)
    rounded_step_kernel(const __grid_constant__ Table table, int64_t share, StepParameters call, Optimizer optimizer,
                        StepCounts counts, RoundingParameters how) {
  constexpr int states = Optimizer::kStates, n = kRoundedAtOnce;
  using Lists = RoundedLists<states>;
  if (call.is_skipped()) return;
  __shared__ CodeTable<states> codes;
  codes.fill();
  const StateRounding<states> rounding{codes, how.is_random};
  const GradientScale<true> gradient(call.inv_scale.get(), call.maximize);
  const float lr = call.lr.get();
  for_each_step_segment<Lists::kSteps>(
      table, share, counts, [&](int tensor, int64_t begin, int64_t size, const TensorScalars<float>& scalars) {
        for_each_step_octet(table, tensor, begin, size, rounding, call.write_back, [&](auto& octet) {
          octet.load(true);
          float fresh[states][kVector];
#pragma unroll
          for (int first = 0; first < kVector; first += n) {
            float value[Lists::kWalked][n];
            octet.read(first, value);
#pragma unroll
            for (int k = 0; k < n; ++k) {
              float state[states];
#pragma unroll
              for (int s = 0; s < states; ++s) state[s] = value[2 + s][k];
              value[1][k] = step_element(optimizer, scalars, lr, gradient.of(value[0][k]), value[1][k], state);
#pragma unroll
              for (int s = 0; s < states; ++s) fresh[s][first + k] = state[s];
            }
            if (how.unscales) octet.keep_grads(first, value[0]);
            octet.keep_weights(first, scalars.key, value);
          }
          if (how.unscales) octet.store_grads();
          octet.store_weights_and_extras();
          octet.store_states(scalars.key, fresh);
        });
      });
}

template <class Optimizer>
void launch_rounded_step(const Context& context, const StepCall& call, const Optimizer& optimizer, StepCounts counts) {
  using Lists = RoundedLists<Optimizer::kStates>;
  StepParameters parameters(call);
  for_each_table<Lists::kDepth, false>(context, Lists::of(call), [&](const auto& table) {
    constexpr auto kernel = &rounded_step_kernel<Optimizer, std::decay_t<decltype(table)>>;
    const Split grid = split(table.elements(), resident_blocks<kernel>(context.device));
    AMPCTX_LAUNCH(kernel, grid.blocks, kThreads, context.stream, table, grid.share, parameters, optimizer, counts,
                  RoundingParameters(call));
    parameters.skips = {};
    counts.first += table.count;
  });
}

}  // namespace ampctx::cuda
