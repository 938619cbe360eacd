"""Typed optimizer ops of ``torch.ops.ampctx``: one call steps many tensors.

Every list has one entry per parameter. ``grads``, ``params`` and state of their size agree at each index in device,
number of elements and memory layout. A list has one dtype: fp32, fp16, bf16, or fp64 on the CPU. Arithmetic is fp32
(fp64 if any tensor is). ``steps`` are one-element fp32 tensors that count the steps so far. ``extras`` depends on
``write_back`` (table: ``ampctx.kernels.reference_steps``) and is empty for "nearest" and "stochastic".

If ``found_inf`` (one element, fp32 or int32) is not 0, the call changes nothing, not even step counts. The kernel reads
the flag on the device. ``inv_scale`` and ``lr`` are floats or one-element tensors, fp32 on the device of the lists or
on the CPU. The kernel multiplies gradients by ``inv_scale`` as it reads them. It stores the result only with
``unscale_grads``, rounded to the gradient's dtype and without the sign of ``maximize``. That is a separate op,
``multi_tensor_unscaling_*``, whose schema declares the write. ``seed`` feeds the "stochastic" write back, whose random
numbers depend only on seed, step count and place. No host sync.

With ``max_norm`` (negative by default, for none) the kernel clips: gradients are also multiplied by
``min(max_norm / (grad_norm + 1e-6), 1)``, in fp32 as in torch. ``skips`` are none, or five 0-d fp32 tensors: the loss
scale after four counts, see ``ampctx.kernels.ops.count_skip``, in which the call counts itself, also if it is skipped.

For lists that many calls share, pass a tensor-list handle (``ampctx.ops.HeldTensors``). Autograd learns that ``params``
and ``extras`` changed, and gradients if they are written. It does not learn of state, which is in no graph.

``ampctx.kernels.spec`` gives the calls as source, compiled once like a dataclass: resolving argument names at each call
would cost as much as a small op. ``steps.pyi`` declares them for type checkers.
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
    """The source of an op's typed call."""
    lists, tensors = spec.lists, spec.tensors
    positional = [*(f"{name}: Sequence[Tensor]" for name in lists if name != "skips"), "found_inf: Tensor"]
    positional += [f"{name}: Factor" for name in tensors[1:] if name != "grad_norm"]
    named = [f"{n.name}: {n.type}" + ("" if n.default is None else f" = {n.default!r}") for n in spec.numbers]
    numbers, op, written = [number.name for number in spec.numbers], f"_ops.{spec.op}", "wrote(grads)"
    if spec.takes_step:
        named += ["maximize: bool = False", 'write_back: str = "nearest"', "seed: int = 0"]
        named += ["unscale_grads: bool = False", "grad_norm: Factor = 1.0", "max_norm: float = -1.0"]
        named += ["skips: Sequence[Tensor] = ()"]
        numbers += ["maximize", "_CODES[write_back]", "seed", "max_norm"]
        op = f"_ops.{spec.unscaling_op} if unscale_grads else {op}"
        written = "wrote(params, extras, *((grads,) if unscale_grads else ()))"
    scalars = ["found_inf", *(f"factor({name})" for name in tensors[1:])]
    return (
        f'def {spec.name}({", ".join(positional)}, *, {", ".join(named)}) -> None:\n    """{spec.doc}"""\n'
        f"    call({op}, ({', '.join(lists)}), {', '.join([*scalars, *numbers])})\n    {written}\n"
    )


for _spec in SPECS.values():
    exec(compile(source(_spec), f"<{__name__}.{_spec.name}>", "exec"))
