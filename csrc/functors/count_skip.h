// Counts of the steps that the device skips, for the host to read later:
//
//   counts[0] += skipped,  counts[1] = skipped ? counts[1] + 1 : 0         of the step, with its first loss
//   counts[2 + 2 slot] += overflowed,  counts[3 + 2 slot] = scale          of each loss of the step
//
// In fp32, exact up to 2^24 skips.
#pragma once

#include "host_device.h"

namespace ampctx {

AMPCTX_FN void count_skip_element(float* counts, bool skipped, bool overflowed, float scale, int64_t slot,
                                  bool is_first) {
  if (is_first) {
    counts[0] += skipped ? 1.0f : 0.0f;
    counts[1] = skipped ? counts[1] + 1.0f : 0.0f;
  }
  float* const of_loss = counts + 2 + 2 * slot;
  of_loss[0] += overflowed ? 1.0f : 0.0f;
  of_loss[1] = scale;
}

}  // namespace ampctx
