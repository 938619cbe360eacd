// Runs CUDA C++ kernels on the CPU, for tests: the .cu files of csrc compile with g++ when this folder comes first on
// the include path. It checks logic and indexing, not speed, and knows only what those files use.
//
// A block runs on one OS thread, each CUDA thread as a fiber with its own stack. A fiber runs until it waits (at a
// barrier or in a warp collective) or ends; the scheduler then picks the next one. AMPCTX_EMULATION_SEED != 0 shuffles
// the order of the threads and blocks, so that a missing barrier gives a wrong result. Errors are exceptions: a barrier
// that not all threads reach, lanes of a mask that have exited or are elsewhere. Not emulated: races between warps
// beyond the order of the fibers, the memory model, the rounding of the GPU's own intrinsics.
#pragma once

#include "emulation.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static thread_local

#define CUDART_VERSION 13000
#define AMPCTX_LAUNCH(kernel, grid, block, stream, ...) \
  ::cuda_emulation::launch(kernel, grid, block, stream, __VA_ARGS__)

#define threadIdx (::cuda_emulation::executor().current->index)
#define blockIdx (::cuda_emulation::executor().block)
#define gridDim (::cuda_emulation::executor().grid)

using cudaStream_t = void*;
#define cudaStreamPerThread (reinterpret_cast<cudaStream_t>(2))
enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2, cudaErrorInvalidValue = 1 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed = 2 };

inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

// A small GPU: several blocks share a little data.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 3, cudaSuccess; }

template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  return *blocks = 1, cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  ::cuda_emulation::tell_of_host_write(memory, bytes);
  memset(memory, value, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaDriverGetVersion(int* version) {
  return *version = ::cuda_emulation::executor().driver, cudaSuccess;
}
// A variable of the device, which a test may have to know.
template <class Variable>
cudaError_t cudaGetSymbolAddress(void** address, Variable& variable) {
  ::cuda_emulation::tell_of_device_variable(&variable, sizeof(variable));
  return *address = &variable, cudaSuccess;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  const bool captures = ::cuda_emulation::executor().is_capturing;
  return *status = captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, cudaSuccess;
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

inline void __syncthreads() { ::cuda_emulation::wait_for_block(); }

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance) {
  const int lane = ::cuda_emulation::lane(), source = lane + static_cast<int>(distance);
  return ::cuda_emulation::exchange(mask, value, source < ::cuda_emulation::kWarp ? source : lane);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return ::cuda_emulation::exchange(mask, value, source);
}

inline void __syncwarp() {}

// Blocks run one after the other.
inline void __threadfence() {}
inline unsigned atomicInc(unsigned* count, unsigned last) {
  const unsigned before = *count;
  *count = before >= last ? 0 : before + 1;
  return before;
}
