// The CPU's inner loops of the optimizers. Compiled once per instruction set, with the rules of simd.cpp.
#include "simd_convert.h"

namespace ampctx::cpu {
namespace {

// Loops over states in fewer bits: functors/codes.h.

static_assert(kStrip == kCodeBlock);  // so that strips are blocks of codes

void draw_state_bits(RandomKey key, uint32_t* bits, int64_t n) {
  AMPCTX_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) bits[i] = bits_of_states(random_bits(key, static_cast<uint32_t>(i)));
}

template <DType type>
using CodeOf = std::conditional_t<type == DType::i8, int8_t, uint8_t>;

// Calls function(std::integral_constant<DType, type>) for a type of codes.
template <class Function>
inline void with_code(DType type, const Function& function) {
  type == DType::i8 ? function(std::integral_constant<DType, DType::i8>{})
                    : function(std::integral_constant<DType, DType::u8>{});
}

template <DType type>
void decode_block(const CodeOf<type>* codes, float scale, float* values, int64_t n) {
  AMPCTX_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) values[i] = decode<type>(codes[i], scale);
}

void decode_state(DType type, const void* from, const float* scales, float* values, int64_t n) {
  with_code(type, [&](auto code) {
    const auto* const codes = static_cast<const CodeOf<code>*>(from);
    for_each_strip(
        n, [&](int64_t i, int64_t size) { decode_block<code>(codes + i, scales[i / kCodeBlock], values + i, size); });
  });
}

template <DType type>
void encode_block(const StateRounding& how, const float* values, int64_t first, CodeOf<type>* codes, float* scale,
                  int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) most = largest(most, values[i]);
  const float of_block = *scale = code_scale<type>(most);
  if (!(of_block > 0)) {
    for (int64_t i = 0; i < n; ++i) codes[i] = 0;
    return;
  }
  const auto encode = [&](auto place_of) {
    AMPCTX_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      codes[i] = static_cast<CodeOf<type>>(encode_scaled<type>(values[i], of_block, place_of(i)));
    }
  };
  const auto at_random = [random = how.random + first, state = how.state](int64_t i) {
    return rounding_place(bits_of_state(random[i], state));
  };
  how.random ? encode(at_random) : encode([](int64_t) { return kNearest; });
}

void round_state(const StateRounding& how, const float* values, void* to, float* scales, int64_t n) {
  if (is_code(how.type)) {
    return with_code(how.type, [&](auto code) {
      auto* const codes = static_cast<CodeOf<code>*>(to);
      for_each_strip(n, [&](int64_t i, int64_t size) {
        encode_block<code>(how, values + i, i, codes + i, scales + i / kCodeBlock, size);
      });
    });
  }
  uint16_t* const out = static_cast<uint16_t*>(to);
  const uint32_t* const random = how.random;
  const int state = how.state;
  AMPCTX_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    out[i] = float_to_bfloat16(round_stochastically(values[i], DType::bf16, bits_of_state(random[i], state)));
  }
}

template <class T, class Optimizer>
inline void step_elements(const StepBlock<T>& block, const Optimizer& chosen, int64_t n) {
  constexpr int states = Optimizer::kStates;
  const Optimizer optimizer = chosen;  // copies, which no store below can change
  const TensorScalars<T> tensor = block.tensor;
  const T grad_scale = block.grad_scale, lr = block.lr;
  const T* const grad = block.grad;
  T* const weight = block.weight;
  T* state[kMaxStates];
  for (int s = 0; s < states; ++s) state[s] = block.state[s];
  AMPCTX_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    T values[kMaxStates];
    for (int s = 0; s < states; ++s) values[s] = state[s][i];
    weight[i] = step_element(optimizer, tensor, lr, grad[i] * grad_scale, weight[i], values);
    for (int s = 0; s < states; ++s) state[s][i] = values[s];
  }
}

inline void join_weights(const BFloat16* high, const Remainder* low, float* weight, int64_t n) {
  AMPCTX_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) weight[i] = join(widen(high[i]), low[i].value);
}

inline void split_weights(const float* weight, BFloat16* high, Remainder* low, int64_t n) {
  AMPCTX_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    float rounded;
    int32_t remainder;
    split(weight[i], rounded, remainder);
    high[i].bits = static_cast<uint16_t>(bits_of(rounded) >> 16);
    low[i].value = static_cast<int16_t>(remainder);
  }
}

template <class T, class Grad, class Extra, class Optimizer>
void step(const StepBlock<T>& block, const void* grads, void* weights, void* extras, const Optimizer& optimizer) {
  constexpr bool is_split = std::is_same_v<Extra, Remainder>;
  const Grad* const grad = static_cast<const Grad*>(grads);
  auto* const weight = static_cast<std::conditional_t<is_split, BFloat16, T>*>(weights);
  Extra* const extra = static_cast<Extra*>(extras);
  StepBlock<T> strip = block;
  T wide[kStrip], joined[kStrip];
  for_each_strip(block.n, [&](int64_t i, int64_t n) {
    prefetch(grad, i, block.n);
    prefetch(weight, i, block.n);
    if constexpr (sizeof(Extra) < sizeof(T)) prefetch(extra, i, block.n);
    for (int s = 0; s < Optimizer::kStates; ++s) {
      prefetch(block.state[s], i, block.n);
      strip.state[s] = block.state[s] + i;
    }
    if constexpr (sizeof(Grad) == sizeof(T)) {
      strip.grad = grad + i;
    } else {
      load<Grad, T>(grad + i, wide, n);
      strip.grad = wide;
    }
    if constexpr (is_split) {
      join_weights(weight + i, extra + i, strip.weight = joined, n);
    } else {
      strip.weight = weight + i;
    }
    step_elements(strip, optimizer, n);
    if constexpr (is_split) {
      split_weights(joined, weight + i, extra + i, n);
    } else if constexpr (sizeof(Extra) < sizeof(T)) {
      store<Extra, T>(strip.weight, extra + i, n);
    }
  });
}

template <class T>
void lamb_moments(const StepBlock<T>& block, const Lamb<T>& chosen) {
  const Lamb<T> lamb = chosen;  // copies, as in step_elements()
  const T grad_scale = block.grad_scale;
  const T *const grad = block.grad, *const weight = block.weight;
  T *const m = block.state[0], *const v = block.state[1];
  AMPCTX_INDEPENDENT
  for (int64_t i = 0; i < block.n; ++i) lamb_moments(lamb, grad[i] * grad_scale, weight[i], m[i], v[i]);
}

template <class T>
void lamb_direction(const StepBlock<T>& block, const Lamb<T>& chosen, T* u) {
  const Lamb<T> lamb = chosen;
  const TensorScalars<T> tensor = block.tensor;
  const T *const weight = block.weight, *const m = block.state[0], *const v = block.state[1];
  AMPCTX_INDEPENDENT
  for (int64_t i = 0; i < block.n; ++i) u[i] = lamb_direction(lamb, tensor, weight[i], m[i], v[i]);
}

template <class T>
void descend(T* weight, const T* u, int64_t n, T rate) {
  AMPCTX_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) weight[i] -= rate * u[i];
}

template <WriteBack mode, class T>
void load_weights(T* weight, const T* extra, int64_t n) {
  AMPCTX_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) weight[i] = load_weight(mode, weight[i], extra[i]);
}

template <WriteBack mode, DType type, class T>
void store_weights(T* weight, T* extra, int64_t n, RandomKey key) {
  AMPCTX_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    T rest = 0;
    store_weight(mode, type, weight[i], mode == WriteBack::stochastic ? random_bits(key, static_cast<uint32_t>(i)) : 0,
                 weight[i], rest);
    if (has_extras(mode)) extra[i] = rest;
  }
}

// The order of the types is that of DType, here and below. Only what goes into 16 bits depends on them.
template <class T, WriteBack mode>
constexpr StoreWeights<T> kStoreAs = {{store_weights<mode, DType::f32, T>, store_weights<mode, DType::f16, T>,
                                       store_weights<mode, DType::bf16, T>, store_weights<mode, DType::f32, T>}};
template <class T>
constexpr Weights<T> kWeights = {
    {nullptr, nullptr, load_weights<WriteBack::split, T>, load_weights<WriteBack::kahan, T>},
    {{},
     kStoreAs<T, WriteBack::copy>,
     kStoreAs<T, WriteBack::split>,
     kStoreAs<T, WriteBack::kahan>,
     kStoreAs<T, WriteBack::stochastic>}};

template <class T, class Optimizer>
constexpr StepLoopsOf<T, Optimizer> loops_of() {
  if constexpr (sizeof(T) == sizeof(double)) {
    return {{{step<T, T, T, Optimizer>}}};
  } else {
    return {{{step<T, T, T, Optimizer>, step<T, T, Half, Optimizer>, step<T, T, BFloat16, Optimizer>, nullptr,
              step<T, T, Remainder, Optimizer>},
             {step<T, Half, T, Optimizer>, step<T, Half, Half, Optimizer>, step<T, Half, BFloat16, Optimizer>},
             {step<T, BFloat16, T, Optimizer>, step<T, BFloat16, Half, Optimizer>,
              step<T, BFloat16, BFloat16, Optimizer>, nullptr, step<T, BFloat16, Remainder, Optimizer>}}};
  }
}

template <class T, class... Optimizers>
constexpr StepLoops<T> step_loops(Functors<Optimizers...>) {
  return {loops_of<T, Optimizers>()...};
}

template <class T>
constexpr StepLoops<T> kStepLoops = step_loops<T>(AllFunctors<T>{});
template <class T>
constexpr LayerLoops<T> kLayerLoops = {lamb_moments<T>, lamb_direction<T>, descend<T>};

}  // namespace

extern const OptimizerLoops AMPCTX_TABLE(optimizers);
const OptimizerLoops AMPCTX_TABLE(optimizers) = {
    {kWeights<float>, kStepLoops<float>, kLayerLoops<float>},
    {kWeights<double>, kStepLoops<double>, kLayerLoops<double>},
    draw_state_bits,
    decode_state,
    round_state,
};

}  // namespace ampctx::cpu
