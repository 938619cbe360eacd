// NovoGrad (Ginsburg et al. 2019), one tensor and one element.
//
//   n = sqrt(beta2 n^2 + (1 - beta2) ||g||^2), or beta2 n + (1 - beta2) max|g| with inf_norm;
//       the norm itself at the first step, unless init_zero
//   d = n rsc2 + eps                             rsc2, rc1: functors/step.h
//   g = g / d + weight_decay w                   with reg_inside_moment
//   m = beta1 m + (1 - beta1) g
//   w -= lr (m rc1), or lr ((m rc1) / d + weight_decay w) without reg_inside_moment
#pragma once

#include "step.h"

namespace ampctx {

// On CUDA the second is made of the first, which is the norm of the gradient.
AMPCTX_FN int norms_for(const NovogradOptions&) { return 2; }

template <class T>
struct NovoGrad {
  static constexpr int kStates = 1;  // m
  T beta1, of_g, beta2, of_norm, eps, weight_decay;
  bool reg_inside_moment, inf_norm, init_zero;

  explicit NovoGrad(const NovogradOptions& options)
      : beta1(static_cast<T>(options.beta1)),
        of_g(static_cast<T>(options.grad_averaging ? 1 - options.beta1 : 1)),
        beta2(static_cast<T>(options.beta2)),
        of_norm(static_cast<T>(1 - options.beta2)),
        eps(static_cast<T>(options.eps)),
        weight_decay(static_cast<T>(options.weight_decay)),
        reg_inside_moment(options.reg_inside_moment),
        inf_norm(options.inf_norm),
        init_zero(options.init_zero) {}
};

// The new n.
template <class T>
AMPCTX_FN T blend_norm(const NovoGrad<T>& novograd, bool is_first, T n, T norm) {
  if (is_first && !novograd.init_zero) return norm;
  if (novograd.inf_norm) return novograd.beta2 * n + novograd.of_norm * norm;
  return square_root(novograd.beta2 * n * n + novograd.of_norm * norm * norm);
}

template <class T>
AMPCTX_FN T denominator(const NovoGrad<T>& novograd, const TensorScalars<T>& tensor, T n) {
  return n * tensor.rsc2 + novograd.eps;
}

template <class T>
AMPCTX_FN T step_element(const NovoGrad<T>& novograd, const TensorScalars<T>& tensor, T lr, T g, T w, T* state) {
  const T decay = novograd.weight_decay * w;
  g = novograd.reg_inside_moment ? g / tensor.denominator + decay : g;
  const T m = novograd.beta1 * state[0] + novograd.of_g * g;
  state[0] = m;
  const T u = m * tensor.rc1;
  return w - lr * (novograd.reg_inside_moment ? u : u / tensor.denominator + decay);
}

}  // namespace ampctx
