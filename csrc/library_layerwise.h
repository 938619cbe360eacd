// The boxed functions of the layer-wise optimizer ops, for library.cpp alone: library_optimizers.h for the pattern.
#pragma once

#include "library_optimizers.h"

namespace ampctx {
namespace {

template <const Backend& backend, bool held>
void multi_tensor_lamb(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* op = "multi_tensor_lamb";
  Arguments in(op, stack, held);
  const ListView grads = in.list(), params = in.list(), exp_avgs = in.list(), exp_avg_sqs = in.list();
  const ListView extras = in.list(), steps = in.list();
  const Tensor found_inf = in.tensor(), inv_scale = in.tensor(), lr = in.tensor(), global_grad_norm = in.tensor();
  LambOptions options;
  options.beta1 = in.number();
  options.beta2 = in.number();
  options.eps = in.number();
  options.weight_decay = in.number();
  options.max_grad_norm = in.number();
  const bool bias_correction = in.flag();
  options.adam_w_mode = in.flag();
  options.grad_averaging = in.flag();
  options.use_nvlamb = in.flag();
  const StoreArguments store(in);

  const ListArgument first{"grads", grads};
  const CallDevice call = call_device(first, found_inf);
  StepCall step =
      check_step(op, backend, call,
                 {first, {"params", params, true}, {"exp_avgs", exp_avgs, true}, {"exp_avg_sqs", exp_avg_sqs, true}},
                 extras, steps, found_inf, inv_scale, lr, store);
  const Factor norm = check_factor(op, "global_grad_norm", global_grad_norm, call, backend.has_device_pointers);
  step.rule.beta1 = options.beta1;
  step.rule.beta2 = options.beta2;
  step.rule.bias_correction = bias_correction;
  run_step(backend, call, step, options.has_ratio() ? 2 : 0, backend.lamb, options, norm);
}

template <const Backend& backend, bool held>
void multi_tensor_novograd(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* op = "multi_tensor_novograd";
  Arguments in(op, stack, held);
  const ListView grads = in.list(), params = in.list(), exp_avgs = in.list(), extras = in.list();
  const ListView exp_avg_sqs = in.list(), steps = in.list();
  const Tensor found_inf = in.tensor(), inv_scale = in.tensor(), lr = in.tensor();
  NovoGradOptions options;
  options.beta1 = in.number();
  options.beta2 = in.number();
  options.eps = in.number();
  options.weight_decay = in.number();
  const bool bias_correction = in.flag();
  options.grad_averaging = in.flag();
  options.reg_inside_moment = in.flag();
  options.inf_norm = in.flag();
  options.init_zero = in.flag();
  const StoreArguments store(in);

  const ListArgument first{"grads", grads};
  const CallDevice call = call_device(first, found_inf);
  StepCall step = check_step(op, backend, call, {first, {"params", params, true}, {"exp_avgs", exp_avgs, true}}, extras,
                             steps, found_inf, inv_scale, lr, store);
  const PerTensor norms = check_per_tensor(op, {"exp_avg_sqs", exp_avg_sqs, true}, ListChecker(op, call, first), call);
  step.rule.beta1 = options.beta1;
  step.rule.beta2 = options.beta2;
  step.rule.bias_correction = bias_correction;
  run_step(backend, call, step, 1, backend.novograd, options, norms);
}

template <const Backend& backend, bool held>
void multi_tensor_larc(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* op = "multi_tensor_larc";
  Arguments in(op, stack, held);
  const ListView grads = in.list(), params = in.list();
  const Tensor found_inf = in.tensor(), inv_scale = in.tensor(), lr = in.tensor();
  LarcOptions options;
  options.trust_coefficient = in.number();
  options.eps = in.number();
  options.weight_decay = in.number();
  options.clip = in.flag();
  options.maximize = in.flag();
  in.check_held();

  const ListArgument first{"grads", grads, true};
  const CallDevice call = call_device(first, found_inf);
  OptimizerCall larc;
  larc.lists = check_lists(op, backend.dtypes, call, {first, {"params", params}});
  larc.found_inf = check_found_inf(op, found_inf, call, false);
  larc.inv_scale = check_factor(op, "inv_scale", inv_scale, call, backend.has_device_pointers);
  larc.lr = check_factor(op, "lr", lr, call, backend.has_device_pointers);
  if (larc.lists.size() == 0) return;
  const Scope scope(backend, call.device);
  const int64_t bytes = backend.norms_workspace(larc.lists, 2);
  const Tensor workspace = torch_abi::empty(&bytes, aoti_torch_dtype_uint8(), call.device);
  larc.norms = workspace.mutable_data();
  backend.larc(scope.context, larc, options);
}

}  // namespace
}  // namespace ampctx
