// The few functions of Python that ampctx calls, all of the limited API, and the exchange of tensors that torch offers
// to C through DLPack: a tensor's address, type and layout without a way through the dispatcher.
//
// Declared here and not included, so that building needs no headers of Python and one library serves every Python. A
// test compiles this file together with Python's own header, so that a mismatch is a compile error. Weak: whoever loads
// the library without a Python calls none of them. The caller holds the GIL.
#pragma once

#include <cstddef>
#include <cstdint>

struct _object;
using PyObject = _object;
struct _typeobject;

extern "C" {
#define AMPCTX_PYTHON __attribute__((weak))
AMPCTX_PYTHON ptrdiff_t PyList_Size(PyObject* list);
AMPCTX_PYTHON PyObject* PyList_GetItem(PyObject* list, ptrdiff_t index);  // borrowed
AMPCTX_PYTHON int PyList_Append(PyObject* list, PyObject* item);
AMPCTX_PYTHON ptrdiff_t PyDict_Size(PyObject* dict);
AMPCTX_PYTHON PyObject* PyDict_GetItemWithError(PyObject* dict, PyObject* key);                        // borrowed
AMPCTX_PYTHON int PyDict_Next(PyObject* dict, ptrdiff_t* position, PyObject** key, PyObject** value);  // borrowed
AMPCTX_PYTHON PyObject* PyObject_GetAttr(PyObject* object, PyObject* name);
AMPCTX_PYTHON int PyObject_SetAttr(PyObject* object, PyObject* name, PyObject* value);
AMPCTX_PYTHON PyObject* PyObject_Type(PyObject* object);
AMPCTX_PYTHON void* PyType_GetSlot(_typeobject* type, int slot);
AMPCTX_PYTHON PyObject* PyUnicode_InternFromString(const char* text);
AMPCTX_PYTHON PyObject* PyTuple_Pack(ptrdiff_t count, ...);
AMPCTX_PYTHON PyObject* PyLong_FromLongLong(long long value);
AMPCTX_PYTHON long long PyLong_AsLongLong(PyObject* number);
AMPCTX_PYTHON PyObject* PyBytes_FromStringAndSize(const char* bytes, ptrdiff_t count);
AMPCTX_PYTHON char* PyBytes_AsString(PyObject* bytes);
AMPCTX_PYTHON ptrdiff_t PyBytes_Size(PyObject* bytes);
AMPCTX_PYTHON PyObject* PyCapsule_New(void* pointer, const char* name, void (*destructor)(PyObject*));
AMPCTX_PYTHON void* PyCapsule_GetPointer(PyObject* capsule, const char* name);
AMPCTX_PYTHON extern PyObject* PyExc_TypeError;
AMPCTX_PYTHON extern PyObject* PyExc_RuntimeError;
AMPCTX_PYTHON void PyErr_SetString(PyObject* type, const char* message);
AMPCTX_PYTHON PyObject* PyErr_Occurred();  // borrowed
AMPCTX_PYTHON void PyErr_Clear();
AMPCTX_PYTHON void Py_IncRef(PyObject* object);
AMPCTX_PYTHON void Py_DecRef(PyObject* object);
#undef AMPCTX_PYTHON
}

namespace ampctx::python_abi {

// Slots of a type, and what lies in them.
constexpr int kDescriptorGet = 54;  // Py_tp_descr_get
constexpr int kDescriptorSet = 55;  // Py_tp_descr_set
using DescriptorGet = PyObject* (*)(PyObject* descriptor, PyObject* object, PyObject* type);
using DescriptorSet = int (*)(PyObject* descriptor, PyObject* object, PyObject* value);

// Origin: dlpack.h 1.x. Of the exchange, what ampctx calls; what stands before it keeps its place.
struct DLDevice {
  int32_t type;
  int32_t index;
};
constexpr int32_t kDLCPU = 1;
constexpr int32_t kDLCUDA = 2;

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
constexpr uint8_t kDLInt = 0;
constexpr uint8_t kDLUInt = 1;
constexpr uint8_t kDLFloat = 2;
constexpr uint8_t kDLBfloat = 4;

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t dim;
  DLDataType dtype;
  int64_t* sizes;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLPackExchange {
  struct {
    uint32_t major, minor;
    void* previous;
  } header;
  void* unused[3];
  // Of what belongs to the tensor, and lasts as long as that stays as it is. 0, or -1 with an exception set.
  int (*view)(void* tensor, DLTensor* out);
};
constexpr const char* kExchangeCapsule = "dlpack_exchange_api";

// A reference that is given back.
class Reference {
 public:
  explicit Reference(PyObject* object) : object_(object) {}
  // To what somebody else may let go.
  static Reference to_borrowed(PyObject* object) {
    if (object) Py_IncRef(object);
    return Reference(object);
  }
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference() {
    if (object_) Py_DecRef(object_);
  }
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

}  // namespace ampctx::python_abi
