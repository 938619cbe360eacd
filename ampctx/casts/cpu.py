"""The kernels that torch's CPU autocast lacks for the cast table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ampctx.casts.arguments import Rule, Undo, leaf_cast, map_arguments, names_dtype
from ampctx.casts.table import TABLE


def missing_on_cpu() -> Iterator[tuple[Any, Rule]]:
    """The overloads of the table that this torch's CPU autocast leaves alone, each with its rule."""
    for name, rule in TABLE.items():
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        # Private, and no public call tells whether a kernel exists; registering over torch's own would replace it.
        if op is not None and not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "AutocastCPU"):
            yield op, rule


@functools.cache
def _missing() -> list[tuple[Any, Rule]]:
    # Looked up once: a former Library that somebody still holds must not hide what is missing.
    return list(missing_on_cpu())


def install_kernels() -> Undo:
    """Registers what is missing. It is there for every autocast region on the CPU."""
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    for op, rule in _missing():
        library.impl(op, _kernel(op, rule))
    # A Library takes its kernels along when it is collected: the undo is the last to hold it, and lets go.
    return [library].clear


def _kernel(op: Any, rule: Rule) -> Callable:
    """Casts, and runs the op without autocast. Called only while CPU autocast is on."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not names_dtype(args, kwargs):
            cast = leaf_cast(rule, args, kwargs, torch.get_autocast_dtype("cpu"))

            def cast_on_cpu(t: Tensor) -> Tensor:
                # Like torch's own autocast, whose kernels leave fp64 and other devices alone.
                return cast(t) if t.device.type == "cpu" and t.dtype != torch.float64 else t

            args, kwargs = map_arguments(args, kwargs, cast_on_cpu)
        # Not through torch.autocast: leaving that clears the cache of cast weights.
        try:
            torch.set_autocast_enabled("cpu", False)
            return op(*args, **kwargs)
        finally:
            torch.set_autocast_enabled("cpu", True)

    return kernel
