// sqrt(sum((x * inv_scale)^2)) on CUDA, of all tensors and of each. Read by gradient clipping and by layer-wise
// optimizers.
//
// The first kernel leaves the sum of each block and, where norms of tensors are asked for, their pieces (norms.cuh).
// The second adds the sums of blocks in fp64, in a fixed order, and joins the pieces of each tensor. It is a launch of
// its own: a counter that tells the last block of the first kernel would need a launch too, to set it to 0.
#include "norms.cuh"

namespace ampctx::cuda {
namespace {

// Where partial sums go: pieces of the tensors of a table, and then the blocks of all tables.
struct L2NormWorkspace {
  float *pieces, *of_blocks;

  L2NormWorkspace(const TensorLists& lists, void* memory)
      : pieces(static_cast<float*>(memory)), of_blocks(pieces + lists.size() + kMaxBlocks) {}
};

struct L2NormFunctor {
  float inv_scale;
  float sum[1] = {};
  bool finite = true;

  template <int n>
  __device__ void operator()(float (&value)[1][n], const Places&) {
#pragma unroll
    for (int k = 0; k < n; ++k) finite = finite && is_finite(value[0][k]);
    sum[0] += L2Norm::of(value[0], inv_scale);
  }
};

// The sum of a block takes that of each segment whether or not the segments leave pieces. So the norm of all tensors is
// the same to the last bit, where both kinds of call have the same grid: on a GPU, up to some million elements.
template <bool per_tensor, class Table>
__global__ void __launch_bounds__(kThreads)
    l2norm_partial_kernel(const __grid_constant__ Table table, int64_t share, FoundInf found_inf,
                          KernelFactor inv_scale, float* of_blocks, float* pieces) {
  L2NormFunctor functor{inv_scale.get()};
  float sum = 0;
  for_each_segment(table, share, [&](int tensor, int64_t begin, int64_t size) {
    functor.sum[0] = 0;
    for_each_element<1, 0>(table, tensor, begin, size, one_of_lists(0), functor);
    sum += functor.sum[0];
    if constexpr (per_tensor) leave_piece<L2Norm>(table, share, tensor, functor.sum, pieces);
  });
  if (!functor.finite) *found_inf.word = found_inf.raised;
  sum = join_block<L2Norm>(sum);
  if (threadIdx.x == 0) of_blocks[blockIdx.x] = sum;
}

// Called by one block.
__device__ void join_all(const float* of_blocks, int64_t blocks, float* norm) {
  double sum = 0;
#pragma unroll 4  // loads that do not wait for each other: few GPUs run more than 4 * kThreads blocks
  for (int64_t block = threadIdx.x; block < blocks; block += kThreads) sum += of_blocks[block];
  sum = join_block<L2Norm>(sum);
  if (threadIdx.x == 0) *norm = L2Norm::finish(sum);
}

__global__ void __launch_bounds__(kThreads) l2norm_total_kernel(const float* of_blocks, int64_t blocks, float* norm) {
  join_all(of_blocks, blocks, norm);
}

// Block 0 joins the blocks launched so far; in the others a warp for each tensor joins its pieces. List 1 of the table
// is where norms of tensors go.
template <class Table>
__global__ void __launch_bounds__(kThreads)
    l2norm_per_tensor_kernel(const __grid_constant__ Table table, int64_t share, const float* pieces,
                             const float* of_blocks, int64_t blocks, float* norm) {
  if (blockIdx.x == 0) return join_all(of_blocks, blocks, norm);
  const int tensor = ((blockIdx.x - 1) * kThreads + threadIdx.x) / kWarp;
  if (tensor >= table.count) return;
  const float of_tensor = norm_of_pieces<L2Norm, 1>(table, share, tensor, pieces);
  if (threadIdx.x % kWarp == 0) *static_cast<float*>(tensor_data(table, 1, tensor)) = of_tensor;
}

// Returns the number of blocks. The launches for the tables of a call use the same pieces, one after the other.
template <bool per_tensor>
int64_t launch_l2norm(const Context& context, const TensorLists& lists, FoundInf found_inf, Factor inv_scale,
                      const L2NormWorkspace& workspace, float* norm) {
  int64_t blocks = 0;
  for_each_table<per_tensor ? 2 : 1>(context, lists, [&](const auto& table) {
    using Table = std::decay_t<decltype(table)>;
    constexpr auto kernel = &l2norm_partial_kernel<per_tensor, Table>;
    const Split grid = split(table.elements(), resident_blocks<kernel>(context.device));
    AMPCTX_LAUNCH(kernel, grid.blocks, kThreads, context.stream, table, grid.share, found_inf, KernelFactor(inv_scale),
                  workspace.of_blocks + blocks, workspace.pieces);
    blocks += grid.blocks;
    if constexpr (per_tensor) {
      constexpr auto join_kernel = &l2norm_per_tensor_kernel<Table>;
      AMPCTX_LAUNCH(join_kernel, 1 + blocks_for_warps(table.count), kThreads, context.stream, table, grid.share,
                    workspace.pieces, workspace.of_blocks, blocks, norm);
    }
  });
  return blocks;
}

}  // namespace

int64_t norms_workspace(const TensorLists& lists, int count) {
  const int64_t launches = lists.size() / SmallTable<2>::kCapacity + 1;
  return count * (2 * lists.size() + (launches + 1) * kMaxBlocks) * static_cast<int64_t>(sizeof(float));
}

void l2norm(const Context& context, const TensorLists& lists, FoundInf found_inf, Factor inv_scale,
            const NormOutputs& outputs) {
  const L2NormWorkspace workspace(lists, outputs.workspace);
  auto* const norm = static_cast<float*>(outputs.norm);
  int64_t blocks = 0;
  if (outputs.per_tensor) {
    float* per_tensor = static_cast<float*>(outputs.per_tensor);
    const auto stream = static_cast<cudaStream_t>(context.stream);
    if (lists.size() < lists.total_tensors) {  // empty tensors have the norm 0
      const size_t bytes = static_cast<size_t>(lists.total_tensors) * sizeof(float);
      check_cuda(cudaMemsetAsync(per_tensor, 0, bytes, stream), "cudaMemsetAsync");
    }
    TensorLists with_norms = lists;
    with_norms.depth = 2;
    for (const int64_t index : lists.index) with_norms.pointer[1].push_back(per_tensor + index);
    blocks = launch_l2norm<true>(context, with_norms, found_inf, inv_scale, workspace, norm);
    if (blocks > 0) return;
  } else {
    blocks = launch_l2norm<false>(context, lists, found_inf, inv_scale, workspace, norm);
  }
  constexpr auto kernel = &l2norm_total_kernel;
  AMPCTX_LAUNCH(kernel, 1, kThreads, context.stream, workspace.of_blocks, blocks, norm);
}

}  // namespace ampctx::cuda
