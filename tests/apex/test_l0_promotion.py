"""Types of functions of several tensors under per-op casts."""

import itertools

import pytest
import torch
from l0 import assert_exact, casts

FLOAT = torch.float32
PAIRS = list(itertools.product(["16-bit", "fp32"], repeat=2))


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["O1", "O4"])
def low(request):
    """Casts are on; the 16-bit type that they cast to."""
    with casts(request.param):
        yield request.param


def leaf(kind, low, values=(1.0, -2.0, 0.5)):
    return torch.tensor(values, dtype=low if kind == "16-bit" else FLOAT, requires_grad=True)


BINARY = {
    "torch.mul": torch.mul,
    "Tensor.mul": lambda a, b: a.mul(b),
    "*": lambda a, b: a * b,
    "torch.add": torch.add,
    "-": lambda a, b: a - b,
    "torch.div": torch.div,
    "torch.atan2": torch.atan2,
    "Tensor.atan2": lambda a, b: a.atan2(b),
    "torch.addcmul": lambda a, b: torch.addcmul(a, b, b),
    "torch.dot": torch.dot,
    "torch.cross": lambda a, b: torch.cross(a, b, dim=0),
}
EXACT = {"torch.mul", "Tensor.mul", "*", "torch.add", "-", "torch.addcmul", "torch.dot", "torch.cross"}


@pytest.mark.parametrize("kinds", PAIRS, ids="-and-".join)
@pytest.mark.parametrize("name", BINARY)
def test_the_wider_type_wins(low, name, kinds):
    a, b = leaf(kinds[0], low), leaf(kinds[1], low, (2.0, 0.5, 4.0))
    out = BINARY[name](a, b)
    assert out.dtype == (FLOAT if "fp32" in kinds else low)
    with torch.autocast("cpu", enabled=False):
        expected = BINARY[name](a.detach().double(), b.detach().double())
    if name in EXACT:
        assert_exact(out, expected)
    else:
        bound = 1e-6 if "fp32" in kinds else 1e-2
        torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound)
    out.float().sum().backward()
    assert (a.grad.dtype, b.grad.dtype) == (a.dtype, b.dtype)


@pytest.mark.parametrize("kinds", PAIRS, ids="-and-".join)
@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_comparisons(low, name, kinds):
    a, b = leaf(kinds[0], low), leaf(kinds[1], low, (1.0, 0.5, 0.5))
    expected = getattr(torch, name)(a.detach().double(), b.detach().double())
    assert torch.equal(getattr(torch, name)(a, b), expected)
    assert torch.equal(getattr(a, name)(b), expected)


@pytest.mark.parametrize("call", [torch.cat, torch.stack], ids=["cat", "stack"])
@pytest.mark.parametrize("kinds", [*PAIRS, ("16-bit", "fp32", "16-bit")], ids="-and-".join)
def test_sequences(low, kinds, call):
    parts = [leaf(kind, low) for kind in kinds]
    # apex refused the keyword and made a list of a tuple.
    for out in (call(parts), call(tuple(parts)), call(tensors=parts)):
        assert out.dtype == (FLOAT if "fp32" in kinds else low)
        assert_exact(out, call([p.detach().double() for p in parts]))
    out.float().sum().backward()
    for p in parts:
        assert p.grad.dtype == p.dtype
        assert p.grad.eq(1).all()


@pytest.mark.parametrize("kind", ["16-bit", "fp32"])
@pytest.mark.parametrize("name", ["exp_", "log2_", "reciprocal_"])
def test_in_place_functions_keep_their_type(low, name, kind):
    """A difference: apex raised for fp16. torch's autocast lets ops in place alone, and so they cannot change type."""
    x = leaf(kind, low, (1.0, 4.0, 0.5)).detach()
    expected = getattr(x.double(), name)()
    assert getattr(x, name)() is x
    assert x.dtype == (FLOAT if kind == "fp32" else low)
    bound = 1e-6 if kind == "fp32" else 1e-2
    torch.testing.assert_close(x.double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("kinds", PAIRS, ids="-and-".join)
@pytest.mark.parametrize("name", ["add_", "mul_", "div_"])
def test_in_place_functions_of_two_follow_the_first(low, name, kinds):
    a, b = leaf(kinds[0], low).detach(), leaf(kinds[1], low, (2.0, 0.5, 4.0)).detach()
    expected = getattr(a.double(), name)(b.double())
    assert getattr(a, name)(b) is a
    assert a.dtype == (FLOAT if kinds[0] == "fp32" else low)
    assert_exact(a, expected)


def test_fp64_beside_fp32_is_computed(low):
    """apex raised: do not know how to handle these types to promote."""
    assert (leaf("fp32", low) + leaf("fp32", low).double()).dtype == torch.float64
    assert (leaf("16-bit", low) * leaf("fp32", low).double()).dtype == torch.float64
