"""Separates the gradients of a scale_loss block from earlier ones, and unscales them when the block ends.

``begin`` stashes ``.grad``, so that only the block's backward writes there. Then one of:

- ``prepare`` and ``commit`` unscale the new gradients into the parameters that the optimizer steps, and add the stash.
  If a master has no gradient yet and the optimizer reads 16-bit gradients, these stay lazy: ``prepare`` only checks
  them for inf and nan, and ``step`` unscales them.
- ``delay`` leaves the new gradients in ``.grad``, scaled. Autograd adds those of later blocks, because
  DistributedDataParallel must reduce the sum with the last of them. This *accumulation window* ends with the next
  ``commit``.
- ``abandon`` restores the state from before the block.

Open blocks are a stack; a window is its lowest entry. ``abandon`` can undo everything that ``prepare`` does. After an
exception in the middle of ``commit``, sums are *incomplete* until the user zeroes them.

Call everything under no_grad. No host sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from ampctx.kernels import foreach, tensor_loops
from ampctx.kernels.foreach import Factor, FoundInf, PerDevice, Unread, product
from ampctx.kernels.handles import are_apart, collect_grads, hold_grads, read_grads
from ampctx.kernels.sharding import place_grads, values_of
from ampctx.kernels.tensor_loops import all_there, layout_of
from ampctx.weights.clip import forget_norm_before_clipping
from ampctx.weights.lazy_grads import Masters, ModelGrads
from ampctx.weights.params import MasterParams
from ampctx.weights.sums import add_sparse, dense_grad, fills_its_storage, owns_its_memory, writable

Grads = dict[Tensor, Tensor]


class Phase(Enum):
    """The state of ``.grad`` of the parameters that a backward writes to."""

    IDLE = "unscaled gradients, or none"
    OPEN = "gradients of an open block"
    WINDOW = "scaled gradients of delayed blocks"


@dataclass(eq=False)
class _Outcome:
    """The results of ``prepare``, before ``commit`` applies them."""

    # Parameters whose gradients are used up.
    used: list[Tensor] = field(default_factory=list)
    # The new ``.grad`` of these tensors, and the new stash of the outermost block.
    grads: dict[Tensor, Tensor | None] = field(default_factory=dict)
    stashed: Grads = field(default_factory=dict)
    # (gradient, fp32 sum to add it to in place).
    added: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    factor: Factor = 1.0
    lazy: ModelGrads | None = None


@dataclass(eq=False)
class Frame:
    """An open block.

    stash: the gradients from before: unscaled in the outermost block, scaled in nested ones.
    copies: of the scaled gradients in the window that the block continues, if there is one.
    nested: whether another block is open around it.
    scale, inv_scale: the factors of its loss and of its gradients.
    """

    stash: Grads
    copies: Grads | None = None
    nested: bool = False
    scale: Factor = 1.0
    inv_scale: Factor = 1.0
    outcome: _Outcome = field(default_factory=_Outcome)


@dataclass(eq=False)
class Window:
    """An accumulation window: ``.grad`` of ``scaled`` holds scaled gradients of delayed blocks.

    stash: the unscaled gradients from before. inv_scale: the factor that unscales. loss: the latest block's, for the
    caller.
    """

    stash: Grads
    inv_scale: Factor
    scaled: list[Tensor]
    loss: Any = None


class BlockGradients:
    """The gradients of one optimizer's parameters, block by block."""

    def __init__(self, masters: MasterParams) -> None:
        self._masters = masters
        # If there is a window, it is the first entry.
        self._stack: list[Window | Frame] = []
        # The latest lazy gradients with their check, even if they have been materialized since.
        self.checked: ModelGrads | None = None
        # An exception came while gradients were added up: ``.grad`` holds neither the old sum nor the new one.
        self.incomplete = False
        # There was a step since gradients were zeroed. A skipped one may have left inf or nan in ``.grad``.
        self.stepped = False

    @property
    def phase(self) -> Phase:
        if not self._stack:
            return Phase.IDLE
        return Phase.WINDOW if isinstance(self._stack[-1], Window) else Phase.OPEN

    @property
    def window(self) -> Window | None:
        """The accumulation window or None. It may be below open blocks."""
        lowest = self._stack[0] if self._stack else None
        return lowest if isinstance(lowest, Window) else None

    @property
    def depth(self) -> int:
        """The number of open blocks."""
        return len(self._stack) - (self.window is not None)

    @property
    def stash(self) -> Grads:
        """The gradients from before the innermost block, or from before the window."""
        return self._stack[-1].stash if self._stack else {}

    @property
    def lazy(self) -> ModelGrads | None:
        """The lazy 16-bit gradients of the masters. None if there are none, or if a master has another gradient."""
        if self.checked is not None and not self.checked.is_alone():
            self.checked.materialize()
        return self.checked if self.checked is not None and self.checked.masters else None

    @property
    def factors(self) -> tuple[Factor, Factor]:
        """The factors of the innermost block for its loss and for its gradients. 1 outside of blocks."""
        block = self._stack[-1] if self._stack else None
        return (block.scale, block.inv_scale) if isinstance(block, Frame) else (1.0, 1.0)

    @property
    def is_idle(self) -> bool:
        """Whether no block is open and no gradients are delayed, so that ``.grad`` is unscaled."""
        return not self._stack

    def begin(self, scale: Factor, inv_scale: Factor, have_none: bool = False) -> None:
        """Opens a block whose loss is multiplied by ``scale``. If gradients are idle, call ``collect_outside_grads``
        first: no parameter with a master may have a gradient. ``have_none``: gradients are idle, and none is there."""
        if self.checked is not None:
            self.materialize()
        if have_none:
            self._stack.append(Frame({}, None, False, scale, inv_scale))
            return
        window = self._stack[-1] if self._stack else None
        leaves = self._masters.leaves if self._stack else self._masters.params_without_master
        present = (
            {} if tensor_loops.have_no_grad(leaves, False) else {p: g for p in leaves if (g := p.grad) is not None}
        )
        if not isinstance(window, Window):
            # Recorded before anything changes, so that abandon() can restore it.
            stash = {p: g if owns_its_memory(g) else g.clone() for p, g in present.items()}
            self._stack.append(Frame(stash, None, window is not None, scale, inv_scale))
            tensor_loops.clear_grads(list(present), False)
            return
        for p in window.scaled:
            if p.grad is None:  # the user has zeroed it through the model
                window.stash.pop(p, None)
        # Copies, because the block's backward adds to the gradients of the window in place.
        copies = {p: g.clone() for p, g in present.items()}
        self._stack.append(Frame(window.stash, copies, False, scale, inv_scale))
        if window.inv_scale is not inv_scale:
            self._rescale(present, product(scale, window.inv_scale))

    @staticmethod
    def _rescale(grads: Grads, factor: Factor) -> None:
        """Rescales the gradients of a window to the scale of the block that adds to them."""
        dense = [g for g in grads.values() if g.layout == torch.strided]
        foreach.scale(dense, dense, Unread(), factor)
        for p, g in grads.items():
            if g.layout != torch.strided:
                p.grad = g * (factor.on(g.device) if isinstance(factor, PerDevice) else factor)

    def abandon(self, depth: int, committing: bool = False) -> None:
        """Restores the state from before the block that began, or was about to, with ``depth`` blocks open.

        Also ends blocks inside it that are still open, such as those of generators. ``committing``: ``commit`` or
        ``delay`` may have begun, here or for another optimizer of the block.
        """
        self.incomplete |= committing
        while self.depth > depth:
            block = self._stack[-1]
            assert isinstance(block, Frame)
            was_there = block.stash if block.copies is None else block.copies
            for p in self._masters.leaves:
                p.grad = was_there.get(p)
            if block.outcome.lazy is not None:
                block.outcome.lazy.drop()
                self.checked = None
            self._stack.pop()

    def delay(self, inv_scale: Factor, loss: Any) -> None:
        """Ends the outermost block, and leaves its gradients scaled for a later block."""
        scaled = [p for p in self._masters.leaves if p.grad is not None]
        self._stack[:] = [Window(self._stack[-1].stash, inv_scale, scaled, loss)]

    def declare_scaled(self, inv_scale: Factor, loss: Any) -> None:
        """Treats ``.grad`` as scaled: part of the window, or a new one. For a caller that runs backward outside of
        blocks. Between blocks."""
        self.materialize()
        scaled = [p for p in self._masters.leaves if p.grad is not None]
        if self.window is None:
            self._stack[:] = [Window({}, inv_scale, scaled, loss)]
        else:
            self.window.scaled = scaled

    def drop_window(self) -> None:
        """Restores the gradients from before the window. Between blocks."""
        if self._stack:
            for p in self._masters.leaves:
                p.grad = self.stash.get(p)
            self._stack.clear()

    @torch.no_grad()
    def close_window(self, inv_scale: Factor, found_inf: FoundInf, check_before: Callable[[], bool] = bool) -> None:
        """Unscales and adds the gradients of a window that no block ends. Between blocks."""
        self._stack.append(Frame(self.stash))
        try:
            self.prepare(inv_scale, found_inf, None, check_before)
            self.commit(found_inf)
        except BaseException:
            self.incomplete = True
            del self._stack[1:]
            raise

    def prepare(
        self,
        inv_scale: Factor,
        found_inf: FoundInf,
        done: set[int] | None = None,
        check_before: Callable[[], bool] = bool,
    ) -> None:
        """Unscales the new gradients. The block stays open.

        ``done``: ids of parameters that other optimizers of the block have unscaled; extended. ``check_before``:
        whether the gradients from before need a check, too, because a skipped step may have left them.
        """
        block = self._stack[-1]
        assert isinstance(block, Frame)
        # The outermost block has stashed the unscaled gradients; nested ones have stashed scaled gradients.
        outer = self._stack[0] if block.nested else None
        self._unscale_into_masters(inv_scale, found_inf, block.outcome, block.nested)
        self._unscale_params_without_master(block, outer, inv_scale, found_inf, done, check_before)
        if outer is not None:
            block.outcome.grads.update({p: block.stash.get(p) for p, _ in self._masters.pairs})

    def commit(self, found_inf: FoundInf) -> None:
        """Ends the block: adds the results of ``prepare`` to the gradients from before."""
        block = self._stack[-1]
        assert isinstance(block, Frame)
        self._apply(block.outcome, found_inf)
        if block.nested:
            self._stack[0].stash.update(block.outcome.stashed)
            self._stack.pop()
        else:
            self._stack.clear()

    def _apply(self, outcome: _Outcome, found_inf: FoundInf) -> None:
        if outcome.added:
            grads, totals = map(list, zip(*outcome.added, strict=True))
            foreach.axpby(grads, totals, totals, found_inf, outcome.factor, 1.0, arg_to_check=0)
            forget_norm_before_clipping(totals)
        if outcome.used:
            tensor_loops.clear_grads(outcome.used, False)
        for t, grad in outcome.grads.items():
            t.grad = grad
        if outcome.lazy is not None:
            self.checked = outcome.lazy

    def _unscale_params_without_master(
        self,
        block: Frame,
        outer: Window | Frame | None,
        inv_scale: Factor,
        found_inf: FoundInf,
        done: set[int] | None,
        check_before: Callable[[], bool],
    ) -> None:
        """grad = grad * inv_scale + stash, for the parameters without masters."""
        params = self._masters.params_without_master
        if done:
            params = [p for p in params if id(p) not in done]
        if done is not None:
            done.update(map(id, params))
        if not params:
            return
        if self._masters.has_sharded:
            place_grads(params)
        if outer is None and not block.stash:
            if inv_scale == 1.0:
                return  # nothing to unscale, to check or to add
            found, known = read_grads(params)
            grads: Sequence[Tensor] = known if known is not None else [grad for grad in found if grad is not None]
            are_whole = known is not None or (
                set(map(layout_of, grads)) <= {torch.strided}
                and all(map(Tensor.is_contiguous, grads))
                and tensor_loops.all_resolved(grads)
            )
            # Two parameters may hold one gradient.
            if are_whole and (are_apart([known]) if known is not None else len(set(map(id, grads))) == len(grads)):
                if (known is not None or grads) and inv_scale != 1.0:
                    foreach.scale(grads, grads, found_inf, inv_scale, last=not block.outcome.added)
                return
        arrived, before, unseen = [], [], []
        # By place, because two parameters may hold one gradient.
        alone: dict[Any, Tensor] = {}
        for p in params:
            new, old = p.grad, (block if outer is None else outer).stash.get(p)
            total = old
            if old is not None and (new is None or new.layout != torch.strided):
                unseen.append(values_of(old))
            if new is not None and new.layout != torch.strided:
                total = add_sparse(new, old, inv_scale, found_inf).to(p.dtype)
            elif new is not None:
                total = writable(new)
                if old is not None:
                    arrived.append(total)
                    before.append(old if old.layout == torch.strided else old.to_dense())
                else:
                    has_place = type(total) is Tensor and total.numel() > 0
                    alone[(total.data_ptr(), total.numel()) if has_place else id(total)] = total
            if outer is None:
                block.outcome.grads[p] = total
            else:
                block.outcome.grads[p] = block.stash.get(p)
                if total is not None:
                    block.outcome.stashed[p] = total
        if arrived:
            foreach.axpby(arrived, before, arrived, found_inf, inv_scale, 1.0, arg_to_check=-1 if check_before() else 0)
        if unseen and check_before():
            foreach.l2norm(unseen, found_inf)
        if alone and inv_scale != 1.0:
            scaled = list(alone.values())
            foreach.scale(scaled, scaled, found_inf, inv_scale)

    def _unscale_into_masters(
        self, factor: Factor, found_inf: FoundInf, outcome: _Outcome, nested: bool = False
    ) -> None:
        """master.grad += model.grad * factor, then frees the model's gradient."""
        outcome.factor = factor
        if not self._masters.pairs:
            return
        params, masters = self._masters.params_with_master, self._masters.masters
        grads, are_plain = collect_grads(params)
        if not (are_plain or all_there(grads)):
            there = [grad is not None for grad in grads]
            params, grads = list(compress(params, there)), list(compress(grads, there))
            masters = Masters(compress(masters, there))
        if not params:
            return
        outcome.used = params
        if self._masters.lazy and not nested and self.checked is None and self._masters.have_no_grads():
            # Not views into memory that other code may write to before the step.
            known = hold_grads(grads, are_plain)
            if known is not None or all(map(fills_its_storage, grads)):
                last = not self._masters.params_without_master
                outcome.lazy = ModelGrads(masters, grads if known is None else known, factor, found_inf, last=last)
                return
        fresh: list[tuple[Tensor, Tensor]] = []
        for master, grad in zip(masters, grads, strict=True):
            if grad.layout != torch.strided:
                outcome.grads[master] = add_sparse(grad, master.grad, factor, found_inf)
            elif master.grad is None:
                fresh.append((master, grad))
            else:
                outcome.added.append((grad, dense_grad(master)))
        if fresh:
            # In the layout of the gradient, so that the kernels can read both in memory order.
            wide = [torch.empty_like(grad, dtype=master.dtype, requires_grad=False) for master, grad in fresh]
            foreach.scale([grad for _, grad in fresh], wide, found_inf, factor)
            outcome.grads.update(zip([master for master, _ in fresh], wide, strict=True))

    def have_arrived(self) -> bool:
        """Whether gradients have arrived in the open block. False with a window: they cannot be told apart."""
        return self.window is None and not tensor_loops.have_no_grad(self._masters.leaves, False)

    def may_have_outside_grads(self) -> bool:
        """Whether ``collect_outside_grads`` has anything to do."""
        if self._stack:
            return self.phase is Phase.WINDOW
        return bool(self._masters.pairs) and not tensor_loops.have_no_grad(self._masters.params_with_master, False)

    def collect_outside_grads(self, check_before: Callable[[], bool] = bool) -> FoundInf:
        """Collects gradients of a plain backward, and ends a window that no block has ended. Between blocks.

        Returns the flags of the checked gradients.
        """
        found_inf, outcome = FoundInf(), _Outcome()
        if (window := self.window) is not None:
            self.close_window(window.inv_scale, found_inf, check_before)
            return found_inf
        self._unscale_into_masters(1.0, found_inf, outcome)
        try:
            self._apply(outcome, found_inf)
        except BaseException:
            self.incomplete = True
            raise
        return found_inf

    def drop_all(self) -> None:
        """Drops all gradients. Between blocks."""
        self._drop_lazy()
        self.incomplete = self.stepped = False
        for tensor in (*self._masters.leaves, *self._masters.masters):
            tensor.grad = None
        self._stack.clear()

    def materialize(self) -> None:
        """Turns lazy gradients into ``master.grad``."""
        if self.checked is not None:
            self.checked.materialize()
            self.checked = None

    def _drop_lazy(self) -> None:
        if self.checked is not None:
            self.checked.drop()
            self.checked = None

    def drop_master_grads(self) -> None:
        """Drops the gradients of the masters, lazy ones included."""
        self._drop_lazy()
        self._masters.drop_master_grads()

    def drop_incomplete(self) -> None:
        """Drops the incomplete sums of an exception: after ``reset`` no check would refuse them."""
        if self.incomplete:
            for p in self._masters.leaves:
                p.grad = None
            self.drop_master_grads()
            self.forget()

    def forget(self) -> None:
        """Drops the stash: the user has zeroed the gradients."""
        self._drop_lazy()
        if self.window is not None:
            del self._stack[0]
        for block in self._stack:
            block.stash.clear()
            if isinstance(block, Frame) and block.copies is not None:
                block.copies.clear()
        self.incomplete = self.stepped = False

    def drop_model_grads(self) -> None:
        tensor_loops.clear_grads(self._masters.params_with_master, False)
