"""The optimizer ops in plain torch: the fallback where no kernel serves, and the oracle of the tests.

The arithmetic is that of csrc/functors, operation by operation, so that element-wise optimizers agree with the kernels
to the last bit; sums (the norms of the layer-wise ones) agree to rounding. Nothing waits for the device: where
``found_inf`` is set, every tensor keeps its value by a select.

How an update goes back into 16 bits is its *write back*, and says what ``extras`` holds:

    nearest     params rounded to nearest even                                        no extras
    copy        the same, and extras[i] = params[i] in the type of extras[i]          model weights
    split       params[i] (bf16) and extras[i] (int16) are the halves of an fp32      remainders
    kahan       params[i] + extras[i] is the weight, extras[i] what rounding left     compensations, in params' type
    stochastic  params rounded up or down with the odds of the distance               no extras
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ampctx.kernels import reference
from ampctx.kernels.reference import compute_dtype

WRITE_BACKS = ("nearest", "copy", "split", "kahan", "stochastic")
NEAREST, COPY, SPLIT, KAHAN, STOCHASTIC = range(len(WRITE_BACKS))
LOW_PRECISION = (torch.float16, torch.bfloat16)

_COMMON = "Tensor found_inf, Tensor inv_scale, Tensor lr"
_END = "bool maximize, int write_back, int seed) -> ()"
SCHEMAS = (
    "multi_tensor_adam(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] extras, Tensor(f!)[] steps, " + _COMMON + ", float beta1, float beta2,"
    " float eps, float weight_decay, bool bias_correction, bool adam_w_mode, " + _END,
    "multi_tensor_sgd(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] momentum_buffers, Tensor(c!)[] extras,"
    " Tensor(d!)[] steps, " + _COMMON + ", float momentum, float dampening, float weight_decay, bool nesterov,"
    " bool wd_after_momentum, " + _END,
    "multi_tensor_adagrad(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] sums, Tensor(c!)[] extras,"
    " Tensor(d!)[] steps, " + _COMMON + ", float eps, float weight_decay, bool adagrad_w_mode, " + _END,
    "multi_tensor_lamb(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor(d!)[] extras, Tensor(e!)[] steps, " + _COMMON + ", Tensor global_grad_norm, float beta1, float beta2,"
    " float eps, float weight_decay, float max_grad_norm, bool bias_correction, bool adam_w_mode, bool grad_averaging,"
    " bool use_nvlamb, " + _END,
    "multi_tensor_novograd(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] exp_avgs, Tensor(c!)[] extras,"
    " Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] steps, " + _COMMON + ", float beta1, float beta2, float eps,"
    " float weight_decay, bool bias_correction, bool grad_averaging, bool reg_inside_moment, bool inf_norm,"
    " bool init_zero, " + _END,
    "multi_tensor_larc(Tensor(a!)[] grads, Tensor[] params, " + _COMMON + ", float trust_coefficient, float eps,"
    " float weight_decay, bool clip, bool maximize) -> ()",
)


# --- write back -------------------------------------------------------------------------------------------------------

_32_BITS = 0xFFFFFFFF


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bf16 half of an fp32 tensor, rounded to nearest (ties away from zero), and the int16 rest of its bits. Of a
    nan: the quiet one of its sign, and 0."""
    bits = master.view(torch.int32)
    # The largest nans would round up to zero with the other sign.
    bits = torch.where(torch.isnan(master), (bits & -0x80000000) | 0x7FC00000, bits)
    remainder = bits.to(torch.int16)
    high = (bits - remainder.int()) >> 16
    return high.to(torch.int16).view(torch.bfloat16), remainder


def join(high: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 tensor that ``split`` took apart, every bit of it (of a nan, that it is one)."""
    return ((high.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def spacing(p: Tensor) -> Tensor:
    """From 16-bit numbers to their neighbours away from zero, fp32; nan for inf and nan."""
    magnitude = p.view(torch.int16) & 0x7FFF
    # Two bit patterns that differ in the last bit alone are neighbours between the same powers of two.
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


def _mix32(x: Tensor) -> Tensor:
    """lowbias32, the integer hash of C. Wellons' hash prospector, on int64 holding 32 unsigned bits."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _32_BITS
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _32_BITS
    return x ^ (x >> 16)


def random_bits(seed: int, step: Tensor, tensor: int, place: Tensor) -> Tensor:
    """32 random bits for each place (int64): a function of the seed, the step count, the number of the tensor among
    those of the call that have elements, and the element's place in memory, and of nothing else."""
    key = _mix64(step.reshape(()).long() * _GOLDEN + _wrapped(seed))
    key = _mix64(key + _wrapped(_GOLDEN * (tensor + 1)))
    low = ((place & _32_BITS) * 0x9E3779B1 + (key & _32_BITS) + _shift(place, 32)) & _32_BITS
    return _mix32(_mix32(low) ^ _shift(key, 32))


def round_stochastically(w: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """fp32 ``w`` as a number of the 16-bit ``dtype``, still fp32: up with the odds of the distance. Non-finite values
    stay."""
    dropped = 16 if dtype == torch.bfloat16 else 13
    mask = (1 << dropped) - 1
    raw = w.view(torch.int32)
    result = ((raw + (bits & mask).int()) & ~mask).view(torch.float32)
    if dtype == torch.float16:  # below 2**-14 the spacing is 2**-24 whatever the size
        units = w.abs() * 2.0**24
        whole = units.floor()
        up = (bits >> 8).float() * 2.0**-24 < units - whole
        result = torch.where(w.abs() < 2.0**-14, torch.copysign((whole + up) * 2.0**-24, w), result)
    return torch.where(torch.isfinite(w), result, w)


def _weight(p: Tensor, extra: Tensor | None, write_back: int, dtype: torch.dtype) -> Tensor:
    """What the update starts from."""
    if write_back == SPLIT:
        assert extra is not None
        return join(p, extra.reshape(p.shape)).to(dtype)
    if write_back == KAHAN:
        assert extra is not None
        return p.to(dtype) + extra.reshape(p.shape).to(dtype)
    return p.to(dtype)


def _store(w: Tensor, p: Tensor, extra: Tensor | None, write_back: int, bits: Callable[[], Tensor], skip: Tensor):
    """Writes the updated weight, where ``skip`` is not set."""
    if write_back == SPLIT:
        new, rest = split(w.float())
    elif write_back == STOCHASTIC and p.dtype in LOW_PRECISION:
        new, rest = round_stochastically(w.float(), p.dtype, bits()).to(p.dtype), None
    elif write_back == KAHAN:
        new = w.to(p.dtype)
        # Beyond the range of p nothing is left over: w - inf would be inf, and the next weight inf - inf.
        rest = torch.where(torch.isfinite(new), w - new.to(w.dtype), 0.0).to(p.dtype)
    else:
        new, rest = w.to(p.dtype), w if write_back == COPY else None
    _update(p, new, skip)
    if extra is not None and rest is not None:
        _update(extra, rest.to(extra.dtype), skip)


def _update(t: Tensor, new: Tensor, skip: Tensor) -> None:
    t.copy_(torch.where(skip, t, new.to(t.dtype).reshape(t.shape)))


# --- the steps --------------------------------------------------------------------------------------------------------

Lists = Sequence[Sequence[Tensor]]


class _Walk:
    """One op call, tensor by tensor: what every optimizer does around its own arithmetic."""

    def __init__(
        self, grads, params, extras, steps, found_inf, inv_scale, lr, maximize, write_back, seed, *lists
    ) -> None:
        self.lists = (grads, params, extras or [None] * len(grads), steps, *lists)
        self.found_inf, self.inv_scale, self.lr = found_inf, inv_scale, lr
        self.maximize, self.write_back, self.seed = maximize, write_back, seed
        with_f64 = [t for tensors in self.lists[:3] + lists for t in tensors if isinstance(t, Tensor)]
        self.dtype = compute_dtype(*with_f64)

    def scalar(self, value: Tensor, like: Tensor) -> Tensor:
        return reference.scalar(value, like, self.dtype)

    def __iter__(self) -> Iterator[_Place]:
        number = 0
        for row in zip(*self.lists, strict=True):
            yield _Place(self, number, *row)
            number += row[0].numel() > 0


class _Place:
    """One tensor of a call: gradient, weight, step count (already advanced) and rates, in the type of arithmetic."""

    def __init__(self, walk: _Walk, number, grad, param, extra, step, *state) -> None:
        self.walk, self.number, self.param, self.extra, self.step, self.state = walk, number, param, extra, step, state
        self.skip = walk.found_inf.reshape(()).to(param.device) != 0
        self.taken = step.reshape(()).to(reference.widest(step.device)) + 1
        self.lr = walk.scalar(walk.lr, param)
        g = grad.reshape(param.shape).to(walk.dtype) * walk.scalar(walk.inv_scale, grad)
        self.g = -g if walk.maximize else g
        self.w = _weight(param, extra, walk.write_back, walk.dtype)

    def read(self, i: int) -> Tensor:
        """A piece of state. Tensors at one index agree in elements and layout, and may differ in shape."""
        return self.state[i].reshape(self.param.shape).to(self.walk.dtype)

    def write(self, i: int, value: Tensor) -> Tensor:
        """Stores a piece of state; what was stored, in the type of arithmetic."""
        stored = value.to(self.state[i].dtype)
        _update(self.state[i], stored, self.skip)
        return stored.to(self.walk.dtype)

    def correction(self, beta: float) -> Tensor:
        """1 - beta**step, in fp64 or without what fp32 would cancel."""
        if self.taken.dtype == torch.float64:
            return 1 - torch.full_like(self.taken, beta) ** self.taken
        return -torch.expm1(self.taken * math.log(beta)) if beta > 0 else torch.ones_like(self.taken)

    def cast(self, value: Tensor) -> Tensor:
        return value.to(self.walk.dtype)

    def finish(self, w: Tensor) -> None:
        walk = self.walk

        def bits() -> Tensor:  # the elements are counted as they lie in memory, where they fill it
            place = torch.arange(w.numel(), device=w.device)
            drawn = random_bits(walk.seed, self.taken, self.number, place)
            is_dense = reference.is_dense(self.param)
            return drawn.as_strided(w.shape, self.param.stride()) if is_dense else drawn.reshape(w.shape)

        _store(w, self.param, self.extra, walk.write_back, bits, self.skip)
        _update(self.step, self.taken, self.skip)


def _one(p: _Place) -> Tensor:
    return torch.ones((), dtype=p.walk.dtype, device=p.param.device)


def adam(
    grads, params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, extras, steps, found_inf, inv_scale, lr,
    beta1, beta2, eps, weight_decay, bias_correction, adam_w_mode, maximize, write_back, seed,
) -> None:  # fmt: skip
    """Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019), AMSGrad (Reddi et al. 2018)."""
    state = (exp_avgs, exp_avg_sqs) + ((max_exp_avg_sqs,) if max_exp_avg_sqs else ())
    for p in _Walk(grads, params, extras, steps, found_inf, inv_scale, lr, maximize, write_back, seed, *state):
        g = p.g if adam_w_mode else p.g + weight_decay * p.w
        m = beta1 * p.read(0) + (1 - beta1) * g
        v = beta2 * p.read(1) + ((1 - beta2) * g) * g
        p.write(0, m)
        p.write(1, v)
        if max_exp_avg_sqs:
            v = torch.maximum(p.read(2), v)
            p.write(2, v)
        u = _adam_direction(p, m, v, beta1, beta2, eps, bias_correction)
        p.finish(p.w - p.lr * (u + weight_decay * p.w if adam_w_mode else u))


def _sqrt(x: Tensor) -> Tensor:
    """Rounded correctly, as the kernels' is: torch's own fp32 root on the CPU may be off by the last bit."""
    return x.to(reference.widest(x.device)).sqrt().to(x.dtype)


def _adam_direction(p: _Place, m, v, beta1, beta2, eps, bias_correction) -> Tensor:
    rc1 = p.cast(1 / p.correction(beta1)) if bias_correction else _one(p)
    rsc2 = p.cast(1 / p.correction(beta2).sqrt()) if bias_correction else _one(p)
    return (m * rc1) / (_sqrt(v) * rsc2 + eps)


def sgd(
    grads, params, momentum_buffers, extras, steps, found_inf, inv_scale, lr,
    momentum, dampening, weight_decay, nesterov, wd_after_momentum, maximize, write_back, seed,
) -> None:  # fmt: skip
    """SGD with momentum as torch defines it: the first step sets the buffer to the gradient."""
    state = (momentum_buffers,) if momentum_buffers else ()
    for p in _Walk(grads, params, extras, steps, found_inf, inv_scale, lr, maximize, write_back, seed, *state):
        g = p.g
        if weight_decay != 0 and not wd_after_momentum:
            g = g + weight_decay * p.w
        if momentum_buffers:
            buffer = torch.where(p.taken == 1, g, momentum * p.read(0) + (1 - dampening) * g)
            p.write(0, buffer)
            g = g + momentum * buffer if nesterov else buffer
        if weight_decay != 0 and wd_after_momentum:
            g = g + weight_decay * p.w
        p.finish(p.w - p.lr * g)


def adagrad(
    grads, params, sums, extras, steps, found_inf, inv_scale, lr,
    eps, weight_decay, adagrad_w_mode, maximize, write_back, seed,
) -> None:  # fmt: skip
    """Adagrad (Duchi et al. 2011), with decoupled weight decay in ``adagrad_w_mode``."""
    for p in _Walk(grads, params, extras, steps, found_inf, inv_scale, lr, maximize, write_back, seed, sums):
        g = p.g if adagrad_w_mode else p.g + weight_decay * p.w
        h = p.read(0) + g * g
        p.write(0, h)
        u = g / (_sqrt(h) + eps)
        p.finish(p.w - p.lr * (u + weight_decay * p.w if adagrad_w_mode else u))


def _norm(x: Tensor, order: float = 2.0) -> Tensor:
    """From fp64, rounded once: where the kernels' sums are exact, the norm is theirs to the last bit."""
    return torch.linalg.vector_norm(x.to(reference.widest(x.device)), order).to(x.dtype)


def lamb(
    grads, params, exp_avgs, exp_avg_sqs, extras, steps, found_inf, inv_scale, lr, global_grad_norm,
    beta1, beta2, eps, weight_decay, max_grad_norm, bias_correction, adam_w_mode, grad_averaging, use_nvlamb,
    maximize, write_back, seed,
) -> None:  # fmt: skip
    """LAMB (You et al. 2020): Adam's direction, scaled by ||w|| / ||direction|| for each tensor."""
    state = (exp_avgs, exp_avg_sqs)
    limit = torch.tensor(max_grad_norm, dtype=torch.float64)
    for p in _Walk(grads, params, extras, steps, found_inf, inv_scale, lr, maximize, write_back, seed, *state):
        norm, most = p.walk.scalar(global_grad_norm, p.param), p.walk.scalar(limit, p.param)
        g = p.g * torch.where((norm > most) & (most > 0), most / norm, _one(p))
        if not adam_w_mode:
            g = g + weight_decay * p.w
        m = p.write(0, beta1 * p.read(0) + ((1 - beta1) if grad_averaging else 1.0) * g)
        v = p.write(1, beta2 * p.read(1) + ((1 - beta2) * g) * g)
        u = _adam_direction(p, m, v, beta1, beta2, eps, bias_correction)
        if adam_w_mode:
            u = u + weight_decay * p.w
        ratio = _one(p)
        if use_nvlamb or weight_decay != 0:
            of_w, of_u = _norm(p.w), _norm(u)
            ratio = torch.where((of_w != 0) & (of_u != 0), of_w / of_u, ratio)
        p.finish(p.w - (p.lr * ratio) * u)


def novograd(
    grads, params, exp_avgs, extras, exp_avg_sqs, steps, found_inf, inv_scale, lr,
    beta1, beta2, eps, weight_decay, bias_correction, grad_averaging, reg_inside_moment, inf_norm, init_zero,
    maximize, write_back, seed,
) -> None:  # fmt: skip
    """NovoGrad (Ginsburg et al. 2019): the second moment is one number for each tensor, kept as a norm."""
    state = (exp_avgs, exp_avg_sqs)
    for p in _Walk(grads, params, extras, steps, found_inf, inv_scale, lr, maximize, write_back, seed, *state):
        norm = _norm(p.g, float("inf") if inf_norm else 2.0) if p.g.numel() else 0 * _one(p)
        former = p.cast(p.state[1]).reshape(())
        blended = beta2 * former + (1 - beta2) * norm
        if not inf_norm:
            blended = _sqrt(beta2 * former * former + (1 - beta2) * norm * norm)
        n = blended if init_zero else torch.where(p.taken == 1, norm, blended)
        p.write(1, n.reshape(p.state[1].shape))
        rc1 = p.cast(1 / p.correction(beta1)) if bias_correction else _one(p)
        rsc2 = p.cast(1 / p.correction(beta2).sqrt()) if bias_correction else _one(p)
        d = n * rsc2 + eps
        g = p.g / d + weight_decay * p.w if reg_inside_moment else p.g
        m = beta1 * p.read(0) + ((1 - beta1) if grad_averaging else 1.0) * g
        p.write(0, m)
        u = m * rc1
        p.finish(p.w - p.lr * (u if reg_inside_moment else u / d + weight_decay * p.w))


def larc(grads, params, found_inf, inv_scale, lr, trust_coefficient, eps, weight_decay, clip, maximize) -> None:
    """LARC (You et al. 2017): each gradient scaled by trust_coefficient * ||w|| / ||g||, in place, unscaled too."""
    decay = -weight_decay if maximize else weight_decay
    dtype = compute_dtype(*grads, *params)
    for grad, param in zip(grads, params, strict=True):
        skip = found_inf.reshape(()).to(param.device) != 0
        g = grad.to(dtype) * reference.scalar(inv_scale, grad, dtype)
        w = param.to(dtype)
        of_w, of_g = _norm(w), _norm(g)
        rate = trust_coefficient * of_w / (of_g + of_w * weight_decay + eps)
        if clip:
            rate = torch.clamp(rate / reference.scalar(lr, grad, dtype), max=1.0)
        adapted = (g + decay * w.reshape(g.shape)) * rate
        _update(grad, torch.where((of_w != 0) & (of_g != 0), adapted, g), skip)


# --- checks: the kernels' own, with the same messages -----------------------------------------------------------------

_MAY_BE_EMPTY = ("max_exp_avg_sqs", "momentum_buffers")
_KNOWN = "float32, float16, bfloat16 or float64"


def _check_extras(op: str, grads: Sequence[Tensor], params: Sequence[Tensor], extras, write_back: int) -> None:
    if not 0 <= write_back < len(WRITE_BACKS):
        raise RuntimeError(f"{op}: write_back is {write_back}, expected 0 to {len(WRITE_BACKS) - 1}")
    if write_back in (NEAREST, STOCHASTIC):
        if extras:
            raise RuntimeError(f"{op}: extras has {len(extras)} tensors, expected none to go with this write_back")
        return
    allowed = ((torch.int16,), "int16") if write_back == SPLIT else (reference.KERNEL_DTYPES, _KNOWN)
    reference.check_lists(op, {"grads": grads, "extras": extras}, {"extras": allowed})
    if not params:
        return
    if write_back == SPLIT and params[0].dtype != torch.bfloat16:
        raise RuntimeError(f"{op}: params[0] has dtype {params[0].dtype}, expected bfloat16 to go with remainders")
    if write_back == KAHAN and params[0].dtype not in LOW_PRECISION:
        raise RuntimeError(
            f"{op}: params[0] has dtype {params[0].dtype}, expected float16 or bfloat16 to go with compensations"
        )
    if write_back == KAHAN and extras[0].dtype != params[0].dtype:
        raise RuntimeError(f"{op}: extras[0] has dtype {extras[0].dtype}, params[0] has {params[0].dtype}")


def _check_one_element(op: str, name: str, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    if len(tensors) != len(grads):
        raise RuntimeError(f"{op}: {name} has {len(tensors)} tensors, grads has {len(grads)}")
    for i, t in enumerate(tensors):
        where = f"{op}: {name}[{i}]"
        reference.require_one_element(t, where, (torch.float32,))
        if t.device != grads[0].device:
            raise RuntimeError(f"{where} is on {t.device}, grads[0] is on {grads[0].device}")


def _checked(op: str, run: Callable, elementwise: str, factors: str = "", one_element: str = "") -> Callable:
    """``run`` behind the checks of its arguments, which are given by name. What an op has of its own comes last."""
    names = [argument.split()[-1] for argument in _schema(op).split("(", 1)[1].rpartition(") ->")[0].split(", ")]

    def fallback(*arguments):
        given = dict(zip(names, arguments, strict=True))
        lists = {name: given[name] for name in elementwise.split()}
        reference.check_lists(op, {k: v for k, v in lists.items() if v or k not in _MAY_BE_EMPTY})
        if "write_back" in given:
            _check_extras(op, given["grads"], given["params"], given["extras"], given["write_back"])
            _check_one_element(op, "steps", given["steps"], given["grads"])
        scalars = {name: given[name] for name in ["inv_scale", "lr", *factors.split()]}
        reference.check_scalars(op, given["found_inf"], {"grads": given["grads"]}, **scalars)
        for name in one_element.split():
            _check_one_element(op, name, given[name], given["grads"])
        run(*arguments)

    return fallback


def _schema(op: str) -> str:
    return next(schema for schema in SCHEMAS if schema.startswith(op + "("))


FALLBACKS = {
    "multi_tensor_adam": _checked("multi_tensor_adam", adam, "grads params exp_avgs exp_avg_sqs max_exp_avg_sqs"),
    "multi_tensor_sgd": _checked("multi_tensor_sgd", sgd, "grads params momentum_buffers"),
    "multi_tensor_adagrad": _checked("multi_tensor_adagrad", adagrad, "grads params sums"),
    "multi_tensor_lamb": _checked(
        "multi_tensor_lamb", lamb, "grads params exp_avgs exp_avg_sqs", factors="global_grad_norm"
    ),
    "multi_tensor_novograd": _checked(
        "multi_tensor_novograd", novograd, "grads params exp_avgs", one_element="exp_avg_sqs"
    ),
    "multi_tensor_larc": _checked("multi_tensor_larc", larc, "grads params"),
}
