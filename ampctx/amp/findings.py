"""Finds the parameters whose gradients were not finite in a step."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ampctx.kernels.tensor_loops import stored_grad
from ampctx.masters.lazy_grads import ModelGrads
from ampctx.scaling.outcome import Culprit, Culprits, culprits_among

if TYPE_CHECKING:
    from ampctx.amp.binding import OptimizerBinding


def culprits(binding: OptimizerBinding) -> Culprits:
    """The parameters with non-finite gradients now. Lazy gradients stay lazy."""
    masters, lazy = binding.masters, binding.gradients.lazy
    grads = {} if lazy is None else lazy.grads
    of_masters = ((p, grads[m] if m in grads else stored_grad(m)) for p, m in masters.pairs)
    found = itertools.chain(of_masters, ((p, p.grad) for p in masters.params_without_master))
    return culprits_among(((p, grad) for p, grad in found if grad is not None), binding.names_by_id)


def culprits_of(binding: OptimizerBinding, epoch: int, checked: ModelGrads | None) -> Culprits | None:
    """The parameters with non-finite gradients of a step that the device skipped, as far as they are still known."""
    if binding.masters.pairs and checked is None:
        return None
    found: Culprits = ()
    if checked is not None and (masters := checked.not_finite()):
        names = binding.names_by_id()
        found = tuple(
            Culprit(names.get(id(p), "a parameter of no group"), p.shape, None, None)
            for p, master in binding.masters.pairs
            if id(master) in masters
        )
    if epoch == binding.steps.epoch:
        others = ((p, p.grad) for p in binding.masters.params_without_master if p.grad is not None)
        found += culprits_among(others, binding.names_by_id)
    return found or None
