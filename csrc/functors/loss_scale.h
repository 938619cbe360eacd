// What becomes of the loss scale and of skipped steps. The loss-scale rule:
//
//   found_inf != 0:  hysteresis -= 1, growth = 0
//                    if hysteresis <= 0:            scale = max(scale * backoff_factor, min_scale)
//   otherwise:       hysteresis is refilled, growth += 1
//                    if growth >= growth_interval:  scale = min(scale * growth_factor, max_scale), growth = 0
//
// Products are taken in fp64 and rounded to fp32, as torch.amp does. A scale that would leave the fp32 range stays as
// it is, and no scale falls below the smallest normal fp32 number: 0 could never grow again. hysteresis = 1 is the rule
// of torch.amp; higher values are that of Megatron-LM's DynamicGradScaler. The growth tracker stops at the largest
// int32. The loss-scale objects read scale; nothing else reads the trackers.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace ampctx {

struct ScaleRule {
  double growth_factor;
  double backoff_factor;
  int64_t growth_interval;
  int64_t hysteresis;
  double min_scale;
  double max_scale;
};

AMPCTX_FN void update_scale_element(float* scale, int32_t* growth_tracker, int32_t* hysteresis_tracker, bool found_inf,
                                    const ScaleRule& rule) {
  constexpr float smallest_normal = 0x1p-126f;
  if (found_inf) {
    const int32_t left = *hysteresis_tracker > 0 ? *hysteresis_tracker - 1 : 0;
    if (left <= 0) {
      const float smaller = static_cast<float>(static_cast<double>(*scale) * rule.backoff_factor);
      const float min_scale = static_cast<float>(rule.min_scale);
      const float floor = min_scale > smallest_normal ? min_scale : smallest_normal;
      *scale = smaller < floor ? floor : smaller;
    }
    *hysteresis_tracker = left;
    *growth_tracker = 0;
    return;
  }
  *hysteresis_tracker = static_cast<int32_t>(rule.hysteresis);
  const int64_t clean_steps = static_cast<int64_t>(*growth_tracker) + 1;
  const bool grow = clean_steps >= rule.growth_interval;
  if (grow || clean_steps <= INT32_MAX) *growth_tracker = grow ? 0 : static_cast<int32_t>(clean_steps);
  if (grow) {
    const float grown = static_cast<float>(static_cast<double>(*scale) * rule.growth_factor);
    const float max_scale = rule.max_scale < 0x1p128 ? static_cast<float>(rule.max_scale) : float_of(0x7f800000u);
    const float larger = is_finite(grown) ? grown : *scale;
    *scale = larger > max_scale ? max_scale : larger;
  }
}

// What a block of training reads: the scale, its inverse, and no overflow yet.
AMPCTX_FN void block_factors_element(const float* scale, float* copy, float* inverse, float* found_inf) {
  *copy = *scale;
  *inverse = 1.0f / *scale;
  *found_inf = 0;
}

// The factor of clipped gradients: inv_scale * min(max_norm / (norm + 1e-6), 1), each step rounded as
// torch.nn.utils.clip_grad_norm_ rounds, which multiplies by the reciprocal. nan where the norm is.
AMPCTX_FN float clip_factor_element(float norm, float inv_scale, float max_norm) {
  const float reciprocal = 1.0f / (norm + 1e-6f);
  const float coefficient = reciprocal * max_norm;
  return inv_scale * (coefficient > 1.0f ? 1.0f : coefficient);
}

// Counts of the steps that the device skips, for the host to read later. In fp32, exact up to 2^24 skips.
//
//   skipped += found_inf,  in_a_row = found_inf ? in_a_row + 1 : 0         of the step, with its first loss
//   overflowed += the loss's own flag,  value = *scale                     of each loss of the step
//
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
