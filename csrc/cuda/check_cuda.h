// Errors of CUDA's runtime.
#pragma once

#include <cuda_runtime.h>

#include "../error.h"

namespace ampctx::cuda {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next launch, anybody's, reports it
  if (error == cudaErrorMemoryAllocation) fail_out_of_memory(what, ": ", cudaGetErrorString(error));
  fail("ampctx: ", what, ": ", cudaGetErrorString(error));
}

}  // namespace ampctx::cuda
