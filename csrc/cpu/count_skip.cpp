// The counts of functors/count_skip.h on the CPU.
#include "../functors/count_skip.h"

#include "../ops.h"

namespace ampctx::cpu {

void count_skip(const Context&, const SkipCount& skip) {
  count_skip_element(skip.counts, skip.found_inf.is_set(), skip.of_loss.is_set(), *skip.scale, skip.slot,
                     skip.is_first);
}

}  // namespace ampctx::cpu
