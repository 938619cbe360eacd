// Adam on CUDA: functors/adam.h.
#include "optimizer_apply.cuh"

namespace ampctx::cuda {

void adam(const Context& context, const StepCall& call, const AdamOptions& options) {
  if (call.states() == 3) return step(context, call, Adam<float, true>(options));
  step(context, call, Adam<float, false>(options));
}

}  // namespace ampctx::cuda
