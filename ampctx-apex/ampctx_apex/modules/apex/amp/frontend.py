"""apex.amp.frontend: ``initialize`` and its options, ``Properties`` and the levels that set them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

from ampctx import AmpError, AmpSession, AmpValueError, amp
from ampctx.amp import OPT_LEVELS, PrecisionPolicy
from ampctx.spi import is_rank_zero, names_arguments, resolve, session

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
# apex's lines, byte for byte: log scrapers match them, two spaces included.
_BRIEFS = {
    "O0": "O0:  Pure FP32 training.",
    "O1": "O1:  Insert automatic casts around Pytorch functions and Tensor methods.",
    "O2": "O2:  FP16 training with FP32 batchnorm and FP32 master weights.",
    "O3": "O3:  Pure FP16 training.",
    "O4": "O4:  Insert automatic casts around Pytorch functions and Tensor methods.",
    "O5": "O5:  BFLOAT16 training with FP32 batchnorm and FP32 master weights.",
}


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

    options: MutableMapping[str, Any]

    def __init__(self, options: MutableMapping[str, Any] | None = None) -> None:
        self.__dict__["options"] = dict(_BARE) if options is None else options

    def _update_options_dict(self, new_options: Iterable[tuple[str, Any]]) -> None:
        """Assigns several options, unchecked. AmpValueError for a name that is no option, before anything changes."""
        pairs = dict(new_options)
        if unknown := sorted(pairs.keys() - self.options.keys()):
            raise AmpValueError(f"Tried to set unexpected option {unknown[0]}")
        self.options.update(pairs)

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
            value = getattr(resolve(self.options["opt_level"] or "O0", **{name: value}), name)
        self.options[name] = value


class _Level:
    """An opt level: called with a ``Properties`` it sets every option and returns it."""

    brief: str
    _policy: PrecisionPolicy

    def __call__(self, properties: Properties) -> Properties:
        for name in _BARE:
            setattr(properties, name, getattr(self._policy, name))
        return properties


def _level(name: str) -> type[_Level]:
    brief = _BRIEFS[name] + ("" if name == "O3" else "\n")
    return type(name, (_Level,), {"brief": brief, "_policy": OPT_LEVELS[name], "__module__": __name__})


O0, O1, O2, O3, O4, O5 = map(_level, ("O0", "O1", "O2", "O3", "O4", "O5"))


@names_arguments
@functools.wraps(amp.initialize)
def initialize(*args: Any, **options: Any) -> Any:
    call = inspect.signature(amp.initialize).bind(*args, **options)
    verbosity = call.arguments.get("verbosity", 1)
    call.arguments["verbosity"] = 2 if verbosity == 1 else verbosity  # without ampctx's own line
    found = amp.initialize(*call.args, **call.kwargs)
    session.verbosity = verbosity
    if verbosity > 0 and is_rank_zero() and (policy := session.policy) is not None and policy.enabled:
        level = policy.opt_level
        print(f"Selected optimization level {_level(level).brief}")
        print("Defaults for this optimization level are:")
        _print_options(OPT_LEVELS[level])
        print("Processing user overrides (additional kwargs that are not None)...")
        print("After processing overrides, optimization options are:")
        _print_options(policy)
    return found


def _print_options(policy: PrecisionPolicy) -> None:
    # apex prints no cast_model_outputs line. Only its ROCm branch, where O4 comes from, prints the type line.
    left_out = {"cast_model_outputs", *(() if policy.opt_level == "O4" else ("patch_torch_functions_type",))}
    print(*(f"{name:22} : {getattr(policy, name)}" for name in _BARE if name not in left_out), sep="\n")


opt_levels = {"O3": O3(), "O2": O2(), "O1": O1(), "O0": O0(), "O4": O4(), "O5": O5()}

__all__ = ["O0", "O1", "O2", "O3", "O4", "O5", "Properties", "opt_levels"]
