// The loss scale and the counts of skips on the CPU.
#include "../ops.h"

namespace ampctx::cpu {

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
