// Passes over Python's lists and dicts of tensors, in place of loops of Python: what has to be the same as before, and
// what has to be empty. They run at each block and step, for each parameter.
//
// A function gives 1 for yes, 0 for no, or -1 with an exception set. It gives 0 too for what is no list or dict: the
// caller then looks at it with Python, and says what is wrong. Only `grad` of another type than those of
// python_lists.h, and a key that is no plain string, run Python code.
#pragma once

#include "python_lists.h"

namespace ampctx::python_passes {

using python_abi::Reference;
using python_lists::Look;
using python_lists::python;

// 0, without the exception of what is no list or dict.
inline int no() {
  PyErr_Clear();
  return 0;
}

// Whether two lists hold the same objects, in order.
inline int same_items(PyObject* items, PyObject* others) {
  const ptrdiff_t count = PyList_Size(items);
  if (count < 0 || PyList_Size(others) != count) return no();
  for (ptrdiff_t i = 0; i < count; ++i) {
    if (PyList_GetItem(items, i) != PyList_GetItem(others, i)) return 0;
  }
  return 1;
}

// Whether each param group of an optimizer holds its members, in order. `members`: a list for each group.
inline int same_members(PyObject* groups, PyObject* members) {
  const ptrdiff_t count = PyList_Size(groups);
  if (count < 0 || PyList_Size(members) != count) return no();
  for (ptrdiff_t g = 0; g < count; ++g) {
    PyObject* const group = PyList_GetItem(groups, g);
    PyObject* const params = group ? PyDict_GetItemWithError(group, python().params) : nullptr;
    if (!params || !same_items(params, PyList_GetItem(members, g))) return no();
  }
  return 1;
}

// Whether a dict has these keys and values and no others, in order.
inline int same_mapping(PyObject* dict, PyObject* keys, PyObject* values) {
  const ptrdiff_t count = PyList_Size(keys);
  if (count < 0 || PyList_Size(values) != count || PyDict_Size(dict) != count) return no();
  ptrdiff_t position = 0;
  PyObject *key, *value;
  for (ptrdiff_t i = 0; PyDict_Next(dict, &position, &key, &value); ++i) {
    if (key != PyList_GetItem(keys, i) || value != PyList_GetItem(values, i)) return 0;
  }
  return 1;
}

// Hints for the dicts of a list: their objects, and the keys that Python 3.10 to 3.14 have there.
AMPCTX_HINT void prefetch_dict(PyObject* dicts, ptrdiff_t i, ptrdiff_t count) {
  using prefetch::kStages;
  if (i + kStages[1] < count) prefetch::at(PyList_GetItem(dicts, i + kStages[1]), 32);
  if (i + kStages[2] >= count) return;
  const void* const keys = prefetch::pointer_at(PyList_GetItem(dicts, i + kStages[2]), 32);
  prefetch::at(keys, 0), prefetch::at(keys, 64);
}

// Whether dicts[i][keys[k]] is columns[k][i], for all of them.
inline int same_entries(PyObject* dicts, PyObject* keys, PyObject* columns) {
  const ptrdiff_t count = PyList_Size(dicts), names = count < 0 ? -1 : PyList_Size(keys);
  if (names < 0 || PyList_Size(columns) != names) return no();
  for (ptrdiff_t k = 0; k < names; ++k) {
    if (PyList_Size(PyList_GetItem(columns, k)) != count) return no();
  }
  for (ptrdiff_t i = 0; i < count; ++i) {
    prefetch_dict(dicts, i, count);
    const Reference dict = Reference::to_borrowed(PyList_GetItem(dicts, i));
    for (ptrdiff_t k = 0; k < names; ++k) {
      PyObject* const key = PyList_GetItem(keys, k);
      PyObject* const found = dict.get() && key ? PyDict_GetItemWithError(dict.get(), key) : nullptr;
      PyObject* const column = PyList_GetItem(columns, k);
      if (!found || !column || found != PyList_GetItem(column, i)) return no();
    }
  }
  return 1;
}

// Whether all are tensors of the types that are read.
inline int are_plain(PyObject* tensors) {
  const ptrdiff_t count = PyList_Size(tensors);
  if (count < 0) return no();
  for (ptrdiff_t i = 0; i < count; ++i) {
    if (!python_lists::plain_type(PyList_GetItem(tensors, i))) return 0;
  }
  return 1;
}

// Whether all are tensors of these types with their values in their memory. 0 too if that is not known.
inline int are_resolved(PyObject* tensors) {
  const ptrdiff_t count = PyList_Size(tensors);
  if (count < 0) return no();
  for (ptrdiff_t i = 0; i < count; ++i) {
    python_lists::prefetch_ahead<Look::kMemory>(tensors, i, count);
    PyObject* const tensor = PyList_GetItem(tensors, i);
    if (!python_lists::plain_type(tensor) || !python_lists::is_resolved(tensor)) return 0;
  }
  return 1;
}

// Whether no tensor has a gradient. `stored`: torch's own attribute, also of a type with a property `grad`.
inline int have_no_grad(PyObject* tensors, int stored) {
  const ptrdiff_t count = PyList_Size(tensors);
  if (count < 0) return no();
  for (ptrdiff_t i = 0; i < count; ++i) {
    python_lists::prefetch_ahead<Look::kGrad>(tensors, i, count);
    PyObject* const item = PyList_GetItem(tensors, i);
    if (item && python_lists::is_without_grad(item, stored)) continue;
    const Reference tensor = Reference::to_borrowed(item);
    if (!tensor.get()) return no();
    const Reference type(stored ? PyObject_Type(tensor.get()) : nullptr);
    const Reference grad(stored ? python().get_grad(python().stored_grad, tensor.get(), type.get())
                                : python_lists::grad_of(tensor.get()));
    if (!grad.get()) return -1;
    if (grad.get() != python().none) return 0;
  }
  return 1;
}

// grad = None for each tensor. `stored`: as for have_no_grad().
inline int clear_grads(PyObject* tensors, int stored) {
  const ptrdiff_t count = PyList_Size(tensors);
  if (count < 0) return -1;
  for (ptrdiff_t i = 0; i < count; ++i) {
    python_lists::prefetch_ahead<Look::kGrad>(tensors, i, count);
    const Reference tensor = Reference::to_borrowed(PyList_GetItem(tensors, i));
    if (!tensor.get()) return -1;
    const python_lists::PlainType* const type = python_lists::plain_type(tensor.get());
    const int failed = type && (stored || type->stores_grad)
                           ? python().set_grad(python().stored_grad, tensor.get(), python().none)
                           : PyObject_SetAttr(tensor.get(), python().grad, python().none);
    if (failed) return -1;
  }
  return 1;
}

// Bumps the version of each tensor, as torch.autograd.graph.increment_version does. 0, and none is bumped, where one is
// not known.
inline int bump_each(PyObject* tensors) {
  const ptrdiff_t count = PyList_Size(tensors);
  if (count < 0) return no();
  std::vector<prefetch::Version*> versions;
  versions.reserve(count);
  for (ptrdiff_t i = 0; i < count; ++i) {
    python_lists::prefetch_ahead<Look::kVersion>(tensors, i, count);
    versions.push_back(python_lists::version_of(PyList_GetItem(tensors, i)));
    if (!versions.back()) return no();
  }
  for (prefetch::Version* version : versions) ++*version;
  return 1;
}

// Dtype and device of a tensor.
struct Kind {
  int32_t dtype, device_type, device_index;
};

// Of each tensor of a held list. Empty for another list.
inline std::vector<Kind> kinds_of(int64_t number) {
  std::vector<Kind> kinds;
  const KnownListPointer list = known_lists().find(number);
  const auto* tensors = list ? std::get_if<torch_abi::TensorList>(list.get()) : nullptr;
  if (tensors) kinds.reserve(tensors->size());
  for (size_t i = 0; tensors && i < tensors->size(); ++i) {
    view(*list).prefetch_ahead(i, tensors->size());
    const torch_abi::Tensor& tensor = (*tensors)[i];
    kinds.push_back({tensor.dtype(), tensor.device_type(), tensor.device_index()});
  }
  return kinds;
}

// Between two blocks nothing has changed: same_members(), the tensors of a held list are of the `kinds` that
// held_kinds() gave, and have_no_grad() of the leaves.
inline int nothing_changed(PyObject* groups, PyObject* members, int64_t number, PyObject* kinds, PyObject* leaves) {
  if (!same_members(groups, members)) return 0;
  const std::vector<Kind> now = kinds_of(number);
  const size_t bytes = now.size() * sizeof(Kind);
  if (now.empty() || PyBytes_Size(kinds) != static_cast<ptrdiff_t>(bytes)) return no();
  return std::memcmp(now.data(), PyBytes_AsString(kinds), bytes) == 0 ? have_no_grad(leaves, 0) : 0;
}

// Whether the calls of a step are those of the step before. `kept`: its groups and members; keys and values of the
// optimizer's state; those of its model weights by master; its masters with lazy gradients; its parameters without a
// gradient; and of each call the dicts, keys and columns of same_entries(), end to end.
inline int same_plan(PyObject* kept, PyObject* groups, PyObject* state, PyObject* models, PyObject* lazy) {
  constexpr ptrdiff_t before_calls = 8;
  const ptrdiff_t count = PyList_Size(kept);
  if (count < before_calls) return no();
  const auto at = [&](ptrdiff_t place) { return PyList_GetItem(kept, place); };
  if (!same_items(groups, at(0)) || !same_members(groups, at(1)) || !same_mapping(state, at(2), at(3)) ||
      !same_mapping(models, at(4), at(5)) || !same_items(lazy, at(6))) {
    return 0;
  }
  for (ptrdiff_t i = before_calls; i + 3 <= count; i += 3) {
    if (!same_entries(at(i), at(i + 1), at(i + 2))) return 0;
  }
  return have_no_grad(at(7), 0);
}

template <class T>
PyObject* as_bytes(const std::vector<T>& values) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(values.data()),
                                   static_cast<ptrdiff_t>(values.size() * sizeof(T)));
}

// kinds_of() as bytes to compare.
inline PyObject* held_kinds(int64_t number) { return as_bytes(kinds_of(number)); }

// Identity, version and address of each tensor, as bytes to compare. `number`: of a held list that begins with them.
inline PyObject* write_counts(PyObject* tensors, int64_t number) {
  const ptrdiff_t count = PyList_Size(tensors);
  const KnownListPointer list = known_lists().find(number);
  const auto* held = list ? std::get_if<torch_abi::TensorList>(list.get()) : nullptr;
  if (count < 0 || !held || static_cast<ptrdiff_t>(held->size()) < count) {
    PyErr_SetString(PyExc_TypeError, "write_counts: tensors is no list, or number not that of its held list");
    return nullptr;
  }
  const ListView addresses = view(*list);
  std::vector<int64_t> counts;
  counts.reserve(3 * count);
  for (ptrdiff_t i = 0; i < count; ++i) {
    python_lists::prefetch_ahead<Look::kVersion>(tensors, i, count);
    addresses.prefetch_ahead(i, count);
    PyObject* const tensor = PyList_GetItem(tensors, i);
    counts.push_back(reinterpret_cast<int64_t>(tensor));
    if (const prefetch::Version* const known = python_lists::version_of(tensor)) {
      counts.push_back(*known);
    } else {
      const Reference type(PyObject_Type(tensor));
      const Reference version(python().get_version(python().version, tensor, type.get()));
      if (!version.get()) return nullptr;
      counts.push_back(PyLong_AsLongLong(version.get()));
    }
    counts.push_back(reinterpret_cast<int64_t>((*held)[i].data()));
  }
  return as_bytes(counts);
}

}  // namespace ampctx::python_passes
