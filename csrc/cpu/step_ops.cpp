// The element-wise optimizers on the CPU: functors/<op>.h.
#include "optimizer_apply.h"

namespace ampctx::cpu {
namespace {

template <class T, class Options, class... Optimizers>
void step_as(const Context& context, const StepCall& call, const Options& options, Functors<Optimizers...>) {
  const StepLoops<T>& loops = optimizer_loops<T>(simd()).steps;
  ((call.states() == Optimizers::kStates ? step<T, Optimizers>(context, call, Optimizers(options), loops) : void()),
   ...);
}

}  // namespace

#define AMPCTX_STEP(op, Options, unused)                                                                             \
  void op(const Context& context, const StepCall& call, const Options& options) {                                    \
    call.lists.computes_in_f64() ? step_as<double>(context, call, options, decltype(functors_of<double>(options)){}) \
                                 : step_as<float>(context, call, options, decltype(functors_of<float>(options)){});  \
  }
AMPCTX_ELEMENTWISE_OPS(AMPCTX_STEP, )
#undef AMPCTX_STEP

}  // namespace ampctx::cpu
