// Runs the CPU kernels without torch on made-up numbers and prints a digest of what each writes. tests/ops/test_arm.py
// compiles it for this machine, whose kernels other tests compare with torch, and for ARM.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "csrc/cpu/simd.h"
#include "csrc/ops.h"

using namespace ampctx;

namespace {

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};
const std::vector<int64_t> kSizes = {1, 15, 16, 17, 63, 64, 65, 2047, 2048, 2049, 9001};

uint32_t random_bits() {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 32);
}

// A tensor that begins a memory line or, if `shifted`, one element after it; read and written by its bits.
class Memory {
 public:
  Memory(DType dtype, int64_t numel, bool shifted = true)
      : dtype_(dtype), numel_(numel), first_(shifted), lines_((numel + 1) * element_size(dtype) / 64 + 1) {}

  void* data() { return at(0); }
  int64_t numel() const { return numel_; }
  void set(int64_t i, uint32_t bits) {  // the low ones of a 16-bit element
    std::memcpy(at(i), &bits, static_cast<size_t>(element_size(dtype_)));
  }
  // Numbers from -1 to 1, or from 0.
  void fill(bool positive) {
    for (int64_t i = 0; i < numel_; ++i) {
      const float value = static_cast<float>(static_cast<int32_t>(random_bits() >> positive)) * 0x1p-31f;
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      if (dtype_ == DType::bf16) bits >>= 16;
      if (dtype_ == DType::f16) bits = (bits >> 16 & 0x8000) | (1 + random_bits() % 14) << 10 | (bits & 0x3ff);
      set(i, bits);
    }
  }
  // Which bits a nan has is up to the processor.
  uint64_t digest(uint64_t hash) {
    const uint32_t inf = dtype_ == DType::f32 ? 0x7f800000u : dtype_ == DType::f16 ? 0x7c00u : 0x7f80u;
    for (int64_t i = 0; i < numel_; ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, at(i), static_cast<size_t>(element_size(dtype_)));
      if ((bits & (dtype_ == DType::f32 ? 0x7fffffffu : 0x7fffu)) > inf) bits = 0xffffffffu;
      hash = (hash ^ bits) * 1099511628211u;
    }
    return hash;
  }

 private:
  char* at(int64_t i) { return lines_[0].bytes + (first_ + i) * element_size(dtype_); }

  struct alignas(64) Line {
    char bytes[64] = {};
  };

  DType dtype_;
  int64_t numel_, first_;
  std::vector<Line> lines_;
};

using List = std::vector<Memory>;

List list_of(DType dtype, bool filled = true, bool positive = false) {
  List list;
  for (const int64_t numel : kSizes) list.emplace_back(dtype, numel);
  for (Memory& memory : list) {
    if (filled) memory.fill(positive);
  }
  return list;
}

TensorLists lists_of(std::vector<std::pair<DType, List*>> lists) {
  TensorLists found;
  found.depth = static_cast<int>(lists.size());
  for (size_t list = 0; list < lists.size(); ++list) {
    found.dtype[list] = lists[list].first;
    for (Memory& memory : *lists[list].second) found.pointer[list].push_back(memory.data());
  }
  for (const Memory& memory : *lists[0].second) {
    found.index.push_back(found.size());
    found.numel.push_back(memory.numel());
  }
  found.total_tensors = found.size();
  return found;
}

// Two shares, as two threads would get them.
Context context() {
  Context made;
  made.parallel_for = [](int64_t begin, int64_t end, int64_t, Context::Body body, void* argument) {
    const int64_t middle = begin + (end - begin) / 2;
    body(begin, middle, argument);
    body(middle, end, argument);
  };
  return made;
}

struct Flag {
  uint32_t word = 0;
  operator FoundInf() { return {&word, 0x3f800000u, 0x7fffffffu}; }
};

ClippedFactor factor(double value) { return {Factor{nullptr, value}}; }

void print(const char* op, DType from, DType to, uint32_t flag, std::vector<List*> written) {
  static const char* const names[] = {"fp32", "fp16", "bf16"};
  uint64_t hash = 14695981039346656037u;
  for (List* list : written) {
    for (Memory& memory : *list) hash = memory.digest(hash);
  }
  std::printf("%s %s %s: found_inf %08x, digest %016llx\n", op, names[static_cast<int>(from)],
              names[static_cast<int>(to)], flag, static_cast<unsigned long long>(hash));
}

// Every 16-bit pattern, some of fp32, and those around the ends of the numbers of each type.
void conversions(DType from, DType to) {
  const bool wide = from == DType::f32;
  List in{Memory(from, wide ? 200000 : 65536)}, out{Memory(to, in[0].numel())};
  for (int64_t i = 0; i < in[0].numel(); ++i) in[0].set(i, wide ? random_bits() : static_cast<uint32_t>(i));
  int64_t i = 0;
  for (const uint32_t edge :
       {0x33000000u, 0x33800000u, 0x38800000u, 0x477fe000u, 0x477ff000u, 0x7f7f8000u, 0x7f800000u}) {
    for (int away = -2; wide && away <= 2; ++away) in[0].set(i++, edge + static_cast<uint32_t>(away));
  }
  Flag flag;
  cpu::scale(context(), lists_of({{from, &in}, {to, &out}}), flag, factor(1.0), nullptr);
  print("conversion", from, to, flag.word, {&out});
}

void scales(DType from, DType to) {
  List in = list_of(from), out = list_of(to, false);
  Flag flag;
  cpu::scale(context(), lists_of({{from, &in}, {to, &out}}), flag, factor(0.3), nullptr);
  print("scale", from, to, flag.word, {&out});
}

// An output that no cache holds, from the start of a line, is written in another way.
void streams() {
  List in{Memory(DType::f16, 8 << 20)}, out{Memory(DType::f32, 8 << 20, false)};
  in[0].fill(false);
  Flag flag;
  cpu::scale(context(), lists_of({{DType::f16, &in}, {DType::f32, &out}}), flag, factor(2.0), nullptr);
  print("stream", DType::f16, DType::f32, flag.word, {&out});
}

void axpby() {
  List x = list_of(DType::bf16), y = list_of(DType::f32), out = list_of(DType::f16, false);
  Flag flag;
  const TensorLists lists = lists_of({{DType::bf16, &x}, {DType::f32, &y}, {DType::f16, &out}});
  cpu::axpby(context(), lists, flag, factor(0.3), factor(-1.7), -1);
  print("axpby", DType::bf16, DType::f16, flag.word, {&out});
}

void norms(DType type) {
  List in = list_of(type), found{Memory(DType::f32, 1), Memory(DType::f32, static_cast<int64_t>(in.size()))};
  const TensorLists lists = lists_of({{type, &in}});
  std::vector<char> workspace(static_cast<size_t>(cpu::norms_workspace(lists, 1)));
  Flag flag;
  cpu::l2norm(context(), lists, flag, factor(0.5), {found[0].data(), nullptr, found[1].data(), workspace.data()},
              nullptr);
  print("norm", type, type, flag.word, {&found});
}

// Steps of AdamW on fp32 weights, from gradients of any type, with a copy of the weights in 16 bits or without.
void adam(DType grad_type, DType copy_type) {
  const bool copies = copy_type != DType::f32;
  const AdamOptions options{0.9, 0.99, 1e-6, 0.01, true, true};
  List grads = list_of(grad_type), weights = list_of(DType::f32), m = list_of(DType::f32);
  List v = list_of(DType::f32, true, true), copy = list_of(copy_type, false);
  std::vector<std::pair<DType, List*>> lists{
      {grad_type, &grads}, {DType::f32, &weights}, {DType::f32, &m}, {DType::f32, &v}};
  if (copies) lists.push_back({copy_type, &copy});
  std::vector<float> steps(grads.size());
  Flag flag;

  StepCall call;
  call.lists = lists_of(lists);
  call.found_inf = flag;
  call.inv_scale = factor(0.125);
  call.rates = {factor(1e-3)};
  for (float& step : steps) call.steps.push_back(&step);
  call.maximize = false;
  call.unscales = false;
  call.write_back = copies ? WriteBack::copy : WriteBack::nearest;
  call.rules = {StepOp<AdamOptions>::rule(options, 0)};
  std::vector<char> workspace(static_cast<size_t>(call.lists.size()) * sizeof(TensorScalars<double>));
  call.workspace = workspace.data();
  for (int t = 0; t < 3; ++t) cpu::adam(context(), call, {options});
  print("adam", grad_type, copy_type, static_cast<uint32_t>(steps[0]), {&weights, &m, &v, &copy});
}

}  // namespace

int main() {
  for (const DType from : kTypes) {
    norms(from);
    for (const DType to : kTypes) {
      conversions(from, to);
      scales(from, to);
      adam(from, to);
    }
  }
  axpby();
  streams();
}
