// The types of elements in memory, and the one table that says which backend takes which.
#pragma once

#include "host_device.h"

namespace ampctx {

// i8 and u8 are codes, which mean nothing without their scales: codes.h. The tables of conversions end before them.
enum class DType : int32_t { f32, f16, bf16, f64, i16, i8, u8 };
constexpr int kDTypes = 5;

AMPCTX_FN constexpr bool is_code(DType dtype) { return dtype == DType::i8 || dtype == DType::u8; }

AMPCTX_FN constexpr int64_t element_size(DType dtype) {
  return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : is_code(dtype) ? 1 : 2;
}

// Every combination of the allowed types is served: types are switched on at run time, per block of elements.
struct AllowedDTypes {
  uint32_t set;  // of one_of() bits
  const char* names;
  const char* code = "";  // or this one
};
AMPCTX_FN constexpr uint32_t one_of(DType dtype) { return 1u << static_cast<int>(dtype); }
constexpr uint32_t kCudaFloats = one_of(DType::f32) | one_of(DType::f16) | one_of(DType::bf16);
constexpr AllowedDTypes kCudaDTypes = {kCudaFloats, "float32, float16 or bfloat16"};
constexpr AllowedDTypes kCpuDTypes = {kCudaFloats | one_of(DType::f64), "float32, float16, bfloat16 or float64"};
// The low halves of split weights alone: functors/write_back.h.
constexpr AllowedDTypes kRemainderDTypes = {one_of(DType::i16), "int16"};

// Those of a state that may be codes.
constexpr AllowedDTypes or_codes(const AllowedDTypes& floats, DType code) {
  return {floats.set | one_of(code), floats.names, code == DType::i8 ? ", or int8" : ", or uint8"};
}

AMPCTX_FN constexpr bool allows(const AllowedDTypes& allowed, DType dtype) {
  return (allowed.set & one_of(dtype)) != 0;
}

}  // namespace ampctx
