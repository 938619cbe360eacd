// sqrt(sum((x * inv_scale)^2)) on CUDA, of all tensors and of each. Read by gradient clipping and by layer-wise
// optimizers.
//
// The first kernel leaves partial sums (norms.cuh), the second adds them all in fp64, in a fixed order. A third does so
// for each tensor where that is asked for.
#include "norms.cuh"

namespace ampctx::cuda {
namespace {

struct L2NormFunctor {
  float inv_scale;
  float sum[1] = {};
  bool finite = true;

  template <int n>
  __device__ void operator()(float (&value)[1][n], int64_t) {
#pragma unroll
    for (int k = 0; k < n; ++k) finite = finite && is_finite(value[0][k]);
    sum[0] += L2Norm::of(value[0], inv_scale);
  }
};

template <class Table>
__global__ void __launch_bounds__(kThreads)
    l2norm_partial_kernel(const __grid_constant__ Table table, int64_t share, FoundInf found_inf,
                          KernelFactor inv_scale, float* partial) {
  L2NormFunctor functor{inv_scale.get()};
  for_each_segment(table, share, [&](int tensor, int64_t begin, int64_t size) {
    functor.sum[0] = 0;
    for_each_element<1, 0>(table, tensor, begin, size, one_of_lists(0), functor);
    leave_piece<L2Norm>(table, share, tensor, functor.sum, partial);
  });
  if (!functor.finite) *found_inf.word = found_inf.raised;
}

// One warp per tensor; list 1 of the table is where the norms go.
template <class Table>
__global__ void __launch_bounds__(kThreads)
    l2norm_per_tensor_kernel(const __grid_constant__ Table table, int64_t share, const float* partial) {
  const int tensor = (blockIdx.x * kThreads + threadIdx.x) / kWarp;
  if (tensor >= table.count) return;
  const float norm = norm_of_pieces<L2Norm, 1>(table, share, tensor, partial);
  if (threadIdx.x % kWarp == 0) *static_cast<float*>(table.pointer[1][tensor]) = norm;
}

__global__ void __launch_bounds__(kThreads) l2norm_total_kernel(const float* partial, int64_t pieces, float* norm) {
  double sum = 0;
  for (int64_t piece = threadIdx.x; piece < pieces; piece += kThreads) sum += partial[piece];
  sum = join_block<L2Norm>(sum);
  if (threadIdx.x == 0) *norm = L2Norm::finish(sum);
}

// Returns the number of partial sums.
template <int depth>
int64_t launch_partial(const Context& context, const TensorLists& lists, FoundInf found_inf, Factor inv_scale,
                       float* partial) {
  int64_t pieces = 0;
  for_each_table<depth>(context, lists, [&](const auto& table) {
    using Table = std::decay_t<decltype(table)>;
    constexpr auto kernel = &l2norm_partial_kernel<Table>;
    const Split grid = split(table.elements(), resident_blocks<kernel>(context.device));
    AMPCTX_LAUNCH(kernel, grid.blocks, kThreads, context.stream, table, grid.share, found_inf, KernelFactor(inv_scale),
                  partial + pieces);
    if constexpr (depth == 2) {
      constexpr auto per_tensor_kernel = &l2norm_per_tensor_kernel<Table>;
      AMPCTX_LAUNCH(per_tensor_kernel, blocks_for_warps(table.count), kThreads, context.stream, table, grid.share,
                    partial + pieces);
    }
    pieces += piece_count(grid.blocks, table.count);
  });
  return pieces;
}

}  // namespace

int64_t norms_workspace(const TensorLists& lists, int count) {
  const int64_t launches = lists.size() / SmallTable<2>::kCapacity + 1;
  return count * (2 * lists.size() + launches * kMaxBlocks) * static_cast<int64_t>(sizeof(float));
}

void l2norm(const Context& context, const TensorLists& lists, FoundInf found_inf, Factor inv_scale,
            const NormOutputs& outputs) {
  float* partial = static_cast<float*>(outputs.workspace);
  int64_t pieces = 0;
  if (outputs.per_tensor) {
    float* per_tensor = static_cast<float*>(outputs.per_tensor);
    const auto stream = static_cast<cudaStream_t>(context.stream);
    if (lists.size() < lists.total_tensors) {  // empty tensors have the norm 0
      const size_t bytes = static_cast<size_t>(lists.total_tensors) * sizeof(float);
      check_cuda(cudaMemsetAsync(per_tensor, 0, bytes, stream), "cudaMemsetAsync");
    }
    TensorLists with_norms = lists;
    with_norms.depth = 2;
    for (const int64_t index : lists.index) with_norms.pointer[1].push_back(per_tensor + index);
    pieces = launch_partial<2>(context, with_norms, found_inf, inv_scale, partial);
  } else {
    pieces = launch_partial<1>(context, lists, found_inf, inv_scale, partial);
  }
  constexpr auto kernel = &l2norm_total_kernel;
  AMPCTX_LAUNCH(kernel, 1, kThreads, context.stream, partial, pieces, static_cast<float*>(outputs.norm));
}

}  // namespace ampctx::cuda
