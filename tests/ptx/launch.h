// Running a kernel of a program, and the errors that it ends with.
#pragma once

#include <stdexcept>

#include "memory.h"
#include "program.h"

namespace ptx {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void launch(const Kernel& kernel, uint32_t grid, uint32_t threads, const uint8_t* parameters, GlobalMemory& global);

}  // namespace ptx
