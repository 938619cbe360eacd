"""A whole iteration, scale_loss included, recorded once and replayed: bit for bit what eager runs do."""

import contextlib

import pytest
import torch
from kit import backward, muon
from tape import Tape
from torch import nn

from ampctx import clip_grad_norm_, optimizers
from ampctx.amp import AmpSession

OPTIMIZERS = {
    "FusedAdam": lambda p: optimizers.FusedAdam(p, lr=0.01, capturable=True),
    "FusedSGD": lambda p: optimizers.FusedSGD(p, lr=0.01, momentum=0.9, capturable=True),
    "FusedAdagrad": lambda p: optimizers.FusedAdagrad(p, lr=0.01, capturable=True),
    "FusedLAMB": lambda p: optimizers.FusedLAMB(p, lr=0.01, capturable=True),
    "FusedMixedPrecisionLamb": lambda p: optimizers.FusedMixedPrecisionLamb(p, lr=0.01),
    "FusedNovoGrad": lambda p: optimizers.FusedNovoGrad(p, lr=0.01, capturable=True),
    "FusedMuon": lambda p: muon(p, capturable=True),
    "FusedAdam-lr-tensor": lambda p: optimizers.FusedAdam(p, lr=torch.tensor(0.01)),
    "torch-fused-Adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), fused=True),
}
WITH_LR_ON_THE_CPU = {"FusedAdam-lr-tensor", "torch-fused-Adam"}
WARMUP, REPLAYS = 3, 12


class Loop:
    """A training loop whose input lies in tensors of its own, as a captured one's must."""

    def __init__(self, make, level, device="cpu", max_norm=None):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3)).to(device)
        self.session = AmpSession()
        self.optimizer = make(self.model.parameters())
        self.max_norm = max_norm
        self.session.initialize(
            self.model, self.optimizer, opt_level=level, loss_scale="dynamic", max_loss_scale=2.0**10, verbosity=0
        )
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
        state = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        params = [*self.model.parameters(), *(p for g in self.optimizer.param_groups for p in g["params"])]
        return [t.detach().clone() for t in params + state], self.session.state_dict()


def compare(eager, replayed):
    (tensors, scale), (others, other_scale) = eager.result(), replayed.result()
    assert scale == other_scale
    assert len(tensors) == len(others)
    for a, b in zip(tensors, others, strict=True):
        assert torch.isfinite(a).all()
        assert torch.equal(a, b)
    assert eager.session.skipped_steps(eager.optimizer) == replayed.session.skipped_steps(replayed.optimizer) == 3


@pytest.mark.full(but=24)
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["", "clip"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_replayed_operators(make, level, max_norm):
    eager, replayed = Loop(make, level, max_norm=max_norm), Loop(make, level, max_norm=max_norm)
    for i in range(WARMUP + REPLAYS):
        eager.feed(i)
        eager.iterate()
    for i in range(WARMUP):
        replayed.feed(i)
        replayed.iterate()
    for i in range(WARMUP, WARMUP + REPLAYS):
        replayed.feed(i)
        if i == WARMUP:
            with Tape() as tape:
                replayed.iterate()
        else:
            tape.replay()
    compare(eager, replayed)
    for loop in (eager, replayed):
        loop.session.reset()


def _a_block_that_raises(loop):
    with contextlib.suppress(ZeroDivisionError), loop.session.scale_loss(loop.input.sum(), loop.optimizer):
        raise ZeroDivisionError


def _a_block_without_an_update(loop):
    loss = loop.model(loop.input).float().sum()
    backward(loop.session, loss, loop.optimizer, delay_overflow_check=True)
    loop.optimizer.zero_grad()


@pytest.mark.parametrize("before", [_a_block_that_raises, _a_block_without_an_update])
def test_the_scale_of_before_is_not_recorded(before):
    eager, replayed = (Loop(OPTIMIZERS["FusedAdam"], "O2") for _ in range(2))
    for loop in (eager, replayed):
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
    for loop in (eager, replayed):
        loop.session.reset()


@pytest.mark.cuda
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["", "clip"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - WITH_LR_ON_THE_CPU))
def test_cuda_graph(name, level, max_norm):
    make = OPTIMIZERS[name]
    eager, captured = (Loop(make, level, "cuda", max_norm) for _ in range(2))
    for i in range(WARMUP + REPLAYS):
        eager.feed(i)
        eager.iterate()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(WARMUP):
            captured.feed(i)
            captured.iterate()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    captured.feed(WARMUP)
    with torch.cuda.graph(graph):
        captured.iterate()
    for i in range(WARMUP, WARMUP + REPLAYS):
        captured.feed(i)
        graph.replay()
    compare(eager, captured)
    for loop in (eager, captured):
        loop.session.reset()


@pytest.mark.cuda
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad"])
def test_no_synchronization(name, level):
    """100 iterations with injected infs under torch's own watch."""
    loop = Loop(OPTIMIZERS[name], level, "cuda", max_norm=0.5)
    inputs = torch.randn(105, 8, 6, device="cuda")
    poison = torch.tensor([float("inf") if i % 5 == 4 else 1.0 for i in range(105)], device="cuda")
    for i in range(105):
        loop.input, loop.poison = inputs[i], poison[i]
        torch.cuda.set_sync_debug_mode("error" if i >= 5 else "default")
        try:
            loop.iterate()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert loop.session.skipped_steps(loop.optimizer) == 21
    loop.session.reset()
