import math

import pytest
import torch
from host_reads import HostReads
from torch import nn

from ampctx import AmpError, AmpTypeError, AmpValueError, clip_grad_norm_

SHAPES = [(3,), (), (0,), (65537,), (2, 3, 4, 4), (17, 5)]


def parameters(dtype=torch.float32, scale=1.0, seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    found = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for p in found:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(dtype)
    return found


def grads(found):
    return [p.grad for p in found]


def norm_bound(n):
    """The relative bound for a norm over n elements."""
    return 4 * math.sqrt(n) * torch.finfo(torch.float32).eps


N = sum(math.prod(shape) for shape in SHAPES)


# --- as torch's ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6, 0, torch.tensor(0.5), torch.tensor([0.5])], ids=str)
@pytest.mark.parametrize("norm_type", [2.0, 2, 1.0, 3.5, math.inf, "inf"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm_and_gradients_are_torchs(dtype, norm_type, max_norm):
    ours, theirs = parameters(dtype), parameters(dtype)
    norm = clip_grad_norm_(ours, max_norm, norm_type)
    # torch has no infinity norm of an empty tensor.
    expected = torch.nn.utils.clip_grad_norm_([p for p in theirs if p.numel()], max_norm, norm_type)
    rtol = norm_bound(N) if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(norm, expected, rtol=rtol, atol=0)
    torch.testing.assert_close(grads(ours), grads(theirs), rtol=rtol, atol=1e-30)
    assert norm.shape == ()


def test_small_gradients_are_left_exactly_as_they_are():
    found = parameters()
    before = [g.clone() for g in grads(found)]
    clip_grad_norm_(found, 1e9)
    assert all(torch.equal(a, b) for a, b in zip(before, grads(found), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norm_is_that_of_an_fp64_run_and_does_not_overflow(dtype):
    found = parameters(dtype, scale=1e3)
    exact = torch.cat([g.double().flatten() for g in grads(found)]).norm()
    assert exact > torch.finfo(torch.float16).max
    norm = clip_grad_norm_(found, exact.item() / 2)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), exact, rtol=norm_bound(N), atol=0)
    after = torch.cat([g.double().flatten() for g in grads(found)]).norm()
    torch.testing.assert_close(after, exact / 2, rtol=1e-4 if dtype == torch.float32 else 1e-2, atol=0)


def test_mixed_dtypes_layouts_and_missing_gradients():
    mixed = [
        *parameters(torch.float32),
        *parameters(torch.float16, seed=1),
        *parameters(torch.float64, seed=2),
        *parameters(torch.complex64, seed=3),
        nn.Parameter(torch.zeros(3)),
    ]
    mixed[0].grad = torch.arange(6.0)[::2]
    mixed[4].grad = mixed[4].grad.to(memory_format=torch.channels_last)
    before = [p.grad.clone() for p in mixed if p.grad is not None]
    exact = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.to(torch.complex128)) for g in before]))
    norm = clip_grad_norm_(mixed, 1.0)
    torch.testing.assert_close(norm.double(), exact, rtol=norm_bound(4 * N), atol=0)
    assert mixed[-1].grad is None
    for p, g in zip(mixed, before, strict=False):
        torch.testing.assert_close(p.grad, (g / (exact + 1e-6)).to(g.dtype))


FORMS = {
    "columns of a wider tensor": lambda g: torch.cat([g, g], 1)[:, : g.shape[1]],
    "every second element": lambda g: torch.stack([g, g], -1)[..., 0],
    "transposed": lambda g: g.t().contiguous().t(),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_fp32_gradients_of_any_layout_are_clipped_as_by_torch(form):
    found = []
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        params = parameters(torch.float32, shapes=[(4, 6), (5, 3)])
        params[0].grad = form(params[0].grad)
        found.append([clip(params, 0.5), *grads(params)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_sparse_gradients_count_their_duplicates_once(norm_type):
    embedding = nn.Embedding(6, 3, sparse=True)
    linear = parameters(shapes=[(4,)])
    embedding(torch.tensor([1, 1, 4])).pow(2).sum().backward()
    dense = [embedding.weight.grad.to_dense(), linear[0].grad.clone()]
    expected = torch.nn.utils.get_total_norm(dense, norm_type)
    norm = clip_grad_norm_([embedding.weight, *linear], 0.5, norm_type)
    torch.testing.assert_close(norm, expected)
    assert embedding.weight.grad.is_sparse
    torch.testing.assert_close(embedding.weight.grad.to_dense(), dense[0] * 0.5 / (expected + 1e-6))


def test_a_tensor_an_iterator_and_an_empty_list():
    (p,) = parameters(shapes=[(2,)])
    p.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(p, 10.0).item() == 5.0
    assert clip_grad_norm_((q for q in [p]), 1.0).item() == 5.0
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]))
    for nothing in ([], [nn.Parameter(torch.ones(2))], parameters(shapes=[(0,)])):
        for norm_type in (2.0, math.inf):
            assert torch.equal(clip_grad_norm_(nothing, 1.0, norm_type), torch.tensor(0.0))


def test_a_used_up_generator_warns_at_the_callers_line():
    with pytest.warns(UserWarning, match="`parameters` is an empty generator") as caught:
        clip_grad_norm_((p for p in []), 1.0)
    assert caught[0].filename == __file__


def test_autograd_sees_the_change():
    x = torch.ones(2, requires_grad=True)
    (p,) = parameters(shapes=[(2,)])
    p.grad = torch.tensor([3.0, 4.0])
    product = (x * p.grad).sum()
    clip_grad_norm_(p, 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_gradients_with_a_graph_of_their_own_are_clipped_outside_it():
    p = nn.Parameter(torch.tensor([1.5, 2.0]))
    (p.grad,) = torch.autograd.grad((p**2).sum(), p, create_graph=True)
    assert not clip_grad_norm_(p, 1.0).requires_grad
    torch.testing.assert_close(p.grad.detach(), torch.tensor([0.6, 0.8]))


def test_values_that_are_not_those_in_memory_are_clipped_as_torch_reads_them():
    """With torch's negative bit, conjugated, and a ZeroTensor."""
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.complex64))]
    params.append(nn.Parameter(torch.zeros(3)))
    params[0].grad = given = torch.complex(torch.zeros(2), torch.tensor([-3.0, 4.0])).conj().imag
    params[1].grad = torch.tensor([0.0, 12.0j]).conj()
    params[2].grad = torch._efficientzerotensor(3)
    assert clip_grad_norm_(params, 1.0) == 13.0
    assert params[0].grad is given
    expected = [torch.tensor([3.0, -4.0]) / 13, torch.tensor([0.0, -12.0j]) / 13, torch.zeros(3)]
    torch.testing.assert_close([(p.grad + 0).resolve_conj() for p in params], expected)


# --- non-finite ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_error_if_nonfinite_leaves_the_gradients_alone(bad, norm_type):
    found = parameters()
    found[3].grad[-1] = bad
    before = [g.clone() for g in grads(found)]
    with pytest.raises(AmpError, match=f"The total norm of order {norm_type} for gradients .* is non-finite"):
        clip_grad_norm_(found, 1.0, norm_type, error_if_nonfinite=True)
    torch.testing.assert_close(grads(found), before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_without_it_the_gradients_are_scaled_as_by_torch(bad):
    ours, theirs = parameters(), parameters()
    for found in (ours, theirs):
        found[0].grad[1] = bad
    norm = clip_grad_norm_(ours, 1.0)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 1.0), equal_nan=True)
    torch.testing.assert_close(grads(ours), grads(theirs), rtol=0, atol=0, equal_nan=True)


# --- host reads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("max_norm", [1.0, torch.tensor(1.0)], ids=["float", "tensor"])
@pytest.mark.parametrize("error_if_nonfinite", [False, True])
def test_host_reads(norm_type, max_norm, error_if_nonfinite):
    found = parameters()
    with HostReads() as reads:
        clip_grad_norm_(found, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
    assert reads.count == int(error_if_nonfinite)


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (([torch.ones(1), "p"], 1.0), AmpTypeError, r"parameters\[1\] must be a tensor, got str"),
        ((nn.Linear(1, 1), 1.0), AmpTypeError, r"got Linear. Pass amp.master_params\(optimizer\) or"),
        (([], "1"), AmpTypeError, "max_norm must be a number or a one-element tensor, got str"),
        (([], True), AmpTypeError, "max_norm must be a number .* got bool"),
        (([], -1.0), AmpValueError, "max_norm is -1.0, expected a number >= 0"),
        (([], math.nan), AmpValueError, "max_norm is nan"),
        (([], torch.ones(2)), AmpValueError, "max_norm has 2 elements"),
        (([], 1.0, "two"), AmpTypeError, "norm_type must be a number or 'inf', got 'two'"),
        (([], 1.0, None), AmpTypeError, "norm_type must be a number or 'inf', got None"),
        (([], 1.0, math.nan), AmpValueError, "norm_type is nan"),
    ],
)
def test_errors(given, kind, message):
    with pytest.raises(kind, match=message):
        clip_grad_norm_(*given)
