// One boxed function per op and backend (those of the optimizers are in library_optimizers.h), and their registration,
// which ampctx/kernels/extension.py calls.
//
// The schemas are in ampctx/kernels/definitions.py. A boxed function takes its arguments off the stack, checks them,
// and puts the results on the stack. torch turns its C++ exceptions into RuntimeError (error.h).
#include <cmath>
#include <limits>

#include "cpu/simd.h"
#include "library_optimizers.h"
#include "plan.h"

#ifdef __clang__
#define AMPCTX_COMPILER __VERSION__
#else
#define AMPCTX_COMPILER "g++ " __VERSION__
#endif

#ifndef AMPCTX_SOURCE
#define AMPCTX_SOURCE ""
#endif

#ifndef AMPCTX_CUDA_VERSION
#define AMPCTX_CUDA_VERSION "null"
#define AMPCTX_CUDA_ARCHS ""
#endif

namespace ampctx {
namespace {

using torch_abi::empty;
using torch_abi::Tensor;

#ifdef AMPCTX_CUDA_EMULATION
constexpr Backend kEmulated = {"CPU", kCudaDTypes, true, false, AMPCTX_KERNELS(cuda)};
#else
constexpr Backend kCpu = {"CPU", kCpuDTypes, false, false, AMPCTX_KERNELS(cpu)};
#ifdef AMPCTX_WITH_CUDA
constexpr Backend kCuda = {"CUDA", kCudaDTypes, true, true, AMPCTX_KERNELS(cuda)};
#endif
#endif

// Refuses a rule that could make the scale 0, inf or nan, or overflow a tracker.
void check_scale_rule(const char* op, const ScaleRule& rule) {
  constexpr float largest = std::numeric_limits<float>::max(), smallest = std::numeric_limits<float>::min();
  const double growth = rule.growth_factor, backoff = rule.backoff_factor;
  if (!(growth >= 1 && std::isfinite(growth))) fail(op, ": growth_factor is not a finite number of at least 1");
  if (!(backoff > 0 && backoff <= 1)) fail(op, ": backoff_factor is not a number above 0 and at most 1");
  if (!(rule.min_scale >= 0 && rule.min_scale <= largest))
    fail(op, ": min_scale is not a number from 0 to the largest fp32");
  if (!(rule.max_scale >= smallest)) fail(op, ": max_scale is not a number from the smallest normal fp32 up");
  if (rule.hysteresis < 0 || rule.hysteresis > INT32_MAX) {
    fail(op, ": hysteresis is ", rule.hysteresis, ", expected 0 to ", INT32_MAX);
  }
}

// The arguments of an update, `scale` by the name that the op gives it.
class UpdateArguments {
 public:
  explicit UpdateArguments(Arguments& in)
      : scale_(in.tensor(true)), growth_tracker_(in.tensor(true)), hysteresis_tracker_(in.tensor(true)) {}
  void take_rule(Arguments& in) {
    rule_ = {in.number(), in.number(), in.integer(), in.integer(), in.number(), in.number()};
  }

  Device device() const { return scale_.is_defined ? scale_.device : Device::cpu(); }
  ScaleUpdate check(const char* op, const char* scale, const FoundInf& found_inf, const CallDevice& call) const {
    const int32_t int32 = aoti_torch_dtype_int32();
    const ScaleState state = {
        static_cast<float*>(check_state(op, scale, scale_, aoti_torch_dtype_float32(), call)),
        static_cast<int32_t*>(check_state(op, "growth_tracker", growth_tracker_, int32, call)),
        static_cast<int32_t*>(check_state(op, "hysteresis_tracker", hysteresis_tracker_, int32, call)),
        found_inf,
    };
    check_scale_rule(op, rule_);
    return {state, rule_};
  }

 private:
  View scale_, growth_tracker_, hysteresis_tracker_;
  ScaleRule rule_{};
};

// Those of an op that updates the scale after its check, or none.
std::optional<UpdateArguments> update_arguments(Arguments& in, bool updates) {
  std::optional<UpdateArguments> update;
  if (updates) update.emplace(in).take_rule(in);
  return update;
}

std::optional<ScaleUpdate> check_update(const char* op, const std::optional<UpdateArguments>& update,
                                        const FoundInf& found_inf, const CallDevice& call) {
  if (!update) return std::nullopt;
  return update->check(op, "loss_scale", found_inf, call);
}

template <const Backend& backend, bool updates, bool clips>
void multi_tensor_scale(Arguments& in) {
  constexpr const char* op = updates ? "multi_tensor_scale_and_update"
                             : clips ? "multi_tensor_scale_clipped"
                                     : "multi_tensor_scale";
  const ListArgument src{"src", in.list()}, dst{"dst", in.list(true)};
  const View found_inf = in.tensor(true), scale = in.tensor();
  std::optional<View> grad_norm;
  if (clips) grad_norm = in.tensor();
  const double max_norm = clips ? in.number() : -1;
  const std::optional<UpdateArguments> update = update_arguments(in, updates);

  const CallDevice call = call_device(src, found_inf);
  const TensorLists lists = check_lists(op, backend.dtypes, call, {src, dst});
  const FoundInf flag = check_found_inf(op, found_inf, call);
  ClippedFactor factor{check_factor(op, "scale", scale, call, backend.has_device_pointers)};
  if (clips) factor = check_clipped(op, factor, "grad_norm", *grad_norm, max_norm, call, backend.has_device_pointers);
  const std::optional<ScaleUpdate> checked = check_update(op, update, flag, call);
  if (lists.size() == 0 && !updates) return;
  backend.scale(Scope(backend, call.device).context, lists, flag, factor, checked ? &*checked : nullptr);
}

template <const Backend& backend>
void multi_tensor_axpby(Arguments& in) {
  constexpr const char* op = "multi_tensor_axpby";
  const ListArgument x{"x", in.list()}, y{"y", in.list()}, out{"out", in.list(true)};
  const View found_inf = in.tensor(true), a = in.tensor(), b = in.tensor();
  const int64_t arg_to_check = in.integer();

  const CallDevice call = call_device(x, found_inf);
  const TensorLists lists = check_lists(op, backend.dtypes, call, {x, y, out});
  const FoundInf flag = check_found_inf(op, found_inf, call);
  const Factor factor_a = check_factor(op, "a", a, call, backend.has_device_pointers);
  const Factor factor_b = check_factor(op, "b", b, call, backend.has_device_pointers);
  if (arg_to_check < -1 || arg_to_check > 1) fail(op, ": arg_to_check is ", arg_to_check, ", expected -1, 0 or 1");
  if (lists.size() == 0) return;
  const Scope scope(backend, call.device);
  backend.axpby(scope.context, lists, flag, factor_a, factor_b, static_cast<int>(arg_to_check));
}

// The norm ops; without inv_scale the factor is 1.
template <const Backend& backend, bool has_inv_scale, bool updates>
void multi_tensor_l2norm(Arguments& in) {
  constexpr const char* op = updates         ? "multi_tensor_unscale_l2norm_and_update"
                             : has_inv_scale ? "multi_tensor_unscale_l2norm"
                                             : "multi_tensor_l2norm";
  const ListArgument tensors{"tensors", in.list()};
  const View found_inf = in.tensor(true);
  std::optional<View> inv_scale;
  if (has_inv_scale) inv_scale = in.tensor();
  const bool per_tensor = in.flag();
  const std::optional<UpdateArguments> update = update_arguments(in, updates);

  const CallDevice call = call_device(tensors, found_inf);
  const TensorLists lists = check_lists(op, backend.dtypes, call, {tensors});
  const FoundInf flag = check_found_inf(op, found_inf, call);
  const Factor factor =
      inv_scale ? check_factor(op, "inv_scale", *inv_scale, call, backend.has_device_pointers) : Factor{};
  const std::optional<ScaleUpdate> checked = check_update(op, update, flag, call);

  const Scope scope(backend, call.device);
  const bool f64 = lists.total_tensors > 0 && lists.computes_in_f64();
  const int32_t dtype = f64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
  const int64_t norms = per_tensor ? lists.total_tensors : 0, workspace_bytes = backend.norms_workspace(lists, 1);
  void *const norm = in.result(op, nullptr, dtype, call.device), *const each =
                                                                     in.result(op, &norms, dtype, call.device);
  void* const again = updates ? in.result(op, nullptr, dtype, call.device) : nullptr;
  const Tensor workspace = empty(&workspace_bytes, aoti_torch_dtype_uint8(), call.device);
  backend.l2norm(scope.context, lists, flag, factor, {norm, again, norms ? each : nullptr, workspace.mutable_data()},
                 checked ? &*checked : nullptr);
}

template <const Backend& backend>
void update_scale(Arguments& in) {
  constexpr const char* op = "update_scale";
  UpdateArguments update(in);
  const View found_inf = in.tensor();
  update.take_rule(in);
  const CallDevice call = {update.device(), "scale"};
  const ScaleUpdate checked = update.check(op, "scale", check_found_inf(op, found_inf, call), call);
  backend.update_scale(Scope(backend, call.device).context, checked.state, checked.rule);
}

template <const Backend& backend>
void block_factors(Arguments& in) {
  constexpr const char* op = "block_factors";
  const View scale = in.tensor();
  const CallDevice call = {scale.is_defined ? scale.device : Device::cpu(), "scale"};
  const int32_t dtype = aoti_torch_dtype_float32();
  const auto* from = static_cast<const float*>(check_state(op, "scale", scale, dtype, call));
  const Scope scope(backend, call.device);
  const auto result = [&] { return static_cast<float*>(in.result(op, nullptr, dtype, call.device)); };
  backend.block_factors(scope.context, from, {result(), result(), result()});
}

template <const Backend& backend>
void count_skip(Arguments& in) {
  constexpr const char* op = "count_skip";
  const View counts = in.tensor(true), found_inf = in.tensor(), flag = in.tensor(), scale = in.tensor();
  const int64_t slot = in.integer();
  const bool is_first = in.flag();
  if (!counts.is_defined) fail(op, ": counts is None, expected a tensor");
  const int32_t f32 = aoti_torch_dtype_float32();
  if (counts.dtype != f32) fail(op, ": counts has dtype ", dtype_name(counts.dtype), ", expected float32");
  if (slot < 0 || slot >= counts.numel / 2 - 1) {
    fail(op, ": slot is ", slot, ", counts has ", counts.numel, " elements");
  }
  if (!counts.is_contiguous) fail(op, ": counts is not contiguous");
  if (!counts.has_memory) fail(op, ": counts ", kNoMemory);
  const CallDevice call = {counts.device, "counts"};
  const FoundInf step = check_found_inf(op, found_inf, call), of_loss = check_found_inf(op, flag, call);
  const auto* value = static_cast<const float*>(check_state(op, "scale", scale, f32, call));
  auto* const numbers = static_cast<float*>(counts.data);
  float* const of_slot = numbers + 2 + 2 * slot;
  const SkipCounts to{is_first ? numbers : nullptr, numbers + 1, of_slot, of_slot + 1, value};
  backend.count_skip(Scope(backend, call.device).context, to, step, of_loss);
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
      op_of<multi_tensor_larc<backend>>("multi_tensor_larc"),
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

Kernel find(const std::vector<Op>& ops, const char* name) {
  for (const Op& op : ops) {
    if (std::strcmp(op.name, name) == 0) return op.kernel;
  }
  return nullptr;
}

}  // namespace

Kernel kernel_of(const char* op, int32_t device_type) {
#ifdef AMPCTX_CUDA_EMULATION
  if (device_type == aoti_torch_device_type_cpu()) return find(ops_of<kEmulated>(), op);
#else
  if (device_type == aoti_torch_device_type_cpu()) return find(ops_of<kCpu>(), op);
#ifdef AMPCTX_WITH_CUDA
  if (device_type == aoti_torch_device_type_cuda()) return find(ops_of<kCuda>(), op);
#endif
#endif
  return nullptr;
}

namespace {

int register_for(const char* backend, const char* ns) {
#ifdef AMPCTX_CUDA_EMULATION
  if (std::strcmp(backend, "cpu") == 0) return register_kernels<kEmulated>(ns);
#else
  if (std::strcmp(backend, "cpu") == 0) return register_kernels<kCpu>(ns);
#ifdef AMPCTX_WITH_CUDA
  if (!aoti_torch_get_current_cuda_stream) return 3;  // a torch without CUDA
  if (std::strcmp(backend, "cuda") == 0) return register_kernels<kCuda>(ns);
#endif
#endif
  return 4;  // built without this backend
}

// register(backend, namespace): 0, or a code that says why there are no kernels.
PyObject* register_backend(PyObject*, PyObject* given) {
  const char *backend, *ns;
  if (!PyArg_ParseTuple(given, "ss", &backend, &ns)) return nullptr;
  return PyLong_FromLong(register_for(backend, ns));
}

PyObject* build_info(PyObject*, PyObject*) {
#ifdef AMPCTX_CUDA_EMULATION
  const std::string simd = "], \"simd\": [], \"simd_used\": \"\"}";
#else
  const std::string simd =
      std::string("], \"simd\": [") + cpu::simd_built() + "], \"simd_used\": \"" + cpu::simd_used() + "\"}";
#endif
  const std::string info = "{\"compiler\": \"" AMPCTX_COMPILER "\", \"source\": \"" AMPCTX_SOURCE
                           "\", \"cuda\": " AMPCTX_CUDA_VERSION ", \"cuda_archs\": [" AMPCTX_CUDA_ARCHS "" +
                           simd;
  return PyUnicode_FromString(info.c_str());
}

PyMethodDef functions[] = {{"register", register_backend, METH_VARARGS, nullptr},
                           {"build_info", build_info, METH_NOARGS, nullptr},
                           {"use_python", plan::use_python, METH_VARARGS, nullptr},
                           {"make_plan", plan::make_plan, METH_VARARGS, nullptr},
                           {"are_uniform", plan::are_uniform, METH_O, nullptr},
                           {"marks", plan::marks, METH_O, nullptr},
                           {"advanced", plan::advanced, METH_O, nullptr},
                           {"have_no_grads", plan::have_no_grads, METH_O, nullptr},
                           {"have_members", plan::have_members, METH_VARARGS, nullptr},
                           {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "ampctx._ops", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace ampctx

PyMODINIT_FUNC PyInit__ops() { return ampctx::plan::make_type() ? PyModule_Create(&ampctx::module) : nullptr; }
