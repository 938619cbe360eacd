"""The ``scale_loss`` blocks of one session: prepares the optimizers they name, then unscales and checks gradients."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampctx._compiling import outside_of_graphs, without_grad
from ampctx.amp.step import OptimizerBinding
from ampctx.amp.threads import OwnThread
from ampctx.casts.switch import CastSwitch
from ampctx.kernels.foreach import Factor, FoundInf, Unread
from ampctx.weights import waiting
from ampctx.scaling.loss_scale import LossScale


@dataclass(eq=False)
class Block:
    """A ``scale_loss`` block."""

    bindings: list[OptimizerBinding]
    loss_id: int
    device: torch.device
    delay_unscale: bool
    delay_overflow_check: bool
    scale: Factor = 1.0
    inv_scale: Factor = 1.0
    found_inf: FoundInf = field(init=False)
    # Optimizers that the block does not name. Its backward may reach their models.
    others: list[OptimizerBinding] = field(default_factory=list)
    # With the number of blocks open before this one, for ``abandon``.
    opened: list[tuple[OptimizerBinding, int]] = field(default_factory=list)
    committing: bool = False


class Blocks:
    """Begins and ends blocks of the optimizers in ``bindings``. The session fills that mapping."""

    def __init__(self, bindings: Mapping[Any, OptimizerBinding]) -> None:
        self._bindings = bindings
        # Overflow flags of blocks that left the scale update to a later block.
        self.deferred: MutableMapping[LossScale, Tensor] = weakref.WeakKeyDictionary()

    @outside_of_graphs
    @without_grad
    def begin(self, block: Block, loss_scale: LossScale, thread: OwnThread, casts: CastSwitch) -> Factor:
        """Prepares the backward of a block in this thread. Returns the scale."""
        thread.enter_block(casts.enabled)
        bindings = block.bindings
        if waiting.ALL:
            self.decide("amp.scale_loss")
        fresh = not [binding for binding in bindings if not binding.gradients.is_idle]
        # Read both now: a nested block may change the scale before this one ends.
        block.scale, block.inv_scale, block.found_inf = loss_scale.factors(block.device, fresh)
        if len(self._bindings) > len(bindings):
            block.others = self._take_over_elsewhere(bindings)
        for binding in bindings:
            block.opened.append((binding, binding.gradients.depth))
            binding.enter(block.scale, block.inv_scale)
        return block.scale

    @outside_of_graphs
    @without_grad
    def end(self, block: Block, loss_scale: LossScale) -> None:
        """Unscales and checks the gradients of the block's backward, or leaves them to a later block."""
        bindings = block.bindings
        nested = False
        for binding in bindings:
            binding.flags.scales_used[block.loss_id % len(binding.loss_scales)] = block.scale
            binding.follow_groups()  # parameters that joined or were unfrozen in the block got gradients in it
            nested |= binding.gradients.depth > 1
        if block.delay_unscale and not nested and not self._share_parameters(bindings):
            block.committing = True
            for binding in reversed(bindings):
                loss = block.loss_id % len(binding.loss_scales), loss_scale
                binding.gradients.delay(block.inv_scale, loss)
            return
        found_inf, done = block.found_inf, set[int]() if len(bindings) > 1 else None
        delay = block.delay_unscale or block.delay_overflow_check
        if not delay and not nested and self._decides_alone(bindings, loss_scale):
            found_inf.update = loss_scale.update_with_check(block.device)
        block.committing = True
        for binding in bindings:
            binding.gradients.leave(found_inf, done, binding.is_unchecked)
        if isinstance(found_inf, Unread):
            if not delay:
                loss_scale.count_clean(block.device)
            return
        flag = found_inf.joined(block.device)
        self.conclude(bindings, loss_scale, block.loss_id, flag, delay, found_inf.is_updated)

    @staticmethod
    def abandon(block: Block) -> None:
        """Ends a block that raised, see ``BlockGradients.abandon``."""
        # In reverse: of optimizers that share a parameter, the first one has stashed its gradient.
        for binding, depth in reversed(block.opened):
            binding.abandon(depth, block.committing)

    def _take_over_elsewhere(self, bindings: list[OptimizerBinding]) -> list[OptimizerBinding]:
        """Collects plain gradients of the bindings that a block does not name, and returns these bindings.

        Otherwise they would treat the block's scaled gradients as plain ones. The block drops those, as in apex.
        """
        others = [b for b in self._bindings.values() if b not in bindings and b.masters.pairs and b.gradients.is_idle]
        for other in others:
            other.refresh()
        return others

    def _share_parameters(self, bindings: list[OptimizerBinding]) -> bool:
        """Whether another optimizer has a parameter of these bindings, too. Such gradients cannot stay scaled for one
        of them only."""
        if len(self._bindings) < 2:
            return False
        owners: dict[int, int] = {}
        for binding in self._bindings.values():
            for p in binding.masters.params_without_master:
                owners[id(p)] = owners.get(id(p), 0) + 1
        return any(owners[id(p)] > 1 for binding in bindings for p in binding.masters.params_without_master)

    def conclude(
        self,
        bindings: list[OptimizerBinding],
        scale: LossScale,
        loss_id: int,
        found_inf: Tensor,
        delay: bool,
        is_updated: bool = False,
    ) -> None:
        """Sets ``found_inf`` for the next steps and updates the scale, or leaves the update to a later block.

        ``is_updated``: the check has updated the scale.
        """
        if not scale.dynamic:
            scale.tell(found_inf)
            if not delay:
                scale.count_clean(found_inf.device)
            return
        groups = [group for binding in bindings for group in binding.masters.groups]
        if groups or scale.process_group is not None:
            if not delay and self._may_wait(bindings, scale):
                return bindings[0].flags.wait(loss_id % len(bindings[0].loss_scales), scale, found_inf, groups, self)
            found_inf = scale.agreed(found_inf, groups, "the end of an amp.scale_loss block")
        for binding in bindings:
            binding.flags.add(loss_id % len(binding.loss_scales), scale, found_inf, final=not delay)
        if is_updated:
            return
        if scale in self.deferred:
            found_inf = torch.maximum(self.deferred[scale].to(found_inf.device), found_inf)
        if scale.observer is not None:
            scale.tell(found_inf)
        if delay:
            self.deferred[scale] = found_inf
        else:
            self.deferred.pop(scale, None)
            scale.update(found_inf)

    def decide(self, call: str) -> None:
        """Lets ranks agree on the flags of earlier blocks. Every rank must take part. ``call``: for messages."""
        for flag in waiting.of(self):
            flag.decide(call)

    def _may_wait(self, bindings: list[OptimizerBinding], scale: LossScale) -> bool:
        """Whether ranks may agree on the flag of a block later: nobody else sees it, and no block is open."""
        return (
            len(bindings) == 1
            and bindings[0].gradients.is_idle
            and scale not in self.deferred
            and scale.observer is None
            and scale.process_group is None
        )

    def _decides_alone(self, bindings: list[OptimizerBinding], scale: LossScale) -> bool:
        """Whether the flag of the block's own check decides about the scale, and nobody else sees or changes it."""
        return (
            scale.dynamic
            and len(bindings) == 1
            and scale not in self.deferred
            and scale.observer is None
            and scale.process_group is None
            and not bindings[0].masters.groups
        )

    def take_deferred(self, scale: LossScale) -> Tensor | None:
        """Takes the flag that blocks with ``delay_overflow_check`` have left for ``scale``, None if there is none.

        The caller must update the scale and decide about the next steps: this flag no longer skips them. No host sync.
        """
        found_inf = self.deferred.pop(scale, None)
        if found_inf is not None:
            for binding in self._bindings.values():
                binding.flags.drop_provisional(scale)
        return found_inf
