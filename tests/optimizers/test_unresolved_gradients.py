"""Gradients whose values are not those in their memory: torch negates a view of an imaginary part as it reads it, and
takes a ZeroTensor for zeros."""

from __future__ import annotations

import pytest
import torch
from kit import assert_same
from torch import nn

import ampctx
from ampctx.optimizers import FusedSGD


def negated(grad):
    """As the imaginary part of a conjugate, which torch does not have for bf16: after a real part each."""
    return torch._neg_view(torch.stack([grad, -grad], -1))[..., 1]


def imaginary(grad):
    """By public functions: contiguous, of one element."""
    return torch.complex(torch.zeros(2), -grad.expand(2)).conj().imag.as_strided(grad.shape, grad.stride())


def zero(grad):
    return torch._efficientzerotensor(grad.shape, dtype=grad.dtype)


@pytest.mark.parametrize("count", [1, 40])
def test_public_views_and_parameters_that_become_views_are_read_as_torch_reads_them(count):
    params, plain = ([nn.Parameter(torch.ones(1)) for _ in range(count)] for _ in range(2))
    optimizers = [FusedSGD(each, lr=0.5) for each in (params, plain)]
    for step in range(5):
        for p, q in zip(params, plain, strict=True):
            q.grad = torch.full((1,), 1.0 + step)
            p.grad = imaginary(q.grad) if step < 3 else q.grad.clone()
            if step == 2:
                q.grad, p.grad = torch.zeros(1), zero(q.grad)
            if step == 4:
                p.data = imaginary(p.data)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(params, plain)


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_gradients_are_clipped_in_place(order):
    grads = [torch.tensor([3.0, -4.0]), torch.tensor(12.0)]
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads] + [nn.Parameter(torch.zeros(3))]
    given = [negated(grads[0]), negated(grads[1]), zero(params[2])]
    for p, grad in zip(params, given, strict=True):
        p.grad = grad
    norm = ampctx.clip_grad_norm_(params, 1.0, norm_type=order)
    expected = torch.linalg.vector_norm(torch.tensor([3.0, 4.0, 12.0]), order)
    assert_same([norm], [expected])
    assert all(p.grad is grad for p, grad in zip(params, given, strict=True))
    torch.testing.assert_close([p.grad + 0 for p in params], [*(g / (expected + 1e-6) for g in grads), torch.zeros(3)])


def test_conjugated_gradients_are_clipped():
    p = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    p.grad = torch.tensor([3.0 + 4.0j, 0.0]).conj()
    assert ampctx.clip_grad_norm_([p], 1.0) == 5.0
    torch.testing.assert_close(p.grad.resolve_conj(), torch.tensor([0.6 - 0.8j, 0.0]), rtol=1e-5, atol=0)
