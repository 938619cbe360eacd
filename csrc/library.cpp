// One boxed function per op and backend (those of the optimizers are in library_optimizers.h), and their registration,
// which ampctx/kernels/extension.py calls.
//
// The schemas are in ampctx/kernels/definitions.py. A boxed function takes its arguments off the stack, checks them,
// and puts the results on the stack. torch turns its C++ exceptions into RuntimeError (error.h).
#include <cmath>
#include <limits>

#include "cpu/simd.h"
#include "library_optimizers.h"
#include "python_passes.h"

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
using torch_abi::TensorList;
using torch_abi::to_scalar;
using torch_abi::to_tensor_list;

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
      : scale_(in.tensor()), growth_tracker_(in.tensor()), hysteresis_tracker_(in.tensor()) {}
  void take_rule(Arguments& in) {
    rule_ = {in.number(), in.number(), in.integer(), in.integer(), in.number(), in.number()};
  }

  Device device() const { return scale_.is_defined() ? scale_.device() : Device::cpu(); }
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
  Tensor scale_, growth_tracker_, hysteresis_tracker_;
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

template <const Backend& backend, bool held, bool updates, bool clips>
void multi_tensor_scale(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* op = updates ? "multi_tensor_scale_and_update"
                             : clips ? "multi_tensor_scale_clipped"
                                     : "multi_tensor_scale";
  Arguments in(op, stack, held);
  const ListView src = in.list(), dst = in.list();
  const Tensor found_inf = in.tensor(), scale = in.tensor();
  std::optional<Tensor> grad_norm;
  if (clips) grad_norm.emplace(in.tensor());
  const double max_norm = clips ? in.number() : -1;
  const std::optional<UpdateArguments> update = update_arguments(in, updates);
  in.check_held();

  const ListArgument src_argument{"src", src}, dst_argument{"dst", dst, true};
  const CallDevice call = call_device(src_argument, found_inf);
  const TensorLists lists = check_lists(op, backend.dtypes, call, {src_argument, dst_argument});
  const FoundInf flag = check_found_inf(op, found_inf, call, true);
  ClippedFactor factor{check_factor(op, "scale", scale, call, backend.has_device_pointers)};
  if (clips) factor = check_clipped(op, factor, "grad_norm", *grad_norm, max_norm, call, backend.has_device_pointers);
  const std::optional<ScaleUpdate> checked = check_update(op, update, flag, call);
  if (lists.size() == 0 && !updates) return;
  backend.scale(Scope(backend, call.device).context, lists, flag, factor, checked ? &*checked : nullptr);
}

template <const Backend& backend, bool held>
void multi_tensor_axpby(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* op = "multi_tensor_axpby";
  Arguments in(op, stack, held);
  const ListView x = in.list(), y = in.list(), out = in.list();
  const Tensor found_inf = in.tensor(), a = in.tensor(), b = in.tensor();
  const int64_t arg_to_check = in.integer();
  in.check_held();

  const ListArgument x_argument{"x", x}, y_argument{"y", y}, out_argument{"out", out, true};
  const CallDevice call = call_device(x_argument, found_inf);
  const TensorLists lists = check_lists(op, backend.dtypes, call, {x_argument, y_argument, out_argument});
  const FoundInf flag = check_found_inf(op, found_inf, call, true);
  const Factor factor_a = check_factor(op, "a", a, call, backend.has_device_pointers);
  const Factor factor_b = check_factor(op, "b", b, call, backend.has_device_pointers);
  if (arg_to_check < -1 || arg_to_check > 1) fail(op, ": arg_to_check is ", arg_to_check, ", expected -1, 0 or 1");
  if (lists.size() == 0) return;
  const Scope scope(backend, call.device);
  backend.axpby(scope.context, lists, flag, factor_a, factor_b, static_cast<int>(arg_to_check));
}

// The norm ops; without inv_scale the factor is 1.
template <const Backend& backend, bool held, bool has_inv_scale, bool updates>
void multi_tensor_l2norm(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* op = updates         ? "multi_tensor_unscale_l2norm_and_update"
                             : has_inv_scale ? "multi_tensor_unscale_l2norm"
                                             : "multi_tensor_l2norm";
  Arguments in(op, stack, held);
  const ListView tensors = in.list();
  const Tensor found_inf = in.tensor();
  std::optional<Tensor> inv_scale;
  if (has_inv_scale) inv_scale.emplace(in.tensor());
  const bool per_tensor = in.flag();
  const std::optional<UpdateArguments> update = update_arguments(in, updates);
  in.check_held();

  const ListArgument argument{"tensors", tensors};
  const CallDevice call = call_device(argument, found_inf);
  const TensorLists lists = check_lists(op, backend.dtypes, call, {argument});
  const FoundInf flag = check_found_inf(op, found_inf, call, true);
  const Factor factor =
      inv_scale ? check_factor(op, "inv_scale", *inv_scale, call, backend.has_device_pointers) : Factor{};
  const std::optional<ScaleUpdate> checked = check_update(op, update, flag, call);

  const Scope scope(backend, call.device);
  const bool f64 = lists.total_tensors > 0 && lists.computes_in_f64();
  const int32_t dtype = f64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
  const int64_t norms = per_tensor ? lists.total_tensors : 0, workspace_bytes = backend.norms_workspace(lists, 1);
  Tensor norm = empty(nullptr, dtype, call.device), each = empty(&norms, dtype, call.device);
  std::optional<Tensor> again;
  if (updates) again.emplace(empty(nullptr, dtype, call.device));
  const Tensor workspace = empty(&workspace_bytes, aoti_torch_dtype_uint8(), call.device);
  backend.l2norm(scope.context, lists, flag, factor,
                 {norm.mutable_data(), again ? again->mutable_data() : nullptr, norms ? each.mutable_data() : nullptr,
                  workspace.mutable_data()},
                 checked ? &*checked : nullptr);
  stack[0] = norm.release();
  stack[1] = each.release();
  if (again) stack[2] = again->release();
}

template <const Backend& backend>
void update_scale(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* op = "update_scale";
  Arguments in(op, stack, false);
  UpdateArguments update(in);
  const Tensor found_inf = in.tensor();
  update.take_rule(in);
  const CallDevice call = {update.device(), "scale"};
  const ScaleUpdate checked = update.check(op, "scale", check_found_inf(op, found_inf, call, false), call);
  backend.update_scale(Scope(backend, call.device).context, checked.state, checked.rule);
}

template <const Backend& backend>
void block_factors(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* op = "block_factors";
  const Tensor scale(stack[0]);
  const CallDevice call = {scale.is_defined() ? scale.device() : Device::cpu(), "scale"};
  const auto* from =
      static_cast<const float*>(check_state(op, "scale", scale, aoti_torch_dtype_float32(), call, false));
  const Scope scope(backend, call.device);
  const int32_t dtype = aoti_torch_dtype_float32();
  Tensor copy = empty(nullptr, dtype, call.device), inverse = empty(nullptr, dtype, call.device),
         found_inf = empty(nullptr, dtype, call.device);
  const auto address = [](Tensor& to) { return static_cast<float*>(to.mutable_data()); };
  backend.block_factors(scope.context, from, {address(copy), address(inverse), address(found_inf)});
  stack[0] = copy.release();
  stack[1] = inverse.release();
  stack[2] = found_inf.release();
}

template <const Backend& backend>
void count_skip(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* op = "count_skip";
  Arguments in(op, stack, false);
  const Tensor counts = in.tensor(), found_inf = in.tensor(), flag = in.tensor(), scale = in.tensor();
  const int64_t slot = in.integer();
  const bool is_first = in.flag();
  if (!counts.is_defined()) fail(op, ": counts is None, expected a tensor");
  const int32_t f32 = aoti_torch_dtype_float32();
  if (counts.dtype() != f32) fail(op, ": counts has dtype ", dtype_name(counts.dtype()), ", expected float32");
  const int64_t elements = counts.numel();
  if (slot < 0 || slot >= elements / 2 - 1) fail(op, ": slot is ", slot, ", counts has ", elements, " elements");
  if (!counts.is_contiguous()) fail(op, ": counts is not contiguous");
  if (!counts.has_memory(elements, sizeof(float))) fail(op, ": counts ", kNoMemory);
  const CallDevice call = {counts.device(), "counts"};
  const FoundInf step = check_found_inf(op, found_inf, call, false), of_loss = check_found_inf(op, flag, call, false);
  const auto* value = static_cast<const float*>(check_state(op, "scale", scale, f32, call, false));
  auto* const numbers = static_cast<float*>(counts.mutable_data());
  float* const of_slot = numbers + 2 + 2 * slot;
  const SkipCounts to{is_first ? numbers : nullptr, numbers + 1, of_slot, of_slot + 1, value};
  backend.count_skip(Scope(backend, call.device).context, to, step, of_loss);
}

// Stores a list under the given number, or under a new one if that is 0.
void hold_tensors(StableIValue* stack, uint64_t, uint64_t) {
  TensorList tensors = to_tensor_list(stack[0]);
  const int64_t given = to_scalar<int64_t>(stack[1]), number = given ? given : known_lists().new_number();
  known_lists().put(number, std::move(tensors));
  std::memcpy(&stack[0], &number, sizeof(number));
}

template <const Backend& backend>
int register_kernels(const char* ns) {
  TorchLibraryHandle library = nullptr;  // lives as long as the process: torch keeps the function pointers
  if (aoti_torch_library_init_impl(ns, backend.dispatch_key, "ampctx", 0, &library) != 0) return 1;
  const std::pair<const char*, void (*)(StableIValue*, uint64_t, uint64_t)> kernels[] = {
      {"multi_tensor_scale", multi_tensor_scale<backend, false, false, false>},
      {"multi_tensor_scale.held", multi_tensor_scale<backend, true, false, false>},
      {"multi_tensor_scale_and_update", multi_tensor_scale<backend, false, true, false>},
      {"multi_tensor_scale_and_update.held", multi_tensor_scale<backend, true, true, false>},
      {"multi_tensor_scale_clipped", multi_tensor_scale<backend, false, false, true>},
      {"multi_tensor_scale_clipped.held", multi_tensor_scale<backend, true, false, true>},
      {"multi_tensor_axpby", multi_tensor_axpby<backend, false>},
      {"multi_tensor_axpby.held", multi_tensor_axpby<backend, true>},
      {"multi_tensor_l2norm", multi_tensor_l2norm<backend, false, false, false>},
      {"multi_tensor_l2norm.held", multi_tensor_l2norm<backend, true, false, false>},
      {"multi_tensor_unscale_l2norm", multi_tensor_l2norm<backend, false, true, false>},
      {"multi_tensor_unscale_l2norm.held", multi_tensor_l2norm<backend, true, true, false>},
      {"multi_tensor_unscale_l2norm_and_update", multi_tensor_l2norm<backend, false, true, true>},
      {"multi_tensor_unscale_l2norm_and_update.held", multi_tensor_l2norm<backend, true, true, true>},
      {"update_scale", update_scale<backend>},
      {"block_factors", block_factors<backend>},
      {"count_skip", count_skip<backend>},
      {"hold_tensors", hold_tensors},
      {"multi_tensor_larc", multi_tensor_larc<backend, false>},
      {"multi_tensor_larc.held", multi_tensor_larc<backend, true>},
#define AMPCTX_REGISTER(op, Options, backend)                                                  \
  {StepOp<Options>::name, step_op<backend, false, false, Options, &Backend::op>},              \
      {StepOp<Options>::held_name, step_op<backend, true, false, Options, &Backend::op>},      \
      {StepOp<Options>::unscaling_name, step_op<backend, false, true, Options, &Backend::op>}, \
      {StepOp<Options>::held_unscaling_name, step_op<backend, true, true, Options, &Backend::op>},
      AMPCTX_STEP_OPS(AMPCTX_REGISTER, backend)
#undef AMPCTX_REGISTER
  };
  for (const auto& [name, kernel] : kernels) {
    if (torch_library_impl(library, name, kernel, torch_abi::kBuildVersion) != 0) return 2;
  }
  return 0;
}

}  // namespace
}  // namespace ampctx

#define AMPCTX_EXPORT extern "C" __attribute__((visibility("default")))

#ifdef AMPCTX_CUDA_EMULATION
AMPCTX_EXPORT int ampctx_register_emulated(const char* ns) { return ampctx::register_kernels<ampctx::kEmulated>(ns); }
#else

// Registers the kernels of one backend for the ops of namespace `ns`. Returns 0, or a code for what torch refused.
AMPCTX_EXPORT int ampctx_register_cpu(const char* ns) { return ampctx::register_kernels<ampctx::kCpu>(ns); }

#ifdef AMPCTX_WITH_CUDA
AMPCTX_EXPORT int ampctx_register_cuda(const char* ns) {
  if (!aoti_torch_get_current_cuda_stream) return 3;  // a torch without CUDA
  return ampctx::register_kernels<ampctx::kCuda>(ns);
}
#endif

// A function for Python's ctypes, which needs the GIL. bool is int there, and no exception of C++ may leave it.
template <class T>
using ForC = std::conditional_t<std::is_same_v<T, bool>, int, T>;
template <auto function>
struct Guarded;
template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct Guarded<function> {
  static ForC<Result> call(ForC<Arguments>... arguments) {
    try {
      return function(arguments...);
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
      if constexpr (std::is_pointer_v<Result>) {
        return nullptr;
      } else {
        return -1;
      }
    }
  }
};

// Pointers: ampctx/kernels/extension.py knows the types of arguments.
extern "C" {
#define AMPCTX_FOR_PYTHON(part, name) \
  __attribute__((visibility("default"))) auto* ampctx_##name = &Guarded<&ampctx::part::name>::call;
AMPCTX_FOR_PYTHON(python_lists, use_python)
AMPCTX_FOR_PYTHON(python_lists, use_hints)
AMPCTX_FOR_PYTHON(python_lists, use_types)
AMPCTX_FOR_PYTHON(python_lists, new_list)
AMPCTX_FOR_PYTHON(python_lists, read_tensors)
AMPCTX_FOR_PYTHON(python_lists, read_grads)
AMPCTX_FOR_PYTHON(python_lists, collect_grads)
AMPCTX_FOR_PYTHON(python_lists, read_along)
AMPCTX_FOR_PYTHON(python_lists, read_entries)
AMPCTX_FOR_PYTHON(python_lists, are_contiguous)
AMPCTX_FOR_PYTHON(python_lists, lie_alike)
AMPCTX_FOR_PYTHON(python_lists, is_uniform)
AMPCTX_FOR_PYTHON(python_lists, are_apart)
AMPCTX_FOR_PYTHON(python_passes, same_items)
AMPCTX_FOR_PYTHON(python_passes, same_members)
AMPCTX_FOR_PYTHON(python_passes, nothing_changed)
AMPCTX_FOR_PYTHON(python_passes, same_plan)
AMPCTX_FOR_PYTHON(python_passes, are_plain)
AMPCTX_FOR_PYTHON(python_passes, are_resolved)
AMPCTX_FOR_PYTHON(python_passes, have_no_grad)
AMPCTX_FOR_PYTHON(python_passes, clear_grads)
AMPCTX_FOR_PYTHON(python_passes, bump_each)
AMPCTX_FOR_PYTHON(python_passes, held_kinds)
AMPCTX_FOR_PYTHON(python_passes, write_counts)
}

AMPCTX_EXPORT const char* ampctx_build_info() {
  static const std::string info =
      std::string("{\"compiler\": \"" AMPCTX_COMPILER "\", \"source\": \"" AMPCTX_SOURCE
                  "\", \"cuda\": " AMPCTX_CUDA_VERSION ", \"cuda_archs\": [" AMPCTX_CUDA_ARCHS "], \"simd\": [") +
      ampctx::cpu::simd_built() + "], \"simd_used\": \"" + ampctx::cpu::simd_used() + "\"}";
  return info.c_str();
}
#endif
