// LARC on CUDA: functors/larc.h. A walk for the norms, then one that rewrites the gradients.
#include "layer_norms.cuh"

namespace ampctx::cuda {
namespace {

struct LarcNormsFunctor {
  float inv_scale;
  float sum[2] = {};  // of gradient and weight

  template <int n>
  __device__ void operator()(float (&value)[2][n], const Places&) {
    sum[0] += L2Norm::of(value[0], inv_scale);
    sum[1] += L2Norm::of(value[1], 1.0f);
  }
};

struct LarcFunctor {
  float inv_scale;
  LarcRate<float> rate{};

  template <int n>
  __device__ void operator()(float (&value)[2][n], const Places&) {
#pragma unroll
    for (int k = 0; k < n; ++k) value[0][k] = larc_element(rate, value[0][k] * inv_scale, value[1][k]);
  }
};

template <class Table>
__global__ void __launch_bounds__(kThreads)
    larc_norms_kernel(const __grid_constant__ Table table, int64_t share, FoundInf found_inf, KernelFactor inv_scale,
                      float* partial) {
  if (found_inf.is_set()) return;
  LarcNormsFunctor functor{inv_scale.get()};
  for_each_segment(table, share, [&](int tensor, int64_t begin, int64_t size) {
    functor.sum[0] = functor.sum[1] = 0;
    for_each_element<2, 0>(table, tensor, begin, size, first_lists(2), functor);
    leave_piece<L2Norm>(table, share, tensor, functor.sum, partial);
  });
}

template <class Table>
__global__ void __launch_bounds__(kThreads)
    larc_kernel(const __grid_constant__ Table table, int64_t share, FoundInf found_inf, KernelFactor inv_scale,
                KernelFactor lr, Larc<float> larc, const float* norms) {
  if (found_inf.is_set()) return;
  LarcFunctor functor{inv_scale.get()};
  for_each_segment(table, share, [&](int tensor, int64_t begin, int64_t size) {
    functor.rate = larc_rate(larc, lr.get(), norms[int64_t{2} * tensor], norms[int64_t{2} * tensor + 1]);
    for_each_element<2, one_of_lists(0)>(table, tensor, begin, size, first_lists(2), functor);
  });
}

}  // namespace

void larc(const Context& context, const OptimizerCall& call, const LarcOptions& options) {
  const NormsWorkspace workspace(call, 2);
  for_each_table<2>(context, call.lists, [&](const auto& table) {
    using Table = std::decay_t<decltype(table)>;
    constexpr auto norms_kernel = &larc_norms_kernel<Table>;
    constexpr auto kernel = &larc_kernel<Table>;
    const Split grid =
        launch_over<norms_kernel>(context, table, call.found_inf, KernelFactor(call.inv_scale), workspace.partial);
    launch_layer_norms<L2Norm, 2>(context, table, grid.share, call.found_inf, workspace.partial, workspace.norms);
    launch_over<kernel>(context, table, call.found_inf, KernelFactor(call.inv_scale), KernelFactor(call.lr),
                        Larc<float>(options), workspace.norms);
  });
}

}  // namespace ampctx::cuda
