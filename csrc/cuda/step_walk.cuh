// What the kernels that take a step have in common. A block reads the step counts of its tensors and makes their
// scalars; a count is written once all blocks with a part of the tensor have read it. All look at found_inf and leave
// everything as it is where that is set.
#pragma once

#include "tickets.cuh"
#include "vectorized.cuh"

namespace ampctx::cuda {

// Advances the step counts of tensors without elements.
void advance_empty_steps(const Context& context, const StepCall& call);

// The numbers of a launch, by the rows of its table. Its step counts are the list behind those that are walked.
template <class Optimizer, int rows>
struct StepNumbers {
  TensorRule rule[rows];
  Factor lr[rows];
  alignas(Optimizer) unsigned char bytes[rows][sizeof(Optimizer)];
  unsigned* tickets;       // null: another walk of this step advances the counts
  const int64_t* numbers;  // of the tensors with elements, for random bits; null: their places
  int64_t first;           // the place of the table's first among these

  template <class Options, class Table>
  StepNumbers(const StepCall& call, const std::vector<Options>& options, const Table& table, unsigned* tickets,
              int64_t first)
      : tickets(tickets), numbers(call.numbers), first(first) {
    static_assert(rows == 1 || sizeof(*this) <= rows * kRowBytes);
    for (int i = 0; i < table.rows_used; ++i) {
      const int32_t row = table.used[i];
      rule[i] = call.rules[row], lr[i] = call.rates[row];
      new (bytes[i]) Optimizer(options[row]);
    }
  }
  // A pointer where a kernel chooses by tensor, to keep no copy in registers.
  __device__ auto optimizer(int row) const {
    const auto* const found = reinterpret_cast<const Optimizer*>(bytes[row]);
    if constexpr (rows > 1) return found;
    if constexpr (rows == 1) return *found;
  }
};

// Makes the scalars of the block's tensors from `tensor` on, kThreads of them, each by a thread: powers are slow.
// Called by all threads. `list` of the table are the step counts.
template <int list, class Table, class Numbers>
__device__ void make_scalars(const Table& table, int64_t share, const Numbers& counts, int tensor,
                             TensorScalars<float> (&scalars)[kThreads]) {
  const int64_t begin = blockIdx.x * share, end = begin + share;
  const int own = tensor + static_cast<int>(threadIdx.x);
  const bool is_here = own < table.count && table.offset[own] < end;
  double t = 0;
  __syncthreads();  // the scalars before these may still be read
  if (is_here) {
    const int64_t place = counts.first + own, number = counts.numbers ? counts.numbers[place] : place;
    t = next_step(*static_cast<const float*>(table.pointer[list][own]));
    scalars[threadIdx.x] = tensor_scalars<float>(counts.rule[table.row_of(own)], t, number);
  }
  __syncthreads();
  if (!is_here || !counts.tickets) return;
  const int64_t first = table.offset[own], last = table.offset[own + 1] - 1;
  const bool is_whole = first >= begin && last < end;
  if (is_whole || is_last_arrival_of_tensor(counts.tickets, first / share, last / share)) {
    *static_cast<float*>(table.pointer[list][own]) = static_cast<float>(t);
  }
}

// for_each_segment with the scalars of each tensor: visit(tensor, begin, size, scalars).
template <int list, class Table, class Numbers, class Visit>
__device__ __forceinline__ void for_each_step_segment(const Table& table, int64_t share, const Numbers& counts,
                                                      const Visit& visit) {
  __shared__ TensorScalars<float> scalars[kThreads];
  __shared__ int next;  // the first tensor without scalars; not in a register, which are scarce
  if (threadIdx.x == 0) next = 0;
  __syncthreads();
  for_each_segment(table, share, [&](int tensor, int64_t begin, int64_t size) {
    if (tensor >= next) {
      make_scalars<list>(table, share, counts, tensor, scalars);
      if (threadIdx.x == 0) next = tensor + kThreads;
      __syncthreads();
    }
    visit(tensor, begin, size, scalars[kThreads - (next - tensor)]);
  });
}

// What a step kernel does first: counts the step, in its first launch, and says whether it is skipped.
__device__ inline bool is_skipped(const StepParameters& call) {
  const bool skipped = call.found_inf.is_set();
  if (blockIdx.x == 0 && threadIdx.x == 0) count_skip_element(call.skips, skipped, skipped);
  return skipped;
}

// Weights out of params (list 1) and extras (the last list), and back into them. extras: the last list holds
// extras; may_lack: its pointers may be null.
template <WriteBack mode>
using Mode = std::integral_constant<WriteBack, mode>;

template <bool extras, int depth, int n>
__device__ __forceinline__ void load_weights(WriteBack mode, float (&value)[depth][n]) {
  if constexpr (extras) {
    const auto load = [&](auto by) {
#pragma unroll
      for (int k = 0; k < n; ++k) value[1][k] = load_weight(decltype(by)::value, value[1][k], value[depth - 1][k]);
    };
    if (mode == WriteBack::split) load(Mode<WriteBack::split>{});
    if (mode == WriteBack::kahan) load(Mode<WriteBack::kahan>{});
  }
}

template <bool extras, bool may_lack, int depth, int n, class Indices>
__device__ __forceinline__ void store_weights(WriteBack mode, DType param, RandomKey key, float (&value)[depth][n],
                                              const Indices& indices) {
  const auto store = [&](auto by) {
    constexpr WriteBack this_mode = decltype(by)::value;
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const uint32_t random = this_mode == WriteBack::stochastic ? random_bits(key_at(key, indices.of(k)), 0) : 0;
      float rest = 0;
      store_weight(this_mode, param, value[1][k], random, value[1][k], rest);
      if constexpr (has_extras(this_mode)) value[depth - 1][k] = rest;
    }
  };
  if constexpr (extras) {
    if (mode == WriteBack::copy) store(Mode<WriteBack::copy>{});
    if (mode == WriteBack::split) store(Mode<WriteBack::split>{});
    if (mode == WriteBack::kahan) store(Mode<WriteBack::kahan>{});
  }
  if constexpr (!extras || may_lack) {
    if (mode == WriteBack::stochastic) store(Mode<WriteBack::stochastic>{});
  }
}

// How gradients are scaled. Kernels that store the unscaled ones (`unscales`) take the sign apart; they are others than
// those that do not, as a gradient that is kept until it is stored takes registers.
template <bool unscales>
struct GradientScale {
  float scale, sign;

  __device__ GradientScale(float inv_scale, bool maximize)
      : scale(maximize && !unscales ? -inv_scale : inv_scale), sign(maximize ? -1.0f : 1.0f) {}

  // What the step computes with.
  __device__ __forceinline__ float of(float& grad) const {
    if constexpr (!unscales) return grad * scale;
    grad *= scale;
    return grad * sign;
  }
};

// How many blocks a multiprocessor is to run at once: as many as registers allow without spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1000
constexpr int resident_blocks_for(int lists) { return lists <= 3 ? 3 : 2; }
#else
constexpr int resident_blocks_for(int lists) { return lists <= 6 ? 2 : 1; }
#endif

}  // namespace ampctx::cuda
