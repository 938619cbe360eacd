// Counts of the steps that the device skips, for the host to read later:
//
//   skipped += found_inf,  in_a_row = found_inf ? in_a_row + 1 : 0         of the step, with its first loss
//   overflowed += the loss's own flag,  value = *scale                     of each loss of the step
//
// In fp32, exact up to 2^24 skips.
#pragma once

#include "host_device.h"

namespace ampctx {

// One element each. Nothing is counted of the step where `skipped` is null, nothing at all where `overflowed` is.
struct SkipCounts {
  float *skipped = nullptr, *in_a_row = nullptr, *overflowed = nullptr, *value = nullptr;
  const float* scale = nullptr;
};

AMPCTX_FN void count_skip_element(const SkipCounts& to, bool step_is_skipped, bool loss_overflowed) {
  if (!to.overflowed) return;
  if (to.skipped) {
    *to.skipped += step_is_skipped ? 1.0f : 0.0f;
    *to.in_a_row = step_is_skipped ? *to.in_a_row + 1.0f : 0.0f;
  }
  *to.overflowed += loss_overflowed ? 1.0f : 0.0f;
  *to.value = *to.scale;
}

}  // namespace ampctx
