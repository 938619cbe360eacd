"""fp32 weights for the user: a state dict with them, and a model over them."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ampctx._errors import AmpError, AmpTypeError
from ampctx.amp.binding import OptimizerBinding
from ampctx.casts.arguments import LOW_PRECISION, ModelHook

# Entries in other floating types (float8) are what their module makes of them.
_CAST = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def masters_of(bindings: Iterable[OptimizerBinding]) -> dict[Tensor, Tensor]:
    """Model parameter to the fp32 master that amp keeps of it, which has followed the model. No host sync."""
    result: dict[Tensor, Tensor] = {}
    for binding in bindings:
        binding.masters.add_unfrozen(binding.optimizer)
        binding.masters.resync()
        result.update(binding.masters.pairs)
    return result


def _kept_by_optimizers(bindings: Iterable[OptimizerBinding]) -> dict[Tensor, Tensor]:
    """Model parameter to a copy of the master that its optimizer keeps by itself, and shows as apex's do."""
    result: dict[Tensor, Tensor] = {}
    for binding in bindings:
        groups = binding.optimizer.param_groups
        for group, shown in zip(groups, getattr(binding.optimizer, "param_groups_master", ()), strict=False):
            for p, master in zip(group["params"], shown["params"], strict=True):
                if master is not None and p.dtype in LOW_PRECISION:
                    # It is to follow the model with the next step, where that was changed.
                    result[p] = torch.where(master.to(p.dtype) == p, master, p.to(master.dtype))
    return result


class _Shown(nn.Module):
    """``functional_call`` of it gives a state dict with other tensors in the parameters' places."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> dict[str, Any]:
        return self.model.state_dict()


@torch.no_grad()
def master_state_dict(model: nn.Module, bindings: list[OptimizerBinding], dtype: torch.dtype) -> dict[str, Any]:
    """``model.state_dict()`` with master weights, as copies. See ``AmpSession.master_state_dict``."""
    if not isinstance(model, nn.Module):
        raise AmpTypeError(f"model must be a module, got {type(model).__name__}")
    if not isinstance(dtype, torch.dtype) or dtype not in _CAST:
        raise AmpTypeError(f"dtype is {dtype!r}, expected one of {', '.join(map(str, _CAST))}")
    masters = {**_kept_by_optimizers(bindings), **masters_of(bindings)}
    shown = _Shown(model)
    # All names of a tied weight: functional_call has them agree.
    values = {n: masters[p] for n, p in shown.named_parameters(remove_duplicate=False) if p in masters}
    # With the masters in the places of the weights, so that every hook of the user's does what it does to weights.
    state = torch.func.functional_call(shown, values, ())
    # One copy of what several keys share, as in the state dict itself.
    copies: dict[tuple[Any, ...], Tensor] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            same = (value.data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)
            to = _dtype(value, dtype)
            if value.layout != torch.strided or value.numel() == 0:
                state[key] = value.detach().to(to, copy=True)
                continue
            if same not in copies:
                copies[same] = value.detach().to(to, copy=True)
            state[key] = copies[same]
    return state


def _dtype(value: Tensor, wanted: torch.dtype) -> torch.dtype:
    if value.dtype not in _CAST:
        return value.dtype
    # fp32 is to lose nothing.
    return torch.promote_types(value.dtype, wanted) if wanted == torch.float32 else wanted


@torch.no_grad()
def master_model(model: nn.Module, bindings: list[OptimizerBinding]) -> nn.Module:
    """A copy of the modules over the masters and the model's own buffers. See ``AmpSession.master_model``."""
    if not isinstance(model, nn.Module):
        raise AmpTypeError(f"model must be a module, got {type(model).__name__}")
    kept = _kept_by_optimizers(bindings)
    if name := next((n for n, p in model.named_parameters() if p in kept), None):
        raise AmpError(
            f"{name} has its master weight in the optimizer's own state (master_weights of the optimizer), which no "
            "module can hold: use amp.master_state_dict, or opt_level='O2' or 'O5', where amp keeps the masters"
        )
    masters = masters_of(bindings)
    memo: dict[int, Any] = {id(p): masters.get(p, p) for p in model.parameters()}
    memo |= {id(b): b for b in model.buffers()}
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        # Private by name: torch has handles to remove a hook, and a copy has none.
        for hooks in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._state_dict_hooks,
            module._state_dict_pre_hooks,
            module._load_state_dict_pre_hooks,
            module._load_state_dict_post_hooks,
        ):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "hook", hook), ModelHook):  # torch wraps those that come before loading
                    del hooks[key]
    return twin
