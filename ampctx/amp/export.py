"""Exports fp32 master weights: as a state dict, or as a model over them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ampctx._errors import AmpError, AmpTypeError
from ampctx.casts.arguments import LOW_PRECISION, ModelHook
from ampctx.kernels.sharding import local, reshard_units
from ampctx.weights.store import STORES

# Entries of other floating types (float8) stay as they are.
_CAST = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _masters_of(session: Any, live: bool) -> dict[Tensor, Tensor]:
    """Model parameter -> its fp32 value in amp. ``live``: the master itself, resynced from the model. No host sync."""
    result: dict[Tensor, Tensor] = {}
    for binding in session._bindings.values():
        binding.follow_groups()
        if live:
            binding.masters.resync()
        result.update(binding.masters.pairs if live else binding.masters.values())
    return result


def _kept_by_optimizers(session: Any) -> dict[Tensor, Tensor]:
    """Model parameter -> a copy of the master that its optimizer keeps, from ``param_groups_master`` as in apex."""
    result: dict[Tensor, Tensor] = {}
    for optimizer in session._bindings:
        for group, shown in zip(optimizer.param_groups, getattr(optimizer, "param_groups_master", ()), strict=False):
            for p, master in zip(group["params"], shown["params"], strict=True):
                if master is not None and p.dtype in LOW_PRECISION:
                    # Where the model was changed, use its value, as the next step would.
                    store = STORES.get(optimizer.layout_of(p), STORES["copy"])
                    rounded, _ = store.divided(master, p.dtype, None)
                    here = p.detach().to(master.device)  # masters may be in host memory
                    result[p] = torch.where(rounded == here, master, here.to(master.dtype))
    return result


class _Shown(nn.Module):
    """``functional_call`` of this module gives a state dict with other tensors in the places of the parameters."""

    def forward(self) -> dict[str, Any]:
        return self.get_submodule("model").state_dict()


@torch.no_grad()
def master_state_dict(session: Any, model: nn.Module, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Exports ``model.state_dict()`` with fp32 masters in place of 16-bit weights, for plain torch. Host sync only for
    masters in host memory.

    Keys, order and hooks are those of ``model.state_dict()``. All tensors are copies; keys that share one share its
    copy. Includes masters in the state of an optimizer (``FusedAdam(master_weights=True)``) that went through
    ``initialize``. A weight without master is exported itself.

    Args:
        model: a model that went through ``initialize``, a wrapper around it or a part of it.
        dtype: of the floating entries, buffers included; float32 by default. With float32, float64 entries stay.

    Raises:
        AmpTypeError: ``model`` is no module, or ``dtype`` is not float16, bfloat16, float32 or float64.
    """
    if not isinstance(model, nn.Module):
        raise AmpTypeError(f"master_state_dict: model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(dtype, torch.dtype) or dtype not in _CAST:
        raise AmpTypeError(f"master_state_dict: dtype is {dtype!r}, expected one of {', '.join(map(str, _CAST))}")
    reshard_units(model)
    masters = {**_kept_by_optimizers(session), **_masters_of(session, live=False)}
    shown = _Shown()
    shown.model = model
    # All names of a tied weight, on which functional_call insists. The user's hooks treat masters as weights.
    values = {n: masters[p] for n, p in shown.named_parameters(remove_duplicate=False) if p in masters}
    state = torch.func.functional_call(shown, values, ())
    # Keys that share a tensor share its copy, as in the state dict itself.
    copies: dict[tuple[Any, ...], Tensor] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            (part,) = local([value])  # a DTensor itself has no address
            same: tuple[Any, ...] = (key,)
            if value.layout == torch.strided and part.numel():
                same = (part.data_ptr(), part.storage_offset(), value.shape, part.stride(), value.dtype)
            if same not in copies:
                to = value.dtype
                if to in _CAST:  # float32 must not narrow float64 entries
                    to = torch.promote_types(to, dtype) if dtype == torch.float32 else dtype
                copies[same] = value.detach().to(to, copy=True)
            state[key] = copies[same]
    return state


@torch.no_grad()
def master_model(session: Any, model: nn.Module) -> nn.Module:
    """Copies the modules of ``model`` over the live fp32 masters, to average weights or evaluate in fp32.

    The copy has no casts of amp. It shares the masters, the model's buffers, and weights without master. Pass it to
    ``torch.optim.swa_utils.AveragedModel`` and to ``update_parameters`` after each step. Do not train it. Make it again
    after ``add_param_group``, unfreezing or ``reset``. Loading into the model updates it at the next block, step or
    call of this. No host sync.

    Args:
        model: a module that went through ``initialize``, or a part of it. The copy has its class.

    Raises:
        AmpTypeError: ``model`` is no module.
        AmpError: a master is in the optimizer's own state (its option ``master_weights``).
    """
    if not isinstance(model, nn.Module):
        raise AmpTypeError(f"master_model: model must be a torch.nn.Module, got {type(model).__name__}")
    kept = _kept_by_optimizers(session)
    if name := next((n for n, p in model.named_parameters() if p in kept), None):
        raise AmpError(
            f"master_model: the master weight of {name} is in the optimizer's state (its option master_weights), and "
            "a module cannot hold it. Use amp.master_state_dict(), or let amp keep masters (O2 or O5)."
        )
    masters = _masters_of(session, live=True)
    memo: dict[int, Any] = {id(p): masters.get(p, p) for p in model.parameters()}
    memo |= {id(b): b for b in model.buffers()}
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        # Private in torch: a hook is removed by its handle, and a copy has no handles.
        for hooks in [d for name, d in vars(module).items() if name.endswith("_hooks") and isinstance(d, dict)]:
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "hook", hook), ModelHook):  # torch wraps pre-hooks of load_state_dict
                    del hooks[key]
    return twin
