#include "memory.h"

#include <algorithm>
#include <cstring>
#include <tuple>

namespace ptx {
namespace {

constexpr uint32_t kSeveral = 0xffffffffu;  // readers
constexpr uint32_t kNoBlock = 0xffffffffu;
constexpr uint32_t kNoList = 0xffffffffu;
constexpr uint64_t kCellBytes = 1;        // of the smallest type
constexpr uint64_t kNone = ~uint64_t{0};  // cells

uint64_t cells_of(int bytes) { return (static_cast<uint64_t>(bytes) + kCellBytes - 1) / kCellBytes; }

}  // namespace

void GlobalMemory::begin_call() {
  const std::lock_guard<std::mutex> lock(mutex_);
  first_of_call_ = ++launch_;  // the number of what the host writes before the first launch
  announced_.clear();
  buffers_.clear();
  known_ = 0;
  used_cells_ = 0;
  last_ = nullptr;
}

void GlobalMemory::announce(const void* data, int64_t bytes, bool is_writable, bool is_fresh) {
  const uint64_t begin = reinterpret_cast<uint64_t>(data);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (bytes > 0) announced_.push_back({begin, begin + static_cast<uint64_t>(bytes), is_writable, is_fresh, kNone});
}

void GlobalMemory::begin_launch(uint32_t threads_per_block) {
  ++launch_;
  threads_ = threads_per_block;
  released_.clear();
  used_readers_ = 0;
  sort_buffers();
}

void GlobalMemory::begin_block(uint32_t block) {
  block_ = block;
  is_fenced_ = true;
  acquired_.clear();
  visible_.clear();
}

void GlobalMemory::fence() {
  is_fenced_ = true;
  visible_ = acquired_;
}

uint32_t GlobalMemory::increment(uint64_t address, uint32_t last) {
  check_alignment(address, sizeof(uint32_t));
  const Buffer* const buffer = find(address, sizeof(uint32_t));
  if (!buffer) fail("increment outside of what the op was given");
  if (!buffer->is_writable) fail("increment of what the op only reads");
  const Cell& cell = cells_[first_cell(*buffer, address)];
  if (buffer->is_fresh && cell.write_launch < first_of_call_) fail("increments memory that nobody has written");
  if (is_fenced_) released_[address].insert(block_);
  acquired_.insert(released_[address].begin(), released_[address].end());
  auto* const memory = reinterpret_cast<uint32_t*>(address);
  const uint32_t before = *memory;
  *memory = before >= last ? 0 : before + 1;
  return before;
}

void GlobalMemory::write_from_host(const void* data, int64_t bytes) {
  sort_buffers();
  const uint64_t address = reinterpret_cast<uint64_t>(data);
  const Buffer* const buffer = find(address, bytes);
  if (!buffer) fail("the host writes outside of what the op was given");
  const uint64_t first = first_cell(*buffer, address);
  for (uint64_t i = 0; i < static_cast<uint64_t>(bytes) / kCellBytes; ++i) cells_[first + i].write_launch = launch_;
}

// What was announced since the last time joins the buffers, which keep their cells.
void GlobalMemory::sort_buffers() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (known_ == announced_.size()) return;
  buffers_.insert(buffers_.end(), announced_.begin() + static_cast<int64_t>(known_), announced_.end());
  known_ = announced_.size();
  // Those that hold others come first, and of equal ones those with cells.
  const auto key = [](const Buffer& b) { return std::make_tuple(b.begin, ~b.end, b.first_cell); };
  std::sort(buffers_.begin(), buffers_.end(), [&](const Buffer& a, const Buffer& b) { return key(a) < key(b); });
  size_t kept = 0;
  for (const Buffer& buffer : buffers_) {
    Buffer* const last = kept ? &buffers_[kept - 1] : nullptr;
    if (last && last->begin == buffer.begin && last->end == buffer.end) {  // a tensor that is in two lists
      last->is_writable |= buffer.is_writable;
      last->is_fresh |= buffer.is_fresh;
      continue;
    }
    Buffer added = buffer;
    if (added.first_cell == kNone) {
      const uint64_t cells = (added.end + kCellBytes - 1) / kCellBytes - added.begin / kCellBytes;
      // A factor may be an element of a larger tensor.
      added.first_cell = last && added.end <= last->end ? first_cell(*last, added.begin) : used_cells_;
      if (added.first_cell == used_cells_) used_cells_ += cells;
    }
    buffers_[kept++] = added;
  }
  buffers_.resize(kept);
  uint64_t end = 0;  // of the buffers before
  for (size_t i = 0; i < kept; ++i) {
    Buffer& buffer = buffers_[i];
    buffer.is_apart = buffer.begin >= end && (i + 1 == kept || buffers_[i + 1].begin >= buffer.end);
    end = std::max(end, buffer.end);
  }
  if (cells_.size() < used_cells_) cells_.resize(used_cells_);
  last_ = nullptr;
}

const GlobalMemory::Buffer* GlobalMemory::find(uint64_t address, int64_t bytes) {
  const uint64_t end = address + static_cast<uint64_t>(bytes);
  if (last_ && last_->begin <= address && end <= last_->end) return last_;
  const auto after = std::upper_bound(buffers_.begin(), buffers_.end(), address,
                                      [](uint64_t value, const Buffer& buffer) { return value < buffer.begin; });
  for (auto at = after; at != buffers_.begin();) {
    --at;
    if (end <= at->end) return last_ = &*at;
  }
  return nullptr;
}

uint64_t GlobalMemory::first_cell(const Buffer& buffer, uint64_t address) const {
  return address / kCellBytes - buffer.begin / kCellBytes + buffer.first_cell;
}

// Where others have read a cell in this launch: whether each did so in another block, before a fence and an increment
// that the block at work has met, with a fence behind.
bool GlobalMemory::may_write_after_reads(const Cell& cell, uint32_t thread) const {
  if (cell.read_launch != launch_ || cell.reader == thread) return true;
  const auto may_follow = [&](const Reader& reader) {
    return reader.block == block_ ? reader.thread == thread : visible_.count(reader.block) > 0;
  };
  if (cell.readers == kNoList) return may_follow({cell.reader / threads_, cell.reader});
  const std::vector<Reader>& readers = readers_[cell.readers];
  return std::all_of(readers.begin(), readers.end(), may_follow);
}

// A reader of a cell besides those before. Blocks run one after the other, so the one at work is the last.
void GlobalMemory::note_reader(Cell& cell, uint32_t thread) {
  if (cell.readers == kNoList) {
    cell.readers = used_readers_++;
    if (readers_.size() < used_readers_) readers_.emplace_back();
    readers_[cell.readers].assign(1, {cell.reader / threads_, cell.reader});
  }
  std::vector<Reader>& readers = readers_[cell.readers];
  if (readers.back().block != block_) {
    readers.push_back({block_, thread});
  } else if (readers.back().thread != thread) {
    readers.back().thread = kSeveral;
    cell.crowded_block = block_;
  }
}

const uint8_t* GlobalMemory::read(uint64_t address, int bytes, uint32_t thread) {
  check_alignment(address, bytes);
  const Buffer* const buffer = find(address, bytes);
  if (!buffer) fail("read of " + std::to_string(bytes) + " bytes outside of what the op was given");
  auto* const memory = reinterpret_cast<const uint8_t*>(address);
  if (buffer->is_apart && !buffer->is_writable && !buffer->is_fresh) return memory;  // nothing can be wrong later
  if (buffer->is_writable) is_fenced_ = false;  // whoever meets a later increment may not write it yet
  const uint64_t first = first_cell(*buffer, address);
  for (uint64_t number = first; number < first + cells_of(bytes); ++number) {
    Cell& cell = cells_[number];
    if (buffer->is_fresh && cell.write_launch < first_of_call_) fail("reads memory that nobody has written");
    if (cell.write_launch == launch_ && cell.writer != thread && !visible_.count(cell.writer / threads_)) {
      fail("race: reads what another thread of the launch has written");
    }
    if (cell.read_launch != launch_) {
      cell.read_launch = launch_;
      cell.reader = thread;
      cell.crowded_block = kNoBlock;
      cell.readers = kNoList;
    } else if (cell.reader != thread) {
      if (buffer->is_writable && cell.crowded_block != block_) note_reader(cell, thread);
      cell.reader = kSeveral;
    }
  }
  return memory;
}

uint8_t* GlobalMemory::write(uint64_t address, int bytes, uint32_t thread, const void* value) {
  check_alignment(address, bytes);
  const Buffer* const buffer = find(address, bytes);
  if (!buffer) fail("write of " + std::to_string(bytes) + " bytes outside of what the op was given");
  if (!buffer->is_writable) fail("write to what the op only reads");
  auto* const memory = reinterpret_cast<uint8_t*>(address);
  // Flags, which are single numbers, are raised by many: the same value in any order.
  const auto is_raised_flag = [&] {
    const bool is_flag = buffer->end - buffer->begin <= sizeof(uint32_t);
    return is_flag && std::memcmp(memory, value, static_cast<size_t>(bytes)) == 0;
  };
  const uint64_t first = first_cell(*buffer, address);
  for (uint64_t number = first; number < first + cells_of(bytes); ++number) {
    Cell& cell = cells_[number];
    if (!may_write_after_reads(cell, thread)) fail("race: writes what another thread of the launch has read");
    if (cell.write_launch == launch_ && cell.writer != thread && !is_raised_flag()) {
      fail("race: two threads of the launch write the same memory");
    }
    cell.write_launch = launch_;
    cell.writer = thread;
  }
  is_fenced_ = false;
  return memory;
}

void SharedMemory::begin_block(int bytes) {
  size_ = static_cast<size_t>(bytes);
  if (memory_.size() < size_) memory_.resize(size_), bytes_.resize(size_);
  first_epoch_ = ++epoch_;
}

void SharedMemory::check_bounds(uint64_t address, int bytes) const {
  check_alignment(address, bytes);
  if (address > size_ || static_cast<uint64_t>(bytes) > size_ - address) fail("access beyond shared memory");
}

const uint8_t* SharedMemory::read(uint64_t address, int bytes, uint32_t thread) {
  check_bounds(address, bytes);
  for (uint64_t i = address; i < address + static_cast<uint64_t>(bytes); ++i) {
    Byte& byte = bytes_[i];
    if (byte.write_epoch == epoch_ && byte.writer != thread) {
      fail("race in shared memory: reads what another thread has written since the last barrier");
    }
    if (byte.write_epoch < first_epoch_) fail("reads shared memory that nobody has written");
    byte.reader = byte.read_epoch == epoch_ && byte.reader != thread ? kSeveral : thread;
    byte.read_epoch = epoch_;
  }
  return &memory_[address];
}

uint8_t* SharedMemory::write(uint64_t address, int bytes, uint32_t thread) {
  check_bounds(address, bytes);
  for (uint64_t i = address; i < address + static_cast<uint64_t>(bytes); ++i) {
    Byte& byte = bytes_[i];
    if (byte.write_epoch == epoch_ && byte.writer != thread) {
      fail("race in shared memory: writes what another thread has written since the last barrier");
    }
    if (byte.read_epoch == epoch_ && byte.reader != thread) {
      fail("race in shared memory: writes what another thread has read since the last barrier");
    }
    byte.write_epoch = epoch_;
    byte.writer = thread;
  }
  return &memory_[address];
}

}  // namespace ptx
