// The CPU's inner loops over a block of elements, compiled once per instruction set and chosen at run time.
#pragma once

#include <stdint.h>

#include "../functors/codes.h"
#include "../functors/write_back.h"
#include "step_ops.h"

namespace ampctx::cpu {

constexpr int64_t kBlock = 2048;  // elements of one partial sum: three fp32 lists fit a 32 KB cache

template <class T>
struct ScaleFrom {
  bool (*to[kDTypes])(const void* x, void* out, int64_t n, T factor, bool streams);
};

// Each returns whether all checked inputs were finite. `out` may be an input. scale and l2norm convert on the way, by
// memory types; null where blocks have to be converted before.
template <class T>
struct Arithmetic {
  ScaleFrom<T> scale_from[kDTypes];  // `streams`: write past the caches, for outputs that they cannot hold
  bool (*axpby)(const T* x, const T* y, T* out, int64_t n, T a, T b, int arg_to_check);
  bool (*l2norm[kDTypes])(const void* x, int64_t n, T factor,
                          double* sums);  // of squares, one for each kBlock elements
};

// One block of an optimizer step, in the type of the arithmetic.
constexpr int kMaxStates = 3;
template <class T>
struct StepBlock {
  const T* grad;
  T* weight;  // updated, like the states
  T* state[kMaxStates];
  T* extra;  // the write back's extra or null; optimizers do not touch it
  int64_t n;
  T grad_scale;  // 1 / loss scale, negative to maximize
  T lr;
  TensorScalars<T> tensor;
};

// States are in the type of the arithmetic, gradients and extras in their own. Extras are copies of weights, or the
// remainders of split ones in bf16. The block has neither its gradients nor its weights.
template <class T, class Optimizer>
using StepLoop = void (*)(const StepBlock<T>& block, const void* grad, void* weight, void* extra,
                          const Optimizer& optimizer);

// Indexed by the types of gradients and extras. f32: of the type of the arithmetic, and no extras. Null for others.
template <class T, class Optimizer>
struct StepLoopsOf {
  StepLoop<T, Optimizer> loop[kDTypes][kDTypes];
};

template <class T, class Functors>
struct LoopsOf;
template <class T, class... Optimizers>
struct LoopsOf<T, Functors<Optimizers...>> : StepLoopsOf<T, Optimizers>... {};

// The loops of every functor, each a base class.
template <class T>
using StepLoops = LoopsOf<T, AllFunctors<T>>;

// Parts of the steps that need more than one walk.
template <class T>
struct LayerLoops {
  void (*lamb_moments)(const StepBlock<T>& block, const Lamb<T>& lamb);  // does not change the weight
  void (*lamb_direction)(const StepBlock<T>& block, const Lamb<T>& lamb, T* u);
  void (*descend)(T* weight, const T* u, int64_t n, T rate);  // weight -= rate u
};

template <class T>
struct StoreWeights {
  void (*as[kDTypes])(T* weight, T* extra, int64_t n, RandomKey key);  // types of the params
};

// functors/write_back.h over a block, in place, for each WriteBack: makes weights from params and extras, and back.
template <class T>
struct Weights {
  void (*load[kWriteBacks])(T* weight, const T* extra, int64_t n);
  StoreWeights<T> store[kWriteBacks];
};

// How a state is stored in fewer bits: functors/codes.h.
struct StateRounding {
  DType type;  // bf16 or a code
  int state;
  const uint32_t* random;  // bits_of_states() of each element; null for codes to nearest
};

struct OptimizerLoops {
  template <class T>
  struct Of {
    Weights<T> weights;
    StepLoops<T> steps;
    LayerLoops<T> layers;
  };
  Of<float> f32;
  Of<double> f64;
  // bits_of_states() of the places from that of the key on.
  void (*draw)(RandomKey key, uint32_t* bits, int64_t n);
  // `from` and `to` are of the type of the memory. Null scales for bf16.
  void (*decode)(DType type, const void* from, const float* scales, float* values, int64_t n);
  void (*round)(const StateRounding& how, const float* values, void* to, float* scales, int64_t n);
};

using Convert = void (*)(const void* from, void* to, int64_t n);

// Every instruction set gives the same bits: a fixed number of accumulators, no contraction to FMA.
struct Simd {
  const char* name;
  Arithmetic<float> f32;
  Arithmetic<double> f64;
  // Convert between memory type and arithmetic type, [arithmetic][memory]. Null if they are the same.
  Convert load[2][kDTypes];
  Convert store[2][kDTypes];
  const OptimizerLoops& optimizers;
};

// The best for this machine, capped by the environment variable AMPCTX_SIMD (baseline, avx2 or avx512).
const Simd& simd();

// For the build information: the name of simd(), and those of all that are built in, as JSON strings.
const char* simd_used();
const char* simd_built();

}  // namespace ampctx::cpu
