// The CPU's inner loops of all ops but optimizers. setup.py compiles this file once per instruction set.
#include "../functors/elementwise.h"
#include "simd_convert.h"

namespace ampctx::cpu {
namespace {

// A mask as wide as a value, because loops over values and masks of one width vectorize.
template <class T>
using BitsOf = std::conditional_t<sizeof(T) == sizeof(float), uint32_t, uint64_t>;

// Casts, checks and scales in registers.
template <bool streams, class T, class From, class To>
bool scale_vectors(const From* x, To* out, int64_t n, T factor) {
  using Values = Vector<T>;
  typedef BitsOf<T> Words __attribute__((vector_size(kVector)));
  constexpr int kWidth = Values::kWidth;
  const auto factors = typename Values::Type{} + factor;
  Words largest = {};  // of the magnitudes as integers: inf and nan are above all numbers
  const auto scale = [&](const From* from) __attribute__((always_inline)) {
    const typename Values::Type values = Values::load(from);
    const Words magnitudes = bits_as<Words>(values) & (~BitsOf<T>{0} >> 1);
    largest = magnitudes > largest ? magnitudes : largest;
    return scale_element(values, factors);
  };
  for_each_strip<kStreams>(n, [&](int64_t first, int64_t size) __attribute__((always_inline)) {
    int64_t i = 0;
    prefetch(x, first, n);
    for (; i + kWidth <= size; i += kWidth) Values::template store<streams>(scale(x + first + i), out + first + i);
    if (i == size) return;
    From rest[kWidth] = {};
    To scaled[kWidth];
    memcpy(rest, x + first + i, static_cast<size_t>(size - i) * sizeof(From));
    Values::template store<false>(scale(rest), scaled);
    memcpy(out + first + i, scaled, static_cast<size_t>(size - i) * sizeof(To));
  });
  bool finite = true;
  for (int lane = 0; lane < kWidth; ++lane) finite = finite && largest[lane] < kExponent<T>;
  return finite;
}

template <class T, class From, class To>
bool scale(const void* x, void* out, int64_t n, T factor, bool streams) {
  bool finite = true;
  if constexpr (kIsDirect<T, From> && kIsDirect<T, To>) {
    const From* const from = static_cast<const From*>(x);
    To* const to = static_cast<To*>(out);
    if (!streams || reinterpret_cast<uintptr_t>(out) % kLine != 0) return scale_vectors<false>(from, to, n, factor);
    finite = scale_vectors<true>(from, to, n, factor);
#ifdef __AVX2__
    _mm_sfence();  // other threads may read the streamed elements after this
#endif
  }
  return finite;
}

template <class T>
bool axpby(const T* x, const T* y, T* out, int64_t n, T a, T b, int arg_to_check) {
  const auto checking = [=](auto arg) {
    BitsOf<T> nonfinite = 0;
    AMPCTX_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      nonfinite |= !axpby_is_finite(x[i], y[i], decltype(arg)::value);
      out[i] = axpby_element(x[i], y[i], a, b);
    }
    return nonfinite == 0;
  };
  if (arg_to_check == 0) return checking(std::integral_constant<int, 0>{});
  if (arg_to_check == 1) return checking(std::integral_constant<int, 1>{});
  return checking(std::integral_constant<int, -1>{});
}

// kLanes partial sums, in as many vectors as the instruction set needs. Each addition waits for the previous one in its
// vector, so several vectors keep the adders busy.
template <class T>
class SumOfSquares {
 public:
  static constexpr int kLanes = 128 / sizeof(T);

  template <class From>
  void add(const From* x, T inv_scale) {
    const auto factors = typename Vector<T>::Type{} + inv_scale;
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sum_[v] += l2norm_term(Vector<T>::load(x + v * kWidth), factors);
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

  typename Vector<T>::Type sum_[kVectors] = {};
};

// The sums of `streams` blocks of x, of which the first is `block` and each next one is `apart` further.
template <int64_t streams, class From, class T>
void sum_blocks(const From* x, int64_t n, int64_t block, int64_t apart, T inv_scale, double* sums) {
  constexpr int kLanes = SumOfSquares<T>::kLanes;
  SumOfSquares<T> sum[streams];
  const int64_t begin = block * kBlock, size = n - begin < kBlock ? n - begin : kBlock;
  for_each_strip(size, [&](int64_t i, int64_t count) {
    for (int64_t k = 0; k < streams; ++k) {
      const int64_t first = begin + k * apart * kBlock + i;
      prefetch(x, first, n);
      SumOfSquares<T> in_registers = sum[k];
      int64_t done = 0;
      for (; done + kLanes <= count; done += kLanes) in_registers.add(x + first + done, inv_scale);
      if (done < count) {
        From rest[kLanes] = {};
        memcpy(rest, x + first + done, static_cast<size_t>(count - done) * sizeof(From));
        in_registers.add(rest, inv_scale);
      }
      sum[k] = in_registers;
    }
  });
  for (int64_t k = 0; k < streams; ++k) sums[block + k * apart] = sum[k].total();
}

template <class T, class From>
bool l2norm(const void* list, int64_t n, T inv_scale, double* sums) {
  bool finite = true;
  if constexpr (kIsDirect<T, From>) {
    const From* const x = static_cast<const From*>(list);
    const int64_t piece = n / (kStreams * kBlock), blocks = (n + kBlock - 1) / kBlock;
    for (int64_t b = 0; b < piece; ++b) sum_blocks<kStreams>(x, n, b, piece, inv_scale, sums);
    for (int64_t b = kStreams * piece; b < blocks; ++b) sum_blocks<1>(x, n, b, 0, inv_scale, sums);
    // An inf or nan element makes its sum inf or nan, and so do squares too large for T: only then check each element.
    for (int64_t b = 0; b < blocks; ++b) finite = finite && is_finite(sums[b]);
    if (finite) return true;
    finite = true;
    for (int64_t i = 0; i < n; ++i) finite = finite && is_finite(widen(x[i]));
  }
  return finite;
}

// The order of the types is that of DType.
template <class T, class From, class... To>
constexpr ScaleFrom<T> kScaleFrom = {{(kIsDirect<T, From> && kIsDirect<T, To> ? scale<T, From, To> : nullptr)...}};
template <class T, class... Types>
constexpr Arithmetic<T> kArithmetic = {
    {kScaleFrom<T, Types, Types...>...}, axpby<T>, {(kIsDirect<T, Types> ? l2norm<T, Types> : nullptr)...}};

}  // namespace

extern const OptimizerLoops AMPCTX_TABLE(optimizers);
extern const Simd AMPCTX_TABLE(simd);
const Simd AMPCTX_TABLE(simd) = {
    AMPCTX_QUOTE(AMPCTX_SIMD_NAME),
    kArithmetic<float, float, Half, BFloat16>,
    kArithmetic<double, float, Half, BFloat16, double>,
    {{nullptr, load<Half, float>, load<BFloat16, float>, nullptr, load<Remainder, float>},
     {load<float, double>, load<Half, double>, load<BFloat16, double>, nullptr, load<Remainder, double>}},
    {{nullptr, store<Half, float>, store<BFloat16, float>, nullptr, store<Remainder, float>},
     {store<float, double>, store<Half, double>, store<BFloat16, double>, nullptr, store<Remainder, double>}},
    AMPCTX_TABLE(optimizers),
};

}  // namespace ampctx::cpu
