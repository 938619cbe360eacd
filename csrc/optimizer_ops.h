// The entry points of the optimizer kernels, free of torch, and what they are given: ops.h for the rest.
#pragma once

#include "functors/codes.h"
#include "functors/write_back.h"
#include "ops.h"
#include "step_ops.h"

namespace ampctx {

// One fp32 element for each tensor of the caller's lists, those without elements too. No two are the same.
using PerTensor = std::vector<float*>;

// What every optimizer op is given. Where found_inf is set, nothing changes.
struct OptimizerCall {
  TensorLists lists;  // grads, params, and what a step adds
  FoundInf found_inf;
  ClippedFactor inv_scale;
  Factor lr;
  void* norms = nullptr;  // norms_workspace bytes, where the op asks for norms of tensors
};

// A step: its lists go on with the op's states, and extras where write_back has any. The step counts go up by one
// before anything is computed. Behind the lists, at pointer[depth], CUDA kernels find those of tensors with elements.
struct StepCall : OptimizerCall {
  PerTensor steps;                     // step counts
  std::vector<PerTensor> one_element;  // the op's other states of one element
  std::vector<Factor> factors;         // the op's own
  bool maximize;
  bool unscales;  // whether the gradients become what the step computes with: times inv_scale, whatever the sign
  WriteBack write_back;
  bool stochastic_state = false;  // whether bf16 states and codes are rounded at random
  // Of the states that are codes, the fp32 scales of each tensor with elements: functors/codes.h.
  std::array<std::vector<void*>, kCodedStates> scales;
  const int64_t* numbers = nullptr;  // of these tensors, for random bits; readable by the kernel. Null: their places
  TensorRule rule;                   // what becomes of the step counts
  SkipCounts skips;  // counted even where found_inf is set; without elements or on the CPU by who makes this
  void* workspace;   // step_workspace bytes on the CPU

  int states() const { return lists.depth - 2 - has_extras(write_back); }
};

// The scalars of each tensor that has elements. CUDA kernels make theirs as they go.
inline int64_t step_workspace(const TensorLists& lists) {
  return lists.size() * static_cast<int64_t>(sizeof(TensorScalars<double>));
}

// How many norms of each tensor an op needs room for.
template <class Options>
int norms_for(const Options&) {
  return 0;
}

#define AMPCTX_ENTRY(op, Options, unused) void op(const Context&, const StepCall&, const Options&);
namespace cpu {
AMPCTX_STEP_OPS(AMPCTX_ENTRY, )
void larc(const Context&, const OptimizerCall&, const LarcOptions&);  // rewrites the gradients
}  // namespace cpu

namespace cuda {
AMPCTX_STEP_OPS(AMPCTX_ENTRY, )
void larc(const Context&, const OptimizerCall&, const LarcOptions&);
}  // namespace cuda
#undef AMPCTX_ENTRY

}  // namespace ampctx
