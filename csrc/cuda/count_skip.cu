// The counts of functors/count_skip.h on CUDA: one thread, so that the host need not wait for the flags.
#include "../functors/count_skip.h"
#include "multi_tensor_apply.cuh"

namespace ampctx::cuda {
namespace {

__global__ void count_skip_kernel(SkipCount skip) {
  count_skip_element(skip.counts, skip.found_inf.is_set(), skip.of_loss.is_set(), *skip.scale, skip.slot,
                     skip.is_first);
}

}  // namespace

void count_skip(const Context& context, const SkipCount& skip) {
  constexpr auto kernel = &count_skip_kernel;
  AMPCTX_LAUNCH(kernel, 1, 1, context.stream, skip);
}

}  // namespace ampctx::cuda
