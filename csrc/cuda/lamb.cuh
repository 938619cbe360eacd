// What the kernels of LAMB have in common.
#pragma once

#include "layer_norms.cuh"
#include "rounded_states.cuh"

namespace ampctx::cuda {

enum class Walk { moments, weights, all };

// What a kernel is given besides the table and its share.
struct LambParameters {
  StepParameters step;
  KernelFactor global_grad_norm;
  Lamb<float> lamb;
  const float* norms;  // of w and u
  float* partial;

  LambParameters(const StepCall& call, const LambOptions& options, const NormsWorkspace& workspace)
      : step(call),
        global_grad_norm(call.factors[0]),
        lamb(options),
        norms(workspace.norms),
        partial(workspace.partial) {}
};

template <Walk walk>
using Take = std::integral_constant<Walk, walk>;

// The walks of a call through tables of `depth` lists. launch(Take<walk>, table, parameters, counts) returns its grid.
template <int depth, class Launch>
void walk_lamb(const Context& context, const StepCall& call, const LambOptions& options, const TensorLists& lists,
               const Launch& launch) {
  const NormsWorkspace workspace(call, 2);
  LambParameters parameters(call, options, workspace);
  StepCounts counts(call);
  unsigned* const tickets = call.lists.size() > 0 ? tickets_for(context) : nullptr;
  for_each_table<depth>(context, lists, [&](const auto& table) {
    if (has_ratio(options)) {
      const int64_t share = launch(Take<Walk::moments>{}, table, parameters, counts).share;
      parameters.step.skips = {};
      launch_layer_norms<L2Norm, 2>(context, table, share, call.found_inf, workspace.partial, workspace.norms);
      launch(Take<Walk::weights>{}, table, parameters, counts.advanced(tickets));
    } else {
      launch(Take<Walk::all>{}, table, parameters, counts.advanced(tickets));
      parameters.step.skips = {};
    }
    counts.first += table.count;
  });
  advance_empty_steps(context, call);
}

// For states that are codes, or are rounded at random.
void rounded_lamb(const Context& context, const StepCall& call, const LambOptions& options);

}  // namespace ampctx::cuda
