// The types of elements in memory.
#pragma once

#include "host_device.h"

namespace ampctx {

enum class DType : int32_t { f32, f16, bf16, f64, i16 };
constexpr int kDTypes = 5;

AMPCTX_FN constexpr int64_t element_size(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

}  // namespace ampctx
