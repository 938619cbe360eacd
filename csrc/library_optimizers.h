// The boxed functions of the optimizer ops, for library.cpp alone. Their arguments have one pattern: grads, params,
// states, extras, step counts, scalars, the op's own numbers, how to store. So have their checks, which
// ampctx/kernels/reference_steps.py makes too, with the same messages.
#pragma once

#include "arguments.h"
#include "backend.h"
#include "check.h"

namespace ampctx {
namespace {

// The end of the arguments, of one pattern too.
struct StoreArguments {
  explicit StoreArguments(Arguments& in) : maximize(in.flag()), write_back(in.integer()), seed(in.integer()) {
    in.check_held();
  }

  bool maximize;
  int64_t write_back;
  int64_t seed;
};

WriteBack check_write_back(const char* op, int64_t write_back) {
  if (write_back < 0 || write_back >= kWriteBacks) {
    fail(op, ": write_back is ", write_back, ", expected 0 to ", kWriteBacks - 1);
  }
  return static_cast<WriteBack>(write_back);
}

// Adds extras to the lists where the write back has them.
void check_extras(const char* op, const AllowedDTypes& dtypes, const ListView& params, const ListView& extras,
                  WriteBack mode, ListChecker& checker) {
  if (!has_extras(mode)) {
    if (extras.empty()) return;
    fail(op, ": extras has ", extras.size(), " tensors, expected none to go with this write_back");
  }
  const ListArgument argument{"extras", extras, true};
  checker.check_length(argument);
  checker.add(argument, mode == WriteBack::split ? kRemainderDTypes : dtypes);
  if (params.empty()) return;
  const int32_t param = params.dtype(0), extra = extras.dtype(0);
  const bool is_bf16 = param == aoti_torch_dtype_bfloat16(), is_f16 = param == aoti_torch_dtype_float16();
  if (mode == WriteBack::split && !is_bf16) {
    fail(op, ": params[0] has dtype ", dtype_name(param), ", expected bfloat16 to go with remainders");
  }
  if (mode == WriteBack::kahan && !is_bf16 && !is_f16) {
    fail(op, ": params[0] has dtype ", dtype_name(param), ", expected float16 or bfloat16 to go with compensations");
  }
  if (mode == WriteBack::kahan && extra != param) {
    fail(op, ": extras[0] has dtype ", dtype_name(extra), ", params[0] has ", dtype_name(param));
  }
}

struct Indexed {
  const char* name;
  size_t index;
  friend std::ostream& operator<<(std::ostream& out, const Indexed& self) {
    return out << self.name << "[" << self.index << "]";
  }
};

// A list of one fp32 element for each tensor.
PerTensor check_per_tensor(const char* op, const ListArgument& argument, const ListChecker& checker,
                           const CallDevice& call) {
  checker.check_length(argument);
  const ListView& tensors = argument.tensors;
  PerTensor pointers(tensors.size());
  const bool plain = holds_for_all(static_cast<int64_t>(tensors.size()), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (tensors.numel(i) != 1 || tensors.dtype(i) != aoti_torch_dtype_float32() || tensors.device(i) != call.device ||
          !tensors.has_memory(i, 1, sizeof(float))) {
        return false;
      }
      pointers[i] = static_cast<float*>(tensors.data(i, true));
    }
    return true;
  });
  if (plain) return pointers;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Indexed name{argument.name, i};
    const Tensor* tensor = tensors.tensor(i);
    if (!tensor) fail(op, ": ", name, " was read for one call and is no scalar: hold the list");
    pointers[i] = static_cast<float*>(check_state(op, name, *tensor, aoti_torch_dtype_float32(), call));
  }
  return pointers;
}

// What the optimizer ops have in common, checked. `elementwise`: grads, params and states.
StepCall check_step(const char* op, const Backend& backend, const CallDevice& call,
                    std::initializer_list<ListArgument> elementwise, const ListView& extras, const ListView& steps,
                    const Tensor& found_inf, const Tensor& inv_scale, const Tensor& lr, const StoreArguments& store) {
  ListChecker checker(op, call, *elementwise.begin());
  const auto is_used = [](const ListArgument& list) { return !(list.is_optional && list.tensors.empty()); };
  for (const ListArgument& argument : elementwise) {
    if (is_used(argument)) checker.check_length(argument);
  }
  for (const ListArgument& argument : elementwise) {
    if (is_used(argument)) checker.add(argument, backend.dtypes);
  }
  StepCall step;
  step.write_back = check_write_back(op, store.write_back);
  check_extras(op, backend.dtypes, elementwise.begin()[1].tensors, extras, step.write_back, checker);
  step.steps = check_per_tensor(op, {"steps", steps, true}, checker, call);
  step.found_inf = check_found_inf(op, found_inf, call, false);
  step.inv_scale = check_factor(op, "inv_scale", inv_scale, call, backend.has_device_pointers);
  step.lr = check_factor(op, "lr", lr, call, backend.has_device_pointers);
  step.lists = std::move(checker.lists);
  step.maximize = store.maximize;
  step.rule.seed = store.seed;
  return step;
}

// Calls the kernel with a workspace, and room for that many norms of each tensor.
template <class Kernel, class... Options>
void run_step(const Backend& backend, const CallDevice& call, StepCall& step, int norms, const Kernel& kernel,
              const Options&... options) {
  if (step.lists.total_tensors == 0) return;
  const Scope scope(backend, call.device);
  const int64_t scalars = step_workspace(step.lists), bytes = scalars + backend.norms_workspace(step.lists, norms);
  const Tensor workspace = torch_abi::empty(&bytes, aoti_torch_dtype_uint8(), call.device);
  step.workspace = workspace.mutable_data();
  step.norms = static_cast<char*>(step.workspace) + scalars;
  kernel(scope.context, step, options...);
}

template <const Backend& backend, bool held>
void multi_tensor_adam(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* op = "multi_tensor_adam";
  Arguments in(op, stack, held);
  const ListView grads = in.list(), params = in.list(), exp_avgs = in.list(), exp_avg_sqs = in.list();
  const ListView max_exp_avg_sqs = in.list(), extras = in.list(), steps = in.list();
  const Tensor found_inf = in.tensor(), inv_scale = in.tensor(), lr = in.tensor();
  AdamOptions options;
  options.beta1 = in.number();
  options.beta2 = in.number();
  options.eps = in.number();
  options.weight_decay = in.number();
  const bool bias_correction = in.flag();
  options.adam_w_mode = in.flag();
  const StoreArguments store(in);

  const ListArgument first{"grads", grads};
  const CallDevice call = call_device(first, found_inf);
  StepCall step = check_step(op, backend, call,
                             {first,
                              {"params", params, true},
                              {"exp_avgs", exp_avgs, true},
                              {"exp_avg_sqs", exp_avg_sqs, true},
                              {"max_exp_avg_sqs", max_exp_avg_sqs, true, true}},
                             extras, steps, found_inf, inv_scale, lr, store);
  step.rule.beta1 = options.beta1;
  step.rule.beta2 = options.beta2;
  step.rule.bias_correction = bias_correction;
  run_step(backend, call, step, 0, backend.adam, options);
}

template <const Backend& backend, bool held>
void multi_tensor_sgd(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* op = "multi_tensor_sgd";
  Arguments in(op, stack, held);
  const ListView grads = in.list(), params = in.list(), momentum_buffers = in.list();
  const ListView extras = in.list(), steps = in.list();
  const Tensor found_inf = in.tensor(), inv_scale = in.tensor(), lr = in.tensor();
  SgdOptions options;
  options.momentum = in.number();
  options.dampening = in.number();
  options.weight_decay = in.number();
  options.nesterov = in.flag();
  options.wd_after_momentum = in.flag();
  const StoreArguments store(in);

  const ListArgument first{"grads", grads};
  const CallDevice call = call_device(first, found_inf);
  StepCall step = check_step(op, backend, call,
                             {first, {"params", params, true}, {"momentum_buffers", momentum_buffers, true, true}},
                             extras, steps, found_inf, inv_scale, lr, store);
  run_step(backend, call, step, 0, backend.sgd, options);
}

template <const Backend& backend, bool held>
void multi_tensor_adagrad(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* op = "multi_tensor_adagrad";
  Arguments in(op, stack, held);
  const ListView grads = in.list(), params = in.list(), sums = in.list(), extras = in.list(), steps = in.list();
  const Tensor found_inf = in.tensor(), inv_scale = in.tensor(), lr = in.tensor();
  AdagradOptions options;
  options.eps = in.number();
  options.weight_decay = in.number();
  options.adagrad_w_mode = in.flag();
  const StoreArguments store(in);

  const ListArgument first{"grads", grads};
  const CallDevice call = call_device(first, found_inf);
  StepCall step = check_step(op, backend, call, {first, {"params", params, true}, {"sums", sums, true}}, extras, steps,
                             found_inf, inv_scale, lr, store);
  run_step(backend, call, step, 0, backend.adagrad, options);
}

}  // namespace
}  // namespace ampctx
