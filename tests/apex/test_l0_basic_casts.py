"""Types and values of what layers and functions give under per-op casts."""

import pytest
import torch
import torch.nn.functional as F
from apex import amp
from l0 import casts
from torch import nn

from ampctx import AmpNotImplementedError

FLOAT = torch.float32


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["O1", "O4"])
def low(request):
    """Casts are on; the 16-bit type that they cast to."""
    with casts(request.param):
        yield request.param


def without_casts(call, *args):
    """What ``call`` gives in fp64."""
    with torch.autocast("cpu", enabled=False):
        return call(*(a.detach().double() for a in args))


def weight_of(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)) / 4


# A call on (input, parameters), a layer that does the same, shapes of input and parameters, the type of the result.
# "low": the level's 16-bit type; "float": fp32; "input": that of the input.
CASES = {
    "linear": (F.linear, lambda: nn.Linear(6, 5), (4, 6), [(5, 6), (5,)], "low"),
    "conv2d": (F.conv2d, lambda: nn.Conv2d(3, 4, 3), (2, 3, 6, 6), [(4, 3, 3, 3), (4,)], "low"),
    "conv_transpose1d": (F.conv_transpose1d, lambda: nn.ConvTranspose1d(3, 4, 2), (2, 3, 5), [(3, 4, 2), (4,)], "low"),
    "softmax": (lambda x: F.softmax(x, dim=1), lambda: nn.Softmax(dim=1), (4, 6), [], "float"),
    "log_softmax": (lambda x: F.log_softmax(x, dim=1), lambda: nn.LogSoftmax(dim=1), (4, 6), [], "float"),
    "softplus": (F.softplus, lambda: nn.Softplus(), (4, 6), [], "float"),
    "group_norm": (
        lambda x, w, b: F.group_norm(x, 2, w, b),
        lambda: nn.GroupNorm(2, 4),
        (2, 4, 6),
        [(4,)] * 2,
        "float",
    ),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), lambda: nn.LayerNorm(6), (4, 6), [(6,)] * 2, "float"),
    "mse_loss": (lambda x: F.mse_loss(x, torch.ones_like(x)), None, (4, 6), [], "float"),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 0])), None, (4, 6), [], "float"),
    "relu": (F.relu, lambda: nn.ReLU(), (4, 6), [], "input"),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(3).to(w), torch.ones(3).to(w), w, b, training=True),
        *(lambda: nn.BatchNorm2d(3), (2, 3, 4, 4), [(3,)] * 2, "input"),
    ),
    "batch_norm-eval": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(3).to(w), torch.ones(3).to(w), w, b),
        *(lambda: nn.BatchNorm2d(3).eval(), (2, 3, 4, 4), [(3,)] * 2, "input"),
    ),
    "torch.mm": (torch.mm, None, (4, 6), [(6, 3)], "low"),
    "Tensor.matmul": (lambda x, w: x.matmul(w), None, (4, 6), [(6, 3)], "low"),
    "@": (lambda x, w: x @ w, None, (4, 6), [(6, 3)], "low"),
    "torch.pow": (lambda x: torch.pow(x, 2), None, (4, 6), [], "float"),
    "Tensor.pow": (lambda x: x.pow(2), None, (4, 6), [], "float"),
    "**": (lambda x: x**2, None, (4, 6), [], "float"),
    "torch.sum": (torch.sum, None, (4, 6), [], "float"),
    "Tensor.sum": (lambda x: x.sum(), None, (4, 6), [], "float"),
    "Tensor.exp": (lambda x: x.exp(), None, (4, 6), [], "float"),
}
FUNCTIONS = list(CASES)
LAYERS = [name for name, case in CASES.items() if case[1] is not None]
INPUTS = ["fp32", "16-bit"]


def input_of(shape, kind, low):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return x.to(FLOAT if kind == "fp32" else low).requires_grad_()


def check(name, out, x, low, expected):
    due = {"low": low, "float": FLOAT, "input": x.dtype}[CASES[name][4]]
    assert out.dtype == due
    bound = {FLOAT: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[due]
    torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound)
    out.float().square().sum().backward()
    assert x.grad.dtype == x.dtype
    assert x.grad.isfinite().all()
    assert x.grad.ne(0).any()


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(low, name, kind):
    call, _, shape, parameters, _ = CASES[name]
    x = input_of(shape, kind, low)
    params = [weight_of(*s).requires_grad_() for s in parameters]
    # Where the function casts to 16 bits, or computes in the input's type, the reference starts from such values.
    rounded = [p.to(low).float() if CASES[name][4] == "low" else p for p in params]
    start = x.to(low).float() if CASES[name][4] == "low" else x
    check(name, call(x, *params), x, low, without_casts(call, start, *rounded))
    assert all(p.grad.dtype == p.dtype for p in params)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(low, name, kind):
    call, make, shape, parameters, _ = CASES[name]
    layer = make()
    with torch.no_grad():
        for p, s in zip(layer.parameters(), parameters, strict=True):
            assert p.shape == s
            p.copy_(weight_of(*s).to(low))
    x = input_of(shape, kind, low)
    start = x.to(low) if CASES[name][4] == "low" else x
    check(name, layer(x), x, low, without_casts(call, start, *layer.parameters()))
    assert all(p.grad.dtype == FLOAT for p in layer.parameters())


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("form", ["function", "layer"])
def test_bce_is_refused_for_16_bit_input_alone(low, kind, form):
    """In 16 bits a sigmoid rounds to 0 or 1."""
    x = input_of((4, 1), kind, low).detach().sigmoid().requires_grad_()
    target = torch.ones(4, 1)
    bce = F.binary_cross_entropy if form == "function" else nn.BCELoss()
    if kind == "fp32":
        assert bce(x, target).dtype == FLOAT
        torch.testing.assert_close(bce(x, target), -x.log().mean())
    else:
        with pytest.raises(AmpNotImplementedError, match="binary_cross_entropy got a 16-bit argument"):
            bce(x, target.to(low))


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["O1", "O4"])
def test_bce_is_computed_in_fp32_where_it_is_allowed(dtype, kind):
    with casts(dtype, allow_banned=True):
        x = input_of((4, 1), kind, dtype).detach().sigmoid().requires_grad_()
        for bce in (F.binary_cross_entropy, nn.BCELoss()):
            loss = bce(x, torch.ones(4, 1, dtype=x.dtype))
            assert loss.dtype == FLOAT
            torch.testing.assert_close(loss, -x.float().log().mean())
        loss.backward()
        assert x.grad.dtype == x.dtype


def test_a_handle_that_is_off_casts_nothing():
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    with casts(torch.float16) as handle:
        assert F.linear(x, weight).dtype == torch.float16
        handle._is_active = False
        assert F.linear(x, weight).dtype == FLOAT
        handle._is_active = True
        assert F.linear(x, weight).dtype == torch.float16
    assert F.linear(x, weight).dtype == FLOAT
    assert F.linear(x.half(), weight.half()).softmax(1).dtype == torch.float16


def test_copies_to_the_cpu_keep_their_type(low):
    """A difference: apex made ``Tensor.cpu()`` of fp16 give fp32. torch's autocast leaves copies alone."""
    assert torch.ones(2, dtype=low).cpu().dtype == low


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_is_cast_within_disable_casts(low, name):
    call, _, shape, parameters, _ = CASES[name]
    params = [weight_of(*s) for s in parameters]
    with amp.disable_casts():
        out = call(input_of(shape, "fp32", low), *params)
        assert out.dtype == FLOAT
        assert call(input_of(shape, "16-bit", low), *(p.to(low) for p in params)).dtype == low
    torch.testing.assert_close(
        out.double(), without_casts(call, input_of(shape, "fp32", low), *params), rtol=1e-5, atol=1e-5
    )
