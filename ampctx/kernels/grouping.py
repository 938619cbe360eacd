"""Buckets parallel tensor lists for the ops, which take one device and one dtype per list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx.kernels.ops import are_uniform
from ampctx.kernels.reference import KERNEL_DTYPES, is_dense, same_layout
from ampctx.kernels.sharding import local
from ampctx.kernels.tensor_loops import all_resolved, device_of, dtype_of, layout_of


class Bucket(NamedTuple):
    """Tensors for one op call (``fused``), or for plain torch, one at a time."""

    device: torch.device
    fused: bool
    lists: list[Any]


# The tensors at one index: their devices, their dtypes, and which are contiguous.
_Kind = tuple[tuple[torch.device, ...], tuple[torch.dtype, ...], tuple[bool, ...]]


def _common_kind(lists: Sequence[Sequence[Tensor]]) -> _Kind | None:
    """The kind that all indices share, if there is one and all tensors are contiguous.

    This runs for every gradient of every step, so it keeps no object per tensor: that would trigger garbage collection.
    """
    devices: list[torch.device] = []
    dtypes: list[torch.dtype] = []
    for i, tensors in enumerate(lists):
        if i and tensors is lists[0]:
            devices.append(devices[0])
            dtypes.append(dtypes[0])
            continue
        of_list, types = set(map(device_of, tensors)), set(map(dtype_of, tensors))
        if len(of_list) != 1 or len(types) != 1:
            return None
        if set(map(layout_of, tensors)) != {torch.strided} or not all(map(Tensor.is_contiguous, tensors)):
            return None
        devices += of_list
        dtypes += types
    return tuple(devices), tuple(dtypes), (True,) * len(lists)


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


def _agree(row: tuple[Tensor, ...]) -> bool:
    """Whether a kernel can walk tensors together in memory order, though not all are contiguous."""
    if any(t.layout is not torch.strided for t in row):
        return False
    return is_dense(row[0]) and all(same_layout(t, row[0]) for t in row[1:])


def buckets(
    *lists: Sequence[Tensor],
    along: Sequence[Sequence[Any]] = (),
    known_dtypes: Sequence[torch.dtype] = KERNEL_DTYPES,
) -> list[Bucket]:
    """Splits parallel lists by the device and dtypes at each index, in order of first appearance.

    An index with a negated view or a ZeroTensor goes to plain torch.

    All lists must be equally long. A bucket's device is that of its first list. DTensors become this rank's parts.

    Args:
        along: more lists to split the same way, such as tensors of another size. They follow the others in a bucket and
            do not decide where an index goes.
        known_dtypes: the dtypes that the kernels take.
    """
    if len({len(tensors) for tensors in (*lists, *along)}) > 1:
        raise ValueError(f"lists of different lengths: {[len(tensors) for tensors in (*lists, *along)]}")
    if are_uniform(lists):
        first = lists[0][0]
        if _has_kernel(((first.device,), tuple(tensors[0].dtype for tensors in lists), ()), known_dtypes):
            return [Bucket(first.device, True, [*lists, *along])]
    lists = tuple(map(local, lists))
    every = (*lists, *along)
    resolved = all(map(all_resolved, lists))
    common = _common_kind(lists) if resolved else None
    if common is not None and _has_kernel(common, known_dtypes):
        return [Bucket(common[0][0], True, [list(tensors) for tensors in every])]
    kinds = _kinds(lists)
    has_kernel = {kind: _has_kernel(kind, known_dtypes) for kind in set(kinds)}
    found: dict[tuple, Bucket] = {}
    for row, kind in zip(zip(*every, strict=True), kinds, strict=True):
        devices, dtypes, contiguous = kind
        tensors = row[: len(lists)]
        fused = has_kernel[kind] and (all(contiguous) or _agree(tensors)) and (resolved or all_resolved(tensors))
        key = (devices[0], dtypes, fused)
        if key not in found:
            found[key] = Bucket(devices[0], fused, [[] for _ in every])
        for of_bucket, t in zip(found[key].lists, row, strict=True):
            of_bucket.append(t)
    return list(found.values())
