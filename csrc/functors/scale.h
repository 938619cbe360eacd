// multi_tensor_scale, one element: x * scale, in fp32 (fp64 where an fp64 tensor takes part).
#pragma once

#include "finite.h"

namespace ampctx {

template <class T>
AMPCTX_FN T scale_element(T x, T scale) {
  return x * scale;
}

}  // namespace ampctx
