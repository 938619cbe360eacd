"""The kernels that torch's CPU autocast lacks for the cast table of ``lists``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ampctx.casts import lists
from ampctx.casts.arguments import LOW_PRECISION, map_floating_args, to_widest


def _low_on_cpu(args: Any) -> Any:
    # Like torch's own autocast, whose kernels leave fp64 and other devices alone.
    low = torch.get_autocast_dtype("cpu")
    return map_floating_args(args, lambda t: t.to(low) if t.device.type == "cpu" and t.dtype != torch.float64 else t)


def _fp32_on_cpu(args: Any) -> Any:
    return map_floating_args(args, lambda t: t.float() if t.device.type == "cpu" and t.dtype in LOW_PRECISION else t)


def autocast_kernel(op: Any, cast: Callable[[Any], Any]) -> Callable:
    """An AutocastCPU kernel: casts, and runs the op without autocast. Called only while CPU autocast is on."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # A dtype that the caller chose stands.
        if kwargs.get("dtype") is None and not any(isinstance(a, torch.dtype) for a in args):
            args, kwargs = cast(args), cast(kwargs)
        # Not through torch.autocast: leaving that clears the cache of cast weights.
        try:
            torch.set_autocast_enabled("cpu", False)
            return op(*args, **kwargs)
        finally:
            torch.set_autocast_enabled("cpu", True)

    return kernel


def missing_on_cpu() -> Iterator[tuple[Any, Callable[[Any], Any]]]:
    """The overloads of ``lists`` that this torch's CPU autocast leaves alone, with the cast that each is due."""
    for names, cast in (
        (lists.LOW, _low_on_cpu),
        (lists.FP32, _fp32_on_cpu),
        (lists.PROMOTE, to_widest),
    ):
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            # Private, and no public call tells whether a kernel exists; registering over torch's own would replace it.
            if op is not None and not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "AutocastCPU"):
                yield op, cast
