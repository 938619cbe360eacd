"""amp_C's optimizer steps against their formulas in fp64, and update_scale_hysteresis.

test_multi_tensor_apply.py has scaling and norms.
"""

from functools import partial

import amp_C
import pytest
import torch
from formulas import Formula
from kernel_cases import DEVICES, FLOATS, SIZES, assert_lists, assert_same, copies, flag, randn, wide

OPTION = pytest.mark.parametrize
F16, B16, F32 = torch.float16, torch.bfloat16, torch.float32
ADAM = LR, BETA1, BETA2, EPS = 0.05, 0.9, 0.99, 1e-3
NORM_CASES = {"clipped": (3.0, 1.5), "at-the-limit": (1.5, 1.5), "below": (0.5, 1.5)}
each_norm = OPTION("norm", NORM_CASES.values(), ids=NORM_CASES)
each_kind = OPTION("dtype", FLOATS.values(), ids=FLOATS)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def make(sizes, dtypes, device="cpu", positive=(3,)):
    """Lists of these types: grads, params, first and second moments, and more. Some without negative numbers."""
    lists = [randn(sizes, dtype, seed=i, device=device) for i, dtype in enumerate(dtypes)]
    return [[t.abs() for t in tensors] if i in positive else tensors for i, tensors in enumerate(lists)]


def call(name, lists, *args, buf=None):
    getattr(amp_C, name)(65536, flag(device=lists[0][0].device) if buf is None else buf, lists, *args)


def assert_step(name, lists, args, formula, buf=None, first=1, beside=()):
    """One call. Lists from ``first`` on, then ``beside`` (a number for each index), become what ``formula`` makes of
    them in fp64, index by index; those before it stay."""
    rows = [(*row, *numbers) for row, *numbers in zip(wide(lists), *(x.double() for x in beside), strict=True)]
    want, before = [formula(*row) for row in rows], copies(lists[:first])
    call(name, lists, *args, buf=buf)
    assert_same(lists[:first], before)
    for got, values in zip([*lists[first:], *beside], zip(*want, strict=True), strict=True):
        assert_lists(got, values)


# --- Adam -------------------------------------------------------------------------------------------------------------


def formula(kind, names, step=1, **options):
    """A step of ``tests/formulas.py`` from gradient, param and the states of these names; param and states after it."""

    def stepped(g, p, *states):
        p, state = p.clone(), dict(zip(names, states, strict=True))
        numbers = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS, **options}
        getattr(Formula(kind, [], numbers, t=step), kind)(p, g, state)
        return p, *(state[name] for name in names)

    return stepped


def adam(step, mode, bias_correction, wd):
    return formula("adam", "mv", step, adam_w_mode=mode == 1, bias_correction=bias_correction, weight_decay=wd)


@OPTION("sizes", SIZES)
@each_kind
@OPTION("bias_correction", [0, 1], ids=["no-correction", "correction"])
@OPTION("mode", [0, 1], ids=["l2", "decoupled"])
def test_adam(device, mode, bias_correction, dtype, sizes):
    """For many steps, whatever the flag says; gradients stay."""
    lists = make(SIZES[sizes], [dtype, dtype, F32, F32], device)
    for step in (1, 2, 7):
        options = (step, mode, bias_correction, 0.1)
        assert_step("multi_tensor_adam", lists, (*ADAM, *options), adam(*options), flag(1, device=device))


def capturable(device="cpu"):
    """Numbers of the device are tensors."""
    rate, factor = torch.tensor([LR], device=device), torch.tensor([0.25], device=device)
    return rate, BETA1, BETA2, EPS, torch.tensor([3], dtype=torch.int32, device=device), 1, 1, 0.1, factor


@OPTION("sizes", ["odd", "empties"])
@OPTION("master", [False, True], ids=["capturable", "master"])
@each_kind
def test_adam_capturable(device, dtype, master, sizes):
    lists = make(SIZES[sizes], [dtype, dtype, F32, F32] + [F32] * master, device)

    def stepped(g, p, m, v, w=None):
        new, m, v = adam(3, 1, 1, 0.1)(g * 0.25, p if w is None else w, m, v)
        return g * 0.25, new, m, v, *([new] * master)

    name = "multi_tensor_adam_capturable" + "_master" * master
    assert_step(name, lists, capturable(device), stepped, first=0)
    if master:
        assert_same([lists[1]], [[t.to(dtype) for t in lists[4]]])


# --- SGD, Adagrad, NovoGrad -------------------------------------------------------------------------------------------


COMBINATIONS = {
    "half": (F16, F16),
    "float": (F32, F32),
    "bf16": (B16, B16),
    "half-masters": (F16, F32, F16),
    "float-masters": (F32, F32, F16),
    "bf16-masters": (B16, F32, B16),
}


@pytest.mark.full(but=24)
@OPTION("wd_after_momentum", [False, True], ids=["wd-before", "wd-after"])
@OPTION("first_run", [False, True], ids=["later", "first"])
@OPTION(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)], ids=["plain", "momentum", "nesterov"])
@OPTION("kinds", COMBINATIONS)
def test_sgd(kinds, momentum, nesterov, first_run, wd_after_momentum):
    g, w, *copy = COMBINATIONS[kinds]
    for wd, sizes in ((0.0, SIZES["odd"]), (0.1, SIZES["empties"])):
        lists = make(sizes, [g, w, w, *copy])
        args = (wd, momentum, 0.3, LR, nesterov, first_run, wd_after_momentum, 0.5)
        options = {"lr": LR, "weight_decay": wd, "momentum": momentum, "dampening": 0.3, "nesterov": nesterov}

        def stepped(g, w, b, *copy, options=options):
            w, state = w.clone(), {} if first_run else {"b": b}
            Formula("sgd", [], {**options, "wd_after_momentum": wd_after_momentum}).sgd(w, g * 0.5, state)
            return w, state.get("b", b), *([w] if copy else [])

        assert_step("multi_tensor_sgd", lists, args, stepped)
        if copy:
            assert_same([lists[3]], [[t.to(copy[0]) for t in lists[1]]])


@OPTION("sizes", SIZES)
@each_kind
@OPTION("mode", [0, 1], ids=["l2", "decoupled"])
def test_adagrad(device, mode, dtype, sizes):
    lists = make(SIZES[sizes], [dtype] * 3, device, positive=[2])
    of_adagrad = formula("adagrad", "h", adagrad_w_mode=mode == 1, weight_decay=0.1)
    assert_step("multi_tensor_adagrad", lists, (LR, EPS, mode, 0.1), of_adagrad, flag(1, device=device))


@pytest.mark.full(but=16)
@OPTION("norm_type", [0, 2], ids=["inf", "l2"])
@OPTION("moment_mode", [0, 1], ids=["reg-inside", "reg-outside"])
@OPTION("grad_averaging", [0, 1], ids=["beta3-1", "averaging"])
@OPTION("bias_correction", [0, 1], ids=["no-correction", "correction"])
@each_kind
def test_novograd(dtype, bias_correction, grad_averaging, moment_mode, norm_type):
    """Norms are blended at the first step too: the caller chose what is in them."""
    lists = make(SIZES["empties"], [dtype] * 3)
    norms = torch.rand(len(lists[0])) + 0.5
    for step in (1, 2):
        args = (norms, *ADAM, step, bias_correction, 0.1, grad_averaging, moment_mode, norm_type)
        options = {"bias_correction": bias_correction, "weight_decay": 0.1, "grad_averaging": grad_averaging}
        options |= {"reg_inside_moment": moment_mode == 0, "norm_type": norm_type}
        assert_step("multi_tensor_novograd", lists, args, formula("novograd", "mn", step, **options), beside=[norms])


# --- LAMB -------------------------------------------------------------------------------------------------------------


def direction(g, p, m, v, step, mode, bias_correction, wd, beta3=1 - BETA1):
    """Of LAMB, with the moments."""
    state, options = {"m": m, "v": v}, {"betas": (BETA1, BETA2), "eps": EPS, "bias_correction": bias_correction}
    u = Formula("lamb", [], options, t=step).direction(g if mode == 1 else g + wd * p, state, beta3)
    return u + wd * p if mode == 1 else u, state["m"], state["v"]


def apply(p, u, of_p, of_u, wd, nvlamb):
    adapt = (nvlamb or wd != 0) and of_p != 0 and of_u != 0
    return p - LR * (of_p / of_u if adapt else 1) * u


def lamb(g, p, m, v, *copy, stored, step, correction, wd, averaging, mode, norm, nvlamb, factor=1.0):
    """u, p, m, v, and p once more for a copy. The update is applied as it is stored in the gradient, in that type."""
    g = g * factor / max(norm[0] / norm[1], 1.0)
    u, m, v = direction(g, p, m, v, step, mode, correction, wd, 1 - BETA1 if averaging else 1.0)
    u = u.to(stored).double()
    p = apply(p, u, p.norm(), u.norm(), wd, nvlamb)
    return u, p, m, v, *([p] if copy else [])


def case(correction=1, averaging=1, mode=1, wd=0.1, nvlamb=False):
    return {"correction": correction, "averaging": averaging, "mode": mode, "wd": wd, "nvlamb": nvlamb}


CASES = {
    "bert": case(),
    "l2": case(mode=0),
    "no-decay": case(wd=0.0),
    "no-decay-l2": case(mode=0, wd=0.0, nvlamb=None),
    "nvlamb": case(wd=0.0, nvlamb=True),
    "no-averaging": case(averaging=0),
    "no-correction": case(correction=0, averaging=0, mode=0, nvlamb=True),
}
each_case = OPTION("c", CASES.values(), ids=CASES)
FACTOR = 0.25


def lamb_args(c, norm, step, device="cpu"):
    options = (step, c["correction"], c["wd"], c["averaging"], c["mode"])
    return *ADAM, *options, torch.tensor([norm[0]], device=device), norm[1], c["nvlamb"]


def lamb_mp_args(c, norm, step, device="cpu"):
    """lr, step and norms as tensors, as the mixed-precision optimizer gives them."""
    lr, *norm, factor = (torch.tensor([x], device=device) for x in (LR, *norm, FACTOR))
    options = (torch.tensor([step], dtype=torch.int32, device=device), c["correction"], c["wd"], c["averaging"])
    return lr, *ADAM[1:], *options, c["mode"], *norm, c["nvlamb"], torch.ones(1, device=device), factor


@pytest.mark.full(but=36)
@each_norm
@OPTION("sizes", ["odd", "empties"])
@each_kind
@each_case
def test_lamb(device, c, dtype, sizes, norm):
    """For two steps, whatever the flag says; the gradients become the updates."""
    lists = make(SIZES[sizes], [dtype] * 4, device)
    for step in (1, 2):
        lists[0] = randn(SIZES[sizes], dtype, seed=10 + step, device=device)
        stepped = partial(lamb, stored=dtype, step=step, norm=norm, **c)
        assert_step(
            "multi_tensor_lamb", lists, lamb_args(c, norm, step, device), stepped, flag(1, device=device), first=0
        )


@OPTION(("name", "given"), [("nvlamb", (1.0, 2.0)), ("bert", (5.0, 0.0))], ids=["a-weight-of-0", "a-largest-norm-of-0"])
def test_lamb_of_zeros(name, given):
    """A weight of 0 steps by lr alone. With a largest norm of 0, gradients stay as they are."""
    lists = make([5, 7], [F32] * 4)
    if name == "nvlamb":
        lists[1][0].zero_()
    stepped = partial(lamb, stored=F32, step=1, norm=(1.0, 2.0), **CASES[name])
    assert_step("multi_tensor_lamb", lists, lamb_args(CASES[name], given, 1), stepped, first=0)


@OPTION("bad", [float("inf"), float("nan")], ids=str)
@OPTION("where", [0, 1], ids=["grads", "params"])
def test_lamb_raises_the_flag_and_goes_on(where, bad):
    lists = make([5, 7], [F32] * 4)
    before, buf = copies(lists), flag()
    lists[where][1][3] = bad
    call("multi_tensor_lamb", lists, *lamb_args(CASES["bert"], (1.0, 2.0), 1), buf=buf)
    assert buf.tolist() == [1]
    assert not lists[1][1].isfinite().all()
    assert lists[1][0].isfinite().all()
    assert not torch.equal(lists[1][0], before[1][0])


MIXES = {
    "fp32": (F32,) * 4,
    "fp16": (F16,) * 4,
    "bf16": (B16,) * 4,
    "fp16-model": (F16, F32, F32, F32, F16),
    "bf16-model": (B16, F32, F32, F32, B16),
    "fp32-model": (F32,) * 5,
}


@pytest.mark.full(but=36)
@each_norm
@OPTION("mix", MIXES)
@each_case
def test_lamb_mp(device, c, mix, norm):
    lists, buf = make(SIZES["empties"], MIXES[mix], device), flag(device=device)
    stepped = partial(lamb, stored=MIXES[mix][0], step=3, norm=norm, factor=FACTOR, **c)
    assert_step("multi_tensor_lamb_mp", lists, lamb_mp_args(c, norm, 3, device), stepped, buf, first=0)
    if len(lists) == 5:
        assert_same([lists[4]], [[t.to(MIXES[mix][4]) for t in lists[1]]])
    assert buf.item() == 0


@OPTION("where", [0, 1], ids=["update", "param"])
def test_lamb_mp_stops_at_what_is_not_finite(where):
    """With an update that is not, moments and updates are there by then; params keep their values."""
    lists = make([5, 7], [F32] * 4)
    lists[where][1][3] = float("inf")
    before, buf = copies(lists), flag()
    call("multi_tensor_lamb_mp", lists, *lamb_mp_args(CASES["bert"], (1.0, 2.0), 1), buf=buf)
    assert buf.tolist() == [1]
    assert_same([lists[1]] if where == 0 else lists, [before[1]] if where == 0 else before)
    assert torch.equal(lists[2][0], before[2][0]) == (where == 1)


@each_norm
@OPTION("kinds", [(F32,) * 3, (F16, F32, F32), (F16, F16, F32), (B16,) * 3], ids=str)
def test_lamb_stages(device, kinds, norm):
    """Decay is a number for each tensor; the step is that of before."""
    g, p, u = kinds
    lists = make(SIZES["empties"], [g, p, p, p, u], device)
    params, updates, buf = lists[1], lists[4], flag(1, device=device)
    decays = iter(torch.arange(len(params), dtype=F32) / 10)

    def stepped(g, p, m, v, _):
        u, m, v = direction(g / max(norm[0] / norm[1], 1.0), p, m, v, 3, 1, True, next(decays).double().to(p.device))
        return m, v, u

    decay = torch.arange(len(params), dtype=F32, device=device) / 10
    args = (decay, 2, BETA1, BETA2, EPS, torch.tensor([norm[0]], device=device), norm[1])
    assert_step("multi_tensor_lamb_stage1_cuda", lists, args, stepped, buf, first=2)

    norms = [torch.stack([t.double().norm() for t in ts]).float() for ts in (params, updates)]
    norms[0][-1] = 0
    for wd, nvlamb in ((0.0, False), (0.0, True), (0.1, None)):
        (stepped,) = copies([params])
        rows = zip(wide([params, updates]), *(x.double() for x in norms), strict=True)
        new = [apply(*row, of_p, of_u, wd, nvlamb) for row, of_p, of_u in rows]
        call("multi_tensor_lamb_stage2_cuda", [stepped, updates], *norms, LR, wd, nvlamb, buf=buf)
        assert_lists(stepped, new)


# --- the flag of those that read it -----------------------------------------------------------------------------------

SGD = (0.1, 0.9, 0.3, 0.05, False, False, False, 0.5)
BERT, L2 = (lamb_mp_args(CASES[name], (1.0, 2.0), 1) for name in ("bert", "l2"))
READERS = {
    "sgd": ("multi_tensor_sgd", [F16, F32, F32], SGD),
    "sgd-copies": ("multi_tensor_sgd", [F16, F32, F32, F32], SGD),
    "adam-capturable": ("multi_tensor_adam_capturable", [F16, F32, F32, F32], capturable()),
    "adam-capturable-master": ("multi_tensor_adam_capturable_master", [F16, F32, F32, F32, F32], capturable()),
    "lamb-mp": ("multi_tensor_lamb_mp", MIXES["fp16"], BERT),
    "lamb-mp-model": ("multi_tensor_lamb_mp", MIXES["fp16-model"], BERT),
    "lamb-mp-l2": ("multi_tensor_lamb_mp", MIXES["fp16"], L2),
    "lamb-mp-model-l2": ("multi_tensor_lamb_mp", MIXES["fp16-model"], L2),
}


@OPTION(("name", "dtypes", "args"), READERS.values(), ids=READERS)
@OPTION("dtype", [torch.int32, F32], ids=["int32", "fp32"])
def test_a_flag_that_is_set_lets_nothing_happen(dtype, name, dtypes, args):
    lists, buf = make([5, 0, 33], dtypes), flag(1, dtype)
    before = copies(lists)
    call(name, lists, *args, buf=buf)
    assert_same(lists, before)
    assert buf.tolist() == [1]
    call(name, lists, *args, buf=flag(0, dtype))
    assert not torch.equal(lists[1][0], before[1][0])


# --- update_scale_hysteresis ------------------------------------------------------------------------------------------


def updated(scale, clean, left, overflows, growth, backoff, interval, hysteresis):
    """Section by section as the rule is told, in Python numbers; numbers below the normal ones are 0."""
    left = left - 1 if overflows else hysteresis
    if overflows and left > 0:
        return scale, 0, left
    if overflows:
        return scale * backoff if scale * backoff >= torch.finfo(torch.float32).tiny else 0.0, 0, left
    if clean + 1 < interval:
        return scale, clean + 1, left
    return scale * growth if scale * growth <= torch.finfo(torch.float32).max else scale, 0, left


@OPTION("hysteresis", [1, 2, 10])
@OPTION("interval", [1, 10])
@OPTION("backoff", [0.5, 0.25])
@OPTION("growth", [1.0, 2.0, 4.0])
def test_hysteresis(device, growth, backoff, interval, hysteresis):
    for init in (1.0, 1024.0, 65536.0):
        rule = (growth, backoff, interval, hysteresis)
        want = init, 0, hysteresis
        scale = torch.tensor([init], device=device)
        clean = torch.zeros(1, dtype=torch.int32, device=device)
        left = torch.full((1,), hysteresis, dtype=torch.int32, device=device)
        generator = torch.Generator().manual_seed(int(init))
        overflows = [1] * 12 + [0] * 25 + torch.randint(0, 2, (30,), generator=generator).tolist()
        # To 0 at a backoff of 0.25, and what is 0 stays 0; a run of clean steps grows to the largest scale.
        overflows += [1] * 80 if init == 1024 else [0] * 80
        for found_inf in overflows:
            given = torch.tensor([float(found_inf)], device=device)
            assert amp_C.update_scale_hysteresis(scale, clean, left, given, *rule) is scale
            want = updated(*want, found_inf, *rule)
            assert (scale.item(), clean.item(), left.item()) == want


GOOD = [torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), torch.zeros(1)]


@OPTION(
    ("i", "wrong", "message"),
    [
        (0, 1.0, "current_scale must be a tensor, got float"),
        (0, torch.ones(1).half(), "current_scale has dtype torch.float16, expected float32"),
        (1, torch.zeros(1), "growth_tracker has dtype torch.float32, expected int32"),
        (2, torch.zeros(2, dtype=torch.int32), "hysteresis_tracker has 2 elements, expected 1"),
        (3, torch.zeros(1, device="meta"), "found_inf is on meta, and current_scale is on cpu"),
        (3, torch.zeros(1).bool(), "found_inf has dtype torch.bool, expected float32 or int32"),
    ],
    ids=["number", "scale-type", "tracker-type", "elements", "device", "flag-type"],
)
def test_hysteresis_errors(i, wrong, message):
    with pytest.raises(RuntimeError, match=f"update_scale_hysteresis: {message}"):
        amp_C.update_scale_hysteresis(*GOOD[:i], wrong, *GOOD[i + 1 :], 2.0, 0.5, 10, 1)
