// Tensors as Python objects: what they are now, read without torch's dispatcher.
//
// `read` asks a tensor, each time, all that plain code asks: through torch's DLPack exchange, and what that does not
// tell by methods of Tensor. Gradients come from the descriptor Tensor.grad. The functions hold the GIL.
#pragma once

#include <cstring>
#include <memory>

#include "arguments.h"

namespace ampctx::python {

using python_abi::Reference;

// Set once by use_python(). If it returns False, Python must not call anything else in this file.
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

// Reads a list of tensors. False where one is not plain; an exception may be set.
inline bool read_list(PyObject* tensors, Views& views) {
  const Py_ssize_t count = PySequence_Size(tensors);
  if (count < 0) return false;
  views.resize(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Reference tensor(PySequence_GetItem(tensors, i));
    if (!tensor || !read(tensor.get(), views[i])) return false;
  }
  return true;
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

// What a plan remembers of a tensor besides its view.
struct PrefetchHints {
  uint64_t layout;               // layout_number
  const void *object, *storage;  // Addresses to prefetch. Never read.
  Reference spec;                // of a DTensor
};

// How to find the tensors again. kList: this list. kGrads: `.grad` of these parameters. kEntries: dict[key] of these
// dicts, looked up anew because state_dict or offload may replace entries.
enum class From { kList, kGrads, kEntries };

struct Column {
  From from;
  PyObject *owners, *key;  // the tensors, the parameters, or the dicts, and the key of the entry
  bool is_written = false, is_sharded = false;
  Views views{};  // as they were in the last run; of DTensors those of this rank's parts
  std::vector<PrefetchHints> hints{};
  PyObject* read = nullptr;   // the gradients, entries or parts of this run, kept for it
  PyObject* whole = nullptr;  // the DTensors that these are parts of

  bool is_grads() const { return from == From::kGrads; }
};

// A loop over many small tensors waits for memory most of all.
constexpr Py_ssize_t kAhead = 8;

inline void prefetch_item(PyObject* list, Py_ssize_t i) {
  if (i + kAhead < PyList_Size(list)) __builtin_prefetch(PyList_GetItem(list, i + kAhead));
}

inline const void* storage_of(PyObject* tensor) {
  const Reference storage(PyObject_CallMethod(tensor, "untyped_storage", nullptr));
  const Reference address(storage.get() ? PyObject_GetAttrString(storage.get(), "_cdata") : nullptr);
  const void* const found = address.get() ? PyLong_AsVoidPtr(address.get()) : nullptr;
  return PyErr_Clear(), found;
}

inline void prefetch(const View& view, const PrefetchHints& hints) {
  const auto* const sizes = reinterpret_cast<const char*>(view.layout.sizes);
  const auto* const storage = static_cast<const char*>(hints.storage);
  for (const void* line : {hints.object, static_cast<const void*>(sizes - 64), static_cast<const void*>(sizes),
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
      layout_number(view) != column.hints[i].layout) {
    return kDiffers;
  }
  if (column.is_grads() ? is_kept && !view.fills_storage : view.data != former.data) return kDiffers;
  former = view;
  return kRuns;
}

// Takes this rank's part of a DTensor. False where it is none, or a gradient that is laid out otherwise over the ranks.
inline bool take_part(Column& column, const PrefetchHints& hints, PyObject* whole, Reference& part) {
  if (!whole || !is_sharded(whole)) return false;
  if (column.is_grads() && !same_layout(spec_of(whole), hints.spec)) return false;
  part = part_of(whole);
  return part && (!column.is_written || PyList_Append(column.whole, whole) == 0);
}

inline Code read_column(Column& column, bool takes) {
  const bool is_kept = takes && !column.is_written;
  const size_t count = column.hints.size();
  const bool is_given = column.read != nullptr;
  const bool collects = !is_given && (column.from != From::kList || column.is_sharded);
  if (is_given && column.is_sharded) return kDiffers;
  if (collects && !(column.read = PyList_New(count))) return kError;
  if (column.is_sharded && column.is_written && !(column.whole = PyList_New(0))) return kError;
  for (size_t i = 0; i < count; ++i) {
    PyObject* const list = is_given ? column.read : column.owners;
    prefetch_item(list, i);
    if (i + kAhead < count && !column.is_grads()) prefetch(column.views[i + kAhead], column.hints[i + kAhead]);
    PyObject* tensor = PyList_GetItem(list, i);
    Reference grad, part;
    if (collects && tensor && column.is_grads()) {
      grad = grad_of(tensor);
      tensor = grad.get();
    } else if (collects && tensor && column.from == From::kEntries) {
      tensor = PyDict_GetItemWithError(tensor, column.key);
    }
    if (column.hints[i].spec) {
      if (!take_part(column, column.hints[i], tensor, part)) return PyErr_Clear(), kDiffers;
      tensor = part.get();
    }
    if (const Code code = read_tensor(column, i, tensor, is_kept)) return code;
    if (collects) PyList_SetItem(column.read, i, Py_NewRef(tensor));
  }
  return kRuns;
}

// --- what the module is given

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

}  // namespace ampctx::python
