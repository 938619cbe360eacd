// Runs the CPU kernels without torch and compares them with plain loops. tests/ops/test_arm.py compiles it for ARM.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "csrc/cpu/simd.h"
#include "csrc/ops.h"

using namespace ampctx;

namespace {

int failures = 0;

void expect(bool holds, const char* what, int64_t index, double found, double wanted) {
  if (holds || ++failures > 20) return;
  std::printf("%s, element %lld: %.9g, expected %.9g\n", what, static_cast<long long>(index), found, wanted);
}

uint32_t random_bits() {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 32);
}

float random_value() { return static_cast<float>(static_cast<int32_t>(random_bits())) * 0x1p-31f; }

// fp16 by the compiler, bf16 as the nearer of two neighbours: neither is how functors/convert.h does it.
float rounded(float value, DType to) {
  if (to == DType::f16) return static_cast<float>(static_cast<__fp16>(value));
  if (to == DType::f32 || !std::isfinite(value)) return value;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t below_bits = bits & 0xffff0000u, above_bits = below_bits + 0x10000u;
  float below, above;
  std::memcpy(&below, &below_bits, sizeof(below));
  std::memcpy(&above, &above_bits, sizeof(above));
  const double limit = std::copysign(0x1p128, static_cast<double>(value));  // where inf stands among the numbers
  const double down = std::fabs(static_cast<double>(value) - below);
  const double up = std::fabs((std::isinf(above) ? limit : static_cast<double>(above)) - value);
  return down < up || (down == up && (below_bits & 0x10000u) == 0) ? below : above;
}

// A tensor that begins a memory line or, if `shifted`, one element after it; read and written element by element.
class Memory {
 public:
  Memory(DType dtype, int64_t numel, bool shifted = true)
      : dtype_(dtype), numel_(numel), first_(shifted), lines_((numel + 1) * element_size(dtype) / 64 + 1) {}

  void* data() { return at(0); }
  int64_t numel() const { return numel_; }

  float get(int64_t i) const {
    const char* element = const_cast<Memory*>(this)->at(i);
    if (dtype_ == DType::f32) return read<float>(element);
    if (dtype_ == DType::f16) return static_cast<float>(read<__fp16>(element));
    const uint32_t bits = static_cast<uint32_t>(read<uint16_t>(element)) << 16;
    return read<float>(reinterpret_cast<const char*>(&bits));
  }
  void set_bits(int64_t i, uint32_t bits) {  // the low ones of a 16-bit element
    std::memcpy(at(i), &bits, static_cast<size_t>(element_size(dtype_)));
  }
  void set(int64_t i, float value) {
    const float fits = rounded(value, dtype_);
    uint32_t bits;
    std::memcpy(&bits, &fits, sizeof(bits));
    if (dtype_ == DType::bf16) bits >>= 16;
    if (dtype_ == DType::f16) {
      const __fp16 half = static_cast<__fp16>(fits);
      std::memcpy(&bits, &half, sizeof(half));
    }
    set_bits(i, bits);
  }
  void fill(bool positive = false) {
    for (int64_t i = 0; i < numel_; ++i) set(i, positive ? std::fabs(random_value()) : random_value());
  }

 private:
  template <class T>
  static T read(const char* element) {
    T value;
    std::memcpy(&value, element, sizeof(value));
    return value;
  }

  char* at(int64_t i) { return lines_[0].bytes + (first_ + i) * element_size(dtype_); }

  struct alignas(64) Line {
    char bytes[64];
  };

  DType dtype_;
  int64_t numel_, first_;
  std::vector<Line> lines_;
};

using List = std::vector<Memory>;

const std::vector<int64_t> kSizes = {1, 15, 16, 17, 63, 64, 65, 2047, 2048, 2049, 9001};

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

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

const char* name_of(const char* op, DType from, DType to) {
  static char name[64];
  static const char* const names[] = {"fp32", "fp16", "bf16"};
  std::snprintf(name, sizeof(name), "%s %s to %s", op, names[static_cast<int>(from)], names[static_cast<int>(to)]);
  return name;
}

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};

// Every 16-bit pattern, some of fp32, and those around the ends of the numbers of each type.
void conversions() {
  for (const DType from : kTypes) {
    const bool wide = from == DType::f32;
    List in{Memory(from, wide ? 200000 : 65536)};
    for (int64_t i = 0; i < in[0].numel(); ++i) in[0].set_bits(i, wide ? random_bits() : static_cast<uint32_t>(i));
    if (wide) {
      int64_t i = 0;
      for (const uint32_t edge :
           {0x33000000u, 0x33800000u, 0x38800000u, 0x477fe000u, 0x477ff000u, 0x7f7f8000u, 0x7f800000u}) {
        for (int away = -2; away <= 2; ++away) in[0].set_bits(i++, edge + static_cast<uint32_t>(away));
      }
    }
    for (const DType to : kTypes) {
      List out{Memory(to, in[0].numel())};
      Flag flag;
      cpu::scale(context(), lists_of({{from, &in}, {to, &out}}), flag, factor(1.0), nullptr);
      for (int64_t i = 0; i < in[0].numel(); ++i) {
        const float wanted = rounded(in[0].get(i), to);
        expect(same(out[0].get(i), wanted), name_of("conversion", from, to), i, out[0].get(i), wanted);
      }
      expect(flag.word != 0, name_of("found_inf", from, to), 0, flag.word, 1);
    }
  }
}

void scales() {
  for (const DType from : kTypes) {
    for (const DType to : kTypes) {
      List in = list_of(from), out = list_of(to, false);
      Flag clear, set;
      cpu::scale(context(), lists_of({{from, &in}, {to, &out}}), clear, factor(0.3), nullptr);
      for (size_t t = 0; t < in.size(); ++t) {
        for (int64_t i = 0; i < in[t].numel(); ++i) {
          const float wanted = rounded(in[t].get(i) * 0.3f, to);
          expect(same(out[t].get(i), wanted), name_of("scale", from, to), i, out[t].get(i), wanted);
        }
      }
      in.back().set(in.back().numel() - 1, std::numeric_limits<float>::infinity());
      cpu::scale(context(), lists_of({{from, &in}, {to, &out}}), set, factor(0.3), nullptr);
      expect(clear.word == 0 && set.word == 0x3f800000u, name_of("found_inf", from, to), 0, clear.word, set.word);
    }
  }
  // An output that no cache holds, from the start of a line, is written in another way.
  List in{Memory(DType::f16, 8 << 20)}, out{Memory(DType::f32, 8 << 20, false)};
  for (int64_t i = 0; i < in[0].numel(); i += 101) in[0].set(i, random_value());
  Flag flag;
  cpu::scale(context(), lists_of({{DType::f16, &in}, {DType::f32, &out}}), flag, factor(2.0), nullptr);
  for (int64_t i = 0; i < in[0].numel(); i += 101) {
    expect(out[0].get(i) == in[0].get(i) * 2, "streamed", i, out[0].get(i), in[0].get(i) * 2);
  }
}

void axpby() {
  List x = list_of(DType::bf16), y = list_of(DType::f32), out = list_of(DType::f16, false);
  Flag flag;
  const TensorLists lists = lists_of({{DType::bf16, &x}, {DType::f32, &y}, {DType::f16, &out}});
  cpu::axpby(context(), lists, flag, factor(0.3), factor(-1.7), -1);
  for (size_t t = 0; t < x.size(); ++t) {
    for (int64_t i = 0; i < x[t].numel(); ++i) {
      const float wanted = rounded(0.3f * x[t].get(i) + -1.7f * y[t].get(i), DType::f16);
      expect(same(out[t].get(i), wanted), "axpby", i, out[t].get(i), wanted);
    }
  }
}

void norms() {
  for (const DType type : kTypes) {
    List in = list_of(type);
    const TensorLists lists = lists_of({{type, &in}});
    std::vector<char> workspace(static_cast<size_t>(cpu::norms_workspace(lists, 1)));
    std::vector<float> each(in.size());
    float norm = 0;
    Flag clear, set;
    const NormOutputs outputs{&norm, nullptr, each.data(), workspace.data()};
    cpu::l2norm(context(), lists, clear, factor(0.5), outputs, nullptr);
    double total = 0;
    const auto close = [&](float found, double squares, int64_t elements) {
      const double bound = 4 * std::sqrt(static_cast<double>(elements)) * 0x1p-23;
      expect(std::fabs(found - std::sqrt(squares)) <= bound * std::sqrt(squares), name_of("norm", type, type), elements,
             found, std::sqrt(squares));
    };
    for (size_t t = 0; t < in.size(); ++t) {
      double sum = 0;
      for (int64_t i = 0; i < in[t].numel(); ++i) sum += std::pow(in[t].get(i) * 0.5, 2);
      close(each[t], sum, in[t].numel());
      total += sum;
    }
    close(norm, total, kSizes.back());
    in[3].set(16, std::nanf(""));
    cpu::l2norm(context(), lists, set, factor(0.5), outputs, nullptr);
    expect(clear.word == 0 && set.word == 0x3f800000u, "found_inf of a norm", 0, clear.word, set.word);
  }
}

// Steps of AdamW on fp32 weights, from gradients of any type, with a copy of the weights in 16 bits or without.
void adam(DType grad_type, DType copy_type) {
  const bool copies = copy_type != DType::f32;
  const AdamOptions options{0.9, 0.99, 1e-6, 0.01, true, true};
  List grads = list_of(grad_type), weights = list_of(DType::f32), m = list_of(DType::f32, false);
  List v = list_of(DType::f32, false), copy = list_of(copy_type, false);
  List plain_w = weights, plain_m = m, plain_v = v;
  std::vector<float> steps(grads.size());
  Flag flag;

  StepCall call;
  call.lists =
      copies
          ? lists_of(
                {{grad_type, &grads}, {DType::f32, &weights}, {DType::f32, &m}, {DType::f32, &v}, {copy_type, &copy}})
          : lists_of({{grad_type, &grads}, {DType::f32, &weights}, {DType::f32, &m}, {DType::f32, &v}});
  call.found_inf = flag;
  call.inv_scale = factor(0.125);
  call.lr = factor(1e-3);
  for (float& step : steps) call.steps.push_back(&step);
  call.maximize = false;
  call.unscales = false;
  call.write_back = copies ? WriteBack::copy : WriteBack::nearest;
  call.rule = StepOp<AdamOptions>::rule(options);
  std::vector<char> workspace(static_cast<size_t>(step_workspace(call.lists)));
  call.workspace = workspace.data();

  const float beta1 = 0.9f, of_g = static_cast<float>(1 - 0.9), beta2 = 0.99f,
              of_squares = static_cast<float>(1 - 0.99);
  for (int t = 1; t <= 3; ++t) {
    cpu::adam(context(), call, options);
    const float rc1 = static_cast<float>(1 / (1 - std::pow(0.9, t)));
    const float rsc2 = static_cast<float>(1 / std::sqrt(1 - std::pow(0.99, t)));
    for (size_t k = 0; k < grads.size(); ++k) {
      for (int64_t i = 0; i < grads[k].numel(); ++i) {
        const float g = grads[k].get(i) * 0.125f, w = plain_w[k].get(i);
        const float new_m = beta1 * plain_m[k].get(i) + of_g * g;
        const float new_v = beta2 * plain_v[k].get(i) + (of_squares * g) * g;
        const float u = (new_m * rc1) / (std::sqrt(new_v) * rsc2 + 1e-6f);
        plain_m[k].set(i, new_m);
        plain_v[k].set(i, new_v);
        plain_w[k].set(i, w - 1e-3f * (u + 0.01f * w));
        const float wanted = plain_w[k].get(i);
        expect(weights[k].get(i) == wanted, "weight of Adam", i, weights[k].get(i), wanted);
        expect(m[k].get(i) == new_m && v[k].get(i) == new_v, "state of Adam", i, m[k].get(i), new_m);
        if (copies) expect(copy[k].get(i) == rounded(wanted, copy_type), "copy of Adam", i, copy[k].get(i), wanted);
      }
    }
  }
  expect(steps[0] == 3, "steps of Adam", 0, steps[0], 3);
}

}  // namespace

int main() {
  conversions();
  scales();
  axpby();
  norms();
  for (const DType grad : kTypes) {
    for (const DType copy : kTypes) adam(grad, copy);
  }
  std::printf("%s of %s: %d failures\n", cpu::simd_used(), cpu::simd_built(), failures);
  return failures != 0;
}
