"""Uneven inputs under DistributedDataParallel: ranks that have run out of batches follow the last one.

torch's ``Join`` shadows the collectives of the model for a rank without batches, which takes no more steps. At the end
DistributedDataParallel broadcasts its model from the last rank. The hook here does that for what the model lacks: fp32
masters, the optimizer's state and the loss scales. They travel as a checkpoint does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook

from ampctx._collectives import broadcast_tree, maximum_over_ranks, ranks_of
from ampctx._errors import AmpError, AmpRankError
from ampctx.amp import ranks, run_state
from ampctx.amp.binding import OptimizerBinding
from ampctx.kernels.sharding import steps_a_partition

CALL = "amp.joinable at the end of Join"


class _Hook(JoinHook):
    def __init__(self, joinable: OptimizerJoin) -> None:
        self._joinable = joinable

    def post_hook(self, is_last_joiner: bool) -> None:
        self._joinable.follow_last(is_last_joiner)


class OptimizerJoin(Joinable):
    """What ``amp.joinable`` returns. ``binding``: None if amp is not enabled."""

    def __init__(self, optimizer: Any, binding: OptimizerBinding | None, deferred: run_state.Deferred, group: Any):
        super().__init__()
        self._optimizer = optimizer
        self._binding = binding
        self._deferred = deferred
        self._group = group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Hook(self)

    @property
    def join_process_group(self) -> Any:
        return self._group

    @property
    def join_device(self) -> torch.device:
        # torch uses that of the first in the list, and only the first tells the others that it has a batch.
        raise AmpError(
            "amp.joinable(optimizer) stands first in Join([...]). It has no forward that could tell the other ranks "
            "about a batch. Put the model first: Join([ddp, amp.joinable(optimizer)])."
        )

    @torch.no_grad()
    def follow_last(self, is_last: bool) -> None:
        """Takes the state of the last rank if one has joined before it. Every rank calls it. Host sync."""
        binding, group = self._binding, self._group
        if binding is None:
            return
        rank = torch.distributed.get_rank(group)
        # Before the first collective: all ranks must learn that one cannot go on.
        refusal: AmpError | None = None
        try:
            binding.refuse("save" if is_last else "load", "Join.__exit__")
        except AmpError as error:
            refusal = error
        sent = torch.tensor([rank if is_last else -1, not is_last, refusal is not None], dtype=torch.int64)
        has = "no batches left"
        source, joined_early, one_refuses = maximum_over_ranks(sent, [group], CALL, has).tolist()
        if joined_early and refusal is not None:
            raise refusal
        if joined_early and one_refuses:
            raise AmpRankError(
                f"{CALL}: another rank cannot exchange its state, and raises the reason. This is {ranks_of(group)}."
            )
        if joined_early:
            state = None
            if rank == source:
                saved = run_state.saved_optimizer(binding, self._deferred)
                state = {"optimizer": self._optimizer.state_dict(), "amp": saved}
            state = broadcast_tree(state, source, group, CALL)
            if rank != source:
                self._optimizer.load_state_dict(state["optimizer"])
                run_state.load_optimizer(state["amp"], binding, self._deferred)
        ranks.check(ranks.of_scales(binding.loss_scales), group, CALL)


def joinable(optimizer: Any, binding: OptimizerBinding | None, deferred: run_state.Deferred, group: Any) -> Joinable:
    """Checks what ``amp.joinable`` is given.

    Raises:
        AmpError: ranks of this optimizer agree in a collective at each block, or step a part of the parameters each.
    """
    if binding is not None and (binding.masters.groups or any(s.process_group for s in binding.loss_scales)):
        raise AmpError(
            "amp.joinable: the ranks of this optimizer agree at the end of every scale_loss block (process_group=, or "
            "DTensor parameters), and a rank without batches has no blocks. Use it with DistributedDataParallel, and "
            "leave process_group out of amp.initialize."
        )
    if steps_a_partition(optimizer):
        raise AmpError(
            "amp.joinable: each rank of a ZeroRedundancyOptimizer has a part of the state. Use a plain optimizer, or "
            "give every rank as many batches."
        )
    return OptimizerJoin(optimizer, binding, deferred, group)
