"""Every op, on every backend, on lists that hypothesis makes up, against plain torch: any lengths, sizes around the
edges of blocks and vectors, mixed memory layouts, any allowed types, options, flags, places of inf and nan.

The examples are the same in every run. AMPCTX_HYPOTHESIS_EXAMPLES=2000 draws so many new ones for each test.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from backends import ALL_FLOATS, COMPILED, FLOATS, NON_FINITE, REFERENCE, compute_dtype
from optimizer_calls import STEP_OPS, UNSCALING, WITH_CODES, WRITE_BACKS, make_call, on_kernels, on_optimizers, takes

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

EXAMPLES = os.environ.get("AMPCTX_HYPOTHESIS_EXAMPLES")
EDGES = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 511, 512, 513, 2047, 2048, 2049, 4097]
LAYOUTS = ("flat", "rows", "columns", "channels_last", "0-d", "offset")

flag_dtypes = st.sampled_from((torch.float32, torch.int32))
factors = st.one_of(st.sampled_from((0.0, 1.0, 0.5, -2.0, 1 / 3)), st.floats(-1e6, 1e6, width=32)).filter(
    lambda value: value or math.copysign(1, value) > 0
)
factor_dtypes = st.sampled_from((torch.float32, torch.float64))
# (size, layout) for each index.
shapes = st.lists(
    st.tuples(st.one_of(st.sampled_from(EDGES), st.integers(0, 300)), st.sampled_from(LAYOUTS)), max_size=40
)
# (index of the tensor, place in it, value), both modulo what there is.
spots = st.lists(
    st.tuples(st.integers(0, 39), st.integers(0, 5000), st.sampled_from(list(NON_FINITE.values()))), max_size=3
)
seeds, int32s = st.integers(0, 1 << 16), st.integers(-(1 << 31), (1 << 31) - 1)


def holds(backend, *strategies, cases=()):
    """Calls a function with 40 examples on the CPU's kernels, with 10 on others: emulated ones are slow."""
    examples = settings(
        max_examples=int(EXAMPLES or (40 if backend is COMPILED else 10)),
        derandomize=EXAMPLES is None,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )

    def run(check):
        test = given(*strategies)(check)
        for case in cases:
            test = example(*case)(test)
        examples(test)()

    return run


def dtypes_of(backend):
    return st.sampled_from(ALL_FLOATS if backend.fp64 else FLOATS)


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor with as many elements (a few less, to make a rectangle) in this layout."""
    n = values.numel()
    if layout == "0-d" and n == 1:
        return values.reshape(())
    if layout == "offset":
        room = values.new_empty(n + 3)
        room[3:] = values
        return room[3:]
    if layout == "flat" or n < 12:
        return values
    if layout in ("rows", "columns"):
        rows = values[: n // 3 * 3].view(3, -1)
        return rows if layout == "rows" else rows.t().contiguous().t()
    return values[: n // 12 * 12].view(2, 3, -1, 2).to(memory_format=torch.channels_last)


def tensors(backend, shape_list, dtype, seed, magnitude=0) -> list[torch.Tensor]:
    """Normal numbers times 10**magnitude. Tensors at one index of lists of the same shapes agree in size and layout."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for size, layout in shape_list:
        values = torch.randn(size, generator=generator, dtype=torch.float64) * 10.0**magnitude
        found.append(laid_out(values.to(backend.device, dtype), layout))
    return found


def place(values, where) -> None:
    for index, at, value in where:
        if values and (t := values[index % len(values)]).numel():
            at %= t.numel()
            t[torch.unravel_index(torch.tensor(at), t.shape)] = value


def factor(value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


def assert_same(got, want) -> None:
    """Every bit, but for those of nans."""
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype
        nan = a.isnan()
        assert torch.equal(nan, b.isnan()), f"tensor {i}: nans in other places"
        number = ~nan
        assert torch.equal(a[number].signbit(), b[number].signbit()), f"tensor {i}: signs"
        assert torch.equal(a[number], b[number]), f"tensor {i}: {(a[number].double() - b[number].double()).abs().max()}"


def is_finite(lists) -> bool:
    return all(bool(t.isfinite().all()) for t in lists)


def test_scale(backend):
    dtypes = dtypes_of(backend)

    @holds(backend, shapes, dtypes, dtypes, factors, factor_dtypes, flag_dtypes, spots, seeds, st.booleans())
    def check(shape_list, src_dtype, dst_dtype, value, factor_dtype, flag_dtype, where, seed, in_place):
        src = tensors(backend, shape_list, src_dtype, seed)
        place(src, where)
        dst = src if in_place else tensors(backend, shape_list, dst_dtype, seed + 1)
        compute = compute_dtype(src_dtype, dst[0].dtype if dst else dst_dtype)
        f = factor(value, factor_dtype)
        want = [(s.to(compute) * f.to(compute)).to(d.dtype) for s, d in zip(src, dst, strict=True)]
        expected_flag, flag = not is_finite(src), backend.flag(0, flag_dtype)
        backend.scale(src, dst, flag, f)
        assert_same(dst, want)
        assert flag.item() == expected_flag


def test_axpby(backend):
    dtypes = dtypes_of(backend)
    types, checked = st.tuples(dtypes, dtypes, dtypes), st.sampled_from((-1, 0, 1))

    @holds(backend, shapes, types, st.tuples(factors, factors), checked, spots, spots, seeds,
           st.sampled_from(("out", "x", "y")))  # fmt: skip
    def check(shape_list, types, values, arg_to_check, in_x, in_y, seed, target):
        x, y = (tensors(backend, shape_list, dtype, seed + i) for i, dtype in enumerate(types[:2]))
        place(x, in_x)
        place(y, in_y)
        out = {"x": x, "y": y}.get(target) or tensors(backend, shape_list, types[2], seed + 2)
        compute = compute_dtype(*(tensors_[0].dtype for tensors_ in (x, y, out) if tensors_))
        a, b = (factor(v, torch.float64) for v in values)
        want = [
            (a.to(compute) * s.to(compute) + b.to(compute) * t.to(compute)).to(o.dtype)
            for s, t, o in zip(x, y, out, strict=True)
        ]
        expected_flag = not is_finite({-1: x + y, 0: x, 1: y}[arg_to_check])
        flag = backend.flag()
        backend.axpby(x, y, out, flag, a, b, arg_to_check)
        assert_same(out, want)
        assert flag.item() == expected_flag


def test_norms(backend):
    inv_scales = st.one_of(st.none(), st.floats(1e-4, 1e4))

    @holds(backend, shapes, dtypes_of(backend), st.integers(-3, 3), inv_scales, spots, seeds, st.booleans())
    def check(shape_list, dtype, magnitude, inv_scale, where, seed, per_tensor):
        values = tensors(backend, shape_list, dtype, seed, magnitude)
        place(values, where)
        flag = backend.flag()
        norm, each = backend.l2norm(values, flag, inv_scale, per_tensor=per_tensor)
        assert flag.item() == (not is_finite(values))
        assert norm.device == each.device == flag.device
        rounded = factor(1.0 if inv_scale is None else inv_scale, compute_dtype(dtype)).double()
        norms = [torch.linalg.vector_norm(t.cpu().double() * rounded) for t in values]
        want = torch.stack(norms or [torch.zeros(()).double()])
        assert each.numel() == (len(values) if per_tensor else 0)
        assert_norms(norm, torch.linalg.vector_norm(want), sum(t.numel() for t in values))
        if per_tensor:
            for got, expected, t in zip(each, want, values, strict=False):
                assert_norms(got, expected, t.numel())


def assert_norms(got, want, elements: int) -> None:
    bound = 4 * math.sqrt(max(elements, 1)) * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.cpu().double(), want, rtol=bound, atol=0.0, equal_nan=True)


def checked(backend, op, src, flag, state=()):
    """What an op that checks gradients gives. With ``state`` it moves the loss scale, too."""
    rule = {"growth_interval": 2, "growth_factor": 1.9, "backoff_factor": 0.4}
    if op == "scale":
        out = [torch.zeros_like(t) for t in src]
        backend.scale_and_update(src, out, flag, 0.5, state, **rule) if state else backend.scale(src, out, flag, 0.5)
        return out
    if not state:
        norm, each = backend.l2norm(src, flag, 0.5, op == "norms")
        return [norm, each, norm]
    found = backend.l2norm_and_update(src, flag, 0.5, state, op == "norms", **rule)
    assert found[0].data_ptr() != found[2].data_ptr()
    return list(found)


@pytest.mark.parametrize("op", ["scale", "norms", "norm"])
def test_a_check_that_moves_the_scale_is_both_ops(backend, op):
    """To the last bit. The scale grows or falls."""
    dtypes, flags = st.sampled_from(FLOATS), st.sampled_from((0, 0, 1))

    @holds(backend, shapes, dtypes, spots, flags, flag_dtypes, seeds)
    def check(shape_list, dtype, where, before, flag_dtype, seed):
        src, found = tensors(backend, shape_list, dtype, seed), []
        place(src, where)
        for together in (False, True):
            state = [torch.full((), 1024.0), *(torch.ones((), dtype=torch.int32) for _ in range(2))]
            state, flag = [t.to(backend.device) for t in state], backend.flag(before, flag_dtype)
            results = checked(backend, op, src, flag, state if together else ())
            if not together:
                backend.update_scale(*state, flag, growth_interval=2, growth_factor=1.9, backoff_factor=0.4)
            found.append([*results, *state, flag])
        assert_same(*found)
        assert found[1][-4] != 1024


UPDATES = (
    st.floats(2.0**-126, 2.0**127, width=32), int32s, int32s,
    st.sampled_from((0.0, -0.0, 1.0, 2.0, math.inf, math.nan)), flag_dtypes,
    st.floats(1.0, 1e3), st.floats(1e-3, 1.0), st.integers(1, 1 << 40), st.integers(0, (1 << 31) - 1),
    st.sampled_from((0.0, 1e-40, 1.0, 2.0**24)), st.sampled_from((math.inf, 1e300, 2.0**24, 1.0)),
)  # fmt: skip
F32 = torch.float32
LAST_COUNTS = [
    (1.0, (1 << 31) - 1, 1, 0.0, F32, 2.0, 0.5, 1 << 40, 1, 0.0, math.inf),
    (1.0, (1 << 31) - 1, 1, 0.0, F32, 2.0, 0.5, (1 << 31) - 1, 1, 0.0, math.inf),
    (1.0, 0, -(1 << 31), 1.0, F32, 2.0, 0.5, 1, 1, 0.0, math.inf),
]


@pytest.mark.usefixtures("reference")
def test_update_scale(backend):
    @holds(backend, *UPDATES, cases=LAST_COUNTS)
    def check(scale, growth, left, found, flag_dtype, growth_factor, backoff_factor, interval, hysteresis, low, high):
        rule = {"growth_factor": growth_factor, "backoff_factor": backoff_factor, "growth_interval": interval}
        rule |= {"hysteresis": hysteresis, "min_scale": low, "max_scale": high}
        found = found if math.isfinite(found) or flag_dtype == F32 else -(1 << 31)
        states = []
        for each in (backend, REFERENCE):
            state = [torch.tensor(scale), *(torch.tensor(v, dtype=torch.int32) for v in (growth, left))]
            state = [t.to(each.device) for t in state]
            each.update_scale(*state, each.flag(found, flag_dtype), **rule)
            states.append([t.item() for t in state])
        assert states[0] == states[1]
        new_scale, new_growth, new_left = states[0]
        assert 0 < new_scale < math.inf
        assert new_left == (max(left - 1, 0) if found != 0 else hysteresis)
        grows = found == 0 and growth + 1 >= interval
        assert new_growth == (0 if found != 0 or grows else min(growth + 1, (1 << 31) - 1))
        if not grows and not (found != 0 and new_left == 0):
            assert new_scale == torch.tensor(scale).item()


# --- optimizers -------------------------------------------------------------------------------------------------------

betas, decays = st.sampled_from((0.0, 0.5, 0.9, 0.999)), st.sampled_from((0.0, 0.01, 0.1))
epsilons, flags = st.sampled_from((1e-10, 1e-8, 1e-3)), st.booleans()
_ADAM = {**dict.fromkeys(("beta1", "beta2"), betas), "eps": epsilons, "weight_decay": decays}
_ADAM |= dict.fromkeys(("bias_correction", "adam_w_mode"), flags)
_SGD = {"dampening": st.sampled_from((0.0, 0.1)), "weight_decay": decays, "nesterov": flags, "wd_after_momentum": flags}
_LAMB = {**_ADAM, "max_grad_norm": st.sampled_from((0.0, 1.0, 100.0)), "grad_averaging": flags}
OPTIONS = {
    "adam": _ADAM,
    "amsgrad": _ADAM,
    "sgd": _SGD,
    "momentum": {**_SGD, "momentum": betas},
    "adagrad": {"eps": epsilons, "weight_decay": decays, "adagrad_w_mode": flags},
    "lion": {"beta1": betas, "beta2": betas, "weight_decay": decays},
    "muon": {"momentum": betas, "nesterov": flags},
    "lamb": {**_LAMB, "use_nvlamb": flags},
    "lamb-without-ratio": {**_LAMB, "weight_decay": st.just(0.0)},
}


UNSCALING_TWIN = {twin.name: twin for twin in UNSCALING}


@st.composite
def steps(draw, backend, optimizer):
    """A call, and how to run it."""
    dtypes, unscales = dtypes_of(backend), draw(flags)
    write_back = draw(st.sampled_from(WRITE_BACKS))
    param = draw(dtypes.filter(lambda dtype: takes(write_back, dtype)))
    types = {name: draw(dtypes) for name in ("grad", "state", "extra")}
    shape_list = draw(shapes)
    options = {name: draw(strategy) for name, strategy in OPTIONS[optimizer.name].items()}
    if optimizer in WITH_CODES and torch.float64 not in (param, *types.values()) and draw(flags):
        types["state"] = draw(st.sampled_from((torch.bfloat16, "8bit", "mixed")))
        options["stochastic_state"] = draw(flags)
        shape_list = [(size, "flat") for size, _ in shape_list]  # codes are made of values in memory order
    counts = draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))
    sizes = [laid_out(torch.empty(size), layout).numel() for size, layout in shape_list]
    call = make_call(
        backend, UNSCALING_TWIN[optimizer.name] if unscales else optimizer, sizes, param=param, write_back=write_back,
        counts=counts, maximize=draw(flags), **types, **options, seed=draw(st.integers(-(1 << 63), (1 << 63) - 1)),
    )  # fmt: skip
    for name in call.elementwise:
        call.lists[name] = [laid_out(t, layout) for t, (_, layout) in zip(call[name], shape_list, strict=True)]
    how = {"inv_scale": draw(st.sampled_from((1.0, 0.5, 1e-3))), "lr": draw(st.sampled_from((1e-3, 0.1, 1.0)))}
    return call, how, draw(st.sampled_from((0.0, 0.0, 0.0, 1.0, 2.0)))


@on_optimizers
@on_kernels
@pytest.mark.usefixtures("reference")
def test_optimizer(backend, optimizer):
    """Those that leave unscaled gradients, too."""

    @holds(backend, steps(backend, optimizer))
    def check(step):
        call, how, found = step
        before = call.clone()
        expected = call.expected(found_inf=backend.flag(found), **how)
        call.run(backend, found_inf=backend.flag(found), **how)
        if found:
            call.assert_same(before)
        call.assert_agrees(expected)


@pytest.mark.parametrize("name", ["adam", "amsgrad", "sgd", "momentum", "adagrad"])
@on_kernels
@pytest.mark.usefixtures("reference")
def test_non_finite_gradients_and_weights_without_a_flag(backend, name):
    """Element by element too: what is not finite stays where it is. A decay of 0 leaves an infinite weight."""
    (optimizer,) = [o for o in STEP_OPS if o.name == name]

    @holds(backend, steps(backend, optimizer), spots.filter(bool), spots)
    def check(step, of_grads, of_weights):
        call, how, _ = step
        place(call["grads"], of_grads)
        place(call["params"], of_weights)
        expected = call.expected(**how)
        call.run(backend, **how)
        for (name, a), (_, b) in zip(call.tensors(), expected.tensors(), strict=True):
            assert torch.equal(a.isnan(), b.isnan()), name
            number = ~a.isnan()
            if any(t.dtype == torch.float64 for _, t in call.tensors()):
                torch.testing.assert_close(a[number], b[number])
            else:
                assert torch.equal(a[number], b[number]), name
