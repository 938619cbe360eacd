// What tests call besides the ops: the cutting of tensor lists with made-up sizes, and kernels that the emulation must
// refuse.
#include "../../csrc/cuda/tickets.cuh"
#include "../../csrc/cuda/vectorized.cuh"
#include "../../csrc/functors/random.h"

#include <utility>

namespace {

using namespace ampctx;
using namespace ampctx::cuda;

// Half of the threads are elsewhere when the others wait.
__global__ void divergent_barrier(int*) {
  if (threadIdx.x < 32) __syncthreads();
}

__global__ void exited_lane(int*) {
  if (threadIdx.x == 5) return;
  __shfl_down_sync(0xffffffffu, 1, 1);
}

__global__ void foreign_mask(int*) { __shfl_down_sync(0xfffffffeu, 1, 1); }

// Reverses 64 numbers through shared memory.
template <bool with_barrier>
__global__ void reverse(int* numbers) {
  __shared__ int shared[64];
  shared[threadIdx.x] = numbers[threadIdx.x];
  if (with_barrier) __syncthreads();
  numbers[threadIdx.x] = shared[63 - threadIdx.x];
}

}  // namespace

extern "C" {

using Visit = void (*)(int64_t launch, int64_t block, int64_t tensor, int64_t begin, int64_t size);

// Cuts tensors of these sizes as a kernel over two lists on a GPU with `max_blocks` resident blocks would.
__attribute__((visibility("default"))) void ampctx_test_cut(const int64_t* numel, int64_t tensors, int64_t max_blocks,
                                                            Visit visit) {
  TensorLists lists;
  lists.depth = 2;
  lists.dtype = {DType::f16, DType::f32};
  lists.numel.assign(numel, numel + tensors);
  for (int list = 0; list < lists.depth; ++list) lists.pointer[list].resize(static_cast<size_t>(tensors));
  int64_t launch = 0, first = 0;
  for_each_table<2>(lists, [&](const auto& table) {
    const Split grid = split(table.elements(), table.count, max_blocks);
    for (int block = 0; block < grid.blocks; ++block) {
      cuda_emulation::executor().block = {static_cast<unsigned>(block)};
      for_each_segment(table, grid.share, [&](int tensor, int64_t begin, int64_t size) {
        visit(launch, block, first + tensor, begin, size);
      });
    }
    ++launch;
    first += table.count;
  });
}

// Whether this thread's stream is capturing.
__attribute__((visibility("default"))) void ampctx_test_capture(int is_capturing) {
  cuda_emulation::executor().is_capturing = is_capturing != 0;
}

// The version of the driver, 12010 for CUDA 12.1.
__attribute__((visibility("default"))) void ampctx_test_driver(int version) {
  cuda_emulation::executor().driver = version;
  known_driver = 0;
}

// Which set of tickets a call in that stream gets; -1 for memory of its own, which must be 0.
__attribute__((visibility("default"))) int64_t ampctx_test_tickets(void* stream) {
  std::vector<unsigned> own(kTickets, 1);
  Context context;
  context.stream = stream;
  context.owner = own.data();
  context.allocate = [](void* owner, int64_t) { return owner; };
  unsigned* const tickets = tickets_for(context);
  if (tickets == own.data()) return std::count(own.begin(), own.end(), 0u) == kTickets ? -1 : -2;
  return (tickets - static_cast<const unsigned*>(cuda_emulation::device_variables().at(0).data)) / kTickets;
}

// No set is given away any more.
__attribute__((visibility("default"))) void ampctx_test_forget_tickets() { forget_tickets(); }

// How many tickets are not 0.
__attribute__((visibility("default"))) int64_t ampctx_test_tickets_taken() {
  int64_t taken = 0;
  for (const auto& variable : cuda_emulation::device_variables()) {
    const auto* const words = static_cast<const unsigned*>(variable.data);
    const auto count = static_cast<int64_t>(variable.bytes / sizeof(unsigned));
    taken += count - std::count(words, words + count, 0u);
  }
  return taken;
}

// How many kernels this thread has launched.
__attribute__((visibility("default"))) int64_t ampctx_test_launches() { return cuda_emulation::executor().launches; }

// Bytes of parameters of the launch of this thread that had most of them since the last call.
__attribute__((visibility("default"))) int64_t ampctx_test_parameter_bytes() {
  return std::exchange(cuda_emulation::executor().parameter_bytes, 0);
}

// Where the two fours of vector `v` are.
__attribute__((visibility("default"))) void ampctx_test_places(int64_t first, int64_t v, int64_t vectors, int has_f32,
                                                               int64_t* low_high) {
  const ElementIndices indices = vector_indices(first, v, vectors, has_f32 != 0);
  low_high[0] = indices.low;
  low_high[1] = indices.high;
}

// The random bits of an element, anywhere; both ways to count its place agree, or the result is beyond 32 bits.
__attribute__((visibility("default"))) int64_t ampctx_test_random_bits(int64_t seed, int64_t step, int64_t tensor,
                                                                       int64_t place) {
  const RandomKey key = random_key(seed, step, tensor);
  const int64_t block = place / 2048 * 2048;
  const uint32_t bits = random_bits(key_at(key, place), 0);
  const uint32_t in_block = random_bits(key_at(key, block), static_cast<uint32_t>(place - block));
  return bits == in_block ? int64_t{bits} : -1;
}

// Runs one of the kernels above on 64 numbers; returns the error, or nothing.
__attribute__((visibility("default"))) const char* ampctx_test_kernel(const char* name, int* numbers) {
  static std::string error;
  const std::pair<const char*, void (*)(int*)> kernels[] = {
      {"divergent_barrier", divergent_barrier},
      {"exited_lane", exited_lane},
      {"foreign_mask", foreign_mask},
      {"reverse", reverse<true>},
      {"reverse_without_barrier", reverse<false>},
  };
  error = "no such kernel";
  try {
    for (const auto& [known, kernel] : kernels) {
      if (std::string(name) != known) continue;
      cuda_emulation::launch(kernel, 1, 64, nullptr, numbers);
      error = "";
    }
  } catch (const std::exception& exception) {
    error = exception.what();
  }
  return error.c_str();
}
}
