"""What users do to a model under amp: names for messages, and new tensors that the optimizer does not know."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ampctx._errors import AmpError
from ampctx.casts.arguments import Undo


class ParameterNames:
    """What models call their parameters. Keeps no model alive."""

    def __init__(self, models: Sequence[nn.Module] = ()) -> None:
        self._models = [weakref.ref(model) for model in models]

    def __call__(self, p: Tensor) -> str:
        """The name in quotes, or what can be said of a parameter of none of the models."""
        for model in [reference() for reference in self._models]:
            for name, candidate in [] if model is None else model.named_parameters():
                if candidate is p:
                    return f'"{name}"'
        return f"a parameter of shape {tuple(p.shape)}"


class _RefuseReplaced:
    """A load_state_dict hook. A copy or pickle of the model does not carry it along.

    ``assign=True`` puts new parameters into the module, and the optimizer goes on with the old ones.
    """

    def __init__(self, stepped: Callable[[], Iterable[Tensor]], before: dict[str, int]) -> None:
        self._stepped = stepped
        self._before = before

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        now = {name: id(p) for name, p in module.named_parameters(recurse=False)}
        replaced = {former: name for name, former in self._before.items() if now.get(name) not in (former, None)}
        if replaced and (stepped := [p for p in self._stepped() if id(p) in replaced]):
            for p in stepped:
                setattr(module, replaced[id(p)], p)
            raise AmpError(
                f'load_state_dict(assign=True) would put a new tensor in the place of "{replaced[id(stepped[0])]}" of '
                f"a {type(module).__name__}, and the optimizer would go on with the old one, which stays. Load without "
                "assign, or before the optimizer is made and amp.initialize is called."
            )

    def __reduce__(self) -> tuple:
        return _RefuseReplaced, (list, {})


def refuse_replaced(model: nn.Module, stepped: Callable[[], Iterable[Tensor]]) -> Undo:
    """Has ``load_state_dict(assign=True)`` raise where it replaces a parameter that is ``stepped``, and put it back."""
    handles = []
    for module in model.modules():
        if before := {name: id(p) for name, p in module.named_parameters(recurse=False)}:
            handles.append(module.register_load_state_dict_post_hook(_RefuseReplaced(stepped, before)))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
