"""A whole iteration, scale_loss included, recorded once and replayed: bit for bit what eager runs do."""

import contextlib
from functools import partial

import pytest
import torch
from kit import OPTIMIZERS, assert_same, backward, no_host_sync, snapshot, start
from tape import Tape
from torch import nn

from ampctx import clip_grad_norm_
from ampctx.amp import AmpSession

CAPTURABLE = ("FusedAdam", "FusedSGD", "FusedAdagrad", "FusedLAMB", "FusedNovoGrad", "FusedMuon")
MAKE = {
    **{name: partial(OPTIMIZERS[name], capturable=True) for name in CAPTURABLE},
    "FusedAdam-lr-tensor": lambda p: OPTIMIZERS["FusedAdam"](p, lr=torch.tensor(0.01)),
    "Adam-fused": lambda p: OPTIMIZERS["Adam-fused"](p, lr=torch.tensor(0.01)),
}
WITH_LR_ON_THE_CPU = {"FusedAdam-lr-tensor", "Adam-fused"}
WARMUP, REPLAYS = 3, 12


class Loop:
    """A training loop whose input lies in tensors of its own, as a captured one's must."""

    def __init__(self, make, level, device="cpu", max_norm=None):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3)).to(device)
        self.session, self.max_norm = AmpSession(), max_norm
        scale = {"loss_scale": "dynamic", "max_loss_scale": 2.0**10}
        _, self.optimizer = start(self.session, level, make, self.model, **scale)
        self.input = torch.zeros(8, 6, device=device)
        self.poison = torch.ones((), device=device)
        self.loss = None

    def feed(self, i):
        self.input.copy_(torch.randn(8, 6, generator=torch.Generator().manual_seed(i)))
        self.poison.fill_(float("inf") if i % 5 == 4 else 1.0)

    def iterate(self):
        out = self.model(self.input).float()
        self.loss = (out.square().mean() + out.sum().sin()) * self.poison
        backward(self.session, self.loss, self.optimizer)
        if self.max_norm is not None:
            clip_grad_norm_(self.session.master_params(self.optimizer), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def result(self):
        return snapshot(self.optimizer, self.model), self.session.state_dict()


def compare(eager, replayed):
    """At the end of both."""
    assert_same(replayed.result(), eager.result())
    assert all(torch.isfinite(t).all() for t in eager.result()[0])
    for loop in (eager, replayed):
        assert loop.session.skipped_steps(loop.optimizer) == 3
        loop.session.reset()


def recorded_and_replayed(*loops, before=lambda loop: None):
    """The first loop runs eagerly, the second replays its first iteration after those of the warm-up and ``before``."""
    eager, replayed = loops
    for loop in loops:
        for i in range(WARMUP):
            loop.feed(i)
            loop.iterate()
        before(loop)
    for i in range(WARMUP, WARMUP + REPLAYS):
        eager.feed(i)
        eager.iterate()
        replayed.feed(i)
        if i == WARMUP:
            with Tape() as tape:
                replayed.iterate()
        else:
            tape.replay()
    compare(eager, replayed)


@pytest.mark.full(but=24)
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["", "clip"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_replayed_operators(make, level, max_norm):
    recorded_and_replayed(*(Loop(make, level, max_norm=max_norm) for _ in range(2)))


def _a_block_that_raises(loop):
    with contextlib.suppress(ZeroDivisionError), loop.session.scale_loss(loop.input.sum(), loop.optimizer):
        raise ZeroDivisionError


def _a_block_without_an_update(loop):
    loss = loop.model(loop.input).float().sum()
    backward(loop.session, loss, loop.optimizer, delay_overflow_check=True)
    loop.optimizer.zero_grad()


@pytest.mark.parametrize("before", [_a_block_that_raises, _a_block_without_an_update])
def test_the_scale_of_before_is_not_recorded(before):
    recorded_and_replayed(*(Loop(MAKE["FusedAdam"], "O2") for _ in range(2)), before=before)


def graph_of(loop, feed):
    """The iteration after WARMUP others, in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(WARMUP):
            feed(i)
            loop.iterate()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    feed(WARMUP)
    with torch.cuda.graph(graph, stream=side):  # that of the last loss, which the loop holds
        loop.iterate()
    return graph


@pytest.mark.cuda
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["", "clip"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("name", sorted(MAKE.keys() - WITH_LR_ON_THE_CPU))
def test_cuda_graph(name, level, max_norm):
    make = MAKE[name]
    eager, captured = (Loop(make, level, "cuda", max_norm) for _ in range(2))
    for i in range(WARMUP + REPLAYS):
        eager.feed(i)
        eager.iterate()
    graph = graph_of(captured, captured.feed)
    for i in range(WARMUP, WARMUP + REPLAYS):
        captured.feed(i)
        graph.replay()
    compare(eager, captured)


@pytest.mark.cuda
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad"])
def test_no_synchronization(name, level):
    """100 iterations with injected infs under torch's own watch."""
    loop = Loop(MAKE[name], level, "cuda", max_norm=0.5)
    inputs = torch.randn(105, 8, 6, device="cuda")
    poison = torch.tensor([float("inf") if i % 5 == 4 else 1.0 for i in range(105)], device="cuda")
    for i in range(105):
        loop.input, loop.poison = inputs[i], poison[i]
        with no_host_sync() if i >= 5 else contextlib.nullcontext():
            loop.iterate()
    assert loop.session.skipped_steps(loop.optimizer) == 21
    loop.session.reset()


@pytest.mark.cuda
def test_a_thousand_replays_skip_and_grow_by_the_rule(monkeypatch):
    """The 2,000th clean update in a row doubles the scale, 10 overflows halve it; bit for bit as run eagerly."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats a result on another stream with one size
    inputs = torch.randn(1003, 8, 6, device="cuda")
    poison = torch.tensor([float("inf") if i % 97 == 96 else 1.0 for i in range(1003)], device="cuda")
    loops = [Loop(OPTIMIZERS["FusedAdam"], "O2", "cuda", max_norm=0.5) for _ in range(2)]
    for loop in loops:
        state = loop.session.state_dict(masters=True)
        state["loss_scaler0"] = {"loss_scale": 2.0**9, "unskipped": 1990}
        loop.session.load_state_dict(state)

        def feed(i, loop=loop):
            loop.input.copy_(inputs[i])
            loop.poison.copy_(poison[i])

        iterate, first = (loop.iterate, 0) if loop is loops[0] else (graph_of(loop, feed).replay, WARMUP)
        for i in range(first, 1003):
            feed(i)
            iterate()
        assert loop.session.skipped_steps(loop.optimizer) == 10
        assert loop.session.state_dict()["loss_scaler0"]["loss_scale"] == 1.0
    (tensors, _), (others, _) = (loop.result() for loop in loops)
    for a, b in zip(tensors, others, strict=True):
        assert torch.isfinite(a).all()
        assert torch.equal(a, b)
    for loop in loops:
        loop.session.reset()
