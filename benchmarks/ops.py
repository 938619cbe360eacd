"""Each op on the tensors of a model, beside what torch has for the same work.

    python benchmarks/ops.py --model resnet50 --optimizer FusedAdam,FusedSGD --json ops.json

One case for each op, and for each optimizer its step on fp32 weights and gradients. Inputs are put back before each
call, outside the time taken; the results of all sides are compared at the end. torch has no public call that works on
lists of tensors for some of them: the private one that its own optimizers and GradScaler use stands in.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from measuring import Bandwidth, Clock, add_against, add_several, case, interleave, options, parse, report
from peers import ATOL, INEXACT, OPTIMIZERS, RTOL, STATE_DTYPES, STATES, TAKE_STATE_DTYPE, ours
from shapes import MODELS, shapes
from tail import gradients, peers_of
from torch import Tensor

import ampctx
from ampctx import ops

SCALE = 4.0


@dataclass
class Side:
    """One way to do the work: what it is, the call that is timed, the tensors it made, what to do before and after.

    A side without a ``result`` is not compared: a bound does other work, and 8 bits of state give other weights.
    """

    what: str
    run: Callable[[], Any]
    result: Callable[[], list[Tensor]] | None
    before: Callable[[], Any] = lambda: None
    after: Callable[[], Any] = lambda: None


@dataclass
class Op:
    """``bytes_per_element``: what has to be read and written; ``rtol``, ``atol``: how far results may lie apart."""

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

    def empty(self, dtype: torch.dtype) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device=self.device) for shape in self.shapes]

    def empty_twice(self, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
        """A list for each of two sides, allocated in turn: the first list alone would get the scattered memory that
        earlier cases have left."""
        both = [[torch.empty(shape, dtype=dtype, device=self.device) for _ in range(2)] for shape in self.shapes]
        first, second = zip(*both, strict=True)
        return list(first), list(second)


def unscale(inputs: Inputs) -> Op:
    """``GradScaler.unscale_``, torch's and ampctx's: gradients unscaled in place, and inf and nan looked for."""
    grads = inputs.random(0)

    def side(what: str, scaler: Any, own: list[Tensor]) -> Side:
        params = [torch.zeros_like(g).requires_grad_() for g in grads]
        for param, grad in zip(params, own, strict=True):
            param.grad = grad
        optimizer = torch.optim.SGD(params)
        scaler.scale(torch.ones((), device=inputs.device))

        def before() -> None:
            torch._foreach_copy_([p.grad for p in params], grads)

        # Without update() a second unscale_ is an error.
        return Side(
            what, lambda: scaler.unscale_(optimizer), lambda: [p.grad for p in params], before, after=scaler.update
        )

    kind, options = inputs.device.type, {"init_scale": SCALE, "growth_interval": 10**6}
    mine, theirs = inputs.empty_twice()
    return Op(
        8,
        {
            "ampctx": side("ampctx.GradScaler.unscale_", ampctx.GradScaler(kind, **options), mine),
            "torch": side("torch.amp.GradScaler.unscale_", torch.amp.GradScaler(kind, **options), theirs),
        },
    )


def scale(inputs: Inputs) -> Op:
    """The op below ``unscale_`` and its counterpart."""
    grads = inputs.random(0)
    mine, theirs = inputs.empty_twice()
    found_inf, inverse = torch.zeros((), device=inputs.device), torch.full((), 1 / SCALE, device=inputs.device)
    return Op(
        8,
        {
            "ampctx": Side(
                "multi_tensor_scale",
                lambda: ops.multi_tensor_scale(mine, mine, inputs.flag, inverse),
                lambda: mine,
                lambda: torch._foreach_copy_(mine, grads),
            ),
            "torch": Side(
                "torch._amp_foreach_non_finite_check_and_unscale_",
                lambda: torch._amp_foreach_non_finite_check_and_unscale_(theirs, found_inf, inverse),
                lambda: theirs,
                lambda: torch._foreach_copy_(theirs, grads),
            ),
        },
    )


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
            "ampctx": Side(
                "multi_tensor_axpby",
                lambda: ops.multi_tensor_axpby(x, mine, mine, inputs.flag, 0.5, 0.25),
                lambda: mine,
                lambda: torch._foreach_copy_(mine, y),
            ),
            "torch": Side(
                "torch._foreach_mul_ and _foreach_add_",
                in_two_passes,
                lambda: theirs,
                lambda: torch._foreach_copy_(theirs, y),
            ),
        },
        rtol=1e-5,
        atol=1e-6,  # a x and b y may cancel
    )


def l2norm(dtype: torch.dtype, rtol: float) -> Callable[[Inputs], Op]:
    """The norm of all gradients; ampctx looks for inf and nan as well, torch does not.

    Beside it the sum of one buffer of as many bytes: what reading them takes at the least.
    """

    def make(inputs: Inputs) -> Op:
        grads = inputs.random(0, dtype)
        norms: dict[str, Tensor] = {}
        calls = {
            "ampctx": ("multi_tensor_l2norm", lambda: ops.multi_tensor_l2norm(grads, inputs.flag)[0]),
            "torch": ("torch.nn.utils.get_total_norm", lambda: torch.nn.utils.get_total_norm(grads).float()),
        }

        def side(who: str, what: str, call: Callable[[], Tensor]) -> Side:
            return Side(what, lambda: norms.update({who: call()}), lambda: [norms[who]])

        buffer = torch.ones(inputs.elements * dtype.itemsize // 4, device=inputs.device)
        read = Side("torch.sum of one fp32 buffer of as many bytes", buffer.sum, None)
        sides = {who: side(who, *call) for who, call in calls.items()}
        return Op(dtype.itemsize, {**sides, "read": read}, rtol)

    return make


def cast(source: torch.dtype, target: torch.dtype) -> Callable[[Inputs], Op]:
    """A copy into another dtype; ampctx looks for inf and nan as well, torch does not."""

    def make(inputs: Inputs) -> Op:
        tensors = inputs.random(0, source)
        mine, theirs = inputs.empty_twice(target)
        return Op(
            source.itemsize + target.itemsize,
            {
                "ampctx": Side(
                    "multi_tensor_scale",
                    lambda: ops.multi_tensor_scale(tensors, mine, inputs.flag, 1.0),
                    lambda: mine,
                ),
                "torch": Side("torch._foreach_copy_", lambda: torch._foreach_copy_(theirs, tensors), lambda: theirs),
            },
        )

    return make


class Linked(torch.autograd.Function):
    """A cast of a weight that has been made already, as a part of the graph."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, cast: Tensor) -> Tensor:
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.float(), None


def weight_casts(inputs: Inputs) -> Op:
    """Weights as a forward at O1 takes them: ampctx leaves them to torch's autocast, which casts each by itself. Beside
    it: one call for all into memory that is kept, with what makes the graph lead back to each weight, and without."""
    weights, casts, alone, linked = inputs.random(0), inputs.empty(torch.float16), [], []
    held = ops.HeldTensors(weights), ops.HeldTensors(casts)
    params = [weight.detach().requires_grad_() for weight in weights]

    def one_call() -> None:
        ops.multi_tensor_scale(*held, inputs.flag, 1.0)

    def one_call_and_links() -> None:
        one_call()
        linked[:] = map(Linked.apply, params, casts)

    def one_by_one() -> None:
        alone[:] = [param.to(torch.float16) for param in params]

    def values(tensors: list[Tensor]) -> list[Tensor]:
        return [t.detach() for t in tensors]

    return Op(
        6,
        {
            "ampctx": Side("Tensor.to for each, as autocast does", one_by_one, lambda: values(alone)),
            "one call": Side(
                "multi_tensor_scale and an autograd.Function for each", one_call_and_links, lambda: values(linked)
            ),
            "one call, no graph": Side("multi_tensor_scale", one_call, lambda: casts),
        },
    )


def step(name: str, peers: dict[str, tuple[Any, str]]) -> Callable[[Inputs], Op]:
    """The step of an optimizer, without scaling, on fp32 weights; beside torch's, its own with smaller state."""

    def side(inputs: Inputs, what: str, make: Callable[[list[Tensor]], Any], grads: list[Tensor]) -> Side:
        params = inputs.random(1)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()  # LARC writes to it
        optimizer = make(params)
        restore = (lambda: torch._foreach_copy_([p.grad for p in params], grads)) if name == "LARC" else lambda: None
        return Side(what, optimizer.step, lambda: params, restore)

    def make(inputs: Inputs) -> Op:
        grads = inputs.random(0)
        sides = {"ampctx": side(inputs, name, lambda params: ours(name, params), grads)}
        sides.update({who: side(inputs, what, make, grads) for who, (make, what) in peers.items()})
        for kind, dtype in STATE_DTYPES.items() if name in TAKE_STATE_DTYPE else ():
            sides[f"{kind} state"] = side(
                inputs,
                f"{name}(state_dtype={dtype!r})",
                lambda params, dtype=dtype: ours(name, params, state_dtype=dtype),
                grads,
            )
        for who in sides.keys() & {*INEXACT, *(f"{kind} state" for kind in STATE_DTYPES)}:
            sides[who].result = None
        return Op(12 + 8 * STATES[name], sides, RTOL, ATOL)

    return make


def cases(optimizers: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Callable[[Inputs], Op]]]:
    half, full = torch.float16, torch.float32
    yield "unscale", unscale
    yield "scale", scale
    yield "axpby", axpby
    yield "l2norm", l2norm(full, 1e-4)
    yield "l2norm fp16", l2norm(half, 2e-3)  # torch rounds it to fp16
    yield "cast fp16 to fp32", cast(half, full)
    yield "cast fp32 to fp16", cast(full, half)
    yield "weight casts", weight_casts
    for name, peers in optimizers.items():
        yield f"{name}.step", step(name, peers)


def measure(make: Callable[[Inputs], Op], inputs: Inputs, bandwidth: Bandwidth, args: argparse.Namespace) -> dict:
    op, clock = make(inputs), bandwidth.clock

    def of(side: Side) -> Callable[[int], dict[str, float]]:
        def timed(round_number: int) -> dict[str, float]:
            side.before()
            clock.settle()
            start = clock.mark()
            side.run()
            end = clock.mark()
            side.after()
            return {"ms": clock.between(start, end)}

        return timed

    contenders = {who: of(side) for who, side in op.sides.items()}
    samples = interleave({**contenders, "bandwidth": bandwidth.measure}, args.rounds)
    wanted, *others = (side.result() for side in op.sides.values() if side.result)
    for other in others:
        torch.testing.assert_close(wanted, other, rtol=op.rtol, atol=op.atol)
    assert not inputs.flag.item(), "finite input was flagged"
    return case(
        samples,
        {who: side.what for who, side in op.sides.items()},
        op.bytes_per_element * inputs.elements,
        tensors=len(inputs.shapes),
        elements=inputs.elements,
        check={"rtol": op.rtol, "atol": op.atol},
    )


def main(arguments: list[str] | None = None) -> None:
    parser = options(__file__, __doc__)
    parser.add_argument("--model", default="resnet50", choices=list(MODELS))
    add_several(parser, "--optimizer", OPTIMIZERS, ("FusedAdam", "FusedSGD", "FusedAdagrad"))
    add_against(parser)
    args = parse(parser, arguments)
    optimizers = {name: peers_of(parser, name, args) for name in args.optimizer}
    device = torch.device(args.device)
    inputs = Inputs(args.model, device)
    bandwidth = Bandwidth(inputs.elements, device, Clock(device))
    report(parser, args, {name: measure(make, inputs, bandwidth, args) for name, make in cases(optimizers)})


if __name__ == "__main__":
    sys.exit(main())
