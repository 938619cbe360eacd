// The kernels of a backend, and the checks of a call's arguments, made once at the entry of an op. Each error names the
// op, the argument and the index. The outcome is free of torch: TensorLists, FoundInf, Factor. Without compiled kernels
// ampctx/kernels/fallbacks.py refuses the same calls.
#pragma once

#include <initializer_list>
#include <utility>

#include "arguments.h"
#include "ops.h"

namespace ampctx {

using torch_abi::Device;
using torch_abi::dtype_name;

struct Backend {
  const char* dispatch_key;
  AllowedDTypes dtypes;
  bool has_device_pointers;  // pointers that the host must not follow
  bool has_streams;
#define AMPCTX_MEMBER_OF(op, Options, backend) decltype(&backend::op) op;
  AMPCTX_ALL_OPS(AMPCTX_MEMBER_OF, cpu)
#undef AMPCTX_MEMBER_OF
};
#define AMPCTX_KERNEL(op, Options, backend) backend::op,
#define AMPCTX_KERNELS(backend) AMPCTX_ALL_OPS(AMPCTX_KERNEL, backend)

struct ListArgument {
  const char* name;
  const Views& tensors;
  DType code = DType::f32;  // of 8 bits, that it may hold beside floats; f32 for none
};

// Of an argument, or of the tensor at an index of a list.
struct ArgumentName {
  const char* name;
  int64_t index;

  ArgumentName(const char* name, int64_t index = -1) : name(name), index(index) {}
  friend std::ostream& operator<<(std::ostream& out, const ArgumentName& self) {
    out << self.name;
    return self.index < 0 ? out : out << "[" << self.index << "]";
  }
};

inline bool to_dtype(int32_t number, DType& dtype) {
  const ElementType* const type = type_of(number);
  dtype = static_cast<DType>(type ? type - kTypes : 0);
  return type && dtype <= DType::u8;
}

// A call of an op, and its device.
class Call {
 public:
  Call(const char* op, const Backend& backend, const char* name, const View& tensor)
      : op(op), backend(backend), device(tensor.is_defined ? tensor.device : Device::cpu()), decided_by_(name) {}
  // The first list decides the device, where it has tensors.
  Call(const char* op, const Backend& backend, const ListArgument& first, const View& found_inf)
      : Call(op, backend, "found_inf", found_inf) {
    if (first.tensors.empty()) return;
    device = first.tensors[0].device;
    decided_by_ = ArgumentName(first.name, 0);
  }

  template <class... Why>
  [[noreturn]] void refuse(ArgumentName name, const Why&... why) const {
    fail(op, ": ", name, " ", why...);
  }

  void check_defined(ArgumentName name, const View& tensor) const {
    if (!tensor.is_defined) refuse(name, "is None, expected a tensor");
  }

  void check_dtype(ArgumentName name, const View& tensor, int32_t dtype) const {
    if (tensor.dtype == dtype) return;
    refuse(name, "has dtype ", dtype_name(tensor.dtype), ", expected ", dtype_name(dtype).substr(sizeof("torch.") - 1));
  }

  void check_device(ArgumentName name, const View& tensor) const {
    if (tensor.device != device) {
      refuse(name, "is on ", tensor.device.name(), ", ", decided_by_, " is on ", device.name());
    }
  }

  void check_memory(ArgumentName name, const View& tensor) const {
    if (!tensor.has_memory) refuse(name, "has no memory: its storage has been freed or made smaller");
  }

  void check_one_element(ArgumentName name, const View& tensor) const {
    check_defined(name, tensor);
    if (tensor.numel != 1) refuse(name, "has ", tensor.numel, " elements, expected 1");
  }

  void check_length(const ListArgument& argument, const ListArgument& first) const {
    const size_t size = argument.tensors.size(), count = first.tensors.size();
    if (size != count) refuse(argument.name, "has ", size, " tensors, ", first.name, " has ", count);
  }

  // The memory of a contiguous tensor.
  void* data(ArgumentName name, const View& tensor) const {
    check_device(name, tensor);
    if (!tensor.is_contiguous) refuse(name, "is not contiguous");
    check_memory(name, tensor);
    return tensor.data;
  }

  // The one element.
  template <class T = float>
  T* element(ArgumentName name, const View& tensor, int32_t dtype = aoti_torch_dtype_float32()) const {
    check_one_element(name, tensor);
    check_dtype(name, tensor, dtype);
    check_device(name, tensor);
    check_memory(name, tensor);
    return static_cast<T*>(tensor.data);
  }

  // One fp32 element of each tensor of the list.
  PerTensor elements(const ListArgument& argument) const {
    PerTensor pointers(argument.tensors.size());
    for (size_t i = 0; i < pointers.size(); ++i) {
      pointers[i] = element(ArgumentName(argument.name, i), argument.tensors[i]);
    }
    return pointers;
  }

  FoundInf found_inf(const View& found_inf) const {
    check_one_element("found_inf", found_inf);
    const int32_t dtype = found_inf.dtype;
    const bool is_int = dtype == aoti_torch_dtype_int32();
    if (!is_int && dtype != aoti_torch_dtype_float32()) {
      refuse("found_inf", "has dtype ", dtype_name(dtype), ", expected float32 or int32");
    }
    check_device("found_inf", found_inf);
    check_memory("found_inf", found_inf);
    return {static_cast<uint32_t*>(found_inf.data), is_int ? 1u : 0x3f800000u, is_int ? 0xffffffffu : 0x7fffffffu};
  }

  // A factor is an fp32 scalar on the device of the call, or an fp32 or fp64 one on the CPU, which is read here.
  Factor factor(ArgumentName name, const View& factor) const {
    check_one_element(name, factor);
    const bool is_f32 = factor.dtype == aoti_torch_dtype_float32(), is_cpu = factor.device.is_cpu();
    if (!is_cpu) check_device(name, factor);
    if (!is_f32 && !is_cpu) {
      refuse(name, "has dtype ", dtype_name(factor.dtype), ", expected float32 on ", device.name());
    }
    if (!is_f32 && factor.dtype != aoti_torch_dtype_float64()) {
      refuse(name, "has dtype ", dtype_name(factor.dtype), ", expected float32 or float64");
    }
    check_memory(name, factor);
    if (!is_f32) return {nullptr, *static_cast<const double*>(factor.data)};
    const float* value = static_cast<const float*>(factor.data);
    return backend.has_device_pointers && factor.device == device ? Factor{value, 0.0} : Factor{nullptr, *value};
  }

  // That factor, clipped where max_norm is not negative. On the CPU both numbers are known: fold them into one.
  ClippedFactor clipped(const Factor& given, const View& grad_norm, double max_norm) const {
    // -1e-50 rounds to -0.0f, which is not < 0: test the double.
    const float limit = max_norm < 0 ? -1.0f : static_cast<float>(max_norm);
    ClippedFactor clipped{given, factor("grad_norm", grad_norm), limit};
    if (clipped.max_norm < 0 || backend.has_device_pointers) return clipped;
    clipped.value = clip_factor_element(static_cast<float>(clipped.norm.value), static_cast<float>(given.value),
                                        std::exchange(clipped.max_norm, -1.0f));
    return clipped;
  }

  // Adds a list to those that the kernels walk, where `first` is or will be the first.
  void add(TensorLists& lists, const ListArgument& argument, const ListArgument& first_argument,
           const AllowedDTypes& allowed) const {
    const Views& tensors = argument.tensors;
    const bool is_first = lists.depth == 0;
    const int list = lists.depth++;
    const int32_t code = tensors.empty() ? aoti_torch_dtype_float32() : tensors[0].dtype;
    const bool known = to_dtype(code, lists.dtype[list]) && allows(allowed, lists.dtype[list]);
    lists.total_tensors = static_cast<int64_t>(tensors.size());
    lists.pointer[list].reserve(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      const ArgumentName name(argument.name, i);
      const View &view = tensors[i], &first = first_argument.tensors[i];
      if (!view.is_strided) refuse(name, "is not a strided tensor");
      if (DType other; !known || (view.dtype != code && !(to_dtype(view.dtype, other) && allows(allowed, other)))) {
        refuse(name, "has dtype ", dtype_name(view.dtype), ", expected ", allowed.names, allowed.code);
      }
      if (view.dtype != code) {
        refuse(name, "has dtype ", dtype_name(view.dtype), ", ", argument.name, "[0] has ", dtype_name(code));
      }
      check_device(name, view);
      if (view.numel != first.numel) {
        refuse(name, "has ", view.numel, " elements, ", ArgumentName(first_argument.name, i), " has ", first.numel);
      }
      if (view.numel == 0) continue;
      if (!view.is_contiguous && !is_dense(view.layout)) {
        refuse(name, "is not contiguous: its elements do not fill one block of memory");
      }
      if (!(view.is_contiguous && first.is_contiguous) && !same_strides(view.layout, first.layout)) {
        refuse(name, "and ", ArgumentName(first_argument.name, i), " have different memory layouts");
      }
      check_memory(name, view);
      lists.pointer[list].push_back(view.data);
      if (is_first) {
        lists.numel.push_back(view.numel);
        lists.index.push_back(static_cast<int64_t>(i));
      }
    }
  }

  template <class Arguments = std::initializer_list<ListArgument>>
  TensorLists lists(const Arguments& arguments) const {
    TensorLists lists;
    const ListArgument& first = *arguments.begin();
    for (const ListArgument& argument : arguments) check_length(argument, first);
    for (const ListArgument& argument : arguments) {
      const AllowedDTypes& floats = backend.dtypes;
      add(lists, argument, first, argument.code == DType::f32 ? floats : or_codes(floats, argument.code));
    }
    return lists;
  }

  const char* const op;
  const Backend& backend;
  Device device;

 private:
  ArgumentName decided_by_;
};

// Makes the device of a call current for its duration, and keeps the memory that its kernels ask for: torch gives it
// away again in the order of the stream.
class DeviceScope {
 public:
  explicit DeviceScope(const Call& call) : device_(call.device) {
    context.parallel_for = &torch_abi::parallel_for;
    context.owner = this;
    context.allocate = [](void* owner, int64_t bytes) {
      DeviceScope& self = *static_cast<DeviceScope*>(owner);
      self.memory_.push_back(torch_abi::empty(&bytes, aoti_torch_dtype_uint8(), self.device_));
      return self.memory_.back().mutable_data();
    };
    if (!call.backend.has_streams) return;
    DeviceGuardHandle guard = nullptr;
    AMPCTX_TORCH(aoti_torch_create_device_guard, device_.index, &guard);
    guard_.reset(guard);
    AMPCTX_TORCH(aoti_torch_get_current_cuda_stream, device_.index, &context.stream);
    context.device = device_.index;
  }

  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  void* allocate(int64_t bytes) const { return bytes > 0 ? context.allocate(context.owner, bytes) : nullptr; }

  Context context;

 private:
  Device device_;
  torch_abi::TensorList memory_;
  torch_abi::Owned<DeviceGuardOpaque> guard_;
};

}  // namespace ampctx
