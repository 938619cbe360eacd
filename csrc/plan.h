// A plan: the op calls that plain Python code has just made, to make again with new gradients and numbers.
//
// It compares what the calls came from (param groups, dicts of state, gradients, addresses, types and layouts) with
// what was there then, reads everything before anything is written, and calls the kernels without torch's dispatcher.
// Where something is not as it was, nothing has been written, and the plain code runs and makes a new plan.
//
// It holds the GIL, except while kernels run.
#pragma once

#include "queries.h"

namespace ampctx {

using Kernel = void (*)(Arguments&);
// Null if there is none for tensors of this type of device.
Kernel kernel_of(const char* op, int32_t device_type);

namespace python {

struct PlannedCall {
  std::string name;  // as the profiler shows it
  Kernel kernel;
  std::vector<int> columns;  // -1: given at each run
  std::vector<int> written;  // columns
};

// In a capsule. Borrowed pointers: the Plan of kernels/plan.py owns the objects, so that the collector can see cycles.
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

// What one call is given at a run: lists of tensors for its columns of -1, then its values.
struct CallArguments {
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
      if (!tensors || !read_list(tensors, fresh.emplace_back())) return false;
      lists.push_back(&fresh.back());
    }
    values.resize(PyTuple_Size(arguments) - next);
    for (Value& value : values) {
      if (!take_value(PyTuple_GetItem(arguments, next++), value)) return false;
    }
    return true;
  }
};

// False with an exception set, for what a kernel refuses.
inline bool run_calls(const std::vector<CallArguments>& given) {
  std::string error;
  PyThreadState* const thread = PyEval_SaveThread();
  try {
    for (const CallArguments& each : given) {
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
    for (size_t i = 0; column.is_grads() && !column.is_written && i < column.hints.size(); ++i) {
      if (torch.set_grad(torch.grad, PyList_GetItem(column.owners, i), Py_None) != 0) return false;
    }
  }
  return true;
}

// Of columns that were just read.
inline Code make_calls(State& state, PyObject* arguments, bool may_share) {
  if (!may_share && is_shared(state)) return kDiffers;
  std::vector<CallArguments> given(state.calls.size());
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
  if (!same_entries(state.mappings)) return kDiffers;
  for (Py_ssize_t i = 0; i < PyList_Size(state.idle); ++i) {
    if (grad_of(PyList_GetItem(state.idle, i)).get() != Py_None) return PyErr_Clear(), kDiffers;
  }
  Py_ssize_t next = 0;
  for (Column& column : state.columns) {
    if (PyObject* const list = column.is_grads() && grads != Py_None ? PyList_GetItem(grads, next++) : Py_None;
        list != Py_None) {
      if (!list || PyList_Size(list) != static_cast<Py_ssize_t>(column.hints.size())) return PyErr_Clear(), kDiffers;
      Py_IncRef(column.read = list);
    }
    if (const Code code = read_column(column, takes)) return code;
  }
  const Code code = make_calls(state, arguments, may_share);
  return code == kRuns && takes && !take_grads(state) ? kError : code;
}

// run(plan, groups, arguments, grads, may_share, takes): the list of the lists of gradients that were read, or None.
inline PyObject* run(PyObject*, PyObject* given) {
  PyObject *plan, *groups, *arguments, *grads;
  int may_share, takes;
  if (!PyArg_ParseTuple(given, "OOOOpp", &plan, &groups, &arguments, &grads, &may_share, &takes)) return nullptr;
  State* const state = static_cast<State*>(PyCapsule_GetPointer(plan, kCapsule));
  if (!state) return nullptr;
  // A destructor that runs during this call may step again.
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
    column.hints.push_back({layout_number(view), tensor, size == 2 ? nullptr : storage_of(tensor), std::move(spec)});
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

}  // namespace python
}  // namespace ampctx
