// multi_tensor_axpby, one element: a * x + b * y. Both products are rounded (the build forbids contraction to FMA), so
// that the result is the same on every backend.
#pragma once

#include "finite.h"

namespace ampctx {

template <class T>
AMPCTX_FN T axpby_element(T x, T y, T a, T b) {
  return a * x + b * y;
}

// Which input raises found_inf: 0 is x, 1 is y, -1 is both.
template <class T>
AMPCTX_FN bool axpby_is_finite(T x, T y, int arg_to_check) {
  return (arg_to_check == 1 || is_finite(x)) && (arg_to_check == 0 || is_finite(y));
}

}  // namespace ampctx
