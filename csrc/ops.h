// The kernels' entry points, free of torch, and what they are given. library.cpp calls them with checked arguments.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "functors/codes.h"
#include "functors/loss_scale.h"
#include "functors/write_back.h"
#include "step_ops.h"

namespace ampctx {

constexpr int kMaxLists = 8;

// Lists of tensors that agree in number of elements and memory layout at each index, without the empty ones. A tensor
// of one list may be the tensor at the same index of another (in place); no other overlap is allowed.
struct TensorLists {
  int depth = 0;
  std::array<DType, kMaxLists> dtype{};               // of each list
  std::array<std::vector<void*>, kMaxLists> pointer;  // [list][tensor], first element in memory
  std::vector<int64_t> numel;                         // [tensor]
  std::vector<int64_t> index;                         // [tensor], position in the caller's list
  int64_t total_tensors = 0;                          // length of the caller's lists
  // Of a step: the row of each in a table of numbers. Without rows all have row 0, without a table none are equal.
  std::vector<int32_t> row;
  const double* table = nullptr;
  int64_t columns = 0;
  int32_t row_of(int64_t tensor) const { return row.empty() ? 0 : row[tensor]; }
  bool same_rows(int32_t a, int32_t b) const {
    return a == b || (table && std::memcmp(table + columns * a, table + columns * b, columns * sizeof(double)) == 0);
  }
  int64_t size() const { return static_cast<int64_t>(numel.size()); }
  bool computes_in_f64() const {
    for (int list = 0; list < depth; ++list) {
      if (dtype[list] == DType::f64) return true;
    }
    return false;
  }
};

// The caller's flag, one fp32 or int32 element: raise it by writing `raised` (the bits of 1), never write anything
// else.
struct FoundInf {
  uint32_t* word;
  uint32_t raised;
  uint32_t value_mask;  // the bits that make it != 0: -0.0 is zero

  AMPCTX_MEMBER bool is_set() const { return (*word & value_mask) != 0; }
};

// A scalar: behind `device` where that is not null (fp32, readable by the kernel only), else `value`.
struct Factor {
  const float* device = nullptr;
  double value = 1.0;

  AMPCTX_MEMBER float get() const { return device ? *device : static_cast<float>(value); }
};

// A factor of gradients, which are clipped where max_norm is not negative: functors/loss_scale.h. On the CPU the clip
// is in `value` already, and max_norm is negative.
struct ClippedFactor : Factor {
  Factor norm{};
  float max_norm = -1;

  AMPCTX_MEMBER float get() const {
    return max_norm < 0 ? Factor::get() : clip_factor_element(norm.get(), Factor::get(), max_norm);
  }
};

// What a kernel may ask of its surroundings.
struct Context {
  using Body = void (*)(int64_t begin, int64_t end, void* argument);
  void (*parallel_for)(int64_t begin, int64_t end, int64_t grain, Body body, void* argument) = nullptr;  // CPU
  void* stream = nullptr;                                                                                // CUDA
  int device = 0;                                                                                        // CUDA
  // Memory on the device for what the call launches. CUDA
  void* (*allocate)(void* owner, int64_t bytes) = nullptr;
  void* owner = nullptr;
};

// Where norms go, fp32 (fp64 when a list is fp64): `norm` has one element, `per_tensor` total_tensors or is null.
// norm_copy: receives the same value as `norm`, or null.
struct NormOutputs {
  void* norm;
  void* norm_copy;
  void* per_tensor;
  void* workspace;  // norms_workspace bytes
};

struct ScaleState {
  float* scale;
  int32_t* growth_tracker;
  int32_t* hysteresis_tracker;
  FoundInf found_inf;
};

// An update of the scale by the flag of a check that goes with it, after the check.
struct ScaleUpdate {
  ScaleState state;
  ScaleRule rule;
};

// What a block of training is given: copies of the scale and of 1 / scale that no later update changes, and a flag of
// 0.
struct BlockFactors {
  float* scale;
  float* inverse;
  float* found_inf;
};

// Pointers to one fp32 element per tensor, empty ones included; all distinct.
using PerTensor = std::vector<float*>;

// What a step tells its kernels of all tensors alike. Where found_inf is set, nothing changes.
struct StepParameters {
  FoundInf found_inf{};
  ClippedFactor inv_scale;
  bool maximize = false;
  bool unscales = false;          // whether the gradients become what the step computes with: times inv_scale
  bool stochastic_state = false;  // whether bf16 states and codes are rounded at random
  WriteBack write_back = WriteBack::nearest;
  SkipCounts skips;  // The kernel counts; on the CPU, and where no tensor has elements, library.cpp does.
};

// What every optimizer op is given. Lists: grads, params, the op's states, and extras where write_back has any. Step
// counts go up by one before anything is computed. CUDA: pointer[depth] holds their addresses.
struct StepCall : StepParameters {
  TensorLists lists;
  PerTensor steps;              // step counts
  std::vector<Factor> factors;  // the op's own
  // Of the states that are codes, the fp32 scales of each tensor with elements: functors/codes.h.
  std::array<std::vector<void*>, kCodedStates> scales;
  const int64_t* numbers = nullptr;  // of these tensors, for random bits; readable by the kernel. Null: their places
  // By rows of `lists`, as the op's options are.
  std::vector<Factor> rates;      // lr
  std::vector<TensorRule> rules;  // what becomes of the step counts
  void* workspace = nullptr;      // for TensorScalars<double> of each tensor on the CPU; CUDA kernels make theirs
  void* norms = nullptr;          // norms_workspace bytes, where the op asks for norms of tensors

  int states() const { return lists.depth - 2 - has_extras(write_back); }
};

// A ScaleUpdate may be null, and its flag is the call's. norms_workspace: bytes for `count` norms of each tensor, and
// for the partial sums they come from.
#define AMPCTX_ENTRY(op, Options, unused) void op(const Context&, const StepCall&, const std::vector<Options>& rows);
#define AMPCTX_ENTRIES                                                                                        \
  void scale(const Context&, const TensorLists& src_dst, FoundInf, const ClippedFactor&, const ScaleUpdate*); \
  void axpby(const Context&, const TensorLists& x_y_out, FoundInf, Factor a, Factor b, int arg_to_check);     \
  int64_t norms_workspace(const TensorLists& tensors, int count);                                             \
  void l2norm(const Context&, const TensorLists& tensors, FoundInf, Factor inv_scale, const NormOutputs&,     \
              const ScaleUpdate*);                                                                            \
  void update_scale(const Context&, const ScaleState&, const ScaleRule&);                                     \
  void block_factors(const Context&, const float* scale, const BlockFactors&);                                \
  void count_skip(const Context&, const SkipCounts&, FoundInf of_step, FoundInf of_loss);                     \
  AMPCTX_STEP_OPS(AMPCTX_ENTRY, )
namespace cpu {
AMPCTX_ENTRIES
}
namespace cuda {
AMPCTX_ENTRIES
}
#undef AMPCTX_ENTRIES
#undef AMPCTX_ENTRY

// All of them: OP(name, unused, with).
// clang-format off
#define AMPCTX_ALL_OPS(OP, with)                                                                                     \
  OP(scale, 0, with) OP(axpby, 0, with) OP(norms_workspace, 0, with) OP(l2norm, 0, with) OP(update_scale, 0, with)   \
  OP(block_factors, 0, with) OP(count_skip, 0, with) AMPCTX_STEP_OPS(OP, with)
// clang-format on

}  // namespace ampctx
