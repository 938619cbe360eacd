// The step counts of an optimizer call on CUDA: one thread per tensor. Read by the kernels of optimizer_apply.cuh.
#include "optimizer_apply.cuh"

namespace ampctx::cuda {
namespace {

// The table's one list is the step counts. Its offsets count the tensors that have elements.
template <class Table>
__global__ void __launch_bounds__(kThreads)
    advance_steps_kernel(const __grid_constant__ Table table, FoundInf found_inf, TensorRule rule, int64_t first,
                         TensorScalars<float>* scalars) {
  const int tensor = blockIdx.x * kThreads + threadIdx.x;
  if (tensor >= table.count || found_inf.is_set()) return;
  float* const step = static_cast<float*>(tensor_data(table, 0, tensor));
  const double t = next_step(*step);
  *step = static_cast<float>(t);
  const int64_t number = first + table.offset[tensor];
  const bool has_elements = table.offset[tensor + 1] > table.offset[tensor];
  if (has_elements) scalars[number] = tensor_scalars<float>(rule, t, number);
}

}  // namespace

TensorScalars<float>* advance_steps(const Context& context, const StepCall& call) {
  auto* scalars = static_cast<TensorScalars<float>*>(call.workspace);
  int64_t first = 0;
  for_each_table<1>(context, one_element_lists(call, {&call.steps}), [&](const auto& table) {
    constexpr auto kernel = &advance_steps_kernel<std::decay_t<decltype(table)>>;
    const int blocks = (table.count + kThreads - 1) / kThreads;
    AMPCTX_LAUNCH(kernel, blocks, kThreads, context.stream, table, call.found_inf, call.rule, first, scalars);
    first += table.elements();
  });
  return scalars;
}

}  // namespace ampctx::cuda
