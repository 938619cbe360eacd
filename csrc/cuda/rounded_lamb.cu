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

// Returns the share of a block.
template <Walk walk, class Table>
int64_t launch_walk(const Context& context, const Table& table, const LambParameters& parameters,
                    const StepCounts& counts, const RoundingParameters& how) {
  constexpr auto kernel = &rounded_lamb_kernel<walk, Table>;
  const Split grid = split(table.elements(), resident_blocks<kernel>(context.device));
  AMPCTX_LAUNCH(kernel, grid.blocks, kThreads, context.stream, table, grid.share, parameters, counts, how);
  return grid.share;
}

}  // namespace

void rounded_lamb(const Context& context, const StepCall& call, const LambOptions& options) {
  using Lists = RoundedLists<2>;
  static_assert(may_round_states<LambOptions>(2));
  const NormsWorkspace workspace(call, 2);
  LambParameters parameters(call, options, workspace);
  const RoundingParameters how(call);
  StepCounts counts(call);
  unsigned* const tickets = call.lists.size() > 0 ? tickets_for(context) : nullptr;
  for_each_table<Lists::kDepth>(context, Lists::of(call), [&](const auto& table) {
    if (has_ratio(options)) {
      const int64_t share = launch_walk<Walk::moments>(context, table, parameters, counts, how);
      parameters.step.skips = {};
      launch_layer_norms<L2Norm, 2>(context, table, share, call.found_inf, workspace.partial, workspace.norms);
      launch_walk<Walk::weights>(context, table, parameters, counts.advanced(tickets), how);
    } else {
      launch_walk<Walk::all>(context, table, parameters, counts.advanced(tickets), how);
      parameters.step.skips = {};
    }
    counts.first += table.count;
  });
  advance_empty_steps(context, call);
}

}  // namespace ampctx::cuda
