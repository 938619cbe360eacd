// Adagrad on the CPU: functors/adagrad.h.
#include "optimizer_apply.h"

namespace ampctx::cpu {
namespace {

template <class T>
void adagrad_as(const Context& context, const StepCall& call, const AdagradOptions& options) {
  const StepLoops<T>& loops = optimizer_loops<T>(simd()).steps;
  step<T>(context, call, Adagrad<T>(options), loops.adagrad);
}

}  // namespace

void adagrad(const Context& context, const StepCall& call, const AdagradOptions& options) {
  call.lists.computes_in_f64() ? adagrad_as<double>(context, call, options) : adagrad_as<float>(context, call, options);
}

}  // namespace ampctx::cpu
