// dst = src * scale on CUDA. Read by the unscale step of the loss-scale loop and by the master-to-model copy.
#include "../functors/scale.h"
#include "vectorized.cuh"

namespace ampctx::cuda {
namespace {

struct ScaleFunctor {
  float scale;
  bool finite = true;

  template <int n>
  __device__ void operator()(float (&value)[2][n], const Places&) {
#pragma unroll
    for (int k = 0; k < n; ++k) {
      finite = finite && is_finite(value[0][k]);
      value[1][k] = scale_element(value[0][k], scale);
    }
  }
};

template <class Table>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const __grid_constant__ Table table, int64_t share, FoundInf found_inf, KernelFactor scale) {
  ScaleFunctor functor{scale.get()};
  for_each_segment(table, share, [&](int tensor, int64_t begin, int64_t size) {
    for_each_element<2, one_of_lists(1)>(table, tensor, begin, size, one_of_lists(0), functor);
  });
  if (!functor.finite) *found_inf.word = found_inf.raised;
}

}  // namespace

void scale(const Context& context, const TensorLists& lists, FoundInf found_inf, Factor factor) {
  for_each_table<2>(context, lists, [&](const auto& table) {
    constexpr auto kernel = &scale_kernel<std::decay_t<decltype(table)>>;
    const Split grid = split(table.elements(), resident_blocks<kernel>(context.device));
    AMPCTX_LAUNCH(kernel, grid.blocks, kThreads, context.stream, table, grid.share, found_inf, KernelFactor(factor));
  });
}

}  // namespace ampctx::cuda
