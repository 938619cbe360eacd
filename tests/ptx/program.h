// Kernels in PTX, as translate.py has encoded them: instructions over numbered registers.
//
// A register is 64 bits for each lane of a warp; a predicate is one bit. Constants and special registers are registers
// too, so that an operand is a number and nothing else: from 0 up one of the kernel's, below 0 a constant (~number).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace ptx {

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kOperands = 6;

class Warp;
struct Instruction;
using Handler = void (*)(Warp&, const Instruction&, uint32_t lanes);

struct Instruction {
  Handler handler;
  bool is_control;  // changes where lanes are
  int32_t guard;    // the predicate's number + 1, below 0 for its negation, 0 without
  int32_t operand[kOperands];
  int64_t immediate;  // the offset of an address, the target of a branch
  int32_t line;       // in the PTX file
};

struct Parameter {
  int32_t offset, bytes;
};

struct Kernel {
  std::string name;  // as g++ mangles it
  std::string file;  // the PTX file
  std::vector<Parameter> parameters;
  int32_t parameter_bytes, shared_bytes, max_threads, registers, predicates;
  std::vector<uint64_t> constants;  // [constant][lane]
  std::vector<Instruction> code;
  // Shared with other processes, where somebody wants to know: launches, and a byte for each executed instruction.
  uint64_t* launches = nullptr;
  uint8_t* executed = nullptr;
};

struct Program {
  std::unordered_map<std::string, Kernel> kernels;      // by name
  std::unordered_map<uint64_t, std::string> functions;  // name by offset in this library
};

// Sets how an opcode is run. False for one that is not known.
bool find_handler(const std::string& opcode, Instruction& instruction);

// What translate.py wrote to `path`. `coverage`: the file to count in, or empty.
std::unique_ptr<Program> read_program(const std::string& path, const std::string& coverage);

}  // namespace ptx
