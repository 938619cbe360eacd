// States of optimizers in fewer bits, one element: bf16, and codes of 8 bits with an fp32 scale for each block of 64
// elements in memory order. ampctx/kernels/codes.py has the formulas, and the same arithmetic: each operation is
// rounded, in this order, on every backend.
//
// A block is stored in two passes: largest(), joined over the block by the maximum of its bits; then encode_scaled()
// with the code_scale() of that.
#pragma once

#include "convert.h"
#include "dtype.h"
#include "random.h"

namespace ampctx {

constexpr int64_t kCodeBlock = 64;
constexpr int kCodedStates = 2;  // how many states of an optimizer may be rounded at random, or be codes

AMPCTX_FN constexpr int64_t code_blocks(int64_t elements) { return (elements + kCodeBlock - 1) / kCodeBlock; }

// The random bits of an element's states, of those that round its weight, and the 16 of one state.
AMPCTX_FN uint32_t bits_of_states(uint32_t random) { return mix32(random + 0x9e3779b9u); }
AMPCTX_FN uint32_t bits_of_state(uint32_t bits_of_states, int state) {
  return bits_of_states >> (16 * state) & 0xffffu;
}

// The place between two codes that rounds up, from random bits. To nearest it is 1/2.
AMPCTX_FN float rounding_place(uint32_t sixteen_bits) {
  return static_cast<float>(static_cast<int32_t>(sixteen_bits)) * 0x1p-16f;
}
constexpr float kNearest = 0.5f;

// The larger of two magnitudes as bits: inf is above all numbers, nan above inf.
AMPCTX_FN uint32_t larger(uint32_t a, uint32_t b) { return a < b ? b : a; }
AMPCTX_FN uint32_t largest(uint32_t so_far, float value) { return larger(so_far, magnitude_bits(value)); }

// Of a block whose largest magnitude has these bits. Roots keep the order, so one root serves the block.
template <DType code>
AMPCTX_FN float code_scale(uint32_t largest) {
  const float magnitude = code == DType::u8 ? square_root(float_of(largest)) : float_of(largest);
  return is_finite(magnitude) ? magnitude : float_of(0x7fc00000u);
}

AMPCTX_FN int32_t floor_to_int(float x) {
  const int32_t towards_zero = static_cast<int32_t>(x);
  return towards_zero - (x < static_cast<float>(towards_zero) ? 1 : 0);
}

// Of a block whose scale is above 0. Without branches, so that compilers vectorize it.
template <DType code>
AMPCTX_FN int32_t encode_scaled(float value, float scale, float place) {
  if (code == DType::i8) {
    const float z = value / scale;
    const float magnitude = float_of(bits_of(z) & 0x7fffffffu);
    return floor_to_int(127.0f * ((z + z) / (1.0f + magnitude)) + place);
  }
  const float square = value > 0 ? value : 0.0f;
  const float y = square_root(square_root(square) / scale);
  const int32_t rounded = static_cast<int32_t>(255.0f * y + place);
  const int32_t at_most = rounded > 255 ? 255 : rounded, at_least = square > 0 ? 1 : 0;
  return at_most < at_least ? at_least : at_most;
}

// decode() in two parts: what the code says alone, which CUDA kernels look up, and what its block adds.
template <DType code>
AMPCTX_FN float unscaled(int32_t q) {
  if (code == DType::i8) {
    const float y = static_cast<float>(q) / 127.0f;
    const float magnitude = float_of(bits_of(y) & 0x7fffffffu);
    return y / (2.0f - magnitude);
  }
  const float y = static_cast<float>(q) / 255.0f;
  return y * y;
}

template <DType code>
AMPCTX_FN float with_scale(float unscaled, float scale) {
  const float r = unscaled * scale;
  return code == DType::i8 ? r : r * r;
}

template <DType code>
AMPCTX_FN float decode(int32_t q, float scale) {
  return with_scale<code>(unscaled<code>(q), scale);
}

}  // namespace ampctx
