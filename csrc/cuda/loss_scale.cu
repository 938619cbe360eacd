// The loss scale and the counts of skips on CUDA: one thread each, so that the host need not wait for flags.
#include "multi_tensor_apply.cuh"

namespace ampctx::cuda {
namespace {

__global__ void update_scale_kernel(ScaleState state, ScaleRule rule) {
  update_scale_element(state.scale, state.growth_tracker, state.hysteresis_tracker, state.found_inf.is_set(), rule);
}

__global__ void block_factors_kernel(const float* scale, BlockFactors to) {
  block_factors_element(scale, to.scale, to.inverse, to.found_inf);
}

__global__ void count_skip_kernel(SkipCounts counts, FoundInf of_step, FoundInf of_loss) {
  count_skip_element(counts, of_step.is_set(), of_loss.is_set());
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

// For steps that other libraries take and for further losses of a step: a step of ours counts itself.
void count_skip(const Context& context, const SkipCounts& counts, FoundInf of_step, FoundInf of_loss) {
  constexpr auto kernel = &count_skip_kernel;
  AMPCTX_LAUNCH(kernel, 1, 1, context.stream, counts, of_step, of_loss);
}

}  // namespace ampctx::cuda
