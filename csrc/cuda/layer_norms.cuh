// Norms of each tensor between two walks of a layer-wise optimizer on CUDA: norms.cuh. Nothing where found_inf is set.
#pragma once

#include "../optimizer_ops.h"
#include "norms.cuh"

namespace ampctx::cuda {

// What OptimizerCall::norms points to: `count` norms of each tensor, and then the partial values they come from. The
// launches for the tables of a call may use the same, one after the other.
struct NormsWorkspace {
  float* norms;  // [count * tensor + norm]
  float* partial;

  NormsWorkspace(const OptimizerCall& call, int count)
      : norms(static_cast<float*>(call.norms)), partial(norms + count * call.lists.size()) {}
};

// One warp per tensor.
template <class Norm, int count, class Table>
__global__ void __launch_bounds__(kThreads) layer_norms_kernel(const __grid_constant__ Table table, int64_t share,
                                                               FoundInf found_inf, const float* partial, float* norms) {
  const int tensor = (blockIdx.x * kThreads + threadIdx.x) / kWarp;
  if (tensor >= table.count || found_inf.is_set()) return;
  for (int i = 0; i < count; ++i) {
    const float norm = norm_of_pieces<Norm, count>(table, share, tensor, partial + i);
    if (threadIdx.x % kWarp == 0) norms[int64_t{count} * tensor + i] = norm;
  }
}

// `share` is that of the launch that left the pieces.
template <class Norm, int count, class Table>
void launch_layer_norms(const Context& context, const Table& table, int64_t share, FoundInf found_inf,
                        const float* partial, float* norms) {
  constexpr auto kernel = &layer_norms_kernel<Norm, count, Table>;
  AMPCTX_LAUNCH(kernel, blocks_for_warps(table.count), kThreads, context.stream, table, share, found_inf, partial,
                norms);
}

}  // namespace ampctx::cuda
