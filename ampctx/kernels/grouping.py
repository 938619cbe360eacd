"""Buckets parallel tensor lists for the ops, which take one device and one dtype per list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx.kernels.ops import are_uniform
from ampctx.kernels.reference import KERNEL_DTYPES, Tensors, is_dense, same_layout
from ampctx.kernels.sharding import local
from ampctx.kernels.tensor_loops import all_resolved, device_of, dtype_of, layout_of


class Bucket(NamedTuple):
    """Tensors for one op call (``fused``), or for plain torch, one at a time."""

    device: torch.device
    fused: bool
    lists: list[Any]


def _has_kernel(devices: Sequence[torch.device], dtypes: Sequence[torch.dtype], known: Sequence[torch.dtype]) -> bool:
    if len(set(devices)) > 1 or not all(map(known.__contains__, dtypes)):
        return False
    return devices[0].type == "cpu" or torch.float64 not in dtypes


def _agree(row: Sequence[Tensor]) -> bool:
    """Whether a kernel can walk tensors together in memory order."""
    return set(map(layout_of, row)) == {torch.strided} and (
        all(map(Tensor.is_contiguous, row)) or (is_dense(row[0]) and all(same_layout(t, row[0]) for t in row[1:]))
    )


def buckets(
    *lists: Tensors, along: Sequence[Sequence[Any]] = (), known_dtypes: Sequence[torch.dtype] = KERNEL_DTYPES
) -> list[Bucket]:
    """Splits parallel lists by the device and dtypes at each index, in order of first appearance. A bucket's device is
    that of its first list. DTensors become this rank's parts. Negated views and ZeroTensors go to plain torch.

    ``along``: more lists to split the same way, which follow in a bucket. ``known_dtypes``: those of the kernels.
    """
    if len(set(map(len, (*lists, *along)))) > 1:
        raise ValueError(f"lists of different lengths: {[len(tensors) for tensors in (*lists, *along)]}")
    if not (uniform := are_uniform(lists)):
        lists = tuple(map(local, lists))
        uniform = are_uniform(lists)
    every = (*lists, *along)
    if uniform:
        first = list(map(itemgetter(0), lists))
        if _has_kernel(list(map(device_of, first)), list(map(dtype_of, first)), known_dtypes):
            return [Bucket(first[0].device, True, [*every])]
    resolved = uniform or all(map(all_resolved, lists))
    found: dict[tuple, Bucket] = {}
    has_kernel: dict[tuple, bool] = {}
    for row in zip(*every, strict=True):
        tensors = row[: len(lists)]
        devices, dtypes = tuple(map(device_of, tensors)), tuple(map(dtype_of, tensors))
        kind = devices, dtypes
        if kind not in has_kernel:
            has_kernel[kind] = _has_kernel(devices, dtypes, known_dtypes)
        fused = has_kernel[kind] and (resolved or all_resolved(tensors)) and _agree(tensors)
        key = (devices[0], dtypes, fused)
        if key not in found:
            found[key] = Bucket(devices[0], fused, [[] for _ in every])
        for of_bucket, t in zip(found[key].lists, row, strict=True):
            of_bucket.append(t)
    return list(found.values())


def stacks(sizes: Iterable[tuple[Any, int]], most: int) -> list[list[int]]:
    """Sorts (kind, size) into stacks: lists of places of one kind, in order, with at most ``most`` together, or one
    place with more."""
    found: list[list[int]] = []
    unfilled: dict[Any, tuple[list[int], int]] = {}
    for i, (kind, size) in enumerate(sizes):
        stack, room = unfilled.get(kind, ([], 0))
        if not stack or size > room:
            stack, room = [], most
            found.append(stack)
        stack.append(i)
        unfilled[kind] = stack, room - size
    return found
