// Questions about many tensors, which Python asks on the way to a step. They need no plan.
#pragma once

#include <optional>

#include "tensors.h"

namespace ampctx::python {

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

// Whether `dicts`, or any, hold the same keys and values, in order. A type stands for its instances, `object` for all.
inline bool same_entries(PyObject* mappings, PyObject* dicts = nullptr) {
  for (Py_ssize_t i = 0; i < PyList_Size(mappings); ++i) {
    PyObject *const row = PyList_GetItem(mappings, i), *const mapping = PyTuple_GetItem(row, 0),
                    *const keys = PyTuple_GetItem(row, 1), *const values = PyTuple_GetItem(row, 2);
    if (PyDict_Size(mapping) != PyList_Size(keys) || (dicts && PyList_GetItem(dicts, i) != mapping)) return false;
    PyObject *key, *value;
    for (Py_ssize_t at = 0, k = 0; PyDict_Next(mapping, &at, &key, &value); ++k) {
      PyObject* const former = PyList_GetItem(values, k);
      const bool is_any = former == reinterpret_cast<PyObject*>(&PyBaseObject_Type);
      const bool is_same = former == value || former == reinterpret_cast<PyObject*>(Py_TYPE(value)) || is_any;
      if (PyList_GetItem(keys, k) != key || !is_same) return PyErr_Clear(), false;
    }
  }
  return true;
}

// same_groups(groups, entries): whether the param groups are the dicts of the entries, and hold these.
inline PyObject* same_groups(PyObject*, PyObject* given) {
  PyObject *groups, *entries;
  if (!PyArg_ParseTuple(given, "OO", &groups, &entries)) return nullptr;
  return PyBool_FromLong(PyList_Size(groups) == PyList_Size(entries) && same_entries(entries, groups));
}

// marks(tensors): version and address of each, as bytes to compare; None where a tensor is not plain.
inline PyObject* marks(PyObject*, PyObject* tensors) {
  const Py_ssize_t count = PyList_Size(tensors);
  if (count < 0) return nullptr;
  const PlainGetters guard;
  std::vector<int64_t> found;
  found.reserve(2 * count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const tensor = PyList_GetItem(tensors, i);
    if (!tensor || !is_plain(tensor)) return PyErr_Clear(), Py_NewRef(Py_None);
    const Reference version(torch.get_version(torch.version, tensor, nullptr));
    const Reference address(version ? torch.data_ptr(tensor, nullptr) : nullptr);
    if (!address) return PyErr_Clear(), Py_NewRef(Py_None);
    found.push_back(PyLong_AsLongLong(version.get()));
    found.push_back(reinterpret_cast<int64_t>(PyLong_AsVoidPtr(address.get())));
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
    PyObject* const tensor = PyList_GetItem(tensors, i);
    if (!tensor || !(is_plain(tensor) || is_sharded(tensor))) return PyErr_Clear(), Py_NewRef(Py_None);
    if (grad_of(tensor).get() != Py_None) return PyErr_Clear(), PyBool_FromLong(false);
  }
  return PyBool_FromLong(true);
}

// as_before(groups, members, params, former): whether the param groups hold these lists of parameters, and the params
// have no gradient and, unless `former` is None, these marks. None where a tensor is not plain.
inline PyObject* as_before(PyObject* self, PyObject* given) {
  PyObject *groups, *members, *params, *former;
  if (!PyArg_ParseTuple(given, "OOOO", &groups, &members, &params, &former)) return nullptr;
  if (!same_members(groups, members)) return Py_NewRef(Py_False);
  PyObject* const idle = PyList_Size(params) == 0 ? Py_NewRef(Py_True) : have_no_grads(self, params);
  if (idle != Py_True || former == Py_None) return idle;
  const Reference now(marks(self, params));
  Py_DecRef(idle);
  if (!now || now.get() == Py_None) return now ? Py_NewRef(Py_None) : nullptr;
  return PyObject_RichCompare(now.get(), former, Py_EQ);
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

// are_uniform(lists): whether one call can take the lists, which have equally many plain tensors.
inline PyObject* are_uniform(PyObject*, PyObject* lists) {
  Reader reader;
  std::deque<Views> found;
  const auto no = [] { return differs() == kError ? nullptr : PyBool_FromLong(false); };
  for (Py_ssize_t i = 0; i < PyTuple_Size(lists); ++i) {
    PyObject* const tensors = PyTuple_GetItem(lists, i);
    if (i > 0 && tensors == PyTuple_GetItem(lists, i - 1)) continue;
    if (!reader.add_list(tensors, found.emplace_back())) return no();
  }
  if (!reader.read() || found[0].empty()) return no();
  const Views& first = found[0];
  for (const Views& views : found) {
    if (views.size() != first.size()) return PyBool_FromLong(false);
    for (size_t i = 0; i < views.size(); ++i) {
      const View& view = views[i];
      const bool is_as_others = view.dtype == views[0].dtype && view.device == first[0].device;
      if (!is_as_others || view.numel != first[i].numel || !view.is_contiguous) return PyBool_FromLong(false);
    }
  }
  return PyBool_FromLong(true);
}

}  // namespace ampctx::python
