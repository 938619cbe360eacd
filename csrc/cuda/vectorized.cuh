// Runs a functor over the elements of one segment, eight at a time with 16-byte accesses, single ones at both ends.
//
// Types are switched on at run time: the branch is the same for all threads and taken once per eight elements, and one
// kernel serves all combinations. A tensor that is not aligned to 16 bytes is accessed element by element.
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

// Calls function(k, type) for n elements of a 16-bit type; the types are told apart once.
template <int n, class Function>
__device__ __forceinline__ void for_each_word(DType dtype, const Function& function) {
  const auto all = [&](auto type) {
#pragma unroll
    for (int k = 0; k < n; ++k) function(k, type);
  };
  if (dtype == DType::f16) return all(std::integral_constant<DType, DType::f16>{});
  if (dtype == DType::bf16) return all(std::integral_constant<DType, DType::bf16>{});
  all(std::integral_constant<DType, DType::i16>{});
}

template <int n>
__device__ __forceinline__ void from_words(DType dtype, const uint16_t (&words)[n], float (&value)[n]) {
  for_each_word<n>(dtype, [&](int k, auto type) { value[k] = from_word<type>(words[k]); });
}

template <int n>
__device__ __forceinline__ void to_words(DType dtype, const float (&value)[n], uint16_t (&words)[n]) {
  for_each_word<n>(dtype, [&](int k, auto type) { words[k] = to_word<type>(value[k]); });
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

// Eight elements of a list as they lie in memory, two to a word where they have 16 bits. All lists are loaded
// before the first is converted: a conversion waits for its own load, and would delay the loads behind it.
struct Raw {
  uint32_t word[kVector];
};

// Where eight elements of a thread are in their tensor: two fours, one behind the other or apart.
struct ElementIndices {
  int64_t low, high;

  static constexpr bool kMayBeCodes = false;  // lists of 8-bit codes among them

  static __host__ __device__ constexpr bool holds(int) { return true; }
  __device__ __forceinline__ bool are_adjacent() const { return high == low + kVector / 2; }
  __device__ __forceinline__ int64_t of(int k) const { return k < kVector / 2 ? low + k : high + (k - kVector / 2); }
};

// Vector accesses are spelled out: next to accesses of single elements at the same place, nvcc takes them apart or
// makes one of both. `first`: of the words in `raw`. Elements that a thread does not hold are 0.
struct Load {
  template <int words, int first>
  static __device__ __forceinline__ void wide(const void* base, int64_t byte, Raw& raw) {
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

  template <class Word, class Indices>
  static __device__ __forceinline__ void singly(const void* base, const Indices& indices, Raw& raw) {
    constexpr int each = sizeof(uint32_t) / sizeof(Word), bits = 8 * sizeof(Word);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const uint32_t word = indices.holds(k) ? static_cast<const Word*>(base)[indices.of(k)] : 0;
      raw.word[k / each] = k % each == 0 ? word : raw.word[k / each] | word << k % each * bits;
    }
  }
};

struct Store {
  template <int words, int first>
  static __device__ __forceinline__ void wide(void* base, int64_t byte, const Raw& raw) {
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

  template <class Word, class Indices>
  static __device__ __forceinline__ void singly(void* base, const Indices& indices, const Raw& raw) {
    constexpr int each = sizeof(uint32_t) / sizeof(Word), bits = 8 * sizeof(Word);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      if (indices.holds(k)) {
        static_cast<Word*>(base)[indices.of(k)] = static_cast<Word>(raw.word[k / each] >> k % each * bits);
      }
    }
  }
};

// Moves eight elements by Load or Store. `is_aligned`, for 16-byte accesses (8 of codes), and all elements are there.
template <class Move, class Indices, class Words>
__device__ __forceinline__ void move_vector(void* base, DType dtype, bool is_aligned, const Indices& indices,
                                            Words& raw) {
  if (Indices::kMayBeCodes && is_code(dtype)) {
    if (!is_aligned) return Move::template singly<uint8_t>(base, indices, raw);
    Move::template wide<2, 0>(base, indices.of(0), raw);
  } else if (dtype == DType::f32) {
    if (!is_aligned) return Move::template singly<uint32_t>(base, indices, raw);
    Move::template wide<4, 0>(base, indices.of(0) * 4, raw);
    Move::template wide<4, 4>(base, indices.of(kVector / 2) * 4, raw);
  } else if (!is_aligned) {
    Move::template singly<uint16_t>(base, indices, raw);
  } else if (indices.are_adjacent()) {
    Move::template wide<4, 0>(base, indices.of(0) * 2, raw);
  } else {
    Move::template wide<2, 0>(base, indices.of(0) * 2, raw);
    Move::template wide<2, 2>(base, indices.of(kVector / 2) * 2, raw);
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

// Sets of lists of a table, a bit for each.
__host__ __device__ constexpr unsigned one_of_lists(int list) { return 1u << list; }
__host__ __device__ constexpr unsigned first_lists(int count) { return (1u << count) - 1; }
__host__ __device__ constexpr bool contains(unsigned lists, int list) { return (lists >> list & 1) != 0; }

// The elements of vector `v` of `vectors`, which begin at `first`. Lanes stand side by side in memory: at a distance of
// 16 bytes, also where lists of 4 and 2 bytes an element go together. A warp's worth of vectors that is not full, and
// 16-bit lists alone, go eight by eight.
__host__ __device__ __forceinline__ ElementIndices vector_indices(int64_t first, int64_t v, int64_t vectors,
                                                                  bool has_f32) {
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
__device__ __forceinline__ void compute(const Table& table, unsigned read, const ElementIndices& indices,
                                        Raw (&raw)[walked], Functor& functor) {
#pragma unroll
  for (int first = 0; first < kVector; first += n) {
    float value[walked][n];
#pragma unroll
    for (int list = 0; list < walked; ++list) {
      if (contains(read, list)) from_raw(table.dtype[list], raw[list], first, value[list]);
    }
    functor(value, n == kVector ? indices : ElementIndices{indices.of(first), indices.of(first)});
#pragma unroll
    for (int list = 0; list < walked; ++list) {
      if (contains(written, list)) to_raw(table.dtype[list], value[list], first, raw[list]);
    }
  }
}

// How many elements of each list a functor is given.
template <class Values>
constexpr int kCount = std::extent_v<std::remove_reference_t<Values>, 1>;

// How many elements of each list are computed at a time: as many as there are registers for.
__host__ __device__ constexpr int elements_at_once(int walked) { return walked < 4 ? kVector : kVector / 2; }

// functor(v, indices) with v[list][k], k < 1 or `at_once`, element `indices.of(k)` of the tensor, in the first `walked`
// lists of the table: reads those in the set `read` before, stores those in `written` after.
//
// Vectors begin at multiples of eight elements from the tensor's start, whatever its address: which thread gets which
// elements, and so the order of a sum, depends on sizes and types alone.
template <int walked, unsigned written, int at_once = elements_at_once(walked), class Table, class Functor>
__device__ __forceinline__ void for_each_element(const Table& table, int tensor, int64_t begin, int64_t size,
                                                 unsigned read, Functor&& functor) {
  constexpr int unroll = walked <= 2 ? 2 : 1;  // more bytes under way where there is one list to read
  void* base[walked];
  bool aligned[walked], has_f32 = false;
#pragma unroll
  for (int list = 0; list < walked; ++list) {
    base[list] = table.pointer[list][tensor];
#ifdef __CUDA_ARCH__
    __builtin_assume(__isGlobal(base[list]));  // which takes registers otherwise: Adagrad would spill on sm_120
#endif
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
    functor(value, ElementIndices{at, at});
#pragma unroll
    for (int list = 0; list < walked; ++list) {
      if (contains(written, list)) store_element(base[list], table.dtype[list], at, value[list][0]);
    }
  }

  for (int64_t v = threadIdx.x; v < vectors; v += unroll * kThreads) {
    Raw raw[unroll][walked];
    ElementIndices indices[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      if (u > 0 && v + u * kThreads >= vectors) continue;
      indices[u] = vector_indices(first, v + u * kThreads, vectors, has_f32);
#pragma unroll
      for (int list = 0; list < walked; ++list) {
        if (contains(read, list))
          move_vector<Load>(base[list], table.dtype[list], aligned[list], indices[u], raw[u][list]);
      }
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      if (u > 0 && v + u * kThreads >= vectors) continue;
      compute<at_once, written>(table, read, indices[u], raw[u], functor);
#pragma unroll
      for (int list = 0; list < walked; ++list) {
        if (contains(written, list))
          move_vector<Store>(base[list], table.dtype[list], aligned[list], indices[u], raw[u][list]);
      }
    }
  }
}

}  // namespace ampctx::cuda
