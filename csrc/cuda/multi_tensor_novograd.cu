// NovoGrad on CUDA: functors/novograd.h. A walk over the gradients for their norms, one thread per tensor for what
// becomes of these, then the step.
#include "layer_norms.cuh"
#include "optimizer_apply.cuh"

namespace ampctx::cuda {
namespace {

template <class Norm>
struct GradientNormFunctor {
  float inv_scale;
  float norm[1] = {};

  template <int n>
  __device__ void operator()(float (&value)[1][n], const Places&) {
    norm[0] = Norm::join(norm[0], Norm::of(value[0], inv_scale));
  }
};

template <class Norm, class Table>
__global__ void __launch_bounds__(kThreads)
    gradient_norm_kernel(const __grid_constant__ Table table, int64_t share, FoundInf found_inf,
                         KernelClippedFactor inv_scale, float* partial) {
  if (found_inf.is_set()) return;
  GradientNormFunctor<Norm> functor{inv_scale.get()};
  for_each_segment(table, share, [&](int tensor, int64_t begin, int64_t size) {
    functor.norm[0] = 0;
    for_each_element<1, 0>(table, tensor, begin, size, one_of_lists(0), functor);
    leave_piece<Norm>(table, share, tensor, functor.norm, partial);
  });
}

// Makes the norms of the unscaled gradients that have elements.
template <class Norm>
void gradient_norms(const Context& context, const StepCall& call, const NormsWorkspace& workspace) {
  float* norms = workspace.norms;
  for_each_table<1>(context, call.lists, [&](const auto& table) {
    constexpr auto kernel = &gradient_norm_kernel<Norm, std::decay_t<decltype(table)>>;
    const Split grid =
        launch_over<kernel>(context, table, call.found_inf, KernelClippedFactor(call.inv_scale), workspace.partial);
    launch_layer_norms<Norm, 1>(context, table, grid.share, call.found_inf, workspace.partial, norms);
    norms += table.count;
  });
}

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
  const double t = next_step(*static_cast<const float*>(tensor_data(table, 0, tensor)));
  const TensorScalars<float> scalars = tensor_scalars<float>(rule, t, number);
  float* const n = static_cast<float*>(tensor_data(table, 1, tensor));
  *n = blend_norm(novograd, static_cast<float>(t) == 1, *n, has_elements ? norms[number] : 0.0f);
  if (has_elements) denominators[number] = denominator(novograd, scalars, *n);
}

}  // namespace

void novograd(const Context& context, const StepCall& call, const NovogradOptions& options) {
  const NovoGrad<float> optimizer(options);
  const NormsWorkspace workspace(call, norms_for(options));
  options.inf_norm ? gradient_norms<MaxNorm>(context, call, workspace)
                   : gradient_norms<L2Norm>(context, call, workspace);
  float *const norms = workspace.norms, *const denominators = norms + call.lists.size();
  TensorLists alone;
  alone.depth = 2;
  alone.pointer[0].assign(call.steps.begin(), call.steps.end());
  alone.pointer[1].assign(call.one_element[0].begin(), call.one_element[0].end());
  alone.numel.assign(call.steps.size(), 0);
  for (const int64_t index : call.lists.index) alone.numel[index] = 1;
  int64_t first = 0;
  for_each_table<2>(context, alone, [&](const auto& table) {
    constexpr auto kernel = &blend_norms_kernel<std::decay_t<decltype(table)>>;
    const int blocks = (table.count + kThreads - 1) / kThreads;
    AMPCTX_LAUNCH(kernel, blocks, kThreads, context.stream, table, call.found_inf, optimizer, call.rule, first, norms,
                  denominators);
    first += table.elements();
  });
  update<NovogradOptions>(context, call, optimizer, denominators);
}

}  // namespace ampctx::cuda
