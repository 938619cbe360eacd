"""Names that ampctx-apex may use of the core beyond its public API: those imported here, and functions.

When the core changes, only this file follows. tests/test_layers.py compares it with what ampctx-apex uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ampctx._collectives import is_rank_zero
from ampctx._decorators import names_arguments
from ampctx._saved import plain
from ampctx.amp import AmpSession, _default_session
from ampctx.amp.options import resolve
from ampctx.amp.step import OptimizerBinding
from ampctx.casts.arguments import LOW_PRECISION, Undo, map_leaves
from ampctx.casts.autocast import Autocast
from ampctx.casts.casting import cast_model, set_dtype
from ampctx.foreach import Factor, FoundInf
from ampctx.kernels.reference import KERNEL_DTYPES, compute_dtype
from ampctx.kernels.sharding import is_sharded
from ampctx.optimizers._base import FusedOptimizer
from ampctx.optimizers._options import Group
from ampctx.optimizers._options import check_number as check_option
from ampctx.optimizers._work import Work
from ampctx.optimizers.layerwise import Layers, adapt, multiply, run_op
from ampctx.scaling.loss_scale import (
    DYNAMIC,
    LossScale,
    check_bounds,
    check_count,
    check_scale,
    only_amp_entry,
    read_amp_entries,
    read_grad_scaler_state,
    required,
)
from ampctx.scaling.loss_scale import check_number as check_real
from ampctx.scaling.step_record import OUTSIDE_OF_BLOCKS, overflowed
from ampctx.weights.clip import strided_grad
from ampctx.weights.frames import Frame
from ampctx.weights.masters import MasterParams
from ampctx.weights.step import Step

# apex.amp is one session; its modules show that session's state.
session: AmpSession = _default_session

# --- casts: apex.amp.handle -------------------------------------------------------------------------------------------


def active_casts() -> Autocast | None:
    """The latest active casts of the default session."""
    return session._casts.current


def end_casts(autocast: Autocast) -> None:
    """Ends casts of the default session before its reset."""
    if autocast in session._casts.undo:
        session._casts.undo[autocast]()


# --- loss scales: apex.amp.scaler -------------------------------------------------------------------------------------


def view_of(scale: LossScale) -> Any:
    """The ``LossScaler`` notified of each inf/nan check of ``scale``, or None."""
    return scale.observer


def set_view(scale: LossScale, view: Any) -> None:
    scale.observer = view


def is_deferred(scale: LossScale) -> bool:
    """Whether a ``delay_overflow_check`` block left the ``found_inf`` flag of ``scale`` to its next update."""
    return scale in session._deferred


def take_deferred(scale: LossScale) -> Tensor | None:
    """Takes that flag for ``LossScaler.update_scale``; the next step no longer waits for it."""
    found_inf = session._deferred.pop(scale, None)
    if found_inf is not None:
        for binding in session._bindings.values():
            binding.flags.drop_provisional(scale)
    return found_inf


# --- optimizers: apex.amp._process_optimizer, checkpoints -------------------------------------------------------------


def watch_optimizers(tell: Callable[[Mapping[Any, OptimizerBinding]], Undo]) -> bool:
    """Calls ``tell`` with the default session's bindings, now and at each ``initialize``, until reset.

    Returns False if it was registered already.
    """
    if tell in session.observers:
        return False
    session.observers.append(tell)
    session._undo.callback(tell(dict(session._bindings)))
    return True


def unwatch_optimizers(tell: Callable[[Mapping[Any, OptimizerBinding]], Undo]) -> list[Any]:
    """Unregisters ``tell``. Returns the bound optimizers."""
    session.observers.remove(tell)
    return list(session._bindings)


def masters_in(session: AmpSession, optimizer: Any) -> MasterParams | None:
    """The session's masters for an optimizer, or None."""
    binding = session._binding_of(optimizer)
    return binding.masters if binding is not None and binding.masters.pairs else None


def will_skip(binding: OptimizerBinding) -> bool:
    """Whether the next step will be skipped, by the checks so far. A host sync."""
    return bool(overflowed(binding.flags.by_loss))


def refresh(binding: OptimizerBinding) -> None:
    """Between blocks: syncs masters and gradients with the user's changes."""
    if binding.gradients.is_idle:
        binding.refresh()


# --- accumulation windows: loops that call apex's prepare and post instead of scale_loss ------------------------------


def in_block(binding: OptimizerBinding) -> bool:
    return binding.gradients.depth > 0


def window(binding: OptimizerBinding) -> Any:
    """The open accumulation window of scaled gradients, or None. Compare by identity only."""
    return binding.gradients.window


def open_window(binding: OptimizerBinding, inv_scale: Factor) -> Any:
    """Stashes ``.grad``. New gradients count as scaled by the first loss scale until ``close_window``."""
    with torch.no_grad():
        binding.enter(1.0, 1.0)
        binding.gradients.delay(inv_scale, (0, binding.loss_scales[0]))
    return binding.gradients.window


def drop_window(binding: OptimizerBinding) -> None:
    """Discards the window and restores the stash."""
    binding.gradients.abandon(-1)


def declare_scaled(binding: OptimizerBinding, inv_scale: Factor) -> None:
    """Opens a window around ``.grad``, scaled by the first loss scale. A step or block closes it."""
    gradients = binding.gradients
    binding.masters.place.materialize()
    scaled = [p for p in binding.masters.leaves if p.grad is not None]
    if gradients.window is None:
        gradients.frames[:] = [Frame(1.0, inv_scale, {}, True, (0, binding.loss_scales[0]), scaled)]
    else:
        gradients.window.scaled = scaled


def close_window(binding: OptimizerBinding, inv_scale: Factor) -> FoundInf:
    """Unscales the window's gradients, or ``.grad`` without one. Returns its ``found_inf`` flag."""
    if binding.gradients.window is None:
        declare_scaled(binding, inv_scale)
    return binding.gradients.collect(inv_scale=inv_scale)


def conclude(binding: OptimizerBinding, scale: LossScale, found_inf: Tensor) -> None:
    """Leaves a ``found_inf`` flag to the next update of ``scale``, as a ``delay_overflow_check`` block does."""
    loss_id = binding.loss_scales.index(scale) if scale in binding.loss_scales else OUTSIDE_OF_BLOCKS
    session._conclude([binding], scale, loss_id, found_inf, delay=True)
