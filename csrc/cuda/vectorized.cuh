// Runs a functor over the elements of one segment, eight at a time with 16-byte accesses, single ones at both ends.
//
// Types are switched on at run time: the branch is the same for all threads and taken once per eight elements, and one
// kernel serves all combinations. A tensor that is not aligned to 16 bytes is accessed element by element.
#pragma once

#include "access.cuh"

namespace ampctx::cuda {

// Sets of lists of a table, a bit for each.
__host__ __device__ constexpr unsigned one_of_lists(int list) { return 1u << list; }
__host__ __device__ constexpr unsigned first_lists(int count) { return (1u << count) - 1; }
__host__ __device__ constexpr bool contains(unsigned lists, int list) { return (lists >> list & 1) != 0; }

// The pointer of a tensor, which the compiler is told leads to global memory: a table on the device does not say so.
template <class Table>
__device__ __forceinline__ void* tensor_data(const Table& table, int list, int tensor) {
  void* const data = table.pointer[list][tensor];
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(data));
#endif
  return data;
}

// The elements of vector `v` of `vectors`, which begin at `first`. Lanes stand side by side in memory: at a distance of
// 16 bytes, also where lists of 4 and 2 bytes an element go together. A warp's worth of vectors that is not full, and
// 16-bit lists alone, go eight by eight.
__host__ __device__ __forceinline__ Places vector_places(int64_t first, int64_t v, int64_t vectors, bool has_f32) {
  const int lane = static_cast<int>(v % kWarp);  // a warp has 32 vectors in a row
  const int64_t of_warp = v - lane;
  if (has_f32 && of_warp + kWarp <= vectors) {
    const int64_t low = first + of_warp * kVector + lane * (kVector / 2);
    return {low, low + kWarp * (kVector / 2)};
  }
  const int64_t low = first + v * kVector;
  return {low, low + kVector / 2};
}

// The functor on a vector of each list, `n` elements at a time.
template <int n, unsigned written, int walked, class Table, class Functor>
__device__ __forceinline__ void compute(const Table& table, unsigned read, const Places& places, Raw (&raw)[walked],
                                        Functor& functor) {
#pragma unroll
  for (int first = 0; first < kVector; first += n) {
    float value[walked][n];
#pragma unroll
    for (int list = 0; list < walked; ++list) {
      if (contains(read, list)) from_raw(table.dtype[list], raw[list], first, value[list]);
    }
    functor(value, n == kVector ? places : Places{places.of(first), places.of(first)});
#pragma unroll
    for (int list = 0; list < walked; ++list) {
      if (contains(written, list)) to_raw(table.dtype[list], value[list], first, raw[list]);
    }
  }
}

// How many elements of each list are computed at a time: as many as there are registers for.
__host__ __device__ constexpr int elements_at_once(int walked) { return walked < 4 ? kVector : kVector / 2; }

// functor(v, places) with v[list][k], k < 1 or `at_once`, element `places.of(k)` of the tensor, in the first `walked`
// lists of the table: reads those in the set `read` before, stores those in `written` after.
//
// Vectors begin at multiples of eight elements from the tensor's start, whatever its address: which thread gets which
// elements, and so the order of a sum, depends on sizes and types alone.
template <int walked, unsigned written, int at_once = elements_at_once(walked), class Table, class Functor>
__device__ __forceinline__ void for_each_element(const Table& table, int tensor, int64_t begin, int64_t size,
                                                 unsigned read, Functor& functor) {
  constexpr int unroll = walked <= 2 ? 2 : 1;  // more bytes under way where there is one list to read
  void* base[walked];
  bool aligned[walked], has_f32 = false;
#pragma unroll
  for (int list = 0; list < walked; ++list) {
    base[list] = tensor_data(table, list, tensor);
    aligned[list] = reinterpret_cast<uintptr_t>(base[list]) % kAccessBytes == 0;
    has_f32 = has_f32 || (contains(read | written, list) && table.dtype[list] == DType::f32);
  }
  const int64_t end = begin + size, rounded = (begin + kVector - 1) / kVector * kVector;
  const int64_t first = rounded < end ? rounded : end;
  const int64_t vectors = (end - first) / kVector, last = first + vectors * kVector;

  // The ends first: what they need is then out of the way of the loop.
  const int64_t head = first - begin, ends = head + (end - last);  // fewer than a warp
  if (threadIdx.x < ends) {
    const int64_t at = threadIdx.x < head ? begin + threadIdx.x : last + (threadIdx.x - head);
    float value[walked][1];
#pragma unroll
    for (int list = 0; list < walked; ++list) {
      if (contains(read, list)) value[list][0] = load_element(base[list], table.dtype[list], at);
    }
    functor(value, Places{at, at});
#pragma unroll
    for (int list = 0; list < walked; ++list) {
      if (contains(written, list)) store_element(base[list], table.dtype[list], at, value[list][0]);
    }
  }

  for (int64_t v = threadIdx.x; v < vectors; v += unroll * kThreads) {
    Raw raw[unroll][walked];
    Places places[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      if (u > 0 && v + u * kThreads >= vectors) continue;
      places[u] = vector_places(first, v + u * kThreads, vectors, has_f32);
#pragma unroll
      for (int list = 0; list < walked; ++list) {
        if (contains(read, list)) load_vector(base[list], table.dtype[list], aligned[list], places[u], raw[u][list]);
      }
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      if (u > 0 && v + u * kThreads >= vectors) continue;
      compute<at_once, written>(table, read, places[u], raw[u], functor);
#pragma unroll
      for (int list = 0; list < walked; ++list) {
        if (contains(written, list))
          store_vector(base[list], table.dtype[list], aligned[list], places[u], raw[u][list]);
      }
    }
  }
}

}  // namespace ampctx::cuda
