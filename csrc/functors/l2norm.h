// multi_tensor_l2norm and multi_tensor_unscale_l2norm, one element: (x * inv_scale)^2, a term of the sum under the
// root.
#pragma once

#include "finite.h"

namespace ampctx {

template <class T>
AMPCTX_FN T l2norm_term(T x, T inv_scale) {
  const T scaled = x * inv_scale;
  return scaled * scaled;
}

}  // namespace ampctx
