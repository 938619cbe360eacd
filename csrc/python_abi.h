// Python's limited API, so that one library serves every Python from 3.10, and the exchange of tensors that torch
// offers to C through DLPack: a tensor's address, type and layout without a way through the dispatcher.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstdint>
#include <memory>

namespace ampctx::python_abi {

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
struct GiveBack {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Reference = std::unique_ptr<PyObject, GiveBack>;

}  // namespace ampctx::python_abi
