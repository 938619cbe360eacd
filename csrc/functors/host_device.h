// What makes one function serve a g++ and an nvcc translation unit.
//
// Functors are static, so that each object file keeps its own copy: cpu/simd.cpp is compiled once per instruction set,
// and a shared inline function would let the linker hand AVX-512 code to a machine without it.
#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define AMPCTX_FN static __host__ __device__ __forceinline__
#else
#define AMPCTX_FN static inline __attribute__((always_inline))
#endif

namespace ampctx {

AMPCTX_FN uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

AMPCTX_FN uint64_t bits_of(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

AMPCTX_FN float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace ampctx
