"""Guards: steps that are skipped for their gradients, in loops without amp and without a GradScaler.

One number decides: the norm of all gradients, over the ranks of DTensors and of ``process_group``, or a larger one that
``clip_grad_norm_`` has found before. Where an element is inf or nan, so is the norm. The device skips and counts.
"""

from __future__ import annotations

import logging
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ampctx._collectives import check_process_group, is_rank_zero
from ampctx._decorators import outside_of_graphs
from ampctx._errors import AmpError, AmpValueError
from ampctx._saved import FORMAT, plain
from ampctx.kernels.foreach import join_flags, move
from ampctx.kernels.tensor_loops import grad_of, layout_of, version_of
from ampctx.optimizers import _options
from ampctx.optimizers._checkpoint import SKIPPED
from ampctx.scaling import step_record
from ampctx.scaling.loss_scale import LossScale
from ampctx.scaling.outcome import NO_STEP_YET, Culprits, StepOutcome, culprits_later, params_of
from ampctx.scaling.step_record import StepRecord
from ampctx.weights.clip import CLIPPED, norm_of, raised_by_any_rank

logger = logging.getLogger("ampctx")
# The arguments of optimizers.
OPTIONS = ("skip_nonfinite", "skip_norm_above", "process_group")
# Of ``skip_nonfinite`` alone.
_LARGEST = torch.finfo(torch.float32).max


class Guard:
    """The guard of one optimizer, and the record of its steps. It does not refer to the optimizer."""

    def __init__(self, kind: str, skip_norm_above: Any, process_group: Any) -> None:
        above = _LARGEST if skip_norm_above is None else _options.check_number("skip_norm_above", skip_norm_above)
        check_process_group(process_group)
        self._kind, self._limit, self._group = kind, min(above, _LARGEST), process_group
        self._scale, self.earlier = LossScale(1.0, dynamic=False), 0  # skips before the checkpoint that was loaded
        self.record = StepRecord(None, 0, report=partial(_log, kind))
        # Of the step that runs: the flags of an overflow and of a skip, the norm, the first gradient with its version,
        # and whether a clip has left a norm.
        self._now: tuple[Tensor, Tensor, Tensor, list[Any], bool] | None = None

    @property
    def has_limit(self) -> bool:
        return self._limit < _LARGEST

    @outside_of_graphs
    def check(self, optimizer: Any, found_inf: Tensor | None = None) -> Tensor:
        """The flag of this step, with ``found_inf`` of other code. Every rank of the group and of meshes must take
        part. No host sync."""
        if getattr(optimizer, "grad_scale", None) is not None:
            raise AmpError(
                f"{self._kind}.step(): a GradScaler steps an optimizer with skip_nonfinite or skip_norm_above, whose "
                "gradients are still scaled. Call scaler.unscale_(optimizer) before, or leave these arguments out: the "
                "scaler skips steps on inf and nan."
            )
        self.record.epoch += 1
        params = params_of(optimizer)
        grads = [grad for grad in map(grad_of, params) if grad is not None]
        if not set(map(layout_of, grads)) <= {torch.strided}:
            list(_options.with_grads(self._kind, optimizer.param_groups))  # which refuses sparse ones by name
        call = f"{self._kind}.step()"
        norm = norm_of(params, self._group, call)
        norm = move(norm, params[0].device) if params else norm  # without gradients it is on the CPU
        clipped = {id(n): n for grad in grads if (n := getattr(grad, CLIPPED, None)) is not None}
        for before in clipped.values():
            norm = torch.maximum(norm, before.to(norm))  # nan stays
        is_bad = norm.isfinite().logical_not_().float()
        # Not "above": nan is above nothing.
        skips = torch.maximum(is_bad, (norm <= self._limit).logical_not_().float())
        if found_inf is not None:
            skips = join_flags([skips, found_inf.ne(0).float()], skips.device)
        # Ranks may differ in what a clip has left, in plain parameters beside DTensors, and in flags.
        is_bad, skips = raised_by_any_rank(torch.stack((is_bad, skips)), params, self._group, call).unbind()
        first = [(weakref.ref(grad), version_of(grad)) for grad in grads[:1] if not grad.is_inference()]
        self._now = is_bad, skips, norm, first, bool(clipped)
        return skips

    @outside_of_graphs
    def concluded(self, optimizer: Any) -> None:
        """Records the step that ``check`` was called for. No host sync."""
        assert self._now is not None
        (is_bad, skips, norm, first, was_clipped), self._now = self._now, None
        for grad in map(grad_of, params_of(optimizer)) if was_clipped else ():
            if grad is not None:
                vars(grad).pop(CLIPPED, None)
        stepped = weakref.ref(optimizer)

        def later(is_current: bool) -> Culprits:
            if not is_bad.item():
                return ()
            is_there = any((grad := ref()) is not None and version_of(grad) == version for ref, version in first)
            return culprits_later(stepped, is_current and is_there)

        flags = {0: (self._scale, is_bad)}
        outcome = self.record.left_to_device(flags, {}, norm, skips, later, external=True)
        self.record.conclude(optimizer, outcome)

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None:
            raise AmpError(
                f"a {self._kind} with a process_group cannot be copied or pickled, because the group belongs to this "
                "process. Make a new one, and load the state_dict() of this one into it."
            )
        return self.__dict__


def guard_of(kind: str, skip_nonfinite: Any, skip_norm_above: Any, process_group: Any) -> Guard | None:
    """The guard that the arguments of an optimizer of class ``kind`` ask for. AmpTypeError, AmpValueError, AmpError."""
    if _options.check_flag("skip_nonfinite", skip_nonfinite) or skip_norm_above is not None:
        return Guard(kind, skip_norm_above, process_group)
    if process_group is not None:
        raise AmpValueError(f"{kind}: process_group is for skip_nonfinite and skip_norm_above. Pass one of them.")
    return None


def _log(kind: str, before: int, skipped: int, losses: Any, culprits: Culprits, steps: int) -> None:
    """Logs skipped steps when the host learns of them. On rank 0."""
    if is_rank_zero() and step_record.is_to_tell(before, skipped):
        logger.warning(
            "%s: %d of %d steps skipped so far, for inf, nan or a large norm of gradients: see optimizer.outcome "
            "and `ampctx explain skip_nonfinite`.",
            *(kind, skipped, steps),
        )


class Guarded:
    """Mixin: outcome, skipped_steps and checkpoint entries of an optimizer with skip_nonfinite or skip_norm_above."""

    _guard: Guard | None = None
    param_groups: list[dict[str, Any]]

    @property
    def outcome(self) -> StepOutcome:
        """The ``StepOutcome`` of the latest step with ``skip_nonfinite`` or ``skip_norm_above``. Without them there is
        no step. ``reason`` is "overflow" for inf or nan in the gradients, "found_inf" for a norm that is too large, or,
        in fused optimizers, a flag that other code has set. No host sync; reading attributes is."""
        return NO_STEP_YET if self._guard is None else self._guard.record.outcome

    def skipped_steps(self) -> int:
        """Counts the steps that ``skip_nonfinite`` and ``skip_norm_above`` have skipped, also before a checkpoint. Host
        sync."""
        return 0 if self._guard is None else self._guard.earlier + self._guard.record.skipped_steps()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._guard is not None:  # a flattened state of torch.distributed has the options that groups have here
            self.param_groups[-1].setdefault(SKIPPED, 0)

    def _saved(self, state: dict[str, Any], is_own: bool) -> dict[str, Any]:
        """A state dict in a format of ampctx's own, or as it is without a guard or anything else of its own. The count
        is an option of the groups, which ``get_state_dict`` of torch.distributed keeps. Host sync with a guard."""
        if self._guard is not None:
            count = self.skipped_steps()
            state["param_groups"] = [{**group, SKIPPED: count} for group in state["param_groups"]]
        return {**state, "format": FORMAT} if is_own or self._guard is not None else state

    def _restore(self) -> None:
        """Takes the count from the groups that were loaded."""
        count = max((plain(group.pop(SKIPPED, 0)) for group in self.param_groups), default=0)
        if self._guard is not None:
            self._guard.earlier = count - self._guard.record.skipped_steps()
            for group in self.param_groups:
                group[SKIPPED] = count
