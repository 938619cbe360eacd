"""Several models, losses and optimizers under amp against the same training without amp, with and without overflows.

With materialize_master_grads=False, apex leaves gradients scaled and those of masters None, and its test does not look
at them. Here the flag is an attribute and no more: gradients are there, and true, either way.
"""

import functools
import itertools
from typing import NamedTuple

import pytest
import torch
from apex import amp
from apex.optimizers import FusedSGD
from kit import LEVELS
from l0 import (
    ZERO,
    Mixed,
    assert_exact,
    batch,
    initialize_mixed,
    low_of,
    reference_model,
    scales,
    set_scales,
    zero_grads,
)  # fmt: skip

ITERATIONS = 3
STARTS = (4.0, 16.0)
# With these no digit is lost in 3 iterations, not even in bf16.
OPTIONS = {"lr": 0.5, "momentum": 0.25}


class Scenario(NamedTuple):
    """``losses``: the models that each loss adds up. ``optimizers``: the models that each steps, a group for each."""

    losses: tuple
    optimizers: tuple

    @property
    def n_models(self):
        return len({m for models in self.losses for m in models})

    def named_by(self, loss):
        """The optimizers that the block of a loss has to name."""
        return [i for i, models in enumerate(self.optimizers) if {*models} & {*self.losses[loss]}]


SCENARIOS = {
    "2-models-2-losses-1-optimizer": Scenario(((0,), (1,)), ((0, 1),)),
    "3-models-2-losses-1-optimizer": Scenario(((0, 2), (1, 2)), ((0, 1, 2),)),
    "2-models-2-losses-2-optimizers": Scenario(((0,), (1,)), ((0,), (1,))),
    "3-models-2-losses-2-optimizers": Scenario(((0, 2), (1, 2)), ((0, 2), (1,))),
}


class Overflow(NamedTuple):
    """inf in one gradient of one backward."""

    iteration: int
    loss: int
    model: int
    parameter: str


def overflows(scenario):
    for iteration, loss in itertools.product((0, 1), (0, 1)):
        for model, parameter in itertools.product(scenario.losses[loss], ("wide", "narrow")):
            yield Overflow(iteration, loss, model, parameter)


def cases():
    """Every level; where the scale is dynamic by default, with every place for an overflow too."""
    for (name, scenario), level in itertools.product(SCENARIOS.items(), LEVELS):
        for overflow in (None, *(overflows(scenario) if level in ("O1", "O2") else ())):
            where = "clean" if overflow is None else "inf-{}-loss{}-model{}-{}".format(*overflow)
            yield pytest.param(scenario, level, overflow, id=f"{name}-{level}-{where}")


def groups(models, of_optimizer):
    return [{"params": list(models[m].parameters())} for m in of_optimizer]


class Record(NamedTuple):
    grads: list  # of each iteration, before the step
    params: list  # after the last


@functools.cache
def expected_run(scenario, overflow):
    """The training in fp64, without amp: a step that overflowed is left out."""
    models = [reference_model(i) for i in range(scenario.n_models)]
    optimizers = [torch.optim.SGD(groups(models, o), **OPTIONS) for o in scenario.optimizers]
    params = [p for model in models for p in model.parameters()]
    grads = []
    for iteration in range(ITERATIONS):
        for loss, members in enumerate(scenario.losses):
            sum(models[m](batch(iteration, loss, torch.float64)) for m in members).backward()
        grads.append([p.grad.clone() for p in params])
        for i, optimizer in enumerate(optimizers):
            if overflow is None or iteration != overflow.iteration or i not in scenario.named_by(overflow.loss):
                optimizer.step()
            optimizer.zero_grad()
    return Record(grads, [p.detach() for p in params])


MAKE = {
    "SGD": functools.partial(torch.optim.SGD, **OPTIONS),
    "FusedSGD": functools.partial(FusedSGD, **OPTIONS, materialize_master_grads=True),
    "FusedSGD-not-materialized": functools.partial(FusedSGD, **OPTIONS, materialize_master_grads=False),
}


@pytest.mark.full(but=200)
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("n_scalers", [1, 2], ids=["one-scaler", "scaler-per-loss"])
@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize(("scenario", "level", "overflow"), list(cases()))
def test_several_of_each(scenario, level, overflow, zero, n_scalers, make):
    """Gradients and weights are compared exactly."""
    expected = expected_run(scenario, overflow)
    models = [Mixed(i, low_of(level)) for i in range(scenario.n_models)]
    model_params = [p for model in models for p in model.parameters()]
    optimizers = [make(groups(models, o)) for o in scenario.optimizers]
    # Of each model parameter: its optimizer, group and place in the group.
    places = {
        p: (o, g, i)
        for o in optimizers
        for g, group in enumerate(o.param_groups)
        for i, p in enumerate(group["params"])
    }
    initialize_mixed(models, optimizers, level, num_losses=n_scalers)
    set_scales(*STARTS[:n_scalers])

    def stepped(p):
        """The master of a model parameter, or itself."""
        optimizer, group, i = places[p]
        return optimizer.param_groups[group]["params"][i]

    for iteration in range(ITERATIONS):
        for loss, members in enumerate(scenario.losses):
            named = [optimizers[i] for i in scenario.named_by(loss)]
            value = sum(models[m](batch(iteration, loss)) for m in members)
            with amp.scale_loss(value, named, loss_id=loss % n_scalers) as scaled:
                scaled.backward()
                if overflow is not None and (iteration, loss) == overflow[:2]:
                    getattr(models[overflow.model], overflow.parameter).grad[0] = float("inf")
        skipped = [] if overflow is None or iteration != overflow.iteration else scenario.named_by(overflow.loss)
        for p, grad in zip(model_params, expected.grads[iteration], strict=True):
            if optimizers.index(places[p][0]) not in skipped:
                assert_exact(stepped(p).grad, grad)
        for optimizer in optimizers:
            optimizer.step()
        zero_grads(zero, models, optimizers)

    for p, value in zip(model_params, expected.params, strict=True):
        assert_exact(p, value)
        assert_exact(stepped(p), value)
    halved = None if overflow is None else overflow.loss % n_scalers
    assert scales() == [start / 2 if i == halved else start for i, start in enumerate(STARTS[:n_scalers])]
