// The entry points of the optimizer kernels, free of torch, and what they are given: ops.h for the rest.
#pragma once

#include "functors/adagrad.h"
#include "functors/adam.h"
#include "functors/lamb.h"
#include "functors/larc.h"
#include "functors/novograd.h"
#include "functors/sgd.h"
#include "functors/write_back.h"
#include "ops.h"

namespace ampctx {

// One fp32 element for each tensor of the caller's lists, those without elements too. No two are the same.
using PerTensor = std::vector<float*>;

// What every optimizer op is given. Where found_inf is set, nothing changes.
struct OptimizerCall {
  TensorLists lists;  // grads, params, and what a step adds
  FoundInf found_inf;
  Factor inv_scale, lr;
  void* norms = nullptr;  // norms_workspace bytes, where the op asks for norms of tensors
};

// A step: its lists go on with the op's states, and extras where write_back has any. The step counts go up by one
// before anything is computed.
struct StepCall : OptimizerCall {
  PerTensor steps;  // step counts
  bool maximize;
  WriteBack write_back;
  TensorRule rule;  // what becomes of the step counts
  void* workspace;  // step_workspace bytes

  int states() const { return lists.depth - 2 - has_extras(write_back); }
};

// Scalars of each tensor that has elements.
inline int64_t step_workspace(const TensorLists& lists) {
  return lists.size() * static_cast<int64_t>(sizeof(TensorScalars<double>));
}

namespace cpu {
void adam(const Context&, const StepCall&, const AdamOptions&);  // states: exp_avgs, exp_avg_sqs, maybe max_exp_avg_sqs
void sgd(const Context&, const StepCall&, const SgdOptions&);    // states: maybe momentum_buffers
void adagrad(const Context&, const StepCall&, const AdagradOptions&);                     // states: sums
void lamb(const Context&, const StepCall&, const LambOptions&, Factor global_grad_norm);  // exp_avgs, exp_avg_sqs
void novograd(const Context&, const StepCall&, const NovoGradOptions&, const PerTensor& exp_avg_sqs);  // exp_avgs
void larc(const Context&, const OptimizerCall&, const LarcOptions&);  // rewrites the gradients
}  // namespace cpu

namespace cuda {
void adam(const Context&, const StepCall&, const AdamOptions&);
void sgd(const Context&, const StepCall&, const SgdOptions&);
void adagrad(const Context&, const StepCall&, const AdagradOptions&);
void lamb(const Context&, const StepCall&, const LambOptions&, Factor global_grad_norm);
void novograd(const Context&, const StepCall&, const NovoGradOptions&, const PerTensor& exp_avg_sqs);
void larc(const Context&, const OptimizerCall&, const LarcOptions&);
}  // namespace cuda

}  // namespace ampctx
