// The CPU's loops over states in fewer bits: functors/codes.h. Everything is static, as in simd_convert.h.
#pragma once

#include <type_traits>

#include "simd.h"
#include "simd_convert.h"
#include "simd_table.h"

namespace ampctx::cpu {
namespace {

static_assert(kStrip == kCodeBlock);  // so that strips are blocks of codes

void draw_state_bits(RandomKey key, uint32_t* bits, int64_t n) {
  AMPCTX_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) bits[i] = bits_of_states(random_bits(key, static_cast<uint32_t>(i)));
}

template <DType type>
using CodeOf = std::conditional_t<type == DType::i8, int8_t, uint8_t>;

template <DType type>
void decode_block(const CodeOf<type>* codes, float scale, float* values, int64_t n) {
  AMPCTX_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) values[i] = decode<type>(codes[i], scale);
}

void decode_state(DType type, const void* from, const float* scales, float* values, int64_t n) {
  for_each_strip(n, [&](int64_t i, int64_t size) {
    const float scale = scales[i / kCodeBlock];
    if (type == DType::i8) {
      decode_block<DType::i8>(static_cast<const int8_t*>(from) + i, scale, values + i, size);
    } else {
      decode_block<DType::u8>(static_cast<const uint8_t*>(from) + i, scale, values + i, size);
    }
  });
}

template <DType type>
void encode_block(const StateRounding& how, const float* values, int64_t first, CodeOf<type>* codes, float* scale,
                  int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) most = largest(most, values[i]);
  const float of_block = *scale = code_scale<type>(most);
  if (!(of_block > 0)) {
    for (int64_t i = 0; i < n; ++i) codes[i] = 0;
    return;
  }
  if (how.random) {
    const uint32_t* const random = how.random + first;
    const int state = how.state;
    AMPCTX_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      const float place = rounding_place(bits_of_state(random[i], state));
      codes[i] = static_cast<CodeOf<type>>(encode_scaled<type>(values[i], of_block, place));
    }
  } else {
    AMPCTX_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      codes[i] = static_cast<CodeOf<type>>(encode_scaled<type>(values[i], of_block, kNearest));
    }
  }
}

template <DType type>
void encode_state(const StateRounding& how, const float* values, void* to, float* scales, int64_t n) {
  for_each_strip(n, [&](int64_t i, int64_t size) {
    encode_block<type>(how, values + i, i, static_cast<CodeOf<type>*>(to) + i, scales + i / kCodeBlock, size);
  });
}

void round_state(const StateRounding& how, const float* values, void* to, float* scales, int64_t n) {
  if (how.type == DType::i8) return encode_state<DType::i8>(how, values, to, scales, n);
  if (how.type == DType::u8) return encode_state<DType::u8>(how, values, to, scales, n);
  uint16_t* const out = static_cast<uint16_t*>(to);
  const uint32_t* const random = how.random;
  const int state = how.state;
  AMPCTX_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    out[i] = float_to_bfloat16(round_stochastically(values[i], DType::bf16, bits_of_state(random[i], state)));
  }
}

}  // namespace
}  // namespace ampctx::cpu
