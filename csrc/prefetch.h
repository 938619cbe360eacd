// Hints that bring torch's objects into the cache before they are looked at. Thousands of tensors lie on as many pages;
// without hints each look waits for memory, one after the other.
//
// Beside the hints are facts for which torch's own functions take longer than all other work on a tensor: type,
// version, that there is no gradient, and that its values are those in its memory.
//
// Both follow pointers at the places where torch 2.11 to 2.15 has them, in objects that are alive. use_hints() compares
// these places with what Python tells of a few tensors at import; where they differ, nothing here is used, and no list
// is read.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ampctx::prefetch {

// GCC removes calls of functions that do nothing but prefetch, unless it has inlined them before.
#define AMPCTX_HINT __attribute__((always_inline)) inline

AMPCTX_HINT void at(const void* object, ptrdiff_t offset) {
  __builtin_prefetch(static_cast<const char*>(object) + offset);
}

AMPCTX_HINT const void* pointer_at(const void* object, ptrdiff_t offset) {
  return *reinterpret_cast<const void* const*>(static_cast<const char*>(object) + offset);
}

// Of a TensorImpl: where its storage is, and its numel, dtype and device; its sizes; address and size in its storage;
// its version; the object that has its gradient, and the TensorImpl of that.
AMPCTX_HINT void tensor(const void* impl) { at(impl, 16), at(impl, 144), at(impl, 168); }
AMPCTX_HINT void sizes(const void* impl) { at(impl, 64), at(impl, 120); }
AMPCTX_HINT void storage(const void* impl) { at(pointer_at(impl, 16), 16), at(pointer_at(impl, 16), 56); }
AMPCTX_HINT void version(const void* impl) { at(pointer_at(impl, 40), 16); }
AMPCTX_HINT void autograd(const void* impl) { at(pointer_at(impl, 24), 40); }
AMPCTX_HINT const void* grad_of(const void* impl) {
  const void* const autograd = pointer_at(impl, 24);
  return autograd ? pointer_at(autograd, 40) : nullptr;
}

// Set once, before the first hint.
inline bool& is_known_layout() {
  static bool known = false;
  return known;
}

// What a TensorImpl has in the place of a gradient that is not there. Null if that is not known.
inline const void*& no_gradient() {
  static const void* found = nullptr;
  return found;
}

// Whether a tensor has no gradient. False if that is not known.
inline bool is_without_grad(const void* impl) {
  if (!no_gradient()) return false;
  const void* const autograd = pointer_at(impl, 24);
  return !autograd || pointer_at(autograd, 40) == no_gradient();
}

// The version of a tensor, which autograd compares. Null for a tensor of inference mode.
using Version = std::atomic<uint32_t>;
inline Version* version_of(const void* impl) {
  const void* const counter = pointer_at(impl, 40);
  return counter ? reinterpret_cast<Version*>(static_cast<char*>(const_cast<void*>(counter)) + 16) : nullptr;
}
// Set once, after version_of() has been compared with what Python tells.
inline bool& knows_versions() {
  static bool known = false;
  return known;
}

// The dispatch keys of a tensor: where a TensorImpl has them, and the bits of those that make torch negate or conjugate
// what lies in memory, or take it for zeros.
struct DispatchKeys {
  ptrdiff_t place;
  uint64_t unresolved;
};
inline DispatchKeys& dispatch_keys() {
  static DispatchKeys found{};
  return found;
}
AMPCTX_HINT uint64_t word_at(const void* object, ptrdiff_t offset) {
  return *reinterpret_cast<const uint64_t*>(static_cast<const char*>(object) + offset);
}
// Whether a tensor's values are those in its memory.
AMPCTX_HINT bool is_resolved(const void* impl) {
  return !(word_at(impl, dispatch_keys().place) & dispatch_keys().unresolved);
}

// Whether TensorImpls have their dispatch keys at one place, the same for a tensor, another one, and its negation.
inline bool has_keys(const void* const* impls, const uint64_t* keys, uint64_t unresolved) {
  for (ptrdiff_t place = 144; place <= 176; place += 8) {
    const auto has = [&](int i) { return word_at(impls[i], place) == keys[i]; };
    if (!has(0) || !has(1) || !has(2)) continue;
    dispatch_keys() = {place, unresolved};
    return is_resolved(impls[0]) && is_resolved(impls[1]) && !is_resolved(impls[2]);
  }
  return false;
}

// The type of an object, where Python 3.10 to 3.14 have it in builds with the GIL.
AMPCTX_HINT const void* type_of(const void* object) { return pointer_at(object, 8); }

// The at::Tensor in a tensor's object, which is what the C shim of torch calls a handle.
inline void* handle_of(void* object) { return static_cast<char*>(object) + 16; }

// Where a TensorImpl has the address of its Python object. 0 if that is not known.
inline ptrdiff_t& place_of_object() {
  static ptrdiff_t place = 0;
  return place;
}
AMPCTX_HINT void object(const void* impl) {
  if (place_of_object()) at(pointer_at(impl, place_of_object()), 0);
}

// Of what Python tells no address: whether it can be one.
inline bool may_be_address(const void* found) {
  const auto number = reinterpret_cast<uintptr_t>(found);
  return number > 65536 && number < uintptr_t{1} << 56 && number % alignof(void*) == 0;
}

// Whether a tensor's object has its type, TensorImpl, storage and gradient where hints look for them. `plain`: of a
// tensor without autograd's part. The other numbers are addresses as Python tells them: `param` of a TensorImpl, and of
// its gradient's and its storage.
inline bool has_layout(const void* object, const void* type, const void* param, const void* plain, const void* grad,
                       const void* storage) {
  if (type_of(object) != type || pointer_at(object, 16) != param || pointer_at(param, 16) != storage ||
      pointer_at(plain, 24))
    return false;
  place_of_object() = pointer_at(param, 48) == object ? 48 : pointer_at(param, 56) == object ? 56 : 0;
  return may_be_address(pointer_at(param, 24)) && grad_of(param) == grad;
}

// Whether a tensor has its version, a number that Python tells, where version_of() looks.
inline bool has_version(const void* impl, int64_t version) {
  return may_be_address(pointer_at(impl, 40)) && *version_of(impl) == version;
}

// How many tensors ahead each stage looks. A stage reads pointers that the one before has brought.
constexpr int kStages[] = {32, 24, 16, 8, 4};

}  // namespace ampctx::prefetch
