// The memory of tickets: tickets.cuh.
#include <unordered_map>

#include "tickets.cuh"

namespace ampctx::cuda {
namespace {

constexpr int kStreams = 16, kCapturedCalls = 112;

// Zeros when the module is loaded. 1 MB.
__device__ unsigned tickets[kStreams + kCapturedCalls][kTickets];

// Which sets of a device are given away. torch makes its streams once and destroys none, so a handle stands for one
// stream.
struct TicketSets {
  std::mutex mutex;
  unsigned* memory = nullptr;
  std::unordered_map<cudaStream_t, int> streams;
  int captured = 0;

  // -1 where no set is left.
  int number_for(cudaStream_t stream, bool captures) {
    if (captures) return captured < kCapturedCalls ? kStreams + captured++ : -1;
    if (stream == cudaStreamPerThread) return -1;  // one handle for a stream of each thread
    const auto known = streams.find(stream);
    if (known != streams.end()) return known->second;
    const int number = static_cast<int>(streams.size());
    if (number == kStreams) return -1;
    streams.emplace(stream, number);
    return number;
  }

  // For a call in that stream of the current device, or null.
  unsigned* take(cudaStream_t stream) {
    const bool captures = is_capturing(stream);
    const std::lock_guard<std::mutex> lock(mutex);
    const int number = number_for(stream, captures);
    if (number < 0) return nullptr;
    if (!memory) {
      const RelaxedCapture relaxed;
      void* address = nullptr;
      check_cuda(cudaGetSymbolAddress(&address, tickets), "address of the tickets");
      memory = static_cast<unsigned*>(address);
    }
    return memory + int64_t{number} * kTickets;
  }
};

}  // namespace

void forget_tickets() {
  TicketSets& sets = of_device<TicketSets>(0);
  sets.streams.clear(), sets.captured = 0;
}

unsigned* tickets_for(const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  if (unsigned* const set = of_device<TicketSets>(context.device).take(stream)) return set;
  void* const own = context.allocate(context.owner, kTickets * sizeof(unsigned));
  check_cuda(cudaMemsetAsync(own, 0, kTickets * sizeof(unsigned), stream), "cudaMemsetAsync");
  return static_cast<unsigned*>(own);
}

}  // namespace ampctx::cuda
