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

// For states that are codes, or are rounded at random.
void rounded_lamb(const Context& context, const StepCall& call, const LambOptions& options);

}  // namespace ampctx::cuda
