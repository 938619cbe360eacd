"""Gradients that backwards leave in host memory: ``offload_gradients`` of optimizers.

A hook copies each gradient down when it has arrived, and sets ``.grad`` to None. Later micro-batches are added on the
host in the gradient's dtype, which is autograd's own sum. A *holder* of a parameter is a host tensor of its layout with
this gradient as ``.grad``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ampctx._collectives import is_distributed
from ampctx._errors import AmpError
from ampctx.kernels.host_memory import buffers

# Of all optimizers, to look up the holder of a parameter.
ALIVE: weakref.WeakSet[HostGrads] = weakref.WeakSet()


def refuse_ranks() -> None:
    """Raises AmpError in a process group: DistributedDataParallel reduces gradients on the device, after the hooks."""
    if is_distributed():
        raise AmpError(
            "offload_gradients=True takes gradients away before DistributedDataParallel reduces them. In a process "
            "group pass offload_gradients=False."
        )


class HostGrads:
    """The gradients of one optimizer's parameters.

    Args:
        owner: has ``lane(device)``, and ``wait()`` for an earlier step that may still read host memory.
    """

    def __init__(self, owner: Any) -> None:
        refuse_ranks()
        self._owner: Callable[[], Any] = weakref.ref(owner)
        self._holders: dict[Tensor, Tensor] = {}
        self._memory: dict[Tensor, Tensor] = {}
        # Memory for later micro-batches, made for all at the first, and what has come there and is not added yet.
        self._more: dict[Tensor, Tensor] = {}
        self._to_add: dict[Tensor, Tensor] = {}
        self._hooks: dict[Tensor, Any] = {}
        self._were_stepped = False
        ALIVE.add(self)
        weakref.finalize(self, _remove, self._hooks)

    def add(self, p: Tensor, holder: Tensor, memory: Tensor) -> None:
        """Takes a parameter in, with a host tensor of its layout, and memory for a gradient."""
        self._holders[p], self._memory[p] = holder, memory
        self._more.pop(p, None)
        self._to_add.pop(p, None)

    def remove(self, p: Tensor) -> None:
        for each in (self._holders, self._memory, self._more, self._to_add):
            each.pop(p, None)
        if p in self._hooks:
            self._hooks.pop(p).remove()

    def watch(self) -> None:
        """Hooks the parameters that have become trainable."""
        reference = weakref.ref(self)

        def arrived(p: Tensor) -> None:
            if (alive := reference()) is not None:
                alive._arrived(p)

        for p in self._holders:
            if p.requires_grad and p not in self._hooks:
                self._hooks[p] = p.register_post_accumulate_grad_hook(arrived)

    @torch.no_grad()
    def _arrived(self, p: Tensor) -> None:
        grad, holder = p.grad, self._holders.get(p)
        if grad is None or holder is None or grad.layout != torch.strided:
            return  # a sparse one stays, and ``step`` names it
        refuse_ranks()
        if self._were_stepped and holder.grad is not None:
            raise AmpError(
                "a backward adds to gradients of the step before, which offload_gradients=True keeps on the host. Call "
                "optimizer.zero_grad() after each step; zero_grad() of the model does not reach them."
            )
        self._owner().wait()
        lane = self._owner().lane(p.device)
        if holder.grad is None:
            lane.take(self._memory[p], grad)
            # A new tensor, without marks of the gradient before.
            holder.grad = self._memory[p].detach()
        else:
            self._add(p)
            if p not in self._more:
                params = list(self._holders)
                self._more = dict(zip(params, buffers(params), strict=True))
            lane.take(self._more[p], grad)
            self._to_add[p] = self._more[p]
        p.grad = None

    def _add(self, p: Tensor) -> None:
        if (more := self._to_add.pop(p, None)) is not None:
            self._owner().lane(p.device).finish()
            grad = self._holders[p].grad
            assert grad is not None
            grad += more

    @torch.no_grad()
    def collect(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The holders of parameters, with gradients that no hook has taken. Others come back unchanged. Host sync.

        Raises:
            AmpError: a parameter has a gradient on the device beside one on the host.
        """
        found = list(params)
        for p in found:
            if p in self._holders and p.grad is not None and p.grad.layout == torch.strided:
                if self._holders[p].grad is not None:
                    raise AmpError(
                        f"a parameter of shape {tuple(p.shape)} was given a .grad, and has a gradient of its backward "
                        "on the host. With offload_gradients=True call optimizer.zero_grad() before you set .grad."
                    )
                self._arrived(p)
        for device in {p.device for p in self._holders}:
            self._owner().lane(device).finish()
        for p in list(self._to_add):
            self._add(p)
        return [self._holders.get(p, p) for p in found]

    def stepped(self) -> None:
        """Notes that a step has read the gradients."""
        self._were_stepped = True

    @torch.no_grad()
    def zero(self, set_to_none: bool) -> None:
        self._were_stepped = False
        self._to_add.clear()
        if not set_to_none:
            self._owner().wait()
            for device in {p.device for p in self._holders}:
                self._owner().lane(device).finish()
        for holder in self._holders.values():
            if set_to_none:
                holder.grad = None
            elif holder.grad is not None:
                holder.grad.zero_()


def _remove(hooks: dict[Tensor, Any]) -> None:
    for hook in hooks.values():
        hook.remove()


def holders_of(params: list[Tensor]) -> list[Tensor]:
    """The tensors whose ``.grad`` is the gradient of each parameter: itself, or a holder. May be a host sync."""
    for grads in list(ALIVE):
        params = grads.collect(params)
    return params
