// The counts of functors/count_skip.h on CUDA, for steps that other libraries take and for further losses of a step:
// one thread, so that the host need not wait for the flags. optimizer_apply.cuh counts within a step.
#include "multi_tensor_apply.cuh"

namespace ampctx::cuda {
namespace {

__global__ void count_skip_kernel(SkipCounts counts, FoundInf of_step, FoundInf of_loss) {
  count_skip_element(counts, of_step.is_set(), of_loss.is_set());
}

}  // namespace

void count_skip(const Context& context, const SkipCounts& counts, FoundInf of_step, FoundInf of_loss) {
  constexpr auto kernel = &count_skip_kernel;
  AMPCTX_LAUNCH(kernel, 1, 1, context.stream, counts, of_step, of_loss);
}

}  // namespace ampctx::cuda
