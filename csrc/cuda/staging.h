// Copies to the device that nobody waits for: out of pinned memory, which is used again when its copy is over.
#pragma once

#include <cuda_runtime.h>

#include <deque>
#include <mutex>

#include "../error.h"

namespace ampctx::cuda {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next launch, anybody's, reports it
  if (error == cudaErrorMemoryAllocation) fail_out_of_memory(what, ": ", cudaGetErrorString(error));
  fail("ampctx: ", what, ": ", cudaGetErrorString(error));
}

// In whose scope a call that asks for memory or about an event does no harm to a graph that another thread captures.
class RelaxedCapture {
 public:
  RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() { exchange(); }

 private:
  void exchange() { cudaThreadExchangeStreamCaptureMode(&mode_); }

  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

// What there is one of for each device. Never destroyed: at the end of the process CUDA may be gone before.
template <class T>
T& of_device(int device) {
  static std::mutex mutex;
  static auto* const all = new std::deque<T>;
  const std::lock_guard<std::mutex> lock(mutex);
  while (all->size() <= static_cast<size_t>(device)) all->emplace_back();
  return (*all)[device];
}

class Staging {
 public:
  // fill(words) writes what is copied to `target`.
  template <class Fill>
  void copy(int64_t* target, int64_t words, cudaStream_t stream, const Fill& fill) {
    const size_t bytes = static_cast<size_t>(words) * sizeof(int64_t);
    const std::lock_guard<std::mutex> lock(mutex_);
    const RelaxedCapture relaxed;
    Piece& piece = free_piece(bytes);
    fill(static_cast<int64_t*>(piece.memory));
    check_cuda(cudaMemcpyAsync(target, piece.memory, bytes, cudaMemcpyHostToDevice, stream), "copy of a table");
    check_cuda(cudaEventRecord(piece.copied, stream), "cudaEventRecord");
  }

 private:
  struct Piece {
    void* memory = nullptr;
    size_t bytes = 0;
    cudaEvent_t copied{};
  };

  Piece& free_piece(size_t bytes) {
    for (Piece& piece : pieces_) {
      if (piece.bytes >= bytes && is_over(piece.copied)) return piece;
    }
    Piece piece;
    for (piece.bytes = 1 << 16; piece.bytes < bytes;) piece.bytes *= 2;
    check_cuda(cudaHostAlloc(&piece.memory, piece.bytes, cudaHostAllocPortable), "pinned memory for a table");
    check_cuda(cudaEventCreateWithFlags(&piece.copied, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    pieces_.push_back(piece);
    return pieces_.back();
  }

  static bool is_over(cudaEvent_t event) {
    const cudaError_t error = cudaEventQuery(event);
    if (error != cudaErrorNotReady) return check_cuda(error, "cudaEventQuery"), true;
    cudaGetLastError();  // or the next launch reports it
    return false;
  }

  std::mutex mutex_;
  std::deque<Piece> pieces_;
};

}  // namespace ampctx::cuda
