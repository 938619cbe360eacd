// LARC (You et al. 2017), which rewrites gradients: one element, and the rate of a tensor.
//
//   rate = trust_coefficient ||w|| / (||g|| + weight_decay ||w|| + eps), or min(rate / lr, 1) with clip
//   g = rate (g + weight_decay w), or g alone where a norm is 0; with maximize, where the step goes up the gradient,
//       rate (g - weight_decay w), so that the decay shrinks weights still
#pragma once

#include "host_device.h"
#include "options.h"

namespace ampctx {

template <class T>
struct Larc {
  T trust_coefficient, eps, weight_decay;
  bool clip, maximize;

  explicit Larc(const LarcOptions& options)
      : trust_coefficient(static_cast<T>(options.trust_coefficient)),
        eps(static_cast<T>(options.eps)),
        weight_decay(static_cast<T>(options.weight_decay)),
        clip(options.clip),
        maximize(options.maximize) {}
};

// What becomes of a gradient; weight_decay with its sign.
template <class T>
struct LarcRate {
  T weight_decay, rate;
  bool is_adapted;
};

template <class T>
AMPCTX_FN LarcRate<T> larc_rate(const Larc<T>& larc, T lr, T norm_of_g, T norm_of_w) {
  T rate = larc.trust_coefficient * norm_of_w / (norm_of_g + norm_of_w * larc.weight_decay + larc.eps);
  if (larc.clip) {
    rate = rate / lr;
    rate = rate > 1 ? 1 : rate;  // nan stays
  }
  return {larc.maximize ? -larc.weight_decay : larc.weight_decay, rate, norm_of_w != 0 && norm_of_g != 0};
}

template <class T>
AMPCTX_FN T larc_element(const LarcRate<T>& tensor, T g, T w) {
  return tensor.is_adapted ? (g + tensor.weight_decay * w) * tensor.rate : g;
}

}  // namespace ampctx
