// The counts of functors/count_skip.h on the CPU.
#include "../ops.h"

namespace ampctx::cpu {

void count_skip(const Context&, const SkipCounts& counts, FoundInf of_step, FoundInf of_loss) {
  count_skip_element(counts, of_step.is_set(), of_loss.is_set());
}

}  // namespace ampctx::cpu
