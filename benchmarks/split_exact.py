"""Walks every fp32 bit pattern through the "split" write back of csrc/functors/write_back.h, and times it.

    python benchmarks/split_exact.py [--every N]      N: only every Nth pattern

Compiles the functors themselves with g++ -O3. Checked for each pattern, through floats and through bf16 and int16 as
they lie in memory: the two halves give every number back, every bit of it, and of a NaN make a NaN of its sign, the
bf16 half alone being one, too. Exits with 1 at the first pattern that comes back otherwise.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"
SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include "functors/write_back.h"

using namespace ampctx;

namespace {

constexpr int kBlock = 4096;

bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

// Whether `pattern` may come back as `result`.
bool is_same(uint32_t pattern, uint32_t result) {
  return is_nan(pattern) ? is_nan(result) && (pattern ^ result) >> 31 == 0 : result == pattern;
}

}  // namespace

int main(int, char** arguments) {
  const uint64_t every = strtoull(arguments[1], nullptr, 10);
  uint64_t patterns = 0, nans = 0;
  for (uint64_t first = 0; first < 1ull << 32; first += kBlock * every) {
    uint32_t pattern[kBlock], half[kBlock], by_floats[kBlock], by_memory[kBlock];
    int n = 0;
    for (; n < kBlock && first + n * every < 1ull << 32; ++n) pattern[n] = static_cast<uint32_t>(first + n * every);
    for (int i = 0; i < n; ++i) {
      float p, extra;
      store_weight(WriteBack::split, DType::bf16, float_of(pattern[i]), 0u, p, extra);
      by_floats[i] = bits_of(load_weight(WriteBack::split, p, extra));
      const uint16_t high = float_to_bfloat16(p);
      half[i] = bits_of(bfloat16_to_float(high));
      const int16_t remainder = static_cast<int16_t>(static_cast<int32_t>(extra));
      by_memory[i] = bits_of(load_weight(WriteBack::split, bfloat16_to_float(high), static_cast<float>(remainder)));
    }
    for (int i = 0; i < n; ++i) {
      const bool has_half = is_nan(pattern[i]) == is_nan(half[i]);
      if (!is_same(pattern[i], by_floats[i]) || !is_same(pattern[i], by_memory[i]) || !has_half) {
        printf("%08x came back as %08x, through memory as %08x\n", pattern[i], by_floats[i], by_memory[i]);
        return 1;
      }
      nans += is_nan(pattern[i]);
    }
    patterns += static_cast<uint64_t>(n);
  }
  using Printed = unsigned long long;
  printf("%llu patterns came back, %llu NaNs among them as NaNs\n", static_cast<Printed>(patterns),
         static_cast<Printed>(nans));
}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth pattern (default: all)")
    every = parser.parse_args().every
    if every < 1:
        parser.error(f"--every: {every} is not positive")
    cxx = os.environ.get("CXX", "g++")
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "split_exact.cpp", Path(folder) / "split_exact"
        source.write_text(SOURCE)
        flags = ["-O3", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", f"-I{CSRC}"]
        subprocess.run([cxx, *flags, str(source), "-o", str(program)], check=True)
        start = time.perf_counter()
        code = subprocess.run([program, str(every)]).returncode
        print(f"{time.perf_counter() - start:.1f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
