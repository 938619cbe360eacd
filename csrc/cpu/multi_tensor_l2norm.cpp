// sqrt(sum((x * inv_scale)^2)) on the CPU, of all tensors and of each. Gradient clipping and layer-wise optimizers use
// it.
//
// Each block gives one partial sum. The sums of a tensor's blocks, then those of the tensors, are added in order, in
// fp64.
#include <cmath>

#include "multi_tensor_apply.h"

namespace ampctx::cpu {
namespace {

template <class T>
void l2norm_as(const Context& context, const TensorLists& lists, FoundInf found_inf, T inv_scale,
               const NormOutputs& outputs) {
  const Simd& simd = cpu::simd();
  const BlockAccess<T> access(lists, simd);
  double* partial = static_cast<double*>(outputs.workspace);
  NonfiniteSeen nonfinite;
  const auto mixed = simd.l2norm_mixed[static_cast<int>(lists.dtype[0])];
  const auto sum_block = [&](const Block& block) {
    if (mixed) {
      return nonfinite.note(mixed(access.memory(0, block), block.size, inv_scale, &partial[block.number]));
    }
    typename BlockAccess<T>::Buffer buffer;
    const T* x = access.read(0, block, buffer);
    nonfinite.note(arithmetic<T>(simd).l2norm(x, block.size, inv_scale, &partial[block.number]));
  };
  for_each_block(context, lists, sum_block, mixed || access.is_in_place(0) ? kAtOnce : 1);
  nonfinite.report(found_inf);

  T* per_tensor = static_cast<T*>(outputs.per_tensor);
  if (per_tensor) std::fill_n(per_tensor, lists.total_tensors, T{0});
  double total = 0;
  for_each_total<1>(lists, partial, [&](int64_t tensor, const double (&sum)[1]) {
    if (per_tensor) per_tensor[lists.index[tensor]] = static_cast<T>(std::sqrt(sum[0]));
    total += sum[0];
  });
  *static_cast<T*>(outputs.norm) = static_cast<T>(std::sqrt(total));
  if (outputs.again) *static_cast<T*>(outputs.again) = *static_cast<T*>(outputs.norm);
}

}  // namespace

int64_t norms_workspace(const TensorLists& lists, int count) {
  return count * block_count(lists) * static_cast<int64_t>(sizeof(double));
}

void l2norm(const Context& context, const TensorLists& lists, FoundInf found_inf, Factor inv_scale,
            const NormOutputs& outputs, const ScaleUpdate* update) {
  if (lists.computes_in_f64()) {
    l2norm_as<double>(context, lists, found_inf, inv_scale.value, outputs);
  } else {
    l2norm_as<float>(context, lists, found_inf, static_cast<float>(inv_scale.value), outputs);
  }
  if (update) update_scale(context, update->state, update->rule);
}

}  // namespace ampctx::cpu
