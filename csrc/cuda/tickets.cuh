// How the blocks of a launch tell which of them ends last, so that it joins what all have left: one launch, not two.
//
// A ticket is a count in memory of the device. Each block takes the next number; whoever takes the last one is last,
// and the count is 0 again (atomicInc wraps), so no launch resets it. Two launches that run at once need tickets of
// their own: each stream has a set, and each call that a graph captures, which may be replayed in any stream. A kernel
// that aborts ends the context, and its memory with it.
#pragma once

#include <unordered_map>

#include "multi_tensor_apply.cuh"

namespace ampctx::cuda {

// A set of tickets: one for the launch, and one for each block but the last, which a tensor may begin in and go on
// from.
constexpr int kTickets = kMaxBlocks;

// Which sets of a device are given away. torch makes its streams once and destroys none, so a handle stands for one
// stream.
class TicketSets {
 public:
  static constexpr int kStreams = 16, kCapturedCalls = 112;

  static TicketSets& of(int device);
  // For a call in that stream of the current device. Null if no set is left.
  unsigned* take(cudaStream_t stream);
  void forget() { streams_.clear(), captured_ = 0; }  // for tests

 private:
  int number_for(cudaStream_t stream, bool captures);
  unsigned* memory();

  std::mutex mutex_;
  unsigned* memory_ = nullptr;
  std::unordered_map<cudaStream_t, int> streams_;
  int captured_ = 0;
};

// A set for the launches of one call. Where none is left, memory that is set to 0, by the stream, in front of them.
unsigned* tickets_for(const Context& context);

// Called by one thread, after what its block leaves. Whether it is the last of `count` callers; if so it sees what the
// others have left.
__device__ inline bool takes_last(unsigned* ticket, unsigned count) {
  __threadfence();
  const bool is_last = atomicInc(ticket, count - 1) == count - 1;
  if (is_last) __threadfence();
  return is_last;
}

// Called by one thread of each block that a tensor has elements in, where these are several: whether it is the last.
// The ticket is that of the block that the tensor begins in, which no other tensor goes on from.
__device__ inline bool takes_last_of_tensor(unsigned* tickets, int64_t first_block, int64_t last_block) {
  return takes_last(tickets + 1 + first_block, static_cast<unsigned>(last_block - first_block + 1));
}

// Called by all threads of a block: whether it is the last of the launch.
__device__ inline bool is_last_block(unsigned* tickets) {
  __shared__ bool is_last;
  __syncthreads();  // what any thread of the block leaves
  if (threadIdx.x == 0) is_last = takes_last(tickets, gridDim.x);
  __syncthreads();
  return is_last;
}

// The scale of a loss whose gradients a launch checks: the last block applies the rule. Not where scale is null.
struct KernelUpdate {
  float* scale = nullptr;
  int32_t* growth_tracker = nullptr;
  int32_t* hysteresis_tracker = nullptr;
  ScaleRule rule{};

  KernelUpdate() = default;
  explicit KernelUpdate(const ScaleUpdate& update)
      : scale(update.state.scale),
        growth_tracker(update.state.growth_tracker),
        hysteresis_tracker(update.state.hysteresis_tracker),
        rule(update.rule) {}

  // Called by one thread of the last block.
  __device__ void apply(const FoundInf& found_inf) const {
    if (scale) update_scale_element(scale, growth_tracker, hysteresis_tracker, found_inf.is_set(), rule);
  }
};

}  // namespace ampctx::cuda
