"""The optimizer ops in plain torch: the fallback where no kernel runs, and the oracle of the tests.

The arithmetic follows csrc/functors operation by operation, so element-wise optimizers agree with the kernels to the
last bit. Norms (of layer-wise optimizers) agree to rounding. Nothing waits for the device: if ``found_inf`` is set, a
select keeps every value.

The *write back* says how an update goes back into 16 bits, and what ``extras`` holds:

    nearest     params rounded to nearest even                                        no extras
    copy        the same, and extras[i] = params[i] in the dtype of extras[i]         model weights
    split       params[i] (bf16) and extras[i] (int16) are the halves of an fp32      remainders
    kahan       params[i] + extras[i] is the weight; extras[i] is the rounding error  compensations, in params' dtype
    stochastic  params rounded up or down at random; the nearer value is likelier     no extras
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ampctx.kernels import codes, reference
from ampctx.kernels.reference import compute_dtype
from ampctx.kernels.spec import SPECS, OpSpec

WRITE_BACKS = ("nearest", "copy", "split", "kahan", "stochastic")
NEAREST, COPY, SPLIT, KAHAN, STOCHASTIC = range(len(WRITE_BACKS))
LOW_PRECISION = (torch.float16, torch.bfloat16)
# Random numbers then count the tensors of the call.
NO_NUMBERS = torch.empty(0, dtype=torch.int64, device="cpu")
# All tensors then step by the numbers of the call.
NO_ROWS = torch.empty(0, dtype=torch.float64, device="cpu"), NO_NUMBERS


# --- write back -------------------------------------------------------------------------------------------------------

_32_BITS = 0xFFFFFFFF


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Splits an fp32 tensor into bf16, rounded to nearest (ties away from zero), and the int16 remainder of its bits. A
    nan becomes the quiet nan of its sign and 0."""
    bits = master.view(torch.int32)
    # The largest nans would round up to zero with the other sign.
    bits = torch.where(torch.isnan(master), (bits & -0x80000000) | 0x7FC00000, bits)
    remainder = bits.to(torch.int16)
    # Not the operators: torch 2.13 returns a DTensor << 16 or >> 16 unchanged.
    high = torch.bitwise_right_shift(bits - remainder.int(), 16)
    return high.to(torch.int16).view(torch.bfloat16), remainder


def join(high: Tensor, remainder: Tensor) -> Tensor:
    """Undoes ``split``, bit for bit; a nan comes back as a quiet nan."""
    high_bits = high.resolve_neg().view(torch.int16).int()
    return (torch.bitwise_left_shift(high_bits, 16) + remainder.int()).view(torch.float32)


def spacing(p: Tensor) -> Tensor:
    """The distance from 16-bit numbers to their neighbours away from zero, fp32; nan for inf and nan."""
    magnitude = p.resolve_neg().view(torch.int16) & 0x7FFF
    # Bit patterns that differ only in the last bit are neighbours between the same powers of two.
    odd, even = (bits.view(p.dtype).float() for bits in (magnitude | 1, magnitude & ~1))
    return odd - even


def _wrapped(value: int) -> int:
    """``value`` mod 2**64, as the int64 of these bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


_GOLDEN = _wrapped(0x9E3779B97F4A7C15)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix64(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014), on int64 holding 64 unsigned bits."""
    x = (x ^ _shift(x, 30)) * _wrapped(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _wrapped(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def next_step(step: Tensor) -> Tensor:
    """The next step count (0-d fp32). From 2**24 on the next fp32 number, because step + 1 would round to step."""
    further = (step.view(torch.int32) + 1).view(torch.float32)
    one_more = step.to(reference.widest(step.device)) + 1
    return torch.where((step >= 2**24) & torch.isfinite(step), further.to(one_more.dtype), one_more)


def _mix32(x: Tensor) -> Tensor:
    """lowbias32, the integer hash of C. Wellons' hash prospector, on int64 holding 32 unsigned bits."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _32_BITS
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _32_BITS
    return x ^ (x >> 16)


def random_bits(seed: int, step: Tensor, tensor: int | Tensor, place: Tensor) -> Tensor:
    """32 random bits for each place in memory (int64). They depend only on it, on seed, step count, and ``tensor``, the
    number of the parameter."""
    key = _mix64(step.reshape(()).long() * _GOLDEN + _wrapped(seed))
    # The mask keeps Python's unbounded product in 64 bits; a tensor wraps by itself.
    number = _wrapped(_GOLDEN * (tensor + 1)) if isinstance(tensor, int) else (tensor + 1) * _GOLDEN
    key = _mix64(key + number)
    low = ((place & _32_BITS) * 0x9E3779B1 + (key & _32_BITS) + _shift(place, 32)) & _32_BITS
    return _mix32(_mix32(low) ^ _shift(key, 32))


def state_bits(random: Tensor, i: int) -> Tensor:
    """The 16 random bits of state ``i``, 0 or 1. They are none of those that the "stochastic" write back uses."""
    mixed = _mix32((random + 0x9E3779B9) & _32_BITS)
    return (mixed >> (16 * i)) & 0xFFFF


def round_stochastically(w: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Rounds fp32 ``w`` at random to a value of the 16-bit ``dtype``, as fp32; the nearer is likelier. inf and nan
    stay."""
    dropped = 16 if dtype == torch.bfloat16 else 13
    mask = (1 << dropped) - 1
    raw = w.view(torch.int32)
    result = ((raw + (bits & mask).int()) & ~mask).view(torch.float32)
    if dtype == torch.float16:  # subnormals, below 2**-14, are 2**-24 apart
        units = w.abs() * 2.0**24
        whole = units.floor()
        up = (bits >> 8).float() * 2.0**-24 < units - whole
        result = torch.where(w.abs() < 2.0**-14, torch.copysign((whole + up) * 2.0**-24, w), result)
    return torch.where(torch.isfinite(w), result, w)


def _weight(p: Tensor, extra: Any, write_back: int, dtype: torch.dtype) -> Tensor:
    """The weight before the update."""
    if write_back == SPLIT:
        return join(p, extra.reshape(p.shape)).to(dtype)
    if write_back == KAHAN:
        return p.to(dtype) + extra.reshape(p.shape).to(dtype)
    return p.to(dtype)


def _store(w: Tensor, p: Tensor, extra: Tensor | None, write_back: int, bits: Callable[[], Tensor], skip: Tensor):
    """Writes the updated weight unless ``skip`` is set."""
    if write_back == SPLIT:
        new, rest = split(w.float())
    elif write_back == STOCHASTIC and p.dtype in LOW_PRECISION:
        new, rest = round_stochastically(w.float(), p.dtype, bits()).to(p.dtype), None
    elif write_back == KAHAN:
        new = w.to(p.dtype)
        # If p overflowed, store 0: the error would be inf, and the next weight inf - inf.
        rest = torch.where(torch.isfinite(new), w - new.to(w.dtype), 0.0).to(p.dtype)
    else:
        new, rest = w.to(p.dtype), w if write_back == COPY else None
    _update(p, new, skip)
    if extra is not None and rest is not None:
        _update(extra, rest.to(extra.dtype), skip)


def _update(t: Tensor, new: Tensor, skip: Tensor) -> None:
    t.copy_(torch.where(skip, t, new.to(t.dtype).reshape(t.shape)))


# --- the steps --------------------------------------------------------------------------------------------------------

Options = SimpleNamespace  # the arguments of a call by name


class _Place:
    """One tensor of a call: gradient, weight, advanced step count and rates, in the dtype of arithmetic."""

    def __init__(self, o: Options, dtype: torch.dtype, number, scales, grad, param, extra, step, *state) -> None:
        self.o, self.dtype, self.number, self.scales = o, dtype, number, scales
        self.param, self.extra, self.step, self.state = param, extra, step, state
        self.skip = o.found_inf.reshape(()).to(param.device) != 0
        self.taken = next_step(step.reshape(()))
        self.lr = self.scalar(o.lr)
        self.grad, g = grad, grad.reshape(param.shape).to(dtype) * reference.scalar(o.inv_scale, grad, dtype)
        self.unscaled, self.g = g, -g if o.maximize else g
        self.w = _weight(param, extra, o.write_back, dtype)

    def scalar(self, value: Tensor) -> Tensor:
        return reference.scalar(value, self.param, self.dtype)

    def read(self, i: int) -> Tensor:
        """State ``i`` in the shape of the parameter, which may differ from its own."""
        state = self.state[i]
        if state.dtype in codes.DTYPES.values():
            return self._placed(codes.decode(codes.in_memory_order(state), self.scales[i]))
        return state.reshape(self.param.shape).to(self.dtype)

    def write(self, i: int, value: Tensor) -> Tensor:
        """Stores state ``i``. Returns the stored value in the dtype of arithmetic."""
        state, is_random = self.state[i], self.o.stochastic_state
        if state.dtype in codes.DTYPES.values():
            flat = codes.in_memory_order(torch.empty_like(self.param, dtype=value.dtype).copy_(value))
            h = state_bits(self._bits(), i).float() / 65536 if is_random else 0.5
            new, scales = codes.encode(flat, state.dtype, h)
            _update(codes.in_memory_order(state), new, self.skip)
            _update(self.scales[i], scales, self.skip)
            return self._placed(codes.decode(new, scales))
        if is_random and state.dtype == torch.bfloat16:
            value = round_stochastically(value, state.dtype, self._placed(state_bits(self._bits(), i)))
        stored = value.to(state.dtype)
        _update(state, stored, self.skip)
        return stored.to(self.dtype)

    def _bits(self) -> Tensor:
        """32 random bits for each element, in memory order."""
        place = torch.arange(self.param.numel(), device=self.param.device)
        return random_bits(self.o.seed, self.taken, self.number, place)

    def _placed(self, flat: Tensor) -> Tensor:
        """Values in memory order, in the shape and layout of the parameter."""
        p = self.param
        return flat.as_strided(p.shape, p.stride()) if reference.is_dense(p) else flat.reshape(p.shape)

    def correction(self, beta: float) -> Tensor:
        """1 - beta**step, in fp64, or by expm1, which avoids fp32 cancellation."""
        if self.taken.dtype == torch.float64:
            return 1 - torch.full_like(self.taken, beta) ** self.taken
        return -torch.expm1(self.taken * math.log(beta)) if beta > 0 else torch.ones_like(self.taken)

    def finish(self, w: Tensor) -> None:
        _store(w, self.param, self.extra, self.o.write_back, lambda: self._placed(self._bits()), self.skip)
        if self.o.unscale_grads:
            unscaled = self.unscaled.to(self.grad.dtype).reshape(self.grad.shape)
            reference.overwrite(self.grad, torch.where(self.skip, self.grad, unscaled))
        _update(self.step, self.taken, self.skip)


def adam(p: _Place, o: Options) -> Tensor:
    """Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019), AMSGrad (Reddi et al. 2018)."""
    g = p.g if o.adam_w_mode else p.g + o.weight_decay * p.w
    m = o.beta1 * p.read(0) + (1 - o.beta1) * g
    v = o.beta2 * p.read(1) + ((1 - o.beta2) * g) * g
    p.write(0, m)
    p.write(1, v)
    if len(p.state) == 3:
        v = torch.maximum(p.read(2), v)
        p.write(2, v)
    u = _adam_direction(p, o, m, v)
    return p.w - p.lr * (u + o.weight_decay * p.w if o.adam_w_mode else u)


def _adam_direction(p: _Place, o: Options, m: Tensor, v: Tensor) -> Tensor:
    v = codes.root(v)
    if o.bias_correction:
        m, v = m * (1 / p.correction(o.beta1)).to(p.dtype), v * (1 / p.correction(o.beta2).sqrt()).to(p.dtype)
    return m / (v + o.eps)


def sgd(p: _Place, o: Options) -> Tensor:
    """SGD with torch's momentum: the first step sets the buffer to the gradient."""
    g = p.g
    if o.weight_decay != 0 and not o.wd_after_momentum:
        g = g + o.weight_decay * p.w
    if p.state:
        buffer = torch.where(p.taken == 1, g, o.momentum * p.read(0) + (1 - o.dampening) * g)
        p.write(0, buffer)
        g = g + o.momentum * buffer if o.nesterov else buffer
    if o.weight_decay != 0 and o.wd_after_momentum:
        g = g + o.weight_decay * p.w
    return p.w - p.lr * g


def adagrad(p: _Place, o: Options) -> Tensor:
    """Adagrad (Duchi et al. 2011), with decoupled weight decay in ``adagrad_w_mode``."""
    g = p.g if o.adagrad_w_mode else p.g + o.weight_decay * p.w
    h = p.read(0) + g * g
    p.write(0, h)
    u = g / (codes.root(h) + o.eps)
    return p.w - p.lr * (u + o.weight_decay * p.w if o.adagrad_w_mode else u)


def lion(p: _Place, o: Options) -> Tensor:
    """Lion (Chen et al. 2023)."""
    c = o.beta1 * p.read(0) + (1 - o.beta1) * p.g
    u = torch.where(c > 0, 1.0, torch.where(c < 0, -1.0, c))
    p.write(0, o.beta2 * p.read(0) + (1 - o.beta2) * p.g)
    return p.w - p.lr * (u + o.weight_decay * p.w)


def _lerp(a: Tensor, b: Tensor, weight: float) -> Tensor:
    """torch.lerp: from the nearer end. Without its fused multiply-add."""
    return a + weight * (b - a) if weight < 0.5 else b + (weight - 1) * (b - a)


def muon(p: _Place, o: Options) -> Tensor:
    """The average of Muon (Jordan et al. 2024), whose directions take the place of the weights."""
    m = _lerp(p.read(0), p.g, 1 - o.momentum)
    p.write(0, m)
    return _lerp(p.g, m, o.momentum) if o.nesterov else m


def _norm(x: Tensor) -> Tensor:
    """Computed in fp64 and rounded once, so it equals the kernels' norm if their sums are exact."""
    return torch.linalg.vector_norm(x.to(reference.widest(x.device))).to(x.dtype)


def lamb(p: _Place, o: Options) -> Tensor:
    """LAMB (You et al. 2020): Adam's direction, scaled by ||w|| / ||direction|| for each tensor."""
    limit = torch.tensor(o.max_grad_norm, dtype=torch.float64, device="cpu")
    norm, most = p.scalar(o.global_grad_norm), p.scalar(limit)
    g = p.g * torch.where((norm > most) & (most > 0), most / norm, 1.0)
    if not o.adam_w_mode:
        g = g + o.weight_decay * p.w
    m = p.write(0, o.beta1 * p.read(0) + ((1 - o.beta1) if o.grad_averaging else 1.0) * g)
    v = p.write(1, o.beta2 * p.read(1) + ((1 - o.beta2) * g) * g)
    u = _adam_direction(p, o, m, v)
    if o.adam_w_mode:
        u = u + o.weight_decay * p.w
    if not o.use_nvlamb and o.weight_decay == 0:
        return p.w - p.lr * u
    of_w, of_u = _norm(p.w), _norm(u)
    return p.w - (p.lr * torch.where((of_w != 0) & (of_u != 0), of_w / of_u, 1.0)) * u


def _with_row(o: Options, spec: OpSpec, i: int) -> Options:
    """The arguments for a tensor: with the numbers of its row, where the call has a table."""
    if not o.rows.numel():
        return o
    row = o.table.reshape(-1, len(spec.columns))[o.rows[i]]
    return Options(**{**vars(o), **dict(zip(spec.columns, row.tolist(), strict=True)), "lr": row[0]})


def run(op: str, given: dict[str, Any]) -> None:
    """Runs the op of a spec without checks. Arguments by name: factors as tensors, ``write_back`` as its number."""
    spec = SPECS[op]
    defaults = {"unscale_grads": False, "stochastic_state": False, "numbers": NO_NUMBERS}
    defaults |= dict(zip(("table", "rows"), NO_ROWS, strict=True))
    o = SimpleNamespace(**{**defaults, **{state.scales: [] for state in spec.coded}, **given})
    if "max_norm" in given:
        o.inv_scale = reference.clipped(o.inv_scale, o.grad_norm, o.max_norm)
    if given.get("skips"):
        *counts, scale = given["skips"]
        reference.count_skip_in(counts, o.found_inf, o.found_inf, scale)
    states = [given[state.name] for state in spec.sized if given[state.name]]
    dtype = compute_dtype(*o.grads, *o.params, *o.extras, *(t for tensors in states for t in tensors))
    number = 0
    for i, row in enumerate(zip(o.grads, o.params, o.extras or [None] * len(o.grads), o.steps, *states, strict=True)):
        # By the place of a state; None for those that are no codes.
        scales = [scales[i] if scales else None for scales in (getattr(o, state.scales) for state in spec.coded)]
        has_elements = row[0].numel() > 0
        of_tensor = _with_row(o, spec, i)
        number_now = o.numbers[number] if has_elements and o.numbers.numel() else number
        place = _Place(of_tensor, dtype, number_now, scales, *row)
        place.finish(globals()[op](place, of_tensor))
        number += has_elements
