// The loss-scale rule of functors/update_scale.h on the CPU.
#include "../ops.h"

namespace ampctx::cpu {

void update_scale(const Context&, const ScaleState& state, const ScaleRule& rule) {
  const bool found_inf = (*state.found_inf.word & state.found_inf.value_mask) != 0;
  update_scale_element(state.scale, state.growth_tracker, state.hysteresis_tracker, found_inf, rule);
}

}  // namespace ampctx::cpu
