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
    TensorLists lists = given;
    lists.depth = kDepth;
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

// That of the block.
template <int states>
__device__ __forceinline__ CodeTable<states>& code_table() {
  __shared__ CodeTable<states> table;
  return table;
}

// Bits of states that round to nearest.
constexpr uint32_t kToNearest = 0x80008000u;
static_assert(kNearest == (kToNearest & 0xffff) * 0x1p-16f);

// The lists of one tensor, of which a thread takes an octet at a time through a step: `count_` elements from `at_` on.
template <int states, class Table>
class RoundedTensor {
 public:
  using Lists = RoundedLists<states>;
  using Values = float[Lists::kWalked][kVector];

  __device__ RoundedTensor(const Table& table, int tensor, bool is_random, RandomKey key)
      : table_(table), tensor_(tensor), is_random_(is_random), key_(key) {
#pragma unroll
    for (int list = 0; list < Lists::kWalked; ++list) {
      const int64_t bytes = is_code(table.dtype[list]) ? kVector : kAccessBytes;
      is_aligned_ = is_aligned_ && reinterpret_cast<uintptr_t>(table.pointer[list][tensor]) % bytes == 0;
    }
  }

  // functor(v, *this) with v[list][k], for the part of a segment that begins and ends with blocks of codes, and for all
  // lanes of a warp or none. Reads the lists in the set `read` before, stores those in `written` after.
  template <class Functor>
  __device__ __forceinline__ void walk(int64_t begin, int64_t size, unsigned read, unsigned written, Functor& functor) {
    const int64_t numel = table_.offset[tensor_ + 1] - table_.offset[tensor_];
    const int64_t blocks_end = code_blocks(begin + size) * kCodeBlock, end = blocks_end < numel ? blocks_end : numel;
    const int lane = threadIdx.x % kWarp, before = threadIdx.x - lane;
    for (int64_t of_warp = code_blocks(begin) * kCodeBlock + before * kVector; of_warp < end;
         of_warp += kThreads * kVector) {
      at_ = of_warp + lane * kVector;
      const int64_t left = end - at_;
      count_ = left < 0 ? 0 : left < kVector ? static_cast<int>(left) : kVector;
      Values value;
      load(read, value);
      functor(value, *this);
      store(written, value);
    }
  }

  // As ElementIndices.
  static constexpr bool kMayBeCodes = true;
  static __host__ __device__ constexpr bool are_adjacent() { return true; }
  __device__ __forceinline__ int64_t of(int k) const { return at_ + k; }
  __device__ __forceinline__ bool holds(int k) const { return k < count_; }

  // Rounds the states and stores them. Then they are what was stored.
  __device__ __forceinline__ void store_states(Values& value) const {
    uint32_t bits[kVector];
    const RandomKey here = key_at(key_, at_);
#pragma unroll
    for (int k = 0; k < kVector; ++k) bits[k] = is_random_ ? bits_of_states(random_bits(here, k)) : kToNearest;
    store_state<0>(bits, value[2]);
    if constexpr (states > 1) store_state<1>(bits, value[3]);
  }

 private:
  static __host__ __device__ constexpr bool is_state(int list) { return list >= 2 && list < Lists::kExtras; }

  // All loads before the first conversion: Raw of vectorized.cuh.
  __device__ __forceinline__ void load(unsigned read, Values& value) const {
    Raw raw[Lists::kWalked];
    float scale[states];
#pragma unroll
    for (int list = 0; list < Lists::kWalked; ++list) {
      if (contains(read, list)) move_list<Load>(list, raw[list]);
    }
#pragma unroll
    for (int s = 0; s < states; ++s) scale[s] = load_scale(s);
#pragma unroll
    for (int list = 0; list < Lists::kWalked; ++list) {
      if (!is_state(list) && contains(read, list)) from_raw(table_.dtype[list], raw[list], 0, value[list]);
    }
    read_state<0>(raw[2], scale[0], value[2]);
    if constexpr (states > 1) read_state<1>(raw[3], scale[1], value[3]);
  }

  __device__ __forceinline__ void store(unsigned written, Values& value) const {
    if (contains(written, 2)) store_states(value);
#pragma unroll
    for (int list = 0; list < Lists::kWalked; ++list) {
      if (is_state(list) || !contains(written, list)) continue;
      Raw raw;
      to_raw(table_.dtype[list], value[list], 0, raw);
      move_list<Store>(list, raw);
    }
  }

  template <class Move, class Words>
  __device__ __forceinline__ void move_list(int list, Words& raw) const {
    move_vector<Move>(base(list), table_.dtype[list], count_ == kVector && is_aligned_, *this, raw);
  }

  // The scale of the octet's block, of a state in codes. The thread that will store the new scale reads the old one and
  // sends it to the other lanes, which could read too late. Called by all lanes of a warp.
  __device__ __forceinline__ float load_scale(int state) const {
    if (!is_code(table_.dtype[2 + state])) return 0;
    const int lane = threadIdx.x % kWarp, first = lane / kLanesOfBlock * kLanesOfBlock;
    const float own = lane == first && count_ > 0 ? scales(state)[at_ / kCodeBlock] : 0.0f;
    return __shfl_sync(kAllLanes, own, first);
  }

  // Looked up for each access: less to keep while elements are computed.
  __device__ __forceinline__ void* base(int list) const { return table_.pointer[list][tensor_]; }
  __device__ __forceinline__ float* scales(int state) const {
    return static_cast<float*>(base(Lists::kScales + state));
  }

  template <int state>
  __device__ __forceinline__ void read_state(const Raw& raw, float scale, float (&value)[kVector]) const {
    const DType dtype = table_.dtype[2 + state];
    if (dtype != code_of_state(state)) return from_raw(dtype, raw, 0, value);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const uint32_t q = raw.word[k / 4] >> k % 4 * 8 & 0xff;
      value[k] = with_scale<code_of_state(state)>(code_table<states>().value[state][q], scale);
    }
  }

  // Rounds a state, for all lanes of a warp at once, and returns the scale of the octet's block.
  template <int state>
  __device__ __forceinline__ float round(const uint32_t (&bits)[kVector], float (&value)[kVector], Raw& raw) const {
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
      value[k] = holds(k) ? value[k] : 0.0f;
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

  template <int state>
  __device__ __forceinline__ void store_state(const uint32_t (&bits)[kVector], float (&value)[kVector]) const {
    Raw raw;
    const float scale = round<state>(bits, value, raw);
    move_list<Store>(2 + state, raw);
    const bool stores_scale = is_code(table_.dtype[2 + state]) && threadIdx.x % kLanesOfBlock == 0 && count_ > 0;
    if (stores_scale) scales(state)[at_ / kCodeBlock] = scale;
    read_state<state>(raw, scale, value);
  }

  const Table& table_;
  const int tensor_;
  const bool is_random_;
  const RandomKey key_;
  bool is_aligned_ = true;  // all lists: one branch for the loads of all
  int64_t at_ = 0;
  int count_ = 0;
};

constexpr int kRoundedBlocks = 2;  // that a multiprocessor is to run at once

// The functor over a segment. Of the lists in `written`, a call has gradients and extras or not.
template <bool rounds, unsigned written, int at_once, class Table, class Functor>
__device__ __forceinline__ void walk_segment(const Table& table, int tensor, int64_t begin, int64_t size, unsigned read,
                                             const StepParameters& call, Functor& functor) {
  constexpr int depth = Functor::kDepth;
  if constexpr (rounds) {
    const unsigned lacks =
        (call.unscales ? 0 : one_of_lists(0)) | (has_extras(call.write_back) ? 0 : one_of_lists(depth - 1));
    RoundedTensor<depth - 3, Table> lists(table, tensor, call.stochastic_state, functor.tensor.key);
    lists.walk(begin, size, read, written & ~lacks, functor);
  } else {
    for_each_element<depth, written, at_once>(table, tensor, begin, size, read, functor);
  }
}

// for_each_table for the kernels of a step, through `depth` lists that end with the step counts.
template <bool rounds, int depth, int rows, class Launch>
void for_each_step_table(const StepCall& call, const Launch& launch) {
  if constexpr (rounds) {
    using Lists = RoundedLists<depth - 4>;
    for_each_table<Lists::kDepth, rows>(Lists::of(call), launch);
  } else {
    for_each_table<depth, rows>(call.lists, launch);
  }
}

}  // namespace ampctx::cuda
