"""What ``initialize`` ties to an optimizer, and the only code that replaces an optimizer's methods.

``step``, ``zero_grad`` and ``add_param_group`` are replaced on the instance, so the object stays the user's own. A
replacement holds the optimizer weakly and offers ``__func__``: LR schedulers wrap ``optimizer.step.__func__``, before
or after.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx._errors import AmpError
from ampctx.amp.block_gradients import BlockGradients
from ampctx.amp.device_skips import DeviceSkips, Verdicts
from ampctx.amp.loss_scale import LossScale
from ampctx.amp.master_params import MasterParams
from ampctx.foreach import Factor, move
from ampctx.model_grads import declares


class _OverflowInClosure(Exception):
    """Leaves ``optimizer.step(closure)`` from inside the closure, before the optimizer has seen the gradients."""


# What a step finds among the attributes of an optimizer that skips by itself.
_OFFERED = ("found_inf", "model_params", "model_grads")

# The id under which gradients are judged that no block has judged.
OUTSIDE_OF_BLOCKS = -1


class Casts(NamedTuple):
    """How a binding switches the session's casts off for a step, and on again for a closure within it."""

    suspended: Callable[[], AbstractContextManager]
    resumed: Callable[[], AbstractContextManager]


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
        report_skip: Callable[[int, int, list[tuple[int, LossScale, float]]], None],
        taken: Callable[[], Container[int]],
    ) -> None:
        self.masters = masters
        self.gradients = BlockGradients(masters)
        self.loss_scales = loss_scales
        self._skipped_on_host = 0
        self._skipped_on_device = DeviceSkips(report_skip)
        self._optimizer = weakref.ref(optimizer)
        self._casts = casts
        self._report_skip = report_skip
        self._taken = taken
        self._verdicts: Verdicts = {}
        self._delayed_by: tuple[int, LossScale] | None = None
        self._active = True
        self._undo: list[Callable[[], None]] = []
        try:
            for name in ("step", "zero_grad", "add_param_group"):
                self._undo.append(_replace(optimizer, name, getattr(self, f"_{name}")))
        except BaseException:
            self.release()
            raise

    @property
    def optimizer(self) -> Any:
        return self._optimizer()

    def skipped_steps(self) -> int:
        """A host sync where the device decides."""
        return self._skipped_on_host + self._skipped_on_device.total()

    def refresh(self, settled: bool = False) -> None:
        """Brings masters and their gradients up to date with what happened outside scale_loss blocks. No host sync.

        ``settled``: the model's weights are what they should be; before the first block a broadcast may still come.
        """
        self.masters.adopt_unfrozen(self.optimizer)
        self.masters.follow_model(settled)
        delayed_by = self._delayed_by if self.gradients.has_window else None
        found_inf = self.gradients.settle()
        if not found_inf.per_device:
            return
        flag = found_inf.joined(next(iter(found_inf.per_device)))
        if delayed_by is None:
            if any(scale.dynamic for scale in self.loss_scales):
                self.latch(OUTSIDE_OF_BLOCKS, self.loss_scales[0], flag)
        elif delayed_by[1].dynamic:
            self.latch(*delayed_by, flag)
            delayed_by[1].update(flag)

    def begin(self, scale: Factor, inv_scale: Factor) -> None:
        """Makes ready for the backward of a scale_loss block."""
        if self.gradients.has_window or self.gradients.in_block:
            self.masters.adopt_unfrozen(self.optimizer)
            self.masters.follow_model(settled=True)
        else:
            self.refresh(settled=True)
        self.gradients.begin(scale, inv_scale)

    def delay(self, loss_id: int, loss_scale: LossScale, inv_scale: Factor) -> None:
        """Ends a block whose gradients a later block, or else the step, unscales and judges."""
        self._delayed_by = (loss_id, loss_scale)
        self.gradients.delay(inv_scale)

    def latch(self, loss_id: int, loss_scale: LossScale, found_inf: Tensor) -> None:
        """ORs a flag into what decides about the next step. No host sync."""
        if loss_id in self._verdicts:
            found_inf = torch.maximum(self._verdicts[loss_id][1].to(found_inf.device), found_inf)
        self._verdicts[loss_id] = (loss_scale, found_inf)

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
        verdicts, self._verdicts = self._verdicts, {}
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
        self.masters.drop_master_grads()
        # torch's LR schedulers warn when they are stepped first; a skipped step was asked for in the right order. The
        # name is private to torch.optim.lr_scheduler and guarded by a test. A wrapper (LARC) holds what they look at.
        for optimizer in (self.optimizer, getattr(self.optimizer, "optim", None)):
            if optimizer is not None:
                optimizer._opt_called = True
        values = [(loss_id, scale, scale.value()) for loss_id, scale in overflowed]
        self._report_skip(self._skipped_on_host - 1, self._skipped_on_host, values)

    def _step(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if not self._active:
            return original(*args, **kwargs)
        if self.gradients.in_block:
            raise AmpError(
                "optimizer.step() was called inside a scale_loss block, where gradients are scaled: leave the block "
                "first"
            )
        closure = args[0] if args else kwargs.pop("closure", None)
        args = args[1:]
        if closure is None:
            self.refresh(settled=True)
        if self._decides_on_device(before_backward=closure is not None):
            return self._step_on_device(original, closure, *args, **kwargs)
        if closure is not None:
            return self._step_with_closure(original, closure, *args, **kwargs)
        if overflowed := self._take_verdicts():
            self._skip(overflowed)
            return None
        with self._casts.suspended():
            result = original(None, *args, **kwargs) if args else original(**kwargs)
        self.masters.copy_to_model()
        self.masters.drop_master_grads()
        return result

    def _decides_on_device(self, before_backward: bool) -> bool:
        """Whether the optimizer's kernels skip by ``found_inf``, as torch's do with ``fused=True`` in every group."""
        optimizer = self.optimizer
        return (
            declares(optimizer, "_step_supports_amp_scaling")
            and all(group.get("fused", True) for group in optimizer.param_groups)
            and not _asks_for_grad_scaler(type(optimizer).step)
            and _set_up_momentum(optimizer, before_backward)
        )

    def _step_on_device(self, original: Callable, closure: Callable | None, *args: Any, **kwargs: Any) -> Any:
        """The step of an optimizer that skips by itself. No host sync."""
        optimizer = self.optimizer
        former = {name: vars(optimizer)[name] for name in _OFFERED if name in vars(optimizer)}
        evaluate: Callable | None = None
        try:
            if closure is None:
                self._offer(former.get("found_inf"))
            else:

                def evaluated() -> Any:
                    with self._casts.resumed():
                        loss = closure()
                    self.refresh(settled=True)
                    self._offer(former.get("found_inf"))
                    return loss

                evaluate = evaluated

            with self._casts.suspended():
                result = original(evaluate, *args, **kwargs) if evaluate or args else original(**kwargs)
            if not self.masters.lazy:
                self.masters.copy_to_model()  # after a skip too: each weight is its rounded master then as before
            self.gradients.drop_waiting()
            self.masters.drop_master_grads()
            if self._verdicts:
                self._skipped_on_device.count(optimizer.found_inf, self._verdicts)
        finally:
            for name in _OFFERED:
                vars(optimizer).pop(name, None)
            vars(optimizer).update(former)
        self._verdicts = {}
        self._skipped_on_device.poll()
        return result

    def _offer(self, found_inf: Tensor | float | None) -> None:
        """Sets what the optimizer looks for among its attributes, the flag joined with one that is there already."""
        optimizer = self.optimizer
        flags = [flag for _, flag in self._verdicts.values()]
        if found_inf is not None:  # 0-d, and 0 or 1: torch's kernels on the CPU compare with 1
            flags.append(torch.as_tensor(found_inf).detach().reshape(()).ne(0).float())
        if flags:
            optimizer.found_inf = functools.reduce(lambda a, b: torch.maximum(a, move(b, a.device)), flags)
        if self.masters.lazy:
            optimizer.model_params = self.masters.model_of
            optimizer.model_grads = self.gradients.waiting

    def _step_with_closure(self, original: Callable, closure: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.masters.pairs:
            raise AmpError(
                "Currently, Amp does not support closure use with optimizers. The optimizer steps fp32 master weights: "
                "run the forward and backward before step(), or use an opt_level without master weights (O1, O4)."
            )
        overflowed: list[tuple[int, LossScale]] = []

        def guarded() -> Any:
            with self._casts.resumed():
                loss = closure()
            self.refresh(settled=True)
            overflowed.extend(self._take_verdicts())
            if overflowed:
                raise _OverflowInClosure
            return loss

        restore = _snapshot(self.optimizer)
        try:
            with self._casts.suspended():
                return original(guarded, *args, **kwargs)
        except _OverflowInClosure:
            restore()
            self._skip(overflowed)
            return None

    def _zero_grad(self, original: Callable, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        self.gradients.drop_model_grads()
        self.gradients.forget()

    def _add_param_group(self, original: Callable, param_group: dict[str, Any]) -> None:
        original(param_group)
        if self._active:
            try:
                self.masters.adopt(self.optimizer, self.optimizer.param_groups[-1], taken=self._taken())
            except BaseException:
                del self.optimizer.param_groups[-1]
                raise


@functools.cache
def _asks_for_grad_scaler(step: Callable) -> bool:
    """A protocol that torch has deprecated: such a step asks a GradScaler for the flag, and there is none here."""
    return "grad_scaler" in inspect.signature(step).parameters


@torch.no_grad()
def _set_up_momentum(optimizer: Any, before_backward: bool) -> bool:
    """False where torch's fused SGD cannot be trusted to skip its first step.

    torch (2.13) leaves the momentum buffers of a skipped first step uninitialized. Buffers of zeros give the same
    steps, as long as there is no dampening. With dampening the host has to look at the flag of the first step.
    ``before_backward``: which parameters have a gradient is not known yet, a closure is still to run.
    """
    optimizer = getattr(optimizer, "optim", optimizer)  # what LARC wraps
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    for group in optimizer.param_groups:
        if group["momentum"] == 0:
            continue
        steps = [p for p in group["params"] if (p.requires_grad if before_backward else p.grad is not None)]
        fresh = [p for p in steps if optimizer.state[p].get("momentum_buffer") is None]
        if fresh and group["dampening"] != 0:
            return False
        for p in fresh:
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return True


def _snapshot(optimizer: Any) -> Callable[[], None]:
    """Copies parameters, state and group options; returns what puts them back. For optimizers that evaluate a closure
    more than once, and have moved by the time one evaluation overflows."""
    values = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
    state = {p: copy.deepcopy(dict(of_p)) for p, of_p in optimizer.state.items()}
    options = [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]

    @torch.no_grad()
    def restore() -> None:
        for p, value in values:
            p.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, saved in zip(optimizer.param_groups, options, strict=True):
            for k, v in saved.items():
                if isinstance(v, Tensor):
                    group[k].copy_(v)  # a tensor lr may be held elsewhere too
                else:
                    group[k] = v

    return restore


def _replace(optimizer: Any, name: str, method: Callable) -> Callable[[], None]:
    """Puts ``method(original, *args)`` in place of ``optimizer.name``; returns what takes it back.

    Nothing here refers to the optimizer strongly, or it would hold itself through its own method.
    """
    former = vars(optimizer).get(name)
    of_class: Any = getattr(type(optimizer), name, None)
    # A wrapper may leave the method to the optimizer inside.
    bound = former if former is not None or of_class is not None else getattr(optimizer, name)
    template: Any = of_class if bound is None else bound
    optimizer_ref = weakref.ref(optimizer)

    def original(*args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs) if bound is not None else of_class(optimizer_ref(), *args, **kwargs)

    @functools.wraps(template)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return method(original, *args, **kwargs)

    def as_function(_self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(original, *args, **kwargs)  # not through replacement, which would hold itself

    replacement.__func__ = as_function  # type: ignore[attr-defined]
    setattr(optimizer, name, replacement)
    replacement_ref = weakref.ref(replacement)

    def undo() -> None:
        target = optimizer_ref()
        # Somebody (an LR scheduler) may have wrapped the replacement; it then stays and passes through.
        if target is not None and name in vars(target) and vars(target)[name] is replacement_ref():
            if former is None:
                delattr(target, name)
            else:
                setattr(target, name, former)

    return undo
