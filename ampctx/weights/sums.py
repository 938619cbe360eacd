"""Helpers to add up gradients: which may be written in place, and sums of sparse ones."""

from __future__ import annotations

import torch
from torch import Tensor

from ampctx._collectives import is_distributed
from ampctx.kernels import reference
from ampctx.kernels.foreach import Factor, FoundInf, PerDevice
from ampctx.kernels.tensor_loops import is_resolved


def fills_its_storage(t: Tensor) -> bool:
    return t.layout == torch.strided and t.untyped_storage().nbytes() == t.nbytes


def owns_its_memory(t: Tensor) -> bool:
    """False if ``t`` may be a view into a gradient bucket: the next backward would overwrite it."""
    return not is_distributed() and fills_its_storage(t)


def dense_grad(master: Tensor) -> Tensor:
    """The gradient of a master. Converts a sparse one to dense."""
    assert master.grad is not None
    if master.grad.layout != torch.strided:
        master.grad = master.grad.to_dense()
    return master.grad


def writable(t: Tensor) -> Tensor:
    """``t``, or a copy if its elements share memory (an expanded gradient), or torch negates them as it reads."""
    return t if (t.is_contiguous() or reference.is_dense(t)) and is_resolved(t) else t.clone()


def add_sparse(new: Tensor, old: Tensor | None, factor: Factor, found_inf: FoundInf) -> Tensor:
    """``new * factor + old`` for a sparse gradient, in fp32 or wider; complex keeps its type. Sums duplicates before
    the finite check."""
    new = new.coalesce()
    values = new.values()
    reference.raise_flag(found_inf.on(values.device), values)
    scale = factor.on(values.device) if isinstance(factor, PerDevice) else factor
    wide = (new if values.is_complex() else new.to(reference.compute_dtype(values))) * scale
    return wide if old is None else old.to(wide.dtype) + wide
