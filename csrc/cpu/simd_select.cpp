// Chooses the compiled inner loops for this machine.
#include <cstdlib>
#include <string>

#include "../error.h"
#include "simd.h"

namespace ampctx::cpu {

extern const Simd simd_baseline;
#ifdef AMPCTX_SIMD_X86_64
extern const Simd simd_avx2;
extern const Simd simd_avx512;
#endif

namespace {

// Null if AMPCTX_SIMD has an unknown name.
const Simd* choose() {
  const char* variable = std::getenv("AMPCTX_SIMD");
  const std::string cap = variable ? variable : "";
  if (cap == "baseline") return &simd_baseline;
  if (!cap.empty() && cap != "avx2" && cap != "avx512") return nullptr;
#ifdef AMPCTX_SIMD_X86_64
  // The instructions of x86-64-v4 and x86-64-v3 that compilers use for these loops.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && cap != "avx2") return &simd_avx512;
  if (avx2) return &simd_avx2;
#endif
  return &simd_baseline;
}

const Simd* chosen() {
  static const Simd* const choice = choose();
  return choice;
}

}  // namespace

const Simd& simd() {
  if (!chosen()) fail("AMPCTX_SIMD is ", std::getenv("AMPCTX_SIMD"), ", expected baseline, avx2 or avx512");
  return *chosen();
}

const char* simd_used() { return chosen() ? chosen()->name : "none: AMPCTX_SIMD is invalid"; }

#ifdef AMPCTX_SIMD_X86_64
const char* simd_built() { return "\"baseline\", \"avx2\", \"avx512\""; }
#else
const char* simd_built() { return "\"baseline\""; }
#endif

}  // namespace ampctx::cpu
