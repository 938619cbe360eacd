"""The optimizer ops of ``torch.ops.ampctx``, typed: one step of many tensors in one call.

All lists hold one entry for each parameter. ``grads``, ``params`` and the state of their size agree in device, number
of elements and memory layout at each index, and in dtype within a list: fp32, fp16, bf16, and fp64 on the CPU.
Arithmetic is fp32 (fp64 where an fp64 tensor takes part). ``steps`` are one-element fp32 tensors, the number of steps
taken so far; a call that is not skipped advances them. ``extras`` depends on ``write_back``
(``ampctx.kernels.reference_steps`` has the table) and is empty for "nearest" and "stochastic".

Each call returns without a change, to the step counts too, where ``found_inf`` (one element, fp32 or int32) is not 0,
as the kernel finds out on the device. Gradients are multiplied by ``inv_scale`` as they are read and stay as they are;
with ``unscale_grads`` the same kernel stores what it computes with in them, rounded to their dtype (never the sign of
``maximize``): that is another op, ``multi_tensor_unscaling_*``, whose schema says so.
``inv_scale`` and ``lr`` are floats or one-element tensors, fp32 on the device of the lists or on the CPU. ``seed``
feeds the "stochastic" write back, whose random numbers depend on seed, step count and place alone. No host sync.

Lists that stay the same from call to call may be held (``ampctx.ops.HeldTensors``). Autograd is told that ``params``
and ``extras`` changed, and gradients where they are written; the state of an optimizer is in nobody's graph.

The calls are made of ``ampctx.kernels.spec``, as source that is compiled once, as dataclasses do: to go through the
names of arguments at each call costs as much as a small op. ``steps.pyi`` has them for type checkers.
"""

from __future__ import annotations

from collections.abc import Sequence  # noqa: F401  of the signatures

import torch
from torch import Tensor

from ampctx.kernels.ops import call, factor, wrote  # noqa: F401  what the calls are made of
from ampctx.kernels.reference_steps import WRITE_BACKS
from ampctx.kernels.spec import SPECS, OpSpec

_ops = torch.ops.ampctx
_CODES = {name: code for code, name in enumerate(WRITE_BACKS)}

Factor = float | Tensor

__all__ = sorted(SPECS)


def source(spec: OpSpec) -> str:
    """The typed call of an op."""
    lists, tensors = spec.lists, spec.tensors
    positional = [*(f"{name}: Sequence[Tensor]" for name in lists), "found_inf: Tensor"]
    positional += [f"{name}: Factor" for name in tensors[1:]]
    named = [f"{n.name}: {n.type}" + ("" if n.default is None else f" = {n.default!r}") for n in spec.numbers]
    numbers, op, written = [number.name for number in spec.numbers], f"_ops.{spec.op}", "wrote(grads)"
    if spec.takes_step:
        named += ["maximize: bool = False", 'write_back: str = "nearest"', "seed: int = 0"]
        named += ["unscale_grads: bool = False"]
        numbers += ["maximize", "_CODES[write_back]", "seed"]
        op = f"_ops.{spec.unscaling_op} if unscale_grads else {op}"
        written = "wrote(params, extras, *((grads,) if unscale_grads else ()))"
    scalars = ["found_inf", *(f"factor({name})" for name in tensors[1:])]
    return (
        f'def {spec.name}({", ".join(positional)}, *, {", ".join(named)}) -> None:\n    """{spec.doc}"""\n'
        f"    call({op}, ({', '.join(lists)}), {', '.join([*scalars, *numbers])})\n    {written}\n"
    )


for _spec in SPECS.values():
    exec(compile(source(_spec), f"<{__name__}.{_spec.name}>", "exec"))
