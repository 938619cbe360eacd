// The loss-scale rule of functors/update_scale.h on the CPU.
#include "../ops.h"

namespace ampctx::cpu {

void update_scale(const Context&, const ScaleState& state, const ScaleRule& rule) {
  update_scale_element(state.scale, state.growth_tracker, state.hysteresis_tracker, state.found_inf.is_set(), rule);
}

void block_factors(const Context&, const float* scale, const BlockFactors& to) {
  block_factors_element(scale, to.scale, to.inverse, to.found_inf);
}

}  // namespace ampctx::cpu
