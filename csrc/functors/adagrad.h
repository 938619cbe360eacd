// Adagrad (Duchi et al. 2011), one element.
//
//   g += weight_decay w                          not in adagrad_w_mode
//   h += g g
//   u = g / (sqrt(h) + eps)
//   w -= lr (u + weight_decay w), or lr u not in adagrad_w_mode
#pragma once

#include "step.h"

namespace ampctx {

template <class T>
struct Adagrad {
  static constexpr int kStates = 1;  // h
  T eps, weight_decay;
  bool adagrad_w_mode;

  explicit Adagrad(const AdagradOptions& options)
      : eps(static_cast<T>(options.eps)),
        weight_decay(static_cast<T>(options.weight_decay)),
        adagrad_w_mode(options.adagrad_w_mode) {}
};

template <class T>
AMPCTX_FN T step_element(const Adagrad<T>& adagrad, const TensorScalars<T>&, T lr, T g, T w, T* state) {
  const T decay = adagrad.weight_decay * w;
  g = adagrad.adagrad_w_mode ? g : g + decay;
  const T h = state[0] + g * g;
  state[0] = h;
  const T u = g / (square_root(h) + adagrad.eps);
  return w - lr * (adagrad.adagrad_w_mode ? u + decay : u);
}

}  // namespace ampctx
