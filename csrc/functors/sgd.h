// SGD with momentum as torch defines it, one element.
//
//   g += weight_decay w                                     where that comes first and is not 0
//   b = g at the first step, else momentum b + (1 - dampening) g
//   g = g + momentum b with nesterov, else b                these two with momentum only
//   g += weight_decay w                                     where that comes last and is not 0
//   w -= lr g
#pragma once

#include "step.h"

namespace ampctx {

template <class T, bool has_momentum>
struct Sgd {
  static constexpr int kStates = has_momentum ? 1 : 0;  // b
  T momentum, one_minus_dampening, weight_decay;
  bool nesterov, decay_first, decay_last;

  explicit Sgd(const SgdOptions& options)
      : momentum(static_cast<T>(options.momentum)),
        one_minus_dampening(static_cast<T>(1 - options.dampening)),
        weight_decay(static_cast<T>(options.weight_decay)),
        nesterov(options.nesterov),
        decay_first(options.weight_decay != 0 && !options.wd_after_momentum),
        decay_last(options.weight_decay != 0 && options.wd_after_momentum) {}
};

template <class T, bool has_momentum>
AMPCTX_FN T step_element(const Sgd<T, has_momentum>& sgd, const TensorScalars<T>& tensor, T lr, T g, T w, T* state) {
  const T decay = sgd.weight_decay * w;
  g = sgd.decay_first ? g + decay : g;
  if constexpr (has_momentum) {
    const T b = tensor.is_first ? g : sgd.momentum * state[0] + sgd.one_minus_dampening * g;
    state[0] = b;
    g = sgd.nesterov ? g + sgd.momentum * b : b;
  }
  g = sgd.decay_last ? g + decay : g;
  return w - lr * g;
}

}  // namespace ampctx
