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

template <DType dtype>
__device__ __forceinline__ float from_word(uint16_t word) {
  if (dtype == DType::f16) return half_to_float(word);
  if (dtype == DType::bf16) return bfloat16_to_float(word);
  return static_cast<int16_t>(word);
}

template <DType dtype>
__device__ __forceinline__ uint16_t to_word(float value) {
  if (dtype == DType::f16) return float_to_half(value);
  if (dtype == DType::bf16) return float_to_bfloat16(value);
  return static_cast<uint16_t>(static_cast<int32_t>(value));
}

template <DType dtype, int n>
__device__ __forceinline__ void from_words(const uint16_t (&words)[n], float (&value)[n]) {
#pragma unroll
  for (int k = 0; k < n; ++k) value[k] = from_word<dtype>(words[k]);
}

template <DType dtype, int n>
__device__ __forceinline__ void to_words(const float (&value)[n], uint16_t (&words)[n]) {
#pragma unroll
  for (int k = 0; k < n; ++k) words[k] = to_word<dtype>(value[k]);
}

// The 16-bit types, told apart once for n elements.
template <int n>
__device__ __forceinline__ void from_words(DType dtype, const uint16_t (&words)[n], float (&value)[n]) {
  if (dtype == DType::f16) return from_words<DType::f16>(words, value);
  if (dtype == DType::bf16) return from_words<DType::bf16>(words, value);
  from_words<DType::i16>(words, value);
}

template <int n>
__device__ __forceinline__ void to_words(DType dtype, const float (&value)[n], uint16_t (&words)[n]) {
  if (dtype == DType::f16) return to_words<DType::f16>(value, words);
  if (dtype == DType::bf16) return to_words<DType::bf16>(value, words);
  to_words<DType::i16>(value, words);
}

__device__ inline float load_element(const void* base, DType dtype, int64_t i) {
  if (dtype == DType::f32) return static_cast<const float*>(base)[i];
  const uint16_t word[1] = {static_cast<const uint16_t*>(base)[i]};
  float value[1];
  from_words(dtype, word, value);
  return value[0];
}

__device__ inline void store_element(void* base, DType dtype, int64_t i, float value) {
  if (dtype == DType::f32) {
    static_cast<float*>(base)[i] = value;
    return;
  }
  uint16_t word[1];
  to_words(dtype, {value}, word);
  static_cast<uint16_t*>(base)[i] = word[0];
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
  from_words(dtype, words.at, value);
}

__device__ inline void store_vector(void* base, DType dtype, int64_t i, const float (&value)[kVector]) {
  if (dtype == DType::f32) {
    Floats* to = reinterpret_cast<Floats*>(static_cast<float*>(base) + i);
    to[0] = Floats{{value[0], value[1], value[2], value[3]}};
    to[1] = Floats{{value[4], value[5], value[6], value[7]}};
    return;
  }
  Words words;
  to_words(dtype, value, words.at);
  *reinterpret_cast<Words*>(static_cast<uint16_t*>(base) + i) = words;
}

// Elements from `address` to the next 16-byte boundary.
__device__ inline int64_t to_boundary(const void* address, DType dtype) {
  const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) % kAccessBytes);
  return (kAccessBytes - past) % kAccessBytes / element_size(dtype);
}

// What memory of that type keeps of the values.
template <int n>
__device__ __forceinline__ void round_as_stored(DType dtype, float (&value)[n]) {
  if (dtype == DType::f32) return;
  uint16_t words[n];
  to_words(dtype, value, words);
  from_words(dtype, words, value);
}

// Sets of lists of a table, a bit for each.
__host__ __device__ constexpr unsigned one_of_lists(int list) { return 1u << list; }
__host__ __device__ constexpr unsigned first_lists(int count) { return (1u << count) - 1; }
__host__ __device__ constexpr bool contains(unsigned lists, int list) { return (lists >> list & 1) != 0; }

// functor(v, place) with v[list][k], k < 1 or kVector, element `place + k` of the tensor, in the first `walked` lists
// of the table: reads those in the set `read` before, stores those in `written` after.
template <int walked, unsigned written, class Table, class Functor>
__device__ __forceinline__ void for_each_element(const Table& table, int tensor, int64_t begin, int64_t size,
                                                 unsigned read, Functor& functor) {
  void* base[walked];
#pragma unroll
  for (int list = 0; list < walked; ++list) {
    base[list] = static_cast<char*>(table.pointer[list][tensor]) + begin * element_size(table.dtype[list]);
  }
  int64_t head = to_boundary(base[0], table.dtype[0]);
#pragma unroll
  for (int list = walked - 1; list >= 0; --list) {
    const bool is_used = contains(read | written, list);
    if (is_used && element_size(table.dtype[list]) == 2) head = to_boundary(base[list], table.dtype[list]);
  }
  head = head < size ? head : size;
  const int64_t vectors = (size - head) / kVector, tail = head + vectors * kVector;
  bool aligned[walked];
#pragma unroll
  for (int list = 0; list < walked; ++list) {
    const char* start = static_cast<const char*>(base[list]) + head * element_size(table.dtype[list]);
    aligned[list] = reinterpret_cast<uintptr_t>(start) % kAccessBytes == 0;
  }

  for (int64_t v = threadIdx.x; v < vectors; v += kThreads) {
    const int64_t at = head + v * kVector;
    float value[walked][kVector];
#pragma unroll
    for (int list = 0; list < walked; ++list) {
      if (!contains(read, list)) continue;
      if (aligned[list]) {
        load_vector(base[list], table.dtype[list], at, value[list]);
      } else {
#pragma unroll
        for (int k = 0; k < kVector; ++k) value[list][k] = load_element(base[list], table.dtype[list], at + k);
      }
    }
    functor(value, begin + at);
#pragma unroll
    for (int list = 0; list < walked; ++list) {
      if (!contains(written, list)) continue;
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
    float value[walked][1];
#pragma unroll
    for (int list = 0; list < walked; ++list) {
      if (contains(read, list)) value[list][0] = load_element(base[list], table.dtype[list], at);
    }
    functor(value, begin + at);
#pragma unroll
    for (int list = 0; list < walked; ++list) {
      if (contains(written, list)) store_element(base[list], table.dtype[list], at, value[list][0]);
    }
  }
}

}  // namespace ampctx::cuda
