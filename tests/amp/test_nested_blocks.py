"""Blocks inside of blocks: the gradients are those of a plain backward of each loss, at any depth."""

import random

import pytest
import torch
from kit import every_level
from torch import nn

from ampctx import optimizers
from ampctx.amp import AmpSession

MAKE = {
    "plain": lambda params: torch.optim.SGD(params, lr=0.0),
    "ampctx": lambda params: optimizers.FusedSGD(params, lr=0.0),
}


class Interrupted(Exception):
    pass


class Sums:
    """One model with weights of 1, whose gradient of ``value * its output`` is ``value`` everywhere."""

    def __init__(self, level, kind, scale=4.0):
        self.model = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            self.model.weight.fill_(1.0)
        self.session = AmpSession()
        self.optimizer = MAKE[kind](self.model.parameters())
        options = {"loss_scale": scale, "verbosity": 0}
        self.session.initialize(self.model, self.optimizer, opt_level=level, **options)

    def loss(self, value):
        return self.model(torch.ones(1, 2)).float().sum() * value

    def block(self, value, **options):
        return self.session.scale_loss(self.loss(value), self.optimizer, **options)

    def gradient(self):
        (p,) = self.session.master_params(self.optimizer)
        return None if p.grad is None else p.grad.float().unique().tolist()


class Walk:
    """Blocks at random, and the plain sum that they have to come to."""

    def __init__(self, rng, sums):
        self.rng, self.sums = rng, sums
        self.expected = 0.0
        # Sums of these are exact in bf16.
        self.values = [float(rng.randint(1, 4)) for _ in range(14)]

    def block(self, depth):
        """A block with up to two inside. Those that end inside count even where it raises."""
        if not self.values:
            return
        value = self.values.pop()
        raises, delays = self.rng.random() < 0.3, self.rng.random() < 0.3
        before, after = self.rng.random() < 0.5, self.rng.random() < 0.8
        inner = [None] * self.rng.choice([0, 1, 1, 2] if depth < 4 else [0])
        try:
            with self.sums.block(value, delay_unscale=delays) as scaled:
                if before:
                    scaled.backward(retain_graph=True)
                for _ in inner:
                    self.block(depth + 1)
                if raises:
                    raise Interrupted
                if after:
                    scaled.backward()
        except Interrupted:
            return
        self.expected += value * (before + after)


@pytest.mark.parametrize("kind", MAKE)
@every_level
def test_a_random_walk_comes_to_the_plain_sum(level, kind):
    for seed in range(8):
        rng = random.Random(seed)
        sums = Sums(level, kind, scale=rng.choice([1.0, 2.0, 4.0]))
        walk = Walk(rng, sums)
        for _ in range(3):
            walk.block(0)
        with sums.block(1.0) as last:  # ends what delayed blocks have left
            last.backward()
        assert sums.gradient() == [walk.expected + 1.0], seed
        sums.session.reset()
