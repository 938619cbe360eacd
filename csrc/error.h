// fail(parts...): an error that reaches Python as RuntimeError, or as torch.OutOfMemoryError by fail_out_of_memory.
#pragma once

#include <sstream>
#include <stdexcept>

namespace ampctx {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message(std::ios_base::out);  // libstdc++ before GCC 9 has no default constructor
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// The C shim knows no kinds of errors. ampctx/kernels/ops.py knows this one by its first words.
template <class... Parts>
[[noreturn]] void fail_out_of_memory(const Parts&... parts) {
  fail("ampctx: out of memory: ", parts...);
}

}  // namespace ampctx
