// What an op sees of a tensor: where it lies. Read through torch's C shim for the dispatcher's calls (arguments.h), or
// through DLPack for those of a plan (plan.h). The caller keeps the tensors.
#pragma once

#include <algorithm>

#include "torch_abi.h"

namespace ampctx {

// The arrays are the tensor's.
struct Layout {
  int64_t dim = 0;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;
};

struct View {
  void* data = nullptr;
  int64_t numel = 0;
  Layout layout;
  int32_t dtype = 0;
  torch_abi::Device device{};
  bool is_defined = false;  // not where None stands for a tensor
  bool is_strided = false;  // only then the rest is known
  bool is_contiguous = false;
  bool has_memory = false;  // its elements, if any, lie within its storage
};

using Views = std::vector<View>;

inline bool is_contiguous(const Layout& layout) {
  int64_t expected = 1;
  for (int64_t d = layout.dim - 1; d >= 0; --d) {
    if (layout.sizes[d] == 1) continue;
    if (layout.strides[d] != expected) return false;
    expected *= layout.sizes[d];
  }
  return true;
}

// Whether the elements fill one block of memory without holes or overlap.
inline bool is_dense(const Layout& layout) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size)
  for (int64_t d = 0; d < layout.dim; ++d) {
    if (layout.sizes[d] > 1) dims.emplace_back(layout.strides[d], layout.sizes[d]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

// Whether element k in memory of one dense tensor is element k in memory of the other.
inline bool same_strides(const Layout& a, const Layout& b) {
  if (a.dim != b.dim) return false;
  for (int64_t d = 0; d < a.dim; ++d) {
    if (a.sizes[d] != b.sizes[d] || (a.sizes[d] > 1 && a.strides[d] != b.strides[d])) return false;
  }
  return true;
}

// Of the types that ops take, else 0.
inline int64_t element_bytes(int32_t dtype) {
  if (dtype == aoti_torch_dtype_float32() || dtype == aoti_torch_dtype_int32()) return 4;
  if (dtype == aoti_torch_dtype_float16() || dtype == aoti_torch_dtype_bfloat16()) return 2;
  if (dtype == aoti_torch_dtype_float64() || dtype == aoti_torch_dtype_int64()) return 8;
  if (dtype == aoti_torch_dtype_int16()) return 2;
  return dtype == aoti_torch_dtype_int8() || dtype == aoti_torch_dtype_uint8() ? 1 : 0;
}

// `is_written`: torch then makes a copy-on-write tensor's own memory.
inline View view_of(const torch_abi::Tensor& tensor, bool is_written) {
  View view;
  view.is_defined = tensor.is_defined();
  if (!view.is_defined) return view;
  view.dtype = tensor.dtype(), view.device = tensor.device(), view.numel = tensor.numel();
  view.is_strided = tensor.is_strided();
  if (!view.is_strided) return view;
  view.layout = {tensor.dim(), tensor.sizes(), tensor.strides()};
  view.is_contiguous = tensor.is_contiguous();
  view.has_memory = view.numel == 0 || tensor.has_memory(view.numel, element_bytes(view.dtype));
  if (view.has_memory && element_bytes(view.dtype)) {
    view.data = is_written ? tensor.mutable_data() : const_cast<void*>(tensor.data());
  }
  return view;
}

}  // namespace ampctx
