// What steps do on CUDA for tensors without elements, which no walk meets: their step counts advance.
#include "step_walk.cuh"

namespace ampctx::cuda {
namespace {

// The table's one list is the step counts. One thread per tensor.
template <class Table>
__global__ void __launch_bounds__(kThreads)
    advance_empty_steps_kernel(const __grid_constant__ Table table, FoundInf found_inf) {
  const int tensor = blockIdx.x * kThreads + threadIdx.x;
  if (tensor >= table.count || found_inf.is_set()) return;
  float* const step = static_cast<float*>(table.pointer[0][tensor]);
  *step = static_cast<float>(next_step(*step));
}

}  // namespace

void advance_empty_steps(const Context& context, const StepCall& call) {
  if (call.lists.size() == 0 && call.skips.overflowed)
    count_skip(context, call.skips, call.found_inf, call.found_inf);  // as no step kernel does
  if (call.lists.size() == call.lists.total_tensors) return;
  TensorLists empty;
  empty.depth = 1;
  std::vector<bool> is_empty(call.steps.size(), true);
  for (const int64_t index : call.lists.index) is_empty[index] = false;
  for (size_t i = 0; i < call.steps.size(); ++i) {
    if (is_empty[i]) empty.pointer[0].push_back(call.steps[i]);
  }
  empty.numel.assign(empty.pointer[0].size(), 1);
  for_each_table<1>(empty, [&](const auto& table) {
    constexpr auto kernel = &advance_empty_steps_kernel<std::decay_t<decltype(table)>>;
    const int blocks = (table.count + kThreads - 1) / kThreads;
    AMPCTX_LAUNCH(kernel, blocks, kThreads, context.stream, table, call.found_inf);
  });
}

}  // namespace ampctx::cuda
