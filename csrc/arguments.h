// Arguments of one op call, in their order, and its results. Two sources: torch's dispatcher (owned here) or a plan
// (owned by the plan). `view_of` reads the tensors of both, through the C shim.
#pragma once

#include <algorithm>
#include <deque>

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
  bool has_memory = false;     // its elements, if any, lie within its storage
  bool fills_storage = false;  // which has no others
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

// The types that ops take, first those of DType in its order: torch's number, and bytes of an element.
struct ElementType {
  int32_t (*number)();
  int64_t bytes;
};
constexpr ElementType kTypes[] = {
    {aoti_torch_dtype_float32, 4}, {aoti_torch_dtype_float16, 2}, {aoti_torch_dtype_bfloat16, 2},
    {aoti_torch_dtype_float64, 8}, {aoti_torch_dtype_int16, 2},   {aoti_torch_dtype_int8, 1},
    {aoti_torch_dtype_uint8, 1},   {aoti_torch_dtype_int32, 4},   {aoti_torch_dtype_int64, 8},
};

// Null for other types.
inline const ElementType* type_of(int32_t number) {
  for (const ElementType& type : kTypes) {
    if (type.number() == number) return &type;
  }
  return nullptr;
}

// `is_written`: torch then makes a copy-on-write tensor's own memory.
inline View view_of(const torch_abi::Tensor& tensor, bool is_written) {
  View view;
  view.is_defined = tensor.is_defined();
  if (!view.is_defined) return view;
  view.dtype = tensor.dtype(), view.numel = tensor.numel();
  view.device = {tensor.device_type(), tensor.device_index()};
  view.is_strided = tensor.layout() == aoti_torch_layout_strided();
  if (!view.is_strided) return view;
  view.layout = {tensor.dim(), tensor.sizes(), tensor.strides()};
  view.is_contiguous = view.numel == 0 || is_contiguous(view.layout);
  // Somebody may have freed the storage (FSDP does between uses of a parameter) or made it smaller under a view. The
  // address is then null, or null and an offset, or one behind the end: its pointer must not be used.
  const ElementType* const type = type_of(view.dtype);
  const int64_t bytes = type ? type->bytes : 0, stored = tensor.storage_bytes();
  view.has_memory = view.numel == 0 || (tensor.storage_offset() + view.numel) * bytes <= stored;
  view.fills_storage = view.numel * bytes == stored;
  if (view.has_memory && type) view.data = is_written ? tensor.mutable_data() : const_cast<void*>(tensor.data());
  return view;
}

// A number or a tensor that a plan was given.
struct Value {
  double number = 0;
  int64_t integer = 0;
  View view;
};

class Arguments {
 public:
  // Of a boxed function: takes them off the stack, and owns them.
  explicit Arguments(StableIValue* stack) : stack_(stack) {}
  // Of a plan, which keeps them. The results go into tensors that are the last values.
  Arguments(const std::vector<const Views*>& lists, const std::vector<Value>& values)
      : lists_(&lists), values_(&values) {}

  // `is_written`: whether the op writes them.
  const Views& list(bool is_written = false) {
    if (lists_) return *lists_->at(next_list_++);
    torch_abi::TensorList& owned = owned_.emplace_back();
    Views& views = views_.emplace_back();
    torch_abi::take_list(take(), [&](torch_abi::Tensor tensor) { owned.push_back(std::move(tensor)); });
    for (const torch_abi::Tensor& tensor : owned) views.push_back(view_of(tensor, is_written));
    return views;
  }
  View tensor(bool is_written = false) {
    if (values_) return value().view;
    torch_abi::TensorList& list = owned_.emplace_back();
    list.emplace_back(take());
    return view_of(list.back(), is_written);
  }
  double number() { return values_ ? value().number : torch_abi::to_scalar<double>(take()); }
  int64_t integer() { return values_ ? value().integer : torch_abi::to_scalar<int64_t>(take()); }
  bool flag() { return values_ ? value().integer != 0 : torch_abi::to_scalar<bool>(take()); }

  // Memory for the next result: `elements`, or one of a 0-d tensor if null. After the last argument.
  void* result(const char* op, const int64_t* elements, int32_t dtype, torch_abi::Device device) {
    if (!values_) return results_.emplace_back(torch_abi::empty(elements, dtype, device)).mutable_data();
    const View& to = value().view;
    if (to.dtype != dtype || to.device != device || to.numel != (elements ? *elements : 1) || !to.is_contiguous) {
      fail(op, ": a result does not fit the tensor that was given for it");
    }
    return to.data;
  }
  // Puts the results on the stack.
  void finish() {
    for (size_t i = 0; i < results_.size(); ++i) stack_[i] = results_[i].release();
  }

 private:
  StableIValue take() { return stack_[next_++]; }
  const Value& value() { return values_->at(next_value_++); }

  StableIValue* stack_ = nullptr;
  const std::vector<const Views*>* lists_ = nullptr;
  const std::vector<Value>* values_ = nullptr;
  size_t next_ = 0, next_list_ = 0, next_value_ = 0;
  std::deque<torch_abi::TensorList> owned_;
  std::deque<Views> views_;
  torch_abi::TensorList results_;
};

}  // namespace ampctx
