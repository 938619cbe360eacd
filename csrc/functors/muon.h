// The average of Muon (Jordan et al. 2024), one element: what torch.optim.Muon does before it orthogonalises.
//
//   m = lerp(m, g, 1 - momentum)
//   u = lerp(g, m, momentum) with nesterov, else m
//   lerp(a, b, weight) = a + weight (b - a) where weight < 0.5, else b + (weight - 1) (b - a): torch's two forms
//
// u takes the place of the weight.
#pragma once

#include "step.h"

namespace ampctx {

template <class T>
struct Lerp {
  T factor;
  bool from_start;

  explicit Lerp(double weight) : factor(static_cast<T>(weight < 0.5 ? weight : weight - 1)), from_start(weight < 0.5) {}
};

template <class T>
AMPCTX_FN T lerp(const Lerp<T>& lerp, T a, T b) {
  return (lerp.from_start ? a : b) + lerp.factor * (b - a);
}

template <class T>
struct Muon {
  static constexpr int kStates = 1;  // m
  Lerp<T> toward_g, toward_m;
  bool nesterov;

  explicit Muon(const MuonOptions& options)
      : toward_g(1 - options.momentum), toward_m(options.momentum), nesterov(options.nesterov) {}
};

template <class T>
AMPCTX_FN T step_element(const Muon<T>& muon, const TensorScalars<T>&, T, T g, T, T* state) {
  const T m = lerp(muon.toward_g, state[0], g);
  state[0] = m;
  return muon.nesterov ? lerp(muon.toward_m, g, m) : m;
}

}  // namespace ampctx
