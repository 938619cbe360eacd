// The factor of functors/clip_factor.h on CUDA: one thread, so that the host need not wait for the norm.
#include "../functors/clip_factor.h"
#include "multi_tensor_apply.cuh"

namespace ampctx::cuda {
namespace {

__global__ void clip_factor_kernel(const float* norm, KernelFactor inv_scale, float max_norm, float* factor) {
  *factor = clip_factor_element(*norm, inv_scale.get(), max_norm);
}

}  // namespace

void clip_factor(const Context& context, const float* norm, Factor inv_scale, float max_norm, float* factor) {
  constexpr auto kernel = &clip_factor_kernel;
  AMPCTX_LAUNCH(kernel, 1, 1, context.stream, norm, KernelFactor(inv_scale), max_norm, factor);
}

}  // namespace ampctx::cuda
