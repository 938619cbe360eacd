// Argument checks, made once at the entry of an op. Each error names the op, the argument and the index. The outcome is
// free of torch: TensorLists, FoundInf, Factor. Without compiled kernels ampctx/kernels/fallbacks.py refuses the same
// calls.
#pragma once

#include <algorithm>
#include <atomic>
#include <numeric>
#include <utility>

#include "known_lists.h"
#include "optimizer_ops.h"

namespace ampctx {

using torch_abi::Device;
using torch_abi::dtype_name;
using torch_abi::Tensor;

struct ListArgument {
  const char* name;
  ListView tensors;
  bool is_written = false;
};

// The device of a call, and the argument that decides it, for messages.
struct CallDevice {
  Device device;
  std::string decided_by;
};

inline CallDevice call_device(const ListArgument& first, const Tensor& found_inf) {
  if (first.tensors.empty()) return {found_inf.is_defined() ? found_inf.device() : Device::cpu(), "found_inf"};
  return {first.tensors.device(0), std::string(first.name) + "[0]"};
}

inline bool to_dtype(int32_t code, DType& dtype) {
  if (code == aoti_torch_dtype_float32()) return dtype = DType::f32, true;
  if (code == aoti_torch_dtype_float16()) return dtype = DType::f16, true;
  if (code == aoti_torch_dtype_bfloat16()) return dtype = DType::bf16, true;
  if (code == aoti_torch_dtype_float64()) return dtype = DType::f64, true;
  if (code == aoti_torch_dtype_int16()) return dtype = DType::i16, true;
  if (code == aoti_torch_dtype_int8()) return dtype = DType::i8, true;
  if (code == aoti_torch_dtype_uint8()) return dtype = DType::u8, true;
  return false;
}

constexpr const char* kNoMemory = "has no memory: its storage has been freed or made smaller";

// Whether part(begin, end) holds for all shares of [0, count), asked in several threads. What throws does not hold: the
// caller goes through the list once more, alone, and reports it.
template <class Part>
bool holds_for_all(int64_t count, const Part& part) {
  struct Argument {
    const Part& part;
    std::atomic<bool> holds{true};
  } argument{part};
  constexpr int64_t grain = 1024;  // tensors per list below which a second thread does not pay
  const auto body = [](int64_t begin, int64_t end, void* argument) {
    Argument& self = *static_cast<Argument*>(argument);
    try {
      if (!self.part(begin, end)) self.holds.store(false, std::memory_order_relaxed);
    } catch (const std::exception&) {
      self.holds.store(false, std::memory_order_relaxed);
    }
  };
  torch_abi::parallel_for(0, count, grain, body, &argument);
  return argument.holds.load();
}

// Checks the lists of a call and gathers what the kernels need of each. The constructor takes all lists at once. If it
// finds something to refuse, or an empty tensor, add() goes through the lists one by one and names the tensor.
class ListChecker {
 public:
  // `alike`: the lists that the caller will add(), in this order. `one_element`: lists of one fp32 element for each
  // tensor. Both must outlive the checker.
  ListChecker(const char* op, const CallDevice& call, const std::vector<ListArgument>& alike,
              const std::vector<ListArgument>& one_element = {})
      : op_(op), call_(call), first_(alike[0]) {
    lists.total_tensors = static_cast<int64_t>(first_.tensors.size());
    per_tensor.resize(one_element.size());
    are_plain_ = lists.total_tensors > 0 && take(alike, one_element);
  }

  void check_length(const ListArgument& argument) const {
    const size_t count = first_.tensors.size();
    if (argument.tensors.size() != count) {
      fail(op_, ": ", argument.name, " has ", argument.tensors.size(), " tensors, ", first_.name, " has ", count);
    }
  }

  // The first list comes first.
  void add(const ListArgument& argument, const AllowedDTypes& allowed) {
    const ListView& tensors = argument.tensors;
    const bool is_first = lists.depth == 0;
    const int list = lists.depth++;
    const int32_t code = tensors.empty() ? aoti_torch_dtype_float32() : tensors.dtype(0);
    const bool known = to_dtype(code, lists.dtype[list]) && allows(allowed, lists.dtype[list]);
    if (known && are_plain_) return;

    lists.pointer[list].clear();
    if (is_first) lists.numel.clear();
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto refuse = [&](const auto&... why) { fail(op_, ": ", argument.name, "[", i, "] ", why...); };
      if (!tensors.is_strided(i)) refuse("is not a strided tensor");
      const int32_t dtype = tensors.dtype(i);
      if (DType other; !known || (dtype != code && !(to_dtype(dtype, other) && allows(allowed, other)))) {
        refuse("has dtype ", dtype_name(dtype), ", expected ", allowed.names);
      }
      if (dtype != code) refuse("has dtype ", dtype_name(dtype), ", ", argument.name, "[0] has ", dtype_name(code));
      if (const Device device = tensors.device(i); device != call_.device) {
        refuse("is on ", device.name(), ", ", call_.decided_by, " is on ", call_.device.name());
      }
      const int64_t elements = tensors.numel(i), expected = first_.tensors.numel(i);
      if (elements != expected) refuse("has ", elements, " elements, ", first_.name, "[", i, "] has ", expected);
      if (elements == 0) continue;
      const bool is_contiguous = tensors.is_contiguous(i);
      if (!is_contiguous && !is_dense(tensors.layout(i))) {
        refuse("is not contiguous: its elements do not fill one block of memory");
      }
      if (!(is_contiguous && first_.tensors.is_contiguous(i)) &&
          !same_strides(tensors.layout(i), first_.tensors.layout(i))) {
        refuse("and ", first_.name, "[", i, "] have different memory layouts");
      }
      if (!tensors.has_memory(i, elements, element_size(lists.dtype[list]))) refuse(kNoMemory);
      lists.pointer[list].push_back(tensors.data(i, argument.is_written));
      if (is_first) {
        lists.numel.push_back(elements);
        lists.index.push_back(static_cast<int64_t>(i));
      }
    }
  }

  bool are_plain() const { return are_plain_; }

  TensorLists lists;
  std::vector<PerTensor> per_tensor;  // of one_element, valid if are_plain()

 private:
  struct Column {
    const ListArgument& argument;
    int32_t code;
    int64_t element_bytes;
    void** pointer;
    float** scalar;  // instead of pointer, for a list of one_element
  };

  // Uses one parallel region: thousands of tensors wait for memory thousands of times, and each region waits for the
  // slowest core. False if there is something to refuse or an empty tensor; the results are invalid then.
  bool take(const std::vector<ListArgument>& alike, const std::vector<ListArgument>& one_element) {
    const size_t count = first_.tensors.size();
    std::vector<Column> columns;
    const auto add_column = [&](const ListArgument& argument, void** pointer, float** scalar) {
      const ListView& tensors = argument.tensors;
      DType dtype;
      if (tensors.size() != count || !to_dtype(tensors.dtype(0), dtype)) return false;
      columns.push_back({argument, tensors.dtype(0), element_size(dtype), pointer, scalar});
      return !scalar || dtype == DType::f32;
    };
    for (size_t list = 0; list < alike.size(); ++list) {
      lists.pointer[list].resize(count);
      if (!add_column(alike[list], lists.pointer[list].data(), nullptr)) return false;
    }
    for (size_t list = 0; list < one_element.size(); ++list) {
      per_tensor[list].resize(count);
      if (!add_column(one_element[list], nullptr, per_tensor[list].data())) return false;
    }
    lists.numel.resize(count);
    contiguous_.resize(count);
    const bool are_plain = holds_for_all(static_cast<int64_t>(count), [&](int64_t begin, int64_t end) {
      for (const Column& column : columns) {
        for (int64_t i = begin; i < end; ++i) {
          column.argument.tensors.prefetch_ahead(i, end);
          if (!take(column, &column == columns.data(), i)) return false;
        }
      }
      return true;
    });
    if (!are_plain) return false;
    lists.index.resize(count);
    std::iota(lists.index.begin(), lists.index.end(), 0);
    return true;
  }

  bool take(const Column& column, bool is_first, int64_t i) {
    const ListView& tensors = column.argument.tensors;
    if (!tensors.is_strided(i) || tensors.dtype(i) != column.code || tensors.device(i) != call_.device) return false;
    const int64_t elements = tensors.numel(i);
    if (is_first) lists.numel[i] = elements;
    if (elements == 0 || elements != (column.scalar ? 1 : lists.numel[i])) return false;
    if (!tensors.has_memory(i, elements, column.element_bytes)) return false;
    void* const data = tensors.data(i, column.argument.is_written);
    if (column.scalar) return column.scalar[i] = static_cast<float*>(data), true;
    column.pointer[i] = data;
    const bool is_contiguous = tensors.is_contiguous(i);
    if (is_first) contiguous_[i] = is_contiguous;
    if (is_contiguous && contiguous_[i]) return true;
    const torch_abi::Layout layout = tensors.layout(i);
    return is_dense(layout) && same_strides(layout, first_.tensors.layout(i));
  }

  const char* op_;
  const CallDevice& call_;
  const ListArgument& first_;
  std::vector<char> contiguous_;  // of the first list
  bool are_plain_;
};

inline TensorLists check_lists(const char* op, const AllowedDTypes& allowed, const CallDevice& call,
                               const std::vector<ListArgument>& arguments) {
  ListChecker checker(op, call, arguments);
  for (const ListArgument& argument : arguments) checker.check_length(argument);
  for (const ListArgument& argument : arguments) checker.add(argument, allowed);
  return std::move(checker.lists);
}

// A name is anything that prints.
template <class Name>
void check_one_element(const char* op, const Name& name, const Tensor& tensor) {
  if (!tensor.is_defined()) fail(op, ": ", name, " is None, expected a tensor");
  if (tensor.numel() != 1) fail(op, ": ", name, " has ", tensor.numel(), " elements, expected 1");
}

template <class Name>
void check_memory(const char* op, const Name& name, const Tensor& tensor, int64_t element_bytes) {
  if (!tensor.has_memory(1, element_bytes)) fail(op, ": ", name, " ", kNoMemory);
}

template <class Name>
void check_device(const char* op, const Name& name, const Tensor& tensor, const CallDevice& call) {
  if (tensor.device() != call.device) {
    fail(op, ": ", name, " is on ", tensor.device().name(), ", ", call.decided_by, " is on ", call.device.name());
  }
}

inline FoundInf check_found_inf(const char* op, const Tensor& found_inf, const CallDevice& call, bool is_written) {
  check_one_element(op, "found_inf", found_inf);
  const int32_t dtype = found_inf.dtype();
  const bool is_int = dtype == aoti_torch_dtype_int32();
  if (!is_int && dtype != aoti_torch_dtype_float32()) {
    fail(op, ": found_inf has dtype ", dtype_name(dtype), ", expected float32 or int32");
  }
  check_device(op, "found_inf", found_inf, call);
  check_memory(op, "found_inf", found_inf, sizeof(uint32_t));
  void* word = is_written ? found_inf.mutable_data() : const_cast<void*>(found_inf.data());
  return {static_cast<uint32_t*>(word), is_int ? 1u : 0x3f800000u, is_int ? 0xffffffffu : 0x7fffffffu};
}

// A factor is an fp32 scalar on the device of the call, or an fp32 or fp64 one on the CPU, which is read here.
// `on_device`: whether kernels follow pointers of the call's device that the host must not.
inline Factor check_factor(const char* op, const char* name, const Tensor& factor, const CallDevice& call,
                           bool on_device) {
  check_one_element(op, name, factor);
  const Device device = factor.device();
  const int32_t dtype = factor.dtype();
  const bool is_f32 = dtype == aoti_torch_dtype_float32();
  if (!device.is_cpu()) check_device(op, name, factor, call);
  if (!is_f32 && !device.is_cpu()) {
    fail(op, ": ", name, " has dtype ", dtype_name(dtype), ", expected float32 on ", device.name());
  }
  if (!is_f32 && dtype != aoti_torch_dtype_float64()) {
    fail(op, ": ", name, " has dtype ", dtype_name(dtype), ", expected float32 or float64");
  }
  check_memory(op, name, factor, is_f32 ? sizeof(float) : sizeof(double));
  if (!is_f32) return {nullptr, *static_cast<const double*>(factor.data())};
  const float* value = static_cast<const float*>(factor.data());
  return on_device && device == call.device ? Factor{value, 0.0} : Factor{nullptr, *value};
}

// That factor, clipped where max_norm is not negative. Where the host knows all of it, it becomes one number.
inline ClippedFactor check_clipped(const char* op, const Factor& factor, const char* name, const Tensor& norm,
                                   double max_norm, const CallDevice& call, bool on_device) {
  // A negative number too small for fp32 is -0.0 there, which would clip.
  const float limit = max_norm < 0 ? -1.0f : static_cast<float>(max_norm);
  ClippedFactor clipped{factor, check_factor(op, name, norm, call, on_device), limit};
  if (clipped.max_norm < 0 || on_device) return clipped;
  clipped.value = clip_factor_element(static_cast<float>(clipped.norm.value), static_cast<float>(factor.value),
                                      std::exchange(clipped.max_norm, -1.0f));
  return clipped;
}

// One element of the given type, to be read, and written unless the caller says otherwise.
template <class Name>
void* check_state(const char* op, const Name& name, const Tensor& tensor, int32_t dtype, const CallDevice& call,
                  bool is_written = true) {
  check_one_element(op, name, tensor);
  if (tensor.dtype() != dtype) {
    const std::string expected = dtype_name(dtype).substr(sizeof("torch.") - 1);
    fail(op, ": ", name, " has dtype ", dtype_name(tensor.dtype()), ", expected ", expected);
  }
  check_device(op, name, tensor, call);
  check_memory(op, name, tensor, sizeof(uint32_t));
  return is_written ? tensor.mutable_data() : const_cast<void*>(tensor.data());
}

}  // namespace ampctx
