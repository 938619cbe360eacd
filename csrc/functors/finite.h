// The finite check behind found_inf: inf and nan are the values whose exponent bits are all ones. A test of the bits,
// because comparisons with inf do not vectorize as well and flags such as -ffast-math cannot break it.
#pragma once

#include "host_device.h"

namespace ampctx {

// The exponent bits of T.
template <class T>
constexpr uint32_t kExponent = 0xffu << 23;
template <>
constexpr uint64_t kExponent<double> = 0x7ffull << 52;

AMPCTX_FN bool is_finite(float value) { return (bits_of(value) & kExponent<float>) != kExponent<float>; }

AMPCTX_FN bool is_finite(double value) { return (bits_of(value) & kExponent<double>) != kExponent<double>; }

}  // namespace ampctx
