// The types of elements in memory.
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

}  // namespace ampctx
