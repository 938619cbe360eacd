// The loss-scale rule of functors/update_scale.h on CUDA: one thread, so that the host need not wait for found_inf.
#include "multi_tensor_apply.cuh"

namespace ampctx::cuda {
namespace {

__global__ void update_scale_kernel(ScaleState state, ScaleRule rule) {
  update_scale_element(state.scale, state.growth_tracker, state.hysteresis_tracker, state.found_inf.is_set(), rule);
}

__global__ void block_factors_kernel(const float* scale, BlockFactors to) {
  block_factors_element(scale, to.scale, to.inverse, to.found_inf);
}

}  // namespace

void update_scale(const Context& context, const ScaleState& state, const ScaleRule& rule) {
  constexpr auto kernel = &update_scale_kernel;
  AMPCTX_LAUNCH(kernel, 1, 1, context.stream, state, rule);
}

void block_factors(const Context& context, const float* scale, const BlockFactors& to) {
  constexpr auto kernel = &block_factors_kernel;
  AMPCTX_LAUNCH(kernel, 1, 1, context.stream, scale, to);
}

}  // namespace ampctx::cuda
