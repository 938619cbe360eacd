// The CPU's inner loops of all ops but optimizers. setup.py compiles this file once per instruction set.
#include "simd.h"
#include "../functors/axpby.h"
#include "../functors/l2norm.h"
#include "../functors/scale.h"
#include "simd_convert.h"
#include "simd_table.h"

namespace ampctx::cpu {
namespace {

constexpr int kLanes = 16;

// A mask as wide as a value, because loops over values and masks of one width vectorize.
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

template <class From, class To>
bool scale_mixed(const void* x, void* out, int64_t n, float factor) {
  bool finite = true;
  float in[kStrip], scaled[kStrip];
  for_each_strip(n, [&](int64_t i, int64_t size) {
    const From* from = static_cast<const From*>(x) + i;
    To* to = static_cast<To*>(out) + i;
    const float* values = in;
    float* target = scaled;
    if constexpr (sizeof(From) == sizeof(float)) {
      values = from;
    } else {
      load<From, float>(from, in, size);
    }
    if constexpr (sizeof(To) == sizeof(float)) target = to;
    finite &= scale(values, target, size, factor);
    if constexpr (sizeof(To) < sizeof(float)) store<To, float>(scaled, to, size);
  });
  return finite;
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

// kLanes partial sums, in as many vectors as the instruction set needs.
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

template <class From>
bool l2norm_mixed(const void* x, int64_t n, float inv_scale, double* sum_of_squares) {
  SumOfSquares<float> sum(inv_scale);
  float values[kStrip];
  for_each_strip(n, [&](int64_t i, int64_t size) {
    load<From, float>(static_cast<const From*>(x) + i, values, size);
    const int64_t filled = (size + kLanes - 1) / kLanes * kLanes;
    for (int64_t k = size; k < filled; ++k) values[k] = 0;
    for (int64_t k = 0; k < filled; k += kLanes) sum.add(values + k);
  });
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
    {{nullptr, scale_mixed<float, Half>, scale_mixed<float, BFloat16>},
     {scale_mixed<Half, float>, scale_mixed<Half, Half>, scale_mixed<Half, BFloat16>},
     {scale_mixed<BFloat16, float>, scale_mixed<BFloat16, Half>, scale_mixed<BFloat16, BFloat16>}},
    {nullptr, l2norm_mixed<Half>, l2norm_mixed<BFloat16>},
    AMPCTX_TABLE(optimizers),
};

}  // namespace ampctx::cpu
