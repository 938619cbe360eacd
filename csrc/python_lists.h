// Reads lists of Python's tensors for one op call: where they lie, without a way through torch's dispatcher, which
// makes objects of each.
//
// Taken are lists of one device and dtype whose tensors are plain ones, of the types that use() was given, and whose
// elements each fill one block of memory. Anything else is not read: the caller goes through the dispatcher then, and
// an op says what is wrong with a tensor. What was read holds until somebody changes a tensor; ops are called at once
// with it, and somebody keeps the tensors until they return.
//
// The functions that read give 1, or 0 for what is not read, or -1 with an exception set. Reading may run Python code,
// of a property `grad` say, and that may change the lists.
#pragma once

#include "check.h"
#include "python_abi.h"

namespace ampctx::python_lists {

struct Python {
  const python_abi::DLPackExchange* exchange = nullptr;
  std::vector<PyObject*> types;  // kept for good
  PyObject* grad = nullptr;
  PyObject* is_neg = nullptr;
  PyObject* none = nullptr;
};

inline Python& python() {
  static Python found;
  return found;
}

// Given type(tensor).__dlpack_c_exchange_api__, and a list of None and the types whose tensors are read. 0, or a code
// that says why nothing will be read.
inline int use(PyObject* exchange, PyObject* types) {
  Python& found = python();
  const auto* api =
      static_cast<const python_abi::DLPackExchange*>(PyCapsule_GetPointer(exchange, python_abi::kExchangeCapsule));
  if (!api) return 1;
  if (api->header.major != 1 || !api->view) return 2;
  for (ptrdiff_t i = 0; i < PyList_Size(types); ++i) {
    PyObject* type = PyList_GetItem(types, i);
    Py_IncRef(type);
    if (i == 0) {
      found.none = type;
    } else {
      found.types.push_back(type);
    }
  }
  found.grad = PyUnicode_InternFromString("grad");
  found.is_neg = PyUnicode_InternFromString("is_neg");
  if (!found.grad || !found.is_neg) return 3;
  found.exchange = api;
  return 0;
}

inline constexpr const char* kOwner = "ampctx list";

// The number of a list that is to come, and a capsule that lets the list go: in C, because Python code that runs where
// an object dies swallows an interrupt that comes then.
inline PyObject* new_list() {
  const int64_t number = known_lists().new_number();
  const python_abi::Reference owner(PyCapsule_New(reinterpret_cast<void*>(number), kOwner, [](PyObject* capsule) {
    known_lists().release(reinterpret_cast<int64_t>(PyCapsule_GetPointer(capsule, kOwner)));
  }));
  const python_abi::Reference as_python(PyLong_FromLongLong(number));
  return owner.get() && as_python.get() ? PyTuple_Pack(2, as_python.get(), owner.get()) : nullptr;
}

inline bool to_torch(python_abi::DLDataType dtype, int32_t& code) {
  using namespace python_abi;
  if (dtype.lanes != 1) return false;
  if (dtype.code == kDLFloat && dtype.bits == 32) return code = aoti_torch_dtype_float32(), true;
  if (dtype.code == kDLFloat && dtype.bits == 16) return code = aoti_torch_dtype_float16(), true;
  if (dtype.code == kDLBfloat && dtype.bits == 16) return code = aoti_torch_dtype_bfloat16(), true;
  if (dtype.code == kDLFloat && dtype.bits == 64) return code = aoti_torch_dtype_float64(), true;
  if (dtype.code == kDLInt && dtype.bits == 16) return code = aoti_torch_dtype_int16(), true;
  return false;
}

inline bool to_torch(python_abi::DLDevice device, torch_abi::Device& found) {
  if (device.type == python_abi::kDLCPU) return found = torch_abi::Device::cpu(), true;
  if (device.type == python_abi::kDLCUDA) return found = {aoti_torch_device_type_cuda(), device.index}, true;
  return false;
}

inline bool is_contiguous(const torch_abi::Layout& layout) {
  int64_t expected = 1;
  for (int64_t d = layout.dim - 1; d >= 0; --d) {
    if (layout.sizes[d] == 1) continue;
    if (layout.strides[d] != expected) return false;
    expected *= layout.sizes[d];
  }
  return true;
}

// Whether a tensor may be one that torch reads as the negative of what lies in memory, which DLPack does not tell. Such
// views come from imaginary parts, whose elements lie two apart: of those that fill a block, one of one element alone.
// True with an exception set where a mode of torch's that looks on raises.
inline bool may_be_negated(PyObject* tensor, int64_t numel) {
  if (numel != 1) return false;
  const python_abi::Reference answer(PyObject_CallMethodObjArgs(tensor, python().is_neg, nullptr));
  return !answer.get() || PyObject_IsTrue(answer.get()) != 0;
}

// A freed storage has the address null, and a view into it null and an offset, which is small.
inline bool may_be_freed(const void* data) { return reinterpret_cast<uintptr_t>(data) < (uintptr_t{1} << 32); }

// Adds tensors to a list as long as they can be read and agree.
class Reader {
 public:
  explicit Reader(size_t count) { list_.tensors.reserve(count); }

  // False, with an exception set where Python code has raised.
  bool add(PyObject* tensor) {
    if (!is_plain(tensor)) return false;
    python_abi::DLTensor found;
    if (python().exchange->view(tensor, &found) != 0) {
      PyErr_Clear();  // of another layout than strided, of another device than those of the exchange
      return false;
    }
    int32_t dtype;
    torch_abi::Device device;
    if (!to_torch(found.dtype, dtype) || !to_torch(found.device, device)) return false;
    if (list_.tensors.empty()) {
      list_.dtype = dtype;
      list_.device = device;
    } else if (dtype != list_.dtype || device != list_.device) {
      return false;
    }
    ReadList::Entry entry{
        static_cast<char*>(found.data) + found.byte_offset, 1, {found.dim, found.sizes, found.strides}, true};
    for (int32_t d = 0; d < found.dim; ++d) entry.numel *= found.sizes[d];
    if (entry.numel > 0) {
      entry.is_contiguous = is_contiguous(entry.layout);
      if (!entry.is_contiguous && !is_dense(entry.layout)) return false;
      if (may_be_freed(entry.data) || may_be_negated(tensor, entry.numel)) return false;
    }
    list_.tensors.push_back(entry);
    return true;
  }

  const ReadList& list() const { return list_; }
  const ReadList::Entry& last() const { return list_.tensors.back(); }
  void put(int64_t number) { known_lists().put(number, std::move(list_)); }

 private:
  static bool is_plain(PyObject* tensor) {
    const python_abi::Reference type(PyObject_Type(tensor));
    const std::vector<PyObject*>& types = python().types;
    return std::find(types.begin(), types.end(), type.get()) != types.end();
  }

  ReadList list_{};
};

inline int type_error(const char* message) {
  PyErr_SetString(PyExc_TypeError, message);
  return -1;
}

inline int not_read() { return PyErr_Occurred() ? -1 : 0; }

inline int read_tensors(PyObject* tensors, int64_t number) {
  const ptrdiff_t count = PyList_Size(tensors);
  if (count < 0) return type_error("read: tensors is no list");
  if (!python().exchange || count == 0) return 0;
  Reader reader(count);
  for (ptrdiff_t i = 0; i < count; ++i) {
    const auto tensor = python_abi::Reference::to_borrowed(PyList_GetItem(tensors, i));
    if (!tensor.get()) return type_error("read: tensors became shorter while it was read");
    if (!reader.add(tensor.get())) return not_read();
  }
  reader.put(number);
  return 1;
}

// Whether element k in memory of a gradient is element k in memory of its parameter.
inline bool lie_alike(const ReadList::Entry& grad, const ReadList::Entry& param) {
  if (grad.numel != param.numel) return false;
  return (grad.is_contiguous && param.is_contiguous) || same_strides(grad.layout, param.layout);
}

// Reads the gradients of parameters: those in `grads`, which has one for each of them or is empty. Empty, it gets the
// `.grad` of each, None too, in any case, and those that are there are read. `with_params`: only where all are there,
// and where parameters are of one dtype, on the device of the gradients and each laid out as its gradient.
inline int read_grads(PyObject* params, PyObject* grads, bool with_params, int64_t number) {
  using python_abi::Reference;
  constexpr const char* changed = "read_grads: a list changed its length while it was read";
  const ptrdiff_t count = PyList_Size(params), given = count < 0 ? -1 : PyList_Size(grads);
  if (given < 0) return type_error("read_grads: params or grads is no list");
  if (given > 0 && given != count) return 0;
  Reader of_grads(count), of_params(count);
  bool can_be_read = python().exchange != nullptr;
  for (ptrdiff_t i = 0; i < count; ++i) {
    const Reference param = Reference::to_borrowed(PyList_GetItem(params, i));
    if (!param.get()) return type_error(changed);
    // The list keeps a gradient that it gets.
    const Reference grad = given ? Reference::to_borrowed(PyList_GetItem(grads, i))
                                 : Reference(PyObject_GetAttr(param.get(), python().grad));
    if (!grad.get()) return given ? type_error(changed) : -1;
    if (!given && PyList_Append(grads, grad.get()) != 0) return -1;
    if (!can_be_read) continue;
    if (grad.get() == python().none) {
      can_be_read = !with_params;
    } else {
      can_be_read = of_grads.add(grad.get());
      // At once: the code of a later gradient may let this parameter go.
      if (can_be_read && with_params) {
        can_be_read = of_params.add(param.get()) && of_grads.list().device == of_params.list().device &&
                      lie_alike(of_grads.last(), of_params.last());
      }
      if (!can_be_read && PyErr_Occurred()) return -1;
    }
  }
  if (PyList_Size(params) != count || PyList_Size(grads) != count) return type_error(changed);
  if (!can_be_read || of_grads.list().tensors.empty()) return 0;
  of_grads.put(number);
  return 1;
}

// Whether all tensors of a list that was read are contiguous.
inline bool is_contiguous(int64_t number) {
  const KnownListPointer list = known_lists().find(number);
  const ReadList* read = list ? std::get_if<ReadList>(list.get()) : nullptr;
  if (!read) return false;
  return std::all_of(read->tensors.begin(), read->tensors.end(), [](const auto& entry) { return entry.is_contiguous; });
}

// Whether no two tensors of the lists that were read begin at one place. Those without elements begin nowhere.
inline bool are_apart(const int64_t* numbers, int64_t count) {
  std::vector<const void*> places;
  for (int64_t i = 0; i < count; ++i) {
    const KnownListPointer list = known_lists().find(numbers[i]);
    const ReadList* read = list ? std::get_if<ReadList>(list.get()) : nullptr;
    if (!read) return false;
    for (const ReadList::Entry& entry : read->tensors) {
      if (entry.numel > 0) places.push_back(entry.data);
    }
  }
  std::sort(places.begin(), places.end());
  return std::adjacent_find(places.begin(), places.end()) == places.end();
}

}  // namespace ampctx::python_lists
