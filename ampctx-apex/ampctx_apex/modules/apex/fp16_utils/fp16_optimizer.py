"""FP16_Optimizer: an optimizer with fp32 masters and a loss scale around another one, from before apex.amp."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from ampctx_apex.checkpoints import fp16_optimizer_entry, paired
from torch import Tensor

from ampctx import AmpError, AmpKeyError, AmpTypeError, clip_grad_norm_
from ampctx.spi import MasterParams, check_scale

from ..amp._stash import WITH_MASTERS, Groups
from ..amp.scaler import LossScaler, delegated
from .fp16util import _grads_of_pairs

logger = logging.getLogger("ampctx")


def _scaler_from(saved: Any, dynamic: bool) -> LossScaler:
    """A loss scaler that stands where the saved one stood: apex's of amp or of fp16_utils, or a dict with "loss_scale"
    and "unskipped"."""
    if isinstance(saved, LossScaler) and saved.dynamic == dynamic:
        return copy.deepcopy(saved)
    entry = fp16_optimizer_entry({"loss_scaler": saved})
    if entry is None and isinstance(saved, Mapping) and "loss_scale" in saved:
        entry = dict(saved)
    if entry is None:
        raise AmpKeyError(f"state_dict['loss_scaler'] ({type(saved).__name__}) holds no loss scale")
    value = check_scale("state_dict['loss_scaler']", entry["loss_scale"])
    if isinstance(saved, Mapping):
        window = saved.get("scale_window", 2000)
    else:
        window = getattr(saved, "_scale_seq_len", getattr(saved, "scale_window", 2000))
    result = LossScaler(
        "dynamic" if dynamic else value,
        scale_window=window,
        min_loss_scale=getattr(saved, "_min_loss_scale", None),
        max_loss_scale=getattr(saved, "_max_loss_scale", 2.0**24),
    )
    result._loss_scale, result._unskipped = value, entry.get("unskipped", 0)
    return result


class FP16_Optimizer:
    """Steps fp32 masters of an optimizer's 16-bit parameters, and scales the loss.

        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.step()

    The masters take the places of the fp16 and bf16 parameters in ``optimizer.param_groups``. Other parameters are
    stepped as they are. A weight that is changed before the first gradients (a broadcast, a loaded model) is followed
    by its master.

    Args:
        init_optimizer: any optimizer, of torch, of ampctx or an object with the same methods. Kept as ``optimizer``.
        static_loss_scale: the scale, where it is not dynamic. Overflows are not looked for then.
        dynamic_loss_scale: start at 2**16, skip steps whose gradients overflow, and halve the scale with each.
        dynamic_loss_args: keyword arguments of ``apex.amp.scaler.LossScaler``: init_scale, scale_window and others.
        verbose: log the parameters that are taken, at level INFO.

    Raises:
        AmpTypeError, AmpValueError: an argument that cannot be used, by name.
    """

    # What errors show, and clients compare: the package.
    __module__ = __package__

    state = delegated("optimizer", "state")
    param_groups = delegated("optimizer", "param_groups")

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if isinstance(init_optimizer, FP16_Optimizer) or not hasattr(init_optimizer, "param_groups"):
            raise AmpTypeError(f"init_optimizer must be an optimizer to wrap, got {type(init_optimizer).__name__}")
        self.optimizer = init_optimizer
        self.verbose = verbose
        self.dynamic_loss_scale = bool(dynamic_loss_scale)
        self.loss_scaler = self._new_scaler(static_loss_scale, dynamic_loss_args)
        self.overflow = False
        self.first_closure_call_this_step = True
        self.clip_grad_norm = clip_grad_norm_
        self._masters = MasterParams(init_optimizer, master_weights=True, originals={})
        if verbose:
            logger.info("FP16_Optimizer: %d parameters have fp32 masters", len(self.all_fp16_params))

    def _new_scaler(self, static: float, dynamic_arguments: Mapping[str, Any] | None) -> Any:
        if self.dynamic_loss_scale:
            return LossScaler("dynamic", **(dynamic_arguments or {}))
        return LossScaler(check_scale("static_loss_scale", static))

    def __getstate__(self) -> dict[str, Any]:
        raise AmpError("FP16_Optimizer cannot be pickled or copied: save its state_dict()")

    def __setstate__(self, state: Any) -> None:
        raise AmpError("FP16_Optimizer cannot be unpickled: build one, and load its state_dict()")

    # --- what it steps ------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Adds masters for parameters that were unfrozen or added in new groups."""
        self._masters.follow()

    def _groups(self) -> Groups:
        return [group["params"] for group in self.optimizer.param_groups]

    def __getattr__(self, name: str) -> Any:
        if name in WITH_MASTERS:
            return WITH_MASTERS[name](self._groups(), self._masters.model_of)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @property
    def loss_scale(self) -> float:
        """The scale; can be assigned. Reading a dynamic scale on an accelerator is a host sync."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = check_scale("loss_scale", value)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def zero_grad(self, set_grads_to_None: bool = False, *, set_to_none: bool | None = None) -> None:
        """Zeroes the gradients of the model and of the masters, or makes them None.

        ``set_to_none``: torch's name for that.
        """
        as_none = set_grads_to_None if set_to_none is None else set_to_none
        for group in (*self.optimizer.param_groups, {"params": self.all_fp16_params}):
            for p in group["params"]:
                if as_none:
                    p.grad = None
                elif p.grad is not None:
                    p.grad = p.grad.detach().zero_()

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """``backward()`` of the scaled loss, in fp32, and ``update_master_grads()``, unless further losses come before
        that."""
        if not isinstance(loss, Tensor):
            raise AmpTypeError(f"loss must be a tensor, got {type(loss).__name__}")
        wide = loss if loss.dtype == torch.float64 else loss.float()
        (wide * self.loss_scale).backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Unscales: gradients of 16-bit parameters into those of their masters, the others in place. Sets ``overflow``
        and moves the scale. Once for each step. A host sync for a dynamic scale."""
        self._take_in()
        self._masters.resync()
        if self._masters.unsure:
            self._masters.take_broadcast(weights_final=True)
        # Copied: the model's gradients stay and go on adding up, where a scale_loss block of amp moves them.
        model_grads, master_grads = _grads_of_pairs(self._masters.pairs)
        own = [p.grad for p in self._masters.params_without_master if p.grad is not None]
        self.overflow = self._unscale([*model_grads, *own], [*master_grads, *own])

    def _unscale(self, grads: list[Tensor], into: list[Tensor]) -> bool:
        """``into = grads / scale``; updates the scale and returns whether to skip the step."""
        self.loss_scaler.clear_overflow_state()
        self.loss_scaler.unscale(grads, into, None)
        return bool(self.loss_scaler.update_scale())

    def _master_params_to_model_params(self) -> None:
        """model = master, rounded. No host sync."""
        self._masters.copy_to_model()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the masters and writes the model's weights; nothing after an overflow.

        Args:
            closure: calls ``backward`` of this object; it is run again as long as it overflows.

        Returns:
            What the optimizer's ``step`` returns; None for a step that was skipped.

        Raises:
            AmpError: a closure that overflows at the lowest scale, too.
        """
        if closure is None and self.overflow:
            logger.warning("Gradient overflow.  Skipping step, reducing loss scale to %s", self.loss_scale)
            return None
        try:
            given = () if closure is None else (lambda: self._closure(closure),)
            result = self.optimizer.step(*given)
            self._master_params_to_model_params()
        except BaseException:
            self._master_params_to_model_params()
            raise
        finally:
            self.first_closure_call_this_step = True
        return result

    def _closure(self, closure: Callable[[], Any]) -> Any:
        if self.first_closure_call_this_step:
            self.first_closure_call_this_step = False
        else:
            # The optimizer has moved the masters since.
            self._master_params_to_model_params()
        while True:
            before = self.loss_scale
            with torch.enable_grad():
                loss = closure()
            if not self.overflow:
                return loss
            if self.loss_scale >= before:
                raise AmpError(
                    f"the closure's gradients overflow at the lowest loss scale, {before}, too: the model or its input "
                    "holds inf or nan"
                )
            logger.warning("Gradient overflow in a closure.  Running it again, loss scale %s", self.loss_scale)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clips all stepped gradients by their joint norm. Returns the norm, or -1 after an overflow."""
        if self.overflow:
            return -1
        return self.clip_grad_norm([p for group in self._groups() for p in group], max_norm, norm_type)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """In apex's format: "loss_scaler" is an ``apex.amp.scaler.LossScaler``, "fp32_from_fp16" the masters by group.

        ``torch.load`` reads it back with its defaults where apex's names are importable. Host sync: reads the scale.
        """
        return {
            "loss_scaler": copy.deepcopy(self.loss_scaler),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[m.detach() for m in group] for group in self.fp32_from_fp16_groups],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what ``state_dict`` gave, here or in apex; "loss_scaler" may also be a dict with "loss_scale" and
        "unskipped". Load the model's weights, too: the next step overwrites them from the masters.

        Raises:
            AmpKeyError: an entry is missing. AmpTypeError, AmpValueError: one that cannot be used; and what the
                optimizer raises. Nothing has changed then.
        """
        for key in ("loss_scaler", "dynamic_loss_scale", "optimizer_state_dict", "fp32_from_fp16"):
            required(state_dict, key)
        dynamic = bool(state_dict["dynamic_loss_scale"])
        scaler = _scaler_from(state_dict["loss_scaler"], dynamic)
        self._load_masters(state_dict, "fp32_from_fp16", self.fp32_from_fp16_groups)
        self.loss_scaler, self.dynamic_loss_scale = scaler, dynamic
        self.overflow = bool(state_dict.get("overflow", False))
        self.first_closure_call_this_step = bool(state_dict.get("first_closure_call_this_step", True))

    @torch.no_grad()
    def _load_masters(self, state_dict: Mapping[str, Any], key: str, groups: Groups) -> None:
        """Loads the optimizer and ``state_dict[key]`` into ``groups``, or nothing if one does not fit."""
        pairs = paired(groups, state_dict[key], key)
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        # From here on the masters are what counts, whatever the model's weights are.
        self._masters.resync()
        if self._masters.unsure:
            self._masters.take_broadcast(weights_final=True)
        for master, value in pairs:
            master.copy_(value)


def required(state_dict: Mapping[str, Any], key: str) -> None:
    if not isinstance(state_dict, Mapping):
        raise AmpTypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
    if key not in state_dict:
        raise AmpKeyError(f'the state_dict of an FP16_Optimizer has no "{key}", only {sorted(map(str, state_dict))}')


# What the checkpoints hold: torch.load takes them without weights_only=False.
torch.serialization.add_safe_globals([LossScaler])

__all__ = ["FP16_Optimizer"]
