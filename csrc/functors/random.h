// 32 random bits for each element of a call, for stochastic rounding: a function of the seed, the step count, the
// tensor's number and the element's place in memory, and of nothing else, so that threads, blocks and launches do not
// matter.
//
//   key  = mix64(mix64(step * golden + seed) + golden * (tensor + 1))     64 bits, once per tensor
//   bits = mix32(mix32(place * golden32 + key's low half) ^ key's high half)
#pragma once

#include "host_device.h"

namespace ampctx {

struct RandomKey {
  uint32_t low, high;
};

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014).
AMPCTX_FN uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// lowbias32, the integer hash of C. Wellons' hash prospector.
AMPCTX_FN uint32_t mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

AMPCTX_FN RandomKey random_key(int64_t seed, int64_t step, int64_t tensor) {
  constexpr uint64_t golden = 0x9e3779b97f4a7c15u;
  const uint64_t of_step = mix64(static_cast<uint64_t>(step) * golden + static_cast<uint64_t>(seed));
  const uint64_t key = mix64(of_step + golden * (static_cast<uint64_t>(tensor) + 1));
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

// The key for counting places from `place` on.
AMPCTX_FN RandomKey key_at(RandomKey key, int64_t place) {
  constexpr uint32_t golden32 = 0x9e3779b1u;
  const uint64_t unsigned_place = static_cast<uint64_t>(place);
  const uint32_t page = static_cast<uint32_t>(unsigned_place >> 32);
  return {key.low + static_cast<uint32_t>(unsigned_place) * golden32 + page, key.high};
}

// The bits of the place `i` after that of the key; no multiple of 2^32 may lie between them.
AMPCTX_FN uint32_t random_bits(RandomKey key, uint32_t i) { return mix32(mix32(i * 0x9e3779b1u + key.low) ^ key.high); }

}  // namespace ampctx
