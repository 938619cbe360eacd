// Lion (Chen et al. 2023), one element.
//
//   u = sign(beta1 m + (1 - beta1) g)            of nan: nan
//   m = beta2 m + (1 - beta2) g
//   w -= lr (u + weight_decay w)
#pragma once

#include "step.h"

namespace ampctx {

template <class T>
struct Lion {
  static constexpr int kStates = 1;  // m
  T beta1, one_minus_beta1, beta2, one_minus_beta2, weight_decay;

  explicit Lion(const LionOptions& options)
      : beta1(static_cast<T>(options.beta1)),
        one_minus_beta1(static_cast<T>(1 - options.beta1)),
        beta2(static_cast<T>(options.beta2)),
        one_minus_beta2(static_cast<T>(1 - options.beta2)),
        weight_decay(static_cast<T>(options.weight_decay)) {}
};

template <class T>
AMPCTX_FN T step_element(const Lion<T>& lion, const TensorScalars<T>&, T lr, T g, T w, T* state) {
  const T c = lion.beta1 * state[0] + lion.one_minus_beta1 * g;
  const T u = c > 0 ? 1 : c < 0 ? -1 : c;
  state[0] = lion.beta2 * state[0] + lion.one_minus_beta2 * g;
  return w - lr * (u + lion.weight_decay * w);
}

}  // namespace ampctx
