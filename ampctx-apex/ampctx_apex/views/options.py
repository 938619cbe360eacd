"""The options of apex.amp.frontend: ``Properties``, and the levels that set them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

from ampctx import AmpError, AmpSession, AmpValueError
from ampctx.amp import OPT_LEVELS, PrecisionPolicy
from ampctx.spi import BRIEFS, resolve
from ampctx_apex.views import messages

# apex's defaults of Properties() before a level applies, plus cast_model_outputs, which apex had not as an option.
_BARE: Mapping[str, Any] = {
    "enabled": False,
    "opt_level": None,
    "cast_model_type": None,
    "patch_torch_functions": False,
    "patch_torch_functions_type": None,
    "keep_batchnorm_fp32": None,
    "master_weights": None,
    "loss_scale": 1.0,
    "cast_model_outputs": None,
}
# Options that hard_override forces on a level that rejects them.
_FORCED = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights")


class LiveOptions(MutableMapping):
    """A session's ``policy`` as a dict. Assignments change the policy, unchecked."""

    def __init__(self, session: AmpSession) -> None:
        self._session = session

    def __getitem__(self, name: str) -> Any:
        if name not in _BARE:
            raise KeyError(name)
        policy = self._session.policy
        return _BARE[name] if policy is None else getattr(policy, name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in _BARE:
            raise KeyError(name)
        if self._session.policy is None:
            raise AmpError(f"opt_properties.{name} was assigned before amp.initialize")
        self._session.policy = replace(self._session.policy, **{name: value})

    def __delitem__(self, name: str) -> None:
        raise AmpError(f"opt_properties.options: {name} cannot be deleted")

    def __iter__(self) -> Iterator[str]:
        return iter(_BARE)

    def __len__(self) -> int:
        return len(_BARE)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy is of the options, not of the session


class Properties:
    """Options by name, in the dict ``options`` and as attributes; those of ``_amp_state.opt_properties`` are the
    session's own.

    An attribute that is assigned is checked as an argument of ``initialize`` is, for the opt_level that is set. Other
    names than options make plain attributes.
    """

    __module__ = "apex.amp.frontend"

    options: MutableMapping[str, Any]

    def __init__(self) -> None:
        self.__dict__["options"] = dict(_BARE)

    def _update_options_dict(self, new_options: Iterable[tuple[str, Any]]) -> None:
        """Assigns several options, unchecked.

        Raises:
            AmpValueError: a name that is no option. Nothing has changed then.
        """
        pairs = dict(new_options)
        if unknown := sorted(pairs.keys() - self.options.keys()):
            raise AmpValueError(f"Tried to set unexpected option {unknown[0]}")
        for name, value in pairs.items():
            self.options[name] = value

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            self.__dict__[name] = value
            return
        if name not in ("enabled", "opt_level") and value is not None:
            try:
                value = getattr(resolve(self.options["opt_level"] or "O0", **{name: value}), name)
            except AmpError as error:
                if name not in _FORCED or not messages.hard_override:
                    raise
                messages.warn_or_err(str(error))
        self.options[name] = value


class _Level:
    """An opt level: called with a ``Properties`` it sets every option and returns it."""

    brief: str
    more: str
    _policy: PrecisionPolicy

    def __call__(self, properties: Properties) -> Properties:
        for name in _BARE:
            setattr(properties, name, getattr(self._policy, name))
        return properties


def _level(name: str, more: str) -> type[_Level]:
    brief = BRIEFS[name] + ("" if name == "O3" else "\n")
    return type(
        name, (_Level,), {"brief": brief, "more": more, "_policy": OPT_LEVELS[name], "__module__": "apex.amp.frontend"}
    )


O0 = _level("O0", "Weights, inputs and ops in fp32: amp changes nothing but the dtype of what is not fp32.")
O1 = _level("O1", "Weights stay fp32. Matrix products run in fp16, what needs range or precision in fp32.")
O2 = _level("O2", "The model runs in fp16 but for its batch norms; the optimizer steps fp32 copies of its weights.")
O3 = _level(
    "O3", "The model runs in fp16 as a whole and is stepped in fp16: a measure of speed more than a way to train."
)
O4 = _level("O4", "As O1, in bfloat16, which needs no loss scale.")
O5 = _level("O5", "As O2, in bfloat16, which needs no loss scale.")
