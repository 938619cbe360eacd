"""The parameters of an optimizer under amp whose gradients were inf or nan. ``binding``: its ``OptimizerBinding``."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from ampctx.scaling.outcome import Culprit, Culprits, culprits_among


def now(binding: Any) -> Culprits:
    """Reads all gradients: a host sync."""
    others = ((p, p.grad) for p in binding.masters.params_without_master)
    found = itertools.chain(binding.gradients.of_pairs(), others)
    return culprits_among(((p, grad) for p, grad in found if grad is not None), binding.names_by_id)


def later(reference: weakref.ref, checked: Any, is_current: bool) -> Culprits:
    """After a step that the device skipped, as far as they are known. ``checked``: the gradients that waited for it.
    ``is_current``: whether ``.grad`` still belongs to that step. Host sync."""
    binding = reference()
    if binding is None or (binding.masters.pairs and checked is None):
        return ()
    found: Culprits = ()
    if checked is not None and (masters := checked.not_finite()):
        names = binding.names_by_id()
        of = [p for p, master in binding.masters.pairs if id(master) in masters]
        found = tuple(Culprit(names.get(id(p), "a parameter of no group"), p.shape, None, None) for p in of)
    if is_current:
        others = ((p, p.grad) for p in binding.masters.params_without_master if p.grad is not None)
        found += culprits_among(others, binding.names_by_id)
    return found
