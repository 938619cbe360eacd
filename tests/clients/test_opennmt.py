"""OpenNMT-py's ``Optimizer`` and its ``FusedAdam``, which calls ``fused_adam_cuda``."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from training import assert_same_weights, batches, by_hand, loss_of, on_levels

RATE, MAX_NORM = 0.05, 1.0


def without_init(package):
    """Makes modules of a package importable without its ``__init__``, which imports the parts that read text."""
    spec = ModuleSpec(package, None, is_package=True)
    spec.submodule_search_locations = list(find_spec(package).submodule_search_locations)
    sys.modules[package] = module_from_spec(spec)


without_init("onmt")
without_init("onmt.utils")
optimizers = import_module("onmt.utils.optimizers")


class Translator(nn.Module):
    """The shape of their models: the generator is a model of its own, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.generator = nn.Linear(4, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.generator(torch.relu(self.body(x)))


def options(level):
    return SimpleNamespace(
        optim="fusedadam",
        learning_rate=RATE,
        adam_beta1=0.9,
        adam_beta2=0.999,
        apex_opt_level=level,
        loss_scale=0,
        model_dtype="fp16",
        train_from="",
        max_grad_norm=MAX_NORM,
        decay_method="",
        start_decay_steps=None,
        decay_steps=None,
    )


def fit(model, optimizer, data):
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


@on_levels
def test_the_optimizer_does_what_the_loop_does(level):
    data, expected = batches(12), Translator()
    adam = optimizers.FusedAdam(expected.parameters(), lr=RATE, betas=[0.9, 0.999])
    losses, after = by_hand(expected, adam, data, level, max_norm=MAX_NORM)

    model = Translator()
    found = fit(model, optimizers.Optimizer.from_opt(model, options(level)), data)
    assert_same_weights(model, after)
    assert found == pytest.approx(losses)
    assert found[-1] < found[0]


def test_a_half_model_under_the_old_fp16_optimizer():
    """Their way without amp: a model in fp16, and ``apex.contrib.optimizers.FP16_Optimizer`` around the optimizer."""
    model = Translator().half()
    optimizer = optimizers.Optimizer.from_opt(model, options(None))
    losses = fit(model, optimizer, [(x.half(), y) for x, y in batches(12)])
    assert losses[-1] < losses[0]
