// NovoGrad on the CPU: functors/novograd.h. A walk over the gradients for their norms, then the step.
#include <cmath>

#include "optimizer_apply.h"

namespace ampctx::cpu {
namespace {

// The norms of the unscaled gradients, one per non-empty tensor.
template <class T>
std::vector<T> gradient_norms(const Context& context, const StepCall& call, bool inf_norm) {
  const BlockAccess<T> access(call.lists, simd());
  const Arithmetic<T>& loops = arithmetic<T>(simd());
  const T inv_scale = static_cast<T>(call.inv_scale.value);
  double* const partial = static_cast<double*>(call.norms);
  for_each_block(context, call.lists, [&](const Block& block) {
    typename BlockAccess<T>::Buffer buffer;
    const T* const g = access.read(0, block, buffer);
    if (inf_norm) {
      loops.max_norm(g, block.size, inv_scale, &partial[block.number]);
    } else {
      loops.l2norm(g, block.size, inv_scale, &partial[block.number]);
    }
  });
  std::vector<T> norms;
  norms.reserve(call.lists.numel.size());
  const auto keep = [&](int64_t, const double (&total)[1]) {
    norms.push_back(static_cast<T>(inf_norm ? total[0] : std::sqrt(total[0])));
  };
  const auto larger = [](double a, double b) { return maximum(a, b); };
  inf_norm ? for_each_total<1>(call.lists, partial, keep, larger) : for_each_total<1>(call.lists, partial, keep);
  return norms;
}

template <class T>
void novograd_as(const Context& context, const StepCall& call, const NovogradOptions& options) {
  const PerTensor& exp_avg_sqs = call.one_element[0];
  const NovoGrad<T> novograd(options);
  TensorScalars<T>* const scalars = advance_steps<T>(call);
  const std::vector<T> norms = gradient_norms<T>(context, call, options.inf_norm);
  int64_t number = 0;
  for (int64_t i = 0; i < call.lists.total_tensors; ++i) {
    const bool has_elements = number < call.lists.size() && call.lists.index[number] == i;
    const T norm = has_elements ? norms[number] : 0;
    const T n = blend_norm(novograd, *call.steps[i] == 1, static_cast<T>(*exp_avg_sqs[i]), norm);
    *exp_avg_sqs[i] = static_cast<float>(n);
    if (!has_elements) continue;
    scalars[number].denominator = denominator(novograd, scalars[number], n);
    ++number;
  }
  update<T, NovoGrad<T>>(context, call, scalars, novograd, optimizer_loops<T>(simd()).steps);
}

}  // namespace

void novograd(const Context& context, const StepCall& call, const NovogradOptions& options) {
  if (call.found_inf.is_set()) return;
  call.lists.computes_in_f64() ? novograd_as<double>(context, call, options)
                               : novograd_as<float>(context, call, options);
}

}  // namespace ampctx::cpu
