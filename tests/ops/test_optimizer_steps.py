"""What all optimizer steps share, on every backend with kernels: what the reference does, to the last bit where no
norms take part."""

import itertools

import pytest
import torch
from backends import (
    ALL_FLOATS,
    COMPILED,
    FLOATS,
    SIZES,
    combination_id,
    combinations,
    serves_or_refuses,
    short,
    with_threads,
)
from optimizer_calls import (
    ADAGRAD,
    ADAM,
    AMSGRAD,
    LAMB,
    LAMB_WITHOUT_RATIO,
    MOMENTUM,
    SGD,
    STEP_OPS,
    bits,
    make_call,
    on_elementwise,
    on_kernels,
    on_optimizers,
    takes,
)

from ampctx.kernels.reference_steps import WRITE_BACKS

pytestmark = [on_kernels, pytest.mark.usefixtures("reference")]
SMALL = [5, 0, 700, 1, 64]


@pytest.mark.full(but=96)
@pytest.mark.parametrize("sizes", [pytest.param(s, id=i) for i, s in SIZES.items() if i != "20k-tiny"])
@on_optimizers
def test_sizes(backend, optimizer, sizes):
    if backend.name.startswith("emulated") and sizes == SIZES["one-large"]:
        sizes = [1 << 14]
    call = make_call(backend, optimizer, sizes)
    expected = call.expected()
    call.run(backend).assert_agrees(expected)


@pytest.mark.parametrize("write_back", WRITE_BACKS)
@on_optimizers
def test_shapes_that_differ_within_an_index(backend, optimizer, write_back):
    """Contiguous tensors with as many elements are the same to a kernel, whatever their shapes."""
    call = make_call(backend, optimizer, [(6,)] * 6, param=torch.bfloat16, write_back=write_back)
    shapes = [(6,), (6, 1), (1, 6), (2, 3), (6,) + (1,) * 63, (1,) * 63 + (6,)]
    for i, name in enumerate(call.elementwise):
        call.lists[name] = [t.view(shapes[(i + k) % 6]) for k, t in enumerate(call[name])]
    call.lists["steps"] = [t.view((1,) * k) for k, t in enumerate(call["steps"])]
    expected = call.expected()
    call.run(backend).assert_agrees(expected)


@pytest.fixture(scope="module", params=[3_000, pytest.param(8_000, marks=pytest.mark.full)], ids=["3k", "8k"])
def many(request):
    """Many tensors, empty ones among them: several launches, each with the scalars of its own tensors."""
    sizes = [i % 5 for i in range(request.param)]
    what = {"param": torch.bfloat16, "write_back": "stochastic", "counts": range(3)}
    return lambda backend: make_call(backend, MOMENTUM, sizes, **what)


@pytest.fixture(scope="module")
def many_expected(many, reference):
    return many(COMPILED).expected()


def test_many_tensors(backend, many, many_expected):
    call = many(backend).run(backend)
    call.lists = {name: [t.cpu() for t in tensors] for name, tensors in call.lists.items()}
    call.assert_agrees(many_expected)


def assert_runs_or_refuses(backend, call, *dtypes):
    """The reference's result after two steps; or an error where the backend has no kernels for one of the types."""
    before, expected = call.clone(), call.expected(times=2) if backend.serves(*dtypes) else None
    if serves_or_refuses(backend, lambda: call.run(backend, times=2), *dtypes):
        call.assert_agrees(expected)
    else:
        call.assert_same(before)


def with_write_backs(rows):
    """Optimizers and types, the last being that of the params, with all that these can be written back by."""
    return pytest.mark.parametrize(
        ("optimizer", "dtypes", "write_back"),
        [
            pytest.param(optimizer, combination, way, id=f"{optimizer.name}-{combination_id(combination)}-{way}")
            for optimizer, combination in rows
            for way in WRITE_BACKS
            if takes(way, combination[-1])
        ],
    )


OF_TWO_TYPES = (ADAM, MOMENTUM, LAMB)
OF_ONE_TYPE = [o for o in STEP_OPS if o not in OF_TWO_TYPES]
TYPES = [*itertools.product(OF_TWO_TYPES, combinations(ALL_FLOATS, 2))]
TYPES += [(optimizer, (dtype, dtype)) for optimizer in OF_ONE_TYPE for dtype in FLOATS]


@pytest.mark.full(but=160)
@with_write_backs(TYPES)
def test_grad_and_param_dtypes(backend, optimizer, dtypes, write_back):
    call = make_call(backend, optimizer, SMALL, grad=dtypes[0], param=dtypes[1], write_back=write_back)
    assert_runs_or_refuses(backend, call, *dtypes)


@pytest.mark.parametrize("dtype", ALL_FLOATS, ids=short)
@pytest.mark.parametrize(
    "optimizer", [ADAM, AMSGRAD, MOMENTUM, ADAGRAD, LAMB, LAMB_WITHOUT_RATIO], ids=lambda o: o.name
)
def test_state_dtypes(backend, optimizer, dtype):
    assert_runs_or_refuses(backend, make_call(backend, optimizer, SMALL, param=torch.float16, state=dtype), dtype)


@pytest.mark.parametrize("extra", ALL_FLOATS, ids=short)
@pytest.mark.parametrize("param", FLOATS, ids=short)
def test_copies(backend, param, extra):
    """extras[i] is the updated weight, rounded once from the type of arithmetic and not by way of the params."""
    call = make_call(backend, AMSGRAD, SMALL, param=param, extra=extra, write_back="copy")
    assert_runs_or_refuses(backend, call, extra)
    if param == torch.float32 and extra != torch.float64:
        assert all(torch.equal(e, p.to(extra)) for e, p in zip(call["extras"], call["params"], strict=True))


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@on_elementwise
def test_weight_decay_and_direction(backend, optimizer, weight_decay, maximize):
    switches = {"adam_w_mode", "wd_after_momentum", "adagrad_w_mode"}.intersection(optimizer.options)
    for modes in [dict.fromkeys(switches, mode) for mode in (False, True)] if switches else [{}]:
        call = make_call(backend, optimizer, SMALL, weight_decay=weight_decay, maximize=maximize, **modes)
        call["params"][0][0] = float("inf")  # no decay of an infinite weight where there is none
        call["grads"][2][:3] = torch.tensor([0.0, -0.0, 0.0])
        expected = call.expected(times=2)
        call.run(backend, times=2)
        assert call["params"][0][0].isfinite() == expected["params"][0][0].isfinite()
        for c in (call, expected):
            c["params"][0][0] = 0.0
            for name in optimizer.states:
                c[name][0][0] = 0.0
        call.assert_agrees(expected)


@with_write_backs(itertools.product([ADAM], combinations(FLOATS, 2)))
def test_every_alignment(backend, optimizer, dtypes, write_back):
    """Views at every storage offset up to a cache line, the lists not in step, and nothing written beside them."""
    size, room = 43, 60
    whole = make_call(backend, optimizer, [room] * 17, grad=dtypes[0], param=dtypes[1], write_back=write_back)
    views, beside = whole.clone(), whole.clone()
    for place, name in enumerate(whole.elementwise):
        for i, t in enumerate(whole[name]):
            here = slice(shift := (i * (2 * place + 1) + place) % 17, shift + size)
            views[name][i] = t[here]
            beside[name][i][here] = 0
    expected = views.expected()
    views.run(backend).assert_agrees(expected)
    for name in whole.elementwise:
        for t, view, want in zip(whole[name], views[name], beside[name], strict=True):
            view.zero_()
            assert torch.equal(t, want), name


@on_optimizers
def test_layouts(backend, optimizer):
    """channels_last goes with channels_last, transposed with transposed; random bits count places in memory."""
    shapes = [(2, 3, 4, 5), (6, 4), (12,)]
    call = make_call(backend, optimizer, shapes, param=torch.bfloat16, write_back="stochastic")
    for name in call.elementwise:
        call[name][0] = call[name][0].to(memory_format=torch.channels_last)
        call[name][1] = call[name][1].t().contiguous().t()
    call["grads"][2] = call["grads"][2].view(3, 4)
    expected = call.expected()
    assert expected["params"][0].is_contiguous(memory_format=torch.channels_last)
    flat = call.clone()
    call.run(backend).assert_agrees(expected)

    for name, tensors in flat.lists.items():
        flat.lists[name] = [torch.as_strided(t, (t.numel(),), (1,)) for t in tensors]
    flat.run(backend)
    for a, b in zip(call["params"], flat["params"], strict=True):
        assert torch.equal(torch.as_strided(a, (a.numel(),), (1,)), b)


FLAGS = {
    "0": (0.0, torch.float32, False),
    "-0": (-0.0, torch.float32, False),
    "1": (1.0, torch.float32, True),
    "2": (2.0, torch.float32, True),
    "nan": (float("nan"), torch.float32, True),
    "int-0": (0, torch.int32, False),
    "int-1": (1, torch.int32, True),
    "int-min": (-(1 << 31), torch.int32, True),
}


@pytest.mark.full(but=100)
@pytest.mark.parametrize(("value", "dtype", "skips"), FLAGS.values(), ids=FLAGS.keys())
@on_optimizers
def test_found_inf(backend, optimizer, value, dtype, skips):
    for write_back in WRITE_BACKS:
        call = make_call(backend, optimizer, SMALL, param=torch.bfloat16, write_back=write_back)
        call["grads"][0][0] = float("nan")
        flag = backend.flag(value, dtype)
        before, kept = call.clone(), flag.clone()
        call.run(backend, found_inf=flag)
        assert torch.equal(bits(flag), bits(kept)), "an optimizer reads the flag only"
        if skips:
            call.assert_same(before)
        else:
            counts = before.lists.get("steps", [])
            assert [s.item() for s in call.lists.get("steps", [])] == [s.item() + 1 for s in counts]
            assert not torch.equal(call["params"][2], before["params"][2])


FACTORS = {
    "floats": lambda d: (0.5, 0.01),
    "fp64-cpu": lambda d: (torch.tensor(0.5, dtype=torch.float64), torch.tensor([0.01], dtype=torch.float64)),
    "fp32-cpu": lambda d: (torch.tensor(0.5), torch.tensor(0.01)),
    "on-the-device": lambda d: (torch.tensor([0.5], device=d), torch.tensor(0.01, device=d)),
}


@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS.keys())
@on_optimizers
def test_factor_forms(backend, optimizer, factors):
    inv_scale, lr = factors(backend.device)
    call = make_call(backend, optimizer, SMALL)
    expected = call.expected(inv_scale=0.5, lr=0.01)
    call.run(backend, inv_scale=inv_scale, lr=lr).assert_agrees(expected)


@on_optimizers
def test_step_counts(backend, optimizer):
    """Each tensor has its own; those of empty tensors advance too."""
    call = make_call(backend, optimizer, [3, 0, 4, 5, 0, 6, 7], counts=[0, 7, 1, 0, 3, 1000, 1])
    expected = call.expected(times=2)
    call.run(backend, times=2).assert_agrees(expected)
    assert [s.item() for s in call["steps"]] == [2, 9, 3, 2, 5, 1002, 3]


@pytest.mark.parametrize("optimizer", [SGD, ADAM, LAMB], ids=lambda o: o.name)
def test_threads_do_not_change_the_result(backend, optimizer):
    sizes = [100_003, 5, 70_001] if backend.name == "cpu" else [3_001, 5]
    how = {"param": torch.bfloat16, "write_back": "stochastic"}
    how |= {"state": "8bit", "stochastic_state": True} if optimizer is ADAM else {}
    first, *others = with_threads(lambda: make_call(backend, optimizer, sizes, **how).run(backend), (1, 2, 2))
    for other in others:
        first.assert_same(other)
