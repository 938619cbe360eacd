"""Gradients whose values are not those in their memory: torch negates a view of an imaginary part as it reads it, and
takes a ZeroTensor for zeros."""

from __future__ import annotations

import pytest
import torch
from kit import assert_same
from optimizer_cases import STEPPED_BY
from torch import nn

import ampctx
from ampctx.amp import AmpSession, GradScaler
from ampctx.optimizers import FusedSGD

STEPPED_BY = {**STEPPED_BY, "torch": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False)}


def negated(grad):
    """As the imaginary part of a conjugate, which torch does not have for bf16: after a real part each."""
    return torch._neg_view(torch.stack([grad, -grad], -1))[..., 1]


def imaginary(grad):
    """By public functions: contiguous, of one element."""
    return torch.complex(torch.zeros(2), -grad.expand(2)).conj().imag.as_strided(grad.shape, grad.stride())


def zero(grad):
    return torch._efficientzerotensor(grad.shape, dtype=grad.dtype)


# A form for each parameter, and what torch reads there.
FORMS = {
    "negated": ([negated] * 4, [torch.clone] * 4),
    "one": ([negated, torch.clone, torch.clone, torch.clone], [torch.clone] * 4),
    "zero": ([torch.clone, zero, zero, torch.clone], [torch.clone, torch.zeros_like, torch.zeros_like, torch.clone]),
}


def trained(name, api, forms):
    """The weights and gradients after each step. The gradients arrive in these forms."""
    generator = torch.Generator().manual_seed(0)
    model = nn.ParameterList([torch.randn(shape, generator=generator) for shape in ((3, 4), (1,), (2,), (7,))])
    optimizer, session = STEPPED_BY[name](list(model)), AmpSession()
    scaler = GradScaler("cpu", init_scale=64.0) if api == "scaler" else None
    if is_amp := api in ("O1", "O2", "O5"):
        session.initialize(model, optimizer, opt_level=api, loss_scale=64.0, verbosity=0)
    found = []
    for _ in range(4):
        loss = sum((p.float() * torch.randn(p.shape, generator=generator)).sum() for p in model)

        def backward(scaled):
            scaled.backward()
            for p, form in zip(model, forms, strict=True):
                p.grad = form(p.grad)

        if is_amp:
            with session.scale_loss(loss, optimizer) as scaled:
                backward(scaled)
        else:
            backward(loss if scaler is None else scaler.scale(loss))
        if scaler is not None:
            scaler.unscale_(optimizer)
        params = session.master_params(optimizer) if is_amp else model.parameters()
        if api != "plain":
            found.append(ampctx.clip_grad_norm_(params, 1.0))
        optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())
        found += [p.detach().clone() for p in model]
        optimizer.zero_grad(set_to_none=True)
    session.reset()
    return found


@pytest.mark.full(but=80)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("api", ["plain", "clip", "scaler", "O1", "O2", "O5"])
@pytest.mark.parametrize("name", STEPPED_BY)
def test_optimizers_step_by_the_values_that_torch_reads(name, api, form):
    if name == "offload" and api in ("O2", "O5"):
        return  # refused: no masters beside those on the host
    given, read = (trained(name, api, forms) for forms in FORMS[form])
    torch.testing.assert_close(given, read, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [1, 40])
def test_public_views_and_parameters_that_become_views_are_read_as_torch_reads_them(count):
    params, plain = ([nn.Parameter(torch.ones(1)) for _ in range(count)] for _ in range(2))
    optimizers = [FusedSGD(each, lr=0.5) for each in (params, plain)]
    for step in range(5):
        for p, q in zip(params, plain, strict=True):
            q.grad = torch.full((1,), 1.0 + step)
            p.grad = imaginary(q.grad) if step < 3 else q.grad.clone()
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
