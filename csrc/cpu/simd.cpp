// The CPU's inner loops of the ops that are no optimizers. setup.py compiles this file once per instruction set.
#include "simd.h"
#include "../functors/axpby.h"
#include "../functors/convert.h"
#include "../functors/l2norm.h"
#include "../functors/scale.h"
#include "simd_table.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace ampctx::cpu {
namespace {

constexpr int kLanes = 16;

// A mask as wide as a value: loops over values and masks of one width vectorize.
template <class T>
struct Bits;
template <>
struct Bits<float> {
  using type = uint32_t;
};
template <>
struct Bits<double> {
  using type = uint64_t;
};

template <class T>
bool scale(const T* x, T* out, int64_t n, T factor) {
  typename Bits<T>::type nonfinite = 0;
  AMPCTX_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    nonfinite |= !is_finite(x[i]);
    out[i] = scale_element(x[i], factor);
  }
  return nonfinite == 0;
}

template <int arg_to_check, class T>
bool axpby_checking(const T* x, const T* y, T* out, int64_t n, T a, T b) {
  typename Bits<T>::type nonfinite = 0;
  AMPCTX_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    nonfinite |= !axpby_is_finite(x[i], y[i], arg_to_check);
    out[i] = axpby_element(x[i], y[i], a, b);
  }
  return nonfinite == 0;
}

template <class T>
bool axpby(const T* x, const T* y, T* out, int64_t n, T a, T b, int arg_to_check) {
  if (arg_to_check == 0) return axpby_checking<0>(x, y, out, n, a, b);
  if (arg_to_check == 1) return axpby_checking<1>(x, y, out, n, a, b);
  return axpby_checking<-1>(x, y, out, n, a, b);
}

// kLanes sums, in as many vectors as the instruction set needs for them.
template <class T>
class SumOfSquares {
 public:
  explicit SumOfSquares(T inv_scale) : inv_scale_(Vector{} + inv_scale) {}

  void add(const T* x) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      Vector value;
      memcpy(&value, x + v * kWidth, sizeof(value));
      Mask bits;
      memcpy(&bits, &value, sizeof(bits));
      nonfinite_[v] |= (bits & kExponent<T>) == kExponent<T>;
      sum_[v] += l2norm_term(value, inv_scale_);
    }
  }

  double total() const {
    double total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += static_cast<double>(sum_[lane / kWidth][lane % kWidth]);
    return total;
  }

  bool is_finite() const {
    bool finite = true;
    for (int lane = 0; lane < kLanes; ++lane) finite = finite && nonfinite_[lane / kWidth][lane % kWidth] == 0;
    return finite;
  }

 private:
#if defined(__AVX512F__)
  static constexpr int kBytes = 64;
#elif defined(__AVX2__)
  static constexpr int kBytes = 32;
#else
  static constexpr int kBytes = 16;
#endif
  static constexpr int kWidth = kBytes / sizeof(T);
  static constexpr int kVectors = kLanes / kWidth;
  typedef T Vector __attribute__((vector_size(kBytes)));
  typedef typename Bits<T>::type Mask __attribute__((vector_size(kBytes)));

  Vector inv_scale_;
  Vector sum_[kVectors] = {};
  Mask nonfinite_[kVectors] = {};
};

template <class T>
bool l2norm(const T* x, int64_t n, T inv_scale, double* sum_of_squares) {
  SumOfSquares<T> sum(inv_scale);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) sum.add(x + i);
  if (i < n) {
    T rest[kLanes] = {};
    memcpy(rest, x + i, static_cast<size_t>(n - i) * sizeof(T));
    sum.add(rest);
  }
  *sum_of_squares = sum.total();
  return sum.is_finite();
}

template <class T>
void max_norm(const T* x, int64_t n, T inv_scale, double* result) {
  typename Bits<T>::type largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const auto bits = magnitude_bits(x[i] * inv_scale);
    largest = bits > largest ? bits : largest;
  }
  T value;
  memcpy(&value, &largest, sizeof(value));
  *result = static_cast<double>(value);
}

// Types as they lie in memory. fp64 goes to 16 bits by way of fp32, as torch's copy_ does.
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
template <>
void load<Half, float>(const void* from, void* to, int64_t n) {
  const Half* in = static_cast<const Half*>(from);
  float* out = static_cast<float*>(to);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
  for (; i < n; ++i) out[i] = widen(in[i]);
}

template <>
void store<Half, float>(const void* from, void* to, int64_t n) {
  const float* in = static_cast<const float*>(from);
  Half* out = static_cast<Half*>(to);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), halves);
  }
  for (; i < n; ++i) narrow(in[i], out[i]);
}
#endif

}  // namespace

extern const OptimizerLoops AMPCTX_TABLE(optimizers);
extern const Simd AMPCTX_TABLE(simd);
// The order of the types is that of DType.
const Simd AMPCTX_TABLE(simd) = {
    AMPCTX_QUOTE(AMPCTX_SIMD_NAME),
    {scale<float>, axpby<float>, l2norm<float>, max_norm<float>},
    {scale<double>, axpby<double>, l2norm<double>, max_norm<double>},
    {{nullptr, load<Half, float>, load<BFloat16, float>, nullptr, load<Remainder, float>},
     {load<float, double>, load<Half, double>, load<BFloat16, double>, nullptr, load<Remainder, double>}},
    {{nullptr, store<Half, float>, store<BFloat16, float>, nullptr, store<Remainder, float>},
     {store<float, double>, store<Half, double>, store<BFloat16, double>, nullptr, store<Remainder, double>}},
    AMPCTX_TABLE(optimizers),
};

}  // namespace ampctx::cpu
