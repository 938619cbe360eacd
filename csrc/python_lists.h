// Reads lists of Python's tensors for one op call: where they lie, without a way through torch's dispatcher, which
// makes objects of each.
//
// Taken are lists of one device and dtype whose tensors are plain ones, of the types that use_types() was given, whose
// elements each fill one block of memory, and whose values are those in that memory. Anything else is not read: the
// caller goes through the dispatcher then, and an op says what is wrong with a tensor. What was read holds until
// somebody changes a tensor; ops are called at once with it, and somebody keeps the tensors until they return.
//
// The functions that read give 1, or 0 for what is not read, or -1 with an exception set. Reading may run Python code,
// of a property `grad` say, and that may change the lists.
#pragma once

#include "check.h"
#include "python_abi.h"

namespace ampctx::python_lists {

struct PlainType {
  PyObject* type;
  bool stores_grad;  // `.grad` is torch's own attribute, no property of the type
};

// All objects are kept for good.
struct Python {
  const python_abi::DLPackExchange* exchange = nullptr;
  std::vector<PlainType> types;
  PyObject *none = nullptr, *grad = nullptr, *params = nullptr;
  // torch's attributes of each tensor, and how to read and write them without looking them up.
  PyObject *stored_grad = nullptr, *version = nullptr;
  python_abi::DescriptorGet get_grad = nullptr, get_version = nullptr;
  python_abi::DescriptorSet set_grad = nullptr;
};

inline Python& python() {
  static Python found;
  return found;
}

inline void* slot_of(PyObject* object, int slot) {
  const python_abi::Reference type(PyObject_Type(object));
  return PyType_GetSlot(reinterpret_cast<_typeobject*>(type.get()), slot);
}

// Given type(tensor).__dlpack_c_exchange_api__ and the list [None, Tensor.grad, Tensor._version]. 0, or a code that
// says why nothing will be read.
inline int use_python(PyObject* exchange, PyObject* objects) {
  Python& found = python();
  const auto* api =
      static_cast<const python_abi::DLPackExchange*>(PyCapsule_GetPointer(exchange, python_abi::kExchangeCapsule));
  if (!api) return 1;
  if (api->header.major != 1 || !api->view) return 2;
  for (PyObject** object : {&found.none, &found.stored_grad, &found.version}) {
    *object = PyList_GetItem(objects, object == &found.none ? 0 : object == &found.stored_grad ? 1 : 2);
    if (!*object) return 3;
    Py_IncRef(*object);
  }
  found.grad = PyUnicode_InternFromString("grad");
  found.params = PyUnicode_InternFromString("params");
  if (!found.grad || !found.params) return 3;
  using namespace python_abi;
  found.get_grad = reinterpret_cast<DescriptorGet>(slot_of(found.stored_grad, kDescriptorGet));
  found.set_grad = reinterpret_cast<DescriptorSet>(slot_of(found.stored_grad, kDescriptorSet));
  found.get_version = reinterpret_cast<DescriptorGet>(slot_of(found.version, kDescriptorGet));
  if (!found.get_grad || !found.set_grad || !found.get_version) return 4;
  found.exchange = api;
  return 0;
}

// Looks at a parameter with a gradient and at a tensor without autograd's part, and allows hints if torch has their
// parts where hints look. `numbers`: addresses as for prefetch::has_layout, two of parameters without a gradient, and
// one of a negation; the dispatch keys of the parameter, of the tensor without autograd's part and of the negation; and
// the bits of keys of what is not resolved. `version`: of the tensor without autograd's part. 1 if so.
inline int use_hints(PyObject* param, PyObject* numbers, int64_t version) {
  constexpr ptrdiff_t addresses = 7, keys = 3;
  const void* found[addresses];
  uint64_t bits[keys + 1];
  for (ptrdiff_t i = 0; i < addresses + keys + 1; ++i) {
    PyObject* const number = PyList_GetItem(numbers, i);
    if (!number) return -1;
    const long long value = PyLong_AsLongLong(number);
    if (PyErr_Occurred()) return -1;
    if (i < addresses) {
      found[i] = reinterpret_cast<const void*>(value);
    } else {
      bits[i - addresses] = static_cast<uint64_t>(value);
    }
  }
  const python_abi::Reference type(PyObject_Type(param));
  const void* const with_keys[] = {found[0], found[1], found[6]};
  prefetch::is_known_layout() = prefetch::has_layout(param, type.get(), found[0], found[1], found[2], found[3]) &&
                                prefetch::has_keys(with_keys, bits, bits[keys]);
  if (prefetch::is_known_layout()) {
    const void* const none = prefetch::grad_of(found[4]);
    if (none != found[2] && none == prefetch::grad_of(found[5])) prefetch::no_gradient() = none;
    prefetch::knows_versions() = prefetch::has_version(found[1], version) && prefetch::has_version(found[0], 0);
  }
  return prefetch::is_known_layout();
}

// Adds types whose tensors are read. 0, or -1 with an exception set.
inline int use_types(PyObject* types) {
  for (ptrdiff_t i = 0; i < PyList_Size(types); ++i) {
    PyObject* const type = PyList_GetItem(types, i);
    const python_abi::Reference grad(PyObject_GetAttr(type, python().grad));
    if (!grad.get()) return -1;
    Py_IncRef(type);
    python().types.push_back({type, grad.get() == python().stored_grad});
  }
  return 0;
}

// Null for a type that was not given.
inline const PlainType* plain_type(PyObject* tensor) {
  const bool is_known = prefetch::is_known_layout();
  const python_abi::Reference asked(is_known ? nullptr : PyObject_Type(tensor));
  const void* const type = is_known ? prefetch::type_of(tensor) : asked.get();
  for (const PlainType& known : python().types) {
    if (known.type == type) return &known;
  }
  return nullptr;
}

// What a pass over a list of tensors will look at.
enum class Look { kGrad, kGradMemory, kVersion, kMemory };

// The TensorImpl of an item, null for what is no plain tensor. For hints alone: Python 3.10 to 3.14 have the type
// there, and torch the TensorImpl.
AMPCTX_HINT const void* impl_at(PyObject* list, ptrdiff_t index, ptrdiff_t count) {
  if (!prefetch::is_known_layout() || index >= count) return nullptr;
  PyObject* const item = PyList_GetItem(list, index);
  if (!item) return PyErr_Clear(), nullptr;  // Python code has made the list shorter
  return plain_type(item) ? prefetch::pointer_at(item, 16) : nullptr;
}

template <Look look>
AMPCTX_HINT void prefetch_ahead(PyObject* list, ptrdiff_t i, ptrdiff_t count) {
  using prefetch::kStages;
  if (i + kStages[0] < count) {
    if (PyObject* const item = PyList_GetItem(list, i + kStages[0])) {
      prefetch::at(item, 0);
    } else {
      PyErr_Clear();
    }
  }
  if (const void* impl = impl_at(list, i + kStages[1], count)) {
    if (look == Look::kMemory) prefetch::tensor(impl), prefetch::sizes(impl);
    if (look == Look::kVersion) prefetch::at(impl, 40);
    if (look == Look::kGrad || look == Look::kGradMemory) prefetch::at(impl, 24);
  }
  if (const void* impl = impl_at(list, i + kStages[2], count)) {
    if (look == Look::kMemory) prefetch::storage(impl);
    if (look == Look::kVersion) prefetch::version(impl);
    if (look == Look::kGrad || look == Look::kGradMemory) prefetch::autograd(impl);
  }
  if (look != Look::kGradMemory) return;
  if (const void* impl = impl_at(list, i + kStages[3], count)) {
    if (const void* grad = prefetch::grad_of(impl)) prefetch::tensor(grad), prefetch::sizes(grad);
  }
  if (const void* impl = impl_at(list, i + kStages[4], count)) {
    if (const void* grad = prefetch::grad_of(impl)) prefetch::storage(grad), prefetch::object(grad);
  }
}

// `.grad`, a new reference. Null with an exception set.
inline PyObject* grad_of(PyObject* tensor) {
  const PlainType* const type = plain_type(tensor);
  return type && type->stores_grad ? python().get_grad(python().stored_grad, tensor, type->type)
                                   : PyObject_GetAttr(tensor, python().grad);
}

// Whether `.grad` is None, without asking torch. `stored`: torch's own attribute, also of a type with a property
// `grad`. False if that is not known.
inline bool is_without_grad(PyObject* tensor, bool stored) {
  const PlainType* const type = prefetch::no_gradient() ? plain_type(tensor) : nullptr;
  return type && (stored || type->stores_grad) && prefetch::is_without_grad(prefetch::pointer_at(tensor, 16));
}

// The version of a tensor of the types that are read. Null if that is not known.
inline prefetch::Version* version_of(PyObject* tensor) {
  const bool known = prefetch::knows_versions() && plain_type(tensor);
  return known ? prefetch::version_of(prefetch::pointer_at(tensor, 16)) : nullptr;
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
  if (dtype.code == kDLInt && dtype.bits == 8) return code = aoti_torch_dtype_int8(), true;
  if (dtype.code == kDLUInt && dtype.bits == 8) return code = aoti_torch_dtype_uint8(), true;
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

// Whether a tensor of the types that are read has its values in its memory, which DLPack does not tell. False if that
// is not known.
inline bool is_resolved(PyObject* tensor) {
  return prefetch::is_known_layout() && prefetch::is_resolved(prefetch::pointer_at(tensor, 16));
}

// A freed storage has the address null, and a view into it null and an offset, which is small.
inline bool may_be_freed(const void* data) { return reinterpret_cast<uintptr_t>(data) < (uintptr_t{1} << 32); }

// Whether the elements lie within the tensor's storage, which DLPack does not tell. With a known layout of objects.
inline bool has_memory(PyObject* tensor, int64_t elements, int64_t element_bytes) {
  const auto handle = static_cast<AtenTensorHandle>(prefetch::handle_of(tensor));
  int64_t offset, bytes;
  return aoti_torch_get_storage_offset(handle, &offset) == 0 && aoti_torch_get_storage_size(handle, &bytes) == 0 &&
         (offset + elements) * element_bytes <= bytes;
}

// Adds tensors to a list as long as they can be read and agree.
class Reader {
 public:
  explicit Reader(size_t count) { list_.tensors.reserve(count); }

  bool add(PyObject* tensor) {
    if (!plain_type(tensor) || !is_resolved(tensor)) return false;
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
      const int64_t bytes = found.dtype.bits / 8;
      if (may_be_freed(entry.data)) return false;
      if (!has_memory(tensor, entry.numel, bytes)) return false;
    }
    list_.tensors.push_back(entry);
    return true;
  }

  const ReadList& list() const { return list_; }
  void put(int64_t number) { known_lists().put(number, std::move(list_)); }

 private:
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
    prefetch_ahead<Look::kMemory>(tensors, i, count);
    const auto tensor = python_abi::Reference::to_borrowed(PyList_GetItem(tensors, i));
    if (!tensor.get()) return type_error("read: tensors became shorter while it was read");
    if (!reader.add(tensor.get())) return not_read();
  }
  reader.put(number);
  return 1;
}

// Reads dicts[i][key] for each dict, and puts what it finds into `found`, which keeps it. 0 too where a key is missing.
inline int read_entries(PyObject* dicts, PyObject* key, PyObject* found, int64_t number) {
  const ptrdiff_t count = PyList_Size(dicts);
  if (count < 0 || PyList_Size(found) != 0) return type_error("read_entries: dicts is no list, or found no empty one");
  if (!python().exchange || count == 0) return 0;
  Reader reader(count);
  for (ptrdiff_t i = 0; i < count; ++i) {
    const auto dict = python_abi::Reference::to_borrowed(PyList_GetItem(dicts, i));
    PyObject* const entry = dict.get() ? PyDict_GetItemWithError(dict.get(), key) : nullptr;
    if (!entry) return PyErr_Clear(), 0;  // no such key, or no dict
    if (PyList_Append(found, entry) != 0) return -1;
    if (!reader.add(entry)) return not_read();
  }
  reader.put(number);
  return 1;
}

// Puts the `.grad` of each parameter into an empty list. 1 where all are there and of types that are read, else 0.
inline int collect_grads(PyObject* params, PyObject* grads) {
  const ptrdiff_t count = PyList_Size(params);
  if (count < 0 || PyList_Size(grads) != 0)
    return type_error("collect_grads: params is no list, or grads no empty one");
  bool are_plain = true;
  for (ptrdiff_t i = 0; i < count; ++i) {
    prefetch_ahead<Look::kGradMemory>(params, i, count);
    const auto param = python_abi::Reference::to_borrowed(PyList_GetItem(params, i));
    if (!param.get()) return type_error("collect_grads: params became shorter while it was read");
    const python_abi::Reference grad(grad_of(param.get()));
    if (!grad.get() || PyList_Append(grads, grad.get()) != 0) return -1;
    are_plain = are_plain && plain_type(grad.get());
  }
  return are_plain;
}

// Reads the gradients of parameters: those in `grads`, which has one for each of them or is empty. Empty, it gets the
// `.grad` of each, None too, in any case, and those that are there are read. `every`: only where all are there. 2 where
// one is missing.
inline int read_grads(PyObject* params, PyObject* grads, bool every, int64_t number) {
  using python_abi::Reference;
  constexpr const char* changed = "read_grads: a list changed its length while it was read";
  const ptrdiff_t count = PyList_Size(params), given = count < 0 ? -1 : PyList_Size(grads);
  if (given < 0) return type_error("read_grads: params or grads is no list");
  if (given > 0 && given != count) return 0;
  Reader of_grads(count);
  bool can_be_read = python().exchange != nullptr, are_there = true;
  for (ptrdiff_t i = 0; i < count; ++i) {
    given ? prefetch_ahead<Look::kMemory>(grads, i, count) : prefetch_ahead<Look::kGradMemory>(params, i, count);
    const Reference param = Reference::to_borrowed(PyList_GetItem(params, i));
    if (!param.get()) return type_error(changed);
    // The list keeps a gradient that it gets.
    const Reference grad = given ? Reference::to_borrowed(PyList_GetItem(grads, i)) : Reference(grad_of(param.get()));
    if (!grad.get()) return given ? type_error(changed) : -1;
    if (!given && PyList_Append(grads, grad.get()) != 0) return -1;
    if (!can_be_read) continue;
    if (grad.get() == python().none) {
      can_be_read = !every;
      are_there = false;
    } else {
      can_be_read = of_grads.add(grad.get());
      if (!can_be_read && PyErr_Occurred()) return -1;
    }
  }
  if (PyList_Size(params) != count || PyList_Size(grads) != count) return type_error(changed);
  if (!can_be_read || of_grads.list().tensors.empty()) return 0;
  of_grads.put(number);
  return are_there ? 1 : 2;
}

// Whether all tensors of a known list are contiguous.
inline bool are_contiguous(int64_t number) {
  const KnownListPointer list = known_lists().find(number);
  if (!list) return false;
  const ListView tensors = view(*list);
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors.prefetch_ahead(i, tensors.size());
    if (!tensors.is_contiguous(i)) return false;
  }
  return true;
}

// Whether element k in memory of each gradient is element k in memory of its parameter, on the same device, and the
// parameters are of one dtype, with their values in memory. Both lists are known.
inline bool lie_alike(int64_t of_grads, int64_t of_params) {
  const KnownListPointer first = known_lists().find(of_grads), second = known_lists().find(of_params);
  if (!first || !second) return false;
  const ListView grads = view(*first), params = view(*second);
  if (grads.size() != params.size()) return false;
  for (size_t i = 0; i < grads.size(); ++i) {
    grads.prefetch_ahead(i, grads.size());
    params.prefetch_ahead(i, params.size());
    if (!params.is_strided(i) || params.dtype(i) != params.dtype(0) || params.device(i) != grads.device(i))
      return false;
    if (!params.is_resolved(i) || !grads.is_resolved(i)) return false;
    if (params.numel(i) != grads.numel(i)) return false;
    if (params.is_contiguous(i) && grads.is_contiguous(i)) continue;
    if (!same_strides(grads.layout(i), params.layout(i))) return false;
  }
  return true;
}

// read_grads() of parameters that a held list has, all of them, where they lie_alike(). 2 where they are contiguous.
inline int read_along(PyObject* params, PyObject* grads, int64_t number, int64_t of_params) {
  if (const int read = read_grads(params, grads, true, number); read != 1) return read;
  if (!lie_alike(number, of_params)) return 0;
  return are_contiguous(number) ? 2 : 1;
}

// Whether one op call can take a held list: of one dtype and device, each tensor dense and with memory. Its tensors
// were plain ones.
inline bool is_uniform(int64_t number, bool fill_storages) {
  const KnownListPointer list = known_lists().find(number);
  const auto* tensors = list ? std::get_if<torch_abi::TensorList>(list.get()) : nullptr;
  if (!tensors || tensors->empty()) return false;
  const torch_abi::Device device = (*tensors)[0].device();
  const int32_t code = (*tensors)[0].dtype();
  DType dtype;
  if (!to_dtype(code, dtype)) return false;
  const ListView all = view(*list);
  for (size_t i = 0; i < tensors->size(); ++i) {
    const torch_abi::Tensor& tensor = (*tensors)[i];
    all.prefetch_ahead(i, tensors->size());
    if (!tensor.is_strided() || tensor.dtype() != code || tensor.device() != device) return false;
    const int64_t numel = tensor.numel(), bytes = element_size(dtype);
    if (fill_storages ? numel * bytes != tensor.storage_bytes() : !tensor.has_memory(numel, bytes)) return false;
    if (numel > 0 && !tensor.is_contiguous() && !is_dense(tensor.layout_in_memory())) return false;
  }
  return true;
}

// Whether no two tensors of the known lists begin at one place. Those without elements begin nowhere.
inline bool are_apart(PyObject* numbers) {
  std::vector<KnownListPointer> lists;
  size_t all = 0, size = 64;
  for (ptrdiff_t i = 0; i < PyList_Size(numbers); ++i) {
    lists.push_back(known_lists().find(PyLong_AsLongLong(PyList_GetItem(numbers, i))));
    if (!lists.back()) return false;
    all += view(*lists.back()).size();
  }
  // A table of places is faster than sorting them.
  while (size < 2 * all) size *= 2;
  std::vector<uintptr_t> table(size);
  for (const KnownListPointer& list : lists) {
    const ListView tensors = view(*list);
    for (size_t k = 0; k < tensors.size(); ++k) {
      tensors.prefetch_ahead(k, tensors.size());
      if (tensors.numel(k) == 0) continue;
      const auto place = reinterpret_cast<uintptr_t>(tensors.data(k, false));
      size_t at = (place * 0x9e3779b97f4a7c15ull >> 32) & (size - 1);
      for (; table[at] != 0; at = (at + 1) & (size - 1)) {
        if (table[at] == place) return false;
      }
      table[at] = place;
    }
  }
  return true;
}

}  // namespace ampctx::python_lists
