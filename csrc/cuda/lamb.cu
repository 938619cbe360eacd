// LAMB on CUDA: functors/lamb.h.
//
// One walk stores m and v and leaves partial sums of ||w||^2 and ||u||^2; with the norms of each tensor known, a second
// one makes u again, of what was stored, and takes the step. One walk does both where no ratio is asked for.
#include "norms.cuh"
#include "rounded_states.cuh"

namespace ampctx::cuda {
namespace {

enum class Walk { moments, weights, all };

// What a kernel is given besides the table and its share: room for two norms of each tensor, of w and u, and for the
// pieces they come from. The launches for the tables of a call may use the same, one after the other.
struct LambParameters {
  StepParameters step;
  Factor global_grad_norm;
  float *norms, *pieces;
  unsigned* tickets;
};

template <Walk walk, bool rounds, bool extras, bool unscales>
struct LambFunctor {
  static constexpr int kDepth = 4 + extras;

  Lamb<float> lamb;
  GradientScale<unscales> gradient;
  float rate;
  WriteBack write_back;
  DType param, m, v;
  TensorScalars<float> tensor{};
  float sum[2] = {};

  template <int n, class Indices>
  __device__ __forceinline__ void operator()(float (&value)[kDepth][n], const Indices& indices) {
    load_weights<extras>(write_back, value);
    if constexpr (walk != Walk::weights) {
#pragma unroll
      for (int k = 0; k < n; ++k) {
        lamb_moments(lamb, gradient.of(value[0][k]), value[1][k], value[2][k], value[3][k]);
      }
      if constexpr (rounds) {
        indices.store_states(value);
      } else {
        round_as_stored(m, value[2]);
        round_as_stored(v, value[3]);
      }
    }
    float u[n];
#pragma unroll
    for (int k = 0; k < n; ++k) u[k] = lamb_direction(lamb, tensor, value[1][k], value[2][k], value[3][k]);
    if constexpr (walk == Walk::moments) {
#pragma unroll
      for (int k = 0; k < n; ++k) u[k] = indices.holds(k) ? u[k] : 0.0f;  // 0 / 0 where eps is 0
      sum[0] += sum_of_squares(value[1], 1.0f);
      sum[1] += sum_of_squares(u, 1.0f);
    } else {
#pragma unroll
      for (int k = 0; k < n; ++k) value[1][k] -= rate * u[k];
      store_weights<extras, rounds>(write_back, param, tensor.key, value, indices);
    }
  }
};

// The walk that keeps most at a time would spill registers with a second block.
constexpr int resident_lamb_blocks(Walk walk, bool rounds, bool extras, bool unscales) {
  if (walk == Walk::all && extras && unscales) return 1;
  if (rounds) return kRoundedBlocks;
  return resident_blocks_for(walk == Walk::weights ? 3 + extras : 4);
}

// Lists: grads, params, exp_avgs, exp_avg_sqs, and extras where the write back has them. The walk that reads gradients
// stores them, where that is asked for. `rounds`: as for StepFunctor.
template <Walk walk, bool rounds, bool extras, bool unscales, class Table>
__global__ void __launch_bounds__(kThreads, resident_lamb_blocks(walk, rounds, extras, unscales))
    lamb_kernel(const __grid_constant__ Table table, int64_t share, LambParameters call,
                StepNumbers<Lamb<float>, 1> numbers) {
  if (is_skipped(call.step)) return;
  if constexpr (rounds) code_table<2>().fill();
  constexpr unsigned grads = one_of_lists(0), params = one_of_lists(1), states = one_of_lists(2) | one_of_lists(3);
  constexpr unsigned extra = extras ? one_of_lists(4) : 0;
  constexpr unsigned written = (walk == Walk::weights ? 0 : (rounds ? 0 : states) | (unscales ? grads : 0)) |
                               (walk == Walk::moments ? 0 : params | extra);
  const unsigned read =
      params | states | (walk == Walk::weights ? 0 : grads) | (reads_extras(call.step.write_back) ? extra : 0);
  const float lr = numbers.lr[0].get();
  [[maybe_unused]] const auto store = [to = call.norms](int tensor, int norm, float value) {
    to[int64_t{2} * tensor + norm] = value;
  };
  Lamb<float> lamb = numbers.optimizer(0);
  lamb.clip = lamb_clip(lamb, call.global_grad_norm.get());
  // Of fewer elements, or registers spill. The walk that sums takes as many in every case, as its sums depend on it.
  constexpr bool is_crowded = walk == Walk::moments || (walk == Walk::all && extras);
  constexpr int at_once = is_crowded ? kVector / 4 : elements_at_once(4 + extras);
  const GradientScale<unscales> scale(call.step.inv_scale.get(), call.step.maximize);
  const DType param = table.dtype[1], m = table.dtype[2], v = table.dtype[3];
  LambFunctor<walk, rounds, extras, unscales> functor{lamb, scale, lr, call.step.write_back, param, m, v};
  for_each_step_segment<functor.kDepth>(
      table, share, numbers, [&](int tensor, int64_t begin, int64_t size, const TensorScalars<float>& scalars) {
        functor.tensor = scalars;
        if constexpr (walk == Walk::moments) functor.sum[0] = functor.sum[1] = 0;
        if constexpr (walk == Walk::weights) {
          functor.rate = lamb_rate(lr, call.norms[int64_t{2} * tensor], call.norms[int64_t{2} * tensor + 1]);
        }
        walk_segment<rounds, written, at_once>(table, tensor, begin, size, read, call.step, functor);
        if constexpr (walk == Walk::moments) store_partial_sum(table, share, tensor, functor.sum, call.pieces, store);
      });
  if constexpr (walk == Walk::moments) {
    finish_norms<2>(table, share, call.pieces, call.tickets, store);
  }
}

template <bool rounds, bool extras, bool unscales>
void launch_lamb(const Context& context, const StepCall& call, const std::vector<LambOptions>& rows) {
  auto* const norms = static_cast<float*>(call.norms);
  unsigned* const tickets = call.lists.size() > 0 ? tickets_for(context) : nullptr;
  LambParameters parameters{call, call.factors[0], norms, norms + 2 * call.lists.size(), tickets};
  int64_t first = 0;
  // A launch for each row: the order of its sums depends on the tensors of a launch.
  for_each_step_table<rounds, 5 + extras, 1>(call, [&](const auto& table) {
    StepNumbers<Lamb<float>, 1> numbers(call, rows, table, tickets, first);
    const auto launch = [&](auto walk) {
      constexpr bool stores = unscales && walk != Walk::weights;
      constexpr auto kernel = &lamb_kernel<walk, rounds, extras, stores, std::decay_t<decltype(table)>>;
      numbers.tickets = walk == Walk::moments ? nullptr : tickets;  // the last walk advances the counts
      launch_over<kernel>(context, table, parameters, numbers);
      parameters.step.skips = {};
    };
    if (has_ratio(rows[table.used[0]])) {
      launch(std::integral_constant<Walk, Walk::moments>{});
      launch(std::integral_constant<Walk, Walk::weights>{});
    } else {
      launch(std::integral_constant<Walk, Walk::all>{});
    }
    first += table.count;
  });
  advance_empty_steps(context, call);
}

}  // namespace

void lamb(const Context& context, const StepCall& call, const std::vector<LambOptions>& options) {
  static_assert(may_round_states<LambOptions>(2));
  if (rounds_states(call)) return launch_lamb<true, true, true>(context, call, options);
  const auto launch = [&](auto unscales) {
    has_extras(call.write_back) ? launch_lamb<false, true, unscales>(context, call, options)
                                : launch_lamb<false, false, unscales>(context, call, options);
  };
  call.unscales ? launch(std::true_type{}) : launch(std::false_type{});
}

}  // namespace ampctx::cuda
