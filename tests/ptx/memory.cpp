#include "memory.h"

#include <algorithm>
#include <cstring>

namespace ptx {
namespace {

constexpr uint32_t kSeveral = 0xffffffffu;  // readers
constexpr uint64_t kCellBytes = 2;          // of the smallest type

}  // namespace

void GlobalMemory::forget() {
  const std::lock_guard<std::mutex> lock(mutex_);
  announced_.clear();
  buffers_.clear();
  known_ = 0;
  last_ = nullptr;
}

void GlobalMemory::announce(const void* data, int64_t bytes, bool is_writable) {
  const uint64_t begin = reinterpret_cast<uint64_t>(data);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (bytes > 0) announced_.push_back({begin, begin + static_cast<uint64_t>(bytes), is_writable, 0});
}

void GlobalMemory::begin_launch() {
  ++launch_;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (known_ == announced_.size()) return;
  known_ = announced_.size();
  buffers_ = announced_;
  const auto key = [](const Buffer& b) { return std::make_pair(b.begin, b.end); };
  std::sort(buffers_.begin(), buffers_.end(), [&](const Buffer& a, const Buffer& b) { return key(a) < key(b); });
  // A tensor that is in two lists is one buffer. No other overlap is allowed, but for factors that are elements of a
  // larger tensor: what begins within another buffer keeps its own bounds, and cells by address make races seen.
  size_t kept = 0;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (kept && key(buffers_[kept - 1]) == key(buffers_[i])) {
      buffers_[kept - 1].is_writable |= buffers_[i].is_writable;
    } else {
      buffers_[kept++] = buffers_[i];
    }
  }
  buffers_.resize(kept);
  uint64_t cells = 0, covered = 0;
  for (Buffer& buffer : buffers_) {
    const uint64_t from = buffer.begin / kCellBytes, to = (buffer.end + kCellBytes - 1) / kCellBytes;
    if (from < covered) {  // overlaps the buffer before
      buffer.first_cell = cells - (covered - from);
      cells += to > covered ? to - covered : 0;
    } else {
      buffer.first_cell = cells;
      cells += to - from;
    }
    covered = std::max(covered, to);
  }
  if (cells_.size() < cells) cells_.resize(cells);
  last_ = nullptr;
}

const GlobalMemory::Buffer* GlobalMemory::find(uint64_t address, int bytes) {
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

void GlobalMemory::note(Cell& cell, uint32_t thread, bool is_write, bool is_same_value) {
  const bool was_written = cell.write_launch == launch_ && cell.writer != thread;
  if (!is_write) {
    if (was_written) fail("race: reads what another thread of the launch has written");
    if (cell.read_launch != launch_) {
      cell.read_launch = launch_;
      cell.reader = thread;
    } else if (cell.reader != thread) {
      cell.reader = kSeveral;
    }
    return;
  }
  if (cell.read_launch == launch_ && cell.reader != thread) {
    fail("race: writes what another thread of the launch has read");
  }
  // Flags are raised by many: the same value in any order.
  if (was_written && !is_same_value) fail("race: two threads of the launch write different values");
  cell.write_launch = launch_;
  cell.writer = thread;
}

uint8_t* GlobalMemory::access(uint64_t address, int bytes, uint32_t thread, const void* value) {
  check_alignment(address, bytes);
  const Buffer* const buffer = find(address, bytes);
  if (!buffer) {
    fail((value ? "write of " : "read of ") + std::to_string(bytes) + " bytes outside of what the op was given");
  }
  if (value && !buffer->is_writable) fail("write to what the op only reads");
  auto* const memory = reinterpret_cast<uint8_t*>(address);
  const bool is_same_value = value && std::memcmp(memory, value, static_cast<size_t>(bytes)) == 0;
  const uint64_t first = address / kCellBytes - buffer->begin / kCellBytes + buffer->first_cell;
  const uint64_t cells = (static_cast<uint64_t>(bytes) + kCellBytes - 1) / kCellBytes;
  for (uint64_t i = 0; i < cells; ++i) note(cells_[first + i], thread, value != nullptr, is_same_value);
  return memory;
}

void SharedMemory::begin_block(int bytes) {
  memory_.assign(static_cast<size_t>(bytes), 0xff);
  bytes_.assign(static_cast<size_t>(bytes), Byte());
  epoch_ = 0;
}

uint8_t* SharedMemory::access(uint64_t address, int bytes, uint32_t thread, bool is_write) {
  check_alignment(address, bytes);
  const auto size = static_cast<uint64_t>(bytes);
  if (address > memory_.size() || size > memory_.size() - address) fail("access beyond shared memory");
  for (uint64_t i = address; i < address + size; ++i) {
    Byte& byte = bytes_[i];
    if (byte.write_epoch == epoch_ && byte.writer != thread) {
      fail(std::string("race in shared memory: ") + (is_write ? "writes" : "reads") +
           " what another thread has written since the last barrier");
    }
    if (is_write) {
      if (byte.read_epoch == epoch_ && byte.reader != thread) {
        fail("race in shared memory: writes what another thread has read since the last barrier");
      }
      byte.write_epoch = epoch_;
      byte.writer = thread;
    } else {
      if (byte.write_epoch < 0) fail("reads shared memory that nobody has written");
      byte.reader = byte.read_epoch == epoch_ && byte.reader != thread ? kSeveral : thread;
      byte.read_epoch = epoch_;
    }
  }
  return &memory_[address];
}

}  // namespace ptx
