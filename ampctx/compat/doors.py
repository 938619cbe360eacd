"""What compat needs of the core and no ordinary user does. The one file here that imports more than public names.

When the core changes, this file follows, and the rest of compat stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx.amp import AmpSession, _default_session
from ampctx.amp.binding import OptimizerBinding
from ampctx.amp.opt_level import BRIEFS, resolve
from ampctx.casts.arguments import LOW_PRECISION, Undo, map_leaves
from ampctx.casts.autocast import Autocast
from ampctx.casts.casting import cast_model, set_dtype
from ampctx.casts.functions import call_cast
from ampctx.foreach import Factor, FoundInf
from ampctx.kernels.calling_form import Call, Number, TensorLists, foreach_factor, found_in, norms
from ampctx.kernels.grouping import buckets
from ampctx.kernels.reference import compute_dtype
from ampctx.masters.clip import strided_grad
from ampctx.masters.params import MasterParams
from ampctx.masters.state_dicts import masters_of
from ampctx.optimizers._base import FusedOptimizer
from ampctx.optimizers._checkpoint import SIZED
from ampctx.optimizers._options import Group
from ampctx.optimizers._options import check_number as check_option
from ampctx.optimizers._work import Scaling, Work
from ampctx.optimizers._work import call as _call_op
from ampctx.scaling.formats import (
    fp16_optimizer_entry,
    is_amp_state,
    is_grad_scaler_state,
    plain,
    read_amp_entries,
    read_grad_scaler_state,
    to_amp_state,
    to_grad_scaler_state,
)
from ampctx.scaling.guarded_step import OUTSIDE_OF_BLOCKS, overflowed
from ampctx.scaling.loss_scale import DYNAMIC, LossScale, check_bounds, check_count, check_scale
from ampctx.scaling.loss_scale import check_number as check_real

# apex.amp is one session, whose state its modules show.
session: AmpSession = _default_session

# --- casts: apex.amp.handle -------------------------------------------------------------------------------------------


def active_casts() -> Autocast | None:
    """The latest casts that are on in the default session."""
    return session._casts.current


def end_casts(autocast: Autocast) -> None:
    """Takes casts out of the default session before its reset would."""
    if autocast in session._casts.undo:
        session._casts.undo[autocast]()


# --- loss scales: apex.amp.scaler -------------------------------------------------------------------------------------


def view_of(scale: LossScale) -> Any:
    """The ``LossScaler`` that is told of each check for ``scale`` (``checked``); None without one."""
    return scale.observer


def set_view(scale: LossScale, view: Any) -> None:
    scale.observer = view


def is_deferred(scale: LossScale) -> bool:
    """Whether a block with ``delay_overflow_check`` has left the flag of ``scale`` to its next update."""
    return scale in session._blocks.deferred


def take_deferred(scale: LossScale) -> Tensor | None:
    """That flag, which ``LossScaler.update_scale`` decides by; the next step does not wait for it any more."""
    return session._blocks.take_deferred(scale)


# --- optimizers: apex.amp._process_optimizer, checkpoints -------------------------------------------------------------


def watch_optimizers(tell: Callable[[Mapping[Any, OptimizerBinding]], Undo]) -> bool:
    """Has the default session call ``tell`` for what it has bound, now and at each ``initialize``; reset undoes it.

    False where it did so already.
    """
    if tell in session.observers:
        return False
    session.observers.append(tell)
    session._undo.callback(tell(dict(session._bindings)))
    return True


def unwatch_optimizers(tell: Callable[[Mapping[Any, OptimizerBinding]], Undo]) -> list[Any]:
    """Ends that. Returns the optimizers that are bound."""
    session.observers.remove(tell)
    return list(session._bindings)


def masters_in(session: AmpSession, optimizer: Any) -> MasterParams | None:
    """The masters that a session keeps for an optimizer; None where it keeps none."""
    binding = session._binding_of(optimizer)
    return binding.masters if binding is not None and binding.masters.pairs else None


def will_skip(binding: OptimizerBinding) -> bool:
    """Whether the next step will be skipped, as far as is known. A host sync."""
    return bool(overflowed(binding.flags.by_loss))


def refresh(binding: OptimizerBinding) -> None:
    """Between blocks: masters and gradients follow what users have changed."""
    if binding.gradients.is_idle:
        binding.refresh()


# --- windows: loops that do by hand what scale_loss does, through apex's prepare and post -----------------------------


def in_block(binding: OptimizerBinding) -> bool:
    return binding.gradients.depth > 0


def set_aside(binding: OptimizerBinding) -> Mapping[Tensor, Tensor]:
    """The gradients from before the block or the window."""
    return binding.gradients.stash


def window(binding: OptimizerBinding) -> Any:
    """Stands for the scaled gradients between blocks; None where there are none."""
    return binding.gradients.window


def open_window(binding: OptimizerBinding, inv_scale: Factor) -> Any:
    """Sets aside what is in ``.grad``. What comes is scaled, by the first loss scale until somebody says otherwise."""
    with torch.no_grad():
        binding.begin(1.0, 1.0)
        binding.gradients.delay(inv_scale, (0, binding.loss_scales[0]))
    return binding.gradients.window


def drop_window(binding: OptimizerBinding) -> None:
    """As if it had never been opened."""
    binding.gradients.drop_window()


def declare_scaled(binding: OptimizerBinding, inv_scale: Factor) -> None:
    """What is in ``.grad`` is scaled by the first loss scale: a window around it, for a step or a block to end."""
    binding.gradients.declare_scaled(inv_scale, (0, binding.loss_scales[0]))


def close_window(binding: OptimizerBinding, inv_scale: Factor) -> FoundInf:
    """Unscales what is in the window; without one, what is in ``.grad``. Whether it held inf or nan."""
    found_inf = FoundInf()
    if binding.gradients.window is None:
        declare_scaled(binding, inv_scale)
    binding.gradients.close_window(inv_scale, found_inf)
    return found_inf


def conclude(binding: OptimizerBinding, scale: LossScale, found_inf: Tensor) -> None:
    """A flag for ``scale`` that waits for its update, as that of a block with ``delay_overflow_check``."""
    loss_id = binding.loss_scales.index(scale) if scale in binding.loss_scales else OUTSIDE_OF_BLOCKS
    session._blocks.conclude([binding], scale, loss_id, found_inf, delay=True)


# --- op calls: amp_C --------------------------------------------------------------------------------------------------


def run_op(
    op: str,
    lists: Mapping[str, Sequence[Tensor]],
    one_element: Mapping[str, Sequence[Tensor]],
    empty: Sequence[str],
    numbers: Mapping[str, Any],
) -> None:
    """``ampctx.optimizer_ops``'s ``op``, once for each combination of dtypes and layouts in ``lists``.

    Lists by the names of the op's arguments: of the parameters' size, of one-element tensors, and those left ``empty``.
    """
    kind = ("copy" if "extras" in lists else "nearest", False)
    for device, fused, rows in buckets(*lists.values(), along=list(one_element.values())):
        named: dict[str, Any] = {**{name: [] for name in empty}, **dict(zip([*lists, *one_element], rows, strict=True))}
        _call_op(op, Work({}, kind, device, fused, [], named, {}), {**numbers, "seed": 0})


__all__ = [
    "BRIEFS",
    "DYNAMIC",
    "LOW_PRECISION",
    "SIZED",
    "Autocast",
    "Call",
    "FusedOptimizer",
    "Group",
    "LossScale",
    "MasterParams",
    "Number",
    "OptimizerBinding",
    "Scaling",
    "TensorLists",
    "Undo",
    "Work",
    "active_casts",
    "call_cast",
    "cast_model",
    "check_bounds",
    "check_count",
    "check_option",
    "check_real",
    "check_scale",
    "close_window",
    "compute_dtype",
    "conclude",
    "declare_scaled",
    "drop_window",
    "end_casts",
    "foreach_factor",
    "found_in",
    "fp16_optimizer_entry",
    "in_block",
    "is_amp_state",
    "is_deferred",
    "is_grad_scaler_state",
    "map_leaves",
    "masters_in",
    "masters_of",
    "norms",
    "open_window",
    "plain",
    "read_amp_entries",
    "read_grad_scaler_state",
    "refresh",
    "resolve",
    "run_op",
    "session",
    "set_aside",
    "set_dtype",
    "set_view",
    "strided_grad",
    "take_deferred",
    "to_amp_state",
    "to_grad_scaler_state",
    "unwatch_optimizers",
    "view_of",
    "watch_optimizers",
    "will_skip",
    "window",
]
