"""The tail of a training step, from the end of backward to the weights being ready: ampctx beside others.

    python benchmarks/tail.py --model resnet50 --opt-level O2 --optimizer FusedAdam --clip --csv tail.csv

Timed for ampctx: the exit of ``amp.scale_loss``, with ``--clip`` ``ampctx.clip_grad_norm_`` over the master parameters,
and the step. The peers step with the optimizers of peers.py:

* O1: ``torch.amp.GradScaler`` and the optimizer on fp32 parameters;
* O2: the same on fp32 masters, between a copy of the fp16 gradients into theirs and one of the masters into the model;
* O5: the two copies and the bf16 model without a scaler, as O5 does not scale.

With ``--ranks`` (at O1) all sides step the DTensors of ``fully_shard`` on one of so many ranks, whose collectives do
nothing: the host time of this rank alone. Clipping, the peers call ``unscale_`` and ``torch.nn.utils.clip_grad_norm_``;
otherwise fused optimizers unscale while they step, the fastest way torch has. All sides but those with 8 bits of
state must end with the same weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from measuring import Bandwidth, Clock, Figures, add_against, figures, interleave, options, parse, report
from networks import MODELS
from peers import ATOL, INEXACT, OPTIMIZERS, RTOL, STATES, Make, ours, peer
from torch import Tensor

from ampctx import clip_grad_norm_
from ampctx.amp import AmpSession

LOW_PRECISION = {"O1": None, "O2": torch.float16, "O5": torch.bfloat16}
MAX_NORM = 1.0


class AmpctxTail:
    """Model and optimizer after ``amp.initialize``; ``step`` is a user's loop without forward and backward."""

    def __init__(self, model: torch.nn.Module, opt_level: str, optimizer: str, clip: bool) -> None:
        self.params = list(model.parameters())
        self.clip = clip
        self.session = AmpSession()
        made = ours(optimizer, model.parameters())
        _, self.optimizer = self.session.initialize(model, made, opt_level=opt_level, verbosity=0)

    @property
    def weights(self) -> list[Tensor]:
        return list(self.session.master_params(self.optimizer))

    @property
    def scale(self) -> float:
        return self.session.state_dict()["loss_scaler0"]["loss_scale"]

    def step(self, grads: list[Tensor], clock: Clock) -> dict[str, float]:
        """Milliseconds of entering and leaving ``scale_loss``, of clipping, of the step and of ``zero_grad``."""
        loss = torch.ones((), device=self.params[0].device)
        clock.settle()
        begin = clock.mark()
        with self.session.scale_loss(loss, self.optimizer):
            entered = clock.mark()
            for param, grad in zip(self.params, grads, strict=True):
                param.grad = grad
            clock.settle()
            start = clock.mark()
        unscaled = clock.mark()
        if self.clip:
            clip_grad_norm_(self.session.master_params(self.optimizer), MAX_NORM)
        clipped = clock.mark()
        self.optimizer.step()
        end = clock.mark()
        self.optimizer.zero_grad()
        cleared = clock.mark()
        return {
            "enter": clock.between(begin, entered),
            "exit": clock.between(start, unscaled),
            "clip": clock.between(unscaled, clipped),
            "step": clock.between(clipped, end),
            "zero_grad": clock.between(end, cleared),
        }


class TorchTail:
    """The same with torch alone: ``GradScaler``, the optimizer, and for a 16-bit model fp32 masters kept by hand."""

    def __init__(self, model: torch.nn.Module, opt_level: str, make: Make, clip: bool) -> None:
        self.clip = clip
        device = next(model.parameters()).device
        dtype = LOW_PRECISION[opt_level]
        norms = (module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d))
        kept = {p for norm in norms for p in norm.parameters()}
        self.weights = [p.detach().clone() for p in model.parameters()]
        self.params = [
            p.detach().to(dtype) if dtype and p not in kept else w
            for p, w in zip(model.parameters(), self.weights, strict=True)
        ]
        self.optimizer = make(self.weights)
        self.scaler = torch.amp.GradScaler(device.type, enabled=opt_level != "O5")
        self.copied = [i for i, (p, w) in enumerate(zip(self.params, self.weights, strict=True)) if p is not w]
        self.master_grads = [torch.empty_like(self.weights[i]) for i in self.copied]

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()

    def step(self, grads: list[Tensor], clock: Clock) -> dict[str, float]:
        """Milliseconds of multiplying the loss, of the step with all that belongs to it, and of ``zero_grad``."""
        loss = torch.ones((), device=self.params[0].device)
        clock.settle()
        begin = clock.mark()
        self.scaler.scale(loss)
        entered = clock.mark()
        for weight, grad in zip(self.weights, grads, strict=True):
            weight.grad = grad if grad.dtype == weight.dtype else None
        half_grads, half_params = [grads[i] for i in self.copied], [self.params[i] for i in self.copied]
        masters = [self.weights[i] for i in self.copied]
        clock.settle()
        start = clock.mark()
        if self.copied:
            # No public call of torch copies a list at once; tensor by tensor its GPU side would be slower.
            torch._foreach_copy_(self.master_grads, half_grads)
            for master, grad in zip(masters, self.master_grads, strict=True):
                master.grad = grad
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.weights, MAX_NORM)
        self.scaler.step(self.optimizer)
        if self.copied:
            torch._foreach_copy_(half_params, masters)
        self.scaler.update()
        end = clock.mark()
        self.optimizer.zero_grad()
        cleared = clock.mark()
        return {
            "enter": clock.between(begin, entered),
            "step": clock.between(start, end),
            "zero_grad": clock.between(end, cleared),
        }


def floor_bytes(params: list[Tensor], optimizer: str) -> int:
    """What a tail has to move at the least: the finite check sees all gradients before the first weight moves.

    Check, which gives the norm for clipping too: read the gradient. Step: read it again, read and write the fp32 weight
    and the state, write the model's 16-bit weight where there is one.
    """
    of_step = 8 + 8 * STATES[optimizer]
    return sum(part(p).numel() * (of_step + p.itemsize * (2 if p.dtype == torch.float32 else 3)) for p in params)


def shard(model: torch.nn.Module, ranks: int) -> None:
    """Spreads the parameters over ranks of which there is only this one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    fully_shard(model, mesh=init_device_mesh(next(model.parameters()).device.type, (ranks,)))


def part(t: Any) -> Tensor:
    """What this rank has of a DTensor."""
    return t.detach().to_local() if hasattr(t, "to_local") else t.detach()


def like(p: Any, values: Tensor) -> Tensor:
    """A DTensor laid out as ``p``, as ``fully_shard`` makes gradients: with its own record of the layout."""
    return type(p.detach())(values, p._spec, requires_grad=False) if hasattr(p, "to_local") else values


def gradients(params: list[Tensor], seed: int) -> list[Tensor]:
    """Scaled gradients as backward would leave them, in the dtype of each parameter."""
    torch.manual_seed(seed)
    return [like(p, torch.randn(part(p).shape, device=p.device).to(p.dtype)) for p in params]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All elements of this rank end to end, in fp32; a copy."""
    return torch.cat([part(t).float().reshape(-1) for t in tensors])


def check_same_weights(ours: AmpctxTail, theirs: TorchTail) -> None:
    """AssertionError where the two sides' fp32 weights differ beyond RTOL, ATOL."""
    mine, others = flat(ours.weights), flat(theirs.weights)
    torch.testing.assert_close(mine, others, rtol=RTOL, atol=ATOL)
    rounded = (m.detach().to(p.dtype) for p, m in zip(ours.params, ours.weights, strict=True))
    assert torch.equal(flat(ours.params), flat(rounded)), "a model weight is not its rounded master"


def check_overflow_skips(side: AmpctxTail | TorchTail, grads: list[Tensor], clock: Clock) -> None:
    before, scale = flat(side.weights), side.scale
    bad = [like(g, part(g).clone()) for g in grads]
    next(part(g) for g in reversed(bad) if part(g).numel()).view(-1)[-1] = float("inf")
    side.step(bad, clock)
    assert side.scale == scale / 2, f"the scale after an overflow is {side.scale}, before it was {scale}"
    assert torch.equal(flat(side.weights), before), "an overflow moved a weight"


class Tails:
    """ampctx and its peers with equal weights, and the same gradients for all."""

    def __init__(self, make: Callable[[], torch.nn.Module], args: argparse.Namespace, peers: dict[str, Make]) -> None:
        self.device, self.ranks = torch.device(args.device), getattr(args, "ranks", 0)
        torch.manual_seed(0)
        model = make().to(self.device)
        if self.ranks:
            shard(model, self.ranks)
        self.peers = {who: TorchTail(model, args.opt_level, make, args.clip) for who, make in peers.items()}
        self.ours = AmpctxTail(model, args.opt_level, args.optimizer, args.clip)
        self.sides = {"ampctx": self.ours, **self.peers}
        self.sets = [gradients(self.ours.params, seed) for seed in range(3)]

    def step(self, who: str, round_number: int, clock: Clock) -> dict[str, float]:
        # Fresh copies: every side may unscale in place.
        grads = [like(g, part(g).clone()) for g in self.sets[round_number % len(self.sets)]]
        return self.sides[who].step(grads, clock)

    def check(self) -> None:
        """AssertionError where weights differ, or a step that overflows moves one."""
        for who, theirs in self.peers.items():
            if who not in INEXACT:
                check_same_weights(self.ours, theirs)
        if any(theirs.scaler.is_enabled() for theirs in self.peers.values()):
            for side in self.sides.values():
                check_overflow_skips(side, self.sets[0], Clock(self.device, host=True, flush=False))

    def close(self) -> None:
        self.ours.session.reset()
        if self.ranks:
            torch.distributed.destroy_process_group()


def peers_of(parser: argparse.ArgumentParser, optimizer: str, args: argparse.Namespace) -> dict[str, Make]:
    try:
        return {against: peer(optimizer, against, args.device) for against in args.against}
    except LookupError as error:
        parser.error(f"--against: {error}")


def measure(tails: Tails, args: argparse.Namespace) -> Figures:
    clock = Clock(tails.device)
    bandwidth = Bandwidth(sum(part(p).numel() for p in tails.ours.params), tails.device, clock)

    def step(who: str, round_number: int) -> dict[str, float]:
        found = tails.step(who, round_number, clock)
        parts = {part: found[part] for part in ("exit", "clip", "step") if part in found}
        return {"time": sum(parts.values()), **parts}

    samples = interleave(tails.sides, step, args.rounds, bandwidth)
    tails.check()
    return figures("tail", samples, floor_bytes(tails.ours.params, args.optimizer))


def parser() -> argparse.ArgumentParser:
    found = options(__file__, __doc__)
    found.add_argument("--model", default="resnet50", choices=list(MODELS))
    found.add_argument("--opt-level", default="O2", choices=list(LOW_PRECISION))
    found.add_argument("--optimizer", default="FusedAdam", choices=OPTIMIZERS)
    found.add_argument("--ranks", type=int, default=0, help="of fully_shard; 0, the default: plain tensors")
    found.add_argument("--clip", action="store_true", help=f"clip the norm of the gradients to {MAX_NORM:g}")
    add_against(found)
    return found


NAMED = ("device", "model", "opt_level", "optimizer")  # options that the name of a report always has


def main(arguments: list[str] | None = None) -> None:
    args = parse(options := parser(), arguments)
    if args.ranks and (args.opt_level != "O1" or args.ranks < 0):
        options.error("--ranks: a number of ranks at --opt-level O1")
    tails = Tails(MODELS[args.model], args, peers_of(options, args.optimizer, args))
    report(options, args, measure(tails, args), *NAMED)
    tails.close()


if __name__ == "__main__":
    sys.exit(main())
