// The ops that are no optimizers, one element. Each product and sum is rounded (the build forbids contraction to FMA),
// so that the result is the same on every backend. T is fp32, or fp64 where an fp64 tensor takes part.
#pragma once

#include "host_device.h"

namespace ampctx {

template <class T>
AMPCTX_FN T scale_element(T x, T scale) {
  return x * scale;
}

template <class T>
AMPCTX_FN T axpby_element(T x, T y, T a, T b) {
  return a * x + b * y;
}

// Which input raises found_inf: 0 is x, 1 is y, -1 is both.
template <class T>
AMPCTX_FN bool axpby_is_finite(T x, T y, int arg_to_check) {
  return (arg_to_check == 1 || is_finite(x)) && (arg_to_check == 0 || is_finite(y));
}

// Of an l2norm, a term of the sum under the root.
template <class T>
AMPCTX_FN T l2norm_term(T x, T inv_scale) {
  const T scaled = x * inv_scale;
  return scaled * scaled;
}

}  // namespace ampctx
