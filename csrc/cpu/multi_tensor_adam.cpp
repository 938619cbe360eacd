// Adam on the CPU: functors/adam.h.
#include "optimizer_apply.h"

namespace ampctx::cpu {
namespace {

template <class T>
void adam_as(const Context& context, const StepCall& call, const AdamOptions& options) {
  const StepLoops<T>& loops = optimizer_loops<T>(simd()).steps;
  if (call.states() == 3) return step<T>(context, call, Adam<T, true>(options), loops.amsgrad);
  step<T>(context, call, Adam<T, false>(options), loops.adam);
}

}  // namespace

void adam(const Context& context, const StepCall& call, const AdamOptions& options) {
  call.lists.computes_in_f64() ? adam_as<double>(context, call, options) : adam_as<float>(context, call, options);
}

}  // namespace ampctx::cpu
