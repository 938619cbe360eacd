"""apex_C: lists of tensors as one flat tensor, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from ampctx_apex.arguments import check_tensor
from torch import Tensor

from ampctx import AmpTypeError, AmpValueError


def _checked(op: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        raise AmpTypeError(f"{op}: tensors must be a list of tensors, got a tensor")
    return [check_tensor(op, f"tensors[{i}]", t) for i, t in enumerate(tensors)]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of all tensors, in row-major order, as one 1-D tensor.

    It shares the memory of a single contiguous tensor. Differentiable.

    Raises:
        AmpTypeError, AmpValueError: not a list of tensors; there is none, or they are on several devices.
    """
    tensors = _checked("flatten", tensors)
    if not tensors:
        raise AmpValueError("flatten: tensors is empty, expected one tensor or more")
    for i, t in enumerate(tensors):
        check_tensor("flatten", f"tensors[{i}]", t, beside=("tensors[0]", tensors[0]))
    flat = [t.reshape(-1) for t in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views into ``flat``, one after the other, with the shapes of ``tensors``. What is left of ``flat`` is left out.

    Raises:
        AmpTypeError, AmpValueError: ``flat`` is no 1-D tensor, or too short; ``tensors`` is not a list of tensors.
    """
    check_tensor("unflatten", "flat", flat)
    if flat.dim() != 1:
        raise AmpValueError(f"unflatten: flat has {flat.dim()} dimensions, expected 1")
    tensors = _checked("unflatten", tensors)
    sizes = [t.numel() for t in tensors]
    if sum(sizes) > flat.numel():
        raise AmpValueError(f"unflatten: flat has {flat.numel()} elements, tensors have {sum(sizes)}")
    parts = flat[: sum(sizes)].split(sizes) if sizes else ()
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
