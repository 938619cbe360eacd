// The factor of clipped gradients: inv_scale * min(max_norm / (norm + 1e-6), 1), each step rounded as
// torch.nn.utils.clip_grad_norm_ rounds, which multiplies by the reciprocal. nan where the norm is.
#pragma once

#include "host_device.h"

namespace ampctx {

AMPCTX_FN float clip_factor_element(float norm, float inv_scale, float max_norm) {
  const float reciprocal = 1.0f / (norm + 1e-6f);
  const float coefficient = reciprocal * max_norm;
  return inv_scale * (coefficient > 1.0f ? 1.0f : coefficient);
}

}  // namespace ampctx
