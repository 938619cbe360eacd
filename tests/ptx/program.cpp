// Reads what translate.py has written, and counts into a file that processes share.
#include "program.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <iterator>

#include "launch.h"

namespace ptx {
namespace {

class Reader {
 public:
  explicit Reader(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw Error("PTX: cannot read " + path);
    bytes_.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }

  int64_t number() {
    int64_t value;
    std::memcpy(&value, take(sizeof(value)), sizeof(value));
    return value;
  }
  int32_t small() { return static_cast<int32_t>(number()); }
  std::string text() {
    const auto size = static_cast<size_t>(number());
    return std::string(take(size), size);
  }

 private:
  const char* take(size_t size) {
    if (size > bytes_.size() - at_) throw Error("PTX: a program that was cut short");
    return &bytes_[(at_ += size) - size];
  }

  std::vector<char> bytes_;
  size_t at_ = 0;
};

Kernel read_kernel(Reader& in, const std::vector<Instruction>& opcodes) {
  Kernel kernel;
  kernel.name = in.text();
  kernel.file = in.text();
  kernel.parameters.resize(static_cast<size_t>(in.number()));
  for (Parameter& parameter : kernel.parameters) {
    parameter.offset = in.small();
    parameter.bytes = in.small();
  }
  kernel.parameter_bytes = in.small();
  kernel.shared_bytes = in.small();
  kernel.max_threads = in.small();
  kernel.registers = in.small();
  kernel.predicates = in.small();
  for (int64_t count = in.number(); count > 0; --count) {
    kernel.constants.insert(kernel.constants.end(), kWarp, static_cast<uint64_t>(in.number()));
  }
  kernel.code.resize(static_cast<size_t>(in.number()));
  for (Instruction& instruction : kernel.code) {
    instruction = opcodes.at(static_cast<size_t>(in.number()));
    instruction.guard = in.small();
    for (int32_t& operand : instruction.operand) operand = in.small();
    instruction.immediate = in.number();
    instruction.line = in.small();
  }
  return kernel;
}

// In the order of the file: a number of launches for each kernel, then a byte for each instruction.
void count_in(Program& program, const std::vector<std::string>& order, const std::string& path) {
  size_t instructions = 0;
  for (const auto& [name, kernel] : program.kernels) instructions += kernel.code.size();
  const size_t bytes = order.size() * sizeof(uint64_t) + instructions;
  const int file = open(path.c_str(), O_RDWR);
  if (file < 0) throw Error("PTX: cannot write " + path);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) throw Error("PTX: cannot map " + path);
  auto* launches = static_cast<uint64_t*>(memory);
  auto* executed = static_cast<uint8_t*>(memory) + order.size() * sizeof(uint64_t);
  for (const std::string& name : order) {
    Kernel& kernel = program.kernels.at(name);
    kernel.launches = launches++;
    kernel.executed = executed;
    executed += kernel.code.size();
  }
}

}  // namespace

std::unique_ptr<Program> read_program(const std::string& path, const std::string& coverage) {
  Reader in(path);
  auto program = std::make_unique<Program>();
  std::vector<Instruction> opcodes(static_cast<size_t>(in.number()));
  for (Instruction& instruction : opcodes) {
    const std::string name = in.text();
    if (!find_handler(name, instruction)) throw Error("PTX: unknown opcode " + name);
  }
  for (int64_t count = in.number(); count > 0; --count) {
    const auto offset = static_cast<uint64_t>(in.number());
    program->functions[offset] = in.text();
  }
  std::vector<std::string> order;
  for (int64_t count = in.number(); count > 0; --count) {
    Kernel kernel = read_kernel(in, opcodes);
    order.push_back(kernel.name);
    program->kernels.emplace(kernel.name, std::move(kernel));
  }
  if (!coverage.empty()) count_in(*program, order, coverage);
  return program;
}

}  // namespace ptx
