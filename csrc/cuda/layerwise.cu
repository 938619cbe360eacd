// NovoGrad on CUDA: functors/novograd.h; and what steps do for tensors without elements.
#include "norms.cuh"
#include "optimizer_apply.cuh"

namespace ampctx::cuda {
namespace {

// NovoGrad: a walk over the gradients for their norms, one thread per tensor for what becomes of these, then the step.

// What becomes of exp_avg_sqs, list 1, at the step counts of list 0, which are not advanced yet. Offsets count the
// tensors that have elements, from `first` on.
template <class Table>
__global__ void __launch_bounds__(kThreads)
    blend_norms_kernel(const __grid_constant__ Table table, FoundInf found_inf, NovoGrad<float> novograd,
                       TensorRule rule, int64_t first, const float* norms, float* denominators) {
  const int tensor = blockIdx.x * kThreads + threadIdx.x;
  if (tensor >= table.count || found_inf.is_set()) return;
  const int64_t number = first + table.offset[tensor];
  const bool has_elements = table.offset[tensor + 1] > table.offset[tensor];
  const double t = next_step(*static_cast<const float*>(table.pointer[0][tensor]));
  const TensorScalars<float> scalars = tensor_scalars<float>(rule, t, number);
  float* const n = static_cast<float*>(table.pointer[1][tensor]);
  *n = blend_norm(novograd, static_cast<float>(t) == 1, *n, has_elements ? norms[number] : 0.0f);
  if (has_elements) denominators[number] = denominator(novograd, scalars, *n);
}

// The step counts of tensors without elements: no walk meets these. One thread per tensor.

// The table's one list is the step counts.
template <class Table>
__global__ void __launch_bounds__(kThreads)
    advance_empty_steps_kernel(const __grid_constant__ Table table, FoundInf found_inf) {
  const int tensor = blockIdx.x * kThreads + threadIdx.x;
  if (tensor >= table.count || found_inf.is_set()) return;
  float* const step = static_cast<float*>(table.pointer[0][tensor]);
  *step = static_cast<float>(next_step(*step));
}

}  // namespace

void novograd(const Context& context, const StepCall& call, const NovogradOptions& options) {
  const NovoGrad<float> optimizer(options);
  const LayerNorms norms(context, call);
  float* const denominators = norms.norms + call.lists.size();
  const auto make_norms = [&](auto norm) {
    LayerNorms of_table = norms;
    for_each_table<1>(call.lists, [&](const auto& table) {
      constexpr auto kernel = &layer_norms_kernel<decltype(norm), std::decay_t<decltype(table)>>;
      launch_over<kernel>(context, table, call.found_inf, call.inv_scale, of_table);
      of_table.norms += table.count;
    });
  };
  options.inf_norm ? make_norms(MaxNorm{}) : make_norms(L2Norm{});
  TensorLists alone;
  alone.depth = 2;
  alone.pointer[0].assign(call.steps.begin(), call.steps.end());
  alone.pointer[1].assign(call.one_element[0].begin(), call.one_element[0].end());
  alone.numel.assign(call.steps.size(), 0);
  for (const int64_t index : call.lists.index) alone.numel[index] = 1;
  int64_t first = 0;
  for_each_table<2>(alone, [&](const auto& table) {
    constexpr auto kernel = &blend_norms_kernel<std::decay_t<decltype(table)>>;
    const int blocks = (table.count + kThreads - 1) / kThreads;
    AMPCTX_LAUNCH(kernel, blocks, kThreads, context.stream, table, call.found_inf, optimizer, call.rule, first,
                  norms.norms, denominators);
    first += table.elements();
  });
  update<NovogradOptions>(context, call, optimizer, norms.tickets, denominators);
}

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
