// SGD on CUDA: functors/sgd.h.
#include "optimizer_apply.cuh"

namespace ampctx::cuda {

void sgd(const Context& context, const StepCall& call, const SgdOptions& options) {
  if (call.states() == 1) return step(context, call, Sgd<float, true>(options));
  step(context, call, Sgd<float, false>(options));
}

}  // namespace ampctx::cuda
