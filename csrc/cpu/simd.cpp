// The CPU's inner loops of all ops but optimizers. setup.py compiles this file once per instruction set.
#include "simd.h"
#include "../functors/axpby.h"
#include "../functors/l2norm.h"
#include "../functors/scale.h"
#include "simd_convert.h"
#include "simd_table.h"

namespace ampctx::cpu {
namespace {

constexpr uintptr_t kLine = 64;  // bytes of a memory line

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

// Copies a strip past the caches. Memory lines that are written whole need not be read first. Both pointers begin a
// line.
void stream(const void* from, void* to, size_t bytes) {
  const char* in = static_cast<const char*>(from);
  char* out = static_cast<char*>(to);
  size_t i = 0;
#if defined(__AVX512F__)
  for (; i + 64 <= bytes; i += 64) _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), _mm512_load_si512(in + i));
#elif defined(__AVX2__)
  for (; i + 32 <= bytes; i += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i),
                        _mm256_load_si256(reinterpret_cast<const __m256i*>(in + i)));
  }
#endif
  memcpy(out + i, in + i, bytes - i);
}

// Other threads may read the streamed elements after this.
void end_streams() {
#ifdef __AVX2__
  _mm_sfence();
#endif
}

#ifdef __AVX2__
template <class To>
constexpr bool kHasVectors = false;
template <>
constexpr bool kHasVectors<float> = true;
template <>
constexpr bool kHasVectors<Half> = true;

// Casts, checks and scales whole vectors in registers, as many as there are. Returns the number of elements.
template <bool streams, class From, class To>
int64_t scale_vectors(const From* x, To* out, int64_t n, float factor, bool& finite) {
  using Floats = Vector<float>;
  typedef uint32_t Words __attribute__((vector_size(kVector)));
  constexpr int kWidth = Floats::kWidth;
  Words largest = {};  // of the magnitudes as integers: inf and nan are above all numbers
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const Floats::Type values = Floats::load(x + i);
    const Words magnitudes = bits_as<Words>(values) & 0x7fffffffu;
    largest = magnitudes > largest ? magnitudes : largest;
    Floats::template store<streams>(values * factor, out + i);
  }
  for (int lane = 0; lane < kWidth; ++lane) finite = finite && largest[lane] < 0x7f800000u;
  return i;
}
#endif

template <class From, class To>
bool scale_mixed(const void* x, void* out, int64_t n, float factor, bool streams) {
  streams = streams && reinterpret_cast<uintptr_t>(out) % kLine == 0;
  bool finite = true;
#ifdef __AVX2__
  if constexpr (kHasVectors<To>) {
    const auto* const from = static_cast<const From*>(x);
    To* const to = static_cast<To*>(out);
    const int64_t done =
        streams ? scale_vectors<true>(from, to, n, factor, finite) : scale_vectors<false>(from, to, n, factor, finite);
    if (streams) end_streams();
    x = from + done, out = to + done, n -= done;
    streams = false;
  }
#endif
  alignas(kLine) float in[kStrip], scaled[kStrip];
  alignas(kLine) To stored[kStrip];
  for_each_strip(n, [&](int64_t i, int64_t size) {
    const From* from = static_cast<const From*>(x) + i;
    To* const to = static_cast<To*>(out) + i;
    To* const target = streams ? stored : to;
    const float* values = in;
    if constexpr (sizeof(From) == sizeof(float)) {
      values = from;
    } else {
      load<From, float>(from, in, size);
    }
    if constexpr (sizeof(To) == sizeof(float)) {
      finite &= scale(values, target, size, factor);
    } else {
      finite &= scale(values, scaled, size, factor);
      store<To, float>(scaled, target, size);
    }
    if (streams) stream(stored, to, static_cast<size_t>(size) * sizeof(To));
  });
  if (streams) end_streams();
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

// kLanes partial sums, in as many vectors as the instruction set needs. Each addition waits for the previous one in its
// vector, so several vectors keep the adders busy.
template <class T>
class SumOfSquares {
 public:
  static constexpr int kLanes = 128 / sizeof(T);

  explicit SumOfSquares(T inv_scale) : inv_scale_(typename Vector<T>::Type{} + inv_scale) {}

  template <class From>
  void add(const From* x) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sum_[v] += l2norm_term(Vector<T>::load(x + v * kWidth), inv_scale_);
  }

  // Adds the lanes in fp64, by halves. The order is the same for every instruction set, and vectorizes.
  double total() const {
    T lanes[kLanes];
    memcpy(lanes, sum_, sizeof(lanes));
    double part[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) part[lane] = static_cast<double>(lanes[lane]);
#pragma GCC unroll 8
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) part[lane] += part[lane + half];
    }
    return part[0];
  }

 private:
  static constexpr int kWidth = Vector<T>::kWidth;
  static constexpr int kVectors = kLanes / kWidth;

  typename Vector<T>::Type inv_scale_;
  typename Vector<T>::Type sum_[kVectors] = {};
};

template <class From, class T>
void add(SumOfSquares<T>& sum, const From* x) {
#ifdef __AVX2__
  sum.add(x);
#else
  if constexpr (sizeof(From) == sizeof(T)) {
    sum.add(x);
  } else {
    T values[SumOfSquares<T>::kLanes];
    load<From, T>(x, values, SumOfSquares<T>::kLanes);
    sum.add(values);
  }
#endif
}

template <class From, class T>
bool l2norm_of(const From* x, int64_t n, T inv_scale, double* sum_of_squares) {
  constexpr int kLanes = SumOfSquares<T>::kLanes;
  SumOfSquares<T> sum(inv_scale);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) add(sum, x + i);
  if (i < n) {
    From rest[kLanes] = {};
    memcpy(rest, x + i, static_cast<size_t>(n - i) * sizeof(From));
    add(sum, rest);
  }
  *sum_of_squares = sum.total();
  // An inf or nan element makes the sum inf or nan, and so do squares too large for T: only then check each element.
  if (is_finite(*sum_of_squares)) return true;
  bool finite = true;
  for (i = 0; i < n; ++i) finite = finite && is_finite(widen(x[i]));
  return finite;
}

template <class T>
bool l2norm(const T* x, int64_t n, T inv_scale, double* sum_of_squares) {
  return l2norm_of(x, n, inv_scale, sum_of_squares);
}

template <class From>
bool l2norm_mixed(const void* x, int64_t n, float inv_scale, double* sum_of_squares) {
  return l2norm_of(static_cast<const From*>(x), n, inv_scale, sum_of_squares);
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
