// The kernels of a backend as library.cpp calls them, and what surrounds a call.
#pragma once

#include <optional>

#include "optimizer_ops.h"
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
  decltype(&cpu::adam) adam;
  decltype(&cpu::sgd) sgd;
  decltype(&cpu::adagrad) adagrad;
  decltype(&cpu::lamb) lamb;
  decltype(&cpu::novograd) novograd;
  decltype(&cpu::larc) larc;
};

#define AMPCTX_KERNELS(backend)                                                                                    \
  backend::scale, backend::axpby, backend::norms_workspace, backend::l2norm, backend::update_scale, backend::adam, \
      backend::sgd, backend::adagrad, backend::lamb, backend::novograd, backend::larc

// Makes the device of a call current for its duration.
class Scope {
 public:
  Scope(const Backend& backend, const torch_abi::Device& device) {
    context.parallel_for = &torch_abi::parallel_for;
    if (!backend.has_streams) return;
    guard_.emplace(device.index);
    context.stream = torch_abi::current_cuda_stream(device.index);
    context.device = device.index;
  }

  Context context;

 private:
  std::optional<torch_abi::DeviceGuard> guard_;
};

}  // namespace ampctx
