// LARC on the CPU: functors/larc.h. A walk for the norms, then one that rewrites the gradients.
#include <cmath>

#include "optimizer_apply.h"

namespace ampctx::cpu {
namespace {

template <class T>
void larc_as(const Context& context, const OptimizerCall& call, const LarcOptions& options) {
  const BlockAccess<T> access(call.lists, simd());
  const auto norm = arithmetic<T>(simd()).l2norm;
  const auto loop = optimizer_loops<T>(simd()).layers.larc;
  const T inv_scale = static_cast<T>(call.inv_scale.value), lr = static_cast<T>(call.lr.value);
  double* const partial = static_cast<double*>(call.norms);
  for_each_block(context, call.lists, [&](const Block& block) {
    typename BlockAccess<T>::Buffer buffer;
    double* const sums = partial + 2 * block.number;
    norm(access.read(0, block, buffer), block.size, inv_scale, &sums[0]);
    norm(access.read(1, block, buffer), block.size, 1, &sums[1]);
  });
  const Larc<T> larc(options);
  std::vector<LarcRate<T>> rates;
  rates.reserve(call.lists.numel.size());
  for_each_total<2>(call.lists, partial, [&](int64_t, const double (&sum)[2]) {
    rates.push_back(larc_rate(larc, lr, static_cast<T>(std::sqrt(sum[0])), static_cast<T>(std::sqrt(sum[1]))));
  });
  for_each_block(context, call.lists, [&](const Block& block) {
    typename BlockAccess<T>::Buffer grads, params;
    T* const g = access.update(0, block, grads);
    loop(g, access.read(1, block, params), block.size, inv_scale, rates[block.tensor]);
    access.write(0, block, grads);
  });
}

}  // namespace

void larc(const Context& context, const OptimizerCall& call, const LarcOptions& options) {
  if (call.found_inf.is_set()) return;
  call.lists.computes_in_f64() ? larc_as<double>(context, call, options) : larc_as<float>(context, call, options);
}

}  // namespace ampctx::cpu
