"""Keeps the gradients of one scale_loss block apart from those that were there, and unscales them when it ends.

``begin`` sets aside what is in ``.grad``, so that the coming backward's gradients can be told from it. Then one of:

- ``finish``: what arrived is unscaled into what the optimizer steps, and what was set aside is added. Gradients of
  masters that have none yet only get checked where the optimizer reads them in 16 bits (``waiting``).
- ``delay``: what arrived stays in ``.grad``, scaled, and further blocks add to it through autograd, as a gradient that
  DistributedDataParallel reduces with the last of them must. The *window* ends with the next ``finish``.
- ``abandon``: as if the block had never begun.

``finish`` is ``prepare``, which changes nothing that ``abandon`` cannot put back, and ``commit``. Where an exception
comes in the middle of that, sums that gradients were being added to are *spoiled* until the user zeroes them.

Blocks may nest. All methods run under no_grad and none waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ampctx._compiling import outside_of_graphs
from ampctx._grad_mode import without_grad
from ampctx.kernels import foreach, reference
from ampctx.kernels.each import all_distinct, all_none, all_there, grad_of, layout_of, set_each, stored_grad
from ampctx.kernels.foreach import Factor, FoundInf, PerDevice, product
from ampctx.kernels.ops import ReadTensors, fill_storages, read_grads
from ampctx.kernels.sharding import place_grads, values_of
from ampctx.masters.clip import forget_norm_before_clipping
from ampctx.masters.lazy_grads import ModelGrads
from ampctx.masters.params import MasterParams

Grads = dict[Tensor, Tensor]


@dataclass(eq=False)
class _Window:
    """Scaled gradients in ``.grad`` of ``scaled`` that delayed blocks left for a later one, and those from before."""

    inv_scale: Factor
    before: Grads
    scaled: list[Tensor]


@dataclass(eq=False)
class _Outcome:
    """What the end of a block makes, before it takes effect."""

    # Parameters whose gradients have done their work.
    used: list[Tensor] = field(default_factory=list)
    # What becomes the ``.grad`` of these tensors, and what the outermost block sets aside.
    grads: dict[Tensor, Tensor | None] = field(default_factory=dict)
    set_aside: Grads = field(default_factory=dict)
    # Gradients, and the fp32 sums that they are to be added to in place.
    added: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    factor: Factor = 1.0
    waiting: ModelGrads | None = None


@dataclass(eq=False)
class _Frame:
    """An open block."""

    before: Grads
    outcome: _Outcome = field(default_factory=_Outcome)
    # The window that the block goes on with, and copies of the gradients in it.
    window: _Window | None = None
    copies: Grads = field(default_factory=dict)


class Waiting(NamedTuple):
    """What a ``ModelGrads`` holds."""

    grads: Grads
    inv_scale: Factor
    norm: Tensor


class Pending(NamedTuple):
    """The gradients that no step has used, between blocks, as they lie.

    model: ``.grad`` of the parameters that a backward writes to. masters: fp32 ``.grad`` of masters, by master.
    waiting: 16-bit gradients that stand for those of masters, by master.
    window: of delayed blocks: the factor that unscales, gradients from before, and whose ``.grad`` is scaled.
    """

    model: Grads
    masters: Grads
    waiting: Waiting | None
    window: tuple[Factor, Grads, list[Tensor]] | None


NOTHING_PENDING = Pending({}, {}, None, None)


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _fills_its_storage(t: Tensor) -> bool:
    return t.layout == torch.strided and t.untyped_storage().nbytes() == t.nbytes


def _owns_its_memory(t: Tensor) -> bool:
    """False for what may be a view into a gradient bucket, which the next backward overwrites."""
    return not _distributed() and _fills_its_storage(t)


def _strided(master: Tensor) -> Tensor:
    """The gradient of a master that has one, made dense where it was sparse."""
    assert master.grad is not None
    if master.grad.layout != torch.strided:
        master.grad = master.grad.to_dense()
    return master.grad


def _are_whole(grads: Sequence[Tensor]) -> bool:
    return set(map(layout_of, grads)) <= {torch.strided} and all(map(Tensor.is_contiguous, grads))


def _writable(t: Tensor) -> Tensor:
    """``t``, or a copy where its elements share memory (an expanded gradient)."""
    return t if t.is_contiguous() or reference.is_dense(t) else t.contiguous()


def _add_sparse(new: Tensor, old: Tensor | None, factor: Factor, found_inf: FoundInf) -> Tensor:
    """``new * factor + old`` in fp32 or wider for a sparse gradient; complex stays as it is. Duplicates are summed
    before the finite check."""
    new = new.coalesce()
    values = new.values()
    reference.raise_flag(found_inf.on(values.device), values)
    scale = factor.on(values.device) if isinstance(factor, PerDevice) else factor
    wide = (new if values.is_complex() else new.to(reference.compute_dtype(values))) * scale
    return wide if old is None else old.to(wide.dtype) + wide


class BlockGradients:
    """The gradients of one optimizer's parameters, block by block."""

    def __init__(self, masters: MasterParams) -> None:
        self._masters = masters
        self._frames: list[_Frame] = []
        self._window: _Window | None = None
        self._waiting: ModelGrads | None = None
        # An exception came while gradients were being added up: what is there is neither the old sum nor the new one.
        self.spoiled = False

    @property
    def depth(self) -> int:
        """How many blocks are open."""
        return len(self._frames)

    @property
    def in_block(self) -> bool:
        return bool(self._frames)

    @property
    def in_enclosing_block(self) -> bool:
        return len(self._frames) > 1

    @property
    def has_window(self) -> bool:
        return self._window is not None

    @property
    def window(self) -> object:
        """Stands for the window, None without one."""
        return self._window

    @property
    def set_aside(self) -> Grads:
        """The gradients from before the innermost block, or else the window."""
        if self._frames:
            return self._frames[-1].before
        return {} if self._window is None else self._window.before

    @property
    def waiting(self) -> ModelGrads | None:
        """16-bit gradients that stand for those of the masters, if they still do, all alone."""
        if self._waiting is not None and not self._waiting.is_alone():
            self._waiting.materialize()
        return self._waiting if self._waiting is not None and self._waiting.masters else None

    @property
    def may_wait(self) -> bool:
        """Whether there are such, not looking whether they do so alone."""
        return self._waiting is not None and bool(self._waiting.masters)

    @property
    def checked(self) -> ModelGrads | None:
        """What has checked the gradients of the masters in 16 bits, even where they have become tensors since."""
        return self._waiting

    @property
    def is_idle(self) -> bool:
        """Neither in a block nor with delayed gradients: what is in ``.grad`` is not scaled."""
        return not self._frames and self._window is None

    def _leaves(self) -> list[Tensor]:
        """The parameters that a backward writes gradients into."""
        return [*(p for p, _ in self._masters.pairs), *self._masters.own]

    @without_grad
    def begin(self, scale: Factor, inv_scale: Factor) -> None:
        """Opens a block whose loss is multiplied by ``scale``. Outside of blocks and windows, ``settle`` comes before:
        no parameter with a master has a gradient then."""
        self.materialize()
        leaves = self._masters.own if self.is_idle else self._leaves()
        grads = list(map(grad_of, leaves))
        present = {} if all_none(grads) else {p: g for p, g in zip(leaves, grads, strict=True) if g is not None}
        window = None if self._frames else self._window
        if window is None:
            # On record before anything changes, so that abandon() can put it back.
            before = {p: g if _owns_its_memory(g) else g.clone() for p, g in present.items()}
            self._frames.append(_Frame(before))
            for p in present:
                p.grad = None
            return
        for p in window.scaled:
            if p.grad is None:  # zeroed through the model
                window.before.pop(p, None)
        # Copies, because the coming backward adds to the gradients of the window in place.
        copies = {p: g.clone() for p, g in present.items()}
        self._frames.append(_Frame(window.before, window=window, copies=copies))
        if window.inv_scale is not inv_scale:
            self._rescale(present, product(scale, window.inv_scale))

    @staticmethod
    def _rescale(grads: Grads, factor: Factor) -> None:
        """The gradients of a window go over to the scale of the block that adds to them."""
        dense = [g for g in grads.values() if g.layout == torch.strided]
        foreach.scale(dense, dense, FoundInf(), factor)
        for p, g in grads.items():
            if g.layout != torch.strided:
                p.grad = g * (factor.on(g.device) if isinstance(factor, PerDevice) else factor)

    def abandon(self, depth: int, committing: bool = False) -> None:
        """Ends the block that began, or was about to, with ``depth`` blocks open, as if it had never begun.

        Those that began inside it and are open still, in generators say, end with it.
        ``committing``: ``commit`` or ``delay`` may have begun, here or for another optimizer of the block.
        """
        self.spoiled |= committing
        while len(self._frames) > depth:
            frame = self._frames[-1]
            was_there = frame.before if frame.window is None else frame.copies
            for p in self._leaves():
                p.grad = was_there.get(p)
            if frame.outcome.waiting is not None:
                frame.outcome.waiting.drop()
                self._waiting = None
            if len(self._frames) == 1:
                self._window = frame.window
            self._frames.pop()

    def delay(self, inv_scale: Factor) -> None:
        """Ends the outermost block and leaves its gradients scaled for a later one."""
        before = self._frames[-1].before
        self._window = _Window(inv_scale, before, [p for p in self._leaves() if p.grad is not None])
        self._frames.pop()

    def declare_scaled(self, inv_scale: Factor) -> None:
        """What is in ``.grad`` is scaled, somebody says who runs backward outside of blocks: part of the window, or a
        window of its own."""
        self.materialize()
        scaled = [p for p in self._leaves() if p.grad is not None]
        if self._window is None:
            self._window = _Window(inv_scale, {}, scaled)
        self._window.scaled = scaled

    def drop_window(self) -> None:
        """Ends a window as if it had never begun."""
        if self._window is not None:
            for p in self._leaves():
                p.grad = self._window.before.get(p)
            self._window = None

    @without_grad
    def close_window(self, inv_scale: Factor, found_inf: FoundInf, check_before: bool = False) -> None:
        """Between blocks: ``finish`` for a window that no block ends."""
        assert self._window is not None
        self._frames.append(_Frame(self._window.before))
        try:
            self.finish(inv_scale, found_inf, check_before)
        except BaseException:
            self.spoiled = True
            del self._frames[:]
            raise

    def finish(self, inv_scale: Factor, found_inf: FoundInf, check_before: bool = False) -> None:
        """Ends the block: unscales what arrived and adds it to what was there."""
        self.prepare(inv_scale, found_inf, check_before=check_before)
        self.commit(found_inf)

    @without_grad
    def prepare(
        self, inv_scale: Factor, found_inf: FoundInf, done: set[int] | None = None, check_before: bool = False
    ) -> None:
        """Unscales what arrived. The block is still open.

        ``done``: ids of parameters that other optimizers of the block have dealt with; extended. ``check_before``: no
        verdict on what was there is pending, and it counts like what arrived. A skipped step may have left it.
        """
        frame = self._frames[-1]
        # Of nested blocks the outermost has set the unscaled gradients aside; those between them, scaled ones.
        outer = self._frames[0] if len(self._frames) > 1 else None
        self._fold(inv_scale, found_inf, frame.outcome)
        self._unscale_own(frame, outer, inv_scale, found_inf, done, check_before)
        if outer is not None:
            frame.outcome.grads.update({p: frame.before.get(p) for p, _ in self._masters.pairs})

    @outside_of_graphs
    @without_grad
    def commit(self, found_inf: FoundInf) -> None:
        """Ends the block with what ``prepare`` has made, added to what was there."""
        frame = self._frames[-1]
        self._apply(frame.outcome, found_inf)
        if len(self._frames) > 1:
            self._frames[0].before.update(frame.outcome.set_aside)
        else:
            self._window = None
        self._frames.pop()

    def _apply(self, outcome: _Outcome, found_inf: FoundInf) -> None:
        if outcome.added:
            totals = [total for _, total in outcome.added]
            grads = [grad for grad, _ in outcome.added]
            foreach.axpby(grads, totals, totals, found_inf, outcome.factor, 1.0, arg_to_check=0)
            forget_norm_before_clipping(totals)
        set_each(outcome.used, "grad", None)
        for t, grad in outcome.grads.items():
            t.grad = grad
        if outcome.waiting is not None:
            self._waiting = outcome.waiting

    def _unscale_own(
        self,
        frame: _Frame,
        outer: _Frame | None,
        inv_scale: Factor,
        found_inf: FoundInf,
        done: set[int] | None,
        check_before: bool,
    ) -> None:
        """grad = grad * inv_scale + what was there, for the parameters without masters."""
        own = [p for p in self._masters.own if id(p) not in done] if done else self._masters.own
        if done is not None:
            done.update(map(id, own))
        place_grads(own)
        if outer is None and not frame.before:
            found, known = read_grads(own)
            grads: Sequence[Tensor] = known if known is not None else [grad for grad in found if grad is not None]
            # Two parameters may hold one gradient.
            if (known is not None or _are_whole(grads)) and all_distinct(grads):
                if grads and inv_scale != 1.0:
                    foreach.scale(grads, grads, found_inf, inv_scale)
                return
        arrived, before, unseen = [], [], []
        alone: dict[int, Tensor] = {}
        for p in own:
            new, old = p.grad, (frame if outer is None else outer).before.get(p)
            total = old
            if old is not None and (new is None or new.layout != torch.strided):
                unseen.append(values_of(old))
            if new is not None and new.layout != torch.strided:
                total = _add_sparse(new, old, inv_scale, found_inf).to(p.dtype)
            elif new is not None:
                total = _writable(new)
                if old is not None:
                    arrived.append(total)
                    before.append(old if old.layout == torch.strided else old.to_dense())
                else:
                    alone[id(total)] = total
            if outer is None:
                frame.outcome.grads[p] = total
            else:
                frame.outcome.grads[p] = frame.before.get(p)
                if total is not None:
                    frame.outcome.set_aside[p] = total
        if arrived:
            foreach.axpby(arrived, before, arrived, found_inf, inv_scale, 1.0, arg_to_check=-1 if check_before else 0)
        if unseen and check_before:
            foreach.l2norm(unseen, found_inf)
        if alone and inv_scale != 1.0:
            scaled = list(alone.values())
            foreach.scale(scaled, scaled, found_inf, inv_scale)

    def _fold(self, factor: Factor, found_inf: FoundInf, outcome: _Outcome) -> None:
        """master.grad += model.grad * factor; the model's gradient has done its work then and is freed."""
        outcome.factor = factor
        pairs = self._masters.pairs
        if not pairs:
            return
        found, known = read_grads([p for p, _ in pairs])
        if all_none(found):
            return
        if not all_there(found):
            pairs = [pair for pair, grad in zip(pairs, found, strict=True) if grad is not None]
        grads = [grad for grad in found if grad is not None]
        masters = [master for _, master in pairs]
        outcome.used = [p for p, _ in pairs]
        if self._can_wait(masters, grads, known):
            outcome.waiting = ModelGrads(masters, grads if known is None else known, factor, found_inf)
            return
        fresh: list[tuple[Tensor, Tensor]] = []
        for master, grad in zip(masters, grads, strict=True):
            if grad.layout != torch.strided:
                outcome.grads[master] = _add_sparse(grad, master.grad, factor, found_inf)
            elif master.grad is None:
                fresh.append((master, grad))
            else:
                outcome.added.append((grad, _strided(master)))
        if fresh:
            # The layout of the gradient, so that the kernels can walk both in memory order.
            wide = [torch.empty_like(grad, dtype=master.dtype, requires_grad=False) for master, grad in fresh]
            foreach.scale([grad for _, grad in fresh], wide, found_inf, factor)
            for (master, _), grad in zip(fresh, wide, strict=True):
                outcome.grads[master] = grad

    def _can_wait(self, masters: list[Tensor], grads: list[Tensor], known: ReadTensors | None) -> bool:
        """Whether these gradients may stay in 16 bits: the optimizer reads such, nothing is to be added, and they are
        no views into memory that somebody may write to before the step."""
        return (
            self._masters.lazy
            and len(self._frames) < 2
            and self.waiting is None
            and all_none(map(stored_grad, masters))
            and (all(map(_fills_its_storage, grads)) if known is None else fill_storages(known))
        )

    @without_grad
    def settle(self, check_before: bool = False) -> FoundInf:
        """Between blocks: takes over gradients of a plain backward, and ends a window that no block has ended."""
        found_inf = FoundInf()
        if self._frames:
            return found_inf
        if self._window is not None:
            self.close_window(self._window.inv_scale, found_inf, check_before)
            return found_inf
        outcome = _Outcome()
        self._fold(1.0, found_inf, outcome)
        try:
            self._apply(outcome, found_inf)
        except BaseException:
            self.spoiled = True
            raise
        return found_inf

    def pending(self) -> Pending:
        """The gradients that no step has used, not copied. Between blocks."""
        waiting, window = self._waiting if self.may_wait else None, self._window
        masters = [(master, stored_grad(master)) for _, master in self._masters.pairs]
        return Pending(
            {p: p.grad for p in self._leaves() if p.grad is not None},
            {master: grad for master, grad in masters if grad is not None},
            None
            if waiting is None or not waiting.masters
            else Waiting(waiting.grads, waiting.inv_scale, waiting.norm()),
            None if window is None else (window.inv_scale, window.before, window.scaled),
        )

    @without_grad
    def restore(self, pending: Pending) -> None:
        """Puts these gradients in the place of all that are there. Between blocks."""
        self.drop_waiting()
        self.spoiled = False
        for p in self._leaves():
            p.grad = pending.model.get(p)
        for _, master in self._masters.pairs:
            master.grad = pending.masters.get(master)
        if pending.waiting is not None:
            grads, inv_scale, norm = pending.waiting
            self._waiting = ModelGrads(list(grads), list(grads.values()), inv_scale, FoundInf(), norm)
        self._window = None if pending.window is None else _Window(*pending.window)

    def materialize(self) -> None:
        """Gradients that wait become ``master.grad``."""
        if self._waiting is not None:
            self._waiting.materialize()
            self._waiting = None

    def drop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.drop()
            self._waiting = None

    def drop_master_grads(self) -> None:
        """Those that wait, too."""
        self.drop_waiting()
        self._masters.drop_master_grads()

    def drop_incomplete(self) -> None:
        """Sums that an exception has left half made are worth nothing, and nobody is left to refuse them."""
        if self.spoiled:
            for p in self._leaves():
                p.grad = None
            self.drop_master_grads()
            self.forget()

    def forget(self) -> None:
        """What was set aside is gone: the user has zeroed the gradients."""
        self._window = None
        self.spoiled = False
        self.drop_waiting()
        for frame in self._frames:
            frame.before.clear()
            frame.copies.clear()

    def drop_model_grads(self) -> None:
        for p, _ in self._masters.pairs:
            p.grad = None
