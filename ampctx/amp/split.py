"""``master_weights="split"`` of ``initialize``: optimizers keep the 16 bits that bf16 weights lack of fp32."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ampctx._collectives import is_distributed
from ampctx._errors import AmpError, AmpTypeError, AmpValueError
from ampctx.amp.step import OptimizerBinding
from ampctx.casts import casting
from ampctx.kernels.reference_steps import split
from ampctx.kernels.sharding import is_sharded
from ampctx.optimizers._base import FusedOptimizer
from ampctx.optimizers.fused_lamb import FusedMixedPrecisionLamb
from ampctx.optimizers.split_masters import SplitMasters
from ampctx.weights.store import EXTRAS, joined

_REMAINDER = EXTRAS["split"]


def check(optimizers: Sequence[Any], bindings: Mapping[Any, OptimizerBinding]) -> None:
    """Raises AmpError if one of these optimizers cannot keep split masters. ``bindings``: those under amp already."""
    call, stepped = 'master_weights="split"', {id(p) for _, b in bindings.items() for p in b.model_params()}
    for i, optimizer in enumerate(optimizers):
        kind = type(optimizer)
        which = f"{call}: optimizers[{i}] ({kind.__name__})"
        if isinstance(optimizer, FusedOptimizer) and not isinstance(optimizer, FusedMixedPrecisionLamb):
            if optimizer.master_weights is True or optimizer.write_back != "nearest":
                option = "master_weights" if optimizer.master_weights is True else "write_back"
                raise AmpValueError(
                    f"{which} has {option}={getattr(optimizer, option)!r}, which keeps or rounds weights in another "
                    "way. Leave that out, or pass master_weights=False to amp.initialize."
                )
        elif not isinstance(optimizer, SplitMasters):
            fix = "Pass an optimizer of ampctx that takes master_weights, SplitMasters with a class of torch.optim"
            if getattr(torch.optim, kind.__name__, None) is kind:
                fix = f"Pass ampctx.optimizers.SplitMasters(torch.optim.{kind.__name__}, params, ...)"
            raise AmpTypeError(
                f"{which} keeps no split masters. {fix}, or leave master_weights at None: amp then keeps fp32 masters. "
                "See docs/levels.md."
            )
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if any(map(is_lazy, trained)):
            raise AmpError(
                f"{which} has a parameter of a lazy module, which has no values yet. Run one forward before "
                "amp.initialize."
            )
        if twice := [p for p in trained if id(p) in stepped]:
            raise AmpError(
                f"{call}: a parameter of shape {tuple(twice[0].shape)} is in two optimizers, and only one of them can "
                "keep the bits that its bf16 weight lacks. Pass each parameter to one optimizer, or use O4."
            )
        stepped.update(map(id, trained))


@torch.no_grad()
def begin(undo: ExitStack, optimizer: Any, originals: Mapping[Tensor, Tensor]) -> None:
    """Splits the weights before the cast into bf16 weights and state of the optimizer. Host sync with ``offload``."""
    fused = isinstance(optimizer, FusedOptimizer)
    undo.callback(_end, weakref.ref(optimizer), optimizer.master_weights if fused else None)
    if fused:
        optimizer.master_weights = "split"
    on_host = fused and optimizer.offload is not None
    for p in [p for p in _bf16_params(optimizer) if p in originals]:
        optimizer.state.get(p, {}).pop(_REMAINDER, None)  # of an earlier cast
        if is_distributed():
            continue  # as other masters: a broadcast makes only the models of the ranks equal
        high, low = split(originals[p].float())
        rest = torch.empty_like(p, dtype=torch.int16, device="cpu" if on_host else None, requires_grad=False)
        optimizer.state[p][_REMAINDER] = rest.copy_(low)
        p.copy_(high)  # differs from the cast half way between two bf16 numbers


@torch.no_grad()
def _end(reference: weakref.ref[Any], former: Any) -> None:
    """Makes the weights fp32 again, with every bit."""
    if (optimizer := reference()) is None:
        return
    optimizer.masters_follow_model()
    for p in _bf16_params(optimizer):
        state = optimizer.state.get(p, {})
        if (exact := joined(p, state)) is not None:
            p.data = exact.to(p.device)
        casting.set_dtype(p, torch.float32)
        if state.pop(_REMAINDER, None) is not None and not state:
            del optimizer.state[p]
    if isinstance(optimizer, FusedOptimizer):
        optimizer.master_weights = former


def _bf16_params(optimizer: Any) -> list[Tensor]:
    """bf16 parameters that train, except DTensors, which amp cannot cast."""
    members = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
    return [p for p in members if p.dtype == torch.bfloat16 and p.requires_grad and not is_sharded(p)]
