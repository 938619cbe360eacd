// SGD on the CPU: functors/sgd.h.
#include "optimizer_apply.h"

namespace ampctx::cpu {
namespace {

template <class T>
void sgd_as(const Context& context, const StepCall& call, const SgdOptions& options) {
  const StepLoops<T>& loops = optimizer_loops<T>(simd()).steps;
  if (call.states() == 1) return step<T>(context, call, Sgd<T, true>(options), loops.momentum);
  step<T>(context, call, Sgd<T, false>(options), loops.sgd);
}

}  // namespace

void sgd(const Context& context, const StepCall& call, const SgdOptions& options) {
  call.lists.computes_in_f64() ? sgd_as<double>(context, call, options) : sgd_as<float>(context, call, options);
}

}  // namespace ampctx::cpu
