"""Registers CPU autocast kernels for ops of the cast table that torch's own CPU autocast leaves alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ampctx.casts.arguments import Rule, Undo, leaf_cast, map_arguments, names_dtype
from ampctx.casts.table import TABLE


def missing_on_cpu() -> Iterator[tuple[Any, Rule]]:
    """The overloads of the table without a kernel in this torch's CPU autocast, each with its rule."""
    for name, rule in TABLE.items():
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        # Private: no public call tells whether a kernel exists. Registering ours would replace torch's.
        if op is not None and not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "AutocastCPU"):
            yield op, rule


@functools.cache
def _missing() -> list[tuple[Any, Rule]]:
    # Cached: kernels of an earlier Library that still lives would look like torch's own.
    return list(missing_on_cpu())


def install_kernels() -> Undo:
    """Registers the missing kernels. They apply to every autocast region on the CPU until the undo."""
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    for op, rule in _missing():
        library.impl(op, _kernel(op, rule))
    # Kernels live as long as their Library. Only the undo holds it, and frees it.
    return [library].clear


def _kernel(op: Any, rule: Rule) -> Callable:
    """A kernel that casts and runs the op without autocast. torch calls it only while CPU autocast is on."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not names_dtype(args, kwargs):
            cast = leaf_cast(rule, args, kwargs, torch.get_autocast_dtype("cpu"))

            def cast_on_cpu(t: Tensor) -> Tensor:
                # Like torch's autocast, leave fp64 and other devices alone.
                return cast(t) if t.device.type == "cpu" and t.dtype != torch.float64 else t

            args, kwargs = map_arguments(args, kwargs, cast_on_cpu)
        # Exiting torch.autocast would clear the cache of cast weights.
        try:
            torch.set_autocast_enabled("cpu", False)
            return op(*args, **kwargs)
        finally:
            torch.set_autocast_enabled("cpu", True)

    return kernel
