// dst = src * scale on CUDA. Read by the unscale step of the loss-scale loop and by the master-to-model copy.
#include "../functors/scale.h"
#include "tickets.cuh"
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
    scale_kernel(const __grid_constant__ Table table, int64_t share, FoundInf found_inf, KernelClippedFactor scale,
                 unsigned* tickets, KernelUpdate update) {
  ScaleFunctor functor{scale.get()};
  for_each_segment(table, share, [&](int tensor, int64_t begin, int64_t size) {
    for_each_element<2, one_of_lists(1)>(table, tensor, begin, size, one_of_lists(0), functor);
  });
  if (!functor.finite) *found_inf.word = found_inf.raised;
  if (!update.scale || !is_last_block(tickets)) return;
  if (threadIdx.x == 0) update.apply(found_inf);
}

}  // namespace

void scale(const Context& context, const TensorLists& lists, FoundInf found_inf, const ClippedFactor& factor,
           const ScaleUpdate* update) {
  if (lists.size() == 0 && update) return update_scale(context, update->state, update->rule);
  unsigned* const tickets = update ? tickets_for(context) : nullptr;
  int64_t left = lists.size();
  for_each_table<2>(context, lists, [&](const auto& table) {
    constexpr auto kernel = &scale_kernel<std::decay_t<decltype(table)>>;
    left -= table.count;
    launch_over<kernel>(context, table, found_inf, KernelClippedFactor(factor), tickets,
                        left == 0 && update ? KernelUpdate(*update) : KernelUpdate());
  });
}

}  // namespace ampctx::cuda
