// out = a * x + b * y on CUDA. Read by gradient accumulation: stashed gradients plus new ones.
#include "../functors/axpby.h"
#include "vectorized.cuh"

namespace ampctx::cuda {
namespace {

struct AxpbyFunctor {
  float a, b;
  int arg_to_check;
  bool finite = true;

  template <int n>
  __device__ void operator()(float (&value)[3][n], const Places&) {
#pragma unroll
    for (int k = 0; k < n; ++k) {
      finite = finite && axpby_is_finite(value[0][k], value[1][k], arg_to_check);
      value[2][k] = axpby_element(value[0][k], value[1][k], a, b);
    }
  }
};

template <class Table>
__global__ void __launch_bounds__(kThreads)
    axpby_kernel(const __grid_constant__ Table table, int64_t share, FoundInf found_inf, KernelFactor a, KernelFactor b,
                 int arg_to_check) {
  AxpbyFunctor functor{a.get(), b.get(), arg_to_check};
  for_each_segment(table, share, [&](int tensor, int64_t begin, int64_t size) {
    for_each_element<3, one_of_lists(2)>(table, tensor, begin, size, first_lists(2), functor);
  });
  if (!functor.finite) *found_inf.word = found_inf.raised;
}

}  // namespace

void axpby(const Context& context, const TensorLists& lists, FoundInf found_inf, Factor a, Factor b, int arg_to_check) {
  for_each_table<3>(context, lists, [&](const auto& table) {
    constexpr auto kernel = &axpby_kernel<std::decay_t<decltype(table)>>;
    launch_over<kernel>(context, table, found_inf, KernelFactor(a), KernelFactor(b), arg_to_check);
  });
}

}  // namespace ampctx::cuda
