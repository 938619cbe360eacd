// The ops that are no optimizers, on CUDA: functors/elementwise.h and functors/loss_scale.h. Of a step, the counts of
// tensors without elements.
#include "norms.cuh"
#include "step_walk.cuh"

namespace ampctx::cuda {
namespace {

template <class Table>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const __grid_constant__ Table table, int64_t share, FoundInf found_inf, ClippedFactor factor,
                 unsigned* tickets, ScaleUpdate update) {
  const float scale = factor.get();
  bool finite = true;
  for_each_segment(table, share, [&](int tensor, int64_t begin, int64_t size) {
    for_each_element<2, one_of_lists(1)>(table, tensor, begin, size, one_of_lists(0),
                                         [&](auto& value, const ElementIndices&) {
#pragma unroll
                                           for (int k = 0; k < kCount<decltype(value)>; ++k) {
                                             finite = finite && is_finite(value[0][k]);
                                             value[1][k] = scale_element(value[0][k], scale);
                                           }
                                         });
  });
  if (!finite) *found_inf.word = found_inf.raised;
  if (!update.state.scale || !is_last_block(tickets)) return;
  if (threadIdx.x == 0) apply(update);
}

template <class Table>
__global__ void __launch_bounds__(kThreads) axpby_kernel(const __grid_constant__ Table table, int64_t share,
                                                         FoundInf found_inf, Factor a, Factor b, int arg_to_check) {
  const float by_x = a.get(), by_y = b.get();
  bool finite = true;
  for_each_segment(table, share, [&](int tensor, int64_t begin, int64_t size) {
    for_each_element<3, one_of_lists(2)>(table, tensor, begin, size, first_lists(2),
                                         [&](auto& value, const ElementIndices&) {
#pragma unroll
                                           for (int k = 0; k < kCount<decltype(value)>; ++k) {
                                             finite = finite && axpby_is_finite(value[0][k], value[1][k], arg_to_check);
                                             value[2][k] = axpby_element(value[0][k], value[1][k], by_x, by_y);
                                           }
                                         });
  });
  if (!finite) *found_inf.word = found_inf.raised;
}

// Norms, of all tensors and of each. Each block leaves the sum of its share; the block that ends last adds them in
// fp64, in a fixed order. Where norms of tensors are asked for, each stores partial sums (norms.cuh).

// What the launches of a call are given besides tables.
struct L2NormTargets {
  float *pieces, *of_blocks;  // pieces of the tensors of a table; the sums of the blocks of all tables
  int64_t blocks;             // of earlier launches
  float *norm, *norm_copy;
  unsigned* tickets;

  L2NormTargets(const Context& context, const TensorLists& lists, const NormOutputs& outputs)
      : pieces(static_cast<float*>(outputs.workspace)),
        of_blocks(pieces + lists.size() + kMaxBlocks),
        blocks(0),
        norm(static_cast<float*>(outputs.norm)),
        norm_copy(static_cast<float*>(outputs.norm_copy)),
        tickets(tickets_for(context)) {}
};

// Called by one block.
__device__ void join_all(const L2NormTargets& to, int64_t blocks) {
  double sum = 0;
#pragma unroll 4  // loads that do not wait for each other: few GPUs run more than 4 * kThreads blocks
  for (int64_t block = threadIdx.x; block < blocks; block += kThreads) sum += to.of_blocks[block];
  sum = join_block(sum);
  if (threadIdx.x != 0) return;
  *to.norm = norm_of_sum(sum);
  if (to.norm_copy) *to.norm_copy = *to.norm;
}

// Sums per segment in both variants, so that total norms agree bit for bit with and without per_tensor, where both have
// the same grid: on a GPU, up to some million elements.
template <bool per_tensor, class Table>
__global__ void __launch_bounds__(kThreads)
    l2norm_kernel(const __grid_constant__ Table table, int64_t share, FoundInf found_inf, Factor factor,
                  L2NormTargets to, ScaleUpdate update) {
  const float inv_scale = factor.get();
  float sum = 0;
  bool finite = true;
  [[maybe_unused]] const auto store = [&](int tensor, int, float norm) {
    *static_cast<float*>(table.pointer[1][tensor]) = norm;  // where norms of tensors go
  };
  for_each_segment(table, share, [&](int tensor, int64_t begin, int64_t size) {
    float of_segment[1] = {};
    for_each_element<1, 0>(table, tensor, begin, size, one_of_lists(0), [&](auto& value, const ElementIndices&) {
#pragma unroll
      for (int k = 0; k < kCount<decltype(value)>; ++k) finite = finite && is_finite(value[0][k]);
      of_segment[0] += sum_of_squares(value[0], inv_scale);
    });
    sum += of_segment[0];
    if constexpr (per_tensor) {
      store_partial_sum(table, share, tensor, of_segment, to.pieces, store);
    }
  });
  if constexpr (per_tensor) finish_norms<1>(table, share, to.pieces, to.tickets, store);
  if (!finite) *found_inf.word = found_inf.raised;
  sum = join_block(sum);
  if (threadIdx.x == 0) to.of_blocks[to.blocks + blockIdx.x] = sum;
  if (!is_last_block(to.tickets)) return;
  join_all(to, to.blocks + gridDim.x);
  if (threadIdx.x == 0 && update.state.scale) apply(update);
}

// The launches for the tables of a call use the same pieces and tickets, one after the other. Each joins the blocks so
// far, and the last updates the scale.
template <bool per_tensor>
void launch_l2norm(const Context& context, const TensorLists& lists, FoundInf found_inf, Factor inv_scale,
                   L2NormTargets to, const ScaleUpdate* update) {
  int64_t left = lists.size();
  for_each_table<per_tensor ? 2 : 1>(lists, [&](const auto& table) {
    constexpr auto kernel = &l2norm_kernel<per_tensor, std::decay_t<decltype(table)>>;
    left -= table.count;
    const Split grid =
        launch_over<kernel>(context, table, found_inf, inv_scale, to, left == 0 && update ? *update : ScaleUpdate{});
    to.blocks += grid.blocks;
  });
}

__global__ void update_scale_kernel(ScaleState state, ScaleRule rule) { apply({state, rule}); }

__global__ void block_factors_kernel(const float* scale, BlockFactors to) {
  block_factors_element(scale, to.scale, to.inverse, to.found_inf);
}

__global__ void count_skip_kernel(SkipCounts counts, FoundInf of_step, FoundInf of_loss) {
  count_skip_element(counts, of_step.is_set(), of_loss.is_set());
}

// The table's one list is the step counts. One thread per tensor.
template <class Table>
__global__ void __launch_bounds__(kThreads)
    advance_empty_steps_kernel(const __grid_constant__ Table table, FoundInf found_inf) {
  const int tensor = blockIdx.x * kThreads + threadIdx.x;
  if (tensor >= table.count || found_inf.is_set()) return;
  float* const step = static_cast<float*>(table.pointer[0][tensor]);
  *step = static_cast<float>(next_step(*step));
}

}  // namespace

void scale(const Context& context, const TensorLists& lists, FoundInf found_inf, const ClippedFactor& factor,
           const ScaleUpdate* update) {
  if (lists.size() == 0 && update) return update_scale(context, update->state, update->rule);
  unsigned* const tickets = update ? tickets_for(context) : nullptr;
  int64_t left = lists.size();
  for_each_table<2>(lists, [&](const auto& table) {
    constexpr auto kernel = &scale_kernel<std::decay_t<decltype(table)>>;
    left -= table.count;
    launch_over<kernel>(context, table, found_inf, factor, tickets, left == 0 && update ? *update : ScaleUpdate{});
  });
}

void axpby(const Context& context, const TensorLists& lists, FoundInf found_inf, Factor a, Factor b, int arg_to_check) {
  for_each_table<3>(lists, [&](const auto& table) {
    constexpr auto kernel = &axpby_kernel<std::decay_t<decltype(table)>>;
    launch_over<kernel>(context, table, found_inf, a, b, arg_to_check);
  });
}

int64_t norms_workspace(const TensorLists& lists, int count) {
  const int64_t launches = lists.size() / SmallTable<2>::kCapacity + 1;
  return count * (2 * lists.size() + (launches + 1) * kMaxBlocks) * static_cast<int64_t>(sizeof(float));
}

void l2norm(const Context& context, const TensorLists& lists, FoundInf found_inf, Factor inv_scale,
            const NormOutputs& outputs, const ScaleUpdate* update) {
  auto* const per_tensor = static_cast<float*>(outputs.per_tensor);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const auto set_to_0 = [&](float* norms, int64_t count) {
    check_cuda(cudaMemsetAsync(norms, 0, static_cast<size_t>(count) * sizeof(float), stream), "cudaMemsetAsync");
  };
  // Empty tensors have the norm 0.
  if (per_tensor && lists.size() < lists.total_tensors) set_to_0(per_tensor, lists.total_tensors);
  if (lists.size() == 0) {
    set_to_0(static_cast<float*>(outputs.norm), 1);
    if (outputs.norm_copy) set_to_0(static_cast<float*>(outputs.norm_copy), 1);
    if (update) update_scale(context, update->state, update->rule);
    return;
  }
  const L2NormTargets to(context, lists, outputs);
  if (!per_tensor) return launch_l2norm<false>(context, lists, found_inf, inv_scale, to, update);
  TensorLists with_norms = lists;
  with_norms.depth = 2;
  for (const int64_t index : lists.index) with_norms.pointer[1].push_back(per_tensor + index);
  launch_l2norm<true>(context, with_norms, found_inf, inv_scale, to, update);
}

void update_scale(const Context& context, const ScaleState& state, const ScaleRule& rule) {
  constexpr auto kernel = &update_scale_kernel;
  AMPCTX_LAUNCH(kernel, 1, 1, context.stream, state, rule);
}

void block_factors(const Context& context, const float* scale, const BlockFactors& to) {
  constexpr auto kernel = &block_factors_kernel;
  AMPCTX_LAUNCH(kernel, 1, 1, context.stream, scale, to);
}

// For steps that other libraries take and for further losses of a step: a step of ours counts itself.
void count_skip(const Context& context, const SkipCounts& counts, FoundInf of_step, FoundInf of_loss) {
  constexpr auto kernel = &count_skip_kernel;
  AMPCTX_LAUNCH(kernel, 1, 1, context.stream, counts, of_step, of_loss);
}

void advance_empty_steps(const Context& context, const StepCall& call) {
  if (call.lists.size() == 0 && call.skips.overflowed)
    count_skip(context, call.skips, call.found_inf, call.found_inf);  // as no step kernel does
  TensorLists empty;
  empty.depth = 1;
  auto next = call.lists.index.begin();
  for (int64_t i = 0; i < call.lists.total_tensors; ++i) {
    next != call.lists.index.end() && *next == i ? void(++next) : empty.pointer[0].push_back(call.steps[i]);
  }
  empty.numel.assign(empty.pointer[0].size(), 1);
  for_each_table<1>(empty, [&](const auto& table) {
    constexpr auto kernel = &advance_empty_steps_kernel<std::decay_t<decltype(table)>>;
    const int blocks = (table.count + kThreads - 1) / kThreads;
    AMPCTX_LAUNCH(kernel, blocks, kThreads, context.stream, table, call.found_inf);
  });
}

}  // namespace ampctx::cuda
