// The kernels of a backend as library.cpp calls them, and what surrounds a call.
#pragma once

#include <optional>

#include "ops.h"
#include "torch_abi.h"

namespace ampctx {

struct Backend {
  const char* dispatch_key;
  AllowedDTypes dtypes;
  bool has_device_pointers;  // pointers that the host must not follow
  bool has_streams;
  decltype(&cpu::scale) scale;
  decltype(&cpu::axpby) axpby;
  decltype(&cpu::norms_workspace) norms_workspace;
  decltype(&cpu::l2norm) l2norm;
  decltype(&cpu::update_scale) update_scale;
  decltype(&cpu::block_factors) block_factors;
  decltype(&cpu::count_skip) count_skip;
#define AMPCTX_MEMBER_OF(op, Options, backend) decltype(&backend::op) op;
  AMPCTX_STEP_OPS(AMPCTX_MEMBER_OF, cpu)
#undef AMPCTX_MEMBER_OF
  decltype(&cpu::larc) larc;
};

#define AMPCTX_KERNEL(op, Options, backend) backend::op,
#define AMPCTX_KERNELS(backend)                                                                     \
  backend::scale, backend::axpby, backend::norms_workspace, backend::l2norm, backend::update_scale, \
      backend::block_factors, backend::count_skip, AMPCTX_STEP_OPS(AMPCTX_KERNEL, backend) backend::larc

// Makes the device of a call current for its duration, and keeps the memory that its kernels ask for: torch gives it
// away again in the order of the stream.
class Scope {
 public:
  Scope(const Backend& backend, const torch_abi::Device& device) : device_(device) {
    context.parallel_for = &torch_abi::parallel_for;
    context.owner = this;
    context.allocate = [](void* owner, int64_t bytes) {
      Scope& self = *static_cast<Scope*>(owner);
      self.memory_.push_back(torch_abi::empty(&bytes, aoti_torch_dtype_uint8(), self.device_));
      return self.memory_.back().mutable_data();
    };
    if (!backend.has_streams) return;
    guard_.emplace(device.index);
    context.stream = torch_abi::current_cuda_stream(device.index);
    context.device = device.index;
  }

  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  Context context;

 private:
  torch_abi::Device device_;
  torch_abi::TensorList memory_;
  std::optional<torch_abi::DeviceGuard> guard_;
};

}  // namespace ampctx
