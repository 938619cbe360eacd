// Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019), AMSGrad (Reddi et al. 2018), one element.
//
//   g += weight_decay w                          not in adam_w_mode
//   m = beta1 m + (1 - beta1) g
//   v = beta2 v + ((1 - beta2) g) g
//   x = max(x, v) with amsgrad, else v
//   u = (m rc1) / (sqrt(x) rsc2 + eps)           rc1, rsc2: functors/step.h
//   w -= lr (u + weight_decay w), or lr u not in adam_w_mode
#pragma once

#include "step.h"

namespace ampctx {

// m and v, and the direction they give. LAMB's too, where one_minus_beta1 may be 1 (grad_averaging).
template <class T>
struct Moments {
  T beta1, one_minus_beta1, beta2, one_minus_beta2, eps;

  Moments(double beta1, double one_minus_beta1, double beta2, double eps)
      : beta1(static_cast<T>(beta1)),
        one_minus_beta1(static_cast<T>(one_minus_beta1)),
        beta2(static_cast<T>(beta2)),
        one_minus_beta2(static_cast<T>(1 - beta2)),
        eps(static_cast<T>(eps)) {}
};

template <class T>
AMPCTX_FN void update_moments(const Moments<T>& moments, T g, T& m, T& v) {
  m = moments.beta1 * m + moments.one_minus_beta1 * g;
  v = moments.beta2 * v + (moments.one_minus_beta2 * g) * g;
}

template <class T>
AMPCTX_FN T direction(const Moments<T>& moments, const TensorScalars<T>& tensor, T m, T v) {
  return (m * tensor.rc1) / (square_root(v) * tensor.rsc2 + moments.eps);
}

template <class T, bool amsgrad>
struct Adam {
  static constexpr int kStates = amsgrad ? 3 : 2;  // m, v, and x
  Moments<T> moments;
  T weight_decay;
  bool adam_w_mode;

  explicit Adam(const AdamOptions& options)
      : moments(options.beta1, 1 - options.beta1, options.beta2, options.eps),
        weight_decay(static_cast<T>(options.weight_decay)),
        adam_w_mode(options.adam_w_mode) {}
};

template <class T, bool amsgrad>
AMPCTX_FN T step_element(const Adam<T, amsgrad>& adam, const TensorScalars<T>& tensor, T lr, T g, T w, T* state) {
  const T decay = adam.weight_decay * w;
  g = adam.adam_w_mode ? g : g + decay;
  update_moments(adam.moments, g, state[0], state[1]);
  T x = state[1];
  if constexpr (amsgrad) x = state[2] = maximum(state[2], x);
  const T u = direction(adam.moments, tensor, state[0], x);
  return w - lr * (adam.adam_w_mode ? u + decay : u);
}

}  // namespace ampctx
