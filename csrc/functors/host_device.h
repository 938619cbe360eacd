// What makes one function serve a g++ and an nvcc translation unit.
//
// Functors are static, so that each object file keeps its own copy: cpu/simd.cpp is compiled once per instruction set,
// and a shared inline function would let the linker hand AVX-512 code to a machine without it.
#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define AMPCTX_FN static __host__ __device__ __forceinline__
#define AMPCTX_MEMBER __host__ __device__
#else
#define AMPCTX_FN static inline __attribute__((always_inline))
#define AMPCTX_MEMBER
#endif

namespace ampctx {

template <class To, class From>
AMPCTX_FN To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

AMPCTX_FN uint32_t bits_of(float value) { return bits_as<uint32_t>(value); }
AMPCTX_FN uint64_t bits_of(double value) { return bits_as<uint64_t>(value); }
AMPCTX_FN float float_of(uint32_t bits) { return bits_as<float>(bits); }

// Rounded correctly. Not those of <math.h>, whose C++ overloads have external linkage.
#ifdef __CUDA_ARCH__
AMPCTX_FN float square_root(float x) { return sqrtf(x); }
AMPCTX_FN double square_root(double x) { return sqrt(x); }
AMPCTX_FN double power(double x, double y) { return pow(x, y); }
#else
AMPCTX_FN float square_root(float x) { return __builtin_sqrtf(x); }
AMPCTX_FN double square_root(double x) { return __builtin_sqrt(x); }
AMPCTX_FN double power(double x, double y) { return __builtin_pow(x, y); }
#endif

// nan where one of them is.
template <class T>
AMPCTX_FN T maximum(T a, T b) {
  return a < b || b != b ? b : a;
}

// The finite check behind found_inf: inf and nan are the values whose exponent bits are all ones. A test of the bits,
// because comparisons with inf do not vectorize as well and flags such as -ffast-math cannot break it.
template <class T>
constexpr uint32_t kExponent = 0xffu << 23;
template <>
constexpr uint64_t kExponent<double> = 0x7ffull << 52;

template <class T>
AMPCTX_FN bool is_finite(T value) {
  return (bits_of(value) & kExponent<T>) != kExponent<T>;
}

// The bits order magnitudes as the numbers do, with inf above them all and nan above inf.
AMPCTX_FN uint32_t magnitude_bits(float x) { return bits_of(x) & 0x7fffffffu; }

}  // namespace ampctx
