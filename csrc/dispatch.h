// The element types, and the one table that says which backend takes which.
#pragma once

#include "functors/host_device.h"

namespace ampctx {

enum class DType : int32_t { f32, f16, bf16, f64 };
constexpr int kDTypes = 4;

AMPCTX_FN constexpr int64_t element_size(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

// Every combination of the allowed types is served: types are switched on at run time, per block of elements.
struct AllowedDTypes {
  bool f64;
  const char* names;
};
constexpr AllowedDTypes kCpuDTypes = {true, "float32, float16, bfloat16 or float64"};
constexpr AllowedDTypes kCudaDTypes = {false, "float32, float16 or bfloat16"};

constexpr bool allows(const AllowedDTypes& allowed, DType dtype) { return allowed.f64 || dtype != DType::f64; }

}  // namespace ampctx
