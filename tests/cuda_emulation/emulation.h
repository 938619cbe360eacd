// The fibers behind cuda_runtime.h, and the scheduler of a block.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

namespace cuda_emulation {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 256 << 10;

enum class State { ready, at_barrier, in_collective, exited };

struct Index {
  unsigned x;
};

// Starts with ucontext and switches with _setjmp and _longjmp, which make no system call.
struct Fiber {
  Fiber() {
    stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) throw std::runtime_error("CUDA emulation: no memory for a stack");
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() { munmap(stack, kStackBytes); }

  void* stack;
  ucontext_t start;
  jmp_buf resume;
  bool started = false;
  State state = State::ready;
  Index index{};
  uint32_t mask = 0;        // of the collective it is in
  unsigned collective = 0;  // how many it has been in
};

struct Executor {
  int64_t launches = 0;         // of this thread, since it began
  int64_t parameter_bytes = 0;  // of the launch with most, since a test has asked
  // What tests have the runtime say.
  bool is_capturing = false;
  int driver = 13000;
  std::vector<std::unique_ptr<Fiber>> fibers;
  Fiber* current = nullptr;
  jmp_buf scheduler;
  Index block{}, grid{};
  int threads = 0;
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
  // What lanes exchange, [warp][collective % 2][lane]: a lane may be one collective ahead of another.
  std::vector<uint64_t> slots;
};

inline Executor& executor() {
  static thread_local Executor instance;
  return instance;
}

inline unsigned seed() {
  const char* text = getenv("AMPCTX_EMULATION_SEED");
  return text ? static_cast<unsigned>(atoi(text)) : 0;
}

inline void wait(State state) {
  Executor& self = executor();
  Fiber* fiber = self.current;
  fiber->state = state;
  if (_setjmp(fiber->resume) == 0) _longjmp(self.scheduler, 1);
}

inline void fiber_main() {
  for (;;) {
    executor().body(executor().argument);
    wait(State::exited);
  }
}

inline void resume(Executor& self, Fiber& fiber) {
  self.current = &fiber;
  if (_setjmp(self.scheduler)) return;
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = fiber.stack;
  fiber.start.uc_stack.ss_size = kStackBytes;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, fiber_main, 0);
  setcontext(&fiber.start);
}

[[noreturn]] inline void stop(Executor& self, const std::string& why) {
  self.fibers.clear();  // they hang in the middle of the kernel
  throw std::runtime_error("CUDA emulation: " + why + " (block " + std::to_string(self.block.x) + ")");
}

// Releases the lanes of each collective that all its lanes have reached. Returns whether there was one.
inline bool finish_collectives(Executor& self) {
  bool progress = false;
  for (int base = 0; base < self.threads; base += kWarp) {
    const int lanes = std::min(kWarp, self.threads - base);
    uint32_t waiting = 0, alive = 0;
    for (int lane = 0; lane < lanes; ++lane) {
      const State state = self.fibers[base + lane]->state;
      if (state == State::in_collective) waiting |= 1u << lane;
      if (state != State::exited) alive |= 1u << lane;
    }
    for (int lane = 0; lane < lanes; ++lane) {
      if (!(waiting >> lane & 1)) continue;
      const Fiber& leader = *self.fibers[base + lane];
      if (!(leader.mask >> lane & 1)) stop(self, "a lane is not in its own mask");
      if (leader.mask & ~alive) stop(self, "the mask of a warp collective names lanes that have exited");
      if ((leader.mask & waiting) != leader.mask) continue;
      for (int other = 0; other < lanes; ++other) {
        if (!(leader.mask >> other & 1)) continue;
        Fiber& fiber = *self.fibers[base + other];
        if (fiber.mask != leader.mask || fiber.collective != leader.collective) {
          stop(self, "lanes of a warp meet in different collectives");
        }
        fiber.state = State::ready;
      }
      waiting &= ~leader.mask;
      progress = true;
    }
  }
  return progress;
}

inline void run_block(Executor& self) {
  std::vector<int> order(self.threads);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937 random(seed() + self.block.x * 7919u);
  for (int i = 0; i < self.threads; ++i) {
    Fiber& fiber = *self.fibers[i];
    fiber.state = State::ready;
    fiber.index = {static_cast<unsigned>(i)};
    fiber.collective = 0;
  }
  // With a seed, warps fall asleep for some rounds, so that one may get far ahead of another.
  std::vector<unsigned> asleep((self.threads + kWarp - 1) / kWarp);
  for (;;) {
    bool ready_but_asleep = false;
    if (seed()) {
      std::shuffle(order.begin(), order.end(), random);
      for (unsigned& rounds : asleep) rounds = rounds ? rounds - 1 : random() % 4 ? 0 : random() % 16;
    }
    for (const int i : order) {
      if (self.fibers[i]->state != State::ready) continue;
      if (asleep[i / kWarp]) {
        ready_but_asleep = true;
      } else {
        resume(self, *self.fibers[i]);
      }
    }
    if (finish_collectives(self) || ready_but_asleep) continue;
    int exited = 0, at_barrier = 0;
    for (int i = 0; i < self.threads; ++i) {
      exited += self.fibers[i]->state == State::exited;
      at_barrier += self.fibers[i]->state == State::at_barrier;
    }
    if (exited == self.threads) return;
    if (at_barrier != self.threads) {
      stop(self, std::to_string(at_barrier) + " of " + std::to_string(self.threads) + " threads are at a barrier, " +
                     std::to_string(exited) + " have exited");
    }
    for (int i = 0; i < self.threads; ++i) self.fibers[i]->state = State::ready;
  }
}

// A launch as CUDA's runtime gets it.
struct Parameter {
  const void* data;
  size_t bytes, alignment;
};
struct Launch {
  const void* kernel;
  unsigned grid, block;
  const Parameter* parameters;
  size_t count;
};

// Where launches go instead of the fibers, if anywhere: tests/ptx runs what nvcc has made of the kernel.
using Interceptor = void (*)(const Launch&);
inline Interceptor& interceptor() {
  static Interceptor instance = nullptr;
  return instance;
}

// Who is told of what the host copies to the device or sets there, if anybody.
using HostWrites = void (*)(const void* data, size_t bytes);
inline HostWrites& host_writes() {
  static HostWrites instance = nullptr;
  return instance;
}

inline void tell_of_host_write(const void* data, size_t bytes) {
  if (host_writes()) host_writes()(data, bytes);
}

// Variables of the device that the host has asked the address of.
struct Variable {
  void* data;
  size_t bytes;
};
inline std::vector<Variable>& device_variables() {
  static std::vector<Variable> instance;
  return instance;
}

inline void tell_of_device_variable(void* data, size_t bytes) { device_variables().push_back({data, bytes}); }

// What a kernel that stops halfway leaves in them is gone with its context, on a GPU.
inline void forget_device_variables() {
  for (const Variable& variable : device_variables()) memset(variable.data, 0, variable.bytes);
}

template <class... Parameters, class... Arguments>
void run(void (*kernel)(Parameters...), unsigned grid, unsigned block, void*, Arguments&&... arguments) {
  Executor& self = executor();
  ++self.launches;
  self.parameter_bytes = std::max<int64_t>(self.parameter_bytes, (sizeof(std::decay_t<Parameters>) + ...));
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<std::decay_t<Parameters>...> parameters;
  } call{kernel, {std::forward<Arguments>(arguments)...}};
  if (interceptor()) {
    std::apply(
        [&](const auto&... parameter) {
          const Parameter parameters[] = {{&parameter, sizeof(parameter), alignof(decltype(parameter))}...};
          interceptor()({reinterpret_cast<const void*>(kernel), grid, block, parameters, sizeof...(parameter)});
        },
        call.parameters);
    return;
  }
  self.body = [](void* data) {
    Call* call = static_cast<Call*>(data);
    std::apply(call->kernel, call->parameters);
  };
  self.argument = &call;
  self.threads = static_cast<int>(block);
  while (self.fibers.size() < block) self.fibers.push_back(std::make_unique<Fiber>());
  self.grid = {grid};
  self.slots.assign((block + kWarp - 1) / kWarp * 2 * kWarp, 0);
  std::vector<unsigned> blocks(grid);
  std::iota(blocks.begin(), blocks.end(), 0u);
  if (seed()) std::shuffle(blocks.begin(), blocks.end(), std::mt19937(seed()));
  for (const unsigned index : blocks) {
    self.block = {index};
    run_block(self);
  }
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), unsigned grid, unsigned block, void* stream, Arguments&&... arguments) {
  try {
    run(kernel, grid, block, stream, std::forward<Arguments>(arguments)...);
  } catch (...) {
    forget_device_variables();
    throw;
  }
}

inline void wait_for_block() { wait(State::at_barrier); }

inline int lane() { return static_cast<int>(executor().current->index.x % kWarp); }

// The value that lane `source` brings to this collective.
template <class T>
T exchange(uint32_t mask, T value, int source) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  Executor& self = executor();
  Fiber& fiber = *self.current;
  uint64_t* slots = &self.slots[(fiber.index.x / kWarp * 2 + fiber.collective % 2) * kWarp];
  memcpy(&slots[lane()], &value, sizeof(value));
  fiber.mask = mask;
  wait(State::in_collective);
  ++fiber.collective;
  T result;
  memcpy(&result, &slots[source], sizeof(result));
  return result;
}

}  // namespace cuda_emulation
