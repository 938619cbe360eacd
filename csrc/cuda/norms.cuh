// Norms of tensors on CUDA: what multi_tensor_l2norm and the layer-wise optimizers share.
//
// A kernel that walks tensors stores one fp32 partial sum for each piece of a tensor that falls into the share of a
// block (store_partial_sum). Piece (block b, tensor t) is stored at index b + t: unique, as along the line either b or
// t grows. The last block of a tensor, as a ticket tells, adds up its pieces in fp64 (finish_norms). The order is fixed
// and there are no float atomics: two runs on one device agree to the last bit. (Lists of several tables are cut in
// other places by older drivers.)
#pragma once

#include "../functors/elementwise.h"
#include "tickets.cuh"
#include "vectorized.cuh"

namespace ampctx::cuda {

// What a thread adds to a sum of squares for n elements.
template <int n>
__device__ __forceinline__ float sum_of_squares(const float (&x)[n], float inv_scale) {
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

__device__ inline float norm_of_sum(double total) { return static_cast<float>(sqrt(total)); }

template <class T>
__device__ T join_warp(T value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_down_sync(kAllLanes, value, distance);
  }
  return value;  // in lane 0
}

template <class T>
__device__ T join_block(T value) {
  __shared__ T of_warp[kThreads / kWarp];
  value = join_warp(value);
  __syncthreads();  // those of an earlier call may still be read
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  T total = 0;
  for (int warp = 0; warp < kThreads / kWarp; ++warp) total += of_warp[warp];
  return total;
}

// Called by all threads for each segment of for_each_segment: `value` of a thread is what it made of the elements for
// each of `count` norms. pieces[count * piece + norm]. Calls store(tensor, norm, value) for the norms of a tensor that
// is in this block alone.
template <int count, class Table, class Store>
__device__ void store_partial_sum(const Table& table, int64_t share, int tensor, const float (&value)[count],
                                  float* pieces, const Store& store) {
  float joined[count];
#pragma unroll
  for (int i = 0; i < count; ++i) joined[i] = join_block(value[i]);
  if (threadIdx.x != 0) return;
  float* const piece = pieces + count * (int64_t{blockIdx.x} + tensor);
  const int64_t block_begin = blockIdx.x * share, block_end = block_begin + share;
  const bool is_whole = table.offset[tensor] >= block_begin && table.offset[tensor + 1] <= block_end;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    piece[i] = joined[i];
    if (is_whole) store(tensor, i, norm_of_sum(joined[i]));
  }
}

// Called by all threads of a block that has left its pieces: the norms of tensors that are in more than one block, by
// the last of these.
template <int count, class Table, class Store>
__device__ void finish_norms(const Table& table, int64_t share, const float* pieces, unsigned* tickets,
                             const Store& store) {
  if (threadIdx.x >= kWarp) return;
  const auto finish = [&](int tensor) {
    const int64_t first = table.offset[tensor] / share, last = (table.offset[tensor + 1] - 1) / share;
    if (first == last) return;
    int is_last = 0;
    if (threadIdx.x == 0) is_last = is_last_arrival_of_tensor(tickets, first, last);
    if (!__shfl_sync(kAllLanes, is_last, 0)) return;
    __syncwarp();  // lane 0 sees the pieces of other blocks, and then the others do
    for (int i = 0; i < count; ++i) {
      double total = 0;
      for (int64_t piece = first + tensor + threadIdx.x; piece <= last + tensor; piece += kWarp) {
        total += static_cast<double>(pieces[count * piece + i]);
      }
      total = join_warp(total);
      if (threadIdx.x == 0) store(tensor, i, norm_of_sum(total));
    }
  };
  // Only the first and the last tensor of a block are in others, too.
  const int64_t begin = blockIdx.x * share, end = begin + share, total = table.elements();
  const int first = find_tensor(table, begin), last = find_tensor(table, (end < total ? end : total) - 1);
  finish(first);
  if (last != first) finish(last);
}

}  // namespace ampctx::cuda
