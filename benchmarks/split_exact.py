"""Walks every fp32 bit pattern through the "split" write back of csrc/functors/write_back.h, and times it.

    python benchmarks/split_exact.py [--every N]      N: only every Nth pattern

Compiles the functors themselves with g++ -O3. Checked for each pattern, through floats and through bf16 and int16 as
they lie in memory: the two halves give it back. The one exception is a signalling NaN that bf16 can hold, which the
store makes quiet, as every store of a bf16 does; no arithmetic produces one. Exits with 1 at the first pattern that
comes back as another.
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
bool is_signalling(uint32_t bits) { return is_nan(bits) && (bits & 0x00400000u) == 0; }

}  // namespace

int main(int, char** arguments) {
  const uint64_t every = strtoull(arguments[1], nullptr, 10);
  uint64_t patterns = 0, made_quiet = 0;
  for (uint64_t first = 0; first < 1ull << 32; first += kBlock * every) {
    uint32_t pattern[kBlock], by_floats[kBlock], by_memory[kBlock];
    int n = 0;
    for (; n < kBlock && first + n * every < 1ull << 32; ++n) pattern[n] = static_cast<uint32_t>(first + n * every);
    for (int i = 0; i < n; ++i) {
      float p, extra;
      store_weight(WriteBack::split, DType::bf16, float_of(pattern[i]), 0u, p, extra);
      by_floats[i] = bits_of(load_weight(WriteBack::split, p, extra));
      const uint16_t high = float_to_bfloat16(p);
      const int16_t remainder = static_cast<int16_t>(static_cast<int32_t>(extra));
      by_memory[i] = bits_of(load_weight(WriteBack::split, bfloat16_to_float(high), static_cast<float>(remainder)));
    }
    for (int i = 0; i < n; ++i) {
      const bool quiet = by_memory[i] != pattern[i] && is_signalling(pattern[i]) && is_nan(by_memory[i]);
      if (by_floats[i] != pattern[i] || (by_memory[i] != pattern[i] && !quiet)) {
        printf("%08x came back as %08x, through memory as %08x\n", pattern[i], by_floats[i], by_memory[i]);
        return 1;
      }
      made_quiet += quiet;
    }
    patterns += static_cast<uint64_t>(n);
  }
  using Printed = unsigned long long;
  printf("%llu patterns came back, %llu signalling NaNs among them made quiet\n", static_cast<Printed>(patterns),
         static_cast<Printed>(made_quiet));
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
