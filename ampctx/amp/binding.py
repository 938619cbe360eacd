"""What ``initialize`` ties to an optimizer.

``step``, ``zero_grad``, ``add_param_group`` and ``__reduce_ex__`` (of copies and pickles) are replaced on the instance,
so the object stays the user's own; so are ``first_step`` and ``second_step`` of optimizers in the manner of SAM.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx._compiling import outside_of_graphs
from ampctx._errors import AmpError
from ampctx._grad_mode import without_grad
from ampctx.amp.methods import StepOfCopy, replace, weak_method
from ampctx.casts.model_watch import ParameterNames
from ampctx.kernels import foreach
from ampctx.kernels.each import stored_grad
from ampctx.kernels.foreach import Factor, FoundInf, move
from ampctx.kernels.sharding import values_of
from ampctx.masters.clip import norm_before_clipping
from ampctx.masters.gradients import BlockGradients, Pending
from ampctx.masters.lazy_grads import ModelGrads
from ampctx.masters.params import MasterParams
from ampctx.scaling.device_skips import DeviceSkips, Verdicts, is_capturing, skips_by_itself
from ampctx.scaling.fused_layouts import align_gradients
from ampctx.scaling.history import StepHistory
from ampctx.scaling.loss_scale import LossScale
from ampctx.scaling.outcome import Culprit, Culprits, StepOutcome, culprits_among
from ampctx.scaling.stall import StallGuard
from ampctx.scaling.undo import snapshot, with_wrapped


class _OverflowInClosure(Exception):
    """Leaves ``optimizer.step(closure)`` from inside the closure, before the optimizer has seen the gradients."""


def _SKIPPED() -> None:
    """Takes back a ``first_step`` that was not taken."""


def _asks_to_zero(args: tuple, kwargs: dict[str, Any]) -> bool:
    """SAM's ``first_step(zero_grad=True)``."""
    return bool(args[0] if args else kwargs.get("zero_grad", False))


# What a step finds among the attributes of an optimizer that skips by itself.
_OFFERED = ("found_inf", "model_params", "model_grads")

# The id under which gradients are judged that no block has judged.
OUTSIDE_OF_BLOCKS = -1


class Casts(NamedTuple):
    """How a binding switches the session's casts off for a step, and on again for a closure within it."""

    suspended: Callable[[], AbstractContextManager]
    resumed: Callable[[], AbstractContextManager]


class Reports(NamedTuple):
    """What a binding tells its session about steps, and what it has to know for that.

    skipped: with the number of skips at the last report and now, id, scale and its value for each loss that overflowed,
        and what is known of whose gradients did.
    stepped: with the optimizer and the outcome of every step, where ``wanted``.
    """

    skipped: Callable[[int, int, list[tuple[int, LossScale, float]], Culprits], None]
    stepped: Callable[[Any, StepOutcome], None]
    wanted: Callable[[], bool]
    names: ParameterNames
    max_consecutive_skips: int | None
    history_length: int


class OptimizerBinding:
    """One optimizer under amp: its masters, its gradients, its overflow latch, and its replaced methods.

    ``_verdicts`` is the latch: per loss id, the scale and a 0-d device flag, OR-ed at each scale_loss exit and cleared
    by step.
    """

    def __init__(
        self,
        optimizer: Any,
        masters: MasterParams,
        loss_scales: list[LossScale],
        casts: Casts,
        reports: Reports,
        taken: Callable[[], Container[int]],
        warn: Callable[[str], None],
    ) -> None:
        self.masters = masters
        self.gradients = BlockGradients(masters)
        self.loss_scales = loss_scales
        self._skipped_on_host = 0
        limit = reports.max_consecutive_skips
        self._skipped_on_device = DeviceSkips(weak_method(self._tell_skip), in_a_row=limit is not None)
        self._guard = StallGuard(limit, self._skipped_on_device, deque(maxlen=16))
        # Of the latest step; None before the first.
        self.outcome: StepOutcome | None = None
        self.history = StepHistory(reports.history_length, len(loss_scales))
        # What the losses since the last step were multiplied by.
        self.scales_used: dict[int, Factor] = {}
        # Counts what may change the gradients that a step has left in ``.grad``.
        self._epoch = 0
        self._optimizer = weakref.ref(optimizer)
        self._casts = casts
        self._reports = reports
        self._taken = taken
        self._warn = warn
        # What has been said already.
        self._warned: set[str] = set()
        self._verdicts: Verdicts = {}
        # Those among them that nobody else will decide about.
        self._firm: Verdicts = {}
        self._delayed_by: tuple[int, LossScale] | None = None
        self._active = True
        # A step since gradients were zeroed: one that was skipped may have left inf or nan in ``.grad``.
        self.has_left = False
        # A step raised: the verdicts are for trying it again, and go with the gradients.
        self._step_failed = False
        # Whether the optimizer's own step is running, whose calls of its other methods are not the user's.
        self._in_step = False
        # Between first_step and second_step: what takes the first one back.
        self._uphill: Callable[[], None] | None = None
        self._undo: list[Callable[[], None]] = []
        methods = {
            "step": self._step,
            "zero_grad": self._zero_grad,
            "add_param_group": self._add_param_group,
            "__reduce_ex__": self._reduce_ex,
        }
        if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
            methods |= {"first_step": self._first_step, "second_step": self._second_step}
        # What the optimizer itself has under these names; those of its class, also as an LR scheduler wraps them, are
        # None.
        self._formers = {
            name: None if hasattr(type(optimizer), name) else vars(optimizer).get(name) for name in methods
        }
        try:
            for name, method in methods.items():
                self._undo.append(replace(optimizer, name, method))
            step = vars(optimizer)["step"]
            step.refuse_grad_scaler = step.__func__.refuse_grad_scaler = weak_method(self._refuse_grad_scaler)
        except BaseException:
            self.release()
            raise

    @property
    def optimizer(self) -> Any:
        return self._optimizer()

    def skipped_steps(self) -> int:
        """A host sync where the device decides."""
        return self._skipped_on_host + self._skipped_on_device.total()

    @outside_of_graphs
    def refresh(self, settled: bool = False) -> None:
        """Brings masters and their gradients up to date with what happened outside scale_loss blocks. No host sync.

        ``settled``: the model's weights are what they should be; before the first block a broadcast may still come.
        """
        self.follow_groups()
        self.masters.follow_model(settled)
        delayed_by = self._delayed_by if self.gradients.has_window else None
        found_inf = self.gradients.settle(check_before=self._is_unjudged())
        # A window ends at the same step on every rank, with gradients or without; its flag is agreed on at once.
        groups = [] if delayed_by is None else delayed_by[1].groups_with(self.masters.groups)
        if not found_inf.per_device and not groups:
            return
        flag = found_inf.joined(next(iter(found_inf.per_device), self._device()))
        if delayed_by is None:
            if any(scale.dynamic for scale in self.loss_scales):
                self.latch(OUTSIDE_OF_BLOCKS, self.loss_scales[0], flag)
        elif delayed_by[1].dynamic:
            flag = delayed_by[1].agreed(flag, self.masters.groups)
            self.latch(*delayed_by, flag)
            delayed_by[1].tell(flag)
            delayed_by[1].update(flag)

    def _device(self) -> torch.device:
        params = (p for group in self.optimizer.param_groups for p in group["params"])
        return next((p.device for p in params), torch.device("cpu"))

    @without_grad
    def _judge(self, before_closure: bool = False) -> None:
        """``refresh`` before a step; ranks of a process group or a mesh agree on gradients that no block has judged.

        Flags of blocks are agreed on already. A step without any takes part whether there are gradients or not: ranks
        may differ in that.
        """
        self.refresh(settled=True)
        if not before_closure:  # which may zero it
            self._judge_what_is_left()
        scale = self.loss_scales[0]
        if not scale.groups_with(self.masters.groups):
            return
        if not self._verdicts or OUTSIDE_OF_BLOCKS in self._verdicts:
            default = scale, torch.zeros((), dtype=torch.float32, device=self._device())
            _, flag = self._verdicts.get(OUTSIDE_OF_BLOCKS, default)
            self._verdicts[OUTSIDE_OF_BLOCKS] = (scale, scale.agreed(flag, self.masters.groups))

    @outside_of_graphs
    @without_grad
    def begin(self, scale: Factor, inv_scale: Factor) -> None:
        """Makes ready for the backward of a scale_loss block."""
        self._epoch += 1
        if self.gradients.has_window or self.gradients.in_block:
            self.follow_groups()
            self.masters.follow_model(settled=True)
        else:
            self.refresh(settled=True)
        self.masters.check()
        self.gradients.begin(scale, inv_scale)

    @outside_of_graphs
    def follow_groups(self) -> None:
        """Takes in what users have changed in the optimizer's groups. No host sync."""
        self.masters.follow_groups(self.optimizer, self._taken, self._has_scaled())
        self._tell_of_dropped_grads()

    def _has_scaled(self) -> bool:
        """Whether gradients from before may be multiplied by a scale."""
        return any(not scale.is_identity and scale.scale is not None for scale in self.loss_scales)

    @outside_of_graphs
    def prepare(self, inv_scale: Factor, found_inf: FoundInf, done: set[int] | None) -> None:
        """Unscales and checks the gradients of a scale_loss block, which is still open."""
        self.gradients.prepare(inv_scale, found_inf, done, check_before=self._is_unjudged())

    def _is_unjudged(self) -> bool:
        """Whether no verdict is pending on the gradients of parameters without masters, where there are verdicts."""
        judged = any(loss_id != OUTSIDE_OF_BLOCKS for loss_id in self._verdicts)
        return not judged and any(scale.dynamic for scale in self.loss_scales)

    def _judge_what_is_left(self) -> None:
        """Latches a flag of its own for gradients that an earlier step has left, where no block added to them."""
        if self.has_left and self._is_unjudged():
            found_inf = FoundInf()
            if grads := [values_of(p.grad) for p in self.masters.own if p.grad is not None]:
                foreach.l2norm(grads, found_inf)
                self.latch(OUTSIDE_OF_BLOCKS, self.loss_scales[0], found_inf.joined(grads[0].device))

    @outside_of_graphs
    def delay(self, loss_id: int, loss_scale: LossScale, inv_scale: Factor) -> None:
        """Ends a block whose gradients a later block, or else the step, unscales and judges."""
        self._delayed_by = (loss_id, loss_scale)
        self.gradients.delay(inv_scale)

    @outside_of_graphs
    def abandon(self, depth: int, committing: bool) -> None:
        """Ends a block that raised, see ``BlockGradients.abandon``. The weights go back to where they were before a
        ``first_step``, which the step that this block was for had begun with."""
        self.gradients.abandon(depth, committing)
        if self._uphill is not None and self._uphill is not _SKIPPED:
            restore, self._uphill = self._uphill, None
            restore()
            self.masters.copy_to_model()

    def declare_scaled(self, loss_id: int, loss_scale: LossScale, inv_scale: Factor) -> None:
        """What is in ``.grad`` is scaled, as a delayed block leaves it, and was not scaled by a block."""
        if not self.gradients.has_window:
            self._delayed_by = (loss_id, loss_scale)
        self.gradients.declare_scaled(inv_scale)

    def latch(self, loss_id: int, loss_scale: LossScale, found_inf: Tensor, firm: bool = True) -> None:
        """ORs a flag into what decides about the next step. No host sync.

        ``firm``: nobody else decides about it, and ``withdraw`` leaves it.
        """
        if loss_id in self._verdicts:
            found_inf = torch.maximum(self._verdicts[loss_id][1].to(found_inf.device), found_inf)
        self._verdicts[loss_id] = (loss_scale, found_inf)
        if firm:
            self._firm[loss_id] = self._verdicts[loss_id]

    def withdraw(self, loss_scale: LossScale) -> None:
        """Takes back what was latched for a scale and is not firm: somebody else decides about that. No host sync."""
        for loss_id, (scale, _) in list(self._verdicts.items()):
            if scale is loss_scale:
                del self._verdicts[loss_id]
                if loss_id in self._firm:
                    self._verdicts[loss_id] = self._firm[loss_id]

    def overflowed(self) -> bool:
        """Whether the next step will be skipped, as far as is known. A host sync when a dynamic scale took part."""
        return any(flag.item() != 0 for _, flag in self._verdicts.values())

    @property
    def verdicts(self) -> Verdicts:
        """The latch."""
        return dict(self._verdicts)

    @property
    def delayed_by(self) -> tuple[int, LossScale] | None:
        """Loss id and scale of the delayed blocks whose gradients lie in ``.grad``; None where there are none."""
        return self._delayed_by if self.gradients.has_window else None

    def restore(
        self,
        pending: Pending,
        verdicts: Verdicts,
        delayed_by: tuple[int, LossScale] | None,
        scales_used: dict[int, Factor],
    ) -> None:
        """Takes over gradients, latch and scales of a checkpoint, in the place of all that is there. Between blocks."""
        self._epoch += 1
        self.gradients.restore(pending)
        self._verdicts, self._delayed_by, self.scales_used = verdicts, delayed_by, scales_used
        self._firm, self._step_failed, self._uphill = {}, False, None

    def release(self) -> None:
        """Gives the optimizer back as it was, its parameters in fp32."""
        self._active = False
        for undo in reversed(self._undo):
            undo()
        if self.optimizer is not None:
            self.gradients.settle()
            self.masters.dissolve(self.optimizer)

    # --- the replaced methods -----------------------------------------------------------------------------------------

    def _take_verdicts(self) -> list[tuple[int, LossScale]]:
        """The losses whose gradients overflowed since the last step.

        One host read when a dynamic scale took part, and a second one to tell which of several losses it was.
        """
        verdicts, self._verdicts, self._firm = self._verdicts, {}, {}
        if not verdicts:
            return []
        device = next(iter(verdicts.values()))[1].device
        flags = torch.stack([move(flag, device) for _, flag in verdicts.values()])
        if flags.amax().item() == 0:
            return []
        each = flags.tolist() if len(verdicts) > 1 else [1.0]
        return [(loss_id, scale) for (loss_id, (scale, _)), flag in zip(verdicts.items(), each, strict=True) if flag]

    def _skip(self, overflowed: list[tuple[int, LossScale]]) -> None:
        self._skipped_on_host += 1
        culprits = culprits_among(self._present_grads(), self._names)
        norm = self._grad_norm(self.gradients.waiting)
        self.gradients.drop_master_grads()
        # torch's LR schedulers warn when they are stepped first; a skipped step was asked for in the right order. The
        # name is private to torch.optim.lr_scheduler and guarded by a test. They may look at what LARC or SAM wraps.
        for optimizer in with_wrapped(self.optimizer):
            optimizer._opt_called = True
        values = [(loss_id, scale, scale.value()) for loss_id, scale in overflowed]
        self._tell_skip(self._skipped_on_host - 1, self._skipped_on_host, values, culprits)
        outcome = StepOutcome(
            [loss_id for loss_id, _ in overflowed], scales=self._take_scales(), grad_norm=norm, culprits=culprits
        )
        error = self._guard.skipped(self.optimizer, outcome)
        self._conclude(outcome)
        if error is not None:
            raise error

    def _let_through(self) -> None:
        """Notes a step that the host has decided on, and that was taken."""
        self._guard.stepped()
        outcome = StepOutcome(scales=self._take_scales(), grad_norm=self._grad_norm(None))
        self.gradients.drop_master_grads()
        self._conclude(outcome)

    def _conclude(self, outcome: StepOutcome) -> None:
        self.outcome = outcome
        self.has_left = True
        if _is_capturing(self.optimizer):
            return
        self.history.add(outcome)
        if self._reports.wanted():
            self._reports.stepped(self.optimizer, outcome)

    def _tell_skip(
        self, before: int, skipped: int, values: list[tuple[int, LossScale, float]], culprits: Culprits = ()
    ) -> None:
        self._guard.history.extend((loss_id, value) for loss_id, _, value in values)
        self._reports.skipped(before, skipped, values, culprits)

    def _take_scales(self) -> dict[int, Factor]:
        scales, self.scales_used = self.scales_used, {}
        return scales

    # --- what is known of the gradients of a step ---------------------------------------------------------------------

    def names(self) -> list[str]:
        """What the parameters that the optimizer steps are called, in order."""
        names, model_of = self._names(), self.masters.model_of
        return [names[id(model_of.get(p, p))] for group in self.optimizer.param_groups for p in group["params"]]

    def _names(self) -> dict[int, str]:
        return self._reports.names.of(self.optimizer, self.masters.model_of)

    def _present_grads(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter of the model, gradient), without making one of what waits."""
        waiting = {} if self.gradients.waiting is None else self.gradients.waiting.grads
        of_masters = ((p, waiting[m] if m in waiting else stored_grad(m)) for p, m in self.masters.pairs)
        for p, grad in itertools.chain(of_masters, ((p, p.grad) for p in self.masters.own)):
            if grad is not None:
                yield p, grad

    def _grad_norm(self, waiting: ModelGrads | None) -> Tensor | None:
        """The norm before clipping where somebody took it. ``waiting``: the gradients that wait. No host sync."""
        if waiting is None:
            stepped = itertools.chain((master for _, master in self.masters.pairs), self.masters.own)
            return norm_before_clipping(grad for p in stepped if (grad := stored_grad(p)) is not None)
        if waiting.clipped_from is not None:
            return waiting.clipped_from
        return None if any(p.grad is not None for p in self.masters.own) else waiting.norm()

    def _outcome_on_device(self, found_inf: Tensor | None, external: bool) -> StepOutcome:
        """Of a step that the device has decided on, while its gradients are there.

        ``found_inf``: the flag it went by. ``external``: whether one took part that no loss has raised.
        """
        checked, epoch, reference = self.gradients.checked, self._epoch, weakref.ref(self)

        def later() -> Culprits | None:
            binding = reference()
            return None if binding is None else binding._culprits_of(epoch, checked)

        outcome = StepOutcome(
            {loss_id: flag for loss_id, (_, flag) in self._verdicts.items()},
            external=found_inf if external else None,
            scales=self._take_scales(),
            grad_norm=self._grad_norm(vars(self.optimizer).get("model_grads")),
            culprits=later,
        )
        if self._reports.wanted() and not _is_capturing(self.optimizer) and outcome.skipped:
            outcome.name(culprits_among(self._present_grads(), self._names))
        return outcome

    def _culprits_of(self, epoch: int, checked: ModelGrads | None) -> Culprits | None:
        """What is still known of the gradients of a step that was skipped on the device."""
        if self.masters.pairs and checked is None:
            return None
        found: Culprits = ()
        if checked is not None and (masters := checked.not_finite()):
            names = self._names()
            found = tuple(
                Culprit(names.get(id(p), "a parameter of no group"), p.shape, None, None)
                for p, master in self.masters.pairs
                if id(master) in masters
            )
        if epoch == self._epoch:
            own = ((p, p.grad) for p in self.masters.own if p.grad is not None)
            found += culprits_among(own, self._names)
        return found or None

    def _step(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if not self._active:
            return original(*args, **kwargs)
        self._refuse_in_block("step")
        closure = args[0] if args else kwargs.pop("closure", None)
        args = args[1:]
        self._epoch += 1
        self._look_for_edits()
        if closure is None:
            self._judge()
            self._tell_of_no_gradients()
        if self._decides_on_device(before_backward=closure is not None):
            if closure is None and not self._may_go_on():
                return None
            return self._step_on_device(original, closure, *args, **kwargs)
        if closure is not None:
            return self._step_with_closure(original, closure, *args, **kwargs)
        if overflowed := self._take_verdicts():
            self._skip(overflowed)
            return None
        with self._stepping():
            try:
                result = original(None, *args, **kwargs) if args else original(**kwargs)
            finally:
                # Of a step that raised, too: each weight of the model is its rounded master.
                self.masters.copy_to_model()
        self._let_through()
        return result

    def _may_go_on(self) -> bool:
        """Decides here instead of on the device, once so many skips in a row are known that one more is too many."""
        if not self._guard.suspects():
            return True
        if overflowed := self._take_verdicts():
            self._skip(overflowed)
            return False
        self._guard.stepped()
        return True

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self._warn(message)

    def _look_for_edits(self) -> None:
        """Says so when a step is about to overwrite what the user wrote into the model."""
        if "edits" not in self._warned and self.masters.pairs and (names := self.masters.overwritten()):
            which = ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
            self._warn_once(
                "edits",
                f"{which} changed in place, and the step writes a weight anew from its fp32 master. Change "
                "amp.master_params(optimizer) instead, or load with model.load_state_dict, which the masters follow",
            )

    def _tell_of_dropped_grads(self) -> None:
        names, self.masters.dropped_grads = self.masters.dropped_grads, []
        if names:
            which = ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
            self._warn_once(
                f"gradients of {names}",
                f"{which} joined the optimizer with a gradient from before, multiplied by a loss scale that is not "
                "known: it was dropped",
            )

    def _tell_of_no_gradients(self) -> None:
        params = (p for group in self.optimizer.param_groups for p in group["params"])
        if not self.gradients.may_wait and all(stored_grad(p) is None for p in params):
            name = type(self.optimizer).__name__
            self._warn_once("no gradients", f"{name}.step() changes nothing: none of its parameters has a gradient")

    def _decides_on_device(self, before_backward: bool) -> bool:
        optimizer = self.optimizer
        return not _asks_for_grad_scaler(type(optimizer).step) and skips_by_itself(optimizer, before_backward)

    def _step_on_device(self, original: Callable, closure: Callable | None, *args: Any, **kwargs: Any) -> Any:
        """The step of an optimizer that skips by itself. No host sync."""
        optimizer = self.optimizer
        former = {name: vars(optimizer)[name] for name in _OFFERED if name in vars(optimizer)}
        evaluate: Callable | None = None
        try:
            # Before a closure too, which some optimizer may not evaluate: it steps the gradients that are there then.
            self._offer(former.get("found_inf"))
            if closure is not None:

                def evaluated() -> Any:
                    with self._casts.resumed():
                        loss = closure()
                    self._judge()
                    self._may_go_on()
                    self._offer(former.get("found_inf"))
                    return loss

                evaluate = evaluated

            try:
                with self._stepping():
                    result = original(evaluate, *args, **kwargs) if evaluate or args else original(**kwargs)
            finally:
                if not self.masters.lazy:
                    self.masters.copy_to_model()  # after a skip too: each weight is its rounded master then as before
            self.masters.mark_written()
            outcome = self._outcome_on_device(getattr(optimizer, "found_inf", None), "found_inf" in former)
            self.gradients.drop_master_grads()
            if self._verdicts:
                self._skipped_on_device.count(optimizer.found_inf, self._verdicts)
        except BaseException:
            self._step_failed = True
            raise
        finally:
            for name in _OFFERED:
                vars(optimizer).pop(name, None)
            vars(optimizer).update(former)
        self._verdicts, self._firm, self._step_failed = {}, {}, False
        self._skipped_on_device.poll()
        self._conclude(outcome)
        return result

    def _offer(self, found_inf: Tensor | float | None) -> None:
        """Sets what the optimizer looks for among its attributes, the flag joined with one that is there already."""
        optimizer = self.optimizer
        align_gradients(optimizer)
        flags = [flag for _, flag in self._verdicts.values()]
        if found_inf is not None:  # 0-d, and 0 or 1: torch's kernels on the CPU compare with 1
            flags.append(torch.as_tensor(found_inf).detach().reshape(()).ne(0).float())
        if flags:
            optimizer.found_inf = functools.reduce(lambda a, b: torch.maximum(a, move(b, a.device)), flags)
        if self.masters.lazy:
            optimizer.model_params = self.masters.model_of
            optimizer.model_grads = self.gradients.waiting

    def _step_with_closure(self, original: Callable, closure: Callable, *args: Any, **kwargs: Any) -> Any:
        """The step of an optimizer that may evaluate the closure more than once, and move in between.

        When an evaluation overflows or raises, everything is put back.
        """
        self._judge(before_closure=True)  # gradients from before are part of the step, as in SAM
        if overflowed := self._take_verdicts():
            self._skip(overflowed)
            return None
        evaluated = False

        def guarded() -> Any:
            nonlocal evaluated
            self.masters.copy_to_model()
            if evaluated:
                # The optimizer has read them. A closure may zero gradients through the model, which has none of these.
                self.gradients.drop_master_grads()
            evaluated = True
            with self._casts.resumed():
                loss = closure()
            self._judge()
            overflowed.extend(self._take_verdicts())
            if overflowed:
                raise _OverflowInClosure
            return loss

        restore = snapshot(self.optimizer)
        try:
            with self._stepping():
                result = original(guarded, *args, **kwargs)
        except BaseException as error:
            restore()
            self.masters.copy_to_model()
            if not isinstance(error, _OverflowInClosure):
                raise
            self._skip(overflowed)
            return None
        self.masters.copy_to_model()
        self._let_through()
        return result

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """For the optimizer's own code: casts are off, and its calls of its methods are not the user's."""
        before, self._in_step = self._in_step, True
        try:
            with self._casts.suspended():
                yield
        finally:
            self._in_step = before

    # --- optimizers with two steps ------------------------------------------------------------------------------------

    def _first_step(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """SAM's step uphill, called by the user: the model goes along. Skipped where its gradients overflowed."""
        if self._in_step or not self._active:
            return original(*args, **kwargs)
        self._refuse_in_block("first_step")
        self._epoch += 1
        self._judge()
        self._uphill = None
        if overflowed := self._take_verdicts():
            self._skip(overflowed)
            self._uphill = _SKIPPED
            if _asks_to_zero(args, kwargs):
                self.optimizer.zero_grad()
            return None
        self._uphill = snapshot(self.optimizer, wrapped_too=False)
        try:
            with self._stepping():
                result = original(*args, **kwargs)
        except BaseException:
            restore, self._uphill = self._uphill, None
            restore()
            raise
        self.masters.copy_to_model()
        self.gradients.drop_master_grads()
        return result

    def _second_step(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """SAM's way back and its step. After an overflow in either backward the weights are those from before both."""
        if self._in_step or not self._active:
            return original(*args, **kwargs)
        self._refuse_in_block("second_step")
        self._epoch += 1
        self._judge()
        restore, self._uphill = self._uphill, None
        if restore is _SKIPPED:
            self._verdicts, self._firm = {}, {}  # this step has been counted as skipped
            self.gradients.drop_master_grads()
        elif overflowed := self._take_verdicts():
            if restore is not None:
                restore()
                self.masters.copy_to_model()
            self._skip(overflowed)
        else:
            try:
                with self._stepping():
                    result = original(*args, **kwargs)
            finally:
                self.masters.copy_to_model()
            self._let_through()
            return result
        if _asks_to_zero(args, kwargs):
            self.optimizer.zero_grad()
        return None

    def _refuse_in_block(self, name: str) -> None:
        if self.gradients.in_block:
            raise AmpError(
                f"optimizer.{name}() was called inside a scale_loss block, where gradients are scaled: leave the block "
                "first"
            )
        if self.gradients.spoiled:
            raise AmpError(
                f"optimizer.{name}() was called after an exception at the end of a scale_loss block, which came while "
                "gradients were being added up: call optimizer.zero_grad() and start this step's gradients anew"
            )

    def _refuse_grad_scaler(self) -> None:
        """A scaler finds no gradients of masters: it would neither unscale nor check them."""
        if self.masters.pairs:
            raise AmpError(
                "a GradScaler was given an optimizer that is under amp with fp32 master weights: use scale_loss, which "
                "scales the loss and skips steps by itself, or opt_level O0, O1 or O4"
            )

    def _zero_grad(self, original: Callable, *args: Any, **kwargs: Any) -> None:
        self._epoch += 1
        if self._active:
            self.follow_groups()  # what was taken out may be another optimizer's now
        original(*args, **kwargs)
        self.has_left = False
        self.gradients.drop_model_grads()
        self.gradients.forget()
        if self._step_failed:
            self._verdicts, self._firm, self._step_failed = {}, {}, False

    def _add_param_group(self, original: Callable, param_group: dict[str, Any]) -> None:
        if self._active:
            self.follow_groups()
        original(param_group)
        if self._active:
            try:
                self.masters.refuse_held(self.optimizer, self.optimizer.param_groups[-1])
                self.follow_groups()
            except BaseException:
                del self.optimizer.param_groups[-1]
                # Some of the group may have been taken in.
                self.masters.look_again()
                raise

    def _reduce_ex(self, original: Callable, protocol: Any) -> Any:
        """A copy or pickle of the optimizer does not take the replaced methods along, which are about the original.

        With masters it would step copies of them, which no model follows: it is for its ``state_dict()``, and its
        ``step`` says so.
        """
        function, arguments, state, *rest = original(protocol)
        if isinstance(state, dict):
            own = {name: former for name, former in self._formers.items() if name in state and former is not None}
            state = {key: value for key, value in state.items() if key not in self._formers} | own
            if self.masters.pairs:
                state["step"] = StepOfCopy(type(self.optimizer).__name__)
        return function, arguments, state, *rest


def _is_capturing(optimizer: Any) -> bool:
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    return first is not None and is_capturing(first.device)


@functools.cache
def _asks_for_grad_scaler(step: Callable) -> bool:
    """A protocol that torch has deprecated: such a step asks a GradScaler for the flag, and there is none here."""
    return "grad_scaler" in inspect.signature(step).parameters
