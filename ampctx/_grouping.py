"""Buckets parallel tensor lists for the ops, which take one device and one dtype per list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ampctx._reference import KERNEL_DTYPES, is_dense, same_layout


class Bucket(NamedTuple):
    """Tensors that can go into one op call (``fused``), or that need plain torch, tensor by tensor."""

    device: torch.device
    fused: bool
    lists: list[list[Tensor]]


# What the tensors at one index have in common with others: their devices, dtypes, and which are contiguous.
_Kind = tuple[tuple[torch.device, ...], tuple[torch.dtype, ...], tuple[bool, ...]]


def _kinds(lists: Sequence[Sequence[Tensor]]) -> list[_Kind]:
    devices = zip(*([t.device for t in tensors] for tensors in lists), strict=True)
    dtypes = zip(*([t.dtype for t in tensors] for tensors in lists), strict=True)
    contiguous = zip(*([_is_contiguous(t) for t in tensors] for tensors in lists), strict=True)
    return list(zip(devices, dtypes, contiguous, strict=True))


def _has_kernel(kind: _Kind, known_dtypes: Sequence[torch.dtype]) -> bool:
    devices, dtypes, _ = kind
    on_cpu = devices[0].type == "cpu"
    known = all(d in known_dtypes and (on_cpu or d != torch.float64) for d in dtypes)
    return known and all(d == devices[0] for d in devices)


def _is_contiguous(t: Tensor) -> bool:
    return t.layout is torch.strided and t.is_contiguous()


def _alike(lists: Sequence[Sequence[Tensor]]) -> bool:
    """Whether the tensors of each list, one at least, are contiguous and of one dtype, all of them on one device.

    The usual case of a step. Sets alone: thousands of tuples would be as many objects for the garbage collector.
    """
    devices = set()
    for tensors in lists:
        if len({t.dtype for t in tensors}) != 1 or {t.layout for t in tensors} != {torch.strided}:
            return False
        if {t.is_contiguous() for t in tensors} != {True}:
            return False
        devices.update({t.device for t in tensors})
    return len(devices) == 1


def _agree(row: tuple[Tensor, ...]) -> bool:
    """Whether tensors that are not all contiguous can be walked in memory order together."""
    if any(t.layout is not torch.strided for t in row):
        return False
    return is_dense(row[0]) and all(same_layout(t, row[0]) for t in row[1:])


def buckets(
    *lists: Sequence[Tensor],
    along: Sequence[Sequence[Tensor]] = (),
    known_dtypes: Sequence[torch.dtype] = KERNEL_DTYPES,
) -> list[Bucket]:
    """Splits parallel lists by the device and dtypes at each index, in order of first appearance.

    All lists must be equally long. The device of a bucket is that of the first list's tensors.

    Args:
        along: more lists, which are split with the others and come after them in a bucket, but have no say in where an
            index goes: those whose tensors have another size.
        known_dtypes: the dtypes that the kernels in question take.
    """
    every = (*lists, *along)
    if len({len(tensors) for tensors in every}) == 1 and _alike(lists):
        (kind,) = _kinds([tensors[:1] for tensors in lists])
        if _has_kernel(kind, known_dtypes):
            return [Bucket(kind[0][0], True, [list(tensors) for tensors in every])]
    kinds = _kinds(lists)
    has_kernel = {kind: _has_kernel(kind, known_dtypes) for kind in set(kinds)}
    found: dict[tuple, Bucket] = {}
    for row, kind in zip(zip(*every, strict=True), kinds, strict=True):
        devices, dtypes, contiguous = kind
        fused = has_kernel[kind] and (all(contiguous) or _agree(row[: len(lists)]))
        key = (devices[0], dtypes, fused)
        if key not in found:
            found[key] = Bucket(devices[0], fused, [[] for _ in every])
        for tensors, t in zip(found[key].lists, row, strict=True):
            tensors.append(t)
    return list(found.values())
