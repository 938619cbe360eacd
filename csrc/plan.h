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

  // A value is a number, which may stand for a tensor of one element, a flag or a plain tensor. False for anything
  // else.
  bool take_value(Reader& reader, PyObject* from, Value& value) {
    View& view = value.view;
    if (!PyFloat_Check(from) && !PyLong_Check(from)) return reader.put_into(&view), reader.add(from);
    value.number = PyFloat_AsDouble(from);
    if (PyLong_Check(from)) value.integer = PyLong_AsLongLong(from);
    view.data = &value.number, view.numel = 1, view.dtype = aoti_torch_dtype_float64();
    view.device = torch_abi::Device::cpu();
    view.is_defined = view.is_strided = view.is_contiguous = view.has_memory = true;
    return !PyErr_Occurred();
  }

  // The reader reads the tensors later.
  bool take(Reader& reader, const State& state, const PlannedCall& planned, PyObject* arguments) {
    Py_ssize_t next = 0;
    call = &planned;
    for (const int column : planned.columns) {
      if (column >= 0) {
        lists.push_back(&state.columns[column].views);
        continue;
      }
      PyObject* const tensors = PyTuple_GetItem(arguments, next++);
      if (!tensors || !reader.add_list(tensors, fresh.emplace_back())) return false;
      lists.push_back(&fresh.back());
    }
    values.resize(PyTuple_Size(arguments) - next);
    for (Value& value : values) {
      if (!take_value(reader, PyTuple_GetItem(arguments, next++), value)) return false;
    }
    return true;
  }
};
using Given = std::vector<CallArguments>;

// What the calls of a run are given.
inline bool take_arguments(Reader& reader, const State& state, PyObject* arguments, Given& given) {
  given.resize(state.calls.size());
  for (size_t i = 0; i < given.size(); ++i) {
    PyObject* const of_call = PyList_GetItem(arguments, i);
    if (!of_call || !given[i].take(reader, state, state.calls[i], of_call)) return false;
  }
  return true;
}

// False with an exception set, for what a kernel refuses.
inline bool run_calls(const Given& given) {
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
inline bool bump_versions(const State& state, const Reader& reader) {
  for (const PlannedCall& call : state.calls) {
    for (const int written : call.written) {
      const Column& column = state.columns[written];
      const Reference tensors = reader.items(column.first, column.size());
      for (PyObject* written_now : {tensors.get(), column.whole.get()}) {
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
    for (size_t i = 0; column.is_grads() && column.is_kept && i < column.size(); ++i) {
      if (torch.set_grad(torch.grad, PyList_GetItem(column.owners, i), Py_None) != 0) return false;
    }
  }
  return true;
}

// Of what was just read.
inline Code make_calls(const State& state, const Reader& reader, const Given& given, bool may_share) {
  if (!may_share && is_shared(state)) return kDiffers;
  return run_calls(given) && bump_versions(state, reader) ? kRuns : kError;
}

// `grads`: for each column of gradients a list in place of those in `.grad` or None; or None for all. `takes`: see
// `take_grads`.
inline Code run_again(State& state, Reader& reader, PyObject* groups, PyObject* arguments, PyObject* grads,
                      bool may_share, bool takes) {
  if (!same_items(groups, state.groups) || !same_members(groups, state.members)) return kDiffers;
  if (!same_entries(state.mappings)) return kDiffers;
  for (Py_ssize_t i = 0; i < PyList_Size(state.idle); ++i) {
    if (grad_of(PyList_GetItem(state.idle, i)).get() != Py_None) return differs();
  }
  Py_ssize_t next = 0;
  for (Column& column : state.columns) {
    PyObject* const list = column.is_grads() && grads != Py_None ? PyList_GetItem(grads, next++) : Py_None;
    if (!list) return kError;
    if (const Code code = collect(reader, column, list == Py_None ? nullptr : list, takes)) return code;
  }
  Given given;
  if (!take_arguments(reader, state, arguments, given) || !reader.read()) return differs();
  const Code code = make_calls(state, reader, given, may_share);
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
  Reader reader;
  const Code code = run_again(*state, reader, groups, arguments, grads, may_share, takes);
  PyObject* result = code == kError ? nullptr : code == kDiffers ? Py_NewRef(Py_None) : PyList_New(0);
  for (Column& column : state->columns) {
    column.whole.reset();
    if (code != kRuns || !result || !column.is_grads()) continue;
    if (PyList_Append(result, reader.items(column.first, column.size()).get()) != 0) Py_CLEAR(result);
  }
  state->is_running = false;
  return result;
}

// Adds a column: a list of tensors; or (parameters, gradients); or (dicts, key, entries). A DTensor stands for this
// rank's part. Its number, -1 for None, or -2 where a plan cannot read it.
inline int add_column(State& state, Reader& reader, PyObject* from) {
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
  const Py_ssize_t count = PyList_Size(tensors);
  if (count != PyList_Size(column.owners)) return -2;
  column.first = reader.size();
  column.views.resize(count), column.specs.resize(count);
  reader.put_into(column.views.data());
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject *tensor = PyList_GetItem(tensors, i), *const owner = PyList_GetItem(column.owners, i);
    Reference part;
    if (is_sharded(tensor)) {
      column.specs[i] = spec_of(tensor), part = part_of(tensor), tensor = part.get();
      if (!column.specs[i]) return -2;
      column.is_sharded = true;
    }
    if (!reader.add(tensor) || (size == 2 && !is_plain(owner) && !is_sharded(owner))) return -2;
  }
  state.columns.push_back(std::move(column));
  return static_cast<int>(state.columns.size() - 1);
}

// Adds calls with what their columns, and the arguments unless null, are read as.
inline bool add_calls(State& state, Reader& reader, PyObject* calls, PyObject* arguments, Given& given) {
  for (Py_ssize_t i = 0; i < PyList_Size(calls); ++i) {
    const char* op;
    PyObject *columns, *written;
    if (!PyArg_ParseTuple(PyList_GetItem(calls, i), "sOO", &op, &columns, &written)) return false;
    PlannedCall& call = state.calls.emplace_back();
    call.name = std::string("ampctx::") + op;
    for (Py_ssize_t k = 0; k < PyList_Size(columns); ++k) {
      call.columns.push_back(add_column(state, reader, PyList_GetItem(columns, k)));
      if (call.columns.back() == -2) return false;
    }
    for (Py_ssize_t k = 0; k < PyTuple_Size(written); ++k) {
      const int column = call.columns.at(PyLong_AsLong(PyTuple_GetItem(written, k)));
      if (column < 0) return false;  // nobody bumps the versions of what each run is given
      state.columns[column].is_written = true;
      call.written.push_back(column);
    }
  }
  if ((arguments && !take_arguments(reader, state, arguments, given)) || !reader.read()) return false;
  for (PlannedCall& call : state.calls) {
    // Columns may be empty, not all of them.
    for (const int column : call.columns) {
      if (column < 0 || state.columns[column].views.empty()) continue;
      call.kernel = kernel_of(call.name.c_str() + std::strlen("ampctx::"), state.columns[column].views[0].device.type);
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
  Reader reader;
  Given none;
  if (!add_calls(*state, reader, calls, nullptr, none)) return differs() == kError ? nullptr : Py_NewRef(Py_None);
  for (Column& column : state->columns) {
    std::transform(column.views.begin(), column.views.end(), std::back_inserter(column.layouts), layout_number);
  }
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
  Reader reader;
  Given to_calls;
  const Code code =
      add_calls(state, reader, calls, arguments, to_calls) ? make_calls(state, reader, to_calls, false) : differs();
  return code == kError ? nullptr : PyBool_FromLong(code == kRuns);
}

}  // namespace python
}  // namespace ampctx
