"""The parameters of one optimizer: which are stepped as they are, and which through an fp32 master.

With master weights, every trainable fp16 or bf16 parameter of the optimizer has a *master*: an fp32 tensor that takes
its place in ``optimizer.param_groups``. The model weight is the rounded master. Where that does not hold after
``initialize`` (a broadcast) or after ``load_state_dict``, the model weight wins, element by element.
"""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ampctx import foreach
from ampctx._errors import AmpError
from ampctx.amp.cast_arguments import LOW_PRECISION, Undo
from ampctx.foreach import FoundInf
from ampctx.model_grads import MasterParam, declares

Group = dict[str, Any]


def _cast_state(optimizer: Any, p: Tensor, key: Tensor, dtype: torch.dtype) -> None:
    """Moves the optimizer's state of ``p`` to ``key``, its floating tensors of the parameter's shape in ``dtype``."""
    if p in optimizer.state:
        optimizer.state[key] = {
            k: v.to(dtype) if isinstance(v, Tensor) and v.shape == p.shape and v.is_floating_point() else v
            for k, v in optimizer.state.pop(p).items()
        }


class MasterParams:
    """The model parameters behind ``optimizer.param_groups`` and their masters.

    ``pairs`` are (model parameter, master), ``model_of`` leads from a master to its parameter; ``own`` are the
    parameters that the optimizer steps directly. All methods run under no_grad and none waits for the device.

    Args:
        optimizer: its groups are taken over as they are.
        master_weights: whether 16-bit parameters get masters.
        originals: what the data of parameters was before a cast; their masters start from that.
        taken: ids of parameters that have a master in another optimizer.

    Raises:
        AmpError: a 16-bit parameter without values (of a lazy module), or with a master already.
    """

    def __init__(
        self, optimizer: Any, master_weights: bool, originals: dict[Tensor, Tensor], taken: Container[int] = ()
    ) -> None:
        self.master_weights = master_weights
        # Whether the optimizer reads 16-bit gradients itself, so that those of the masters can wait for a reader.
        self.lazy = declares(optimizer, "_step_supports_model_params")
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.model_of: dict[Tensor, Tensor] = {}
        self.own: list[Tensor] = []
        # Own parameters that a cast has changed, with the dtype from before.
        self._cast: list[tuple[Tensor, torch.dtype]] = []
        # 16-bit parameters without requires_grad: they get a master when they are unfrozen.
        self._frozen: list[tuple[Group, int]] = []
        self._may_disagree = True
        try:
            for group in optimizer.param_groups:
                self.adopt(optimizer, group, originals, taken)
        except BaseException:
            self.dissolve(optimizer)
            raise

    # --- membership ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def adopt(
        self,
        optimizer: Any,
        group: Group,
        originals: dict[Tensor, Tensor] | None = None,
        taken: Container[int] = (),
    ) -> None:
        """Takes in the parameters of a group, putting masters into ``group["params"]`` where they are due."""
        for i, p in enumerate(group["params"]):
            original = (originals or {}).get(p)
            if not self.master_weights or p.dtype not in LOW_PRECISION:
                self.own.append(p)
                if original is not None:
                    self._cast.append((p, original.dtype))
                    _cast_state(optimizer, p, p, p.dtype)
            elif id(p) in taken:
                raise AmpError(
                    f"a parameter of shape {tuple(p.shape)} is in two optimizers, and only one of them can keep the "
                    "fp32 master weight it is rounded from. Give each parameter to one optimizer."
                )
            elif p.requires_grad:
                self._give_master(optimizer, group, i, original)
            else:
                self._frozen.append((group, i))

    def _give_master(self, optimizer: Any, group: Group, i: int, original: Tensor | None) -> None:
        p = group["params"][i]
        if is_lazy(p):
            raise AmpError(
                "a parameter of a lazy module has no values yet, and its fp32 master weight cannot be made: run one "
                "forward before amp.initialize"
            )
        # In a process group every rank starts from the rounded weight: what a broadcast makes equal is the model.
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        source = p if original is None or distributed else original
        # A copy even of fp32 data: state dicts taken before initialize alias the original.
        master = source.detach().to(torch.float32, copy=True).requires_grad_()
        if self.lazy:
            master = MasterParam(master.detach())
        group["params"][i] = master
        self.pairs.append((p, master))
        self.model_of[master] = p
        _cast_state(optimizer, p, master, torch.float32)

    @torch.no_grad()
    def adopt_unfrozen(self, optimizer: Any) -> None:
        """Gives masters to 16-bit parameters that were frozen when they came in and train now."""
        if self._frozen and any(group["params"][i].requires_grad for group, i in self._frozen):
            frozen, self._frozen = self._frozen, []
            for group, i in frozen:
                if group["params"][i].requires_grad:
                    self._give_master(optimizer, group, i, None)
                else:
                    self._frozen.append((group, i))

    @torch.no_grad()
    def dissolve(self, optimizer: Any) -> None:
        """Puts the model parameters back into the optimizer, in fp32 with the masters' values and gradients."""
        self.follow_model()
        for group in optimizer.param_groups:
            for i, master in enumerate(group["params"]):
                if master in self.model_of:
                    p = group["params"][i] = self.model_of[master]
                    grad, p.grad = master.grad, None
                    p.data = master.detach()
                    p.grad = grad
                    _cast_state(optimizer, master, p, torch.float32)
        for p, former in self._cast:
            _cast_state(optimizer, p, p, former)
        self.own += [p for p, _ in self.pairs]
        self.pairs, self.model_of, self._cast = [], {}, []

    # --- values -------------------------------------------------------------------------------------------------------

    def model_changed(self) -> None:
        """Notes that model weights may have changed behind the masters."""
        self._may_disagree = True

    @torch.no_grad()
    def follow_model(self, settled: bool = False) -> None:
        """Where a model weight is not the rounded master any more, the master takes the model's value.

        Does nothing until ``model_changed`` was called again, once the values are ``settled``.
        """
        if self._may_disagree:
            for p, master in self.pairs:
                master.copy_(torch.where(master.to(p.dtype) == p, master, p.to(master.dtype)))
            self._may_disagree = not settled

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """model = master, rounded to nearest even."""
        if self.pairs:
            foreach.scale([master for _, master in self.pairs], [p for p, _ in self.pairs], FoundInf(), 1.0)

    def drop_master_grads(self) -> None:
        for _, master in self.pairs:
            if master.grad is not None:
                master.grad = None


class _MastersFollow:
    """A load_state_dict hook that has the masters follow. A copy or pickle of the model does not carry it along."""

    def __init__(self, masters: list[MasterParams]) -> None:
        self._masters = weakref.WeakSet(masters)

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        for masters in self._masters:
            masters.model_changed()

    def __reduce__(self) -> tuple:
        return _MastersFollow, ([],)


def watch_loading(model: nn.Module, masters: list[MasterParams]) -> Undo:
    """Has masters follow the model after any ``load_state_dict`` of it or of a part of it."""
    hook = _MastersFollow(masters)
    handles = [m.register_load_state_dict_post_hook(hook) for m in model.modules()]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
