// LAMB on the CPU: functors/lamb.h.
//
// The first walk stores m and v, and each block's part of ||w||^2 and ||u||^2. With each tensor's rate known, the
// second walk recomputes u from the stored m and v, and takes the step. Without a trust ratio one walk does both.
#include <cmath>

#include "optimizer_apply.h"

namespace ampctx::cpu {
namespace {

template <class T>
class LambStep {
 public:
  LambStep(const StepCall& call, const Lamb<T>& lamb, const TensorScalars<T>* scalars)
      : lamb_(lamb), access_(call, scalars), lr_(static_cast<T>(call.lr.value)) {}

  void run_at_once(const Context& context, const TensorLists& lists) const {
    for_each_block(context, lists, [&](const Block& block) {
      Buffers buffers;
      descend(move_moments(block, buffers), block, buffers, lr_);
    });
  }

  void run_with_ratio(const Context& context, const TensorLists& lists, double* partial) const {
    for_each_block(context, lists, [&](const Block& block) {
      Buffers buffers;
      const StepBlock<T> at = move_moments(block, buffers);
      loops_.lamb_direction(at, lamb_, buffers.u.data);
      double* const sums = partial + 2 * block.number;
      norm_(at.weight, block.size, 1, &sums[0]);
      norm_(buffers.u.data, block.size, 1, &sums[1]);
    });
    std::vector<T> rate(lists.numel.size());
    for_each_total<2>(lists, partial, [&](int64_t tensor, const double (&sum)[2]) {
      rate[tensor] = lamb_rate(lr_, static_cast<T>(std::sqrt(sum[0])), static_cast<T>(std::sqrt(sum[1])));
    });
    for_each_block(context, lists, [&](const Block& block) {
      Buffers buffers;
      descend(access_.open(block, buffers), block, buffers, rate[block.tensor]);
    });
  }

 private:
  struct Buffers : StepAccess<T>::Buffers {
    typename BlockAccess<T>::Buffer u;
  };

  // The block with updated m and v, as stored, and the old weight.
  StepBlock<T> move_moments(const Block& block, Buffers& buffers) const {
    StepBlock<T> at = access_.open(block, buffers);
    access_.read_gradients(at, block, buffers);
    loops_.lamb_moments(at, lamb_);
    access_.write_states(at, block, buffers);
    access_.read_states(at, block, buffers);
    return at;
  }

  void descend(const StepBlock<T>& at, const Block& block, Buffers& buffers, T rate) const {
    loops_.lamb_direction(at, lamb_, buffers.u.data);
    loops_.descend(at.weight, buffers.u.data, block.size, rate);
    access_.write_weights(at, block, buffers);
  }

  const Lamb<T> lamb_;
  const StepAccess<T> access_;
  const T lr_;
  const LayerLoops<T>& loops_ = optimizer_loops<T>(simd()).layers;
  const decltype(Arithmetic<T>::l2norm) norm_ = arithmetic<T>(simd()).l2norm;
};

template <class T>
void lamb_as(const Context& context, const StepCall& call, const LambOptions& options) {
  Lamb<T> lamb(options);
  lamb.clip = lamb_clip(lamb, static_cast<T>(call.factors[0].value));
  const LambStep<T> step(call, lamb, advance_steps<T>(call));
  if (!has_ratio(options)) return step.run_at_once(context, call.lists);
  step.run_with_ratio(context, call.lists, static_cast<double*>(call.norms));
}

}  // namespace

void lamb(const Context& context, const StepCall& call, const LambOptions& options) {
  if (call.found_inf.is_set()) return;
  call.lists.computes_in_f64() ? lamb_as<double>(context, call, options) : lamb_as<float>(context, call, options);
}

}  // namespace ampctx::cpu
