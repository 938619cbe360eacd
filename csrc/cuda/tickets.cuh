// How the blocks of a launch tell which of them ends last, so that it joins what all have left: one launch, not two.
//
// A ticket is a count in memory of the device. Each block takes the next number; whoever takes the last one is last,
// and the count is 0 again (atomicInc wraps), so no launch resets it. Two launches that run at once need tickets of
// their own: each stream has a set, and each call that a graph captures, which may be replayed in any stream. A kernel
// that aborts ends the context, and its memory with it.
#pragma once

#include "multi_tensor_apply.cuh"

namespace ampctx::cuda {

// tickets[0]: blocks of the launch. tickets[1 + b]: the one tensor that begins in block b and ends in a later one.
constexpr int kTickets = kMaxBlocks;

// A set for the launches of one call. Where none is left, memory that is set to 0, by the stream, in front of them.
unsigned* tickets_for(const Context& context);
void forget_tickets();  // gives none of the first device away any more; for tests

// Called by one thread, after what its block leaves. Whether it is the last of `count` callers; if so it sees what the
// others have left.
__device__ inline bool is_last_arrival(unsigned* ticket, unsigned count) {
  __threadfence();
  const bool is_last = atomicInc(ticket, count - 1) == count - 1;
  if (is_last) __threadfence();
  return is_last;
}

// Called by one thread of each block that a tensor has elements in, where these are several: whether it is the last.
// The ticket is that of the block that the tensor begins in, which no other tensor goes on from.
__device__ inline bool is_last_arrival_of_tensor(unsigned* tickets, int64_t first_block, int64_t last_block) {
  return is_last_arrival(tickets + 1 + first_block, static_cast<unsigned>(last_block - first_block + 1));
}

// Called by all threads of a block: whether it is the last of the launch.
__device__ inline bool is_last_block(unsigned* tickets) {
  __shared__ bool is_last;
  __syncthreads();  // what any thread of the block leaves
  if (threadIdx.x == 0) is_last = is_last_arrival(tickets, gridDim.x);
  __syncthreads();
  return is_last;
}

// Called by one thread of the last block of a launch that checks gradients of a loss.
__device__ inline void apply(const ScaleUpdate& update) {
  const ScaleState& state = update.state;
  update_scale_element(state.scale, state.growth_tracker, state.hysteresis_tracker, state.found_inf.is_set(),
                       update.rule);
}

}  // namespace ampctx::cuda
