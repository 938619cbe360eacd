// Steps on CUDA whose states are 8-bit codes, or bf16 that is rounded at random: functors/codes.h.
//
// A walk of its own, as the 64 elements of a block of codes share a scale that depends on all of them. A thread takes
// eight elements that lie side by side, so that eight lanes have a block, whose largest element they find with three
// shuffles. The walk through single elements at the ends of a share has no place for that: here shares are cut at
// multiples of 64 elements within each tensor, and what a thread has beyond the end of a tensor is 0.
//
// Each kernel serves all types, write backs and unscaling ops, so that the library has few of them: a list that a call
// does not have costs a branch.
#pragma once

#include "step_walk.cuh"

namespace ampctx::cuda {

constexpr int kLanesOfBlock = kCodeBlock / kVector;

// The first state of an optimizer is an average of gradients, the second one of squares.
__host__ __device__ constexpr DType code_of_state(int state) { return state == 0 ? DType::i8 : DType::u8; }

// Whether an optimizer with that many states has kernels for this. Who has none is refused by check_state_types.
template <class Options>
constexpr bool may_round_states(int states) {
  for (int state = 0; state < states; ++state) {
    if (state >= kCodedStates || StepOp<Options>::states.begin()[state].code != code_of_state(state)) return false;
  }
  return states > 0;
}

// Whether a call needs them.
inline bool rounds_states(const StepCall& call) {
  for (int state = 0; state < call.states(); ++state) {
    const DType dtype = call.lists.dtype[2 + state];
    if (is_code(dtype) || (call.stochastic_state && dtype == DType::bf16)) return true;
  }
  return false;
}

// The lists of these kernels: grads, params, states and extras; behind them step counts and, for each state, scales.
// Of lists that a call does not have, the pointers are null.
template <int states>
struct RoundedLists {
  static constexpr int kExtras = 2 + states, kWalked = 3 + states, kSteps = kWalked, kScales = kSteps + 1;
  static constexpr int kDepth = kScales + states;
  static_assert(kDepth <= kMaxLists);

  static TensorLists of(const StepCall& call) {
    const TensorLists& given = call.lists;
    const std::vector<void*> none(given.numel.size(), nullptr);
    TensorLists lists;
    lists.depth = kDepth;
    lists.numel = given.numel;
    const auto add = [&](int list, DType dtype, const std::vector<void*>& pointers) {
      lists.dtype[list] = dtype;
      lists.pointer[list] = pointers;
    };
    for (int list = 0; list < kExtras; ++list) add(list, given.dtype[list], given.pointer[list]);
    const bool extras = has_extras(call.write_back);
    add(kExtras, extras ? given.dtype[kExtras] : DType::f32, extras ? given.pointer[kExtras] : none);
    add(kSteps, DType::f32, given.pointer[given.depth]);
    for (int state = 0; state < states; ++state) {
      const bool is_coded = is_code(given.dtype[2 + state]);
      add(kScales + state, DType::f32, is_coded ? call.scales[state] : none);
    }
    return lists;
  }
};

// What codes say without their scales. A table, because they take divisions.
template <int states>
struct CodeTable {
  float value[states][256];

  // Called by all threads, with a barrier behind it.
  __device__ void fill() {
#pragma unroll 1
    for (int q = threadIdx.x; q < 256; q += kThreads) {
      value[0][q] = unscaled<DType::i8>(static_cast<int8_t>(q));
      if constexpr (states > 1) value[1][q] = unscaled<DType::u8>(q);
    }
  }
};

// The elements of a thread, `count` of which are in the tensor.
struct Octet {
  int64_t at;
  int count;

  __device__ __forceinline__ Places places() const { return {at, at + kVector / 2}; }
};

// visit(octet) for the part of a segment that begins and ends with blocks of codes: for all lanes of a warp or none.
template <class Table, class Visit>
__device__ __forceinline__ void for_each_octet(const Table& table, int tensor, int64_t begin, int64_t size,
                                               const Visit& visit) {
  const int64_t numel = table.offset[tensor + 1] - table.offset[tensor];
  const int64_t blocks_end = code_blocks(begin + size) * kCodeBlock, end = blocks_end < numel ? blocks_end : numel;
  const int lane = threadIdx.x % kWarp, before = threadIdx.x - lane;
  for (int64_t of_warp = code_blocks(begin) * kCodeBlock + before * kVector; of_warp < end;
       of_warp += kThreads * kVector) {
    const int64_t at = of_warp + lane * kVector, left = end - at;
    visit(Octet{at, left < 0 ? 0 : left < kVector ? static_cast<int>(left) : kVector});
  }
}

// Bits of states that round to nearest.
constexpr uint32_t kToNearest = 0x80008000u;
static_assert(kNearest == (kToNearest & 0xffff) * 0x1p-16f);

// How a call rounds, besides what all steps are given.
struct RoundingParameters {
  bool is_random, unscales;

  explicit RoundingParameters(const StepCall& call) : is_random(call.stochastic_state), unscales(call.unscales) {}
};

// The numbers that a thread computes with: gradients, weights, and room for extras, as load_weights() has them.
using Weights = float[3][kVector];

// The lists of one tensor, of which a thread takes an octet at a time through a step.
template <int states, class Table>
class RoundedTensor {
 public:
  using Lists = RoundedLists<states>;

  __device__ RoundedTensor(const Table& table, int tensor, const CodeTable<states>& codes, bool is_random,
                           WriteBack write_back)
      : table_(table), tensor_(tensor), codes_(codes), is_random_(is_random), write_back_(write_back) {
#pragma unroll
    for (int list = 0; list < Lists::kWalked; ++list) {
      const int64_t bytes = is_code(table.dtype[list]) ? kVector : kAccessBytes;
      is_aligned_ = is_aligned_ && reinterpret_cast<uintptr_t>(table.pointer[list][tensor]) % bytes == 0;
    }
  }

  // All loads before the first conversion: Raw of vectorized.cuh.
  template <bool grads>
  __device__ __forceinline__ void load(const Octet& octet, Weights& value, float (&state)[states][kVector]) const {
    Raw raw[Lists::kWalked];
    float scale[states];
#pragma unroll
    for (int list = grads ? 0 : 1; list < Lists::kExtras; ++list) load_list(list, octet, raw[list]);
    if (reads_extras(write_back_)) load_list(Lists::kExtras, octet, raw[Lists::kExtras]);
#pragma unroll
    for (int s = 0; s < states; ++s) scale[s] = load_scale(s, octet);
    if constexpr (grads) from_raw(table_.dtype[0], raw[0], 0, value[0]);
    from_raw(table_.dtype[1], raw[1], 0, value[1]);
    if (reads_extras(write_back_)) {
      from_raw(table_.dtype[Lists::kExtras], raw[Lists::kExtras], 0, value[2]);
      load_weights<true>(write_back_, value);
    }
    read<0>(raw[2], scale[0], state[0]);
    if constexpr (states > 1) read<1>(raw[3], scale[1], state[1]);
  }

  __device__ __forceinline__ void store_grads(const Octet& octet, const float (&grad)[kVector]) const {
    store_values(0, octet, grad);
  }

  __device__ __forceinline__ void store_weights(const Octet& octet, RandomKey key, Weights& value) const {
    cuda::store_weights<true>(write_back_, table_.dtype[1], key, value, octet.places());
    cuda::store_weights<false>(write_back_, table_.dtype[1], key, value, octet.places());
    store_values(1, octet, value[1]);
    if (has_extras(write_back_)) store_values(Lists::kExtras, octet, value[2]);
  }

  // Rounds the states and stores them. Then they are what was stored.
  __device__ __forceinline__ void store_states(const Octet& octet, RandomKey key,
                                               float (&state)[states][kVector]) const {
    uint32_t bits[kVector];
    const RandomKey here = key_at(key, octet.at);
#pragma unroll
    for (int k = 0; k < kVector; ++k) bits[k] = is_random_ ? bits_of_states(random_bits(here, k)) : kToNearest;
    store_state<0>(octet, bits, state[0]);
    if constexpr (states > 1) store_state<1>(octet, bits, state[1]);
  }

 private:
  // Elements beyond the end are 0.
  __device__ __forceinline__ void load_list(int list, const Octet& octet, Raw& raw) const {
    const DType dtype = table_.dtype[list];
    if (octet.count == kVector && is_aligned_) {
      is_code(dtype) ? load_words<2, 0>(base(list), octet.at, raw)
                     : load_vector(base(list), dtype, true, octet.places(), raw);
    } else {
      dtype == DType::f32 ? load_singly<uint32_t>(list, octet, raw)
      : is_code(dtype)    ? load_singly<uint8_t>(list, octet, raw)
                          : load_singly<uint16_t>(list, octet, raw);
    }
  }

  __device__ __forceinline__ void store_list(int list, const Octet& octet, const Raw& raw) const {
    const DType dtype = table_.dtype[list];
    if (octet.count == kVector && is_aligned_) {
      is_code(dtype) ? store_words<2, 0>(base(list), octet.at, raw)
                     : store_vector(base(list), dtype, true, octet.places(), raw);
    } else {
      dtype == DType::f32 ? store_singly<uint32_t>(list, octet, raw)
      : is_code(dtype)    ? store_singly<uint8_t>(list, octet, raw)
                          : store_singly<uint16_t>(list, octet, raw);
    }
  }

  // The scale of the octet's block, of a state in codes. The thread that stores it is the one that reads it: no other
  // could read after that. Called by all lanes of a warp.
  __device__ __forceinline__ float load_scale(int state, const Octet& octet) const {
    if (!is_code(table_.dtype[2 + state])) return 0;
    const int lane = threadIdx.x % kWarp, first = lane / kLanesOfBlock * kLanesOfBlock;
    const float own = lane == first && octet.count > 0 ? scales(state)[octet.at / kCodeBlock] : 0.0f;
    return __shfl_sync(kAllLanes, own, first);
  }

  __device__ __forceinline__ void store_scale(int state, const Octet& octet, float scale) const {
    if (threadIdx.x % kLanesOfBlock != 0 || octet.count == 0) return;
    scales(state)[octet.at / kCodeBlock] = scale;
  }

  // Looked up for each access: less to keep while elements are computed.
  __device__ __forceinline__ void* base(int list) const { return tensor_data(table_, list, tensor_); }
  __device__ __forceinline__ float* scales(int state) const {
    return static_cast<float*>(base(Lists::kScales + state));
  }

  template <class Word>
  __device__ __forceinline__ void load_singly(int list, const Octet& octet, Raw& raw) const {
    constexpr int each = sizeof(uint32_t) / sizeof(Word), bits = 8 * sizeof(Word);
    const auto* const words = static_cast<const Word*>(base(list)) + octet.at;
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const uint32_t word = k < octet.count ? words[k] : 0;
      raw.word[k / each] = k % each == 0 ? word : raw.word[k / each] | word << k % each * bits;
    }
  }

  template <class Word>
  __device__ __forceinline__ void store_singly(int list, const Octet& octet, const Raw& raw) const {
    constexpr int each = sizeof(uint32_t) / sizeof(Word), bits = 8 * sizeof(Word);
    auto* const words = static_cast<Word*>(base(list)) + octet.at;
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      if (k < octet.count) words[k] = static_cast<Word>(raw.word[k / each] >> k % each * bits);
    }
  }

  template <int state>
  __device__ __forceinline__ void read(const Raw& raw, float scale, float (&value)[kVector]) const {
    const DType dtype = table_.dtype[2 + state];
    if (dtype != code_of_state(state)) return from_raw(dtype, raw, 0, value);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const uint32_t q = raw.word[k / 4] >> k % 4 * 8 & 0xff;
      value[k] = with_scale<code_of_state(state)>(codes_.value[state][q], scale);
    }
  }

  // Rounds a state, for all lanes of a warp at once, and returns the scale of the octet's block.
  template <int state>
  __device__ __forceinline__ float round(const Octet& octet, const uint32_t (&bits)[kVector], float (&value)[kVector],
                                         Raw& raw) const {
    const DType dtype = table_.dtype[2 + state];
    constexpr DType code = code_of_state(state);
    if (dtype != code) {
      if (is_random_ && dtype == DType::bf16) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          value[k] = round_stochastically(value[k], DType::bf16, bits_of_state(bits[k], state));
        }
      }
      to_raw(dtype, value, 0, raw);
      return 0;
    }
    uint32_t most = 0;
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      value[k] = k < octet.count ? value[k] : 0.0f;
      most = largest(most, value[k]);
    }
#pragma unroll
    for (int distance = kLanesOfBlock / 2; distance > 0; distance /= 2) {
      most = larger(most, __shfl_sync(kAllLanes, most, threadIdx.x % kWarp ^ distance));
    }
    const float scale = code_scale<code>(most);
    raw.word[0] = raw.word[1] = 0;
    if (!(scale > 0)) return scale;
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const float place = rounding_place(bits_of_state(bits[k], state));
      const int32_t q = encode_scaled<code>(value[k], scale, place);
      raw.word[k / 4] |= (static_cast<uint32_t>(q) & 0xff) << k % 4 * 8;
    }
    return scale;
  }

  __device__ __forceinline__ void store_values(int list, const Octet& octet, const float (&value)[kVector]) const {
    Raw raw;
    to_raw(table_.dtype[list], value, 0, raw);
    store_list(list, octet, raw);
  }

  template <int state>
  __device__ __forceinline__ void store_state(const Octet& octet, const uint32_t (&bits)[kVector],
                                              float (&value)[kVector]) const {
    Raw raw;
    const float scale = round<state>(octet, bits, value, raw);
    store_list(2 + state, octet, raw);
    if (is_code(table_.dtype[2 + state])) store_scale(state, octet, scale);
    read<state>(raw, scale, value);
  }

  const Table& table_;
  const int tensor_;
  const CodeTable<states>& codes_;
  const bool is_random_;
  const WriteBack write_back_;
  bool is_aligned_ = true;  // all lists: one branch for the loads of all
};

constexpr int kRoundedBlocks = 2;  // that a multiprocessor is to run at once

}  // namespace ampctx::cuda
