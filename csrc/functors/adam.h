// Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019), AMSGrad (Reddi et al. 2018), one element.
//
//   g += weight_decay w                          not in adam_w_mode
//   m = beta1 m + (1 - beta1) g
//   v = beta2 v + ((1 - beta2) g) g
//   x = max(x, v) with amsgrad, else v
//   u = (m rc1) / (sqrt(x) rsc2 + eps)           rc1, rsc2: functors/step.h
//   w -= lr (u + weight_decay w), or lr u not in adam_w_mode
//
// Each product and sum is rounded, in this order, on every backend.
#pragma once

#include "step.h"

namespace ampctx {

struct AdamOptions {
  double beta1, beta2, eps, weight_decay;
  bool adam_w_mode;
};

template <class T, bool amsgrad>
struct Adam {
  static constexpr int kStates = amsgrad ? 3 : 2;  // m, v, and x
  T beta1, of_g, beta2, of_g_squared, eps, weight_decay;
  bool adam_w_mode;

  explicit Adam(const AdamOptions& options)
      : beta1(static_cast<T>(options.beta1)),
        of_g(static_cast<T>(1 - options.beta1)),
        beta2(static_cast<T>(options.beta2)),
        of_g_squared(static_cast<T>(1 - options.beta2)),
        eps(static_cast<T>(options.eps)),
        weight_decay(static_cast<T>(options.weight_decay)),
        adam_w_mode(options.adam_w_mode) {}
};

template <class T, bool amsgrad>
AMPCTX_FN T step_element(const Adam<T, amsgrad>& adam, const TensorScalars<T>& tensor, T lr, T g, T w, T* state) {
  const T decay = adam.weight_decay * w;
  g = adam.adam_w_mode ? g : g + decay;
  const T m = adam.beta1 * state[0] + adam.of_g * g;
  T v = adam.beta2 * state[1] + (adam.of_g_squared * g) * g;
  state[0] = m;
  state[1] = v;
  if constexpr (amsgrad) v = state[2] = maximum(state[2], v);
  const T u = (m * tensor.rc1) / (square_root(v) * tensor.rsc2 + adam.eps);
  return w - lr * (adam.adam_w_mode ? u + decay : u);
}

}  // namespace ampctx
