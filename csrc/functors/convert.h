// fp16 and bf16, held as their 16 bits, from and to fp32.
//
// To fp32 is exact. From fp32 rounds to nearest, ties to even (IEEE 754), gives subnormals where fp16 has them, inf
// beyond the largest number, and keeps a NaN a (quiet) NaN. No branches, so that compilers vectorize it. On x86-64 the
// results are those of the F16C instructions bit for bit, NaN payload included; the GPU's own fp16 instructions differ
// in payloads only.
#pragma once

#include "host_device.h"

namespace ampctx {

AMPCTX_FN float half_to_float(uint16_t half) {
#ifdef __CUDA_ARCH__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
#else
  const int32_t magnitude = half & 0x7fff;
  const int32_t sign = (half & 0x8000) << 16;
  const int32_t normal = (magnitude << 13) + (112 << 23);  // the exponent bias goes from 15 to 127
  const int32_t subnormal = static_cast<int32_t>(bits_of(static_cast<float>(magnitude) * 0x1p-24f));
  const int32_t special = normal + (112 << 23) + (magnitude > 0x7c00 ? (~magnitude & 0x200) << 13 : 0);
  const int32_t finite = magnitude < 0x0400 ? subnormal : normal;
  return float_of(static_cast<uint32_t>(sign | (magnitude < 0x7c00 ? finite : special)));
#endif
}

AMPCTX_FN uint16_t float_to_half(float value) {
#ifdef __CUDA_ARCH__
  uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
#else
  const int32_t bits = static_cast<int32_t>(bits_of(value));
  const int32_t magnitude = bits & 0x7fffffff;
  const int32_t sign = (bits >> 16) & 0x8000;
  const int32_t normal = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // The spacing of fp32 numbers just above 0.5 is 2^-24, that of fp16 subnormals: the addition rounds.
  const int32_t subnormal =
      static_cast<int32_t>(bits_of(float_of(static_cast<uint32_t>(magnitude)) + 0.5f)) - 0x3f000000;
  const int32_t nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  const int32_t finite = magnitude < (113 << 23) ? subnormal : normal;
  const int32_t number = magnitude < 0x47800000 ? finite : 0x7c00;
  return static_cast<uint16_t>(sign | (magnitude <= 0x7f800000 ? number : nan));
#endif
}

AMPCTX_FN float bfloat16_to_float(uint16_t value) { return float_of(static_cast<uint32_t>(value) << 16); }

AMPCTX_FN uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & 0x7fffffff) <= 0x7f800000 ? rounded : nan);
}

}  // namespace ampctx
