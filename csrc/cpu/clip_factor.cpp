// The factor of functors/clip_factor.h on the CPU.
#include "../functors/clip_factor.h"

#include "../ops.h"

namespace ampctx::cpu {

void clip_factor(const Context&, const float* norm, Factor inv_scale, float max_norm, float* factor) {
  *factor = clip_factor_element(*norm, static_cast<float>(inv_scale.value), max_norm);
}

}  // namespace ampctx::cpu
