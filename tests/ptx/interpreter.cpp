// Runs a launch: blocks one after the other, the warps of a block in turn from barrier to barrier, the lanes of a warp
// together where they are at the same instruction.
//
// Of lanes that are at different instructions the hindmost go first, so that branches meet again. What no order of
// threads would show is found by looking at who touches which memory (memory.h) and who arrives at which barrier.
#include <algorithm>
#include <cstring>

#include "launch.h"
#include "warp.h"

namespace ptx {
namespace {

// Who is at work, for messages.
thread_local const Warp* working = nullptr;

int count(uint32_t lanes) { return __builtin_popcount(lanes); }

void meet_at_barrier(const std::vector<Warp>& warps, size_t used, const Block& block) {
  int waiting = 0, exited = 0;
  for (size_t w = 0; w < used; ++w) {
    const Warp& warp = *(working = &warps[w]);
    waiting += count(warp.at_barrier);
    for_each_lane(warp.at_barrier, [&](int lane) {  // bar.sync is for whole warps
      if (warp.pc[lane] != warp.pc[__builtin_ctz(warp.at_barrier)]) fail("lanes of a warp wait at different barriers");
    });
    exited += kWarp - count(warps[w].alive());
  }
  exited -= static_cast<int>(used) * kWarp - static_cast<int>(block.threads);
  if (waiting == static_cast<int>(block.threads)) return;
  working = nullptr;
  fail(std::to_string(waiting) + " of " + std::to_string(block.threads) + " threads are at a barrier, " +
       std::to_string(exited) + " have exited");
}

void run_block(const Block& block, std::vector<Warp>& warps) {
  const size_t used = (block.threads + kWarp - 1) / kWarp;
  if (warps.size() < used) warps.resize(used);
  for (size_t w = 0; w < used; ++w) warps[w].begin(block, static_cast<uint32_t>(w) * kWarp);
  for (;;) {
    bool is_over = true;
    for (size_t w = 0; w < used; ++w) {
      working = &warps[w];
      warps[w].run();
      is_over = is_over && warps[w].alive() == 0;
    }
    if (is_over) return;
    meet_at_barrier(warps, used, block);
    block.shared->pass_barrier();
    for (size_t w = 0; w < used; ++w) std::swap(warps[w].running, warps[w].at_barrier);
  }
}

}  // namespace

void Warp::begin(const Block& block, uint32_t first_thread) {
  block_ = &block;
  first_thread_ = first_thread;
  const auto size = [](int32_t registers) { return static_cast<size_t>(registers); };
  if (registers_.size() < size(block.kernel->registers) * kWarp) {
    registers_.resize(size(block.kernel->registers) * kWarp);
  }
  if (predicates_.size() < size(block.kernel->predicates)) predicates_.resize(size(block.kernel->predicates));
  const uint32_t lanes = std::min<uint32_t>(kWarp, block.threads - first_thread);
  running = lanes == kWarp ? kAllLanes : (1u << lanes) - 1;
  at_barrier = in_collective = 0;
  std::fill(std::begin(pc), std::end(pc), 0);
}

void Warp::run() {
  const Kernel& kernel = *block_->kernel;
  for (;;) {
    int32_t at = INT32_MAX, next_group = INT32_MAX;
    is_complete = false;
    if (!running) {  // whoever comes to a collective has come
      if (!in_collective) return;
      for_each_lane(in_collective, [&](int lane) { at = std::min(at, pc[lane]); });
      for_each_lane(in_collective, [&](int lane) { running |= uint32_t{pc[lane] == at} << lane; });
      in_collective &= ~running;
      is_complete = true;
    }
    for_each_lane(running, [&](int lane) { at = std::min(at, pc[lane]); });
    uint32_t group = 0;
    for_each_lane(running, [&](int lane) {
      if (pc[lane] == at) {
        group |= 1u << lane;
      } else {
        next_group = std::min(next_group, pc[lane]);
      }
    });
    // Until the group parts, ends, or catches up with the next one.
    while (group && at < next_group) {
      const Instruction& instruction = kernel.code[static_cast<size_t>(at)];
      current = &instruction;
      if (kernel.executed) kernel.executed[at] = 1;
      uint32_t lanes = group;
      if (instruction.guard) {
        const uint32_t guard = predicate(std::abs(instruction.guard) - 1);
        lanes &= instruction.guard > 0 ? guard : ~guard;
      }
      ++at;
      if (!lanes) continue;
      if (!instruction.is_control) {
        instruction.handler(*this, instruction, lanes);
        continue;
      }
      for_each_lane(group, [&](int lane) { pc[lane] = at; });
      instruction.handler(*this, instruction, lanes);
      group &= running;
      if (!group) break;
      at = pc[__builtin_ctz(group)];
      bool together = true;
      for_each_lane(group, [&](int lane) { together = together && pc[lane] == at; });
      if (!together) group = 0;  // their places stand in pc
    }
    for_each_lane(group, [&](int lane) { pc[lane] = at; });
  }
}

void launch(const Kernel& kernel, uint32_t grid, uint32_t threads, const uint8_t* parameters, GlobalMemory& global) {
  static thread_local std::vector<Warp> warps;
  static thread_local SharedMemory shared;
  if (threads > static_cast<uint32_t>(kernel.max_threads)) fail("more threads a block than .maxntid");
  if (kernel.launches) __atomic_fetch_add(kernel.launches, 1, __ATOMIC_RELAXED);
  global.begin_launch(threads);
  for (uint32_t index = 0; index < grid; ++index) {
    shared.begin_block(kernel.shared_bytes);
    global.begin_block(index);
    run_block({&kernel, parameters, index, threads, grid, &global, &shared}, warps);
  }
  working = nullptr;
}

void fail(const std::string& what) {
  std::string where;
  if (const Warp* warp = working) {
    where = " in " + warp->block().kernel->name + ", " + warp->block().kernel->file + " line " +
            std::to_string(warp->current->line) + ", block " + std::to_string(warp->block().index) + ", thread " +
            std::to_string(warp->thread(warp->lane));
  }
  working = nullptr;
  throw Error("PTX: " + what + where);
}

}  // namespace ptx
