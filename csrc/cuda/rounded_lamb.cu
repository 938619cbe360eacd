// LAMB on CUDA whose states are codes, or are rounded at random: walks as in multi_tensor_lamb.cu, through
// rounded_states.cuh. u is made of what was stored.
#include "lamb.cuh"

namespace ampctx::cuda {
namespace {

template <Walk walk, class Table>
__global__ void __launch_bounds__(kThreads, kRoundedBlocks)
    rounded_lamb_kernel(const __grid_constant__ Table table, int64_t share, LambParameters call, StepCounts counts,
                        RoundingParameters how) {
  constexpr int states = 2;
  using Lists = RoundedLists<states>;
  if (call.step.is_skipped()) return;
  __shared__ CodeTable<states> codes;
  codes.fill();
  const StateRounding<states> rounding{codes, how.is_random};
  const GradientScale<true> gradient(call.step.inv_scale.get(), call.step.maximize);
  const float lr = call.step.lr.get();
  Lamb<float> lamb = call.lamb;
  lamb.clip = lamb_clip(lamb, call.global_grad_norm.get());
  for_each_step_segment<Lists::kSteps>(
      table, share, counts, [&](int tensor, int64_t begin, int64_t size, const TensorScalars<float>& scalars) {
        float sum[2] = {}, rate = lr;
        if constexpr (walk == Walk::weights) {
          rate = lamb_rate(lr, call.norms[int64_t{2} * tensor], call.norms[int64_t{2} * tensor + 1]);
        }
        for_each_step_octet(table, tensor, begin, size, rounding, call.step.write_back, [&](const auto& octet) {
          Weights value;
          float state[states][kVector], u[kVector];
          octet.template load<walk != Walk::weights>(value, state);
          if constexpr (walk != Walk::weights) {
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
              lamb_moments(lamb, gradient.of(value[0][k]), value[1][k], state[0][k], state[1][k]);
            }
            if (how.unscales) octet.store_grads(value[0]);
            octet.store_states(scalars.key, state);
          }
#pragma unroll
          for (int k = 0; k < kVector; ++k) {
            u[k] = lamb_direction(lamb, scalars, value[1][k], state[0][k], state[1][k]);
          }
          if constexpr (walk == Walk::moments) {
#pragma unroll
            for (int k = 0; k < kVector; ++k) u[k] = octet.has(k) ? u[k] : 0.0f;  // 0 / 0 where eps is 0
            sum[0] += L2Norm::of(value[1], 1.0f);
            sum[1] += L2Norm::of(u, 1.0f);
          } else {
#pragma unroll
            for (int k = 0; k < kVector; ++k) value[1][k] -= rate * u[k];
            octet.store_weights(scalars.key, value);
          }
        });
        if constexpr (walk == Walk::moments) leave_piece<L2Norm>(table, share, tensor, sum, call.partial);
      });
}

}  // namespace

void rounded_lamb(const Context& context, const StepCall& call, const LambOptions& options) {
  using Lists = RoundedLists<2>;
  static_assert(may_round_states<LambOptions>(2));
  const RoundingParameters how(call);
  const auto launch = [&](auto walk, const auto& table, const auto&... given) {
    constexpr auto kernel = &rounded_lamb_kernel<walk, std::decay_t<decltype(table)>>;
    return launch_over<kernel>(context, table, given..., how);
  };
  walk_lamb<Lists::kDepth>(context, call, options, Lists::of(call), launch);
}

}  // namespace ampctx::cuda
