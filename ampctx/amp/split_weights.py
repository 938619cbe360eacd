"""``initialize(master_weights="split")``: optimizers keep the 16 bits that bf16 weights lack of fp32."""

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
from ampctx.amp.binding import OptimizerBinding
from ampctx.casts.casting import set_dtype
from ampctx.kernels.reference_steps import split
from ampctx.kernels.sharding import is_sharded
from ampctx.masters.store import EXTRAS, joined
from ampctx.optimizers._base import FusedOptimizer
from ampctx.optimizers.fused_lamb import FusedMixedPrecisionLamb
from ampctx.optimizers.split_masters import SplitMasters

_KEY = EXTRAS["split"]


def check(optimizers: Sequence[Any], bindings: Mapping[Any, OptimizerBinding]) -> None:
    """Checks that all of these optimizers can keep split masters. ``bindings``: those that are under amp already.

    Raises:
        AmpTypeError: a class that keeps none.
        AmpValueError: options of the optimizer that exclude them.
        AmpError: a parameter without values (of a lazy module), or one that two optimizers step.
    """
    stepped = {id(p) for _, binding in bindings.items() for p in binding.model_params()}
    for i, optimizer in enumerate(optimizers):
        name = type(optimizer).__name__
        if not isinstance(optimizer, SplitMasters):
            _check_fused(optimizer, f"optimizers[{i}] ({name})")
        own = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if any(map(is_lazy, own)):
            raise AmpError(
                f'master_weights="split": optimizers[{i}] ({name}) has a parameter of a lazy module, which has no '
                "values yet. Run one forward before amp.initialize."
            )
        if twice := [p for p in own if id(p) in stepped]:
            raise AmpError(
                f'master_weights="split": a parameter of shape {tuple(twice[0].shape)} is in two optimizers, and only '
                "one of them can keep the bits that its bf16 weight lacks. Pass each parameter to one optimizer, or "
                "use O4."
            )
        stepped.update(map(id, own))


def _check_fused(optimizer: Any, which: str) -> None:
    kind, call = type(optimizer), 'master_weights="split"'
    if not isinstance(optimizer, FusedOptimizer) or isinstance(optimizer, FusedMixedPrecisionLamb):
        if getattr(torch.optim, kind.__name__, None) is kind:
            fix = f"Pass ampctx.optimizers.SplitMasters(torch.optim.{kind.__name__}, params, ...)"
        else:
            fix = "Pass an optimizer of ampctx that takes master_weights, SplitMasters with a class of torch.optim"
        raise AmpTypeError(
            f"{call}: {which} keeps no split masters. {fix}, or leave master_weights at None: amp then keeps fp32 "
            "masters. See docs/levels.md."
        )
    if optimizer.master_weights is True:
        raise AmpValueError(
            f"{call}: {which} has master_weights=True, fp32 masters of its own. Leave that out, or pass "
            "master_weights=False to amp.initialize."
        )
    if optimizer.write_back != "nearest":
        raise AmpValueError(
            f"{call}: {which} has write_back={optimizer.write_back!r}, which is for weights without masters. Leave "
            "that out, or pass master_weights=False to amp.initialize."
        )


@torch.no_grad()
def begin(undo: ExitStack, optimizer: Any, originals: Mapping[Tensor, Tensor]) -> None:
    """Splits the weights before the cast into the bf16 weights and the state of the optimizer. Host sync only with
    ``offload``."""
    fused = isinstance(optimizer, FusedOptimizer)
    undo.callback(_end, weakref.ref(optimizer), optimizer.master_weights if fused else None)
    if fused:
        optimizer.master_weights = "split"
    on_host = fused and optimizer.offload is not None
    for p in _low(optimizer):
        if p not in originals:
            continue
        # Of an earlier cast.
        optimizer.state.get(p, {}).pop(_KEY, None)
        if is_distributed():
            # As the masters of other levels: a broadcast makes only the models of the ranks equal.
            continue
        high, low = split(originals[p].float())
        rest = torch.empty_like(p, dtype=torch.int16, device="cpu" if on_host else None, requires_grad=False)
        optimizer.state[p][_KEY] = rest.copy_(low)
        # Differs from the cast half way between two bf16 numbers.
        p.copy_(high)


@torch.no_grad()
def _end(reference: weakref.ref[Any], former: Any) -> None:
    """Makes the weights fp32 again, with every bit."""
    if (optimizer := reference()) is None:
        return
    optimizer.masters_follow_model()
    for p in _low(optimizer):
        state = optimizer.state.get(p, {})
        exact = joined(p, state)
        if exact is not None:
            p.data = exact.to(p.device)
        set_dtype(p, torch.float32)
        if state.pop(_KEY, None) is not None and not state:
            del optimizer.state[p]
    if isinstance(optimizer, FusedOptimizer):
        optimizer.master_weights = former


def _low(optimizer: Any) -> list[Tensor]:
    """bf16 parameters that train, except DTensors, which amp cannot cast."""
    members = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
    return [p for p in members if p.dtype == torch.bfloat16 and p.requires_grad and not is_sharded(p)]
