// Converts blocks of elements between memory types and the type of the arithmetic. Everything is static, because
// setup.py compiles the files that include this once per instruction set.
#pragma once

#include "../functors/convert.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace ampctx::cpu {
namespace {

// Memory types. fp64 goes to 16 bits through fp32, as in torch's copy_.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Remainder {
  int16_t value;
};

AMPCTX_FN float widen(Half value) { return half_to_float(value.bits); }
AMPCTX_FN float widen(BFloat16 value) { return bfloat16_to_float(value.bits); }
AMPCTX_FN float widen(Remainder value) { return value.value; }
AMPCTX_FN float widen(float value) { return value; }
AMPCTX_FN double widen(double value) { return value; }
AMPCTX_FN void narrow(float value, Half& to) { to.bits = float_to_half(value); }
AMPCTX_FN void narrow(float value, BFloat16& to) { to.bits = float_to_bfloat16(value); }
AMPCTX_FN void narrow(float value, Remainder& to) { to.value = static_cast<int16_t>(static_cast<int32_t>(value)); }
AMPCTX_FN void narrow(float value, float& to) { to = value; }

template <class Memory, class T>
void load(const void* from, void* to, int64_t n) {
  const Memory* in = static_cast<const Memory*>(from);
  T* out = static_cast<T*>(to);
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(widen(in[i]));
}

template <class Memory, class T>
void store(const void* from, void* to, int64_t n) {
  const T* in = static_cast<const T*>(from);
  Memory* out = static_cast<Memory*>(to);
  for (int64_t i = 0; i < n; ++i) narrow(static_cast<float>(in[i]), out[i]);
}

#ifdef __F16C__
// Stores whole vectors: a vector that is stored by halves and read at once stalls.
template <>
void load<Half, float>(const void* from, void* to, int64_t n) {
  const Half* in = static_cast<const Half*>(from);
  float* out = static_cast<float*>(to);
  int64_t i = 0;
#ifdef __AVX512F__
  for (const int64_t end = n / 16 * 16; i < end; i += 16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    _mm512_storeu_ps(out + i, _mm512_maskz_cvtph_ps(0xffff, halves));
  }
#endif
  for (const int64_t end = n / 8 * 8; i < end; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
  for (; i < n; ++i) out[i] = widen(in[i]);
}

template <>
void store<Half, float>(const void* from, void* to, int64_t n) {
  const float* in = static_cast<const float*>(from);
  Half* out = static_cast<Half*>(to);
  constexpr int rounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  int64_t i = 0;
#ifdef __AVX512F__
  for (const int64_t end = n / 16 * 16; i < end; i += 16) {
    const __m256i halves = _mm512_maskz_cvtps_ph(0xffff, _mm512_loadu_ps(in + i), rounding);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), halves);
  }
#endif
  for (const int64_t end = n / 8 * 8; i < end; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), rounding);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), halves);
  }
  for (; i < n; ++i) narrow(in[i], out[i]);
}
#endif

// Calls function(i, size) for strips of n elements. Strips are short, so that the CPU converts one while it computes
// the one before.
constexpr int64_t kStrip = 64;

template <class Function>
inline void for_each_strip(int64_t n, const Function& function) {
  const int64_t whole = n / kStrip * kStrip;
  for (int64_t i = 0; i < whole; i += kStrip) function(i, kStrip);
  if (whole < n) function(whole, n - whole);
}

}  // namespace
}  // namespace ampctx::cpu
