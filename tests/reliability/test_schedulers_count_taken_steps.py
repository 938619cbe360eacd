"""LR schedulers, built before or after ``initialize``, neither warn nor lose count when steps are skipped."""

import pytest
import torch
from kit import INF, NAN, OPTIMIZERS, loss_of
from stepping import Loop, ScalerLoop, every_optimizer, network
from torch.optim import lr_scheduler, swa_utils

SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=12, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 9)], milestones=[3]
    ),
}
every_scheduler = pytest.mark.parametrize("schedule", SCHEDULERS)
# The first step overflows: what torch's schedulers warn about is a step() before that of the optimizer.
PLAN = [INF, None, None, NAN, INF, None, None, None, INF, None]


def fp32_sequence(name, schedule, n):
    optimizer = OPTIMIZERS[name](network().parameters())
    scheduler = SCHEDULERS[schedule](optimizer)
    rates = []
    for _ in range(n):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.full(but=100)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("built", ["before", "after"])
@every_scheduler
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5", "GradScaler"])
@every_optimizer
def test_the_rates_are_those_of_fp32_without_the_skipped_steps(session, name, level, schedule, built):
    if level == "GradScaler":
        loop = ScalerLoop(name)
    elif built == "after":
        loop = Loop(session, name, level)
    else:
        loop = Loop.__new__(Loop)
        loop.session, loop.model = session, network()
        loop.optimizer = OPTIMIZERS[name](loop.model.parameters())
    scheduler = SCHEDULERS[schedule](loop.optimizer)
    if built == "before" and level != "GradScaler":
        session.initialize(loop.model, loop.optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    rates = []
    for seed, bad in enumerate(PLAN):
        rate = loop.optimizer.param_groups[0]["lr"]
        if loop.iterate(seed, {"0.weight": bad} if bad else {}).stepped:
            rates.append(rate)
            scheduler.step()
    assert rates == fp32_sequence(name, schedule, PLAN.count(None))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", [Loop, lambda _, name: ScalerLoop(name)], ids=["session", "GradScaler"])
@every_optimizer
def test_a_scheduler_that_nobody_gates_does_not_warn(session, name, make):
    loop = make(session, name)
    scheduler = SCHEDULERS["StepLR"](loop.optimizer)
    for bad in (INF, None):
        loop.iterate(0, {"0.weight": bad} if bad else {})
        scheduler.step()
    assert loop.optimizer.param_groups[0]["lr"] == 0.005


@pytest.mark.filterwarnings("error")
def test_schedulers_of_two_optimizers(session):
    """Each goes with its own: an overflow of one model's loss holds back that scheduler alone."""
    models = [network(0), network(1)]
    names = ("FusedAdam", "SGD-plain")
    both = [OPTIMIZERS[name](m.parameters()) for name, m in zip(names, models, strict=True)]
    schedulers = [SCHEDULERS["StepLR"](optimizer) for optimizer in both]
    session.initialize(models, both, opt_level="O1", num_losses=2, verbosity=0)
    session.on_step(lambda optimizer, _: schedulers[both.index(optimizer)].step())
    for bad in ((INF, None), (None, None), (INF, None), (None, None), (INF, INF)):
        for i, (model, optimizer) in enumerate(zip(models, both, strict=True)):
            with session.scale_loss(loss_of(model, 0), optimizer, loss_id=i) as scaled:
                scaled.backward()
                if bad[i]:
                    model[0].weight.grad[0, 0] = bad[i]
            optimizer.step()
            optimizer.zero_grad()
    assert [s.last_epoch for s in schedulers] == [2, 4]
    assert [o.param_groups[0]["lr"] for o in both] == [0.005, 0.0025]


def _swa(optimizer):
    return swa_utils.SWALR(optimizer, swa_lr=0.5, anneal_epochs=3)


# Every kind of torch.optim, those that turn the momentum among them.
KINDS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (epoch + 1)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": SCHEDULERS["StepLR"],
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, base_momentum=0.5, max_momentum=0.95),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.ConstantLR(o, 0.1, total_iters=2)]
    ),
    "SequentialLR": SCHEDULERS["SequentialLR"],
    "SWALR": _swa,
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


def test_every_kind_that_torch_has_is_here():
    found = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert found - {"LRScheduler"} == KINDS.keys() - {"SWALR"}


@pytest.mark.full(but=64)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "AdamW-fused", "SGD-plain"])
def test_every_kind_turns_the_rate_and_the_momentum_that_are_stepped(session, name, kind, built):
    """Weights too are those of steps with these rates and momenta, without amp: op calls that are kept follow them."""
    twin = network()
    alone = OPTIMIZERS[name](twin.parameters())
    scheduler = KINDS[kind](alone)
    expected = []
    for seed in (0, 2, 3, 5):
        loss_of(twin, seed).backward()
        alone.step()
        alone.zero_grad()
        turn(scheduler)
        expected.append(settings(alone))

    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = KINDS[kind](optimizer) if built == "before" else None
    session.initialize(model, optimizer, opt_level="O0", loss_scale="dynamic", verbosity=0)
    scheduler = scheduler or KINDS[kind](optimizer)
    seen = []
    for seed, bad in enumerate((None, INF, None, None, NAN, None)):
        with session.scale_loss(loss_of(model, seed), optimizer) as scaled:
            scaled.backward()
            if bad:
                model[0].weight.grad[0, 0] = bad
        optimizer.step()
        optimizer.zero_grad()
        if session.outcome(optimizer).stepped:
            turn(scheduler)
            seen.append(settings(optimizer))
    assert seen == expected
    for got, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
