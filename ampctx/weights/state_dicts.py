"""State dicts of models with masters: ``state_dict()`` shows the masters, and loaded fp32 values set them.

The hooks belong to no session: they look up masters by parameter. A copy or pickle of a model has none, so it shows and
loads its own weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from ampctx.casts.arguments import LOW_PRECISION, ModelHook, Undo
from ampctx.casts.casting import UpcastEntries
from ampctx.kernels.tensor_loops import version_of
from ampctx.weights.masters import ALIVE, LOADED, MasterParams


def _masters_with(p: Tensor) -> list[MasterParams]:
    return [masters for masters in list(ALIVE) if masters.pairs_of([p])]


class ShowMasters(UpcastEntries):
    """Shows masters in place of up-cast 16-bit values."""

    def shown(self, value: Tensor, t: Tensor) -> Tensor:
        masters = next(iter(_masters_with(t)), None)
        # Values that the user's code has made from the parameter are shown themselves.
        if masters is None or value.layout != t.layout or not value.is_set_to(t):
            return super().shown(value, t)
        masters.round_again()
        exact = masters.exact(t)
        if not value.requires_grad:
            return exact
        # keep_vars: the entry must stay connected to the parameter, so set its values without autograd.
        entry = super().shown(value, t)
        entry.detach().copy_(exact)
        return entry


class _MastersFollow(ModelHook):
    """Hooks of load_state_dict that load values into masters. In a copy or pickle of the model they find none."""

    def __init__(self, _: Any = ()) -> None:
        # For each module being loaded: its parameters, the state dict and the prefix.
        self._incoming: list[tuple[dict[str, Tensor], dict[str, Any], str]] = []

    def before(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        named = module.named_parameters(recurse=False, remove_duplicate=False)
        own: dict[str, Tensor] = {name: p for name, p in named if p.dtype in LOW_PRECISION}
        _loading(own.values())
        if own and not metadata.get("assign_to_params_buffers"):
            self._incoming.append((own, state_dict, prefix))

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        # After torch has copied the values, and the user's hooks have changed the state dict.
        incoming, self._incoming = self._incoming, []
        for own, state_dict, prefix in incoming:
            for name, p in own.items():
                value = state_dict.get(prefix + name)
                for masters in (owners := _masters_with(p)):
                    masters.take_loaded(p, value)
                if not owners and isinstance(value, Tensor):
                    LOADED[p] = value, version_of(p)
        # Includes modules that were added later and have no hooks.
        _loading(list(module.parameters()))

    def __reduce__(self) -> tuple:
        return _MastersFollow, ()


def _loading(params: Collection[Tensor]) -> None:
    """Before and after weights are loaded: masters and weights agree, until a broadcast writes one rank's to others."""
    for masters in list(ALIVE):
        if masters.pairs_of(params):
            masters.resync()
            masters.unsure = masters.were_loaded = True


# Hooks of copies of models, which have no masters.
COPIES: weakref.WeakSet[_RoundAgain] = weakref.WeakSet()


class _RoundAgain(ModelHook):
    """A pre-hook of forward: weights whose masters were written, by an average or a schedule, are rounded again."""

    def __init__(self, masters: Collection[MasterParams] = ()) -> None:
        self._masters = weakref.WeakSet(masters)
        if not masters:
            COPIES.add(self)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            for masters in self._masters:
                masters.round_again()

    def __reduce__(self) -> tuple:
        return _RoundAgain, ()


def watch_forward(model: nn.Module, masters: Collection[MasterParams]) -> Undo:
    """Lets the weights of a model follow masters that the program has written, at the next forward."""
    return model.register_forward_pre_hook(_RoundAgain(masters)).remove


def watch_loading(model: nn.Module) -> Undo:
    """Loads fp32 values into masters after any ``load_state_dict`` of the model or of a part of it."""
    hook = _MastersFollow()
    handles = [m.register_load_state_dict_post_hook(hook) for m in model.modules()]
    handles += [m.register_load_state_dict_pre_hook(hook.before) for m in model.modules()]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
