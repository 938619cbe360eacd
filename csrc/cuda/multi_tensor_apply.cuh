// Packs tensor lists into tables and launches over them.
//
// A Table travels by value in the parameters of a kernel: no copy to the device, no memory to keep alive. It holds
// pointers and the prefix sums of the element counts, so that the tensors form one line of elements. A grid that just
// fills the GPU divides that line into equal shares (Split): neither one huge tensor nor thousands of tiny ones leave a
// multiprocessor idle. Lists longer than parameters can hold take several launches. pack() and split() are plain host
// functions; a test runs them on sizes beyond 2^31.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "../ops.h"
#include "check_cuda.h"

// The emulation (tests/cuda_emulation) runs the same files on the CPU and replaces only this.
#ifndef AMPCTX_LAUNCH
#define AMPCTX_LAUNCH(kernel, grid, block, stream, ...)                         \
  do {                                                                          \
    static_assert(::ampctx::cuda::parameters_fit(kernel));                      \
    kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__); \
    ::ampctx::cuda::check_cuda(cudaGetLastError(), "launch of " #kernel);       \
  } while (0)
#endif

namespace ampctx::cuda {

#ifndef AMPCTX_THREADS
#define AMPCTX_THREADS 256
#endif
constexpr int kThreads = AMPCTX_THREADS;
constexpr int kVector = 8;  // elements a thread takes at a time
constexpr int kMaxBlocks = 4096;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Kernels may have 4 KB of parameters, and nearly 32 KB from sm_70 on with CUDA 12.1 and a driver that knows it. Tables
// have both sizes because parameters are copied at each launch. Some bytes stay for the other parameters.
constexpr int kOtherParameters = 288;
constexpr int kFewParameters = 4096;
constexpr int kManyParameters = 32764;
constexpr int kDriverWithManyParameters = 12010;
constexpr bool kHasManyParameters = CUDART_VERSION >= 12010;

// Its tensors have up to kRows different rows of the call's, for which the launch has kRowBytes each.
constexpr int kRowBytes = 80;
template <int depth, int bytes, int rows = 1>
struct Table {
  static constexpr int kParameters = bytes + kOtherParameters, kRows = rows;
  static constexpr int kCapacity =
      (bytes - 40 - (rows > 1 ? rows * (kRowBytes + 4) : 0)) / (8 + 8 * depth + (rows > 1));

  int64_t offset[kCapacity + 1];  // offset[t] elements come before tensor t; offset[count] is the total
  void* pointer[depth][kCapacity];
  DType dtype[depth];
  int32_t count;
  int32_t used[rows], rows_used;  // the rows
  uint8_t row[rows > 1 ? kCapacity : 1];

  __host__ __device__ int64_t elements() const { return offset[count]; }
  __host__ __device__ int row_of(int tensor) const { return rows > 1 ? row[tensor] : 0; }
};

// With Adam, 78 tensors of one row take the small table, and up to 607 the large one: ResNet-50 (161), BERT-large
// (393).
template <int depth>
using SmallTable = Table<depth, kFewParameters - kOtherParameters>;
template <int depth, int rows = 1>
using LargeTable = Table<depth, kManyParameters - kOtherParameters, rows>;

// How many bytes of parameters a kernel may have, by its first one.
template <class First>
constexpr int kParameterLimit = kFewParameters;
template <int depth, int bytes, int rows>
constexpr int kParameterLimit<Table<depth, bytes, rows>> = Table<depth, bytes, rows>::kParameters;

// nvcc refuses what no driver takes. That a small table leaves an older driver's 4 KB to all parameters is asked here.
template <class First, class... Others>
constexpr bool parameters_fit(void (*)(First, Others...)) {
  size_t bytes = sizeof(First);
  [[maybe_unused]] const auto add = [&bytes](size_t size, size_t alignment) {
    bytes = (bytes + alignment - 1) / alignment * alignment + size;
  };
  (add(sizeof(Others), alignof(Others)), ...);
  return bytes <= kParameterLimit<First>;
}

// Fills the table with tensors from `first` on and returns the index of the first that has no place.
template <int depth, int bytes, int rows>
int64_t pack(const TensorLists& lists, int64_t first, Table<depth, bytes, rows>& table) {
  static_assert(sizeof(table) + (rows > 1 ? rows * kRowBytes : 0) <= bytes);
  const int64_t most = std::min<int64_t>(lists.size() - first, table.kCapacity);
  table.rows_used = 0, table.offset[0] = 0;
  int32_t t = 0;
  for (; t < most; ++t) {
    const int32_t row = lists.row_of(first + t);
    int place = 0;
    while (place < table.rows_used && !lists.same_rows(row, table.used[place])) ++place;
    if (place == rows) break;
    if (place == table.rows_used) table.used[table.rows_used++] = row;
    if (rows > 1) table.row[t] = static_cast<uint8_t>(place);
    table.offset[t + 1] = table.offset[t] + lists.numel[first + t];
    for (int list = 0; list < depth; ++list) table.pointer[list][t] = lists.pointer[list][first + t];
  }
  for (int list = 0; list < depth; ++list) table.dtype[list] = lists.dtype[list];
  table.count = t;
  return first + t;
}

// Block b takes the elements [b * share, (b + 1) * share); every block has at least one.
struct Split {
  int64_t share;
  int blocks;
};

// A block goes through small tensors one after the other and waits for the memory of each: a few of them, on average.
inline Split split(int64_t elements, int64_t tensors, int64_t max_blocks) {
  constexpr int64_t kTensorsOfBlock = 8;
  int64_t unit = kThreads * kVector;
  while (unit > kVector && unit * tensors > elements * kTensorsOfBlock) unit /= 2;
  const int64_t each = (elements + max_blocks - 1) / max_blocks;
  const int64_t share = (each + unit - 1) / unit * unit;
  return {share, static_cast<int>((elements + share - 1) / share)};
}

// As many blocks as run on the device at once. `kernel` is a compile-time constant: each has its own cache.
template <auto kernel>
int resident_blocks(int device) {
  constexpr int kDevices = 64;
  static std::atomic<int> cache[kDevices];
  if (device < kDevices && cache[device].load(std::memory_order_relaxed)) return cache[device];
  int processors = 0, per_processor = 0;
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, kThreads, 0), "occupancy");
  const int blocks = std::max(1, std::min(kMaxBlocks, processors * per_processor));
  if (device < kDevices) cache[device] = blocks;
  return blocks;
}

// Launches a kernel over the elements of a table, with a grid that fills the device. Returns the grid.
template <auto kernel, class Table, class... Arguments>
Split launch_over(const Context& context, const Table& table, const Arguments&... arguments) {
  const Split grid = split(table.elements(), table.count, resident_blocks<kernel>(context.device));
  AMPCTX_LAUNCH(kernel, grid.blocks, kThreads, context.stream, table, grid.share, arguments...);
  return grid;
}

inline std::atomic<int> known_driver{0};  // its version, once somebody has asked

inline bool driver_takes_many_parameters() {
  int version = known_driver.load(std::memory_order_relaxed);
  if (version == 0) {
    check_cuda(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
    known_driver.store(version, std::memory_order_relaxed);
  }
  return version >= kDriverWithManyParameters;
}

// Calls launch(table) for the lists, or for successive parts of them, with the smallest table that fits.
template <int depth, int rows = 1, class Launch>
void for_each_table(const TensorLists& lists, const Launch& launch) {
  for (int64_t first = 0; first < lists.size();) {
    SmallTable<depth> small;
    const int64_t next = pack(lists, first, small);
    if constexpr (kHasManyParameters) {
      const bool is_cut = next < lists.size() && (rows > 1 || small.count == small.kCapacity);
      if (is_cut && driver_takes_many_parameters()) {
        LargeTable<depth, rows> large;
        first = pack(lists, first, large);
        launch(large);
        continue;
      }
    }
    first = next;
    launch(small);
  }
}

// The tensor that holds element `position` of the line.
template <class Table>
__host__ __device__ inline int find_tensor(const Table& table, int64_t position) {
  int low = 0, high = table.count;  // offset[low] <= position < offset[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (table.offset[middle] <= position ? low : high) = middle;
  }
  return low;
}

// Calls visit(tensor, begin, size) for each tensor that this block has a share in; `begin` counts from the tensor's
// start.
template <class Table, class Visit>
__device__ inline void for_each_segment(const Table& table, int64_t share, const Visit& visit) {
  int64_t position = blockIdx.x * share;
  const int64_t total = table.elements();
  const int64_t end = position + share < total ? position + share : total;
  for (int tensor = find_tensor(table, position); position < end; ++tensor) {
    const int64_t stop = end < table.offset[tensor + 1] ? end : table.offset[tensor + 1];
    visit(tensor, position - table.offset[tensor], stop - position);
    position = table.offset[tensor + 1];  // looked up again: less to keep while elements are computed
  }
}

}  // namespace ampctx::cuda
