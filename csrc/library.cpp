// One function per op and backend, and their registration, which ampctx/kernels/extension.py calls. The path of a call:
//
//   library.cpp    op_of: from torch's dispatcher, or from a plan (plan.h) without it; takes arguments (arguments.h)
//   check.h        Call: checks them and names what is wrong; gives TensorLists, FoundInf, Factor
//   ops.h          the entry points of the kernels, free of torch from here on
//   cpu | cuda     walks over the elements of lists
//   functors       the arithmetic of an element, one text for both
//
// The schemas are in ampctx/kernels/definitions.py. torch turns C++ exceptions into RuntimeError (error.h).
#include <cmath>
#include <limits>
#include <new>

#include "check.h"
#include "cpu/simd.h"
#include "plan.h"

#ifdef __clang__
#define AMPCTX_COMPILER __VERSION__
#else
#define AMPCTX_COMPILER "g++ " __VERSION__
#endif

#ifndef AMPCTX_BUILD  // what setup.py tells, as entries of a JSON object
#define AMPCTX_BUILD "\"source\": \"\", \"cuda\": null, \"cuda_archs\": [], \"why_no_cuda\": \"\""
#endif

// Containers call it when g++ 11 or newer compiles them. libstdc++ before GCC 11 lacks it, and wheels run there.
namespace std {
[[noreturn]] void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std

namespace ampctx {
namespace {

#ifdef AMPCTX_CUDA_EMULATION
constexpr Backend kCpu = {"CPU", kCudaDTypes, true, false, AMPCTX_KERNELS(cuda)};
#else
constexpr Backend kCpu = {"CPU", kCpuDTypes, false, false, AMPCTX_KERNELS(cpu)};
#endif
#ifdef AMPCTX_WITH_CUDA
constexpr Backend kCuda = {"CUDA", kCudaDTypes, true, true, AMPCTX_KERNELS(cuda)};
#endif

// The arguments of an update of the scale, if an op has one; `scale` by the name that the op gives it.
struct UpdateArguments {
  View scale, growth_tracker, hysteresis_tracker;
  ScaleRule rule{};

  void take_tensors(Arguments& in) {
    scale = in.tensor(true), growth_tracker = in.tensor(true), hysteresis_tracker = in.tensor(true);
  }
  void take_rule(Arguments& in) {
    rule = {in.number(), in.number(), in.integer(), in.integer(), in.number(), in.number()};
  }

  // Refuses a rule that could make the scale 0, inf or nan, or overflow a tracker.
  ScaleUpdate check(const Call& call, const char* name, const FoundInf& found_inf) const {
    const int32_t int32 = aoti_torch_dtype_int32();
    const ScaleState state = {call.element(name, scale), call.element<int32_t>("growth_tracker", growth_tracker, int32),
                              call.element<int32_t>("hysteresis_tracker", hysteresis_tracker, int32), found_inf};
    constexpr float largest = std::numeric_limits<float>::max(), smallest = std::numeric_limits<float>::min();
    const double growth = rule.growth_factor, backoff = rule.backoff_factor;
    const auto expect = [&](bool fits, const auto&... why) {
      if (!fits) fail(call.op, ": ", why...);
    };
    expect(growth >= 1 && std::isfinite(growth), "growth_factor is not a finite number of at least 1");
    expect(backoff > 0 && backoff <= 1, "backoff_factor is not a number above 0 and at most 1");
    expect(rule.min_scale >= 0 && rule.min_scale <= largest, "min_scale is not a number from 0 to the largest fp32");
    expect(rule.max_scale >= smallest, "max_scale is not a number from the smallest normal fp32 up");
    expect(rule.hysteresis >= 0 && rule.hysteresis <= INT32_MAX, "hysteresis is ", rule.hysteresis, ", expected 0 to ",
           INT32_MAX);
    return {state, rule};
  }
};

template <const Backend& backend, bool updates, bool clips>
void multi_tensor_scale(Arguments& in) {
  constexpr const char* op = updates ? "multi_tensor_scale_and_update"
                             : clips ? "multi_tensor_scale_clipped"
                                     : "multi_tensor_scale";
  const ListArgument src{"src", in.list()}, dst{"dst", in.list(true)};
  const View found_inf = in.tensor(true), scale = in.tensor(), grad_norm = clips ? in.tensor() : View{};
  const double max_norm = clips ? in.number() : -1;
  UpdateArguments update;
  if (updates) update.take_tensors(in), update.take_rule(in);

  const Call call(op, backend, src, found_inf);
  const TensorLists lists = call.lists({src, dst});
  const FoundInf flag = call.found_inf(found_inf);
  ClippedFactor factor{call.factor("scale", scale)};
  if (clips) factor = call.clipped(factor, grad_norm, max_norm);
  const ScaleUpdate checked = updates ? update.check(call, "loss_scale", flag) : ScaleUpdate{};
  if (lists.size() == 0 && !updates) return;
  // A clip by 1 of a finite norm, with a raised flag, changes nothing. On the CPU all of that is known.
  const bool is_raised = max_norm >= 0 && !backend.has_device_pointers && *flag.word == flag.raised;
  if (is_raised && factor.value == 1 && lists.pointer[0] == lists.pointer[1]) return;
  backend.scale(DeviceScope(call).context, lists, flag, factor, updates ? &checked : nullptr);
}

template <const Backend& backend>
void multi_tensor_axpby(Arguments& in) {
  const ListArgument x{"x", in.list()}, y{"y", in.list()}, out{"out", in.list(true)};
  const View found_inf = in.tensor(true), a = in.tensor(), b = in.tensor();
  const int64_t arg_to_check = in.integer();

  const Call call("multi_tensor_axpby", backend, x, found_inf);
  const TensorLists lists = call.lists({x, y, out});
  const FoundInf flag = call.found_inf(found_inf);
  const Factor factor_a = call.factor("a", a), factor_b = call.factor("b", b);
  if (arg_to_check < -1 || arg_to_check > 1) {
    call.refuse("arg_to_check", "is ", arg_to_check, ", expected -1, 0 or 1");
  }
  if (lists.size() == 0) return;
  backend.axpby(DeviceScope(call).context, lists, flag, factor_a, factor_b, static_cast<int>(arg_to_check));
}

// The norm ops; without inv_scale the factor is 1.
template <const Backend& backend, bool has_inv_scale, bool updates>
void multi_tensor_l2norm(Arguments& in) {
  constexpr const char* op = updates         ? "multi_tensor_unscale_l2norm_and_update"
                             : has_inv_scale ? "multi_tensor_unscale_l2norm"
                                             : "multi_tensor_l2norm";
  const ListArgument tensors{"tensors", in.list()};
  const View found_inf = in.tensor(true), inv_scale = has_inv_scale ? in.tensor() : View{};
  const bool per_tensor = in.flag();
  UpdateArguments update;
  if (updates) update.take_tensors(in), update.take_rule(in);

  const Call call(op, backend, tensors, found_inf);
  const TensorLists lists = call.lists({tensors});
  const FoundInf flag = call.found_inf(found_inf);
  const Factor factor = has_inv_scale ? call.factor("inv_scale", inv_scale) : Factor{};
  const ScaleUpdate checked = updates ? update.check(call, "loss_scale", flag) : ScaleUpdate{};

  DeviceScope scope(call);
  const bool f64 = lists.computes_in_f64();
  const int32_t dtype = f64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
  const int64_t norms = per_tensor ? lists.total_tensors : 0;
  void* const norm = in.result(op, nullptr, dtype, call.device);
  void* const each = in.result(op, &norms, dtype, call.device);
  void* const norm_copy = updates ? in.result(op, nullptr, dtype, call.device) : nullptr;
  void* const workspace = scope.allocate(backend.norms_workspace(lists, 1));
  backend.l2norm(scope.context, lists, flag, factor, {norm, norm_copy, norms ? each : nullptr, workspace},
                 updates ? &checked : nullptr);
}

template <const Backend& backend>
void update_scale(Arguments& in) {
  UpdateArguments update;
  update.take_tensors(in);
  const View found_inf = in.tensor();
  update.take_rule(in);
  const Call call("update_scale", backend, "scale", update.scale);
  const ScaleUpdate checked = update.check(call, "scale", call.found_inf(found_inf));
  backend.update_scale(DeviceScope(call).context, checked.state, checked.rule);
}

template <const Backend& backend>
void block_factors(Arguments& in) {
  const View scale = in.tensor();
  const Call call("block_factors", backend, "scale", scale);
  const float* const from = call.element("scale", scale);
  const DeviceScope scope(call);
  const auto result = [&] {
    return static_cast<float*>(in.result(call.op, nullptr, aoti_torch_dtype_float32(), call.device));
  };
  backend.block_factors(scope.context, from, {result(), result(), result()});
}

template <const Backend& backend>
void count_skip(Arguments& in) {
  const View counts = in.tensor(true), found_inf = in.tensor(), flag = in.tensor(), scale = in.tensor();
  const int64_t slot = in.integer();
  const bool is_first = in.flag();
  const Call call("count_skip", backend, "counts", counts);
  call.check_defined("counts", counts);
  call.check_dtype("counts", counts, aoti_torch_dtype_float32());
  if (slot < 0 || slot >= counts.numel / 2 - 1) {
    call.refuse("slot", "is ", slot, ", counts has ", counts.numel, " elements");
  }
  auto* const numbers = static_cast<float*>(call.data("counts", counts));
  const FoundInf step = call.found_inf(found_inf), of_loss = call.found_inf(flag);
  float* const of_slot = numbers + 2 + 2 * slot;
  const SkipCounts to{is_first ? numbers : nullptr, numbers + 1, of_slot, of_slot + 1, call.element("scale", scale)};
  backend.count_skip(DeviceScope(call).context, to, step, of_loss);
}

// --- optimizers ------------------------------------------------------------------------------------------------------

// The arguments of a step, and their checks. All step ops have one pattern (OpSpec.lists and OpSpec.values in
// ampctx/kernels/spec.py): lists, one-element tensors, the op's own numbers, the numbers of every step.
class StepArguments {
 public:
  // Takes all in front of the op's own numbers.
  StepArguments(Arguments& in, std::initializer_list<StateList> states, std::initializer_list<const char*> factors,
                bool unscales)
      : states_(states), unscales_(unscales) {
    walked_.push_back({"grads", in.list(unscales)});
    walked_.push_back({"params", in.list(true)});
    for (const StateList& state : states) walked_.push_back({state.name, in.list(true), state.code});
    walked_.push_back({"extras", in.list(true)});
    steps_ = &in.list(true);
    for (const StateList& state : states) {
      if (state.code != DType::f32) scales_.push_back({state.scales, in.list(true)});
    }
    skips_ = &in.list(true);
    found_inf_ = in.tensor(), inv_scale_ = in.tensor(), lr_ = in.tensor();
    for (const char* name : factors) factors_.emplace_back(name, in.tensor());
    grad_norm_ = in.tensor(), numbers_ = in.tensor(), table_ = in.tensor(), rows_ = in.tensor();
  }
  // Takes all behind them.
  void take_rest(Arguments& in) {
    maximize_ = in.flag(), write_back_ = in.integer(), seed_ = in.integer(), max_norm_ = in.number();
    stochastic_state_ = in.flag();
  }

  const ListArgument& grads() const { return walked_[0]; }
  const View& found_inf() const { return found_inf_; }

  StepCall check(const Call& call) const {
    StepCall step;
    std::vector<ListArgument> lists{walked_[0], walked_[1]};
    for (size_t i = 0; i < states_.size(); ++i) {
      if (!states_.begin()[i].is_optional || walked_[2 + i].tensors.size() > 0) lists.push_back(walked_[2 + i]);
    }
    step.lists = call.lists(lists);
    add_extras(call, step);
    const ListArgument steps{"steps", *steps_};
    call.check_length(steps, grads());
    step.steps = call.elements(steps);
    step.found_inf = call.found_inf(found_inf_);
    const Factor factor = call.factor("inv_scale", inv_scale_);
    step.rates = {call.factor("lr", lr_)};
    step.inv_scale = call.clipped(factor, grad_norm_, max_norm_);
    if (const size_t count = 5, size = skips_->size(); size == count) {
      const PerTensor at = call.elements({"skips", *skips_});
      step.skips = {at[0], at[1], at[2], at[3], at[4]};
    } else if (size != 0) {
      call.refuse("skips", "has ", size, " tensors, expected none or ", count);
    }
    if (call.backend.has_device_pointers) {
      std::vector<void*>& behind = step.lists.pointer[step.lists.depth];
      step.lists.dtype[step.lists.depth] = DType::f32;
      behind.reserve(step.lists.index.size());
      for (const int64_t index : step.lists.index) behind.push_back(step.steps[index]);
    }
    step.maximize = maximize_, step.unscales = unscales_, step.stochastic_state = stochastic_state_;
    for (const auto& [name, view] : factors_) step.factors.push_back(call.factor(name, view));
    check_state_types(call, step);
    step.numbers = check_numbers(call, step.lists);
    return step;
  }

  // The op's options for each row of a table, whose first column is lr; those of the call without one.
  template <class Options>
  std::vector<Options> rows(const Call& call, StepCall& step, const Options& of_call) const {
    const Call host(call.op, call.backend, "what tensors differ in", View{});
    const auto data = [&](const char* name, const View& view, int32_t dtype) {
      return host.check_defined(name, view), host.check_dtype(name, view, dtype), host.data(name, view);
    };
    const auto* const table = static_cast<const double*>(data("table", table_, aoti_torch_dtype_float64()));
    const auto* const row = static_cast<const int64_t*>(data("rows", rows_, aoti_torch_dtype_int64()));
    const int64_t count = table_.numel / Options::kColumns;
    if (count * Options::kColumns != table_.numel || rows_.numel != (count ? step.lists.total_tensors : 0)) {
      call.refuse("rows", "has ", rows_.numel, " elements, the table ", table_.numel, ": they do not go together");
    }
    std::vector<Options> options{of_call};
    if (count) options.clear(), step.rates.clear(), step.lists.columns = Options::kColumns;
    if (!StepOp<Options>::norms) step.lists.table = table;  // else a group's sums would depend on equal groups
    for (const double* of_row = table; of_row < table + table_.numel; of_row += Options::kColumns)
      options.push_back(of_call.with(of_row)), step.rates.push_back({nullptr, *of_row});
    for (size_t i = 0; count && i < step.lists.index.size(); ++i) {
      const int64_t own = row[step.lists.index[i]];
      if (own < 0 || own >= count) call.refuse("rows", "has ", own, ", the table has ", count, " rows");
      step.lists.row.push_back(static_cast<int32_t>(own));
    }
    for (const Options& each : options) step.rules.push_back(StepOp<Options>::rule(each, seed_));
    return options;
  }

 private:
  void add_extras(const Call& call, StepCall& step) const {
    if (write_back_ < 0 || write_back_ >= kWriteBacks) {
      call.refuse("write_back", "is ", write_back_, ", expected 0 to ", kWriteBacks - 1);
    }
    const auto mode = step.write_back = static_cast<WriteBack>(write_back_);
    const ListArgument& extras = walked_.back();
    const Views& params = walked_[1].tensors;
    if (!has_extras(mode)) {
      if (extras.tensors.empty()) return;
      call.refuse("extras", "has ", extras.tensors.size(), " tensors, expected none to go with this write_back");
    }
    call.check_length(extras, grads());
    call.add(step.lists, extras, grads(), mode == WriteBack::split ? kRemainderDTypes : call.backend.dtypes);
    if (params.empty()) return;
    const int32_t param = params[0].dtype, extra = extras.tensors[0].dtype;
    const bool is_bf16 = param == aoti_torch_dtype_bfloat16(), is_f16 = param == aoti_torch_dtype_float16();
    const std::string has = "has dtype " + dtype_name(param);
    if (mode == WriteBack::split && !is_bf16) {
      call.refuse("params[0]", has, ", expected bfloat16 to go with remainders");
    }
    if (mode == WriteBack::kahan && !is_bf16 && !is_f16) {
      call.refuse("params[0]", has, ", expected float16 or bfloat16 to go with compensations");
    }
    if (mode == WriteBack::kahan && extra != param) {
      call.refuse("extras[0]", "has dtype ", dtype_name(extra), ", params[0] has ", dtype_name(param));
    }
  }

  // What goes with codes, and with states that are rounded at random.
  void check_state_types(const Call& call, StepCall& step) const {
    const char *coded = nullptr, *uncoded = nullptr;
    for (size_t i = 0; i < states_.size(); ++i) {
      const auto& [name, given, code] = walked_[2 + i];
      if (code == DType::f32) {
        if (!given.empty()) uncoded = name;
        continue;
      }
      const ListArgument& scales = scales_[i];  // those that may be codes come first
      DType dtype;
      if (!given.empty() && to_dtype(given[0].dtype, dtype) && dtype == code) {
        step.scales[i] = check_scales(call, scales);
        if (!coded) coded = name;
      } else if (!scales.tensors.empty()) {
        call.refuse(scales.name, "has ", scales.tensors.size(), " tensors, expected none: ", name, " has no codes");
      }
    }
    if (!coded && !step.stochastic_state) return;
    const std::string what = coded ? std::string(coded) + " in codes" : "stochastic_state";
    if (step.lists.computes_in_f64()) call.refuse(what.c_str(), "does not go with float64 tensors");
    if (uncoded) call.refuse(what.c_str(), "does not go with ", uncoded, ", which must not be rounded down");
  }

  // The scales of codes, for the tensors that have elements.
  std::vector<void*> check_scales(const Call& call, const ListArgument& scales) const {
    call.check_length(scales, grads());
    std::vector<void*> pointers;
    pointers.reserve(scales.tensors.size());
    for (size_t i = 0; i < scales.tensors.size(); ++i) {
      const ArgumentName name(scales.name, i);
      const View& view = scales.tensors[i];
      if (!view.is_strided) call.refuse(name, "is not a strided tensor");
      call.check_dtype(name, view, aoti_torch_dtype_float32());
      if (const int64_t expected = code_blocks(grads().tensors[i].numel); view.numel != expected) {
        call.refuse(name, "has ", view.numel, " elements, expected ", expected, ": one for each ", kCodeBlock, " of ",
                    ArgumentName("grads", i));
      }
      void* const data = call.data(name, view);
      if (view.numel > 0) pointers.push_back(data);
    }
    return pointers;
  }

  // Null for none.
  const int64_t* check_numbers(const Call& call, const TensorLists& lists) const {
    call.check_defined("numbers", numbers_);
    call.check_dtype("numbers", numbers_, aoti_torch_dtype_int64());
    if (numbers_.numel == 0) return nullptr;
    if (numbers_.numel != lists.size()) {
      call.refuse("numbers", "has ", numbers_.numel, " elements, expected none or ", lists.size(),
                  ": one for each tensor with elements");
    }
    return static_cast<const int64_t*>(call.data("numbers", numbers_));
  }

  const std::initializer_list<StateList> states_;
  const bool unscales_;
  std::vector<ListArgument> walked_, scales_;  // the last of the first are extras
  const Views *steps_, *skips_;
  View found_inf_, inv_scale_, lr_, grad_norm_, numbers_, table_, rows_;
  std::vector<std::pair<const char*, View>> factors_;
  bool maximize_, stochastic_state_;
  int64_t write_back_, seed_;
  double max_norm_;
};

// Both ops of a step. `unscales`: the one that writes the gradients, too.
template <const Backend& backend, bool unscales, class Options, auto kernel>
void step_op(Arguments& in) {
  using Op = StepOp<Options>;
  StepArguments arguments(in, Op::states, Op::factors, unscales);
  const Options options = Options::taken(in);
  arguments.take_rest(in);

  const Call call(unscales ? Op::unscaling_name : Op::name, backend, arguments.grads(), arguments.found_inf());
  StepCall step = arguments.check(call);
  const std::vector<Options> rows = arguments.rows(call, step, options);
  DeviceScope scope(call);
  const bool counts_here = !backend.has_device_pointers || step.lists.total_tensors == 0;
  if (counts_here && step.skips.overflowed) {
    backend.count_skip(scope.context, step.skips, step.found_inf, step.found_inf);
  }
  if (step.lists.total_tensors == 0) return;
  const int64_t scalars = backend.has_device_pointers ? 0 : step.lists.size() * sizeof(TensorScalars<double>);
  step.workspace = scope.allocate(scalars + backend.norms_workspace(step.lists, Op::norms));
  step.norms = static_cast<char*>(step.workspace) + scalars;
  (backend.*kernel)(scope.context, step, rows);
}

struct Op {
  const char* name;
  Kernel kernel;                                     // for plans
  void (*boxed)(StableIValue*, uint64_t, uint64_t);  // for the dispatcher
};

template <Kernel kernel>
constexpr Op op_of(const char* name) {
  return {name, kernel, [](StableIValue* stack, uint64_t, uint64_t) {
            Arguments in(stack);
            kernel(in);
            in.finish();
          }};
}

template <const Backend& backend>
const std::vector<Op>& ops_of() {
  static const std::vector<Op> ops = {
      op_of<multi_tensor_scale<backend, false, false>>("multi_tensor_scale"),
      op_of<multi_tensor_scale<backend, true, false>>("multi_tensor_scale_and_update"),
      op_of<multi_tensor_scale<backend, false, true>>("multi_tensor_scale_clipped"),
      op_of<multi_tensor_axpby<backend>>("multi_tensor_axpby"),
      op_of<multi_tensor_l2norm<backend, false, false>>("multi_tensor_l2norm"),
      op_of<multi_tensor_l2norm<backend, true, false>>("multi_tensor_unscale_l2norm"),
      op_of<multi_tensor_l2norm<backend, true, true>>("multi_tensor_unscale_l2norm_and_update"),
      op_of<update_scale<backend>>("update_scale"),
      op_of<block_factors<backend>>("block_factors"),
      op_of<count_skip<backend>>("count_skip"),
#define AMPCTX_STEP_OP(op, Options, backend)                                    \
  op_of<step_op<backend, false, Options, &Backend::op>>(StepOp<Options>::name), \
      op_of<step_op<backend, true, Options, &Backend::op>>(StepOp<Options>::unscaling_name),
      AMPCTX_STEP_OPS(AMPCTX_STEP_OP, backend)
#undef AMPCTX_STEP_OP
  };
  return ops;
}

// Registers the kernels of one backend for the ops of namespace `ns`. Returns 0, or a code for what torch refused.
template <const Backend& backend>
int register_kernels(const char* ns) {
  TorchLibraryHandle library = nullptr;  // lives as long as the process: torch keeps the function pointers
  if (aoti_torch_library_init_impl(ns, backend.dispatch_key, "ampctx", 0, &library) != 0) return 1;
  for (const Op& op : ops_of<backend>()) {
    if (torch_library_impl(library, op.name, op.boxed, torch_abi::kBuildVersion) != 0) return 2;
  }
  return 0;
}

// The op `read` of plans and questions, on all backends that have kernels.
int register_reading(const char* ns) {
  const auto add = [ns](const char* key, auto boxed) {
    TorchLibraryHandle library = nullptr;
    return aoti_torch_library_init_impl(ns, key, "ampctx", 0, &library) == 0 &&
           torch_library_impl(library, "read", boxed, torch_abi::kBuildVersion) == 0;
  };
  using python::Reader;
  return add("CPU", Reader::take) && add("CUDA", Reader::take) && add("Negative", Reader::refuse) &&
                 add("ZeroTensor", Reader::refuse)
             ? 0
             : 2;
}

// register(backend, namespace): 0, or a code that says why there are no kernels.
PyObject* register_backend(PyObject*, PyObject* given) {
  const char *backend, *ns;
  if (!PyArg_ParseTuple(given, "ss", &backend, &ns)) return nullptr;
  int code = 4;  // built without this backend
  if (std::strcmp(backend, "cpu") == 0) code = register_kernels<kCpu>(ns);
  if (std::strcmp(backend, "read") == 0) code = register_reading(ns);
#ifdef AMPCTX_WITH_CUDA
  // 3: a torch without CUDA
  if (std::strcmp(backend, "cuda") == 0) code = aoti_torch_get_current_cuda_stream ? register_kernels<kCuda>(ns) : 3;
#endif
  return PyLong_FromLong(code);
}

PyObject* build_info(PyObject*, PyObject*) {
#ifdef AMPCTX_CUDA_EMULATION
  const std::string simd = ", \"simd\": [], \"simd_used\": \"\"}";
#else
  const std::string simd =
      std::string(", \"simd\": [") + cpu::simd_built() + "], \"simd_used\": \"" + cpu::simd_used() + "\"}";
#endif
  const std::string info = "{\"compiler\": \"" AMPCTX_COMPILER "\", " AMPCTX_BUILD + simd;
  return PyUnicode_FromString(info.c_str());
}

PyMethodDef functions[] = {{"register", register_backend, METH_VARARGS, nullptr},
                           {"build_info", build_info, METH_NOARGS, nullptr},
                           {"use_python", python::use_python, METH_VARARGS, nullptr},
                           {"use_dtensor", python::use_dtensor, METH_VARARGS, nullptr},
                           {"make_plan", python::make_plan, METH_VARARGS, nullptr},
                           {"run", python::run, METH_VARARGS, nullptr},
                           {"run_once", python::run_once, METH_VARARGS, nullptr},
                           {"are_uniform", python::are_uniform, METH_O, nullptr},
                           {"marks", python::marks, METH_O, nullptr},
                           {"advanced", python::advanced, METH_O, nullptr},
                           {"have_no_grads", python::have_no_grads, METH_O, nullptr},
                           {"as_before", python::as_before, METH_VARARGS, nullptr},
                           {"same_groups", python::same_groups, METH_VARARGS, nullptr},
                           {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "ampctx._ops", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

Kernel kernel_of(const char* name, int32_t device_type) {
  const std::vector<Op>* ops = device_type == aoti_torch_device_type_cpu() ? &ops_of<kCpu>() : nullptr;
#ifdef AMPCTX_WITH_CUDA
  if (device_type == aoti_torch_device_type_cuda()) ops = &ops_of<kCuda>();
#endif
  for (size_t i = 0; ops && i < ops->size(); ++i) {
    if (std::strcmp((*ops)[i].name, name) == 0) return (*ops)[i].kernel;
  }
  return nullptr;
}

}  // namespace ampctx

PyMODINIT_FUNC PyInit__ops() { return PyModule_Create(&ampctx::module); }
