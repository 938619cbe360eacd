"""Parameter names for messages, and a guard against ``load_state_dict(assign=True)`` under amp."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from ampctx._errors import AmpError
from ampctx.casts.arguments import Undo

# Prefix of the names of parameters that are in no model.
PLACE = "param_groups["


class ParameterNames:
    """Names of parameters in models and optimizers. Holds the models weakly.

    Args:
        models: the models to search. With several, names of ``models[i]`` start with "models[i].".
    """

    def __init__(self, models: Sequence[nn.Module] = ()) -> None:
        self._models = [weakref.ref(model) for model in models]

    def by_model(self) -> list[dict[str, Tensor]]:
        """For each model, its parameters by name."""
        prefixes = [""] if len(self._models) == 1 else [f"models[{i}]." for i in range(len(self._models))]
        models = zip(prefixes, (reference() for reference in self._models), strict=True)
        return [{pre + name: p for name, p in model.named_parameters()} for pre, model in models if model is not None]

    def _of_models(self) -> Iterator[tuple[str, Tensor]]:
        for params in self.by_model():
            yield from params.items()

    def __call__(self, p: Tensor) -> str:
        """The name in quotes, or the shape if no model has the parameter."""
        name = next((name for name, candidate in self._of_models() if candidate is p), None)
        return f"a parameter of shape {tuple(p.shape)}" if name is None else f'"{name}"'

    def of(self, optimizer: Any, model_of: Mapping[Tensor, Tensor] | None = None) -> dict[int, str]:
        """Names by the id of the parameter. ``model_of`` maps masters to model parameters."""
        names: dict[int, str] = {}
        for g, group in enumerate([] if optimizer is None else optimizer.param_groups):
            own_names = group.get("param_names")
            for i, p in enumerate(group["params"]):
                name = own_names[i] if own_names and i < len(own_names) else f"{PLACE}{g}][{i}]"
                names[id((model_of or {}).get(p, p))] = name
        names.update((id(p), name) for name, p in self._of_models())
        return names


class _RefuseReplaced:
    """A load_state_dict post-hook. ``assign=True`` replaces parameters that the optimizer would go on stepping.

    A copy or pickle of the model carries an empty one.
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
                "load_state_dict(assign=True) or to_empty() has put a new tensor in the place of "
                f'"{replaced[id(stepped[0])]}" of a {type(module).__name__}. The optimizer steps the old tensor, so '
                "that one was put back. Load without assign=True, or call both before you make the optimizer."
            )

    def __reduce__(self) -> tuple:
        return _RefuseReplaced, (list, {})


def refuse_replaced(model: nn.Module, stepped: Callable[[], Iterable[Tensor]]) -> Undo:
    """Makes ``load_state_dict(assign=True)`` put back a parameter that an optimizer steps, and raise AmpError."""
    with ExitStack() as stack:
        for module in model.modules():
            if before := {name: id(p) for name, p in module.named_parameters(recurse=False)}:
                hook = _RefuseReplaced(stepped, before)
                stack.callback(module.register_load_state_dict_post_hook(hook).remove)
        return stack.pop_all().close
