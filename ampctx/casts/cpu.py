"""Registers CPU autocast kernels for ops of the cast table that torch's own CPU autocast leaves alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor

from ampctx.casts.arguments import LOW_PRECISION, Rule, Undo, leaf_cast, map_arguments, names_dtype, widen
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
    # A function of ``torch`` costs less than a call of its op. Not one that other code has replaced.
    function = getattr(torch, op.name().removeprefix("aten::").partition(".")[0], None)
    run: Callable = function if isinstance(function, BuiltinFunctionType) else op
    cast: Callable = _widened if rule == "float" else functools.partial(_cast_nested, rule)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast(args, kwargs)
        # Exiting torch.autocast would clear the cache of cast weights. An interrupt may arrive in ``finally``, too.
        try:
            try:
                torch.set_autocast_enabled("cpu", False)
                return run(*args, **kwargs)
            finally:
                torch.set_autocast_enabled("cpu", True)
        except BaseException:
            torch.set_autocast_enabled("cpu", True)
            raise

    return kernel


def _widened(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The cast of "float". Its ops take no tensors in lists or as keywords, and run in every layer: without a walk."""
    for leaf in args:
        if isinstance(leaf, Tensor) and leaf.dtype in LOW_PRECISION:
            if names_dtype(args, kwargs):
                break
            return tuple([widen(a) if isinstance(a, Tensor) and a.is_cpu else a for a in args]), kwargs
    return args, kwargs


def _cast_nested(rule: Rule, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    if names_dtype(args, kwargs):
        return args, kwargs
    cast = leaf_cast(rule, args, kwargs, torch.get_autocast_dtype("cpu"))

    def cast_on_cpu(t: Tensor) -> Tensor:
        # Like torch's autocast, leave fp64 and other devices alone.
        return cast(t) if t.is_cpu and t.dtype != torch.float64 else t

    return map_arguments(args, kwargs, cast_on_cpu)
