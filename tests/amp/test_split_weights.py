"""``initialize(opt_level="O5", master_weights="split")`` against O5 with fp32 masters."""

from __future__ import annotations

import copy

import pytest
import torch
from kit import assert_same, backward, mlp, start, train
from torch import nn

from ampctx.amp import AmpSession
from ampctx.kernels.reference_steps import join
from ampctx.optimizers import (
    LARC,
    FusedAdagrad,
    FusedAdam,
    FusedLion,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
    SplitMasters,
)

AdamW = torch.optim.AdamW


class Run:
    """A small model under amp."""

    def __init__(self, make, master_weights, seed=0, **options):
        self.model, self.session = mlp(seed, 16, 8, 4), AmpSession()
        self.former = [p.detach().clone() for p in self.model.parameters()]
        self.options = {"master_weights": master_weights, **options}
        _, self.optimizer = start(self.session, "O5", make, self.model, **self.options)

    def train(self, first, end):
        train(self.session, self.model, self.optimizer, end - first, first)
        return self

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]

    def masters(self):
        """The fp32 weights, joined by hand or amp's masters."""
        if self.options["master_weights"] != "split":
            return [p.detach().clone() for p in self.session.master_params(self.optimizer)]
        state = self.optimizer.state
        return [
            join(p.detach(), state[p]["remainder"]) if p.dtype == torch.bfloat16 else p.detach().clone()
            for p in self.model.parameters()
        ]


def adam(params, **options):
    return FusedAdam(params, lr=0.01, **options)


def split_adamw(params):
    return SplitMasters(AdamW, params, lr=0.01)


# --- bits -------------------------------------------------------------------------------------------------------------

PAIRS = {
    "FusedAdam": (adam, adam),
    "own split": (adam, lambda p: adam(p, master_weights="split")),
    "offload": (adam, lambda p: adam(p, offload="cpu")),
    "FusedSGD": (lambda p: FusedSGD(p, lr=0.1, momentum=0.9),) * 2,
    "FusedAdagrad": (lambda p: FusedAdagrad(p, lr=0.01),) * 2,
    "FusedNovoGrad": (lambda p: FusedNovoGrad(p, lr=0.01),) * 2,
    "FusedLion": (lambda p: FusedLion(p, lr=0.01),) * 2,
    "SplitMasters": (lambda p: AdamW(p, lr=0.01), split_adamw),
}


def has_ties(run):
    return any(((w.view(torch.int32) & 0xFFFF) == 0x8000).any() for w in run.masters())


def without_ties(make, master_weights):
    """The first seed for which no master lies half way between two bf16 numbers, and the states of each step."""
    for seed in range(20):
        run = Run(make, master_weights, seed)
        steps = [(run.weights(), run.masters())]
        for step in range(20):
            if has_ties(run.train(step, step + 1)):
                break
            steps.append((run.weights(), run.masters()))
        else:
            return seed, steps
    raise AssertionError("every run had a master half way between two bf16 numbers")


@pytest.mark.parametrize("name", PAIRS)
def test_steps_have_the_bits_of_fp32_masters(name):
    plain, split = PAIRS[name]
    # "split" rounds ties away from zero, the cast to even.
    seed, expected = without_ties(plain, None)
    run = Run(split, "split", seed)
    assert not torch.equal(run.former[0].bfloat16().float(), run.former[0])
    for step, (weights, masters) in enumerate(expected):
        assert_same(run.weights(), weights)
        assert_same(run.masters(), masters)
        run.train(step, step + 1)
    assert [p.dtype for p in run.weights()] == [torch.bfloat16] * 2 + [torch.float32] * 2 + [torch.bfloat16] * 2
    assert ["remainder" in run.optimizer.state[p] for p in run.model.parameters()] == [1, 1, 0, 0, 1, 1]


def test_a_weight_half_way_between_two_numbers_rounds_away_and_stays_exact():
    half_way, session = 1 + 2**-8, AmpSession()
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, half_way)
    _, _optimizer = start(session, "O5", adam, model, master_weights="split")
    assert model.weight.item() == 1 + 2**-7
    assert session.master_state_dict(model)["weight"].item() == half_way
    session.reset()
    assert model.weight.item() == half_way


def test_bf16_weights_and_frozen_ones_have_no_remainder():
    session = AmpSession()
    session.allow_incoming_model_not_fp32 = True
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4))
    model[1].weight.requires_grad_(False)
    optimizer = adam(model.parameters())
    session.initialize(model, optimizer, opt_level="O5", master_weights="split", verbosity=0)
    assert list(optimizer.state) == [model[1].bias]
    model[1].weight.requires_grad_()
    backward(session, model(torch.ones(2, 4)).sum(), optimizer)
    optimizer.step()
    assert all("remainder" in optimizer.state[p] for p in model.parameters())


@pytest.mark.parametrize("make", [adam, split_adamw])
def test_state_of_earlier_steps_stays_fp32(make):
    def trained(master_weights, make):
        torch.manual_seed(0)
        model, session = nn.Linear(4, 4), AmpSession()
        optimizer = make(model.parameters())
        for i in range(4):
            if i == 2:
                session.initialize(model, optimizer, opt_level="O5", master_weights=master_weights, verbosity=0)
            model(torch.ones(2, 4) * i).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [optimizer.state[p] for p in session.master_params(optimizer)]
        return list(session.master_state_dict(model).values()), [state["exp_avg"].clone() for state in states]

    plain = adam if make is adam else lambda p: AdamW(p, lr=0.01)
    for found, expected in zip(trained("split", make), trained(None, plain), strict=True):
        assert_same(found, expected)


# --- reset and checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [adam, split_adamw])
def test_reset_gives_the_fp32_weights_back(make):
    run = Run(make, "split")
    run.session.reset()
    assert_same(run.weights(), run.former)
    assert not run.optimizer.state
    assert getattr(run.optimizer, "master_weights", False) is False

    run.session.initialize(run.model, run.optimizer, opt_level="O5", verbosity=0, **run.options)
    expected = run.train(0, 3).masters()
    run.session.reset()
    assert_same(run.weights(), expected)
    assert not any("remainder" in state for state in run.optimizer.state.values())


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("make", [adam, split_adamw])
def test_state_dicts_resume_to_the_bit(make, steps):
    run = Run(make, "split").train(0, steps)
    saved = [copy.deepcopy(each.state_dict()) for each in (run.model, run.optimizer, run.session)]
    resumed = Run(make, "split", seed=1)
    for each, state in zip((resumed.model, resumed.optimizer, resumed.session), saved, strict=True):
        each.load_state_dict(state)
    for each in (run, resumed):
        each.train(steps, steps + 3)
    assert_same(resumed.weights(), run.weights())
    assert_same(resumed.masters(), run.masters())


# --- errors -----------------------------------------------------------------------------------------------------------

REFUSED = {
    "torch": (lambda p: AdamW(p), {}, r"AdamW\) keeps no split masters. Pass .*SplitMasters\(torch.optim.AdamW"),
    "LARC": (lambda p: LARC(adam(p)), {}, r"LARC\) keeps no split masters.*leave master_weights at None"),
    "own dtype": (lambda p: FusedMixedPrecisionLamb(p), {}, r"FusedMixedPrecisionLamb\) keeps no split masters"),
    "own masters": (lambda p: adam(p, master_weights=True), {}, r"has master_weights=True.*Leave that out"),
    "kahan": (lambda p: adam(p, write_back="kahan"), {}, r"has write_back='kahan'.*Leave that out"),
    "fp16": (adam, {"opt_level": "O2"}, r"master_weights='split' keeps .* this is O2 .* Use O5"),
    "autocast": (adam, {"opt_level": "O4"}, r"master_weights='split' keeps .* this is O4 .* Use O5"),
    "no cast": (adam, {"cast_model_type": False}, r"with cast_model_type=False. Use O5, and leave"),
    "fp16 cast": (adam, {"cast_model_type": torch.float16}, r"with cast_model_type=torch.float16"),
    "string": (adam, {"master_weights": "splitted"}, r"is 'splitted', expected True, False, 'split' \(at O5\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_change_nothing(name):
    make, options, match = REFUSED[name]
    model = nn.Linear(4, 4)
    optimizer = make(model.parameters())
    former, attributes = copy.deepcopy(model.state_dict()), dict(vars(optimizer))
    options = {"opt_level": "O5", "master_weights": "split", "verbosity": 0, **options}
    with pytest.raises((TypeError, ValueError), match=match):
        AmpSession().initialize(model, optimizer, **options)
    assert_same(model.state_dict(), former)
    assert vars(optimizer) == attributes
    assert not optimizer.state


def test_a_parameter_of_two_optimizers_or_without_values_is_refused():
    model, session, options = nn.Linear(4, 4), AmpSession(), {"opt_level": "O5", "master_weights": "split"}
    with pytest.raises(RuntimeError, match=r"of shape \(4, 4\) is in two optimizers.*Pass each parameter to one"):
        session.initialize(model, [adam(model.parameters()), adam([model.weight])], verbosity=0, **options)
    lazy = nn.LazyLinear(4)
    with pytest.raises(RuntimeError, match="of a lazy module, which has no values yet. Run one forward"):
        session.initialize(lazy, adam(lazy.parameters()), verbosity=0, **options)
    assert model.weight.dtype == torch.float32
