// A warp: its lanes' registers, and where each lane is.
#pragma once

#include "memory.h"
#include "program.h"

namespace ptx {

// What the warps of a block share.
struct Block {
  const Kernel* kernel;
  const uint8_t* parameters;
  uint32_t index, threads, grid;
  GlobalMemory* global;
  SharedMemory* shared;
};

class Warp {
 public:
  // Where lanes are: a set of lanes for each state. The rest have exited.
  uint32_t running = 0, at_barrier = 0, in_collective = 0;
  int32_t pc[kWarp];

  void begin(const Block& block, uint32_t first_thread);
  // Runs until no lane can go on without the other warps.
  void run();

  const uint64_t* read(int32_t number) const {
    return number >= 0 ? &registers_[static_cast<size_t>(number) * kWarp]
                       : &block_->kernel->constants[static_cast<size_t>(~number) * kWarp];
  }
  uint64_t* write(int32_t number) { return &registers_[static_cast<size_t>(number) * kWarp]; }
  uint32_t& predicate(int32_t number) { return predicates_[static_cast<size_t>(number)]; }

  const Block& block() const { return *block_; }
  uint32_t thread(int lane) const { return first_thread_ + static_cast<uint32_t>(lane); }
  // The thread's number in the launch.
  uint32_t thread_of_grid(int lane) const { return block_->index * block_->threads + thread(lane); }
  uint32_t alive() const { return running | at_barrier | in_collective; }
  // Whether the lanes at work are all that will come to a collective.
  bool is_complete = false;
  // What is at work, for messages: the instruction, and the lane whose access is checked.
  const Instruction* current = nullptr;
  int lane = 0;

 private:
  const Block* block_ = nullptr;
  uint32_t first_thread_ = 0;
  std::vector<uint64_t> registers_;
  std::vector<uint32_t> predicates_;
};

// Calls body(lane) for each of `lanes`. All 32 is the case that compilers can make fast.
template <class Body>
inline __attribute__((always_inline)) void for_each_lane(uint32_t lanes, const Body& body) {
  if (lanes == kAllLanes) {
    for (int lane = 0; lane < kWarp; ++lane) body(lane);
  } else {
    for (uint32_t rest = lanes; rest; rest &= rest - 1) body(__builtin_ctz(rest));
  }
}

}  // namespace ptx
