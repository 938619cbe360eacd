// The CPU's inner loops over a block of elements, compiled once per instruction set and chosen at run time.
#pragma once

#include <stdint.h>

#include "../dispatch.h"

namespace ampctx::cpu {

template <class T>
struct Arithmetic {
  // Each returns whether all checked inputs were finite. `out` may be an input.
  bool (*scale)(const T* x, T* out, int64_t n, T scale);
  bool (*axpby)(const T* x, const T* y, T* out, int64_t n, T a, T b, int arg_to_check);
  bool (*l2norm)(const T* x, int64_t n, T inv_scale, double* sum_of_squares);
};

using Convert = void (*)(const void* from, void* to, int64_t n);

// Every instruction set gives the same bits: a fixed number of accumulators, no contraction to FMA.
struct Simd {
  const char* name;
  Arithmetic<float> f32;
  Arithmetic<double> f64;
  // From the type in memory to the type of the arithmetic, and back; null where they are the same. [arithmetic][memory]
  Convert load[2][kDTypes];
  Convert store[2][kDTypes];
};

// The best for this machine, capped by the environment variable AMPCTX_SIMD (baseline, avx2 or avx512).
const Simd& simd();

// For the build information: the name of simd(), and all that are built in as JSON strings.
const char* simd_used();
const char* simd_built();

}  // namespace ampctx::cpu
