// Reads lists of Python's tensors for one op call: where they lie, without a way through torch's dispatcher, which
// makes objects of each.
//
// Taken are lists of one device and dtype whose tensors are plain ones, of the types that use() was given, and whose
// elements each fill one block of memory. Anything else is 0, no number of a list: the caller goes through the
// dispatcher then, and an op says what is wrong with a tensor. What was read holds until somebody changes a tensor; ops
// are called at once with it, and somebody keeps the tensors until they return.
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
inline bool may_be_negated(PyObject* tensor, int64_t numel) {
  if (numel != 1) return false;
  const python_abi::Reference answer(PyObject_CallMethodObjArgs(tensor, python().is_neg, nullptr));
  if (!answer.get()) PyErr_Clear();
  return !answer.get() || PyObject_IsTrue(answer.get()) != 0;
}

// A freed storage has the address null, and a view into it null and an offset, which is small.
inline bool may_be_freed(const void* data) { return reinterpret_cast<uintptr_t>(data) < (uintptr_t{1} << 32); }

// Adds tensors to a list as long as they can be read and agree.
class Reader {
 public:
  explicit Reader(size_t count) { list_.tensors.reserve(count); }

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
  int64_t number() { return known_lists().add(std::move(list_)); }

 private:
  static bool is_plain(PyObject* tensor) {
    const python_abi::Reference type(PyObject_Type(tensor));
    const std::vector<PyObject*>& types = python().types;
    return std::find(types.begin(), types.end(), type.get()) != types.end();
  }

  ReadList list_{};
};

// A number for the list, 0 where it cannot be read.
inline int64_t read_tensors(PyObject* tensors) {
  const ptrdiff_t count = PyList_Size(tensors);
  if (!python().exchange || count <= 0) return 0;
  Reader reader(count);
  for (ptrdiff_t i = 0; i < count; ++i) {
    if (!reader.add(PyList_GetItem(tensors, i))) return 0;
  }
  return reader.number();
}

// Reads the gradients of parameters: those in `grads`, which has one for each of them or is empty. Empty, it gets the
// `.grad` of each, None too, in any case, and those that are there are read. `with_params`: only where all are there,
// and where parameters are of one dtype, on the device of the gradients and each laid out as its gradient. -1 with an
// exception set where one of the attributes raises.
inline int64_t read_grads(PyObject* params, PyObject* grads, bool with_params) {
  const ptrdiff_t count = PyList_Size(params);
  const bool are_given = PyList_Size(grads) > 0;
  if (are_given && PyList_Size(grads) != count) return 0;
  Reader of_grads(count), of_params(count);
  bool can_be_read = python().exchange != nullptr;
  for (ptrdiff_t i = 0; i < count; ++i) {
    PyObject *param = PyList_GetItem(params, i), *grad = nullptr;
    if (are_given) {
      grad = PyList_GetItem(grads, i);
    } else {
      const python_abi::Reference found(PyObject_GetAttr(param, python().grad));
      if (!found.get() || PyList_Append(grads, found.get()) != 0) return -1;
      grad = found.get();  // the list keeps it
    }
    if (!can_be_read) continue;
    if (grad == python().none) {
      can_be_read = !with_params;
    } else {
      can_be_read = of_grads.add(grad) && (!with_params || of_params.add(param));
    }
  }
  if (!can_be_read || of_grads.list().tensors.empty()) return 0;
  if (with_params) {
    const ReadList &g = of_grads.list(), &p = of_params.list();
    if (g.device != p.device) return 0;
    for (size_t i = 0; i < g.tensors.size(); ++i) {
      const ReadList::Entry &grad = g.tensors[i], &param = p.tensors[i];
      if (grad.numel != param.numel) return 0;
      if (!(grad.is_contiguous && param.is_contiguous) && !same_strides(grad.layout, param.layout)) return 0;
    }
  }
  return of_grads.number();
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
