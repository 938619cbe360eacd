// Adagrad on CUDA: functors/adagrad.h.
#include "optimizer_apply.cuh"

namespace ampctx::cuda {

void adagrad(const Context& context, const StepCall& call, const AdagradOptions& options) {
  step(context, call, Adagrad<float>(options));
}

}  // namespace ampctx::cuda
