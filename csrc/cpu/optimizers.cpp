// The optimizers on the CPU: functors/<op>.h. A step over the blocks of tensor lists advances step counts, loads
// weights from params and extras, runs the optimizer's loop, and stores weights into params and extras.
#include <cmath>
#include <limits>
#include <tuple>

#include "multi_tensor_apply.h"

namespace ampctx::cpu {
namespace {

template <class T>
const OptimizerLoops::Of<T>& optimizer_loops(const Simd& simd) {
  return std::get<const OptimizerLoops::Of<T>&>(std::tie(simd.optimizers.f32, simd.optimizers.f64));
}

// Advances the step counts and fills the workspace, one entry per non-empty tensor.
template <class T>
TensorScalars<T>* advance_steps(const StepCall& call) {
  TensorScalars<T>* scalars = static_cast<TensorScalars<T>*>(call.workspace);
  int64_t number = 0;
  double known = std::numeric_limits<double>::quiet_NaN();  // the count of `last`: powers are slow, most counts agree
  TensorRule used;                                          // for `last`
  TensorScalars<T> last{};
  for (int64_t i = 0; i < call.lists.total_tensors; ++i) {
    const double t = next_step(*call.steps[i]);
    *call.steps[i] = static_cast<float>(t);
    if (number == call.lists.size() || call.lists.index[number] != i) continue;
    const TensorRule& rule = call.rules[call.lists.row_of(number)];
    if (t != known || rule.beta1 != used.beta1 || rule.beta2 != used.beta2) last = tensor_scalars<T>(rule, t, number);
    known = t, used = rule;
    scalars[number] = last;
    scalars[number].key = random_key(rule.seed, to_int64(t), call.numbers ? call.numbers[number] : number);
    ++number;
  }
  return scalars;
}

// Loads and stores the lists of a step, block by block.
template <class T>
class StepAccess {
 public:
  struct Buffers {
    typename BlockAccess<T>::Buffer list[kMaxLists];
  };

  StepAccess(const StepCall& call, const TensorScalars<T>* scalars)
      : call_(call), scalars_(scalars), weights_(optimizer_loops<T>(cpu::simd()).weights), access_(call.lists) {
    rounds_states_ = call.stochastic_state;
    for (int state = 0; state < call.states(); ++state) rounds_states_ |= is_code(call.lists.dtype[2 + state]);
  }

  // The block without its gradients and weights.
  StepBlock<T> begin(const Block& block, Buffers& buffers) const {
    StepBlock<T> at{};
    at.n = block.size;
    at.lr = static_cast<T>(call_.rates[call_.lists.row_of(block.tensor)].value);
    const T inv_scale = static_cast<T>(call_.inv_scale.value);
    at.grad_scale = call_.maximize ? -inv_scale : inv_scale;
    at.tensor = scalars_[block.tensor];
    read_states(at, block, buffers);
    return at;
  }

  // The block without its gradients.
  StepBlock<T> open(const Block& block, Buffers& buffers) const {
    StepBlock<T> at = begin(block, buffers);
    at.weight = access_.read(1, block, buffers.list[1]);
    const int extra = call_.lists.depth - 1;
    if (reads_extras(call_.write_back)) {
      at.extra = access_.read(extra, block, buffers.list[extra]);
      weights_.load[static_cast<int>(call_.write_back)](at.weight, at.extra, block.size);
    } else if (has_extras(call_.write_back)) {
      at.extra = access_.target(extra, block, buffers.list[extra]);
    }
    return at;
  }

  // Reads the gradients. An unscaling op also unscales and stores them.
  void read_gradients(StepBlock<T>& at, const Block& block, Buffers& buffers) const {
    if (!call_.unscales) {
      at.grad = access_.read(0, block, buffers.list[0]);
      return;
    }
    T* const grad = access_.read(0, block, buffers.list[0]);
    const auto unscale = arithmetic<T>().scale_from[kOwnType<T>].to[kOwnType<T>];
    unscale(grad, grad, block.size, static_cast<T>(call_.inv_scale.value), false);
    access_.write(0, block, buffers.list[0]);
    at.grad = grad;
    at.grad_scale = call_.maximize ? -1 : 1;
  }

  void read_states(StepBlock<T>& at, const Block& block, Buffers& buffers) const {
    for (int state = 0; state < call_.states(); ++state) {
      const int list = 2 + state;
      if (is_code(call_.lists.dtype[list])) {
        at.state[state] = buffers.list[list].data;
        read_codes(state, block, at.state[state]);
      } else {
        at.state[state] = access_.read(list, block, buffers.list[list]);
      }
    }
  }

  void write_states(const StepBlock<T>& at, const Block& block, const Buffers& buffers) const {
    if (rounds_states_) return round_states(at, block, buffers);
    for (int state = 0; state < call_.states(); ++state) access_.write(2 + state, block, buffers.list[2 + state]);
  }

  void write_weights(const StepBlock<T>& at, const Block& block, const Buffers& buffers) const {
    if (call_.write_back != WriteBack::nearest) {
      const RandomKey key = key_at(at.tensor.key, block.begin);
      const auto& store = weights_.store[static_cast<int>(call_.write_back)];
      store.as[static_cast<int>(call_.lists.dtype[1])](at.weight, at.extra, block.size, key);
    }
    access_.write(1, block, buffers.list[1]);
    const int extra = call_.lists.depth - 1;
    if (has_extras(call_.write_back)) access_.write(extra, block, buffers.list[extra]);
  }

 private:
  float* scales(int state, const Block& block) const {
    if (!is_code(call_.lists.dtype[2 + state])) return nullptr;
    return static_cast<float*>(call_.scales[state][block.tensor]) + block.begin / kCodeBlock;
  }

  // Codes go with fp32 alone, and so do random bits of states.
  void read_codes(int state, const Block& block, T* values) const {
    if constexpr (sizeof(T) == sizeof(float)) {
      const DType type = call_.lists.dtype[2 + state];
      simd().optimizers.decode(type, memory(call_.lists, 2 + state, block), scales(state, block), values, block.size);
    }
  }

  void round_states(const StepBlock<T>& at, const Block& block, const Buffers& buffers) const {
    if constexpr (sizeof(T) == sizeof(float)) {
      const OptimizerLoops& loops = simd().optimizers;
      uint32_t random[kBlock];
      if (call_.stochastic_state) loops.draw(key_at(at.tensor.key, block.begin), random, block.size);
      for (int state = 0; state < call_.states(); ++state) {
        const int list = 2 + state;
        const DType type = call_.lists.dtype[list];
        if (is_code(type) || (call_.stochastic_state && type == DType::bf16)) {
          loops.round({type, state, call_.stochastic_state ? random : nullptr}, at.state[state],
                      memory(call_.lists, list, block), scales(state, block), block.size);
        } else {
          access_.write(list, block, buffers.list[list]);
        }
      }
    }
  }

  const StepCall& call_;
  const TensorScalars<T>* scalars_;
  const Weights<T>& weights_;
  const BlockAccess<T> access_;
  bool rounds_states_;  // otherwise than by a conversion of each element
};

// The step itself. If states are fp32, and weights fp32 or split, the loop
// (simd_optimizers.cpp) converts 16-bit gradients and extras itself; else blocks are converted around it.
template <class T, class Optimizer>
void walk(const Context& context, const StepCall& call, const std::vector<Optimizer>& rows) {
  const TensorLists& lists = call.lists;
  const StepLoopsOf<T, Optimizer>& loops = optimizer_loops<T>(simd()).steps;
  const StepAccess<T> access(call, advance_steps<T>(call));
  const WriteBack mode = call.write_back;
  const DType extra = has_extras(mode) ? lists.dtype[lists.depth - 1] : DType::f32;
  const DType grad = call.unscales ? DType::f32 : lists.dtype[0];  // unscaled gradients are fp32
  const auto direct = loops.loop[static_cast<int>(grad)][static_cast<int>(extra)];
  const bool is_split = mode == WriteBack::split, is_copy = mode == WriteBack::copy && extra != DType::f32;
  bool is_direct = sizeof(T) == sizeof(float) && direct && (mode == WriteBack::nearest || is_copy || is_split);
  for (int list = is_split ? 2 : 1; list < 2 + call.states(); ++list) {
    is_direct = is_direct && lists.dtype[list] == DType::f32;
  }
  const auto loop = is_direct ? direct : loops.loop[0][0];
  const auto step_block = [&](const Block& block) {
    typename StepAccess<T>::Buffers buffers;
    StepBlock<T> at = is_direct ? access.begin(block, buffers) : access.open(block, buffers);
    const bool reads = !is_direct || call.unscales;
    if (reads) access.read_gradients(at, block, buffers);
    loop(at, reads ? at.grad : memory(lists, 0, block), is_direct ? memory(lists, 1, block) : at.weight,
         memory(lists, lists.depth - 1, block), rows[call.lists.row_of(block.tensor)]);
    if (is_direct) return;
    access.write_states(at, block, buffers);
    access.write_weights(at, block, buffers);
  };
  const bool has_buffers = !is_direct || (call.unscales && lists.dtype[0] != DType::f32);
  for_each_block(context, lists, step_block, has_buffers ? 1 : kAtOnce);
}

// The first walk stores m and v, and each block's part of ||w||^2 and ||u||^2. With each tensor's rate known, the
// second walk recomputes u from the stored m and v, and takes the step. Without trust ratios one walk does both.
template <class T>
void step_as(const Context& context, const StepCall& call, const std::vector<LambOptions>& rows) {
  struct Buffers : StepAccess<T>::Buffers {
    typename BlockAccess<T>::Buffer u;
  };
  std::vector<Lamb<T>> lambs(rows.begin(), rows.end());
  for (Lamb<T>& lamb : lambs) lamb.clip = lamb_clip(lamb, static_cast<T>(call.factors[0].value));
  const StepAccess<T> access(call, advance_steps<T>(call));
  const LayerLoops<T>& loops = optimizer_loops<T>(simd()).layers;
  // The block with updated m and v, as stored, and the old weight.
  const auto move_moments = [&](const Block& block, Buffers& buffers) {
    StepBlock<T> at = access.open(block, buffers);
    access.read_gradients(at, block, buffers);
    loops.lamb_moments(at, lambs[call.lists.row_of(block.tensor)]);
    access.write_states(at, block, buffers);
    access.read_states(at, block, buffers);
    return at;
  };
  const auto descend = [&](const StepBlock<T>& at, const Block& block, Buffers& buffers, T rate) {
    loops.lamb_direction(at, lambs[call.lists.row_of(block.tensor)], buffers.u.data);
    loops.descend(at.weight, buffers.u.data, block.size, rate);
    access.write_weights(at, block, buffers);
  };
  if (std::none_of(rows.begin(), rows.end(), has_ratio)) {
    return for_each_block(context, call.lists, [&](const Block& block) {
      Buffers buffers;
      const StepBlock<T> at = move_moments(block, buffers);
      descend(at, block, buffers, at.lr);
    });
  }
  const auto norm = arithmetic<T>().l2norm[kOwnType<T>];
  double* const partial = static_cast<double*>(call.norms);
  for_each_block(context, call.lists, [&](const Block& block) {
    Buffers buffers;
    const StepBlock<T> at = move_moments(block, buffers);
    loops.lamb_direction(at, lambs[call.lists.row_of(block.tensor)], buffers.u.data);
    double* const sums = partial + 2 * block.number;
    norm(at.weight, block.size, 1, &sums[0]);
    norm(buffers.u.data, block.size, 1, &sums[1]);
  });
  std::vector<T> rate(call.lists.numel.size());
  for_each_total<2>(call.lists, partial, [&](int64_t tensor, const double (&sum)[2]) {
    const int32_t row = call.lists.row_of(tensor);
    rate[tensor] = static_cast<T>(call.rates[row].value);
    if (!has_ratio(rows[row])) return;
    rate[tensor] = lamb_rate(rate[tensor], static_cast<T>(std::sqrt(sum[0])), static_cast<T>(std::sqrt(sum[1])));
  });
  for_each_block(context, call.lists, [&](const Block& block) {
    Buffers buffers;
    descend(access.open(block, buffers), block, buffers, rate[block.tensor]);
  });
}

template <class T, class Options, class... Optimizers>
void step_by(const Context& context, const StepCall& call, const std::vector<Options>& rows, Functors<Optimizers...>) {
  ((call.states() == Optimizers::kStates ? walk<T, Optimizers>(context, call, {rows.begin(), rows.end()}) : void()),
   ...);
}

// Of the ops that the functions above do not name.
template <class T, class Options>
void step_as(const Context& context, const StepCall& call, const std::vector<Options>& rows) {
  step_by<T>(context, call, rows, decltype(functors_of<T>(rows[0])){});
}

}  // namespace

#define AMPCTX_STEP(op, Options, unused)                                                                       \
  void op(const Context& context, const StepCall& call, const std::vector<Options>& rows) {                    \
    if (call.found_inf.is_set()) return;                                                                       \
    call.lists.computes_in_f64() ? step_as<double>(context, call, rows) : step_as<float>(context, call, rows); \
  }
AMPCTX_STEP_OPS(AMPCTX_STEP, )
#undef AMPCTX_STEP

}  // namespace ampctx::cpu
