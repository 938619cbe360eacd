// multi_tensor_l2norm and multi_tensor_unscale_l2norm, one element: (x * inv_scale)^2, a term of the sum under the
// root. And |x|, of which NovoGrad's other norm is the largest.
#pragma once

#include "finite.h"

namespace ampctx {

template <class T>
AMPCTX_FN T l2norm_term(T x, T inv_scale) {
  const T scaled = x * inv_scale;
  return scaled * scaled;
}

// The bits order magnitudes as the numbers do, with inf above them all and nan above inf.
AMPCTX_FN uint32_t magnitude_bits(float x) { return bits_of(x) & 0x7fffffffu; }
AMPCTX_FN uint64_t magnitude_bits(double x) { return bits_of(x) & 0x7fffffffffffffffull; }

}  // namespace ampctx
