// The loss-scale rule of functors/update_scale.h on the CPU.
#include "../ops.h"

namespace ampctx::cpu {

void update_scale(const Context&, const ScaleState& state, const ScaleRule& rule) {
  update_scale_element(state.scale, state.growth_tracker, state.hysteresis_tracker, state.found_inf.is_set(), rule);
}

}  // namespace ampctx::cpu
