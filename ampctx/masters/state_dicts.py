"""State dicts of models with masters: they show the masters, and fp32 values that are loaded set them.

The hooks on modules belong to no session. Which masters there are is looked up by the parameter, so a copy or a pickle
of a model, whose parameters have none, shows and loads its own weights.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from ampctx.casts.arguments import ModelHook, Undo
from ampctx.casts.casting import UpcastEntries
from ampctx.masters.params import ALIVE, MasterParams, resynced


def _masters_with(p: Tensor) -> list[MasterParams]:
    return [masters for masters in list(ALIVE) if masters.pairs_of([p])]


def masters_of(model: nn.Module) -> list[Tensor]:
    """The masters of the model's parameters, of any session."""
    return [master for masters in list(ALIVE) for _, master in masters.pairs_of(model.parameters())]


class ShowMasters(UpcastEntries):
    """Shows the masters of parameters that have one, in the place of their up-cast 16-bit values."""

    def shown(self, value: Tensor, t: Tensor) -> Tensor:
        masters = next(iter(_masters_with(t)), None)
        # What some code of the user has made of the parameter is shown itself.
        if masters is None or value.layout != t.layout or not value.is_set_to(t):
            return super().shown(value, t)
        masters.finish_writing()
        # What ``resync`` would make of the master. Weights of an average that are swapped in count, too.
        exact = resynced(*masters.pairs_of([t])[0])
        if not value.requires_grad:
            return exact
        # keep_vars: the entry leads to the parameter. Its values are set below autograd.
        entry = super().shown(value, t)
        entry.detach().copy_(exact)
        return entry


class _MastersFollow(ModelHook):
    """Hooks of load_state_dict that have masters follow. Those of a copy or pickle of the model find no masters."""

    def __init__(self, _: Any = ()) -> None:
        # Of modules that are being loaded: their parameters, and the dict that each is looked up in, with its prefix.
        self._incoming: list[tuple[dict[str, Tensor], dict[str, Any], str]] = []

    def before(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        named = module.named_parameters(recurse=False, remove_duplicate=False)
        own: dict[str, Tensor] = {name: p for name, p in named if _masters_with(p)}
        for masters in [masters for p in own.values() for masters in _masters_with(p)]:
            masters.finish_writing()
        _model_changed(own.values())
        if own and not metadata.get("assign_to_params_buffers"):
            self._incoming.append((own, state_dict, prefix))

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        # Not before torch has copied what fits, and the user's hooks have changed what does not.
        incoming, self._incoming = self._incoming, []
        for own, state_dict, prefix in incoming:
            for name, p in own.items():
                for masters in _masters_with(p):
                    masters.take_loaded(p, state_dict.get(prefix + name))
        # Those of modules too that were put into this one later, and have no hooks.
        _model_changed(list(module.parameters()))

    def __reduce__(self) -> tuple:
        return _MastersFollow, ()


def _model_changed(params: Collection[Tensor]) -> None:
    for masters in list(ALIVE):
        if masters.pairs_of(params):
            masters.were_loaded = True
            masters.model_changed()


def watch_loading(model: nn.Module) -> Undo:
    """Has masters follow the model after any ``load_state_dict`` of it or of a part of it: fp32 values set them."""
    hook = _MastersFollow()
    handles = [m.register_load_state_dict_post_hook(hook) for m in model.modules()]
    handles += [m.register_load_state_dict_pre_hook(hook.before) for m in model.modules()]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
