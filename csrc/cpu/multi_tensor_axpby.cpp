// out = a * x + b * y on the CPU. Gradient accumulation uses it: stashed gradients plus new ones.
#include "multi_tensor_apply.h"

namespace ampctx::cpu {
namespace {

template <class T>
void axpby_as(const Context& context, const TensorLists& lists, FoundInf found_inf, T a, T b, int arg_to_check) {
  const Simd& simd = cpu::simd();
  const BlockAccess<T> access(lists, simd);
  NonfiniteSeen nonfinite;
  for_each_block(context, lists, [&](const Block& block) {
    typename BlockAccess<T>::Buffer buffer_x, buffer_y, out;
    const T* x = access.read(0, block, buffer_x);
    const T* y = access.read(1, block, buffer_y);
    T* target = access.target(2, block, out);
    nonfinite.note(arithmetic<T>(simd).axpby(x, y, target, block.size, a, b, arg_to_check));
    access.write(2, block, out);
  });
  nonfinite.report(found_inf);
}

}  // namespace

void axpby(const Context& context, const TensorLists& lists, FoundInf found_inf, Factor a, Factor b, int arg_to_check) {
  if (lists.computes_in_f64()) return axpby_as<double>(context, lists, found_inf, a.value, b.value, arg_to_check);
  axpby_as<float>(context, lists, found_inf, static_cast<float>(a.value), static_cast<float>(b.value), arg_to_check);
}

}  // namespace ampctx::cpu
