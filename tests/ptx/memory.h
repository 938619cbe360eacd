// The memory that kernels reach, and what is wrong to do with it: accesses that are misaligned or leave the buffers
// that an op was given, writes to what it only reads, and accesses of two threads without a barrier between them.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace ptx {

[[noreturn]] void fail(const std::string& what);  // with the kernel, line, block and thread at work

// Memory of the ops' tensors. An op's call announces what it asks torch for; a launch may touch that and no other.
class GlobalMemory {
 public:
  void begin_call();
  // `is_fresh`: nobody has written there.
  void announce(const void* data, int64_t bytes, bool is_writable, bool is_fresh);
  void begin_launch(uint32_t threads_per_block);
  // Blocks run one after the other.
  void begin_block(uint32_t block);
  // What the host copies or sets, outside of launches.
  void write_from_host(const void* data, int64_t bytes);

  // The memory of an access of `bytes` by `thread`. `value`: what it writes.
  const uint8_t* read(uint64_t address, int bytes, uint32_t thread);
  uint8_t* write(uint64_t address, int bytes, uint32_t thread, const void* value);

  // A fence of the block at work, and an atomic increment that is 0 again after `last`: what it was before. A block
  // sees what another has written before a fence and an increment of the same number, after an increment and a fence of
  // its own.
  void fence();
  uint32_t increment(uint64_t address, uint32_t last);

 private:
  struct Buffer {
    uint64_t begin, end;
    bool is_writable, is_fresh;
    uint64_t first_cell;
    bool is_apart = true;  // no other buffer lies there
  };
  // Who has touched two bytes in which launch. Launches are never numbered twice, so that nothing need be cleared.
  struct Cell {
    uint32_t write_launch, writer, read_launch, reader;
    uint32_t crowded_block;  // the last one in which several threads have read
    uint32_t readers;        // the list in readers_, where there are others than `reader`
  };
  // A block that has read a cell, and its thread, or that there are several.
  struct Reader {
    uint32_t block, thread;
  };

  void sort_buffers();
  const Buffer* find(uint64_t address, int64_t bytes);
  uint64_t first_cell(const Buffer& buffer, uint64_t address) const;
  void note_reader(Cell& cell, uint32_t thread);
  bool may_write_after_reads(const Cell& cell, uint32_t thread) const;

  std::mutex mutex_;  // of announced_: torch's threads read lists in parallel
  std::vector<Buffer> announced_;
  std::vector<Buffer> buffers_;  // in order
  size_t known_ = 0;             // of announced_ that are in buffers_
  const Buffer* last_ = nullptr;
  std::vector<Cell> cells_;
  std::vector<std::vector<Reader>> readers_;  // of cells that several threads have read in this launch
  uint32_t used_readers_ = 0;                 // of readers_; the rest is left of other launches, with its memory
  uint64_t used_cells_ = 0;
  uint32_t launch_ = 0, first_of_call_ = 0;
  uint32_t threads_ = 1, block_ = 0;
  bool is_fenced_ = true;                            // nothing was written, or read that may be written, since a fence
  std::map<uint64_t, std::set<uint32_t>> released_;  // by number, the blocks that were fenced when they incremented it
  std::set<uint32_t> acquired_, visible_;            // the blocks that this one has met at numbers, and before a fence
};

// A block's. Threads are told apart by barriers alone: those of a warp run in no promised order either.
class SharedMemory {
 public:
  void begin_block(int bytes);
  void pass_barrier() { ++epoch_; }
  const uint8_t* read(uint64_t address, int bytes, uint32_t thread);
  uint8_t* write(uint64_t address, int bytes, uint32_t thread);

 private:
  // Epochs are never numbered twice, so that nothing need be cleared between blocks.
  struct Byte {
    int64_t write_epoch = 0, read_epoch = 0;
    uint32_t writer = 0, reader = 0;
  };

  void check_bounds(uint64_t address, int bytes) const;

  size_t size_ = 0;  // of the block's memory; the vectors are as large as an earlier block needed
  std::vector<uint8_t> memory_;
  std::vector<Byte> bytes_;
  int64_t epoch_ = 0, first_epoch_ = 0;
};

inline void check_alignment(uint64_t address, int bytes) {
  if (address % static_cast<uint64_t>(bytes)) fail("misaligned access of " + std::to_string(bytes) + " bytes");
}

}  // namespace ptx
