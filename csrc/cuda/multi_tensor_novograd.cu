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
    gradient_norm_kernel(const __grid_constant__ Table table, int64_t share, FoundInf found_inf, KernelFactor inv_scale,
                         float* partial) {
  if (found_inf.is_set()) return;
  GradientNormFunctor<Norm> functor{inv_scale.get()};
  for_each_segment(table, share, [&](int tensor, int64_t begin, int64_t size) {
    functor.norm[0] = 0;
    for_each_element<1, 0>(table, tensor, begin, size, one_of_lists(0), functor);
    leave_piece<Norm>(table, share, tensor, functor.norm, partial);
  });
}

// Returns the norms of the unscaled gradients that have elements.
template <class Norm>
const float* gradient_norms(const Context& context, const StepCall& call) {
  const NormsWorkspace workspace(call, 1);
  float* norms = workspace.norms;
  for_each_table<1>(context, call.lists, [&](const auto& table) {
    constexpr auto kernel = &gradient_norm_kernel<Norm, std::decay_t<decltype(table)>>;
    const Split grid = split(table.elements(), resident_blocks<kernel>(context.device));
    AMPCTX_LAUNCH(kernel, grid.blocks, kThreads, context.stream, table, grid.share, call.found_inf,
                  KernelFactor(call.inv_scale), workspace.partial);
    launch_layer_norms<Norm, 1>(context, table, grid.share, call.found_inf, workspace.partial, norms);
    norms += table.count;
  });
  return workspace.norms;
}

// Lists of one element: the step counts, advanced already, and exp_avg_sqs. `first`, `scalars`: as in advance_steps.cu.
template <class Table>
__global__ void __launch_bounds__(kThreads)
    blend_norms_kernel(const __grid_constant__ Table table, FoundInf found_inf, NovoGrad<float> novograd, int64_t first,
                       const float* norms, TensorScalars<float>* scalars) {
  const int tensor = blockIdx.x * kThreads + threadIdx.x;
  if (tensor >= table.count || found_inf.is_set()) return;
  const int64_t number = first + table.offset[tensor];
  const bool has_elements = table.offset[tensor + 1] > table.offset[tensor];
  const bool is_first = *static_cast<const float*>(tensor_data(table, 0, tensor)) == 1;
  float* const n = static_cast<float*>(tensor_data(table, 1, tensor));
  *n = blend_norm(novograd, is_first, *n, has_elements ? norms[number] : 0.0f);
  if (has_elements) scalars[number].denominator = denominator(novograd, scalars[number], *n);
}

}  // namespace

void novograd(const Context& context, const StepCall& call, const NovogradOptions& options) {
  const NovoGrad<float> optimizer(options);
  TensorScalars<float>* const scalars = advance_steps(context, call);
  const float* const norms =
      options.inf_norm ? gradient_norms<MaxNorm>(context, call) : gradient_norms<L2Norm>(context, call);
  int64_t first = 0;
  for_each_table<2>(context, one_element_lists(call, {&call.steps, &call.one_element[0]}), [&](const auto& table) {
    constexpr auto kernel = &blend_norms_kernel<std::decay_t<decltype(table)>>;
    const int blocks = (table.count + kThreads - 1) / kThreads;
    AMPCTX_LAUNCH(kernel, blocks, kThreads, context.stream, table, call.found_inf, optimizer, first, norms, scalars);
    first += table.elements();
  });
  update(context, call, scalars, optimizer);
}

}  // namespace ampctx::cuda
