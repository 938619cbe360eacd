// Steps on CUDA whose states are 8-bit codes, or bf16 that is rounded at random: functors/codes.h.
//
// A walk of its own, as the 64 elements of a block of codes share a scale that depends on all of them. A thread takes
// eight elements that lie side by side, so that eight lanes have a block, whose largest element they find with three
// shuffles. The walk through single elements at the ends of a share has no place for that: here shares are cut at
// multiples of 64 elements within each tensor, and what a thread has beyond the end of a tensor is 0.
//
// Few programs need these kernels, and each serves all types, write backs and unscaling ops, so that they are few: what
// an unused list costs them is a branch, and registers that they would not gain a third block with.
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
    if (state >= kCodedStates || StepOp<Options>::states[state].code != code_of_state(state)) return false;
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

// Loads and stores the lists of one tensor.
template <int states, class Table>
class TensorAccess {
 public:
  using Lists = RoundedLists<states>;

  __device__ TensorAccess(const Table& table, int tensor, bool has_extras) : table_(table) {
#pragma unroll
    for (int list = 0; list < Lists::kWalked; ++list) {
      base_[list] = list < Lists::kExtras || has_extras ? tensor_data(table, list, tensor) : nullptr;
      const int64_t bytes = is_code(table.dtype[list]) ? kVector : kAccessBytes;
      aligned_[list] = reinterpret_cast<uintptr_t>(base_[list]) % bytes == 0;
    }
#pragma unroll
    for (int state = 0; state < states; ++state) {
      const bool is_coded = is_code(table.dtype[2 + state]);
      scales_[state] = is_coded ? static_cast<float*>(tensor_data(table, Lists::kScales + state, tensor)) : nullptr;
    }
  }

  // Elements beyond the end are 0.
  __device__ __forceinline__ void load(int list, const Octet& octet, Raw& raw) const {
    const DType dtype = table_.dtype[list];
    if (octet.count == kVector && aligned_[list]) {
      is_code(dtype) ? load_words<2, 0>(base_[list], octet.at, raw)
                     : load_vector(base_[list], dtype, true, octet.places(), raw);
    } else {
      dtype == DType::f32 ? load_singly<uint32_t>(list, octet, raw)
      : is_code(dtype)    ? load_singly<uint8_t>(list, octet, raw)
                          : load_singly<uint16_t>(list, octet, raw);
    }
  }

  __device__ __forceinline__ void store(int list, const Octet& octet, const Raw& raw) const {
    const DType dtype = table_.dtype[list];
    if (octet.count == kVector && aligned_[list]) {
      is_code(dtype) ? store_words<2, 0>(base_[list], octet.at, raw)
                     : store_vector(base_[list], dtype, true, octet.places(), raw);
    } else {
      dtype == DType::f32 ? store_singly<uint32_t>(list, octet, raw)
      : is_code(dtype)    ? store_singly<uint8_t>(list, octet, raw)
                          : store_singly<uint16_t>(list, octet, raw);
    }
  }

  // The scale of the octet's block, of a state in codes.
  __device__ __forceinline__ float load_scale(int state, const Octet& octet) const {
    return scales_[state] && octet.count > 0 ? scales_[state][octet.at / kCodeBlock] : 0.0f;
  }

  __device__ __forceinline__ void store_scale(int state, const Octet& octet, float scale) const {
    if (threadIdx.x % kLanesOfBlock == 0 && octet.count > 0) scales_[state][octet.at / kCodeBlock] = scale;
  }

  __device__ __forceinline__ DType dtype(int list) const { return table_.dtype[list]; }

 private:
  template <class Word>
  __device__ __forceinline__ void load_singly(int list, const Octet& octet, Raw& raw) const {
    constexpr int each = sizeof(uint32_t) / sizeof(Word), bits = 8 * sizeof(Word);
    const auto* const words = static_cast<const Word*>(base_[list]) + octet.at;
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const uint32_t word = k < octet.count ? words[k] : 0;
      raw.word[k / each] = k % each == 0 ? word : raw.word[k / each] | word << k % each * bits;
    }
  }

  template <class Word>
  __device__ __forceinline__ void store_singly(int list, const Octet& octet, const Raw& raw) const {
    constexpr int each = sizeof(uint32_t) / sizeof(Word), bits = 8 * sizeof(Word);
    auto* const words = static_cast<Word*>(base_[list]) + octet.at;
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      if (k < octet.count) words[k] = static_cast<Word>(raw.word[k / each] >> k % each * bits);
    }
  }

  const Table& table_;
  void* base_[Lists::kWalked];
  float* scales_[states];
  bool aligned_[Lists::kWalked];
};

// What a kernel knows of states besides their tensors.
template <int states>
struct StateRounding {
  const CodeTable<states>& codes;
  bool is_random;

  // The elements of a state from `first` on.
  template <int state, int n>
  __device__ __forceinline__ void read(DType dtype, const Raw& raw, float scale, int first, float (&value)[n]) const {
    if (dtype != code_of_state(state)) return from_raw(dtype, raw, first, value);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const uint32_t q = raw.word[(first + k) / 4] >> (first + k) % 4 * 8 & 0xff;
      value[k] = with_scale<code_of_state(state)>(codes.value[state][q], scale);
    }
  }

  // Rounds a state, for all lanes of a warp at once, and returns the scale of the octet's block. `random`: of elements.
  template <int state>
  __device__ __forceinline__ float round(DType dtype, const uint32_t (&random)[kVector], const Octet& octet,
                                         float (&value)[kVector], Raw& raw) const {
    constexpr DType code = code_of_state(state);
    float scale = 0;
    if (dtype == code) {
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
      scale = code_scale<code>(most);
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const float place = is_random ? rounding_place(state_bits(random[k], state)) : kNearest;
        const uint32_t q = static_cast<uint32_t>(encode<code>(value[k], scale, place)) & 0xff;
        raw.word[k / 4] = k % 4 == 0 ? q : raw.word[k / 4] | q << k % 4 * 8;
      }
      return scale;
    }
    if (is_random && dtype == DType::bf16) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        value[k] = round_stochastically(value[k], DType::bf16, state_bits(random[k], state));
      }
    }
    to_raw(dtype, value, 0, raw);
    return scale;
  }
};

// Eight elements of a thread on their way through a step.
template <int states, class Table>
class StepOctet {
 public:
  using Lists = RoundedLists<states>;

  __device__ __forceinline__ StepOctet(const TensorAccess<states, Table>& access, const StateRounding<states>& rounding,
                                       WriteBack write_back, const Octet& octet)
      : access_(access), rounding_(rounding), write_back_(write_back), octet_(octet) {}

  // All loads before the first conversion: access.cuh.
  __device__ __forceinline__ void load(bool grads) {
#pragma unroll
    for (int list = grads ? 0 : 1; list < Lists::kExtras; ++list) access_.load(list, octet_, raw_[list]);
    if (reads_extras(write_back_)) access_.load(Lists::kExtras, octet_, raw_[Lists::kExtras]);
#pragma unroll
    for (int state = 0; state < states; ++state) scale_[state] = access_.load_scale(state, octet_);
  }

  // The values of n elements, weights as what params and extras stand for.
  template <int n>
  __device__ __forceinline__ void read(int first, float (&value)[Lists::kWalked][n]) const {
#pragma unroll
    for (int list = 0; list < 2; ++list) from_raw(access_.dtype(list), raw_[list], first, value[list]);
    rounding_.template read<0>(access_.dtype(2), raw_[2], scale_[0], first, value[2]);
    if constexpr (states > 1) rounding_.template read<1>(access_.dtype(3), raw_[3], scale_[1], first, value[3]);
    if (reads_extras(write_back_)) {
      from_raw(access_.dtype(Lists::kExtras), raw_[Lists::kExtras], first, value[Lists::kExtras]);
      load_weights<true>(write_back_, value);
    }
  }

  template <int n>
  __device__ __forceinline__ void keep_grads(int first, const float (&value)[n]) {
    to_raw(access_.dtype(0), value, first, raw_[0]);
  }

  // Weights are value[1].
  template <int n>
  __device__ __forceinline__ void keep_weights(int first, RandomKey key, float (&value)[Lists::kWalked][n]) {
    const int64_t at = octet_.at + first;
    store_weights<true>(write_back_, access_.dtype(1), key, value, Places{at, at});
    store_weights<false>(write_back_, access_.dtype(1), key, value, Places{at, at});
    to_raw(access_.dtype(1), value[1], first, raw_[1]);
    if (!has_extras(write_back_)) return;
    to_raw(access_.dtype(Lists::kExtras), value[Lists::kExtras], first, raw_[Lists::kExtras]);
  }

  __device__ __forceinline__ void store_grads() const { access_.store(0, octet_, raw_[0]); }

  __device__ __forceinline__ void store_weights_and_extras() const {
    access_.store(1, octet_, raw_[1]);
    if (has_extras(write_back_)) access_.store(Lists::kExtras, octet_, raw_[Lists::kExtras]);
  }

  // Rounds the states and stores them. read() then has what was stored.
  __device__ __forceinline__ void store_states(RandomKey key, float (&value)[states][kVector]) {
    uint32_t random[kVector];
    const RandomKey here = key_at(key, octet_.at);
#pragma unroll
    for (int k = 0; k < kVector; ++k) random[k] = rounding_.is_random ? random_bits(here, k) : 0;
    store_state<0>(random, value[0]);
    if constexpr (states > 1) store_state<1>(random, value[1]);
  }

  __device__ __forceinline__ bool has(int k) const { return k < octet_.count; }

 private:
  template <int state>
  __device__ __forceinline__ void store_state(const uint32_t (&random)[kVector], float (&value)[kVector]) {
    const DType dtype = access_.dtype(2 + state);
    scale_[state] = rounding_.template round<state>(dtype, random, octet_, value, raw_[2 + state]);
    access_.store(2 + state, octet_, raw_[2 + state]);
    if (is_code(dtype)) access_.store_scale(state, octet_, scale_[state]);
  }

  const TensorAccess<states, Table>& access_;
  const StateRounding<states>& rounding_;
  WriteBack write_back_;
  Octet octet_;
  Raw raw_[Lists::kWalked];
  float scale_[states];
};

// visit(octet) for each StepOctet of a segment.
template <int states, class Table, class Visit>
__device__ __forceinline__ void for_each_step_octet(const Table& table, int tensor, int64_t begin, int64_t size,
                                                    const StateRounding<states>& rounding, WriteBack write_back,
                                                    const Visit& visit) {
  const TensorAccess<states, Table> access(table, tensor, has_extras(write_back));
  for_each_octet(table, tensor, begin, size, [&](const Octet& octet) {
    StepOctet<states, Table> elements(access, rounding, write_back, octet);
    visit(elements);
  });
}

// How a call rounds, besides what all steps are given.
struct RoundingParameters {
  bool is_random, unscales;

  explicit RoundingParameters(const StepCall& call) : is_random(call.stochastic_state), unscales(call.unscales) {}
};

constexpr int kRoundedBlocks = 2;  // that a multiprocessor is to run at once
constexpr int kRoundedAtOnce = kVector / 4;

}  // namespace ampctx::cuda
