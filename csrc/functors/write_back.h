// How an updated weight goes back into the tensor it came from, one element; the table of
// ampctx/kernels/reference_steps.py says what `extra` holds. Everything is a float (or double) here; where p and extra
// are stored in fewer bits, the values fit them, so that the store that follows is exact. The step:  w = load_weight(p,
// extra);  update w;  store_weight.
//
//   nearest     p = w, rounded by the store
//   copy        extra = w too, rounded to its own type
//   split       the 32 bits of w in two halves: p the nearest number with 16 low bits of 0 (ties away from zero), extra
//               the signed difference of the bits, an int16. Every number comes back with every bit, and a nan as the
//               quiet one of its sign; benchmarks/split_exact.py
//   kahan       extra = w - p, what the rounding of p left over; 0 where p is not finite
//   stochastic  p up with the odds of the distance; inf and nan stay
#pragma once

#include "convert.h"
#include "dtype.h"
#include "random.h"

namespace ampctx {

enum class WriteBack : int32_t { nearest, copy, split, kahan, stochastic };
constexpr int kWriteBacks = 5;

AMPCTX_FN constexpr bool has_extras(WriteBack mode) {
  return mode != WriteBack::nearest && mode != WriteBack::stochastic;
}
AMPCTX_FN constexpr bool reads_extras(WriteBack mode) { return mode == WriteBack::split || mode == WriteBack::kahan; }

AMPCTX_FN float join(float high, int32_t remainder) {
  return float_of(bits_of(high) + static_cast<uint32_t>(remainder));
}

AMPCTX_FN void split(float w, float& high, int32_t& remainder) {
  const int32_t magnitude = static_cast<int32_t>(bits_of(w) & 0x7fffffffu);
  const uint32_t quiet_nan = (bits_of(w) & 0x80000000u) | 0x7fc00000u;
  // The largest nans, a GPU's own among them, would round up to zero with the other sign.
  const uint32_t bits = magnitude > 0x7f800000 ? quiet_nan : bits_of(w);
  remainder = static_cast<int32_t>(bits << 16) >> 16;
  high = float_of(bits - static_cast<uint32_t>(remainder));
}

AMPCTX_FN float round_to_nearest(float w, DType to) {
  return to == DType::f16 ? half_to_float(float_to_half(w)) : bfloat16_to_float(float_to_bfloat16(w));
}

AMPCTX_FN float round_stochastically(float w, DType to, uint32_t random) {
  const uint32_t dropped = to == DType::bf16 ? 0xffffu : 0x1fffu;
  float rounded = float_of((bits_of(w) + (random & dropped)) & ~dropped);
  if (to == DType::f16) {  // below 2^-14 the spacing is 2^-24 whatever the size
    const uint32_t sign = bits_of(w) & 0x80000000u;
    const float magnitude = float_of(bits_of(w) ^ sign);
    const bool is_small = magnitude < 0x1p-14f;
    const float units = is_small ? magnitude * 0x1p24f : 0.0f;
    const float whole = static_cast<float>(static_cast<int32_t>(units));
    const float odds = static_cast<float>(static_cast<int32_t>(random >> 8)) * 0x1p-24f;
    const float subnormal = (whole + (odds < units - whole ? 1.0f : 0.0f)) * 0x1p-24f;
    rounded = is_small ? float_of(bits_of(subnormal) | sign) : rounded;
  }
  return is_finite(w) ? rounded : w;
}

template <class T>
AMPCTX_FN T load_weight(WriteBack mode, T p, T extra) {
  if (mode == WriteBack::split) return join(static_cast<float>(p), static_cast<int32_t>(extra));
  return mode == WriteBack::kahan ? p + extra : p;
}

// p and extra of the updated weight; `type` is that of p in memory.
template <class T>
AMPCTX_FN void store_weight(WriteBack mode, DType type, T w, uint32_t random, T& p, T& extra) {
  p = w;
  if (mode == WriteBack::copy) extra = w;
  if (mode == WriteBack::split) {
    float high;
    int32_t remainder;
    split(static_cast<float>(w), high, remainder);
    p = high;
    extra = static_cast<T>(remainder);
  }
  if (mode == WriteBack::kahan) {
    p = round_to_nearest(static_cast<float>(w), type);
    extra = is_finite(p) ? w - p : 0;  // w - inf would make inf - inf of the next weight
  }
  if (mode == WriteBack::stochastic && (type == DType::f16 || type == DType::bf16)) {
    p = round_stochastically(static_cast<float>(w), type, random);
  }
}

}  // namespace ampctx
