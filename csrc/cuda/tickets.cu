// The memory of tickets: tickets.cuh.
#include <mutex>
#include <unordered_map>

#include "tickets.cuh"

namespace ampctx::cuda {
namespace {

constexpr int kStreams = 16, kCapturedCalls = 112;

// Zeros when the module is loaded. 1 MB.
__device__ unsigned tickets[kStreams + kCapturedCalls][kTickets];

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

// The address on the current device.
unsigned* address_of_tickets() {
  // Asking does no harm to a graph that another thread captures.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  void* address = nullptr;
  const cudaError_t error = cudaGetSymbolAddress(&address, tickets);
  cudaThreadExchangeStreamCaptureMode(&mode);
  check_cuda(error, "address of the tickets");
  return static_cast<unsigned*>(address);
}

// Which sets of a device are given away. torch makes its streams once and destroys none, so a handle stands for one
// stream.
struct TicketSets {
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
};

std::mutex mutex;  // for the sets, which are never destroyed: a thread may outlive that
auto& sets = *new std::unordered_map<int, TicketSets>;

// For a call in that stream of the current device, or null.
unsigned* take_set(int device, cudaStream_t stream) {
  const bool captures = is_capturing(stream);
  const std::lock_guard<std::mutex> lock(mutex);
  TicketSets& of_device = sets[device];
  const int number = of_device.number_for(stream, captures);
  if (number < 0) return nullptr;
  if (!of_device.memory) of_device.memory = address_of_tickets();
  return of_device.memory + int64_t{number} * kTickets;
}

}  // namespace

void forget_tickets() { sets[0].streams.clear(), sets[0].captured = 0; }

unsigned* tickets_for(const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  if (unsigned* const set = take_set(context.device, stream)) return set;
  void* const own = context.allocate(context.owner, kTickets * sizeof(unsigned));
  check_cuda(cudaMemsetAsync(own, 0, kTickets * sizeof(unsigned), stream), "cudaMemsetAsync");
  return static_cast<unsigned*>(own);
}

}  // namespace ampctx::cuda
