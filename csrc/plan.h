// A plan: the op calls that plain Python code has just made, to make again with new gradients and numbers.
//
// It compares what the calls came from (param groups, dicts of state, gradients, addresses, types and layouts) with
// what was there then, reads everything before anything is written, and calls the kernels without torch's dispatcher.
// Where something is not as it was, nothing has been written, and the plain code runs and makes a new plan.
//
// It knows tensors as Python objects alone. `read` asks each of them, at every run, all that plain code asks: through
// torch's DLPack exchange, and what that does not tell by methods of Tensor. Gradients come from the descriptor
// Tensor.grad. The functions hold the GIL, except while kernels run.
#pragma once

#include <cstring>
#include <memory>
#include <optional>

#include "arguments.h"

namespace ampctx {

using Kernel = void (*)(Arguments&);
// Null if there is none for tensors of this type of device.
Kernel kernel_of(const char* op, int32_t device_type);

namespace plan {

using python_abi::Reference;

// Whether a plan runs; kError: with an exception set.
enum Code { kError = -1, kRuns, kDiffers };

// Given by use_python(), and kept for good. Where that did not return True, nobody may call the other functions.
struct Torch {
  const python_abi::DLPackExchange* exchange = nullptr;
  PyObject *grad = nullptr, *version = nullptr, *increment_version = nullptr, *types = nullptr,
           *plain_getters = nullptr;
  PyObject* params = nullptr;
  // Methods of a tensor and of its storage, as the C functions that they are.
  PyCFunction is_neg = nullptr, untyped_storage = nullptr, nbytes = nullptr, data_ptr = nullptr;
  descrgetfunc get_grad = nullptr, get_version = nullptr;
  descrsetfunc set_grad = nullptr;
  // Given by use_dtensor(): the class, and the descriptors of this rank's part and of its layout over the ranks.
  PyObject *dtensor = nullptr, *part = nullptr, *spec = nullptr;
  descrgetfunc get_part = nullptr, get_spec = nullptr;
};
inline Torch torch;

inline bool is_sharded(PyObject* tensor) { return reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == torch.dtensor; }
inline Reference part_of(PyObject* tensor) { return Reference(torch.get_part(torch.part, tensor, nullptr)); }
inline Reference spec_of(PyObject* tensor) { return Reference(torch.get_spec(torch.spec, tensor, nullptr)); }

inline bool is_plain(PyObject* tensor) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  for (Py_ssize_t i = 0; i < PyList_Size(torch.types); ++i) {
    if (PyList_GetItem(torch.types, i) == type) return true;
  }
  return false;
}

// What DLPack tells of a plain tensor. False for other types, sparse and quantized tensors, and other devices.
inline bool look(PyObject* tensor, View& view) {
  python_abi::DLTensor found;
  if (!is_plain(tensor)) return false;
  if (torch.exchange->view(tensor, &found) != 0) return PyErr_Clear(), false;
  const ElementType* const type = find_type([&](const ElementType& type) {
    return found.dtype.lanes == 1 && found.dtype.code == type.kind && found.dtype.bits == type.bits;
  });
  if (!type) return false;
  view.dtype = type->number();
  if (found.device.type == python_abi::kDLCPU) {
    view.device = torch_abi::Device::cpu();
  } else if (found.device.type == python_abi::kDLCUDA) {
    view.device = {aoti_torch_device_type_cuda(), found.device.index};
  } else {
    return false;
  }
  view.data = static_cast<char*>(found.data) + found.byte_offset;
  view.layout = {found.dim, found.sizes, found.strides};
  view.numel = 1;
  for (int32_t d = 0; d < found.dim; ++d) view.numel *= found.sizes[d];
  view.is_defined = view.is_strided = true;
  view.is_contiguous = is_contiguous(view.layout);
  view.bytes = view.numel * found.dtype.bits / 8;
  return true;
}

// `look`, and all else that decides whether a kernel may take the tensor's memory for its values: torch negates some
// tensors as it reads them; elements may overlap or have others in between; a program may have freed the storage or
// made it smaller, which gives it another address than `former`. False where it may not.
inline bool read(PyObject* tensor, View& view, const void* former = nullptr) {
  if (!look(tensor, view)) return false;
  const Reference is_negated(torch.is_neg(tensor, nullptr));
  if (is_negated.get() != Py_False) return PyErr_Clear(), false;
  if (!view.is_contiguous && !is_dense(view.layout)) return false;
  if (view.data && view.data == former) return view.has_memory = true;
  const Reference storage(torch.untyped_storage(tensor, nullptr));
  const Reference size(storage ? torch.nbytes(storage.get(), nullptr) : nullptr);
  const Reference address(size ? torch.data_ptr(storage.get(), nullptr) : nullptr);
  if (!address) return PyErr_Clear(), false;
  const int64_t before = static_cast<char*>(view.data) - static_cast<char*>(PyLong_AsVoidPtr(address.get())),
                bytes = PyLong_AsLongLong(size.get());
  view.has_memory = view.numel == 0 || before + view.bytes <= bytes;
  view.fills_storage = view.bytes == bytes;
  return view.has_memory;
}

// Equal for tensors of equal sizes and strides, 0 for contiguous ones.
inline uint64_t layout_number(const View& view) {
  if (view.is_contiguous) return 0;
  uint64_t number = 1;
  for (int64_t d = 0; d < view.layout.dim; ++d) {
    for (const int64_t next : {view.layout.sizes[d], view.layout.strides[d]}) {
      number = (number ^ static_cast<uint64_t>(next)) * 0x9e3779b97f4a7c15ull;
    }
  }
  return number | 1;
}

// Of a tensor, besides its view. Where torch and Python keep it is never read: a loop over many small tensors waits for
// memory most of all, and these lines are fetched ahead.
struct Known {
  uint64_t layout;
  const void *object, *storage;
  Reference spec;  // of a DTensor
};

// Where the tensors of an op's list come from: a list of them, the gradients of parameters, or an entry of each of some
// dicts, which the plan does not keep, as a program may move state to the host to have its memory.
enum class From { kList, kGrads, kEntries };

struct Column {
  From from;
  PyObject *owners, *key;  // the tensors, the parameters, or the dicts, and the key of the entry
  bool is_written = false, is_sharded = false;
  Views views{};  // as they were in the last run; of DTensors those of this rank's parts
  std::vector<Known> known{};
  PyObject* read = nullptr;   // the gradients, entries or parts of this run, kept for it
  PyObject* whole = nullptr;  // the DTensors that these are parts of

  bool is_grads() const { return from == From::kGrads; }
};

struct PlannedCall {
  std::string name;  // as the profiler shows it
  Kernel kernel;
  std::vector<int> columns;  // -1: given at each run
  std::vector<int> written;  // columns
};

// In a capsule. Who holds that keeps the Python objects, where the garbage collector sees them.
constexpr const char* kCapsule = "ampctx._ops.plan";
struct State {
  PyObject *groups, *members, *mappings, *idle;
  std::vector<Column> columns;
  std::vector<PlannedCall> calls;
  bool is_running = false;

  ~State() { forget(); }
  void forget() {
    for (Column& column : columns) {
      Py_CLEAR(column.read);
      Py_CLEAR(column.whole);
    }
  }
};

// A loop over many small tensors waits for memory most of all.
constexpr Py_ssize_t kAhead = 8;

inline void prefetch_item(PyObject* list, Py_ssize_t i) {
  if (i + kAhead < PyList_Size(list)) __builtin_prefetch(PyList_GetItem(list, i + kAhead));
}

inline bool same_items(PyObject* items, PyObject* others) {
  const Py_ssize_t count = PyList_Size(others);
  if (PyList_Size(items) != count) return PyErr_Clear(), false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (PyList_GetItem(items, i) != PyList_GetItem(others, i)) return PyErr_Clear(), false;
  }
  return true;
}

// Whether each of the param groups holds these members, in order.
inline bool same_members(PyObject* groups, PyObject* members) {
  const Py_ssize_t count = PyList_Size(members);
  if (PyList_Size(groups) != count) return PyErr_Clear(), false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const params = PyDict_GetItemWithError(PyList_GetItem(groups, i), torch.params);
    if (!params || !same_items(params, PyList_GetItem(members, i))) return PyErr_Clear(), false;
  }
  return true;
}

// Whether dicts hold the same keys and values, in order.
inline bool same_state(const State& state) {
  for (Py_ssize_t i = 0; i < PyList_Size(state.mappings); ++i) {
    PyObject *const row = PyList_GetItem(state.mappings, i), *const mapping = PyTuple_GetItem(row, 0),
                    *const keys = PyTuple_GetItem(row, 1), *const values = PyTuple_GetItem(row, 2);
    if (PyDict_Size(mapping) != PyList_Size(keys)) return false;
    PyObject *key, *value;
    for (Py_ssize_t at = 0, k = 0; PyDict_Next(mapping, &at, &key, &value); ++k) {
      if (PyList_GetItem(keys, k) != key || PyList_GetItem(values, k) != value) return PyErr_Clear(), false;
    }
  }
  return true;
}

inline Reference grad_of(PyObject* param) { return Reference(torch.get_grad(torch.grad, param, nullptr)); }

inline const void* storage_of(PyObject* tensor) {
  const Reference storage(PyObject_CallMethod(tensor, "untyped_storage", nullptr));
  const Reference address(storage.get() ? PyObject_GetAttrString(storage.get(), "_cdata") : nullptr);
  const void* const found = address.get() ? PyLong_AsVoidPtr(address.get()) : nullptr;
  return PyErr_Clear(), found;
}

inline void prefetch(const View& view, const Known& known) {
  const auto* const sizes = reinterpret_cast<const char*>(view.layout.sizes);
  const auto* const storage = static_cast<const char*>(known.storage);
  for (const void* line : {known.object, static_cast<const void*>(sizes - 64), static_cast<const void*>(sizes),
                           static_cast<const void*>(storage), static_cast<const void*>(storage + 64)}) {
    __builtin_prefetch(line);
  }
}

// Null for `tensor` is an error of Python's. `is_kept`: a gradient that its parameter loses and the caller keeps, so
// that no other code may write to its memory.
inline Code read_tensor(Column& column, size_t i, PyObject* tensor, bool is_kept) {
  View view, &former = column.views[i];
  if (!tensor || !read(tensor, view, column.is_grads() ? nullptr : former.data)) return PyErr_Clear(), kDiffers;
  if (view.numel != former.numel || view.dtype != former.dtype || view.device != former.device ||
      layout_number(view) != column.known[i].layout) {
    return kDiffers;
  }
  if (column.is_grads() ? is_kept && !view.fills_storage : view.data != former.data) return kDiffers;
  former = view;
  return kRuns;
}

// Over the ranks. Mostly it is one object. Null is an error of Python's.
inline bool same_layout(const Reference& spec, const Reference& other) {
  if (!spec || !other) return false;
  return spec == other || PyObject_RichCompareBool(spec.get(), other.get(), Py_EQ) == 1;
}

// Takes this rank's part of a DTensor. False where it is none, or a gradient that is laid out otherwise over the ranks.
inline bool take_part(Column& column, const Known& known, PyObject* whole, Reference& part) {
  if (!whole || !is_sharded(whole)) return false;
  if (column.is_grads() && !same_layout(spec_of(whole), known.spec)) return false;
  part = part_of(whole);
  return part && (!column.is_written || PyList_Append(column.whole, whole) == 0);
}

inline Code read_column(Column& column, bool takes) {
  const bool is_kept = takes && !column.is_written;
  const size_t count = column.known.size();
  const bool is_given = column.read != nullptr;
  const bool collects = !is_given && (column.from != From::kList || column.is_sharded);
  if (is_given && column.is_sharded) return kDiffers;
  if (collects && !(column.read = PyList_New(count))) return kError;
  if (column.is_sharded && column.is_written && !(column.whole = PyList_New(0))) return kError;
  for (size_t i = 0; i < count; ++i) {
    PyObject* const list = is_given ? column.read : column.owners;
    prefetch_item(list, i);
    if (i + kAhead < count && !column.is_grads()) prefetch(column.views[i + kAhead], column.known[i + kAhead]);
    PyObject* tensor = PyList_GetItem(list, i);
    Reference grad, part;
    if (collects && tensor && column.is_grads()) {
      grad = grad_of(tensor);
      tensor = grad.get();
    } else if (collects && tensor && column.from == From::kEntries) {
      tensor = PyDict_GetItemWithError(tensor, column.key);
    }
    if (column.known[i].spec) {
      if (!take_part(column, column.known[i], tensor, part)) return PyErr_Clear(), kDiffers;
      tensor = part.get();
    }
    if (const Code code = read_tensor(column, i, tensor, is_kept)) return code;
    if (collects) PyList_SetItem(column.read, i, Py_NewRef(tensor));
  }
  return kRuns;
}

// Whether two gradients lie at one place.
inline bool is_shared(const State& state) {
  std::vector<const void*> places;
  for (const Column& column : state.columns) {
    for (const View& view : column.views) {
      if (column.is_grads() && view.numel > 0) places.push_back(view.data);
    }
  }
  std::sort(places.begin(), places.end());
  return std::adjacent_find(places.begin(), places.end()) != places.end();
}

// A number, which may stand for a tensor of one element, a flag or a plain tensor. False for anything else.
inline bool take_value(PyObject* from, Value& value) {
  View& view = value.view;
  if (!PyFloat_Check(from) && !PyLong_Check(from)) return read(from, view);
  value.number = PyFloat_AsDouble(from);
  if (PyLong_Check(from)) value.integer = PyLong_AsLongLong(from);
  view.data = &value.number, view.numel = 1, view.dtype = aoti_torch_dtype_float64();
  view.device = torch_abi::Device::cpu();
  view.is_defined = view.is_strided = view.is_contiguous = view.has_memory = true;
  return !PyErr_Occurred();
}

// What one call is given at a run: lists of tensors for its columns of -1, then its values.
struct Given {
  const PlannedCall* call = nullptr;
  std::deque<Views> fresh;
  std::vector<const Views*> lists;
  std::vector<Value> values;

  bool take(State& state, const PlannedCall& planned, PyObject* arguments) {
    Py_ssize_t next = 0;
    call = &planned;
    for (const int column : planned.columns) {
      if (column >= 0) {
        lists.push_back(&state.columns[column].views);
        continue;
      }
      PyObject* const tensors = PyTuple_GetItem(arguments, next++);
      if (!tensors || !take_list(tensors)) return false;
    }
    values.resize(PyTuple_Size(arguments) - next);
    for (Value& value : values) {
      if (!take_value(PyTuple_GetItem(arguments, next++), value)) return false;
    }
    return true;
  }

  // Adds a list of tensors. False where one is not plain; an exception may be set.
  bool take_list(PyObject* tensors) {
    const Py_ssize_t count = PySequence_Size(tensors);
    if (count < 0) return false;
    Views& views = fresh.emplace_back(count);
    lists.push_back(&views);
    for (Py_ssize_t i = 0; i < count; ++i) {
      const Reference tensor(PySequence_GetItem(tensors, i));
      if (!tensor || !read(tensor.get(), views[i])) return false;
    }
    return true;
  }
};

// False with an exception set, for what a kernel refuses.
inline bool run_calls(const std::vector<Given>& given) {
  std::string error;
  PyThreadState* const thread = PyEval_SaveThread();
  try {
    for (const Given& each : given) {
      const auto shown = torch_abi::shown(each.call->name.c_str());
      Arguments in(each.lists, each.values);
      each.call->kernel(in);
    }
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  PyEval_RestoreThread(thread);
  if (!error.empty()) PyErr_SetString(PyExc_RuntimeError, error.c_str());
  return error.empty();
}

// Tells autograd what was written.
inline bool bump_versions(const State& state) {
  for (const PlannedCall& call : state.calls) {
    for (const int written : call.written) {
      const Column& column = state.columns[written];
      PyObject* const tensors = column.read ? column.read : column.owners;
      for (PyObject* written_now : {tensors, column.whole}) {
        if (!written_now) continue;
        const Reference done(PyObject_CallFunctionObjArgs(torch.increment_version, written_now, nullptr));
        if (!done) return false;
      }
    }
  }
  return true;
}

// Takes gradients that no call writes from their parameters.
inline bool take_grads(const State& state) {
  for (const Column& column : state.columns) {
    for (size_t i = 0; column.is_grads() && !column.is_written && i < column.known.size(); ++i) {
      if (torch.set_grad(torch.grad, PyList_GetItem(column.owners, i), Py_None) != 0) return false;
    }
  }
  return true;
}

// Of columns that were just read.
inline Code make_calls(State& state, PyObject* arguments, bool may_share) {
  if (!may_share && is_shared(state)) return kDiffers;
  std::vector<Given> given(state.calls.size());
  for (size_t i = 0; i < given.size(); ++i) {
    PyObject* const of_call = PyList_GetItem(arguments, i);
    if (!of_call || !given[i].take(state, state.calls[i], of_call)) return PyErr_Occurred() ? kError : kDiffers;
  }
  return run_calls(given) && bump_versions(state) ? kRuns : kError;
}

// `grads`: for each column of gradients a list in place of those in `.grad` or None; or None for all. `takes`: see
// `take_grads`.
inline Code run_again(State& state, PyObject* groups, PyObject* arguments, PyObject* grads, bool may_share,
                      bool takes) {
  if (!same_items(groups, state.groups) || !same_members(groups, state.members)) return kDiffers;
  if (!same_state(state)) return kDiffers;
  for (Py_ssize_t i = 0; i < PyList_Size(state.idle); ++i) {
    if (grad_of(PyList_GetItem(state.idle, i)).get() != Py_None) return PyErr_Clear(), kDiffers;
  }
  Py_ssize_t next = 0;
  for (Column& column : state.columns) {
    if (PyObject* const list = column.is_grads() && grads != Py_None ? PyList_GetItem(grads, next++) : Py_None;
        list != Py_None) {
      if (!list || PyList_Size(list) != static_cast<Py_ssize_t>(column.known.size())) return PyErr_Clear(), kDiffers;
      Py_IncRef(column.read = list);
    }
    if (const Code code = read_column(column, takes)) return code;
  }
  const Code code = make_calls(state, arguments, may_share);
  return code == kRuns && takes && !take_grads(state) ? kError : code;
}

// While one lives, torch's getters do not look for __torch_function__, which takes longer than they do.
class PlainGetters {
 public:
  PlainGetters() : guard_(PyObject_CallObject(torch.plain_getters, nullptr)) { call("__enter__", nullptr); }
  ~PlainGetters() {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    call("__exit__", "OOO");
    PyErr_Restore(type, value, traceback);
  }

 private:
  void call(const char* method, const char* arguments) {
    const Reference done(guard_ ? PyObject_CallMethod(guard_.get(), method, arguments, Py_None, Py_None, Py_None)
                                : nullptr);
    if (!done) PyErr_Clear();
  }
  Reference guard_;
};

// run(plan, groups, arguments, grads, may_share, takes): the list of the lists of gradients that were read, or None.
inline PyObject* run(PyObject*, PyObject* given) {
  PyObject *plan, *groups, *arguments, *grads;
  int may_share, takes;
  if (!PyArg_ParseTuple(given, "OOOOpp", &plan, &groups, &arguments, &grads, &may_share, &takes)) return nullptr;
  State* const state = static_cast<State*>(PyCapsule_GetPointer(plan, kCapsule));
  if (!state) return nullptr;
  // It may be running: Python code runs where an object dies.
  if (state->is_running) return Py_NewRef(Py_None);
  state->is_running = true;
  const PlainGetters guard;
  const Code code = run_again(*state, groups, arguments, grads, may_share, takes);
  PyObject* result = code == kError ? nullptr : code == kDiffers ? Py_NewRef(Py_None) : PyList_New(0);
  for (Column& column : state->columns) {
    if (code == kRuns && result && column.is_grads() && PyList_Append(result, column.read) != 0) Py_CLEAR(result);
  }
  state->forget();
  state->is_running = false;
  return result;
}

// Adds a column: a list of tensors; or (parameters, gradients); or (dicts, key, entries). A DTensor stands for this
// rank's part. Its number, -1 for None, or -2 where a plan cannot read it.
inline int add_column(State& state, PyObject* from) {
  if (from == Py_None) return -1;
  const Py_ssize_t size = PyTuple_Check(from) ? PyTuple_Size(from) : 0;
  Column column{size == 0   ? From::kList
                : size == 2 ? From::kGrads
                            : From::kEntries,
                size == 0 ? from : PyTuple_GetItem(from, 0), size == 3 ? PyTuple_GetItem(from, 1) : nullptr};
  for (size_t i = 0; i < state.columns.size(); ++i) {
    const Column& other = state.columns[i];
    if (other.owners == column.owners && other.from == column.from && other.key == column.key)
      return static_cast<int>(i);
  }
  PyObject* const tensors = size == 0 ? from : PyTuple_GetItem(from, size - 1);
  if (PyList_Size(tensors) != PyList_Size(column.owners)) return -2;
  for (Py_ssize_t i = 0; i < PyList_Size(tensors); ++i) {
    PyObject *tensor = PyList_GetItem(tensors, i), *const owner = PyList_GetItem(column.owners, i);
    Reference part, spec;
    if (is_sharded(tensor)) {
      spec = spec_of(tensor), part = part_of(tensor), tensor = part.get();
      if (!spec || !part) return -2;
      column.is_sharded = true;
    }
    View view;
    if (!read(tensor, view)) return -2;
    if (size == 2 && !is_plain(owner) && !is_sharded(owner)) return -2;
    column.views.push_back(view);
    // Gradients are others at each run.
    column.known.push_back({layout_number(view), tensor, size == 2 ? nullptr : storage_of(tensor), std::move(spec)});
  }
  if (column.is_grads()) Py_IncRef(column.read = tensors);
  state.columns.push_back(std::move(column));
  return static_cast<int>(state.columns.size() - 1);
}

inline bool add_calls(State& state, PyObject* calls) {
  for (Py_ssize_t i = 0; i < PyList_Size(calls); ++i) {
    const char* op;
    PyObject *columns, *written;
    if (!PyArg_ParseTuple(PyList_GetItem(calls, i), "sOO", &op, &columns, &written)) return false;
    PlannedCall& call = state.calls.emplace_back();
    call.name = std::string("ampctx::") + op;
    for (Py_ssize_t k = 0; k < PyList_Size(columns); ++k) {
      call.columns.push_back(add_column(state, PyList_GetItem(columns, k)));
      if (call.columns.back() == -2) return false;
    }
    for (Py_ssize_t k = 0; k < PyTuple_Size(written); ++k) {
      const int column = call.columns.at(PyLong_AsLong(PyTuple_GetItem(written, k)));
      if (column < 0) return false;  // nobody bumps the versions of what each run is given
      state.columns[column].is_written = true;
      call.written.push_back(column);
    }
    // Columns may be empty, not all of them.
    for (const int column : call.columns) {
      if (column < 0 || state.columns[column].views.empty()) continue;
      call.kernel = kernel_of(op, state.columns[column].views[0].device.type);
      break;
    }
    if (!call.kernel) return false;
  }
  return true;
}

// marks(tensors): version and address of each, as bytes to compare; None where a tensor is not plain.
inline PyObject* marks(PyObject*, PyObject* tensors) {
  const Py_ssize_t count = PyList_Size(tensors);
  if (count < 0) return nullptr;
  const PlainGetters guard;
  std::vector<int64_t> found;
  found.reserve(2 * count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    prefetch_item(tensors, i);
    PyObject* const tensor = PyList_GetItem(tensors, i);
    View view;
    if (!tensor || !look(tensor, view)) return PyErr_Clear(), Py_NewRef(Py_None);
    const Reference version(torch.get_version(torch.version, tensor, nullptr));
    if (!version) return PyErr_Clear(), Py_NewRef(Py_None);
    found.push_back(PyLong_AsLongLong(version.get()));
    found.push_back(reinterpret_cast<int64_t>(view.data));
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(found.data()), 8 * found.size());
}

// have_no_grads(tensors): whether `.grad` of each is None; None where a tensor is not plain.
inline PyObject* have_no_grads(PyObject*, PyObject* tensors) {
  const Py_ssize_t count = PyList_Size(tensors);
  if (count < 0) return nullptr;
  std::optional<PlainGetters> guard;
  if (count > 16) guard.emplace();  // for a few it costs more than it saves
  for (Py_ssize_t i = 0; i < count; ++i) {
    prefetch_item(tensors, i);
    PyObject* const tensor = PyList_GetItem(tensors, i);
    if (!tensor || !(is_plain(tensor) || is_sharded(tensor))) return PyErr_Clear(), Py_NewRef(Py_None);
    if (grad_of(tensor).get() != Py_None) return PyErr_Clear(), PyBool_FromLong(false);
  }
  return PyBool_FromLong(true);
}

// spread_grads(params): of each its gradient or None, of that this rank's part or None if it has no elements, and the
// layout of both over the ranks or None. None where a tensor is neither plain nor a DTensor, or layouts differ.
inline PyObject* spread_grads(PyObject*, PyObject* params) {
  const Py_ssize_t count = PyList_Size(params);
  if (count < 0) return nullptr;
  const Reference grads(PyList_New(count)), parts(PyList_New(count)), layouts(PyList_New(count));
  const auto none = [] { return Reference(Py_NewRef(Py_None)); };
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const param = PyList_GetItem(params, i);
    if (!is_sharded(param) && !is_plain(param)) return Py_NewRef(Py_None);
    Reference layout = is_sharded(param) ? spec_of(param) : none(), grad = grad_of(param), part;
    if (grad && grad.get() != Py_None) {
      const bool has_parts = is_sharded(grad.get());
      const bool is_placed = same_layout(has_parts ? spec_of(grad.get()) : none(), layout);
      part = has_parts ? part_of(grad.get()) : Reference(Py_NewRef(grad.get()));
      View view;
      if (!is_placed || !part || !look(part.get(), view)) return PyErr_Clear(), Py_NewRef(Py_None);
      if (view.numel == 0) part.reset();
    }
    if (!grad || !layout) return PyErr_Clear(), Py_NewRef(Py_None);
    PyList_SetItem(layouts.get(), i, layout.release());
    PyList_SetItem(grads.get(), i, grad.release());
    PyList_SetItem(parts.get(), i, part ? part.release() : Py_NewRef(Py_None));
  }
  return PyTuple_Pack(3, grads.get(), parts.get(), layouts.get());
}

// have_members(groups, members): whether the param groups hold these lists of parameters.
inline PyObject* have_members(PyObject*, PyObject* given) {
  PyObject *groups, *members;
  if (!PyArg_ParseTuple(given, "OO", &groups, &members)) return nullptr;
  return PyBool_FromLong(same_members(groups, members));
}

// advanced(marks): those of tensors whose versions have gone up by one each.
inline PyObject* advanced(PyObject*, PyObject* marks) {
  char* bytes;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(marks, &bytes, &size) != 0) return nullptr;
  if (size == 0) return Py_NewRef(marks);
  std::vector<int64_t> found(size / 8);
  std::memcpy(found.data(), bytes, size);
  for (size_t i = 0; i < found.size(); i += 2) ++found[i];
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(found.data()), size);
}

// make_plan(groups, members, mappings, idle, calls): a plan, or None where it cannot make the calls. The caller keeps
// the first four, and the owners of the columns.
inline PyObject* make_plan(PyObject*, PyObject* given) {
  auto state = std::make_unique<State>();
  PyObject* calls;
  if (!PyArg_ParseTuple(given, "OOOOO", &state->groups, &state->members, &state->mappings, &state->idle, &calls)) {
    return nullptr;
  }
  const PlainGetters guard;
  if (!add_calls(*state, calls)) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
  state->forget();
  const auto free = [](PyObject* plan) { delete static_cast<State*>(PyCapsule_GetPointer(plan, kCapsule)); };
  PyObject* const plan = PyCapsule_New(state.get(), kCapsule, free);
  if (plan) state.release();
  return plan;
}

// run_once(calls, arguments): makes the calls of a plan that nobody keeps, unless two gradients lie at one place.
// Whether it has.
inline PyObject* run_once(PyObject*, PyObject* given) {
  PyObject *calls, *arguments;
  if (!PyArg_ParseTuple(given, "OO", &calls, &arguments)) return nullptr;
  State state{};
  const PlainGetters guard;
  const Code code = add_calls(state, calls) ? make_calls(state, arguments, false)
                    : PyErr_Occurred()      ? kError
                                            : kDiffers;
  return code == kError ? nullptr : PyBool_FromLong(code == kRuns);
}

// are_uniform(lists): whether one call can take the lists, which have equally many plain tensors.
inline PyObject* are_uniform(PyObject*, PyObject* lists) {
  Given given;
  for (Py_ssize_t i = 0; i < PyTuple_Size(lists); ++i) {
    PyObject* const tensors = PyTuple_GetItem(lists, i);
    if (i > 0 && tensors == PyTuple_GetItem(lists, i - 1)) continue;
    if (!given.take_list(tensors)) return PyErr_Clear(), PyBool_FromLong(false);
  }
  const Views& first = *given.lists[0];
  if (first.empty()) return PyBool_FromLong(false);
  for (const Views* const views : given.lists) {
    if (views->size() != first.size()) return PyBool_FromLong(false);
    for (size_t i = 0; i < views->size(); ++i) {
      const View& view = (*views)[i];
      const bool is_as_others = view.dtype == (*views)[0].dtype && view.device == first[0].device;
      if (!is_as_others || view.numel != first[i].numel || !view.is_contiguous) return PyBool_FromLong(false);
    }
  }
  return PyBool_FromLong(true);
}

// The C function of a bound method that takes no arguments; null for others.
inline PyCFunction function_of(PyObject* method) {
  return PyCFunction_GetFlags(method) == METH_NOARGS ? PyCFunction_GetFunction(method) : nullptr;
}

// use_python(exchange, Tensor.grad, Tensor._version, increment_version, types, DisableTorchFunctionSubclass, and of a
// tensor and its storage the methods is_neg, untyped_storage, nbytes and data_ptr): whether there will be plans.
inline PyObject* use_python(PyObject*, PyObject* given) {
  PyObject *capsule, *is_neg, *untyped_storage, *nbytes, *data_ptr;
  Torch found;
  if (!PyArg_ParseTuple(given, "OOOOOOOOOO", &capsule, &found.grad, &found.version, &found.increment_version,
                        &found.types, &found.plain_getters, &is_neg, &untyped_storage, &nbytes, &data_ptr)) {
    return nullptr;
  }
  found.is_neg = function_of(is_neg), found.untyped_storage = function_of(untyped_storage);
  found.nbytes = function_of(nbytes), found.data_ptr = function_of(data_ptr);
  if (PyErr_Occurred()) return nullptr;
  found.exchange =
      static_cast<const python_abi::DLPackExchange*>(PyCapsule_GetPointer(capsule, python_abi::kExchangeCapsule));
  if (!found.exchange) return nullptr;
  const auto slot = [](PyObject* descriptor, int number) {
    const Reference type(PyObject_Type(descriptor));
    return PyType_GetSlot(reinterpret_cast<PyTypeObject*>(type.get()), number);
  };
  found.get_grad = reinterpret_cast<descrgetfunc>(slot(found.grad, Py_tp_descr_get));
  found.set_grad = reinterpret_cast<descrsetfunc>(slot(found.grad, Py_tp_descr_set));
  found.get_version = reinterpret_cast<descrgetfunc>(slot(found.version, Py_tp_descr_get));
  found.params = PyUnicode_InternFromString("params");
  const bool fits = found.exchange->header.major == 1 && found.exchange->view && found.get_grad && found.set_grad &&
                    found.get_version && found.is_neg && found.untyped_storage && found.nbytes && found.data_ptr;
  for (PyObject* object : {found.grad, found.version, found.increment_version, found.types, found.plain_getters}) {
    Py_IncRef(object);
  }
  if (fits && found.params) torch = found;
  return PyBool_FromLong(fits);
}

// use_dtensor(DTensor, its descriptor of this rank's part, that of its layout): plans then serve them.
inline PyObject* use_dtensor(PyObject*, PyObject* given) {
  Torch found = torch;
  if (!PyArg_ParseTuple(given, "OOO", &found.dtensor, &found.part, &found.spec)) return nullptr;
  found.get_part = reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(found.part), Py_tp_descr_get));
  found.get_spec = reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(found.spec), Py_tp_descr_get));
  if (found.get_part && found.get_spec && !torch.dtensor) {
    for (PyObject* object : {found.dtensor, found.part, found.spec}) Py_IncRef(object);
    torch = found;
  }
  return Py_NewRef(Py_None);
}

}  // namespace plan
}  // namespace ampctx
