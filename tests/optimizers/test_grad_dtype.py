"""Parameters whose ``grad_dtype`` is not their dtype: each step is that of gradients which a program casts itself."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kit import assert_same, backward, same, start
from optimizer_cases import SHAPES, STEPPED_BY, give, masters_of, parameters
from torch import nn
from torch.distributed.fsdp import fully_shard

from ampctx import GradScaler, clip_grad_norm_, distributed
from ampctx.amp import AmpSession
from ampctx.optimizers import FusedAdam

F16, B16, F32 = torch.float16, torch.bfloat16, torch.float32
WEIGHTS = {"O2": F16, "O5": B16}
LEVELS_HERE = ["O0", "O1", "O2", "O4", "O5"]
SCALE = 64.0

# Weight, grad_dtype, gradient, and the options that keep the masters.
KINDS = {
    "bf16 weights": (B16, F32, F32, {}),
    "fp16 weights": (F16, F32, F32, {}),
    "masters": (B16, F32, F32, {"master_weights": True}),
    "split": (B16, F32, F32, {"master_weights": "split"}),
    "any dtype": (B16, None, F32, {}),
    "bf16 gradients": (F32, B16, B16, {}),
}
DRIVERS = ["alone", "clipped", "scaler", "unscaled"]
# LARC writes adapted gradients, which are then rounded; SplitMasters takes no fp16. Neither takes the options.
ODD = {("larc", "bf16 gradients"), ("split-masters", "fp16 weights")}
ODD |= {(name, kind) for name in ("larc", "split-masters") for kind in ("masters", "split")}
CASES = [(name, kind) for name in STEPPED_BY for kind in KINDS if (name, kind) not in ODD]


def drive(optimizer, params, grads, how, scaler):
    """A step by gradients that are scaled where a scaler steps. Returns the norm."""
    norm = None
    give(params, grads)
    if how == "unscaled":
        scaler.unscale_(optimizer)
    if how == "clipped":
        norm = clip_grad_norm_(params, 1.0)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return norm


@pytest.mark.parametrize("how", DRIVERS)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_step_uses_every_bit_of_the_gradient(name, kind, how):
    """Beside the optimizer on fp32 weights with fp32 gradients; without masters those are rounded after each step."""
    dtype, allowed, given, options = KINDS[kind]
    params = parameters(dtype)
    for p in params:
        p.grad_dtype = allowed
    plain = [nn.Parameter(p.detach().to(F32, copy=True)) for p in params]
    optimizer = STEPPED_BY[name](params, **options)
    reference = STEPPED_BY[name](plain)
    scaler = GradScaler("cpu", init_scale=SCALE) if how in ("scaler", "unscaled") else None
    scale = SCALE if scaler else 1.0
    if scaler:
        scaler.scale(torch.ones(()))
    generator = torch.Generator().manual_seed(0)
    has_masters = bool(options) or (name == "split-masters" and dtype == B16)
    for _ in range(3):
        grads = [torch.randn(shape, generator=generator).to(given) for shape in SHAPES]
        norm = drive(optimizer, params, [g * scale for g in grads], how, scaler)
        assert {p.grad.dtype for p in params} == {given}
        wide = [g.to(F32) for g in grads]
        if how == "clipped":
            give(plain, [g.clone() for g in wide])
            assert torch.equal(norm, clip_grad_norm_(plain, 1.0))
            wide = [p.grad.to(F32, copy=True) for p in params]  # as rounded in their dtype
        drive(reference, plain, wide, "alone", None)
        with torch.no_grad():
            for p in () if has_masters else plain:
                p.copy_(p.to(dtype))
    if has_masters:
        assert_same([m.detach() for m in masters_of(optimizer)], [p.detach() for p in plain])
    assert_same([p.detach() for p in params], [p.detach().to(dtype) for p in plain])


# --- levels -----------------------------------------------------------------------------------------------------------


def mlp(grad_dtype=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    for p in model.parameters() if grad_dtype else ():
        p.grad_dtype = grad_dtype
    return model


def inputs(step, micro):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + micro))


def by_amp(level, grad_dtype, make, delays, clips):
    session = AmpSession()
    model, optimizer = start(session, level, make, mlp(grad_dtype), loss_scale=SCALE)
    for step in range(3):
        for micro in range(2):
            loss = model(inputs(step, micro)).float().square().mean()
            with session.scale_loss(loss, optimizer, delay_unscale=delays and micro == 0) as scaled:
                scaled.backward()
                assert {p.grad.dtype for p in model.parameters()} == {grad_dtype}
        if clips:
            clip_grad_norm_(session.master_params(optimizer), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    masters = [p.detach().clone() for p in session.master_params(optimizer)]
    session.reset()
    return masters


def by_hand(level, grad_dtype, make, delays, clips):
    """fp32 masters that torch steps by fp32 gradients, and a model of rounded weights."""
    model = mlp(grad_dtype)
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    dtype = WEIGHTS.get(level, F32)
    # The sums of scale 1 are in fp32 masters' gradients, or in those of the parameters.
    kept = F32 if level in WEIGHTS else grad_dtype
    model.to(dtype)
    optimizer = make(masters)
    for step in range(3):
        totals = None
        for micro in range(2):
            with torch.autocast("cpu", B16 if level == "O4" else F16, enabled=level in ("O1", "O4")):
                loss = model(inputs(step, micro).to(dtype)).float().square().mean()
            (loss * SCALE).backward()
            if micro or not delays:
                grads = [p.grad.to(F32) / SCALE for p in model.parameters()]
                before = totals or list(map(torch.zeros_like, grads))
                totals = [(a + b).to(kept).to(F32) for a, b in zip(before, grads, strict=True)]
                model.zero_grad()
        give(masters, totals)
        if clips:
            clip_grad_norm_(masters, 0.1)
            give(masters, [p.grad.to(kept).to(F32) for p in masters])
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
    return [p.detach() for p in masters]


@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("delays", [False, True], ids=["", "delayed"])
@pytest.mark.parametrize(
    ("level", "name"), [*((level, "FusedAdam") for level in LEVELS_HERE), ("O2", "AdamW"), ("O5", "AdamW")]
)
def test_levels_equal_a_loop_by_hand(level, name, delays, clips):
    make = partial(FusedAdam if name == "FusedAdam" else torch.optim.AdamW, lr=0.01)
    case = level, F32 if level in WEIGHTS else B16, make, delays, clips
    assert same(by_amp(*case), by_hand(*case))


@pytest.mark.parametrize("grad_dtype", [F32, B16])
def test_gradients_keep_their_dtype_when_the_model_is_cast_and_restored(session, grad_dtype):
    model = mlp(grad_dtype)
    give(list(model.parameters()), [torch.ones_like(p, dtype=grad_dtype) for p in model.parameters()])
    model, optimizer = start(session, "O2", "FusedSGD", model)
    assert {p.grad.dtype for p in model.parameters()} == {grad_dtype}
    optimizer.zero_grad()
    backward(session, model(inputs(0, 0)).float().sum(), optimizer)
    session.reset()
    assert {(p.dtype, p.grad.dtype) for p in model.parameters()} == {(F32, grad_dtype)}


# --- DTensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS_HERE)
def test_shards_step_by_the_grad_dtype_that_torch_leaves_them(level, mesh):
    """torch before 2.15 drops it, and refuses one that a shard gets in its backward."""
    model = fully_shard(mlp(B16), mesh=mesh, mp_policy=distributed.mixed_precision_policy(level))
    kept = {p.grad_dtype for p in model.parameters()}
    model, optimizer = start(session := AmpSession(), level, FusedAdam, model, loss_scale=SCALE)
    twins = [nn.Parameter(p.full_tensor().detach().clone()) for p in model.parameters()]
    backward(session, model(inputs(0, 0)).float().square().mean(), optimizer)
    assert {p.grad.dtype for p in model.parameters()} == kept
    for twin, p in zip(twins, model.parameters(), strict=True):
        twin.grad_dtype = p.grad.dtype
        twin.grad = p.grad.full_tensor()
    beside = FusedAdam(twins)
    beside.load_state_dict({**beside.state_dict(), "param_groups": optimizer.state_dict()["param_groups"]})
    for each in (optimizer, beside):
        each.step()
    assert_same([p.full_tensor() for p in model.parameters()], [twin.detach() for twin in twins])
    optimizer.zero_grad()
    if kept == {F32}:
        for p in model.parameters():
            p.grad_dtype = B16
        with pytest.raises(RuntimeError, match="grad_dtype"):
            backward(session, model(inputs(0, 0)).float().square().mean(), optimizer)
    session.reset()
