// The few functions of torch's C shim that ampctx calls, and thin owners of what they hand out.
//
// Declared here and not included from torch, so that building needs no torch and one library serves torch 2.11 and
// later, any Python, with and without CUDA. Origin: torch/csrc/inductor/aoti_torch/c/shim.h and
// torch/csrc/stable/c/shim.h, which torch keeps stable for two years; a test compiles this file together with them, so
// that a mismatch is a compile error. Kernels know nothing of torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "error.h"

using AOTITorchError = int32_t;
using StableIValue = uint64_t;
struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
class TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
struct StableListOpaque;
using StableListHandle = StableListOpaque*;
struct DeviceGuardOpaque;
using DeviceGuardHandle = DeviceGuardOpaque*;

extern "C" {
typedef void (*ParallelFunc)(int64_t begin, int64_t end, void* ctx);

int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_device_type_cuda();
int32_t aoti_torch_device_type_meta();
#define AMPCTX_DTYPES(OP)                                                                                              \
  OP(float16), OP(bfloat16), OP(float32), OP(float64), OP(uint8), OP(int8), OP(int16), OP(int32), OP(int64), OP(bool), \
      OP(float8_e5m2), OP(float8_e4m3fn), OP(float8_e5m2fnuz), OP(float8_e4m3fnuz), OP(uint16), OP(uint32),            \
      OP(uint64), OP(complex32), OP(complex64), OP(complex128)
#define AMPCTX_DECLARE(name) aoti_torch_dtype_##name()
int32_t AMPCTX_DTYPES(AMPCTX_DECLARE);
#undef AMPCTX_DECLARE
int32_t aoti_torch_layout_strided();

AOTITorchError aoti_torch_library_init_impl(const char* ns, const char* key, const char* file, uint32_t line,
                                            TorchLibraryHandle* library);
AOTITorchError torch_library_impl(TorchLibraryHandle library, const char* name,
                                  void (*kernel)(StableIValue*, uint64_t, uint64_t), uint64_t build_version);
AOTITorchError torch_list_size(StableListHandle list, size_t* size);
AOTITorchError torch_list_get_item(StableListHandle list, size_t index, StableIValue* element);
AOTITorchError torch_delete_list(StableListHandle list);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_is_defined(AtenTensorHandle tensor, bool* defined);
AOTITorchError aoti_torch_get_layout(AtenTensorHandle tensor, int32_t* layout);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* type);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* index);
AOTITorchError aoti_torch_get_numel(AtenTensorHandle tensor, int64_t* numel);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* dim);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** strides);
AOTITorchError aoti_torch_get_storage_offset(AtenTensorHandle tensor, int64_t* elements);
AOTITorchError aoti_torch_get_storage_size(AtenTensorHandle tensor, int64_t* bytes);
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle tensor, const void** data);
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** data);
AOTITorchError aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, AtenTensorHandle* tensor);
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain, ParallelFunc body, void* ctx);
AOTITorchError aoti_torch_create_device_guard(int32_t device_index, DeviceGuardHandle* guard);
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle guard);
// Null in a torch without CUDA.
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
// A range of torch's profiler. Null in a torch without them.
struct IValueMapOpaque;
struct C10IValueOpaque;
struct AtenRecordFunctionOpaque;
using AtenRecordFunctionHandle = AtenRecordFunctionOpaque*;
__attribute__((weak)) AOTITorchError aoti_record_function_start(const char* name, IValueMapOpaque* kwargs,
                                                                C10IValueOpaque* const* inputs, uint64_t count,
                                                                AtenRecordFunctionHandle* range);
__attribute__((weak)) AOTITorchError aoti_record_function_end(AtenRecordFunctionHandle range);
// Null before torch 2.13. The message of the latest exception in this thread.
__attribute__((weak)) const char* torch_exception_get_what_without_backtrace();
}

namespace ampctx::torch_abi {

// The shim of torch 2.11: the oldest torch that ampctx serves, and the calling convention of boxed kernels.
constexpr uint64_t kBuildVersion = (2ull << 56) | (11ull << 48);

// Why the latest call of torch failed. Older torch writes that to stderr and keeps nothing.
inline std::string last_error() {
  const char* what =
      torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : nullptr;
  return what ? what : "";
}

[[noreturn]] inline void fail_in_torch(const char* function) {
  const std::string why = last_error();
  fail("ampctx: torch's ", function, " reported an error", why.empty() ? "" : ": ", why);
}

#define AMPCTX_TORCH(function, ...)                                                \
  do {                                                                             \
    if (function(__VA_ARGS__) != 0) ::ampctx::torch_abi::fail_in_torch(#function); \
  } while (0)

// A property that a shim function writes through a pointer.
#define AMPCTX_GETTER(type, name, function)        \
  type name() const {                              \
    type value{};                                  \
    AMPCTX_TORCH(function, handle_.get(), &value); \
    return value;                                  \
  }

struct Device {
  int32_t type;
  int32_t index;

  bool operator==(const Device& other) const { return type == other.type && index == other.index; }
  bool operator!=(const Device& other) const { return !(*this == other); }
  bool is_cpu() const { return type == aoti_torch_device_type_cpu(); }
  static Device cpu() { return {aoti_torch_device_type_cpu(), -1}; }
  // As Python prints it.
  std::string name() const {
    if (is_cpu()) return "cpu";
    if (type == aoti_torch_device_type_meta()) return "meta";
    const bool cuda = type == aoti_torch_device_type_cuda();
    return (cuda ? "cuda" : "device type " + std::to_string(type)) + ":" + std::to_string(index);
  }
};

inline std::string dtype_name(int32_t dtype) {
#define AMPCTX_NAMED(name)         \
  {                                \
    aoti_torch_dtype_##name, #name \
  }
  const std::pair<int32_t (*)(), const char*> names[] = {AMPCTX_DTYPES(AMPCTX_NAMED)};
#undef AMPCTX_NAMED
  for (const auto& [code, name] : names) {
    if (dtype == code()) return std::string("torch.") + name;
  }
  return "number " + std::to_string(dtype);
}

// What torch has handed out, owned.
struct Delete {
  void operator()(AtenTensorHandle tensor) const { aoti_torch_delete_tensor_object(tensor); }
  void operator()(StableListHandle list) const { torch_delete_list(list); }
  void operator()(DeviceGuardHandle guard) const { aoti_torch_delete_device_guard(guard); }
  void operator()(AtenRecordFunctionHandle range) const { aoti_record_function_end(range); }
};
template <class Opaque>
using Owned = std::unique_ptr<Opaque, Delete>;

// A boxed kernel owns its arguments and the elements that it takes out of a list.
class Tensor {
 public:
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  explicit Tensor(StableIValue argument) : Tensor(reinterpret_cast<AtenTensorHandle>(argument)) {}

  AMPCTX_GETTER(bool, is_defined, aoti_torch_is_defined)
  AMPCTX_GETTER(int32_t, layout, aoti_torch_get_layout)
  AMPCTX_GETTER(int32_t, dtype, aoti_torch_get_dtype)
  AMPCTX_GETTER(int32_t, device_type, aoti_torch_get_device_type)
  AMPCTX_GETTER(int32_t, device_index, aoti_torch_get_device_index)
  AMPCTX_GETTER(int64_t, numel, aoti_torch_get_numel)
  AMPCTX_GETTER(int64_t, dim, aoti_torch_get_dim)
  AMPCTX_GETTER(int64_t*, sizes, aoti_torch_get_sizes)
  AMPCTX_GETTER(int64_t*, strides, aoti_torch_get_strides)
  AMPCTX_GETTER(int64_t, storage_offset, aoti_torch_get_storage_offset)
  AMPCTX_GETTER(int64_t, storage_bytes, aoti_torch_get_storage_size)
  AMPCTX_GETTER(const void*, data, torch_get_const_data_ptr)
  AMPCTX_GETTER(void*, mutable_data, torch_get_mutable_data_ptr)

  // Hands the tensor to the caller of a boxed kernel.
  StableIValue release() { return reinterpret_cast<StableIValue>(handle_.release()); }

 private:
  Owned<AtenTensorOpaque> handle_;
};

#undef AMPCTX_GETTER

using TensorList = std::vector<Tensor>;

// Calls `take`, which must not throw, with each tensor of a list.
template <class Take>
void take_list(StableIValue argument, const Take& take) {
  const Owned<StableListOpaque> list(reinterpret_cast<StableListHandle>(argument));
  size_t size = 0;
  AMPCTX_TORCH(torch_list_size, list.get(), &size);
  for (size_t i = 0; i < size; ++i) {
    StableIValue element = 0;
    AMPCTX_TORCH(torch_list_get_item, list.get(), i, &element);
    take(Tensor(element));
  }
}

// int, float and bool arguments lie in the first bytes of a stack slot.
template <class T>
T to_scalar(StableIValue argument) {
  T value;
  std::memcpy(&value, &argument, sizeof(value));
  return value;
}

// Words of torch's allocators for the CPU and CUDA, and of CUDA itself.
inline bool tells_of_memory(const std::string& why) {
  for (const char* words : {"out of memory", "can't allocate memory", "not enough memory"}) {
    if (why.find(words) != std::string::npos) return true;
  }
  return false;
}

// Where torch does not say why, it is memory: nothing else is likely to fail for a device that has tensors already.
[[noreturn]] inline void fail_to_allocate(int64_t elements, int32_t dtype, const Device& device) {
  const std::string why = last_error();
  if (!why.empty() && !tells_of_memory(why)) fail_in_torch("aoti_torch_empty_strided");
  fail_out_of_memory("no room on ", device.name(), " for ", elements, " elements of ", dtype_name(dtype),
                     why.empty() ? "" : ". ", why);
}

// A new 0-d tensor, or a 1-d one of `size` elements, of uninitialized memory.
inline Tensor empty(const int64_t* size, int32_t dtype, Device device) {
  const int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(size ? 1 : 0, size, &stride, dtype, device.type, device.index, &handle) != 0) {
    fail_to_allocate(size ? *size : 1, dtype, device);
  }
  return Tensor(handle);
}

// Shows a call to torch's profiler, as torch's dispatcher does.
inline Owned<AtenRecordFunctionOpaque> shown(const char* name) {
  AtenRecordFunctionHandle range = nullptr;
  const bool is_started =
      aoti_record_function_start && aoti_record_function_start(name, nullptr, nullptr, 0, &range) == 0;
  return Owned<AtenRecordFunctionOpaque>(is_started ? range : nullptr);
}

// torch's own thread pool. The body must not throw.
inline void parallel_for(int64_t begin, int64_t end, int64_t grain, ParallelFunc body, void* argument) {
  AMPCTX_TORCH(torch_parallel_for, begin, end, grain, body, argument);
}

}  // namespace ampctx::torch_abi
