"""Each op on the tensors of a model, beside what torch has for the same work.

    python benchmarks/ops.py --model resnet50 --optimizer FusedAdam,FusedSGD --csv ops.csv

One case for each op, and for each optimizer its step on fp32 weights and gradients. Inputs are put back before each
call, outside the time taken; the results of all sides are compared at the end. For some torch has private calls alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from measuring import Bandwidth, Clock, Figures, add_against, add_several, figures, interleave, options, parse, report
from networks import MODELS, shapes
from peers import ATOL, INEXACT, OPTIMIZERS, RTOL, STATE_DTYPES, STATES, TAKE_STATE_DTYPE, ours
from tail import gradients, peers_of
from torch import Tensor

import ampctx
from ampctx import ops

SCALE = 4.0


@dataclass
class Side:
    """One way to do the work: the call that is timed, the tensors it made, what to do before and after.

    A side without a ``result`` is not compared: a bound does other work, and 8 bits of state give other weights.
    """

    run: Callable[[], Any]
    result: Callable[[], list[Tensor]] | None
    before: Callable[[], Any] = lambda: None
    after: Callable[[], Any] = lambda: None


def into(out: list[Tensor], before: list[Tensor], run: Callable[[], Any]) -> Side:
    """A call that writes ``out``, which then starts as ``before`` each time."""
    return Side(run, lambda: out, lambda: torch._foreach_copy_(out, before))


@dataclass
class Op:
    """``bytes_per_element``: what has to be read and written; ``sides``: "ampctx" and others by what they call;
    ``rtol``, ``atol``: how far results may lie apart."""

    bytes_per_element: int
    sides: dict[str, Side]
    rtol: float = 0.0
    atol: float = 0.0


class Inputs:
    """Random tensors of a model's shapes, and a flag, on a device."""

    def __init__(self, model: str, device: torch.device) -> None:
        self.device, self.shapes = device, shapes(model)
        self.elements = sum(torch.Size(shape).numel() for shape in self.shapes)
        self.flag = torch.zeros((), device=device)

    def random(self, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return gradients([torch.empty(shape, dtype=dtype, device=self.device) for shape in self.shapes], seed)

    def empty_twice(self, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
        """A list for each of two sides, allocated in turn: the first list alone would get the scattered memory that
        earlier cases have left."""
        both = [[torch.empty(shape, dtype=dtype, device=self.device) for _ in range(2)] for shape in self.shapes]
        first, second = zip(*both, strict=True)
        return list(first), list(second)


def unscale(inputs: Inputs) -> Op:
    """``GradScaler.unscale_``, torch's and ampctx's: gradients unscaled in place, and inf and nan looked for."""
    grads = inputs.random(0)

    def side(scaler: Any, own: list[Tensor]) -> Side:
        params = [torch.zeros_like(g).requires_grad_() for g in grads]
        for param, grad in zip(params, own, strict=True):
            param.grad = grad
        optimizer = torch.optim.SGD(params)
        scaler.scale(torch.ones((), device=inputs.device))

        def before() -> None:
            torch._foreach_copy_([p.grad for p in params], grads)

        # Without update() a second unscale_ is an error.
        return Side(lambda: scaler.unscale_(optimizer), lambda: [p.grad for p in params], before, after=scaler.update)

    kind, options = inputs.device.type, {"init_scale": SCALE, "growth_interval": 10**6}
    mine, theirs = inputs.empty_twice()
    return Op(
        8,
        {
            "ampctx": side(ampctx.GradScaler(kind, **options), mine),
            "torch.amp.GradScaler.unscale_": side(torch.amp.GradScaler(kind, **options), theirs),
        },
    )


def clip(inputs: Inputs) -> Op:
    """``clip_grad_norm_``, torch's and ampctx's, by a norm that all exceed."""
    grads, both = inputs.random(0), inputs.empty_twice()
    params = [[torch.zeros_like(g).requires_grad_() for g in grads] for _ in both]
    for param, grad in zip(chain(*params), chain(*both), strict=True):
        param.grad = grad
    calls = ampctx.clip_grad_norm_, torch.nn.utils.clip_grad_norm_
    mine, theirs = map(lambda own, of, call: into(own, grads, lambda: call(of, 1.0)), both, params, calls)
    return Op(12, {"ampctx": mine, "torch.clip_grad_norm_": theirs}, 1e-4, 1e-7)


def axpby(inputs: Inputs) -> Op:
    """y = a x + b y in place; ampctx looks for inf and nan as well, torch does not."""
    x, y = inputs.random(0), inputs.random(1)
    mine, theirs = inputs.empty_twice()

    def in_two_passes() -> None:
        torch._foreach_mul_(theirs, 0.25)
        torch._foreach_add_(theirs, x, alpha=0.5)

    return Op(
        12,
        {
            "ampctx": into(mine, y, lambda: ops.multi_tensor_axpby(x, mine, mine, inputs.flag, 0.5, 0.25)),
            "torch._foreach_mul_ and _foreach_add_": into(theirs, y, in_two_passes),
        },
        *(1e-5, 1e-6),  # a x and b y may cancel
    )


def l2norm(dtype: torch.dtype, rtol: float) -> Callable[[Inputs], Op]:
    """The norm of all gradients; ampctx looks for inf and nan as well, torch does not.

    Beside it the sum of one buffer of as many bytes: what reading them takes at the least.
    """

    def make(inputs: Inputs) -> Op:
        grads = inputs.random(0, dtype)
        norms: dict[str, Tensor] = {}
        calls = {
            "ampctx": lambda: ops.multi_tensor_l2norm(grads, inputs.flag)[0],
            "torch.nn.utils.get_total_norm": lambda: torch.nn.utils.get_total_norm(grads).float(),
        }

        def side(who: str) -> Side:
            return Side(lambda: norms.update({who: calls[who]()}), lambda: [norms[who]])

        buffer = torch.ones(inputs.elements * dtype.itemsize // 4, device=inputs.device)
        return Op(dtype.itemsize, {**{who: side(who) for who in calls}, "read": Side(buffer.sum, None)}, rtol)

    return make


def cast(source: torch.dtype, target: torch.dtype) -> Callable[[Inputs], Op]:
    """A copy into another dtype; ampctx looks for inf and nan as well, torch does not."""

    def make(inputs: Inputs) -> Op:
        tensors = inputs.random(0, source)
        mine, theirs = inputs.empty_twice(target)
        return Op(
            source.itemsize + target.itemsize,
            {
                "ampctx": Side(lambda: ops.multi_tensor_scale(tensors, mine, inputs.flag, 1.0), lambda: mine),
                "torch._foreach_copy_": Side(lambda: torch._foreach_copy_(theirs, tensors), lambda: theirs),
            },
        )

    return make


def step(name: str, peers: dict[str, Any]) -> Callable[[Inputs], Op]:
    """The step of an optimizer, without scaling, on fp32 weights; beside torch's, its own with smaller state."""

    def side(inputs: Inputs, make: Callable[[list[Tensor]], Any], grads: list[Tensor]) -> Side:
        params = inputs.random(1)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        return Side(make(params).step, lambda: params)

    def make(inputs: Inputs) -> Op:
        grads = inputs.random(0)
        sides = {"ampctx": side(inputs, lambda params: ours(name, params), grads)}
        sides.update({who: side(inputs, make, grads) for who, make in peers.items()})
        for kind, dtype in STATE_DTYPES.items() if name in TAKE_STATE_DTYPE else ():
            sides[f"{kind} state"] = side(inputs, lambda params, d=dtype: ours(name, params, state_dtype=d), grads)
        for who in sides:
            if who in INEXACT or who.endswith(" state"):
                sides[who].result = None
        return Op(12 + 8 * STATES[name], sides, RTOL, ATOL)

    return make


def cases(optimizers: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Callable[[Inputs], Op]]]:
    half, full = torch.float16, torch.float32
    yield "unscale", unscale
    yield "clip", clip
    yield "axpby", axpby
    yield "l2norm", l2norm(full, 1e-4)
    yield "l2norm fp16", l2norm(half, 2e-3)  # torch rounds it to fp16
    yield "cast fp16 to fp32", cast(half, full)
    yield "cast fp32 to fp16", cast(full, half)
    for name, peers in optimizers.items():
        yield f"{name}.step", step(name, peers)


def measure(
    name: str, make: Callable[[Inputs], Op], inputs: Inputs, bandwidth: Bandwidth, args: argparse.Namespace
) -> Figures:
    op, clock = make(inputs), bandwidth.clock

    def timed(who: str, _: int) -> dict[str, float]:
        side = op.sides[who]
        side.before()
        clock.settle()
        start = clock.mark()
        side.run()
        end = clock.mark()
        side.after()
        return {"time": clock.between(start, end)}

    samples = interleave(op.sides, timed, args.rounds, bandwidth)
    wanted, *others = (side.result() for side in op.sides.values() if side.result)
    for other in others:
        torch.testing.assert_close(wanted, other, rtol=op.rtol, atol=op.atol)
    assert not inputs.flag.item(), "finite input was flagged"
    return figures(name, samples, op.bytes_per_element * inputs.elements)


def parser() -> argparse.ArgumentParser:
    found = options(__file__, __doc__)
    found.add_argument("--model", default="resnet50", choices=list(MODELS))
    add_several(found, "--optimizer", OPTIMIZERS, ("FusedAdam", "FusedSGD", "FusedAdagrad"))
    add_against(found)
    return found


NAMED = ("device", "model")


def main(arguments: list[str] | None = None) -> None:
    args = parse(options := parser(), arguments)
    optimizers = {name: peers_of(options, name, args) for name in args.optimizer}
    device = torch.device(args.device)
    inputs = Inputs(args.model, device)
    bandwidth = Bandwidth(inputs.elements, device, Clock(device))
    found: Figures = {"model/all/elements": [inputs.elements]}
    for name, make in cases(optimizers):
        found |= measure(name, make, inputs, bandwidth, args)
    report(options, args, found, *NAMED)


if __name__ == "__main__":
    sys.exit(main())
