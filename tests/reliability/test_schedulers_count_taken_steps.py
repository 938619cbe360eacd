"""LR schedulers, built before or after ``initialize``, neither warn nor lose count when steps are skipped."""

import pytest
import torch
from kit import INF, NAN, OPTIMIZERS, loss_of
from stepping import ON_DEVICE, ON_HOST, Loop, ScalerLoop, network
from torch.optim import lr_scheduler, swa_utils

# torch's schedulers take torch's optimizers alone.
every_optimizer = pytest.mark.parametrize("name", [name for name in (*ON_DEVICE, *ON_HOST) if name != "LARC"])


def has_momentum(optimizer):
    return bool({"momentum", "betas"} & optimizer.defaults.keys())


# One of each sort: by formulas and by recurrence, with the momentum, without the optimizer's count, nested.
KINDS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8, cycle_momentum=has_momentum(o)),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 9)], milestones=[3]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.5, anneal_epochs=3),
}


def turn(scheduler):
    """What a loop does once for each step that was taken."""
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


def settings(optimizer):
    group = optimizer.param_groups[0]
    return group["lr"], group.get("momentum"), group.get("betas")


# The first step overflows: what torch's schedulers warn about is a step() before that of the optimizer.
PLAN = [INF, None, None, NAN, INF, None, None, None, INF, None]


@pytest.mark.full(but=80)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5", "GradScaler"])
@every_optimizer
def test_rates_and_momenta_are_those_of_fp32_without_the_skipped_steps(session, name, level, kind, built):
    """Weights too are those of steps with these rates, where nothing is cast: op calls that are kept follow them."""
    twin = network()
    alone = OPTIMIZERS[name](twin.parameters())
    scheduler, expected = KINDS[kind](alone), []
    for seed in (seed for seed, bad in enumerate(PLAN) if bad is None):
        expected.append(settings(alone))
        loss_of(twin, seed).backward()
        alone.step()
        alone.zero_grad()
        turn(scheduler)

    loop = ScalerLoop(name) if level == "GradScaler" else Loop.__new__(Loop)
    if level != "GradScaler":
        loop.session, loop.model = session, network()
        loop.optimizer = OPTIMIZERS[name](loop.model.parameters())
    scheduler = KINDS[kind](loop.optimizer) if built == "before" else None
    if level != "GradScaler":
        session.initialize(loop.model, loop.optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    scheduler = scheduler or KINDS[kind](loop.optimizer)
    seen = []
    for seed, bad in enumerate(PLAN):
        before = settings(loop.optimizer)
        if loop.iterate(seed, {"0.weight": bad} if bad else {}).stepped:
            seen.append(before)
            turn(scheduler)
    assert seen == expected
    if level in ("O0", "GradScaler"):
        for got, wanted in zip(loop.model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", [Loop, lambda _, name: ScalerLoop(name)], ids=["session", "GradScaler"])
@every_optimizer
def test_a_scheduler_that_nobody_gates_does_not_warn(session, name, make):
    loop = make(session, name)
    scheduler = KINDS["StepLR"](loop.optimizer)
    for bad in (INF, None):
        loop.iterate(0, {"0.weight": bad} if bad else {})
        scheduler.step()
    assert loop.optimizer.param_groups[0]["lr"] == 0.005
