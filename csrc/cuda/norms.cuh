// Norms of tensors on CUDA: what multi_tensor_l2norm and the layer-wise optimizers share.
//
// A kernel that walks tensors leaves one fp32 partial value for each piece of a tensor that falls into the share of a
// block (leave_piece). A step along the line of elements changes the block or the tensor, so block + tensor numbers the
// pieces; where both change at once a number is left out, and its place gets 0. A second kernel joins the pieces of a
// tensor in fp64, one warp for each (norm_of_pieces). The order is fixed and there are no float atomics: two runs on
// one device agree to the last bit. (Longer lists than a table holds are cut in other places while a graph is
// captured.)
#pragma once

#include "../functors/elementwise.h"
#include "vectorized.cuh"

namespace ampctx::cuda {

// A norm is what a thread makes of n elements, how values are joined, starting from 0, and what becomes of the last.
struct L2Norm {
  template <int n>
  static __device__ __forceinline__ float of(const float (&x)[n], float inv_scale) {
    float term[n];
#pragma unroll
    for (int k = 0; k < n; ++k) term[k] = l2norm_term(x[k], inv_scale);
#pragma unroll
    for (int width = n / 2; width > 0; width /= 2) {
#pragma unroll
      for (int k = 0; k < width; ++k) term[k] += term[k + width];
    }
    return term[0];
  }
  template <class T>
  static __device__ __forceinline__ T join(T a, T b) {
    return a + b;
  }
  static __device__ float finish(double total) { return static_cast<float>(sqrt(total)); }
};

// max|x|, nan where there is one.
struct MaxNorm {
  template <int n>
  static __device__ __forceinline__ float of(const float (&x)[n], float inv_scale) {
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const uint32_t bits = magnitude_bits(x[k] * inv_scale);
      largest = bits > largest ? bits : largest;
    }
    return float_of(largest);
  }
  template <class T>
  static __device__ __forceinline__ T join(T a, T b) {
    return maximum(a, b);
  }
  static __device__ float finish(double total) { return static_cast<float>(total); }
};

template <class Norm, class T>
__device__ T join_warp(T value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = Norm::join(value, __shfl_down_sync(kAllLanes, value, distance));
  }
  return value;  // in lane 0
}

template <class Norm, class T>
__device__ T join_block(T value) {
  __shared__ T of_warp[kThreads / kWarp];
  value = join_warp<Norm>(value);
  __syncthreads();  // those of an earlier call may still be read
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  T total = 0;
  for (int warp = 0; warp < kThreads / kWarp; ++warp) total = Norm::join(total, of_warp[warp]);
  return total;
}

// Called by all threads for each segment of for_each_segment: `value` of a thread is what it made of the elements for
// each of `count` norms. partial[count * piece + norm].
template <class Norm, int count, class Table>
__device__ void leave_piece(const Table& table, int64_t share, int tensor, const float (&value)[count],
                            float* partial) {
  float joined[count];
#pragma unroll
  for (int i = 0; i < count; ++i) joined[i] = join_block<Norm>(value[i]);
  if (threadIdx.x != 0) return;
  float* const piece = partial + count * (int64_t{blockIdx.x} + tensor);
  const int64_t block_end = (blockIdx.x + int64_t{1}) * share;
  const bool both_end = table.offset[tensor + 1] == block_end && tensor + 1 < table.count;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    piece[i] = joined[i];
    if (both_end) piece[count + i] = 0;
  }
}

// Called by whole warps: the norm of a tensor, in lane 0.
template <class Norm, int count, class Table>
__device__ float norm_of_pieces(const Table& table, int64_t share, int tensor, const float* partial) {
  const int64_t first = table.offset[tensor] / share + tensor, last = (table.offset[tensor + 1] - 1) / share + tensor;
  double total = 0;
  for (int64_t piece = first + threadIdx.x % kWarp; piece <= last; piece += kWarp) {
    total = Norm::join(total, static_cast<double>(partial[count * piece]));
  }
  return Norm::finish(join_warp<Norm>(total));
}

// --- norms of each tensor between two walks of a layer-wise optimizer; nothing where found_inf is set ---

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
  const auto blocks = static_cast<int>((int64_t{table.count} * kWarp + kThreads - 1) / kThreads);
  AMPCTX_LAUNCH(kernel, blocks, kThreads, context.stream, table, share, found_inf, partial, norms);
}

// Leaves the pieces of the first `count` lists: of gradients times a factor, and of weights.
template <class Norm, int count, class Table>
__global__ void __launch_bounds__(kThreads)
    list_norms_kernel(const __grid_constant__ Table table, int64_t share, FoundInf found_inf,
                      KernelClippedFactor factor, float* partial) {
  if (found_inf.is_set()) return;
  const float inv_scale = factor.get();
  for_each_segment(table, share, [&](int tensor, int64_t begin, int64_t size) {
    float norm[count] = {};
    for_each_element<count, 0>(table, tensor, begin, size, first_lists(count), [&](auto& value, const Places&) {
#pragma unroll
      for (int i = 0; i < count; ++i) norm[i] = Norm::join(norm[i], Norm::of(value[i], i == 0 ? inv_scale : 1.0f));
    });
    leave_piece<Norm>(table, share, tensor, norm, partial);
  });
}

template <class Norm, int count, class Table>
void launch_list_norms(const Context& context, const Table& table, const OptimizerCall& call, float* partial,
                       float* norms) {
  constexpr auto kernel = &list_norms_kernel<Norm, count, Table>;
  const Split grid = launch_over<kernel>(context, table, call.found_inf, KernelClippedFactor(call.inv_scale), partial);
  launch_layer_norms<Norm, count>(context, table, grid.share, call.found_inf, partial, norms);
}

}  // namespace ampctx::cuda
