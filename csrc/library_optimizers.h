// The boxed functions of the optimizer ops, for library.cpp alone. Their arguments have one pattern, that of
// ampctx/kernels/spec.py: grads, params, states, extras, states of one element, step counts, skip counts, scalars, the
// norm to clip by, the op's own numbers, how to store, the bound of the norm. So have their checks.
#pragma once

#include "arguments.h"
#include "backend.h"
#include "check.h"

namespace ampctx {
namespace {

// The end of the arguments, of one pattern too.
struct StoreArguments {
  explicit StoreArguments(Arguments& in)
      : maximize(in.flag()),
        write_back(in.integer()),
        seed(in.integer()),
        max_norm(in.number()),
        stochastic_state(in.flag()) {}

  bool maximize;
  int64_t write_back;
  int64_t seed;
  double max_norm;
  bool stochastic_state;
};

WriteBack check_write_back(const char* op, int64_t write_back) {
  if (write_back < 0 || write_back >= kWriteBacks) {
    fail(op, ": write_back is ", write_back, ", expected 0 to ", kWriteBacks - 1);
  }
  return static_cast<WriteBack>(write_back);
}

// Adds extras to the lists where the write back has them.
void check_extras(const char* op, const AllowedDTypes& dtypes, const Views& params, const Views& extras, WriteBack mode,
                  ListChecker& checker) {
  if (!has_extras(mode)) {
    if (extras.empty()) return;
    fail(op, ": extras has ", extras.size(), " tensors, expected none to go with this write_back");
  }
  const ListArgument argument{"extras", extras};
  checker.check_length(argument);
  checker.add(argument, mode == WriteBack::split ? kRemainderDTypes : dtypes);
  if (params.empty()) return;
  const int32_t param = params[0].dtype, extra = extras[0].dtype;
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

// The one fp32 element of tensor `i` of the list.
float* check_element(const char* op, const ListArgument& argument, size_t i, const CallDevice& call) {
  const Indexed name{argument.name, i};
  return static_cast<float*>(check_state(op, name, argument.tensors[i], aoti_torch_dtype_float32(), call));
}

// Of each tensor of the list.
PerTensor check_per_tensor(const char* op, const ListArgument& argument, const ListChecker& checker,
                           const CallDevice& call) {
  checker.check_length(argument);
  PerTensor pointers(argument.tensors.size());
  for (size_t i = 0; i < pointers.size(); ++i) pointers[i] = check_element(op, argument, i, call);
  return pointers;
}

// None, or those that a step is counted in, and the loss scale.
SkipCounts check_skips(const char* op, const ListArgument& skips, const CallDevice& call) {
  constexpr size_t count = 5;
  const size_t size = skips.tensors.size();
  if (size == 0) return {};
  if (size != count) fail(op, ": skips has ", size, " tensors, expected none or ", count);
  const auto at = [&](size_t i) { return check_element(op, skips, i, call); };
  return {at(0), at(1), at(2), at(3), at(4)};
}

// The scales of codes, for the tensors that have elements.
std::vector<void*> check_scales(const char* op, const ListArgument& argument, const Views& grads,
                                const CallDevice& call) {
  const Views& scales = argument.tensors;
  if (scales.size() != grads.size()) {
    fail(op, ": ", argument.name, " has ", scales.size(), " tensors, grads has ", grads.size());
  }
  std::vector<void*> pointers;
  pointers.reserve(scales.size());
  for (size_t i = 0; i < scales.size(); ++i) {
    const auto refuse = [&](const auto&... why) { fail(op, ": ", argument.name, "[", i, "] ", why...); };
    const View& view = scales[i];
    if (!view.is_strided) refuse("is not a strided tensor");
    if (view.dtype != aoti_torch_dtype_float32()) refuse("has dtype ", dtype_name(view.dtype), ", expected float32");
    if (view.device != call.device) {
      refuse("is on ", view.device.name(), ", ", call.decided_by, " is on ", call.device.name());
    }
    if (const int64_t expected = code_blocks(grads[i].numel); view.numel != expected) {
      refuse("has ", view.numel, " elements, expected ", expected, ": one for each ", kCodeBlock, " of grads[", i, "]");
    }
    if (!view.is_contiguous) refuse("is not contiguous");
    if (view.numel == 0) continue;
    if (!view.has_memory) refuse(kNoMemory);
    pointers.push_back(view.data);
  }
  return pointers;
}

// What goes with codes, and with states that are rounded at random. `given`: the lists of states, in their order.
template <size_t count>
void check_state_types(const char* op, const std::array<StateList, count>& states,
                       const std::vector<const Views*>& given, const std::vector<ListArgument>& scales,
                       const Views& grads, const CallDevice& call, StepCall& step) {
  const char *coded = nullptr, *uncoded = nullptr;
  size_t place = 0;
  for (size_t i = 0; i < count; ++i) {
    if (states[i].code == DType::f32) {
      if (!given[i]->empty()) uncoded = states[i].name;
      continue;
    }
    const ListArgument& argument = scales[place];
    DType dtype;
    if (!given[i]->empty() && to_dtype((*given[i])[0].dtype, dtype) && dtype == states[i].code) {
      step.scales[place] = check_scales(op, argument, grads, call);
      if (!coded) coded = states[i].name;
    } else if (!argument.tensors.empty()) {
      fail(op, ": ", argument.name, " has ", argument.tensors.size(), " tensors, expected none: ", states[i].name,
           " has no codes");
    }
    ++place;
  }
  if (!coded && !step.stochastic_state) return;
  const std::string what = coded ? std::string(coded) + " in codes" : "stochastic_state";
  if (step.lists.computes_in_f64()) fail(op, ": ", what, " does not go with float64 tensors");
  if (uncoded) fail(op, ": ", what, " does not go with ", uncoded, ", which must not be rounded down");
}

// Null for none.
const int64_t* check_numbers(const char* op, const View& numbers, const TensorLists& lists, const CallDevice& call) {
  if (!numbers.is_defined) fail(op, ": numbers is None, expected a tensor");
  if (numbers.dtype != aoti_torch_dtype_int64()) {
    fail(op, ": numbers has dtype ", dtype_name(numbers.dtype), ", expected int64");
  }
  const int64_t elements = numbers.numel;
  if (elements == 0) return nullptr;
  if (elements != lists.size()) {
    fail(op, ": numbers has ", elements, " elements, expected none or ", lists.size(),
         ": one for each tensor with elements");
  }
  check_device(op, "numbers", numbers, call);
  if (!numbers.is_contiguous) fail(op, ": numbers is not contiguous");
  if (!numbers.has_memory) fail(op, ": numbers ", kNoMemory);
  return static_cast<const int64_t*>(numbers.data);
}

// Checks the arguments that all optimizer ops have. `elementwise`: grads, params and states; `codes`: of each, the one
// that may hold it, f32 for none; `one_element`: lists of the op itself and, last, the step counts.
StepCall check_step(const char* op, const Backend& backend, const CallDevice& call,
                    const std::vector<ListArgument>& elementwise, const std::vector<DType>& codes, const Views& extras,
                    const std::vector<ListArgument>& one_element, const ListArgument& skips, const View& found_inf,
                    const View& inv_scale, const View& grad_norm, const View& lr, const StoreArguments& store) {
  ListChecker checker(op, call, elementwise[0]);
  for (const ListArgument& argument : elementwise) checker.check_length(argument);
  for (size_t i = 0; i < elementwise.size(); ++i) {
    checker.add(elementwise[i], codes[i] == DType::f32 ? backend.dtypes : or_codes(backend.dtypes, codes[i]));
  }
  StepCall step;
  step.write_back = check_write_back(op, store.write_back);
  check_extras(op, backend.dtypes, elementwise[1].tensors, extras, step.write_back, checker);
  const size_t steps = one_element.size() - 1;
  step.steps = check_per_tensor(op, one_element[steps], checker, call);
  step.found_inf = check_found_inf(op, found_inf, call);
  const Factor factor = check_factor(op, "inv_scale", inv_scale, call, backend.has_device_pointers);
  step.lr = check_factor(op, "lr", lr, call, backend.has_device_pointers);
  step.inv_scale = check_clipped(op, factor, "grad_norm", grad_norm, store.max_norm, call, backend.has_device_pointers);
  for (size_t i = 0; i < steps; ++i) {
    step.one_element.push_back(check_per_tensor(op, one_element[i], checker, call));
  }
  step.skips = check_skips(op, skips, call);
  step.lists = std::move(checker.lists);
  if (backend.has_device_pointers) {
    std::vector<void*>& behind = step.lists.pointer[step.lists.depth];
    step.lists.dtype[step.lists.depth] = DType::f32;
    behind.reserve(step.lists.index.size());
    for (const int64_t index : step.lists.index) behind.push_back(step.steps[index]);
  }
  step.maximize = store.maximize;
  return step;
}

// Calls the kernel with room for that many norms of each tensor, and on the CPU for its scalars.
template <class Kernel, class Options>
void run_step(const Backend& backend, const CallDevice& call, StepCall& step, int norms, const Kernel& kernel,
              const Options& options) {
  const Scope scope(backend, call.device);
  const bool counts_here = !backend.has_device_pointers || step.lists.total_tensors == 0;
  if (counts_here && step.skips.overflowed) {
    backend.count_skip(scope.context, step.skips, step.found_inf, step.found_inf);
  }
  if (step.lists.total_tensors == 0) return;
  const int64_t scalars = backend.has_device_pointers ? 0 : step_workspace(step.lists);
  const int64_t bytes = scalars + backend.norms_workspace(step.lists, norms);
  step.workspace = bytes > 0 ? scope.context.allocate(scope.context.owner, bytes) : nullptr;
  step.norms = static_cast<char*>(step.workspace) + scalars;
  kernel(scope.context, step, options);
}

// Both ops of a step. `unscales`: the one that writes the gradients, too.
template <const Backend& backend, bool unscales, class Options, auto kernel>
void step_op(Arguments& in) {
  using Op = StepOp<Options>;
  constexpr const char* name = unscales ? Op::unscaling_name : Op::name;
  std::vector<ListArgument> elementwise, one_element, scales;
  elementwise.push_back({"grads", in.list(unscales)});
  elementwise.push_back({"params", in.list(true)});
  std::vector<DType> codes(elementwise.size(), DType::f32);
  std::vector<const Views*> states;
  for (const StateList& state : Op::states) {
    const Views& views = in.list(true);
    states.push_back(&views);
    if (state.is_optional && views.empty()) continue;
    elementwise.push_back({state.name, views});
    codes.push_back(state.code);
  }
  const Views& extras = in.list(true);
  for (const char* list : Op::one_element) one_element.push_back({list, in.list(true)});
  one_element.push_back({"steps", in.list(true)});
  for (const StateList& state : Op::states) {
    if (state.code != DType::f32) scales.push_back({state.scales, in.list(true)});
  }
  const ListArgument skips{"skips", in.list(true)};
  const View found_inf = in.tensor(), inv_scale = in.tensor(), lr = in.tensor();
  std::vector<View> factors;
  for (size_t i = 0; i < Op::factors.size(); ++i) factors.push_back(in.tensor());
  const View grad_norm = in.tensor(), numbers = in.tensor();
  const Options options = Options::taken(in);
  const StoreArguments store(in);

  const CallDevice call = call_device(elementwise[0], found_inf);
  StepCall step = check_step(name, backend, call, elementwise, codes, extras, one_element, skips, found_inf, inv_scale,
                             grad_norm, lr, store);
  step.unscales = unscales;
  for (size_t i = 0; i < factors.size(); ++i) {
    step.factors.push_back(check_factor(name, Op::factors[i], factors[i], call, backend.has_device_pointers));
  }
  step.stochastic_state = store.stochastic_state;
  check_state_types(name, Op::states, states, scales, elementwise[0].tensors, call, step);
  step.numbers = check_numbers(name, numbers, step.lists, call);
  step.rule = Op::rule(options);
  step.rule.seed = store.seed;
  run_step(backend, call, step, norms_for(options), backend.*kernel, options);
}

template <const Backend& backend>
void multi_tensor_larc(Arguments& in) {
  constexpr const char* op = "multi_tensor_larc";
  const ListArgument grads{"grads", in.list(true)}, params{"params", in.list()};
  const View found_inf = in.tensor(), inv_scale = in.tensor(), lr = in.tensor();
  const LarcOptions options = LarcOptions::taken(in);

  const CallDevice call = call_device(grads, found_inf);
  OptimizerCall larc;
  larc.lists = check_lists(op, backend.dtypes, call, {grads, params});
  larc.found_inf = check_found_inf(op, found_inf, call);
  larc.inv_scale = {check_factor(op, "inv_scale", inv_scale, call, backend.has_device_pointers)};
  larc.lr = check_factor(op, "lr", lr, call, backend.has_device_pointers);
  if (larc.lists.size() == 0) return;
  const Scope scope(backend, call.device);
  const int64_t bytes = backend.norms_workspace(larc.lists, 2);
  const torch_abi::Tensor workspace = torch_abi::empty(&bytes, aoti_torch_dtype_uint8(), call.device);
  larc.norms = workspace.mutable_data();
  backend.larc(scope.context, larc, options);
}

}  // namespace
}  // namespace ampctx
