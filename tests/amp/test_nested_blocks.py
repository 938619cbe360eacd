"""Blocks inside of blocks: the gradients are those of a plain backward of each loss, at any depth."""

import random
from functools import partial

import pytest
import torch
from kit import INF, START, backward, every_level, grads, probe

from ampctx import optimizers


class Interrupted(Exception):
    pass


class Walk:
    """Blocks at random, and the plain sum that they have to come to."""

    def __init__(self, rng, block):
        self.rng, self.block_of = rng, block
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
            with self.block_of(value, delay_unscale=delays) as scaled:
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


@pytest.mark.parametrize("make", [torch.optim.SGD, optimizers.FusedSGD], ids=["plain", "ampctx"])
@every_level
def test_a_random_walk_comes_to_the_plain_sum(session, level, make):
    for seed in range(8):
        rng = random.Random(seed)
        scale = rng.choice([1.0, 2.0, 4.0])
        model, optimizer = probe(session, level, make=partial(make, lr=0.0), loss_scale=scale)

        def block(value, model=model, optimizer=optimizer, **options):
            return session.scale_loss(model.loss(value), optimizer, **options)

        walk = Walk(rng, block)
        for _ in range(3):
            walk.block(0)
        with block(1.0) as last:  # ends what delayed blocks have left
            last.backward()
        assert all(grad.eq(walk.expected + 1.0).all() for grad in grads(session, optimizer)), seed
        session.reset()


@every_level
def test_a_block_after_an_overflow_inside_has_the_new_scale(session, level):
    model, optimizer = probe(session, level, loss_scale="dynamic", init_scale=START)
    with session.scale_loss(model.loss(1.0), optimizer):
        backward(session, model.loss(INF), optimizer)
        with session.scale_loss(torch.ones(()), optimizer) as scaled:
            assert scaled == START / 2


@every_level
def test_a_load_between_blocks_leaves_the_gradients_of_the_one_around(session, level):
    model, optimizer = probe(session, level, loss_scale=4.0)
    with session.scale_loss(model.loss(1.0), optimizer) as scaled:
        scaled.backward(retain_graph=True)
        model.load_state_dict(model.state_dict())
        backward(session, model.loss(2.0), optimizer)
    assert all(grad.eq(3.0).all() for grad in grads(session, optimizer))
