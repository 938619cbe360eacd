"""The gradients of one optimizer, block by block. One rule: every gradient buffer has a scale.

Idle, ``.grad`` of masters and of plain parameters has scale 1. A *frame* (an open ``scale_loss`` block, or a window of
delayed ones) stashes the gradients from before; what a backward writes then has the scale of the frame. The end of a
frame multiplies it by 1 / scale and adds it to the sum of scale 1. An exception puts back the stash.

A window leaves scaled gradients in ``.grad``, where autograd adds those of later blocks, because
DistributedDataParallel must reduce the sum with the last of them. It is the lowest frame, and the next block goes on
with it.

Call everything under no_grad. No host sync.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from ampctx._collectives import is_distributed
from ampctx._errors import AmpError
from ampctx._plan import PLANS
from ampctx.kernels import foreach, ops, reference, tensor_loops
from ampctx.kernels.foreach import Factor, FoundInf, PerDevice, Unread, product
from ampctx.kernels.plan import have_no_grads
from ampctx.kernels.sharding import place_grads, values_of
from ampctx.kernels.tensor_loops import all_there, grad_of, stored_grad
from ampctx.weights.frame_plan import FramePlan, frame_plan
from ampctx.weights.masters import MasterParams
from ampctx.weights.pending import Pending, fills_its_storage, new_grad

Grads = dict[Tensor, Tensor]
# See ``Frames.leave``.
Done = set[Any] | None
Check = Callable[[], bool]
# Those of all optimizers under amp.
ALIVE: weakref.WeakSet[Frames] = weakref.WeakSet()


@dataclass(eq=False)
class Frame:
    """An open block, or a window.

    scale, inv_scale: the factors of its loss and of its gradients.
    stash: the gradients from before: of scale 1 in the lowest frame, else of the frame below.
    is_window: blocks have left their gradients scaled. Then ``loss`` is the latest one's, for the caller, and
        ``scaled`` are the parameters with such gradients.
    window: the window that an open block goes on with, and ``backup``: copies of its gradients.
    """

    scale: Factor
    inv_scale: Factor
    stash: Grads
    is_window: bool = False
    loss: Any = None
    scaled: list[Tensor] = field(default_factory=list)
    window: Frame | None = None
    backup: Grads | None = None


class Frames:
    """The gradients of an optimizer with the parameters ``masters``.

    Attributes:
        frames: the open ones, the lowest first.
        incomplete: an exception came while gradients were added up: ``.grad`` holds neither the old sum nor the new.
        stepped: there was a step since gradients were zeroed. A skipped one may have left inf or nan in ``.grad``.
        plan: ends usual blocks. It sees when dtypes or devices of gradients change.
    """

    def __init__(self, masters: MasterParams) -> None:
        self._masters = masters
        ALIVE.add(self)
        self.frames: list[Frame] = []
        self.incomplete = self.stepped = False
        self.plan: FramePlan | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no block is open and there is no window, so that ``.grad`` has scale 1."""
        return not self.frames

    @property
    def window(self) -> Frame | None:
        """The window, if no block is open."""
        return self.frames[0] if self.frames and self.frames[0].is_window else None

    @property
    def depth(self) -> int:
        """The number of open blocks."""
        return len(self.frames) - (bool(self.frames) and self.frames[0].is_window)

    def of_pairs(self) -> list[tuple[Tensor, Tensor | None]]:
        """Each model parameter with a master, and the master's gradient as it is, 16 bits or fp32."""
        grads = {} if (pending := self._masters.place.pending) is None else pending.grads
        return [(p, grads[m] if m in grads else stored_grad(m)) for p, m in self._masters.pairs]

    @property
    def factors(self) -> tuple[Factor, Factor]:
        """The factors of the innermost block for its loss and for its gradients. 1 outside of blocks."""
        return (self.frames[-1].scale, self.frames[-1].inv_scale) if self.depth else (1.0, 1.0)

    # --- blocks -------------------------------------------------------------------------------------------------------

    def enter(self, scale: Factor, inv_scale: Factor, is_clear: bool = False) -> None:
        """Opens a block whose loss is multiplied by ``scale``. If gradients are idle, call ``collect`` first: no
        parameter with a master may have a gradient. ``is_clear``: no leaf has one."""
        if self._masters.place.pending is not None:
            self._masters.place.materialize()
        leaves = self._masters.leaves if self.frames else self._masters.params_without_master
        is_clear = is_clear or have_no_grads(leaves)
        here = {} if is_clear else {p: g for p in leaves if (g := p.grad) is not None}
        window = self.frames[0] if self.frames and self.frames[0].is_window else None
        if window is None:
            # First, so that abandon() can put them back.
            self.frames.append(Frame(scale, inv_scale, {p: _own(g) for p, g in here.items()} if here else here))
            if here:
                tensor_loops.clear_grads(here)
            return
        for p in window.scaled:
            if p.grad is None:  # the program has zeroed it through the model
                window.stash.pop(p, None)
        # Copies, because the block's backward adds to the gradients of the window in place.
        backup = {p: g.clone() for p, g in here.items()}
        self.frames[0] = Frame(scale, inv_scale, window.stash, window=window, backup=backup)
        if window.inv_scale is not inv_scale:
            self._rescale(here, product(scale, window.inv_scale))

    @staticmethod
    def _rescale(grads: Grads, factor: Factor) -> None:
        """Brings the gradients of a window to the scale of the block that adds to them."""
        dense = [g for g in grads.values() if g.layout == torch.strided]
        foreach.scale(dense, dense, Unread(), factor)
        for p, g in grads.items():
            if g.layout != torch.strided:
                p.grad = g * (factor.on(g.device) if isinstance(factor, PerDevice) else factor)

    def leave(
        self, found_inf: FoundInf, done: Done = None, check_before: Check = bool, inv_scale: Factor | None = None
    ) -> None:
        """Ends the innermost frame: unscales its gradients, checks them, and adds them to the sum of scale 1.

        ``done``: ids of parameters and places of gradients that other optimizers of the block have unscaled; extended.
        ``check_before``: whether the gradients from before need a check, too, because a skipped step may have left
        them. ``inv_scale``: in place of the frame's.
        """
        frame, masters = self.frames[-1], self._masters
        factor = frame.inv_scale if inv_scale is None else inv_scale
        is_alone = len(self.frames) == 1 and not (frame.stash or frame.is_window or done is not None)
        is_usual = PLANS and is_alone and masters.place.pending is None and masters.have_no_grads()
        if self.plan is not None:
            if is_usual and self.plan.leaves is masters.leaves:
                try:
                    if self.plan.leave(masters, factor, found_inf):
                        self.frames.pop()
                        return
                except BaseException:
                    self.incomplete = True
                    raise
            masters.check()  # the beginning of the block has left that to the plan
        if not is_usual:
            return self._leave_plainly(frame, factor, found_inf, done, check_before)
        before, self.plan = list(map(grad_of, masters.leaves)), None
        with ops.noted() as calls:
            self._leave_plainly(frame, factor, found_inf, done, check_before)
        self.plan = frame_plan(masters, calls, before, factor, masters.place.pending) if calls else None
        return None

    def _leave_plainly(
        self, frame: Frame, factor: Factor, found_inf: FoundInf, done: Done, check_before: Check
    ) -> None:
        nested, base = len(self.frames) > 1, self.frames[0].stash
        # New tensors only: an exception here leaves the sums as they were.
        used, sums, of_masters, pending = self._of_masters(factor, found_inf, nested)
        of_params = self._of_params(factor, found_inf, done, check_before, base, last=not sums)
        try:
            if sums:
                new, totals = map(list, zip(*sums, strict=True))
                foreach.axpby(new, totals, totals, found_inf, factor, 1.0, arg_to_check=0)
                for total in totals:
                    total.__dict__.pop("norm_before_clipping", None)
            tensor_loops.clear_grads(used)
            if nested:  # the sum of scale 1 is the stash of the lowest frame
                base.update((p, total) for p, total in of_params.items() if total is not None)
                of_params = {p: frame.stash.get(p) for p in (*self._masters.params_with_master, *of_params)}
            for t, grad in (*of_masters.items(), *of_params.items()):
                t.grad = grad
            if pending is not None:
                self._masters.place.pending = self._masters.place.checked = pending
            self.frames.pop()
        except BaseException:
            self.incomplete = True
            raise

    def delay(self, inv_scale: Factor, loss: Any) -> None:
        """Ends the only block, and leaves its gradients scaled for a later one."""
        frame = self.frames[0]
        scaled = [p for p in self._masters.leaves if p.grad is not None]
        self.frames[:] = [Frame(frame.scale, inv_scale, frame.stash, True, loss, scaled)]

    def abandon(self, depth: int, ending: bool = False) -> None:
        """Puts back the gradients from before the block that began, or was about to, with ``depth`` blocks open.

        Also ends blocks inside it that are still open, such as those of generators. ``ending``: at the end of the
        block. If that has added gradients up here, they are incomplete. A ``depth`` of -1 ends a window, too.
        """
        self.incomplete |= ending and self.depth <= depth
        while self.frames and self.depth > depth:
            frame = self.frames[-1]
            before = frame.stash if frame.backup is None else frame.backup
            for p in self._masters.leaves:
                p.grad = before.get(p)
            self.frames.pop()
            if frame.window is not None:
                self.frames.append(frame.window)

    # --- the end of a frame -------------------------------------------------------------------------------------------

    def _of_masters(
        self, factor: Factor, found_inf: FoundInf, nested: bool = False
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]], dict[Tensor, Tensor | None], Pending | None]:
        """Turns the gradients of 16-bit weights into: the weights; (gradient, fp32 sum to add it to); new gradients
        by master; or pending ones."""
        params, masters = self._masters.params_with_master, self._masters.masters
        given: list[Any] = list(map(grad_of, params))
        if not all_there(given):
            there = [grad is not None for grad in given]
            params, given, masters = (list(compress(each, there)) for each in (params, given, masters))
        place, last = self._masters.place, not self._masters.params_without_master
        may_wait = len(params) > 0 and self._masters.takes_pending and not nested and place.pending is None
        # Not views into memory that other code may write to before the step.
        if may_wait and self._masters.have_no_grads() and all(map(fills_its_storage, given)):
            norm, norms = foreach.unscale_l2norms_of(given, found_inf, factor, last)
            again, found_inf.norm_again = found_inf.norm_again, None
            return params, [], {}, Pending(masters, place, given, factor, norm, norms, again)
        sums: list[tuple[Tensor, Tensor]] = []
        grads: dict[Tensor, Tensor | None] = {}
        fresh: list[tuple[Tensor, Tensor]] = []
        for master, grad in zip(masters, given, strict=True):
            if grad.layout != torch.strided:
                grads[master] = _add_sparse(grad, master.grad, factor, found_inf)
            elif (total := master.grad) is None:
                fresh.append((master, grad))
            else:
                if total.layout != torch.strided:
                    total = master.grad = total.to_dense()
                sums.append((grad, total))
        if fresh:
            masters, given = map(list, zip(*fresh, strict=True))
            wide = list(map(new_grad, given))
            foreach.scale(given, wide, found_inf, factor, last and not sums)
            grads.update(zip(masters, wide, strict=True))
        return params, sums, grads, None

    def _of_params(
        self, factor: Factor, found_inf: FoundInf, done: Done, check_before: Check, base: Grads, last: bool
    ) -> dict[Tensor, Tensor | None]:
        """The new gradients of the parameters without masters: ``grad * factor`` plus that of ``base``. Scales the
        gradients of the frame in place."""
        params = self._masters.params_without_master
        if done is not None:
            params = [p for p in params if id(p) not in done]
            done.update(map(id, params))
        if not params:
            return {}
        if self._masters.has_sharded:
            place_grads(params)
        if factor == 1.0 and len(self.frames) == 1 and not base:
            return {}  # nothing to unscale, to check or to add
        grads: dict[Tensor, Tensor | None] = {}
        arrived, before, unseen = [], [], []
        resolved = tensor_loops.all_resolved([grad for grad in map(grad_of, params) if grad is not None])
        # By place, because two parameters may hold one gradient, which is scaled once. ``summed``: sums already.
        alone: dict[Any, Tensor] = {}
        summed: set[Any] = set()
        for p in params:
            new, old = p.grad, base.get(p)
            total = old
            if old is not None and (new is None or new.layout != torch.strided):
                unseen.append(values_of(old))
            if new is not None and new.layout != torch.strided:
                total = _add_sparse(new, old, factor, found_inf).to(new.dtype)
            elif new is not None:
                total = _writable(new, resolved)
                if (place := _place_of(total)) in summed or (old is not None and place in alone):
                    total = total.clone()
                    place = _place_of(total)
                if old is not None:
                    arrived.append(total)
                    before.append(old if old.layout == torch.strided else old.to_dense())
                    summed.add(place)
                else:
                    alone[place] = total
            grads[p] = total
        if arrived:
            foreach.axpby(arrived, before, arrived, found_inf, factor, 1.0, arg_to_check=-1 if check_before() else 0)
        if unseen and check_before():
            foreach.l2norm(unseen, found_inf)
        if done is not None:  # nor is a gradient that an optimizer before this one has scaled
            alone = {place: total for place, total in alone.items() if place not in done}
            done.update(alone)
        if alone and factor != 1.0:
            scaled = list(alone.values())
            foreach.scale(scaled, scaled, found_inf, factor, last)
        return grads

    def refuse_to_clip(self, params: list[Tensor]) -> None:
        """Raises AmpError for parameters, or their masters, whose gradients are scaled: in a block, or in a window."""
        masters, here = self._masters, set(map(id, params))
        is_scaled = self.depth or masters.pairs or self.frames[0].inv_scale != 1.0
        if is_scaled and not here.isdisjoint(map(id, (*masters.leaves, *masters.masters))):
            where = "inside a scale_loss block" if self.depth else "between blocks with delay_unscale=True"
            raise AmpError(
                f"clip_grad_norm_ was called {where}. Gradients are still scaled there. Clip "
                "amp.master_params(optimizer) after the block that unscales. "
                "See `ampctx explain clipping-would-not-reach-it`."
            )

    # --- between blocks -----------------------------------------------------------------------------------------------

    def may_have_outside_grads(self) -> bool:
        """Whether ``collect`` has anything to do."""
        if self.frames:
            return self.window is not None
        return not have_no_grads(self._masters.params_with_master)

    @torch.no_grad()
    def collect(self, check_before: Check = bool, inv_scale: Factor | None = None) -> FoundInf:
        """Collects gradients of a plain backward, and ends a window that no block has ended. Between blocks.

        ``inv_scale``: in place of the window's. Returns the flags of the checked gradients.
        """
        found_inf, done = FoundInf(), None
        if self.window is None:
            if not self._masters.pairs:
                return found_inf
            self.frames.append(Frame(1.0, 1.0, {}))
            done = set(map(id, self._masters.params_without_master))  # of scale 1 already
        try:
            self.leave(found_inf, done, check_before, inv_scale)
        except BaseException:
            self.incomplete = True  # masters may have some of them already, and they may be non-finite
            if done is not None:
                self.frames.clear()
            raise
        return found_inf

    # --- dropping -----------------------------------------------------------------------------------------------------

    def drop_all(self) -> None:
        """Drops all gradients. Between blocks."""
        self.frames.clear()
        tensor_loops.clear_grads(self._masters.leaves)
        self._masters.drop_grads()
        self.forget()

    def forget(self) -> None:
        """Drops the stash: the program has zeroed the gradients."""
        tensor_loops.clear_grads(self._masters.params_with_master)
        if self._masters.place.pending is not None:
            self._masters.place.pending.drop()
        self._masters.place.checked = None
        if self.window is not None:
            self.frames.clear()
        for frame in self.frames:
            frame.stash.clear()
            if frame.backup is not None:
                frame.backup.clear()
        self.incomplete = self.stepped = False


def _own(t: Tensor) -> Tensor:
    """``t``, or a copy if it may be a view into a gradient bucket: the next backward would overwrite it."""
    return t if not is_distributed() and fills_its_storage(t) else t.clone()


def _place_of(t: Tensor) -> Any:
    """Equal for two gradients in one memory."""
    return (t.data_ptr(), t.numel()) if type(t) is Tensor and t.numel() else id(t)


def _writable(t: Tensor, resolved: bool) -> Tensor:
    """``t``, or a copy if its elements share memory (an expanded gradient), or torch negates them as it reads.
    ``resolved``: it does so with none."""
    is_own = t.is_contiguous() or reference.is_dense(t)
    return t if is_own and (resolved or tensor_loops.all_resolved([t])) else t.clone()


def _add_sparse(new: Tensor, old: Tensor | None, factor: Factor, found_inf: FoundInf) -> Tensor:
    """``new * factor + old`` for a sparse gradient, in fp32 or wider; complex keeps its type. Sums duplicates before
    the finite check."""
    new = new.coalesce()
    values = new.values()
    reference.raise_flag(found_inf.on(values.device), values)
    scale = factor.on(values.device) if isinstance(factor, PerDevice) else factor
    wide = (new if values.is_complex() else new.to(reference.compute_dtype(values))) * scale
    return wide if old is None else old.to(wide.dtype) + wide
