// fail(parts...): an error that reaches Python as RuntimeError.
#pragma once

#include <sstream>
#include <stdexcept>

namespace ampctx {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

}  // namespace ampctx
