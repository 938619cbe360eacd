// Runs a functor over the elements of one segment, eight at a time with 16-byte accesses, single ones at both ends.
//
// Types are switched on at run time: the branch is the same for all threads and taken once per eight elements, and one
// kernel serves all combinations. The ends are chosen so that the first 16-bit list is aligned between them (the first
// list where all are fp32); a list whose alignment differs is accessed element by element.
#pragma once

#include "../functors/convert.h"
#include "multi_tensor_apply.cuh"

namespace ampctx::cuda {

constexpr int64_t kAccessBytes = 16;

__device__ inline float load_element(const void* base, DType dtype, int64_t i) {
  if (dtype == DType::f32) return static_cast<const float*>(base)[i];
  const uint16_t bits = static_cast<const uint16_t*>(base)[i];
  return dtype == DType::f16 ? half_to_float(bits) : bfloat16_to_float(bits);
}

__device__ inline void store_element(void* base, DType dtype, int64_t i, float value) {
  if (dtype == DType::f32) {
    static_cast<float*>(base)[i] = value;
  } else {
    static_cast<uint16_t*>(base)[i] = dtype == DType::f16 ? float_to_half(value) : float_to_bfloat16(value);
  }
}

struct alignas(kAccessBytes) Floats {
  float at[4];
};
struct alignas(kAccessBytes) Words {
  uint16_t at[8];
};

__device__ inline void load_vector(const void* base, DType dtype, int64_t i, float (&value)[kVector]) {
  if (dtype == DType::f32) {
    const Floats* from = reinterpret_cast<const Floats*>(static_cast<const float*>(base) + i);
    const Floats low = from[0], high = from[1];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      value[k] = low.at[k];
      value[k + 4] = high.at[k];
    }
    return;
  }
  const Words words = *reinterpret_cast<const Words*>(static_cast<const uint16_t*>(base) + i);
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    value[k] = dtype == DType::f16 ? half_to_float(words.at[k]) : bfloat16_to_float(words.at[k]);
  }
}

__device__ inline void store_vector(void* base, DType dtype, int64_t i, const float (&value)[kVector]) {
  if (dtype == DType::f32) {
    Floats* to = reinterpret_cast<Floats*>(static_cast<float*>(base) + i);
    to[0] = Floats{{value[0], value[1], value[2], value[3]}};
    to[1] = Floats{{value[4], value[5], value[6], value[7]}};
    return;
  }
  Words words;
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    words.at[k] = dtype == DType::f16 ? float_to_half(value[k]) : float_to_bfloat16(value[k]);
  }
  *reinterpret_cast<Words*>(static_cast<uint16_t*>(base) + i) = words;
}

// Elements from `address` to the next 16-byte boundary.
__device__ inline int64_t to_boundary(const void* address, DType dtype) {
  const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) % kAccessBytes);
  return (kAccessBytes - past) % kAccessBytes / element_size(dtype);
}

// functor(v) with v[list][k], k < 1 or kVector: reads the first `reads` lists before, stores the last `writes` lists
// after.
template <int reads, int writes, class Table, class Functor>
__device__ inline void for_each_element(const Table& table, int tensor, int64_t begin, int64_t size, Functor& functor) {
  constexpr int depth = Table::kDepth, first_written = depth - writes;
  constexpr int used = writes ? depth : reads;
  void* base[used];
#pragma unroll
  for (int list = 0; list < used; ++list) {
    base[list] = static_cast<char*>(table.pointer[list][tensor]) + begin * element_size(table.dtype[list]);
  }
  int64_t head = to_boundary(base[0], table.dtype[0]);
#pragma unroll
  for (int list = used - 1; list >= 0; --list) {
    if (element_size(table.dtype[list]) == 2) head = to_boundary(base[list], table.dtype[list]);
  }
  head = head < size ? head : size;
  const int64_t vectors = (size - head) / kVector, tail = head + vectors * kVector;
  bool aligned[used];
#pragma unroll
  for (int list = 0; list < used; ++list) {
    const char* start = static_cast<const char*>(base[list]) + head * element_size(table.dtype[list]);
    aligned[list] = reinterpret_cast<uintptr_t>(start) % kAccessBytes == 0;
  }

  for (int64_t v = threadIdx.x; v < vectors; v += kThreads) {
    const int64_t at = head + v * kVector;
    float value[used][kVector];
#pragma unroll
    for (int list = 0; list < reads; ++list) {
      if (aligned[list]) {
        load_vector(base[list], table.dtype[list], at, value[list]);
      } else {
#pragma unroll
        for (int k = 0; k < kVector; ++k) value[list][k] = load_element(base[list], table.dtype[list], at + k);
      }
    }
    functor(value);
#pragma unroll
    for (int list = first_written; list < depth; ++list) {
      if (aligned[list]) {
        store_vector(base[list], table.dtype[list], at, value[list]);
      } else {
#pragma unroll
        for (int k = 0; k < kVector; ++k) store_element(base[list], table.dtype[list], at + k, value[list][k]);
      }
    }
  }
  for (int64_t i = threadIdx.x; i < head + size - tail; i += kThreads) {
    const int64_t at = i < head ? i : tail + i - head;
    float value[used][1];
#pragma unroll
    for (int list = 0; list < reads; ++list) value[list][0] = load_element(base[list], table.dtype[list], at);
    functor(value);
#pragma unroll
    for (int list = first_written; list < depth; ++list) {
      store_element(base[list], table.dtype[list], at, value[list][0]);
    }
  }
}

}  // namespace ampctx::cuda
