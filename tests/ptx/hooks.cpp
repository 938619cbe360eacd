// Ties the interpreter to the CUDA code of csrc as the emulation compiles it: launches come here, and what the ops ask
// torch for becomes the memory that a kernel may touch.
//
// The library serves as ampctx/_ops.so does, for CPU tensors; the linker gives it __wrap_* for torch's own functions.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_set>

#include "../../csrc/torch_abi.h"
#include "../cuda_emulation/emulation.h"
#include "launch.h"

extern "C" size_t aoti_torch_dtype_element_size(int32_t dtype);

namespace {

using namespace ampctx;

ptx::GlobalMemory memory;
std::unique_ptr<ptx::Program> program;
std::recursive_mutex at_work;                // one op at a time: its buffers are everybody's
std::unordered_set<AtenTensorHandle> fresh;  // tensors that the op at work has made
size_t announced_variables = 0;              // of the device, to the memory of the op at work

void load(const char* path, const char* coverage) {
  auto loaded = ptx::read_program(path, coverage ? coverage : "");
  program = std::move(loaded);
}

// The kernel behind a function of this library.
const ptx::Kernel& find_kernel(const void* function) {
  Dl_info info;
  if (!dladdr(function, &info)) throw ptx::Error("PTX: a launch of what is no function");
  const auto offset = reinterpret_cast<uint64_t>(function) - reinterpret_cast<uint64_t>(info.dli_fbase);
  const auto name = program->functions.find(offset);
  if (name == program->functions.end()) throw ptx::Error("PTX: a launch of a kernel without a name");
  const auto kernel = program->kernels.find(name->second);
  if (kernel == program->kernels.end()) throw ptx::Error("PTX: no entry for the kernel " + name->second);
  return kernel->second;
}

// The parameters as a launch lays them out, which has to be as the entry declares them.
std::vector<uint64_t> pack(const ptx::Kernel& kernel, const cuda_emulation::Launch& launch) {
  const auto refuse = [&](size_t i, const std::string& entry, const std::string& host) {
    throw ptx::Error("PTX: parameter " + std::to_string(i) + " of " + kernel.name + " is " + entry +
                     " in the entry, and the host packs " + host);
  };
  const auto place = [](size_t offset, size_t bytes) {
    return std::to_string(bytes) + " bytes at " + std::to_string(offset);
  };
  std::vector<uint64_t> words;
  size_t end = 0;
  for (size_t i = 0; i < launch.count; ++i) {
    const cuda_emulation::Parameter& parameter = launch.parameters[i];
    const size_t offset = (end + parameter.alignment - 1) / parameter.alignment * parameter.alignment;
    end = offset + parameter.bytes;
    if (i >= kernel.parameters.size()) refuse(i, "nothing", place(offset, parameter.bytes));
    const auto declared_offset = static_cast<size_t>(kernel.parameters[i].offset);
    const auto declared_bytes = static_cast<size_t>(kernel.parameters[i].bytes);
    if (declared_offset != offset || declared_bytes != parameter.bytes) {
      refuse(i, place(declared_offset, declared_bytes), place(offset, parameter.bytes));
    }
    words.resize((end + 15) / 16 * 2);
    std::memcpy(reinterpret_cast<uint8_t*>(words.data()) + offset, parameter.data, parameter.bytes);
  }
  if (launch.count < kernel.parameters.size()) refuse(launch.count, "there", "nothing");
  return words;
}

void intercept(const cuda_emulation::Launch& launch) {
  const std::lock_guard<std::recursive_mutex> lock(at_work);
  if (!program) {
    const char* const path = std::getenv("AMPCTX_PTX_PROGRAM");
    if (!path) throw ptx::Error("PTX: AMPCTX_PTX_PROGRAM names no program");
    load(path, std::getenv("AMPCTX_PTX_COVERAGE"));
  }
  const auto& variables = cuda_emulation::device_variables();
  for (; announced_variables < variables.size(); ++announced_variables) {
    const auto& [data, bytes] = variables[announced_variables];
    memory.announce(data, static_cast<int64_t>(bytes), true, false);
  }
  const ptx::Kernel& kernel = find_kernel(launch.kernel);
  const std::vector<uint64_t> words = pack(kernel, launch);
  ptx::launch(kernel, launch.grid, launch.block, reinterpret_cast<const uint8_t*>(words.data()), memory);
}

void host_writes(const void* data, size_t bytes) { memory.write_from_host(data, static_cast<int64_t>(bytes)); }

const bool is_hooked = (cuda_emulation::interceptor() = intercept, cuda_emulation::host_writes() = host_writes, true);

// --- what surrounds an op --------------------------------------------------------------------------------------------

using BoxedKernel = void (*)(StableIValue*, uint64_t, uint64_t);
constexpr size_t kOps = 128;  // of all namespaces
BoxedKernel ops[kOps];
size_t op_count = 0;

template <size_t number>
void call(StableIValue* stack, uint64_t arguments, uint64_t results) {
  const std::lock_guard<std::recursive_mutex> lock(at_work);
  memory.begin_call();
  announced_variables = 0;
  fresh.clear();
  ops[number](stack, arguments, results);
}

template <size_t... number>
BoxedKernel caller(size_t wanted, std::index_sequence<number...>) {
  constexpr BoxedKernel callers[] = {call<number>...};
  return callers[wanted];
}

void announce(AtenTensorHandle tensor, const void* data, bool is_writable) {
  int64_t elements = 0;
  int32_t dtype = 0;
  if (aoti_torch_get_numel(tensor, &elements) != 0 || aoti_torch_get_dtype(tensor, &dtype) != 0) return;
  memory.announce(data, elements * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype)), is_writable,
                  fresh.count(tensor) > 0);
}

}  // namespace

#define AMPCTX_EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {

AOTITorchError __real_torch_get_const_data_ptr(AtenTensorHandle tensor, const void** data);
AOTITorchError __real_torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** data);
AOTITorchError __real_aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                               int32_t device_type, int32_t device_index, AtenTensorHandle* tensor);
AOTITorchError __real_torch_library_impl(TorchLibraryHandle library, const char* name, BoxedKernel kernel,
                                         uint64_t build_version);

AOTITorchError __wrap_torch_get_const_data_ptr(AtenTensorHandle tensor, const void** data) {
  const AOTITorchError error = __real_torch_get_const_data_ptr(tensor, data);
  if (error == 0) announce(tensor, *data, false);
  return error;
}

AOTITorchError __wrap_torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** data) {
  const AOTITorchError error = __real_torch_get_mutable_data_ptr(tensor, data);
  if (error == 0) announce(tensor, *data, true);
  return error;
}

AOTITorchError __wrap_aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                               int32_t device_type, int32_t device_index, AtenTensorHandle* tensor) {
  const AOTITorchError error =
      __real_aoti_torch_empty_strided(dim, sizes, strides, dtype, device_type, device_index, tensor);
  if (error == 0) fresh.insert(*tensor);
  return error;
}

AOTITorchError __wrap_torch_library_impl(TorchLibraryHandle library, const char* name, BoxedKernel kernel,
                                         uint64_t build_version) {
  if (op_count == kOps) return 1;
  ops[op_count] = kernel;
  const BoxedKernel called = caller(op_count++, std::make_index_sequence<kOps>());
  return __real_torch_library_impl(library, name, called, build_version);
}
}

// Runs another program from now on; returns the error, or nothing. `coverage` may be null.
AMPCTX_EXPORT const char* ampctx_ptx_load(const char* path, const char* coverage) {
  static std::string error;
  const std::lock_guard<std::recursive_mutex> lock(at_work);
  try {
    load(path, coverage);
    error = "";
  } catch (const std::exception& exception) {
    error = exception.what();
  }
  return error.c_str();
}
