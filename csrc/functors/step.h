// The element-wise optimizers are structs of numbers, with kStates tensors of state, and a function each:
//
//   step_element(optimizer, tensor, lr, g, w, state) updates state[0 .. kStates) and returns the updated weight
//
// Each product and sum of their formulas is rounded, in the order of the code, on every backend.
//
// `tensor` is what an optimizer needs to know of a tensor besides its elements: the corrections of biased averages at
// its own step count, in fp64 rounded to T, and the key of its random bits.
//
//   rc1 = 1 / (1 - beta1^t),  rsc2 = 1 / sqrt(1 - beta2^t),  both 1 without bias correction;  t counts this step too
#pragma once

#include "options.h"
#include "random.h"

namespace ampctx {

template <class T>
struct TensorScalars {
  T rc1, rsc2;
  int32_t is_first;  // t == 1
  RandomKey key;
};

struct TensorRule {
  double beta1 = 0, beta2 = 0;
  bool bias_correction = false;
  int64_t seed = 0;
};

// Of a count that no int64 is, nan among them: the smallest one, as torch on x86-64 converts it.
AMPCTX_FN int64_t to_int64(double t) {
  return t >= -0x1p63 && t < 0x1p63 ? static_cast<int64_t>(t) : static_cast<int64_t>(1ull << 63);
}

// The step count after `step`. From 2^24 on it goes to the next number that fp32 has: step + 1 rounds to step, and the
// random bits would be those of the step before. Bias corrections are 1 by then.
AMPCTX_FN double next_step(float step) {
  const bool is_counted = step < 0x1p24f || !(step <= 0x1.fffffep127f);
  return is_counted ? static_cast<double>(step) + 1 : static_cast<double>(float_of(bits_of(step) + 1));
}

// `number` of the tensor among those of the call that have elements.
template <class T>
AMPCTX_FN TensorScalars<T> tensor_scalars(const TensorRule& rule, double t, int64_t number) {
  TensorScalars<T> scalars = {1, 1, t == 1, random_key(rule.seed, to_int64(t), number)};
  if (rule.bias_correction) {
    scalars.rc1 = static_cast<T>(1 / (1 - power(rule.beta1, t)));
    scalars.rsc2 = static_cast<T>(1 / square_root(1 - power(rule.beta2, t)));
  }
  return scalars;
}

}  // namespace ampctx
