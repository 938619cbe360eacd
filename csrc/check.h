// Argument checks, made once at the entry of an op. Each error names the op, the argument and the index. The outcome is
// free of torch: TensorLists, FoundInf, Factor. Without compiled kernels ampctx/kernels/fallbacks.py refuses the same
// calls.
#pragma once

#include <utility>

#include "arguments.h"
#include "ops.h"

namespace ampctx {

using torch_abi::Device;
using torch_abi::dtype_name;

struct ListArgument {
  const char* name;
  const Views& tensors;
};

// The device of a call, and the argument that decides it, for messages.
struct CallDevice {
  Device device;
  std::string decided_by;
};

inline CallDevice call_device(const ListArgument& first, const View& found_inf) {
  if (first.tensors.empty()) return {found_inf.is_defined ? found_inf.device : Device::cpu(), "found_inf"};
  return {first.tensors[0].device, std::string(first.name) + "[0]"};
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

// Checks the lists of a call one by one, and gathers what the kernels need of each. The first list comes first.
class ListChecker {
 public:
  ListChecker(const char* op, const CallDevice& call, const ListArgument& first) : op_(op), call_(call), first_(first) {
    lists.total_tensors = static_cast<int64_t>(first.tensors.size());
  }

  void check_length(const ListArgument& argument) const {
    const size_t count = first_.tensors.size();
    if (argument.tensors.size() != count) {
      fail(op_, ": ", argument.name, " has ", argument.tensors.size(), " tensors, ", first_.name, " has ", count);
    }
  }

  void add(const ListArgument& argument, const AllowedDTypes& allowed) {
    const Views& tensors = argument.tensors;
    const bool is_first = lists.depth == 0;
    const int list = lists.depth++;
    const int32_t code = tensors.empty() ? aoti_torch_dtype_float32() : tensors[0].dtype;
    const bool known = to_dtype(code, lists.dtype[list]) && allows(allowed, lists.dtype[list]);
    lists.pointer[list].reserve(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto refuse = [&](const auto&... why) { fail(op_, ": ", argument.name, "[", i, "] ", why...); };
      const View &view = tensors[i], &first = first_.tensors[i];
      if (!view.is_strided) refuse("is not a strided tensor");
      if (DType other; !known || (view.dtype != code && !(to_dtype(view.dtype, other) && allows(allowed, other)))) {
        refuse("has dtype ", dtype_name(view.dtype), ", expected ", allowed.names);
      }
      if (view.dtype != code) {
        refuse("has dtype ", dtype_name(view.dtype), ", ", argument.name, "[0] has ", dtype_name(code));
      }
      if (view.device != call_.device) {
        refuse("is on ", view.device.name(), ", ", call_.decided_by, " is on ", call_.device.name());
      }
      if (view.numel != first.numel) {
        refuse("has ", view.numel, " elements, ", first_.name, "[", i, "] has ", first.numel);
      }
      if (view.numel == 0) continue;
      if (!view.is_contiguous && !is_dense(view.layout)) {
        refuse("is not contiguous: its elements do not fill one block of memory");
      }
      if (!(view.is_contiguous && first.is_contiguous) && !same_strides(view.layout, first.layout)) {
        refuse("and ", first_.name, "[", i, "] have different memory layouts");
      }
      if (!view.has_memory) refuse(kNoMemory);
      lists.pointer[list].push_back(view.data);
      if (is_first) {
        lists.numel.push_back(view.numel);
        lists.index.push_back(static_cast<int64_t>(i));
      }
    }
  }

  TensorLists lists;

 private:
  const char* op_;
  const CallDevice& call_;
  const ListArgument& first_;
};

inline TensorLists check_lists(const char* op, const AllowedDTypes& allowed, const CallDevice& call,
                               const std::vector<ListArgument>& arguments) {
  ListChecker checker(op, call, arguments[0]);
  for (const ListArgument& argument : arguments) checker.check_length(argument);
  for (const ListArgument& argument : arguments) checker.add(argument, allowed);
  return std::move(checker.lists);
}

// A name is anything that prints.
template <class Name>
void check_one_element(const char* op, const Name& name, const View& tensor) {
  if (!tensor.is_defined) fail(op, ": ", name, " is None, expected a tensor");
  if (tensor.numel != 1) fail(op, ": ", name, " has ", tensor.numel, " elements, expected 1");
}

template <class Name>
void check_memory(const char* op, const Name& name, const View& tensor) {
  if (!tensor.has_memory) fail(op, ": ", name, " ", kNoMemory);
}

template <class Name>
void check_device(const char* op, const Name& name, const View& tensor, const CallDevice& call) {
  if (tensor.device != call.device) {
    fail(op, ": ", name, " is on ", tensor.device.name(), ", ", call.decided_by, " is on ", call.device.name());
  }
}

inline FoundInf check_found_inf(const char* op, const View& found_inf, const CallDevice& call) {
  check_one_element(op, "found_inf", found_inf);
  const int32_t dtype = found_inf.dtype;
  const bool is_int = dtype == aoti_torch_dtype_int32();
  if (!is_int && dtype != aoti_torch_dtype_float32()) {
    fail(op, ": found_inf has dtype ", dtype_name(dtype), ", expected float32 or int32");
  }
  check_device(op, "found_inf", found_inf, call);
  check_memory(op, "found_inf", found_inf);
  return {static_cast<uint32_t*>(found_inf.data), is_int ? 1u : 0x3f800000u, is_int ? 0xffffffffu : 0x7fffffffu};
}

// A factor is an fp32 scalar on the device of the call, or an fp32 or fp64 one on the CPU, which is read here.
// `on_device`: whether kernels follow pointers of the call's device that the host must not.
inline Factor check_factor(const char* op, const char* name, const View& factor, const CallDevice& call,
                           bool on_device) {
  check_one_element(op, name, factor);
  const Device device = factor.device;
  const int32_t dtype = factor.dtype;
  const bool is_f32 = dtype == aoti_torch_dtype_float32();
  if (!device.is_cpu()) check_device(op, name, factor, call);
  if (!is_f32 && !device.is_cpu()) {
    fail(op, ": ", name, " has dtype ", dtype_name(dtype), ", expected float32 on ", device.name());
  }
  if (!is_f32 && dtype != aoti_torch_dtype_float64()) {
    fail(op, ": ", name, " has dtype ", dtype_name(dtype), ", expected float32 or float64");
  }
  check_memory(op, name, factor);
  if (!is_f32) return {nullptr, *static_cast<const double*>(factor.data)};
  const float* value = static_cast<const float*>(factor.data);
  return on_device && device == call.device ? Factor{value, 0.0} : Factor{nullptr, *value};
}

// That factor, clipped where max_norm is not negative. Where the host knows all of it, it becomes one number.
inline ClippedFactor check_clipped(const char* op, const Factor& factor, const char* name, const View& norm,
                                   double max_norm, const CallDevice& call, bool on_device) {
  // A negative number too small for fp32 is -0.0 there, which would clip.
  const float limit = max_norm < 0 ? -1.0f : static_cast<float>(max_norm);
  ClippedFactor clipped{factor, check_factor(op, name, norm, call, on_device), limit};
  if (clipped.max_norm < 0 || on_device) return clipped;
  clipped.value = clip_factor_element(static_cast<float>(clipped.norm.value), static_cast<float>(factor.value),
                                      std::exchange(clipped.max_norm, -1.0f));
  return clipped;
}

// One element of the given type.
template <class Name>
void* check_state(const char* op, const Name& name, const View& tensor, int32_t dtype, const CallDevice& call) {
  check_one_element(op, name, tensor);
  if (tensor.dtype != dtype) {
    const std::string expected = dtype_name(dtype).substr(sizeof("torch.") - 1);
    fail(op, ": ", name, " has dtype ", dtype_name(tensor.dtype), ", expected ", expected);
  }
  check_device(op, name, tensor, call);
  check_memory(op, name, tensor);
  return tensor.data;
}

}  // namespace ampctx
