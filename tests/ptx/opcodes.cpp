// What each opcode does. Arithmetic is that of the PTX ISA: results rounded once, a NaN result is the GPU's own, floats
// become integers by saturation.
//
// An opcode that is not in the table is an error of translate.py; so are the forms that let ptxas contract products and
// sums (mul.f32 for mul.rn.f32), as results would differ.
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "warp.h"

namespace ptx {
namespace {

template <class T>
T as(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(value));  // x86-64 and AArch64 are little-endian
  return value;
}

float canonical(float x) { return x == x ? x : as<float>(0x7fffffff); }
double canonical(double x) { return x == x ? x : as<double>(0x7fffffffffffffff); }

// Signed numbers are kept with their sign in all 64 bits.
template <class T>
uint64_t bits(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    uint64_t result = 0;
    std::memcpy(&result, &value, sizeof(value));
    return result;
  } else {
    return static_cast<uint64_t>(static_cast<std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>(value));
  }
}

template <class T>
constexpr int kBits = sizeof(T) * 8;

// --- arithmetic ------------------------------------------------------------------------------------------------------

// Operations: what becomes of one lane. Integers wrap around.
struct Add {
  template <class T>
  static T of(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      return canonical(a + b);
    } else {
      return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    }
  }
};
struct Sub {
  template <class T>
  static T of(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      return canonical(a - b);
    } else {
      return static_cast<T>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
    }
  }
};
struct Mul {
  template <class T>
  static T of(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      return canonical(a * b);
    } else {
      return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    }
  }
};
struct Div {
  template <class T>
  static T of(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      return canonical(a / b);
    } else {
      if (b == 0) fail("division by zero");
      if constexpr (std::is_signed_v<T>) {
        if (b == -1) return Sub::of(T{0}, a);
      }
      return static_cast<T>(a / b);
    }
  }
};
struct Rem {
  template <class T>
  static T of(T a, T b) {
    if (b == 0) fail("division by zero");
    if constexpr (std::is_signed_v<T>) {
      if (b == -1) return 0;
    }
    return static_cast<T>(a % b);
  }
};
// Of a NaN and a number, the number.
struct Min {
  template <class T>
  static T of(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      if (a != a || b != b) return canonical(a != a ? b : a);
      if (a == b) return std::signbit(a) ? a : b;
    }
    return a < b ? a : b;
  }
};
struct Max {
  template <class T>
  static T of(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      if (a != a || b != b) return canonical(a != a ? b : a);
      if (a == b) return std::signbit(a) ? b : a;
    }
    return a > b ? a : b;
  }
};
struct And {
  template <class T>
  static T of(T a, T b) {
    return a & b;
  }
};
struct Or {
  template <class T>
  static T of(T a, T b) {
    return a | b;
  }
};
struct Xor {
  template <class T>
  static T of(T a, T b) {
    return a ^ b;
  }
};
struct Neg {
  template <class T>
  static T of(T a) {
    if constexpr (std::is_floating_point_v<T>) {
      return -a;
    } else {
      return Sub::of(T{0}, a);
    }
  }
};
struct Not {
  template <class T>
  static T of(T a) {
    return static_cast<T>(~a);
  }
};
struct Abs {
  template <class T>
  static T of(T a) {
    if constexpr (std::is_floating_point_v<T>) {
      return std::fabs(a);
    } else {
      return a < 0 ? Sub::of(T{0}, a) : a;
    }
  }
};
struct Sqrt {
  template <class T>
  static T of(T a) {
    return canonical(std::sqrt(a));
  }
};
struct Rcp {
  template <class T>
  static T of(T a) {
    return canonical(1 / a);
  }
};
// An approximation whose last bits the ISA leaves open: its low half is 0, a subnormal number counts as 0.
struct RcpApprox {
  static double of(double a) {
    const double x = std::fpclassify(a) == FP_SUBNORMAL ? std::copysign(0.0, a) : a;
    return as<double>(bits(canonical(1 / x)) & 0xffffffff00000000u);
  }
};
struct Trunc {
  template <class T>
  static T of(T a) {
    return canonical(std::trunc(a));
  }
};
struct Fma {
  template <class T>
  static T of(T a, T b, T c) {
    return canonical(std::fma(a, b, c));
  }
};
struct Mad {
  template <class T>
  static T of(T a, T b, T c) {
    return Add::of(Mul::of(a, b), c);
  }
};
// `width` bits from `from` up; the ISA takes 8 bits of either.
struct Bfe {
  static uint32_t of(uint32_t a, uint32_t from, uint32_t width) {
    from &= 0xff, width &= 0xff;
    const uint64_t shifted = from < 64 ? uint64_t{a} >> from : 0;
    return static_cast<uint32_t>(width < 32 ? shifted & ((uint64_t{1} << width) - 1) : shifted);
  }
};

// Four bytes of the eight of a and b, by the nibbles of `which`; the highest bit of one repeats the sign of its byte.
struct Prmt {
  static uint32_t of(uint32_t a, uint32_t b, uint32_t which) {
    const uint64_t bytes = uint64_t{b} << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
      const uint32_t nibble = which >> 4 * i & 0xf, byte = bytes >> 8 * (nibble & 7) & 0xff;
      result |= (nibble & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
    }
    return result;
  }
};

template <class T, class Operation>
void unary(Warp& warp, const Instruction& in, uint32_t lanes) {
  uint64_t* const d = warp.write(in.operand[0]);
  const uint64_t* const a = warp.read(in.operand[1]);
  for_each_lane(lanes, [&](int lane) { d[lane] = bits<T>(Operation::of(as<T>(a[lane]))); });
}

template <class T, class Operation>
void binary(Warp& warp, const Instruction& in, uint32_t lanes) {
  uint64_t* const d = warp.write(in.operand[0]);
  const uint64_t *const a = warp.read(in.operand[1]), *const b = warp.read(in.operand[2]);
  for_each_lane(lanes, [&](int lane) { d[lane] = bits<T>(Operation::of(as<T>(a[lane]), as<T>(b[lane]))); });
}

template <class T, class Operation>
void ternary(Warp& warp, const Instruction& in, uint32_t lanes) {
  uint64_t* const d = warp.write(in.operand[0]);
  const uint64_t *const a = warp.read(in.operand[1]), *const b = warp.read(in.operand[2]),
                        *const c = warp.read(in.operand[3]);
  for_each_lane(lanes,
                [&](int lane) { d[lane] = bits<T>(Operation::of(as<T>(a[lane]), as<T>(b[lane]), as<T>(c[lane]))); });
}

template <class From, class To>
void mul_wide(Warp& warp, const Instruction& in, uint32_t lanes) {
  uint64_t* const d = warp.write(in.operand[0]);
  const uint64_t *const a = warp.read(in.operand[1]), *const b = warp.read(in.operand[2]);
  for_each_lane(lanes, [&](int lane) {
    d[lane] = bits<To>(static_cast<To>(as<From>(a[lane])) * static_cast<To>(as<From>(b[lane])));
  });
}

// Distances beyond the type shift everything out.
template <class T, bool left>
void shift(Warp& warp, const Instruction& in, uint32_t lanes) {
  uint64_t* const d = warp.write(in.operand[0]);
  const uint64_t *const a = warp.read(in.operand[1]), *const b = warp.read(in.operand[2]);
  for_each_lane(lanes, [&](int lane) {
    const uint32_t distance = as<uint32_t>(b[lane]);
    const T value = as<T>(a[lane]);
    if (distance < kBits<T>) {
      d[lane] = bits<T>(static_cast<T>(left ? static_cast<uint64_t>(value) << distance : value >> distance));
    } else {
      d[lane] = !left && std::is_signed_v<T> && value < 0 ? bits<T>(static_cast<T>(-1)) : 0;
    }
  });
}

template <class To, class From>
To convert(From value) {
  if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>) {  // rounded to an integer before
    constexpr To lowest = std::numeric_limits<To>::min(), highest = std::numeric_limits<To>::max();
    if (value != value) return sizeof(To) == 8 ? static_cast<To>(uint64_t{1} << 63) : 0;
    if (value <= static_cast<From>(lowest)) return lowest;
    if (value >= static_cast<From>(highest)) return highest;
    return static_cast<To>(value);
  } else if constexpr (std::is_floating_point_v<To>) {
    return canonical(static_cast<To>(value));
  } else {
    return static_cast<To>(value);
  }
}

template <class To, class From>
void cvt(Warp& warp, const Instruction& in, uint32_t lanes) {
  uint64_t* const d = warp.write(in.operand[0]);
  const uint64_t* const a = warp.read(in.operand[1]);
  for_each_lane(lanes, [&](int lane) { d[lane] = bits<To>(convert<To>(as<From>(a[lane]))); });
}

void cvt_f32_f16(Warp& warp, const Instruction& in, uint32_t lanes) {
  uint64_t* const d = warp.write(in.operand[0]);
  const uint64_t* const a = warp.read(in.operand[1]);
  for_each_lane(lanes, [&](int lane) { d[lane] = bits(canonical(static_cast<float>(as<_Float16>(a[lane])))); });
}

void cvt_f16_f32(Warp& warp, const Instruction& in, uint32_t lanes) {
  uint64_t* const d = warp.write(in.operand[0]);
  const uint64_t* const a = warp.read(in.operand[1]);
  for_each_lane(lanes, [&](int lane) {
    const float value = as<float>(a[lane]);
    const _Float16 half = static_cast<_Float16>(value);
    uint16_t word = 0x7fff;
    if (value == value) std::memcpy(&word, &half, sizeof(word));
    d[lane] = word;
  });
}

// --- predicates ------------------------------------------------------------------------------------------------------

enum class Compare { eq, ne, lt, le, gt, ge };

// `unordered`: what a NaN makes of it.
template <class T, Compare compare, bool unordered>
void setp(Warp& warp, const Instruction& in, uint32_t lanes) {
  const uint64_t *const a = warp.read(in.operand[1]), *const b = warp.read(in.operand[2]);
  uint32_t holds = 0;
  for_each_lane(lanes, [&](int lane) {
    const T x = as<T>(a[lane]), y = as<T>(b[lane]);
    bool result = compare == Compare::eq   ? x == y
                  : compare == Compare::ne ? x != y
                  : compare == Compare::lt ? x < y
                  : compare == Compare::le ? x <= y
                  : compare == Compare::gt ? x > y
                                           : x >= y;
    if (std::is_floating_point_v<T> && (x != x || y != y)) result = unordered;
    holds |= static_cast<uint32_t>(result) << lane;
  });
  uint32_t& d = warp.predicate(in.operand[0]);
  d = (d & ~lanes) | holds;
}

// Whether one is a NaN, or none is.
template <class T, bool wanted>
void setp_nan(Warp& warp, const Instruction& in, uint32_t lanes) {
  const uint64_t *const a = warp.read(in.operand[1]), *const b = warp.read(in.operand[2]);
  uint32_t holds = 0;
  for_each_lane(lanes, [&](int lane) {
    const T x = as<T>(a[lane]), y = as<T>(b[lane]);
    holds |= static_cast<uint32_t>((x != x || y != y) == wanted) << lane;
  });
  uint32_t& d = warp.predicate(in.operand[0]);
  d = (d & ~lanes) | holds;
}

template <class Operation>
void of_predicates(Warp& warp, const Instruction& in, uint32_t lanes) {
  const uint32_t result = Operation::of(warp.predicate(in.operand[1]), warp.predicate(in.operand[2]));
  uint32_t& d = warp.predicate(in.operand[0]);
  d = (d & ~lanes) | (result & lanes);
}

template <bool negated>
void copy_predicate(Warp& warp, const Instruction& in, uint32_t lanes) {
  const uint32_t from = warp.predicate(in.operand[1]), result = negated ? ~from : from;
  uint32_t& d = warp.predicate(in.operand[0]);
  d = (d & ~lanes) | (result & lanes);
}

// The immediate says which.
void set_predicate(Warp& warp, const Instruction& in, uint32_t lanes) {
  uint32_t& d = warp.predicate(in.operand[0]);
  d = in.immediate ? d | lanes : d & ~lanes;
}

void selp(Warp& warp, const Instruction& in, uint32_t lanes) {
  uint64_t* const d = warp.write(in.operand[0]);
  const uint64_t *const a = warp.read(in.operand[1]), *const b = warp.read(in.operand[2]);
  const uint32_t choice = warp.predicate(in.operand[3]);
  for_each_lane(lanes, [&](int lane) { d[lane] = (choice >> lane & 1 ? a : b)[lane]; });
}

// --- moves -----------------------------------------------------------------------------------------------------------

void mov(Warp& warp, const Instruction& in, uint32_t lanes) {
  uint64_t* const d = warp.write(in.operand[0]);
  const uint64_t* const a = warp.read(in.operand[1]);
  for_each_lane(lanes, [&](int lane) { d[lane] = a[lane]; });
}

template <class Half>
void pack(Warp& warp, const Instruction& in, uint32_t lanes) {
  uint64_t* const d = warp.write(in.operand[0]);
  const uint64_t *const low = warp.read(in.operand[1]), *const high = warp.read(in.operand[2]);
  for_each_lane(lanes, [&](int lane) {
    d[lane] = uint64_t{as<Half>(low[lane])} | uint64_t{as<Half>(high[lane])} << kBits<Half>;
  });
}

template <class Half>
void unpack(Warp& warp, const Instruction& in, uint32_t lanes) {
  uint64_t *const low = warp.write(in.operand[0]), *const high = warp.write(in.operand[1]);
  const uint64_t* const a = warp.read(in.operand[2]);
  for_each_lane(lanes, [&](int lane) {
    const uint64_t value = a[lane];  // may be one of the two
    low[lane] = as<Half>(value);
    high[lane] = as<Half>(value >> kBits<Half>);
  });
}

template <uint32_t Index>
void special(Warp& warp, const Instruction& in, uint32_t lanes) {
  uint64_t* const d = warp.write(in.operand[0]);
  const Block& block = warp.block();
  for_each_lane(lanes, [&](int lane) {
    const uint32_t of_block[] = {block.index, block.threads, block.grid};
    d[lane] = Index == 0 ? warp.thread(lane) : of_block[Index - 1];
  });
}

// --- memory ----------------------------------------------------------------------------------------------------------

enum class Space { global, shared, parameters };

// A read lies within one parameter: what lies between them is nobody's.
const uint8_t* parameter(Warp& warp, uint64_t address, int bytes) {
  check_alignment(address, bytes);
  for (const Parameter& parameter : warp.block().kernel->parameters) {
    const auto begin = static_cast<uint64_t>(parameter.offset);
    const uint64_t end = begin + static_cast<uint64_t>(parameter.bytes);
    if (begin <= address && address + static_cast<uint64_t>(bytes) <= end) return warp.block().parameters + address;
  }
  fail("read of " + std::to_string(bytes) + " bytes at " + std::to_string(address) + " is not within a parameter");
}

// operand[0] is the address, then come the registers. Of lanes that follow one another with the same address the first
// two stand for all: that a third thread reads there too is nothing new to any check.
template <Space space, class T, int count>
void load(Warp& warp, const Instruction& in, uint32_t lanes) {
  constexpr int bytes_read = sizeof(T) * count;
  const uint64_t* const base = warp.read(in.operand[0]);
  uint64_t* to[count];
  for (int i = 0; i < count; ++i) to[i] = warp.write(in.operand[1 + i]);
  uint64_t value[count], last = 0;
  int same = 0;  // lanes with the address `last`
  for (uint32_t rest = lanes; rest; rest &= rest - 1) {
    const int lane = warp.lane = __builtin_ctz(rest);
    const uint64_t address = base[lane] + static_cast<uint64_t>(in.immediate);
    same = address == last ? same + 1 : 1;
    last = address;
    if (same <= 2) {
      const uint8_t* memory;
      if constexpr (space == Space::global) {
        memory = warp.block().global->read(address, bytes_read, warp.thread_of_grid(lane));
      } else if constexpr (space == Space::shared) {
        memory = warp.block().shared->read(address, bytes_read, warp.thread(lane));
      } else {
        memory = parameter(warp, address, bytes_read);
      }
      T found[count];
      std::memcpy(found, memory, sizeof(found));
      for (int i = 0; i < count; ++i) value[i] = bits<T>(found[i]);
    }
    for (int i = 0; i < count; ++i) to[i][lane] = value[i];
  }
}

template <Space space, class T, int count>
void store(Warp& warp, const Instruction& in, uint32_t lanes) {
  constexpr int bytes_written = sizeof(T) * count;
  const uint64_t* const base = warp.read(in.operand[0]);
  const uint64_t* from[count];
  for (int i = 0; i < count; ++i) from[i] = warp.read(in.operand[1 + i]);
  for (uint32_t rest = lanes; rest; rest &= rest - 1) {
    const int lane = warp.lane = __builtin_ctz(rest);
    const uint64_t address = base[lane] + static_cast<uint64_t>(in.immediate);
    T value[count];
    for (int i = 0; i < count; ++i) value[i] = as<T>(from[i][lane]);
    uint8_t* memory;
    if constexpr (space == Space::global) {
      memory = warp.block().global->write(address, bytes_written, warp.thread_of_grid(lane), value);
    } else {
      memory = warp.block().shared->write(address, bytes_written, warp.thread(lane));
    }
    std::memcpy(memory, value, sizeof(value));
  }
}

void increment(Warp& warp, const Instruction& in, uint32_t lanes) {
  const uint64_t *const base = warp.read(in.operand[1]), *const last = warp.read(in.operand[2]);
  for (uint32_t rest = lanes; rest; rest &= rest - 1) {
    const int lane = warp.lane = __builtin_ctz(rest);
    const uint64_t address = base[lane] + static_cast<uint64_t>(in.immediate);
    const uint32_t before = warp.block().global->increment(address, as<uint32_t>(last[lane]));
    warp.write(in.operand[0])[lane] = before;
  }
}

void fence(Warp& warp, const Instruction&, uint32_t) { warp.block().global->fence(); }

// Lanes that are together stay so.
void sync_warp(Warp&, const Instruction&, uint32_t) {}

// --- where lanes go --------------------------------------------------------------------------------------------------

void branch(Warp& warp, const Instruction& in, uint32_t lanes) {
  for_each_lane(lanes, [&](int lane) { warp.pc[lane] = static_cast<int32_t>(in.immediate); });
}

void leave(Warp& warp, const Instruction&, uint32_t lanes) { warp.running &= ~lanes; }

void barrier(Warp& warp, const Instruction&, uint32_t lanes) {
  warp.running &= ~lanes;
  warp.at_barrier |= lanes;
}

// operand: the result, whether the source is in range (-1: nobody asks), value, distance or source, bounds, lanes that
// take part. Lanes that come first wait for the others.
template <bool from_one>
void shuffle(Warp& warp, const Instruction& in, uint32_t lanes) {
  const uint64_t *const value = warp.read(in.operand[2]), *const distance = warp.read(in.operand[3]),
                        *const bounds = warp.read(in.operand[4]), *const members = warp.read(in.operand[5]);
  if (lanes != as<uint32_t>(members[__builtin_ctz(lanes)]) && !warp.is_complete) {
    for_each_lane(lanes, [&](int lane) { --warp.pc[lane]; });
    warp.running &= ~lanes;
    warp.in_collective |= lanes;
    return;
  }
  warp.is_complete = false;
  uint64_t* const d = warp.write(in.operand[0]);
  uint64_t result[kWarp];
  uint32_t in_range = 0;
  for_each_lane(lanes, [&](int lane) {
    warp.lane = lane;
    if (!(as<uint32_t>(members[lane]) >> lane & 1)) fail("a lane is not in its own mask");
  });
  for_each_lane(lanes, [&](int lane) {
    warp.lane = lane;
    const uint32_t mask = as<uint32_t>(members[lane]);
    if (mask & ~warp.alive()) fail("the mask of a warp collective names lanes that have exited");
    if (mask != lanes) fail("lanes of a warp meet in different collectives");
    if (as<uint32_t>(bounds[lane]) != kWarp - 1) fail("shfl with bounds that are not those of the warp");
    const uint32_t first = from_one ? 0 : static_cast<uint32_t>(lane);
    const uint32_t source = first + (as<uint32_t>(distance[lane]) & (kWarp - 1));
    if (source < kWarp) in_range |= 1u << lane;
    result[lane] = value[source < kWarp ? source : static_cast<uint32_t>(lane)];
  });
  for_each_lane(lanes, [&](int lane) { d[lane] = result[lane]; });
  if (in.operand[1] < 0) return;
  uint32_t& p = warp.predicate(in.operand[1]);
  p = (p & ~lanes) | in_range;
}

// --- the table -------------------------------------------------------------------------------------------------------

struct Opcode {
  Handler handler;
  bool is_control = false;
};
using Opcodes = std::unordered_map<std::string, Opcode>;

template <class Visit>
void for_each_integer(const Visit& visit) {
  visit("u8", uint8_t{}), visit("s8", int8_t{}), visit("u16", uint16_t{}), visit("s16", int16_t{});
  visit("u32", uint32_t{}), visit("s32", int32_t{}), visit("u64", uint64_t{}), visit("s64", int64_t{});
}

template <class T>
void add_integer(Opcodes& table, const std::string& type) {
  table["add." + type] = {binary<T, Add>};
  table["sub." + type] = {binary<T, Sub>};
  table["mul.lo." + type] = {binary<T, Mul>};
  table["mad.lo." + type] = {ternary<T, Mad>};
  table["div." + type] = {binary<T, Div>};
  table["rem." + type] = {binary<T, Rem>};
  table["min." + type] = {binary<T, Min>};
  table["max." + type] = {binary<T, Max>};
  table["neg." + type] = {unary<T, Neg>};
  table["shr." + type] = {shift<T, false>};
  if constexpr (std::is_signed_v<T>) table["abs." + type] = {unary<T, Abs>};
  for_each_integer([&](const char* from, auto zero) { table["cvt." + type + "." + from] = {cvt<T, decltype(zero)>}; });
  table["cvt.rn.f32." + type] = {cvt<float, T>};
  table["cvt.rn.f64." + type] = {cvt<double, T>};
  table["cvt.rzi." + type + ".f32"] = {cvt<T, float>};
  table["cvt.rzi." + type + ".f64"] = {cvt<T, double>};
}

template <class T>
void add_bits(Opcodes& table, const std::string& type) {
  table["and." + type] = {binary<T, And>};
  table["or." + type] = {binary<T, Or>};
  table["xor." + type] = {binary<T, Xor>};
  table["not." + type] = {unary<T, Not>};
  table["shl." + type] = {shift<T, true>};
}

template <class T>
void add_float(Opcodes& table, const std::string& type) {
  table["add.rn." + type] = {binary<T, Add>};
  table["sub.rn." + type] = {binary<T, Sub>};
  table["mul.rn." + type] = {binary<T, Mul>};
  table["div.rn." + type] = {binary<T, Div>};
  table["fma.rn." + type] = {ternary<T, Fma>};
  table["min." + type] = {binary<T, Min>};
  table["max." + type] = {binary<T, Max>};
  table["neg." + type] = {unary<T, Neg>};
  table["abs." + type] = {unary<T, Abs>};
  table["sqrt.rn." + type] = {unary<T, Sqrt>};
  table["rcp.rn." + type] = {unary<T, Rcp>};
  table["cvt.rzi." + type + "." + type] = {unary<T, Trunc>};
  table["setp.equ." + type] = {setp<T, Compare::eq, true>};
  table["setp.neu." + type] = {setp<T, Compare::ne, true>};
  table["setp.ltu." + type] = {setp<T, Compare::lt, true>};
  table["setp.leu." + type] = {setp<T, Compare::le, true>};
  table["setp.gtu." + type] = {setp<T, Compare::gt, true>};
  table["setp.geu." + type] = {setp<T, Compare::ge, true>};
  table["setp.nan." + type] = {setp_nan<T, true>};
  table["setp.num." + type] = {setp_nan<T, false>};
}

template <class T>
void add_ordered(Opcodes& table, const std::string& type) {
  table["setp.eq." + type] = {setp<T, Compare::eq, false>};
  table["setp.ne." + type] = {setp<T, Compare::ne, false>};
  table["setp.lt." + type] = {setp<T, Compare::lt, false>};
  table["setp.le." + type] = {setp<T, Compare::le, false>};
  table["setp.gt." + type] = {setp<T, Compare::gt, false>};
  table["setp.ge." + type] = {setp<T, Compare::ge, false>};
}

template <class T, int count>
void add_access(Opcodes& table, const std::string& type) {
  table["ld.global." + type] = {load<Space::global, T, count>};
  table["ld.shared." + type] = {load<Space::shared, T, count>};
  table["ld.param." + type] = {load<Space::parameters, T, count>};
  table["st.global." + type] = {store<Space::global, T, count>};
  table["st.shared." + type] = {store<Space::shared, T, count>};
}

template <class T>
void add_type(Opcodes& table, const std::string& type) {
  add_access<T, 1>(table, type);
  add_access<T, 2>(table, "v2." + type);
  add_access<T, 4>(table, "v4." + type);
  table["mov." + type] = {mov};
  table["selp." + type] = {selp};
}

Opcodes make_table() {
  Opcodes table;
  for_each_integer([&](const char* type, auto zero) {
    using T = decltype(zero);
    add_type<T>(table, type);
    add_ordered<T>(table, type);
    if constexpr (sizeof(T) > 1) add_integer<T>(table, type);
  });
  add_type<uint8_t>(table, "b8");
  add_type<uint16_t>(table, "b16");
  add_type<uint32_t>(table, "b32");
  add_type<uint64_t>(table, "b64");
  add_type<float>(table, "f32");
  add_type<double>(table, "f64");
  add_bits<uint16_t>(table, "b16");
  add_bits<uint32_t>(table, "b32");
  add_bits<uint64_t>(table, "b64");
  add_ordered<uint16_t>(table, "b16");
  add_ordered<uint32_t>(table, "b32");
  add_ordered<uint64_t>(table, "b64");
  add_ordered<float>(table, "f32");
  add_ordered<double>(table, "f64");
  add_float<float>(table, "f32");
  add_float<double>(table, "f64");
  table["mul.wide.s16"] = {mul_wide<int16_t, int32_t>};
  table["mul.wide.u16"] = {mul_wide<uint16_t, uint32_t>};
  table["mul.wide.s32"] = {mul_wide<int32_t, int64_t>};
  table["mul.wide.u32"] = {mul_wide<uint32_t, uint64_t>};
  table["bfe.u32"] = {ternary<uint32_t, Bfe>};
  table["prmt.b32"] = {ternary<uint32_t, Prmt>};
  table["rcp.approx.ftz.f64"] = {unary<double, RcpApprox>};
  table["cvt.f64.f32"] = {cvt<double, float>};
  table["cvt.rn.f32.f64"] = {cvt<float, double>};
  table["cvt.f32.f16"] = {cvt_f32_f16};
  table["cvt.rn.f16.f32"] = {cvt_f16_f32};
  table["and.pred"] = {of_predicates<And>};
  table["or.pred"] = {of_predicates<Or>};
  table["xor.pred"] = {of_predicates<Xor>};
  table["mov.pred"] = {copy_predicate<false>};
  table["not.pred"] = {copy_predicate<true>};
  table["set.pred"] = {set_predicate};
  table["pack.b32"] = {pack<uint16_t>};
  table["pack.b64"] = {pack<uint32_t>};
  table["unpack.b32"] = {unpack<uint16_t>};
  table["unpack.b64"] = {unpack<uint32_t>};
  table["mov.%tid.x"] = {special<0>};
  table["mov.%ctaid.x"] = {special<1>};
  table["mov.%ntid.x"] = {special<2>};
  table["mov.%nctaid.x"] = {special<3>};
  table["cvta.to.global.u64"] = {mov};
  table["shfl.sync.down.b32"] = {shuffle<false>, true};
  table["shfl.sync.idx.b32"] = {shuffle<true>, true};
  table["atom.global.inc.u32"] = {increment};
  table["membar.gl"] = {fence};
  table["bar.warp.sync"] = {sync_warp};
  table["bra"] = {branch, true};
  table["ret"] = {leave, true};
  table["bar.sync"] = {barrier, true};
  return table;
}

}  // namespace

bool find_handler(const std::string& opcode, Instruction& instruction) {
  static const Opcodes table = make_table();
  const auto found = table.find(opcode);
  if (found == table.end()) return false;
  instruction.handler = found->second.handler;
  instruction.is_control = found->second.is_control;
  return true;
}

}  // namespace ptx
