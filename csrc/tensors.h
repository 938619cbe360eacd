// Tensors as Python objects: what they are now.
//
// A Reader collects the tensors that a step or a question is about. One op call then hands all of them to C, where
// `view_of` (arguments.h) asks each what it asks the tensors of every op. Gradients come from the descriptor
// Tensor.grad. The functions hold the GIL.
#pragma once

// The limited API, so that one library serves every Python from 3.10.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstring>
#include <memory>

#include "arguments.h"

namespace ampctx::python {

// A reference that is given back.
struct GiveBack {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Reference = std::unique_ptr<PyObject, GiveBack>;

// Set once by use_python(). If it returns False, Python must not call anything else in this file.
struct Torch {
  PyObject *read = nullptr, *grad = nullptr, *version = nullptr, *increment_version = nullptr, *types = nullptr,
           *plain_getters = nullptr;
  PyObject* params = nullptr;
  PyCFunction data_ptr = nullptr;  // Tensor.data_ptr, as the C function that it is
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

// Whether a kernel may take the tensor's memory for its values: elements of a known type within the storage, none
// between others. (torch hands no negated tensor to the op `read`.)
inline bool is_readable(const View& view) {
  return view.is_strided && view.has_memory && type_of(view.dtype) && (view.is_contiguous || is_dense(view.layout));
}

struct HeldGil {
  ~HeldGil() { PyGILState_Release(state); }
  const PyGILState_STATE state = PyGILState_Ensure();
};

struct Column;

// Collects tensors, and reads all of them by one op call.
class Reader {
 public:
  // False where it is not plain.
  bool add(PyObject* tensor) {
    if (!tensor || !is_plain(tensor)) return false;
    ++ranges_.back().count;
    return PyList_Append(list_.get(), tensor) == 0;
  }
  // Where the views of the tensors that are added next go, which it does not own.
  void put_into(View* views, Column* column = nullptr) { ranges_.push_back({views, column, 0}); }
  bool add_list(PyObject* tensors, Views& views) {
    const Py_ssize_t count = PySequence_Size(tensors);
    if (count < 0) return false;
    views.resize(count);
    put_into(views.data());
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!add(Reference(PySequence_GetItem(tensors, i)).get())) return false;
    }
    return true;
  }
  Py_ssize_t size() const { return PyList_Size(list_.get()); }
  Reference items(Py_ssize_t first, Py_ssize_t count) const {
    return Reference(PyList_GetSlice(list_.get(), first, first + count));
  }

  // False where a tensor is not readable, or differs from what its column remembers. An exception may be set.
  bool read() {
    // Not all at once, so that what torch allocates for a call stays in the cache.
    constexpr Py_ssize_t most = 256;
    for (Py_ssize_t first = 0; fits_ && first < size(); first += most) {
      Reader* const outer = std::exchange(current, this);  // a finalizer that runs in the call may read, too
      const Reference done(PyObject_CallFunctionObjArgs(torch.read, items(first, most).get(), nullptr));
      current = outer;
      if (!done) return false;
    }
    return fits_ && taken_ == size();
  }
  // The op `read` where a tensor has torch's negative bit, or is a ZeroTensor: takes none, so that `taken_` is too low.
  static void refuse(StableIValue* stack, uint64_t, uint64_t) {
    torch_abi::take_list(*stack, [](const torch_abi::Tensor&) {});
  }
  static void take(StableIValue* stack, uint64_t, uint64_t);

 private:
  struct Range {
    View* views;
    Column* column;
    size_t count;
  };
  static inline thread_local Reader* current = nullptr;
  Reference list_{PyList_New(0)};
  std::vector<Range> ranges_;
  size_t range_ = 0, next_ = 0;  // where the next tensor's view goes
  Py_ssize_t taken_ = 0;
  bool fits_ = true;
};

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

inline Reference grad_of(PyObject* param) { return Reference(torch.get_grad(torch.grad, param, nullptr)); }

// Over the ranks. Mostly it is one object. Null is an error of Python's.
inline bool same_layout(const Reference& spec, const Reference& other) {
  if (!spec || !other) return false;
  return spec == other || PyObject_RichCompareBool(spec.get(), other.get(), Py_EQ) == 1;
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

// --- columns

// Whether a plan runs; kError: with an exception set.
enum Code { kError = -1, kRuns, kDiffers };
inline Code differs() {
  return PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception) ? kError : (PyErr_Clear(), kDiffers);
}

// How to find the tensors again. kList: this list. kGrads: `.grad` of these parameters. kEntries: dict[key] of these
// dicts, looked up anew because state_dict or offload may replace entries.
enum class From { kList, kGrads, kEntries };

struct Column {
  From from;
  PyObject *owners, *key;  // the tensors, the parameters, or the dicts, and the key of the entry
  bool is_written = false, is_sharded = false;
  Views views{};                    // as they were in the last run; of DTensors those of this rank's parts
  std::vector<uint64_t> layouts{};  // layout_number of each
  std::vector<Reference> specs{};   // of DTensors, null for others
  // Of this run: where the reader has its tensors, whether the caller keeps gradients that parameters lose, so that no
  // other code may write to their memory, and the DTensors that the tensors are parts of.
  Py_ssize_t first = 0;
  bool is_kept = false;
  Reference whole{};

  bool is_grads() const { return from == From::kGrads; }
  size_t size() const { return views.size(); }

  // Whether a tensor is as the last run's, except for a gradient's address.
  bool fits(const View& former, const View& view, size_t i) const {
    return view.numel == former.numel && view.dtype == former.dtype && view.device == former.device &&
           layout_number(view) == layouts[i] &&
           (is_grads() ? !is_kept || view.fills_storage : view.data == former.data);
  }
  // Takes this rank's part of a DTensor. False where it is none, or a gradient that is laid out otherwise over the
  // ranks.
  bool take_part(size_t i, PyObject* tensor, Reference& part) {
    if (!tensor || !::ampctx::python::is_sharded(tensor)) return false;
    if (is_grads() && !same_layout(spec_of(tensor), specs[i])) return false;
    part = part_of(tensor);
    return part && (!is_written || PyList_Append(whole.get(), tensor) == 0);
  }
};

inline void Reader::take(StableIValue* stack, uint64_t, uint64_t) {
  Reader* const reader = current;
  // torch gives up the GIL for an op, and takes it for each tensor that it lets go.
  const HeldGil held;
  torch_abi::take_list(*stack, [reader](const torch_abi::Tensor& tensor) {
    if (!reader) return;  // the program has called the op
    while (reader->next_ == reader->ranges_[reader->range_].count) ++reader->range_, reader->next_ = 0;
    const Range& range = reader->ranges_[reader->range_];
    View& view = range.views[reader->next_++];
    try {
      const View now = view_of(tensor, true);
      reader->fits_ &= is_readable(now) && (!range.column || range.column->fits(view, now, reader->next_ - 1));
      view = now;
    } catch (const std::exception&) {  // a nested tensor has no sizes
      reader->fits_ = false;
    }
    ++reader->taken_;
  });
}

// Adds the tensors of a column. `given`: a list in place of gradients in `.grad`, or null.
inline Code collect(Reader& reader, Column& column, PyObject* given, bool takes) {
  column.first = reader.size(), column.is_kept = takes && !column.is_written;
  reader.put_into(column.views.data(), &column);
  if (given && (column.is_sharded || PyList_Size(given) != static_cast<Py_ssize_t>(column.size()))) return differs();
  if (column.is_sharded) column.whole.reset(PyList_New(0));
  for (size_t i = 0; i < column.size(); ++i) {
    PyObject* tensor = PyList_GetItem(given ? given : column.owners, i);
    Reference grad, part;
    if (tensor && !given && column.is_grads()) {
      grad = grad_of(tensor);
      tensor = grad.get();
    } else if (tensor && column.from == From::kEntries) {
      tensor = PyDict_GetItemWithError(tensor, column.key);
    }
    if (column.is_sharded && column.specs[i]) {
      if (!column.take_part(i, tensor, part)) return differs();
      tensor = part.get();
    }
    if (!reader.add(tensor)) return differs();
  }
  return kRuns;
}

// --- what the module is given

// use_python(the op read, Tensor.grad, Tensor._version, increment_version, types, DisableTorchFunctionSubclass, the
// method data_ptr of a tensor): whether there will be plans.
inline PyObject* use_python(PyObject*, PyObject* given) {
  PyObject* data_ptr;
  Torch found;
  if (!PyArg_ParseTuple(given, "OOOOOOO", &found.read, &found.grad, &found.version, &found.increment_version,
                        &found.types, &found.plain_getters, &data_ptr)) {
    return nullptr;
  }
  if (PyCFunction_GetFlags(data_ptr) == METH_NOARGS) found.data_ptr = PyCFunction_GetFunction(data_ptr);
  if (PyErr_Occurred()) return nullptr;
  const auto slot = [](PyObject* descriptor, int number) { return PyType_GetSlot(Py_TYPE(descriptor), number); };
  found.get_grad = reinterpret_cast<descrgetfunc>(slot(found.grad, Py_tp_descr_get));
  found.set_grad = reinterpret_cast<descrsetfunc>(slot(found.grad, Py_tp_descr_set));
  found.get_version = reinterpret_cast<descrgetfunc>(slot(found.version, Py_tp_descr_get));
  found.params = PyUnicode_InternFromString("params");
  const bool fits = found.get_grad && found.set_grad && found.get_version && found.data_ptr;
  for (PyObject* object :
       {found.read, found.grad, found.version, found.increment_version, found.types, found.plain_getters}) {
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

}  // namespace ampctx::python
