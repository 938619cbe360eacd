// sqrt(sum((x * inv_scale)^2)) on CUDA, of all tensors and of each. Read by gradient clipping and by layer-wise
// optimizers.
//
// The first kernel writes one fp32 partial sum for each piece of a tensor that falls into the share of a block. A step
// along the line of elements changes the block or the tensor, so block + tensor numbers the pieces; where both change
// at once a number is left out, and its place gets 0. The second kernel adds all partial sums in fp64, in a fixed
// order. A third does so for each tensor where that is asked for. No float atomics: two runs on one device agree to the
// last bit.
#include "../functors/l2norm.h"
#include "vectorized.cuh"

namespace ampctx::cuda {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

template <class T>
__device__ T warp_sum(T value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_down_sync(kAllLanes, value, distance);
  return value;  // in lane 0
}

template <class T>
__device__ T block_sum(T value) {
  __shared__ T of_warp[kThreads / kWarp];
  value = warp_sum(value);
  __syncthreads();  // an earlier sum may still be read
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  T total = 0;
  for (int warp = 0; warp < kThreads / kWarp; ++warp) total += of_warp[warp];
  return total;
}

struct L2NormFunctor {
  float inv_scale;
  float sum = 0;
  bool finite = true;

  template <int n>
  __device__ void operator()(float (&value)[1][n], int64_t) {
    float term[n];
#pragma unroll
    for (int k = 0; k < n; ++k) {
      finite = finite && is_finite(value[0][k]);
      term[k] = l2norm_term(value[0][k], inv_scale);
    }
#pragma unroll
    for (int width = n / 2; width > 0; width /= 2) {
#pragma unroll
      for (int k = 0; k < width; ++k) term[k] += term[k + width];
    }
    sum += term[0];
  }
};

template <class Table>
__global__ void __launch_bounds__(kThreads)
    l2norm_partial_kernel(const __grid_constant__ Table table, int64_t share, FoundInf found_inf,
                          KernelFactor inv_scale, float* partial) {
  L2NormFunctor functor{inv_scale.get()};
  const int64_t block_end = (blockIdx.x + int64_t{1}) * share;
  for_each_segment(table, share, [&](int tensor, int64_t begin, int64_t size) {
    functor.sum = 0;
    for_each_element<1, 0>(table, tensor, begin, size, 1, functor);
    const float sum = block_sum(functor.sum);
    if (threadIdx.x != 0) return;
    const int64_t piece = int64_t{blockIdx.x} + tensor;
    partial[piece] = sum;
    const bool both_end = table.offset[tensor + 1] == block_end && tensor + 1 < table.count;
    if (both_end) partial[piece + 1] = 0;
  });
  if (!functor.finite) *found_inf.word = found_inf.raised;
}

// One warp per tensor; list 1 of the table is where the norms go.
template <class Table>
__global__ void __launch_bounds__(kThreads)
    l2norm_per_tensor_kernel(const __grid_constant__ Table table, int64_t share, const float* partial) {
  const int tensor = (blockIdx.x * kThreads + threadIdx.x) / kWarp;
  if (tensor >= table.count) return;
  const int64_t first = table.offset[tensor] / share + tensor, last = (table.offset[tensor + 1] - 1) / share + tensor;
  double sum = 0;
  for (int64_t piece = first + threadIdx.x % kWarp; piece <= last; piece += kWarp) sum += partial[piece];
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) *static_cast<float*>(table.pointer[1][tensor]) = static_cast<float>(sqrt(sum));
}

__global__ void __launch_bounds__(kThreads) l2norm_total_kernel(const float* partial, int64_t pieces, float* norm) {
  double sum = 0;
  for (int64_t piece = threadIdx.x; piece < pieces; piece += kThreads) sum += partial[piece];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *norm = static_cast<float>(sqrt(sum));
}

// Returns the number of partial sums.
template <int depth>
int64_t launch_partial(const Context& context, const TensorLists& lists, FoundInf found_inf, Factor inv_scale,
                       float* partial) {
  int64_t pieces = 0;
  for_each_table<depth>(lists, [&](const auto& table) {
    using Table = std::decay_t<decltype(table)>;
    constexpr auto kernel = &l2norm_partial_kernel<Table>;
    const Split grid = split(table.offset[table.count], resident_blocks<kernel>(context.device));
    AMPCTX_LAUNCH(kernel, grid.blocks, kThreads, context.stream, table, grid.share, found_inf, KernelFactor(inv_scale),
                  partial + pieces);
    if constexpr (depth == 2) {
      constexpr auto per_tensor_kernel = &l2norm_per_tensor_kernel<Table>;
      const int blocks = (table.count * kWarp + kThreads - 1) / kThreads;
      AMPCTX_LAUNCH(per_tensor_kernel, blocks, kThreads, context.stream, table, grid.share, partial + pieces);
    }
    pieces += grid.blocks + table.count - 1;
  });
  return pieces;
}

}  // namespace

int64_t l2norm_workspace(const TensorLists& lists) {
  const int64_t launches = lists.size() / SmallTable<2>::kCapacity + 1;
  return (lists.size() + launches * kMaxBlocks) * static_cast<int64_t>(sizeof(float));
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
