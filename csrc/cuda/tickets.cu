// The memory of tickets: tickets.cuh.
#include "tickets.cuh"

namespace ampctx::cuda {
namespace {

// Zeros when the module is loaded. 1 MB.
__device__ unsigned tickets[TicketSets::kStreams + TicketSets::kCapturedCalls][kTickets];

}  // namespace

TicketSets& TicketSets::of(int device) {
  static std::mutex mutex;
  static auto* const all = new std::deque<TicketSets>;  // as Staging's
  const std::lock_guard<std::mutex> lock(mutex);
  while (all->size() <= static_cast<size_t>(device)) all->emplace_back();
  return (*all)[device];
}

unsigned* TicketSets::memory() {
  if (!memory_) {
    const RelaxedCapture relaxed;
    void* address = nullptr;
    check_cuda(cudaGetSymbolAddress(&address, tickets), "address of the tickets");
    memory_ = static_cast<unsigned*>(address);
  }
  return memory_;
}

int TicketSets::number_for(cudaStream_t stream, bool captures) {
  if (captures) return captured_ < kCapturedCalls ? kStreams + captured_++ : -1;
  if (stream == cudaStreamPerThread) return -1;  // one handle for a stream of each thread
  const auto known = streams_.find(stream);
  if (known != streams_.end()) return known->second;
  const int number = static_cast<int>(streams_.size());
  if (number == kStreams) return -1;
  streams_.emplace(stream, number);
  return number;
}

unsigned* TicketSets::take(cudaStream_t stream) {
  const bool captures = is_capturing(stream);
  const std::lock_guard<std::mutex> lock(mutex_);
  const int number = number_for(stream, captures);
  return number < 0 ? nullptr : memory() + int64_t{number} * kTickets;
}

unsigned* tickets_for(const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  if (unsigned* const set = TicketSets::of(context.device).take(stream)) return set;
  void* const own = context.allocate(context.owner, kTickets * sizeof(unsigned));
  check_cuda(cudaMemsetAsync(own, 0, kTickets * sizeof(unsigned), stream), "cudaMemsetAsync");
  return static_cast<unsigned*>(own);
}

}  // namespace ampctx::cuda
