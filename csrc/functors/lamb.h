// LAMB (You et al. 2020), one element, and the rate of a tensor.
//
//   g *= clip                                    max_grad_norm / (norm of all gradients) where that norm is above it
//   g += weight_decay w                          not in adam_w_mode
//   m, v, u                                      Adam's, from m and v as they are stored: functors/adam.h
//   u += weight_decay w                          in adam_w_mode
//   rate = lr ||w|| / ||u||, or lr where a norm is 0 or no ratio is asked for
//   w -= rate u
#pragma once

#include "adam.h"

namespace ampctx {

AMPCTX_FN bool has_ratio(const LambOptions& options) { return options.use_nvlamb || options.weight_decay != 0; }

template <class T>
struct Lamb {
  Moments<T> moments;
  T weight_decay, max_grad_norm;
  T clip = 1;
  bool adam_w_mode;

  explicit Lamb(const LambOptions& options)
      : moments(options.beta1, options.grad_averaging ? 1 - options.beta1 : 1, options.beta2, options.eps),
        weight_decay(static_cast<T>(options.weight_decay)),
        max_grad_norm(static_cast<T>(options.max_grad_norm)),
        adam_w_mode(options.adam_w_mode) {}
};

template <class T>
AMPCTX_FN T lamb_clip(const Lamb<T>& lamb, T global_grad_norm) {
  const bool is_too_large = global_grad_norm > lamb.max_grad_norm && lamb.max_grad_norm > 0;
  return is_too_large ? lamb.max_grad_norm / global_grad_norm : 1;
}

template <class T>
AMPCTX_FN void lamb_moments(const Lamb<T>& lamb, T g, T w, T& m, T& v) {
  g = g * lamb.clip;
  const T decayed = g + lamb.weight_decay * w;
  update_moments(lamb.moments, lamb.adam_w_mode ? g : decayed, m, v);
}

template <class T>
AMPCTX_FN T lamb_direction(const Lamb<T>& lamb, const TensorScalars<T>& tensor, T w, T m, T v) {
  const T u = direction(lamb.moments, tensor, m, v);
  return lamb.adam_w_mode ? u + lamb.weight_decay * w : u;
}

template <class T>
AMPCTX_FN T lamb_rate(T lr, T norm_of_w, T norm_of_u) {
  return norm_of_w != 0 && norm_of_u != 0 ? lr * (norm_of_w / norm_of_u) : lr;
}

}  // namespace ampctx
