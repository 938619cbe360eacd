"""The ops over lists that mix devices, dtypes and layouts: one op call per bucket, plain torch where no kernel fits.

The ops see this rank's part of a DTensor: the caller joins flags and norms over the ranks. ``FoundInf`` holds one flag
per device and joins them when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ampctx.kernels import ops, reference
from ampctx.kernels.grouping import buckets
from ampctx.kernels.reference import Tensors
from ampctx.kernels.sharding import wrote


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``. Host sync only for copies to the CPU, which must be complete before they are read."""
    return tensor.to(device, non_blocking=device.type != "cpu")


class PerDevice:
    """A one-element tensor that is copied to each other device at its first use there. No host sync."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._copies: dict[torch.device, Tensor] = {value.device: value}

    def on(self, device: torch.device) -> Tensor:
        if device not in self._copies:
            self._copies[device] = move(self.value, device)
        return self._copies[device]


def taken(tensors: list[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Takes the tensors out of the list if they are on ``device``. No host sync."""
    if not tensors or tensors[0].device != device:
        return ()
    found = tensors[:]
    tensors.clear()
    return found


def join_flags(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """The maximum of one-element flags, 0-d on ``device``; 0.0 without flags. No host sync."""
    result = None
    for flag in flags:
        here = flag if flag.device == device else move(flag, device)
        here = here.reshape(()) if here.dim() else here
        result = here if result is None else torch.maximum(result, here)
    return torch.zeros((), dtype=torch.float32, device=device) if result is None else result


class FoundInf:
    """Whether any of several calls found inf or nan: one 0-d fp32 flag per device.

    ``clear``: a new flag of 0 for its device, or None. ``update``: of a loss scale by the flag, for the last call.
    ``is_updated``: whether that call has made it. ``norm_again``: the total norm of that call, in memory of its own.
    """

    clear: Tensor | None = None
    norm_again: Tensor | None = None
    update: ops.ScaleUpdate | None = None
    is_updated = False
    _make: Callable[..., Tensor] = staticmethod(torch.zeros)

    def __init__(self) -> None:
        self.per_device: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        if device not in self.per_device:
            flag, self.clear = self.clear, None
            if flag is None or flag.device != device:
                flag = self._make((), dtype=torch.float32, device=device)
            self.per_device[device] = flag
        return self.per_device[device]

    def take_update(self) -> ops.ScaleUpdate | None:
        """``update``, if there is a flag on the device of the scale and no other."""
        taken = self.update
        if taken is None or self.per_device.keys() != {taken.scale.device}:
            return None
        self.update, self.is_updated = None, True
        return taken

    def joined(self, device: torch.device) -> Tensor:
        """The maximum over devices, 0.0 or 1.0, as a 0-d fp32 tensor on ``device``. No host sync."""
        if len(self.per_device) == 1 and device in self.per_device:
            return self.per_device[device]
        return join_flags(self.per_device.values(), device)


class Unread(FoundInf):
    """Flags that nobody reads. Ops only raise a flag: on the CPU it is raised, and a clip by 1 has nothing to look for.
    Elsewhere it has no value, as that takes a launch."""

    _make = staticmethod(lambda n, **k: torch.full(n, 1.0, **k) if k["device"].type == "cpu" else torch.empty(n, **k))


Factor = float | PerDevice


class Clipped(PerDevice):
    """``inv_scale * min(max_norm / (norm + 1e-6), 1)`` for an fp32 norm. Kernels form it themselves of the three, which
    saves a launch; ``value`` and ``on`` form it for all other code. No host sync."""

    def __init__(self, inv_scale: Factor, norm: Tensor, max_norm: float) -> None:
        self.inv_scale, self.norm, self.max_norm = inv_scale, PerDevice(norm), max_norm
        self._copies: dict[torch.device, Tensor] = {}
        self._value: Tensor | None = None

    @property  # torch.compile cannot trace the lock of a cached_property
    def value(self) -> Tensor:  # type: ignore[override]
        if self._value is None:
            of = self.inv_scale.value if isinstance(self.inv_scale, PerDevice) else self.inv_scale
            norm = self.norm.on(of.device) if isinstance(of, Tensor) else self.norm.value
            self._value = reference.clipped(ops.factor(of), norm, self.max_norm)
        return self._value


def product(a: Factor, b: Factor) -> Factor:
    """``a * b``, on the device of ``a`` if both are tensors. No host sync."""
    if isinstance(a, PerDevice):
        if isinstance(b, PerDevice):
            return PerDevice(a.value * move(b.value, a.value.device))
        return a if b == 1.0 else PerDevice(a.value * b)
    return product(b, a) if isinstance(b, PerDevice) else a * b


def _factor(value: Factor, device: torch.device) -> float | Tensor:
    return value.on(device) if isinstance(value, PerDevice) else value


def scale(src: Tensors, dst: Tensors, found_inf: FoundInf, factor: Factor, last: bool = False) -> None:
    """``dst[i] = src[i] * factor`` (``ops.multi_tensor_scale``). ``last``: no later call raises ``found_inf``."""
    found = buckets(src, dst)
    for device, fused, (s, d) in found:
        flag = found_inf.on(device)
        if not fused:
            reference.multi_tensor_scale(s, d, flag, ops.factor(_factor(factor, device)))
        elif isinstance(factor, Clipped):
            inv_scale, norm = _factor(factor.inv_scale, device), factor.norm.on(device)
            ops.multi_tensor_scale_clipped(s, d, flag, inv_scale, norm, factor.max_norm)
        else:
            update = found_inf.take_update() if last and len(found) == 1 else None
            ops.multi_tensor_scale(s, d, flag, _factor(factor, device), update)
    wrote(dst)


def axpby(
    x: Tensors, y: Tensors, out: Tensors, found_inf: FoundInf, a: Factor, b: Factor, arg_to_check: int = -1
) -> None:
    """``out[i] = a * x[i] + b * y[i]`` (``ops.multi_tensor_axpby``)."""
    for device, fused, (s, t, o) in buckets(x, y, out):
        flag, a_, b_ = found_inf.on(device), _factor(a, device), _factor(b, device)
        if fused:
            ops.multi_tensor_axpby(s, t, o, flag, a_, b_, arg_to_check)
        else:
            reference.multi_tensor_axpby(s, t, o, flag, ops.factor(a_), ops.factor(b_), arg_to_check)
    wrote(out)


def l2norm(tensors: Tensors, found_inf: FoundInf) -> Tensor:
    """The L2 norm of everything as a 0-d tensor on the device of the first tensor. No host sync."""
    return unscale_l2norms_of(tensors, found_inf, 1.0, per_tensor=False)[0]


def unscale_l2norm(tensors: Tensors, found_inf: FoundInf, inv_scale: Factor) -> Tensor:
    """``l2norm`` of the tensors times ``inv_scale``. Does not change them. No host sync."""
    return unscale_l2norms_of(tensors, found_inf, inv_scale, per_tensor=False)[0]


def unscale_l2norms(tensors: Tensors, found_inf: FoundInf, inv_scale: Factor) -> tuple[Tensor, Tensor]:
    """``unscale_l2norm``, and the norm of each tensor, ``[len(tensors)]`` on the device of the first. No host sync."""
    total, groups = unscale_l2norms_of(tensors, found_inf, inv_scale)
    if len(groups) == 1:
        return total, groups[0][1]
    each = torch.empty(len(tensors), dtype=reference.compute_dtype(*tensors), device=total.device)
    for places, norms in groups:
        for place, norm in zip(places, norms.unbind(), strict=True):
            each[place].copy_(norm, non_blocking=each.device.type != "cpu")
    return total, each


def unscale_l2norms_of(
    tensors: Tensors, found_inf: FoundInf, inv_scale: Factor, last: bool = False, per_tensor: bool = True
) -> tuple[Tensor, list[tuple[Sequence[int], Tensor]]]:
    """``unscale_l2norm``, and each tensor's norm. One group per op call: places in the list, norms ``[len(places)]``.

    ``last``: as for ``scale``. No host sync.
    """
    every = range(len(tensors))
    totals: list[Tensor] = []
    groups: list[tuple[Sequence[int], Tensor]] = []
    found = buckets(tensors, along=[every] if per_tensor else [])
    for device, fused, (group, *places) in found:
        flag, factor = found_inf.on(device), _factor(inv_scale, device)
        if fused and last and len(found) == 1 and (update := found_inf.take_update()):
            total, norms, found_inf.norm_again = ops.unscale_l2norm_and_update(group, flag, factor, per_tensor, update)
        elif fused:
            total, norms = ops.multi_tensor_unscale_l2norm(group, flag, factor, per_tensor)
        else:
            total, norms = reference.multi_tensor_unscale_l2norm(group, flag, ops.factor(factor), per_tensor)
        totals.append(total)
        groups.append((places[0] if places else every, norms))
    return totals[0] if len(totals) == 1 else joined_norm(totals), groups


def joined_norm(norms: Tensors) -> Tensor:
    """Joins the L2 norms of parts, 0-d on the device of the first; ``tensor(0.)`` without parts. No host sync."""
    if not norms:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    if len(norms) == 1:
        return norms[0]
    first = norms[0]
    return torch.linalg.vector_norm(torch.stack([move(norm, first.device).to(first.dtype) for norm in norms]))
