"""FusedMuon beside torch.optim.Muon and AdamW: steps, what replaces the orthogonalisation, checkpoints, errors."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from host_reads import OpCalls
from kit import assert_same, backward, muon, params_of, snapshot, with_plans
from optimizer_cases import give, gradients, parameters, run
from test_damaged_states import refused
from torch import nn

from ampctx import clip_grad_norm_
from ampctx._errors import AmpKeyError, AmpTypeError, AmpValueError
from ampctx.amp import AmpSession
from ampctx.optimizers import FusedAdam, FusedMuon, fused_muon
from ampctx.optimizers.fused_muon import newton_schulz

COEFFICIENTS = (3.4445, -4.775, 2.0315)
SHAPES = [(32, 64), (64, 16), (32, 64)]


def exact_direction(u: torch.Tensor) -> torch.Tensor:
    """The iterations in fp64, on u as it is."""
    a, b, c = COEFFICIENTS
    x = u.double().mT if u.shape[0] > u.shape[1] else u.double()
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if u.shape[0] > u.shape[1] else x


# --- beside torch.optim.Muon ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}], ids=["", "options"])
def test_each_step_is_that_of_torchs_muon(options):
    """From equal states. Updates are rounded to bf16 in other places: both are as far from the fp64 iterations."""
    theirs = parameters(shapes=SHAPES)
    ours = parameters(shapes=SHAPES)
    torchs, fused = torch.optim.Muon(theirs, lr=0.02, **options), FusedMuon(ours, lr=0.02, **options)
    errors = []
    for step in range(12):
        fused.load_state_dict(torchs.state_dict())
        before = [p.detach().clone() for p in theirs]
        with torch.no_grad():
            for p, q in zip(ours, theirs, strict=True):
                p.copy_(q)
        for params in (ours, theirs):
            give(params, gradients(params, step))
        fused.step()
        torchs.step()
        for p, q, w, g in zip(ours, theirs, before, gradients(theirs, step), strict=True):
            assert (p - q).norm() < 0.01 * q.norm()
            buffer = torchs.state[q]["momentum_buffer"]
            torch.testing.assert_close(fused.state[p]["momentum_buffer"], buffer, rtol=1e-6, atol=1e-7)
            direction = g.lerp(buffer, 0.95) if options.get("nesterov", True) else buffer
            rate = 0.2 * max(w.shape) ** 0.5 if "adjust_lr_fn" in options else max(1, w.shape[0] / w.shape[1]) ** 0.5
            exact = w * (1 - 0.02 * 0.1) - 0.02 * rate * exact_direction(direction)
            scale = (exact - w).norm()
            errors.append(torch.stack([(t - exact).norm() / scale for t in (p.detach(), q.detach())]))
    of_ours, of_torch = torch.stack(errors).mean(0)
    assert of_ours < 0.015
    assert of_ours < 1.1 * of_torch


def test_a_nan_stays_in_its_matrix():
    params = parameters(shapes=[(4, 3), (4, 3)])
    optimizer = FusedMuon(params)
    give(params, [torch.full((4, 3), math.nan), torch.ones(4, 3)])
    optimizer.step()
    assert params[0].isnan().all()
    assert params[1].isfinite().all()


# --- groups, stacks, and the step -------------------------------------------------------------------------------------


def test_groups_without_muon_are_adamw():
    """With the bits of FusedAdam, which has another eps than Muon."""
    shapes = [(3, 4), (5,), ()]
    ours, theirs = parameters(shapes=shapes), parameters(shapes=shapes)
    options = {"lr": 0.02, "weight_decay": 0.1}
    optimizer = FusedMuon([{"params": ours, "use_muon": False}], **options)
    plain = FusedAdam(theirs, **options)
    run(optimizer, 5)
    run(plain, 5)
    assert_same(snapshot(optimizer), snapshot(plain))
    (group,) = optimizer.param_groups
    assert (group["betas"], group["eps"]) == ((0.9, 0.999), 1e-8)
    given = {"params": parameters(shapes=[(2,)]), "use_muon": 0, "betas": (0.8, 0.9), "eps": 1e-5, "amsgrad": True}
    optimizer.add_param_group(given)
    run(optimizer, 1)
    added = optimizer.param_groups[1]
    assert (added["betas"], added["eps"], added["use_muon"]) == ((0.8, 0.9), 1e-5, False)
    assert "max_exp_avg_sq" in optimizer.state[added["params"][0]]


def test_op_calls():
    """Two for each shape: a wide matrix and its transpose differ."""
    params = parameters(shapes=[(3, 4), (4, 3), (3, 4), (2, 3, 4), (5,)])
    optimizer = muon(params)
    run(optimizer, 1)
    for _ in range(2):
        with OpCalls() as calls:
            run(optimizer, 1)
        assert calls.of == {"multi_tensor_muon": 2, "multi_tensor_sgd": 2, "multi_tensor_adam": 1}
    assert {state["step"].item() for state in optimizer.state.values()} == {3}


def test_stacks_are_cut_and_joined(monkeypatch):
    """What replaces the iterations is given stacks in bf16; a parameter with many matrices comes in parts."""
    shapes = [(3, 4), (5, 3, 4), (3, 4), (2, 6)]
    seen = []

    def watched(stack):
        seen.append((stack.dtype, tuple(stack.shape)))
        return newton_schulz(stack, COEFFICIENTS, 5, 1e-7)

    whole, cut = (FusedMuon(parameters(shapes=shapes), orthogonalize=watched) for _ in range(2))
    run(whole, 2)
    assert seen == 2 * [(torch.bfloat16, (7, 3, 4)), (torch.bfloat16, (1, 2, 6))]
    seen.clear()
    monkeypatch.setattr(fused_muon, "MOST_ELEMENTS", 24)
    run(cut, 2)
    assert [shape for _, shape in seen] == 2 * [(1, 3, 4), (2, 3, 4), (2, 3, 4), (1, 3, 4), (1, 3, 4), (1, 2, 6)]
    assert_same(snapshot(cut), snapshot(whole))
    plain = FusedMuon(parameters(shapes=shapes))
    run(plain, 2)
    assert_same(snapshot(whole), snapshot(plain))


def test_stochastic_rounding_draws_new_bits_at_each_step():
    """The first stage counts on a copy: weights at rest move up and down by the bits of their own count."""
    (p,) = parameters(torch.bfloat16, [(64, 64)])
    optimizer = FusedMuon([p], lr=1e-4, weight_decay=0.0, write_back="stochastic", orthogonalize=torch.ones_like)
    with torch.no_grad():
        p.fill_(1.0)
    moved = []
    for _ in range(3):
        before = p.detach().clone()
        p.grad = torch.zeros_like(p)
        optimizer.step()
        moved.append(p.detach() != before)
    assert all(0 < m.float().mean() < 0.1 for m in moved)
    assert not torch.equal(moved[0], moved[1])
    assert optimizer.state[p]["step"] == 3


@pytest.mark.parametrize("level", ["O2", "O5"])
@with_plans
def test_clipping_and_the_loss_scale_are_taken_off_once(level):
    """From 16-bit gradients: the average of the first step is a twentieth of the clipped gradients, and updates have
    the size that they have without clipping."""
    found = []
    for max_norm in (None, 0.01):
        torch.manual_seed(0)
        model, session, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), AmpSession(), torch.randn(8, 6)
        grads = torch.autograd.grad(model(x).square().mean(), [model[0].weight, model[2].weight])
        optimizer = muon(model.parameters(), weight_decay=0.0)
        session.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
        masters = list(session.master_params(optimizer))
        before = [p.detach().clone() for p in masters]
        backward(session, model(x).float().square().mean(), optimizer)
        factor = 1.0 if max_norm is None else max_norm / clip_grad_norm_(masters, max_norm)
        assert torch.Tensor.grad.__get__(masters[0]) is None, "the clipping takes place in the step"
        optimizer.step()
        matrices = [(p, q) for p, q in zip(masters, before, strict=True) if p.dim() == 2]
        buffers = [optimizer.state[p]["momentum_buffer"] / factor for p, _ in matrices]
        found.append((buffers, [p.detach() - q for p, q in matrices]))
        session.reset()
    (buffers, updates), (of_clipped, moves) = found
    torch.testing.assert_close(of_clipped, buffers, rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(buffers, [(1 - 0.95) * g for g in grads], rtol=0.1, atol=1e-3)
    for update, move in zip(updates, moves, strict=True):
        assert (update - move).norm() < 0.05 * update.norm()


def test_a_step_under_autocast_is_the_same():
    """O1 and O4 leave autocast on between forward passes."""
    first, second = (FusedMuon(parameters(shapes=[(3, 4), (4, 3), (3, 4)])) for _ in range(2))
    run(first, 2)
    with torch.autocast("cpu", dtype=torch.float16):
        run(second, 2)
    assert_same(snapshot(first), snapshot(second))


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained_by", ["torch", "ours"])
def test_checkpoints_go_over_to_torchs_muon_and_back(trained_by):
    shapes = [(16, 32), (32, 8)]
    makers = [lambda p: FusedMuon(p, lr=0.02, ns_steps=4), lambda p: torch.optim.Muon(p, lr=0.02, ns_steps=4)]
    first, second = makers[::-1] if trained_by == "torch" else makers
    trained = first(parameters(shapes=shapes))
    run(trained, 3)
    goes_on = second([nn.Parameter(p.detach().clone()) for p in params_of(trained)])
    goes_on.load_state_dict(copy.deepcopy(trained.state_dict()))
    for p, q in zip(params_of(goes_on), params_of(trained), strict=True):
        assert_same([goes_on.state[p]["momentum_buffer"]], [trained.state[q]["momentum_buffer"]])
    assert goes_on.param_groups[0]["ns_steps"] == 4
    run(trained, 3, first=3)
    run(goes_on, 3, first=3)
    for p, q in zip(params_of(goes_on), params_of(trained), strict=True):
        assert (p - q).norm() < 0.01 * q.norm()


def joined(*checkpoints):
    """The checkpoint of one optimizer with the groups of several."""
    state, groups = {}, []
    for checkpoint in checkpoints:
        first = sum(len(group["params"]) for group in groups)
        state |= {first + key: value for key, value in checkpoint["state"].items()}
        groups += [{**group, "params": [first + i for i in group["params"]]} for group in checkpoint["param_groups"]]
    return {"state": state, "param_groups": groups}


def test_checkpoints_of_torchs_muon_and_adamw_join():
    matrices, others = parameters(shapes=[(16, 32)]), parameters(shapes=[(8,), (3, 4)])
    torchs = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01, amsgrad=True)]
    for optimizer in torchs:
        run(optimizer, 3)
    ours = [nn.Parameter(p.detach().clone()) for p in matrices + others]
    fused = FusedMuon([{"params": ours[:1]}, {"params": ours[1:], "use_muon": False}])
    fused.load_state_dict(joined(*(optimizer.state_dict() for optimizer in torchs)))
    assert [group["lr"] for group in fused.param_groups] == [0.02, 0.01]
    for params in (ours, matrices + others):
        give(params, gradients(ours, 3))
    for optimizer in (*torchs, fused):
        optimizer.step()
    for p, q in zip(ours, matrices + others, strict=True):
        assert (p - q).norm() <= (0.01 if p is ours[0] else 1e-6) * q.norm()


def test_checkpoints_that_do_not_fit():
    shapes = [(3, 4)]
    as_muon, as_adamw = (FusedMuon([{"params": parameters(shapes=shapes), "use_muon": use}]) for use in (True, False))
    adam = torch.optim.Adam(parameters(shapes=shapes), weight_decay=0.1)
    for optimizer in (as_muon, as_adamw, adam):
        run(optimizer, 2)
    message = r"a param group of the checkpoint has use_muon=False, and the optimizer's group has use_muon=True"
    refused(as_muon, as_adamw.state_dict(), AmpValueError, message)
    message = "decoupled_weight_decay=False, and groups with use_muon=False step by AdamW"
    refused(as_adamw, adam.state_dict(), AmpValueError, message)
    refused(as_muon, adam.state_dict(), AmpKeyError, 'no "momentum"')
    broken = as_muon.state_dict()
    broken["param_groups"][0]["use_muon"] = "yes"
    refused(as_muon, broken, AmpTypeError, "use_muon must be True or False, got 'yes'")


# --- errors -----------------------------------------------------------------------------------------------------------

OPTIONS = [
    ({"lr": -1.0}, AmpValueError, "Invalid learning rate: -1.0"),
    ({"momentum": -0.1}, AmpValueError, r"Invalid momentum value: -0.1 \(momentum\)"),
    ({"weight_decay": -0.1}, AmpValueError, r"Invalid weight_decay value: -0.1"),
    ({"eps": math.nan}, AmpValueError, r"Invalid epsilon value: nan \(eps\)"),
    ({"nesterov": "no"}, AmpTypeError, "nesterov must be True or False, got 'no'"),
    ({"ns_coefficients": (1.0, 2.0)}, AmpTypeError, r"ns_coefficients must be three numbers, got \(1.0, 2.0\)"),
    ({"ns_coefficients": "abc"}, AmpTypeError, "ns_coefficients must be three numbers, got 'abc'"),
    ({"ns_coefficients": (1.0, math.inf, 0.0)}, AmpValueError, r"Invalid ns_coefficients\[1\] value: inf"),
    ({"ns_steps": 100}, AmpValueError, "ns_steps is 100, expected an int from 0 to 99"),
    ({"ns_steps": 2.5}, AmpValueError, "ns_steps is 2.5, expected an int"),
    ({"adjust_lr_fn": "moonshot"}, AmpValueError, "adjust_lr_fn is 'moonshot', expected None or 'original' or"),
    ({"orthogonalize": 5}, AmpTypeError, "orthogonalize must be a function of a tensor, got int"),
]


@pytest.mark.parametrize(("options", "kind", "message"), OPTIONS, ids=lambda o: None)
def test_invalid_options(options, kind, message):
    with pytest.raises(kind, match=message):
        FusedMuon(parameters(shapes=[(3, 4)]), **options)
    if "orthogonalize" not in options:
        optimizer = FusedMuon(parameters(shapes=[(3, 4)]))
        with pytest.raises(kind, match=message):
            optimizer.add_param_group({"params": parameters(shapes=[(3, 4)]), **options})
        assert len(optimizer.param_groups) == 1
        checkpoint = copy.deepcopy(optimizer.state_dict())
        checkpoint["param_groups"][0].update(options)
        refused(optimizer, checkpoint, kind, rf"param_groups\[0\] of the checkpoint: {message}")


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4, 5)], ids=str)
def test_parameters_that_are_no_matrices(shape):
    (odd,) = parameters(shapes=[shape])
    message = r"param_groups\[{}\]\['params'\]\[0\]{} has shape .*use_muon=False, which AdamW steps"
    with pytest.raises(AmpValueError, match=message.format(0, r" \(conv\)")):
        FusedMuon([("conv", odd)])
    optimizer = FusedMuon(parameters(shapes=[(3, 4)]))
    with pytest.raises(AmpValueError, match=message.format(1, "")):
        optimizer.add_param_group({"params": [odd]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(AmpTypeError, match="use_muon must be True or False, got 'False'"):
        optimizer.add_param_group({"params": [odd], "use_muon": "False"})
    optimizer.add_param_group({"params": [odd], "use_muon": False})


def test_a_parameter_that_lost_its_shape_is_refused_before_any_is_stepped():
    params = parameters(shapes=[(3, 4), (2, 6)])
    optimizer, before = FusedMuon(params), params[0].detach().clone()
    params[1].data = params[1].detach().reshape(12)
    give(params, gradients(params, 0))
    with pytest.raises(AmpValueError, match=r"\['params'\]\[1\] has shape \(12,\)"):
        optimizer.step()
    assert_same([params[0].detach()], [before])
    assert not optimizer.state


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (lambda u: None, AmpTypeError, "orthogonalize returned a NoneType, expected a tensor"),
        (
            lambda u: u.mT,
            AmpValueError,
            r"orthogonalize returned shape \(1, 4, 3\).*expected .* shape \(1, 3, 4\) on cpu",
        ),
        (lambda u: u.long(), AmpValueError, "orthogonalize returned .* of torch.int64"),
        (lambda u: u.to("meta"), AmpValueError, "orthogonalize returned .* on meta"),
    ],
    ids=["none", "shape", "dtype", "device"],
)
def test_what_orthogonalize_returns(function, kind, message):
    (p,) = parameters(shapes=[(3, 4)])
    optimizer, before = FusedMuon([p], orthogonalize=function), p.detach().clone()
    p.grad = torch.ones(3, 4)
    with pytest.raises(kind, match=message):
        optimizer.step()
    assert_same([p.detach()], [before])
