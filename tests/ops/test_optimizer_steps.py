"""What all optimizer steps share, on every backend with kernels: what the reference does, to the last bit where no
norms take part."""

import itertools

import pytest
import torch
from backends import ALL_FLOATS, COMPILED, FLOATS, combination_id, combinations, serves_or_refuses, short, with_threads
from optimizer_calls import (
    ADAM,
    LAMB,
    MOMENTUM,
    SGD,
    STEP_OPS,
    UNSCALING,
    bits,
    make_call,
    on_kernels,
    on_optimizers,
    takes,
)

from ampctx.kernels.reference_steps import WRITE_BACKS
from ampctx.kernels.spec import SPECS

pytestmark = [on_kernels, pytest.mark.usefixtures("reference")]
SMALL = [5, 0, 700, 1, 64]


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


@on_optimizers
def test_rows_of_numbers_step_as_calls_of_their_own(backend, optimizer):
    sizes, count = SMALL * 8, 36
    call, columns = make_call(backend, optimizer, sizes), SPECS[optimizer.op.removeprefix("multi_tensor_")].columns
    # In turn; of LAMB, whose norms depend on the tensors of a launch, one after the other. One row is without decay.
    rows = [i * count // len(sizes) if "lamb" in optimizer.name else i * 7 % count for i in range(len(sizes))]
    numbers, joined = {**call.options, "lr": 0.01}, call.clone()
    table = [[numbers[n] * (1 - k / 50) * (n != "weight_decay" or k != 5) for n in columns] for k in range(count)]
    joined.options |= {"table": torch.tensor(table, dtype=torch.float64), "rows": torch.tensor(rows)}
    expected = joined.expected()
    for k, of_row in enumerate(table):
        lists = {name: [t for t, row in zip(ts, rows, strict=False) if row == k] for name, ts in call.lists.items()}
        own = dict(zip(columns, of_row, strict=True))
        type(call)(optimizer, lists, {**call.options, **own}).run(backend, lr=own["lr"])
    joined.run(backend).assert_same(call)
    joined.assert_agrees(expected)


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


@pytest.mark.parametrize("optimizer", [SGD, ADAM, LAMB], ids=lambda o: o.name)
def test_threads_do_not_change_the_result(backend, optimizer):
    sizes = [100_003, 5, 70_001] if backend.name == "cpu" else [3_001, 5]
    how = {"param": torch.bfloat16, "write_back": "stochastic"}
    how |= {"state": "8bit", "stochastic_state": True} if optimizer is ADAM else {}
    first, *others = with_threads(lambda: make_call(backend, optimizer, sizes, **how).run(backend), (1, 2, 2))
    for other in others:
        first.assert_same(other)


@pytest.mark.parametrize("grad", FLOATS, ids=short)
@pytest.mark.parametrize("inv_scale", [0.3, 2.0**-140, 2.0**120, torch.tensor(1.5)], ids=str)
def test_unscaled_gradients_that_overflow_and_underflow_are_rounded_as_copies(backend, grad, inv_scale):
    call = make_call(backend, UNSCALING[0], SMALL, grad=grad)
    special = [float("inf"), float("-inf"), -0.0, 0.0, torch.finfo(grad).max]
    call["grads"][0].copy_(torch.tensor(special, dtype=grad))
    call["grads"][2][:2] = torch.tensor([torch.finfo(grad).tiny, -torch.finfo(grad).smallest_normal], dtype=grad)
    inv_scale = torch.as_tensor(inv_scale, dtype=torch.float32).to(backend.device)
    expected = [(g.float() * inv_scale).to(grad) for g in call["grads"]]
    call.run(backend, inv_scale=inv_scale)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(call["grads"], expected, strict=True))
