// How threads load and store elements of a list: eight at a time as they lie in memory, or single ones; and what
// becomes of the 16-bit types in registers.
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

// Eight elements of a list as they lie in memory, two to a word where they have 16 bits. Loaded for all lists before
// the first is converted: a conversion waits for its load, and the loads of the lists behind it would wait too.
struct Raw {
  uint32_t word[kVector];
};

// Where eight elements of a thread are in their tensor: two fours, one behind the other or apart.
struct Places {
  int64_t low, high;

  __device__ __forceinline__ bool are_adjacent() const { return high == low + kVector / 2; }
  __device__ __forceinline__ int64_t of(int k) const { return k < kVector / 2 ? low + k : high + (k - kVector / 2); }
};

// Vector accesses are spelled out: next to accesses of single elements at the same place, nvcc takes them apart or
// makes one of both. `first`: of the words in `raw`.
template <int words, int first>
__device__ __forceinline__ void load_words(const void* base, int64_t byte, Raw& raw) {
  uint32_t* const word = raw.word + first;
  const char* const from = static_cast<const char*>(base) + byte;
#ifdef __CUDA_ARCH__
  const size_t address = __cvta_generic_to_global(from);
  if constexpr (words == 4) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(address));
  } else {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(address));
  }
#else
  memcpy(word, from, words * sizeof(uint32_t));
#endif
}

template <int words, int first>
__device__ __forceinline__ void store_words(void* base, int64_t byte, const Raw& raw) {
  const uint32_t* const word = raw.word + first;
  char* const to = static_cast<char*>(base) + byte;
#ifdef __CUDA_ARCH__
  const size_t address = __cvta_generic_to_global(to);
  if constexpr (words == 4) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(word[0]), "r"(word[1]), "r"(word[2]),
                 "r"(word[3])
                 : "memory");
  } else {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(word[0]), "r"(word[1]) : "memory");
  }
#else
  memcpy(to, word, words * sizeof(uint32_t));
#endif
}

__device__ __forceinline__ void load_vector(const void* base, DType dtype, bool is_aligned, const Places& places,
                                            Raw& raw) {
  if (dtype == DType::f32) {
    if (is_aligned) {
      load_words<4, 0>(base, places.low * 4, raw);
      load_words<4, 4>(base, places.high * 4, raw);
    } else {
#pragma unroll
      for (int k = 0; k < kVector; ++k) raw.word[k] = static_cast<const uint32_t*>(base)[places.of(k)];
    }
  } else if (!is_aligned) {
    const auto* const words = static_cast<const uint16_t*>(base);
#pragma unroll
    for (int k = 0; k < kVector; k += 2) {
      raw.word[k / 2] = words[places.of(k)] | static_cast<uint32_t>(words[places.of(k + 1)]) << 16;
    }
  } else if (places.are_adjacent()) {
    load_words<4, 0>(base, places.low * 2, raw);
  } else {
    load_words<2, 0>(base, places.low * 2, raw);
    load_words<2, 2>(base, places.high * 2, raw);
  }
}

__device__ __forceinline__ void store_vector(void* base, DType dtype, bool is_aligned, const Places& places,
                                             const Raw& raw) {
  if (dtype == DType::f32) {
    if (is_aligned) {
      store_words<4, 0>(base, places.low * 4, raw);
      store_words<4, 4>(base, places.high * 4, raw);
    } else {
#pragma unroll
      for (int k = 0; k < kVector; ++k) static_cast<uint32_t*>(base)[places.of(k)] = raw.word[k];
    }
  } else if (!is_aligned) {
    auto* const words = static_cast<uint16_t*>(base);
#pragma unroll
    for (int k = 0; k < kVector; ++k) words[places.of(k)] = static_cast<uint16_t>(raw.word[k / 2] >> k % 2 * 16);
  } else if (places.are_adjacent()) {
    store_words<4, 0>(base, places.low * 2, raw);
  } else {
    store_words<2, 0>(base, places.low * 2, raw);
    store_words<2, 2>(base, places.high * 2, raw);
  }
}

// The elements from `first` on.
template <int n>
__device__ __forceinline__ void from_raw(DType dtype, const Raw& raw, int first, float (&value)[n]) {
  if (dtype == DType::f32) {
#pragma unroll
    for (int k = 0; k < n; ++k) value[k] = float_of(raw.word[first + k]);
    return;
  }
  uint16_t words[n];
#pragma unroll
  for (int k = 0; k < n; ++k) words[k] = static_cast<uint16_t>(raw.word[(first + k) / 2] >> k % 2 * 16);
  from_words(dtype, words, value);
}

template <int n>
__device__ __forceinline__ void to_raw(DType dtype, const float (&value)[n], int first, Raw& raw) {
  if (dtype == DType::f32) {
#pragma unroll
    for (int k = 0; k < n; ++k) raw.word[first + k] = bits_of(value[k]);
    return;
  }
  uint16_t words[n];
  to_words(dtype, value, words);
#pragma unroll
  for (int k = 0; k < n; k += 2) raw.word[(first + k) / 2] = words[k] | static_cast<uint32_t>(words[k + 1]) << 16;
}

// What memory of that type keeps of the values.
template <int n>
__device__ __forceinline__ void round_as_stored(DType dtype, float (&value)[n]) {
  if (dtype == DType::f32) return;
  uint16_t words[n];
  to_words(dtype, value, words);
  from_words(dtype, words, value);
}

}  // namespace ampctx::cuda
