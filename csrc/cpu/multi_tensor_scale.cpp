// dst = src * scale on the CPU. Unscaling of gradients and the master-to-model copy use it.
#include <numeric>

#include "multi_tensor_apply.h"

namespace ampctx::cpu {
namespace {

constexpr int64_t kStreamed = 32 << 20;  // bytes of outputs that no cache holds until they are read

int64_t output_bytes(const TensorLists& lists) {
  return std::accumulate(lists.numel.begin(), lists.numel.end(), int64_t{0}) * element_size(lists.dtype[1]);
}

template <class T>
void scale_as(const Context& context, const TensorLists& lists, FoundInf found_inf, T factor) {
  const Simd& simd = cpu::simd();
  const BlockAccess<T> access(lists, simd);
  NonfiniteSeen nonfinite;
  const auto mixed = simd.scale_mixed[static_cast<int>(lists.dtype[0])][static_cast<int>(lists.dtype[1])];
  const bool streams = output_bytes(lists) >= kStreamed;
  const auto scale_block = [&](const Block& block) {
    if (mixed) {
      return nonfinite.note(mixed(access.memory(0, block), access.memory(1, block), block.size, factor, streams));
    }
    typename BlockAccess<T>::Buffer in, out;
    const T* x = access.read(0, block, in);
    nonfinite.note(arithmetic<T>(simd).scale(x, access.target(1, block, out), block.size, factor));
    access.write(1, block, out);
  };
  const bool has_buffers = !mixed && !(access.is_in_place(0) && access.is_in_place(1));
  for_each_block(context, lists, scale_block, has_buffers ? 1 : kAtOnce);
  nonfinite.report(found_inf);
}

}  // namespace

void scale(const Context& context, const TensorLists& lists, FoundInf found_inf, const ClippedFactor& factor,
           const ScaleUpdate* update) {
  if (lists.computes_in_f64()) {
    scale_as<double>(context, lists, found_inf, factor.value);
  } else {
    scale_as<float>(context, lists, found_inf, static_cast<float>(factor.value));
  }
  if (update) update_scale(context, update->state, update->rule);
}

}  // namespace ampctx::cpu
