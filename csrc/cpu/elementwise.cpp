// The ops that are no optimizers, on the CPU: functors/elementwise.h and functors/loss_scale.h.
#include <cmath>
#include <numeric>

#include "multi_tensor_apply.h"

namespace ampctx::cpu {
namespace {

constexpr int64_t kStreamed = 32 << 20;  // bytes of outputs that no cache holds until they are read

template <class T>
void scale_as(const Context& context, const TensorLists& lists, FoundInf found_inf, const Factor& scale) {
  const T factor = static_cast<T>(scale.value);
  const auto& loops = arithmetic<T>().scale_from;
  const auto direct = loops[static_cast<int>(lists.dtype[0])].to[static_cast<int>(lists.dtype[1])];
  const BlockAccess<T> access(lists);
  const int64_t elements = std::accumulate(lists.numel.begin(), lists.numel.end(), int64_t{0});
  const bool streams = lists.dtype[0] != lists.dtype[1] && elements * element_size(lists.dtype[1]) >= kStreamed;
  const auto scale_block = [&](const Block& block) {
    if (direct) {
      return note(found_inf, direct(memory(lists, 0, block), memory(lists, 1, block), block.size, factor, streams));
    }
    typename BlockAccess<T>::Buffer buffer;
    T* const out = access.target(1, block, buffer);
    const auto loop = loops[kOwnType<T>].to[kOwnType<T>];
    note(found_inf, loop(access.read(0, block, buffer), out, block.size, factor, false));
    access.write(1, block, buffer);
  };
  for_each_block(context, lists, scale_block, direct ? kAtOnce : 1);
}

template <class T>
void axpby_as(const Context& context, const TensorLists& lists, FoundInf found_inf, Factor by_x, Factor by_y,
              int arg_to_check) {
  const T a = static_cast<T>(by_x.value), b = static_cast<T>(by_y.value);
  const BlockAccess<T> access(lists);
  for_each_block(context, lists, [&](const Block& block) {
    typename BlockAccess<T>::Buffer buffer_x, buffer_y, out;
    const T* x = access.read(0, block, buffer_x);
    const T* y = access.read(1, block, buffer_y);
    T* target = access.target(2, block, out);
    note(found_inf, arithmetic<T>().axpby(x, y, target, block.size, a, b, arg_to_check));
    access.write(2, block, out);
  });
}

// Each block gives one partial sum. The sums of a tensor's blocks, then those of the tensors, are added in order, in
// fp64.
template <class T>
void l2norm_as(const Context& context, const TensorLists& lists, FoundInf found_inf, const Factor& factor,
               const NormOutputs& outputs) {
  const T inv_scale = static_cast<T>(factor.value);
  double* partial = static_cast<double*>(outputs.workspace);
  const auto direct = arithmetic<T>().l2norm[static_cast<int>(lists.dtype[0])];
  const auto loop = direct ? direct : arithmetic<T>().l2norm[kOwnType<T>];
  const BlockAccess<T> access(lists);
  const auto sum_block = [&](const Block& block) {
    typename BlockAccess<T>::Buffer buffer;
    const void* const x = direct ? memory(lists, 0, block) : access.read(0, block, buffer);
    note(found_inf, loop(x, block.size, inv_scale, &partial[block.number]));
  };
  for_each_block(context, lists, sum_block, direct ? kAtOnce : 1);

  T* per_tensor = static_cast<T*>(outputs.per_tensor);
  if (per_tensor) std::fill_n(per_tensor, lists.total_tensors, T{0});
  double total = 0;
  for_each_total<1>(lists, partial, [&](int64_t tensor, const double (&sum)[1]) {
    if (per_tensor) per_tensor[lists.index[tensor]] = static_cast<T>(std::sqrt(sum[0]));
    total += sum[0];
  });
  *static_cast<T*>(outputs.norm) = static_cast<T>(std::sqrt(total));
  if (outputs.norm_copy) *static_cast<T*>(outputs.norm_copy) = *static_cast<T*>(outputs.norm);
}

}  // namespace

void scale(const Context& context, const TensorLists& lists, FoundInf found_inf, const ClippedFactor& factor,
           const ScaleUpdate* update) {
  lists.computes_in_f64() ? scale_as<double>(context, lists, found_inf, factor)
                          : scale_as<float>(context, lists, found_inf, factor);
  if (update) update_scale(context, update->state, update->rule);
}

void axpby(const Context& context, const TensorLists& lists, FoundInf found_inf, Factor a, Factor b, int arg_to_check) {
  lists.computes_in_f64() ? axpby_as<double>(context, lists, found_inf, a, b, arg_to_check)
                          : axpby_as<float>(context, lists, found_inf, a, b, arg_to_check);
}

int64_t norms_workspace(const TensorLists& lists, int count) {
  int64_t blocks = 0;
  for (const int64_t numel : lists.numel) blocks += block_count(numel);
  return count * blocks * static_cast<int64_t>(sizeof(double));
}

void l2norm(const Context& context, const TensorLists& lists, FoundInf found_inf, Factor inv_scale,
            const NormOutputs& outputs, const ScaleUpdate* update) {
  lists.computes_in_f64() ? l2norm_as<double>(context, lists, found_inf, inv_scale, outputs)
                          : l2norm_as<float>(context, lists, found_inf, inv_scale, outputs);
  if (update) update_scale(context, update->state, update->rule);
}

void update_scale(const Context&, const ScaleState& state, const ScaleRule& rule) {
  update_scale_element(state.scale, state.growth_tracker, state.hysteresis_tracker, state.found_inf.is_set(), rule);
}

void block_factors(const Context&, const float* scale, const BlockFactors& to) {
  block_factors_element(scale, to.scale, to.inverse, to.found_inf);
}

void count_skip(const Context&, const SkipCounts& counts, FoundInf of_step, FoundInf of_loss) {
  count_skip_element(counts, of_step.is_set(), of_loss.is_set());
}

}  // namespace ampctx::cpu
