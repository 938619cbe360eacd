"""The opt levels O0 to O5 as data, and the arguments of ``initialize`` that override them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, TypedDict

import torch
from torch import nn

from ampctx._errors import AmpTypeError, AmpValueError

OptLevel = Literal["O0", "O1", "O2", "O3", "O4", "O5"]


class Options(TypedDict, total=False):
    """The options of ``initialize``, for type checkers. Levels may come from a command line: any str."""

    enabled: bool
    opt_level: OptLevel | str
    cast_model_type: torch.dtype | Literal[False] | None
    patch_torch_functions: bool | None
    keep_batchnorm_fp32: bool | Literal["True", "False"] | None
    master_weights: bool | Literal["True", "False"] | None
    loss_scale: float | str | None
    cast_model_outputs: torch.dtype | None
    num_losses: int
    verbosity: int
    min_loss_scale: float | None
    max_loss_scale: float | None
    patch_torch_functions_type: torch.dtype | None
    max_consecutive_skips: int | None
    process_group: Any
    keep_fp32: Any
    ops_fp32: Any
    history: int
    skip_nonfinite: bool
    init_scale: float | None
    growth_interval: int | None


@dataclass(frozen=True)
class PrecisionPolicy:
    """The options of one ``initialize`` call, named after its arguments. Frozen. None: the option does not apply.

    Attributes:
        enabled: False if amp does nothing.
        opt_level: "O0" to "O5".
        cast_model_type: dtype of the model's weights and inputs. False or None casts nothing.
        patch_torch_functions: whether autocast casts each op (O1, O4), to ``patch_torch_functions_type``.
        keep_batchnorm_fp32: whether BatchNorm stays in fp32 when the model is cast.
        master_weights: whether the optimizer steps fp32 copies of 16-bit weights.
        loss_scale: "dynamic" or a number.
        cast_model_outputs: dtype of the model's floating outputs.
        keep_fp32: modules that compute in fp32.
        ops_fp32: functions that do.
    """

    enabled: bool
    opt_level: str
    cast_model_type: torch.dtype | bool | None
    patch_torch_functions: bool
    patch_torch_functions_type: torch.dtype | None
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | Literal["dynamic"]
    cast_model_outputs: torch.dtype | None = None
    # As passed. The policy of a session holds their names.
    keep_fp32: tuple[Any, ...] = ()
    ops_fp32: tuple[Any, ...] = ()

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype of the model's weights and inputs, None if they are not cast."""
        return self.cast_model_type if isinstance(self.cast_model_type, torch.dtype) else None

    @property
    def output_dtype(self) -> torch.dtype | None:
        """The dtype of the model's floating outputs. None leaves them."""
        return self.cast_model_outputs or (None if self.input_dtype is None else torch.float32)

    @property
    def keeps_masters(self) -> bool:
        """Whether amp keeps fp32 masters."""
        return bool(self.master_weights)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The 16-bit dtype that autocast casts each op to. None without autocast."""
        return self.patch_torch_functions_type if self.patch_torch_functions else None


OPT_LEVELS: Mapping[str, PrecisionPolicy] = MappingProxyType(
    {
        "O0": PrecisionPolicy(True, "O0", torch.float32, False, None, None, False, 1.0),
        "O1": PrecisionPolicy(True, "O1", None, True, torch.float16, None, None, "dynamic"),
        "O2": PrecisionPolicy(True, "O2", torch.float16, False, None, True, True, "dynamic"),
        "O3": PrecisionPolicy(True, "O3", torch.float16, False, None, False, False, 1.0),
        "O4": PrecisionPolicy(True, "O4", None, True, torch.bfloat16, None, None, 1.0),
        "O5": PrecisionPolicy(True, "O5", torch.bfloat16, False, None, True, True, 1.0),
    }
)


def resolve(opt_level: str = "O1", **overrides: Any) -> PrecisionPolicy:
    """Applies arguments of ``initialize`` to the policy of an opt level. None overrides nothing. AmpValueError and
    AmpTypeError for what the level or the option does not accept."""
    if not isinstance(opt_level, str) or opt_level not in OPT_LEVELS:
        raise AmpValueError(
            f"Unexpected optimization level {opt_level!r}. Expected one of {', '.join(map(repr, OPT_LEVELS))}: the "
            "letter O and a digit, not the number zero and a digit."
        )
    level = OPT_LEVELS[opt_level]
    if unknown := sorted(overrides.keys() - _CHECKS.keys()):
        raise AmpTypeError(f"unknown option {unknown[0]!r}. Options are {', '.join(_CHECKS)}.")
    return replace(level, **{k: _CHECKS[k](level, k, value) for k, value in overrides.items() if value is not None})


def summary(policy: PrecisionPolicy, scales: Iterable[Any]) -> str:
    """Level, dtype, masters and loss scales in one line."""
    if not policy.enabled:
        return "enabled=False"
    model, ops = (str(dtype).removeprefix("torch.") for dtype in (policy.input_dtype, policy.autocast_dtype))
    casts = f"{ops} autocast" if policy.autocast_dtype else f"{model} model" if policy.input_dtype else "no casts"
    kept = "fp32" if policy.master_weights else "no"
    masters = "" if policy.input_dtype in (None, torch.float32) else f", {kept} masters"
    dynamic = "dynamic " if policy.loss_scale == "dynamic" else ""
    return f"{policy.opt_level}: {casts}{masters}, {dynamic}loss scale {' and '.join(map(str, scales))}"


# Of an option: (the level's defaults, name, value) -> value.
Check = Callable[[PrecisionPolicy, str, Any], Any]


def _bool(level: PrecisionPolicy, name: str, value: Any) -> bool:
    if isinstance(value, str) and value in ("True", "False"):
        return value == "True"
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise AmpValueError(f"{name} is {value!r}, expected True, False, the string 'True' or 'False', or None.")


def _of_cast_models(level: PrecisionPolicy, name: str, value: Any) -> bool:
    if name == "master_weights" and isinstance(value, str) and value == "split":
        raise AmpValueError(
            "amp.initialize: master_weights='split' is an option of optimizers. Pass opt_level='O5', "
            "master_weights=False, and ampctx.optimizers.FusedAdam(params, master_weights='split'); for a class of "
            "torch ampctx.optimizers.SplitMasters(torch.optim.AdamW, params)."
        )
    result = _bool(level, name, value)
    if level.patch_torch_functions:
        raise AmpValueError(
            f"{name}={value!r} has no meaning at {level.opt_level}, where weights stay fp32 and autocast casts each "
            f"op. Leave it at None, or use {'O2' if level.opt_level == 'O1' else 'O5'}."
        )
    return result


def _patch(level: PrecisionPolicy, name: str, value: Any) -> bool:
    if (value := _bool(level, name, value)) and not level.patch_torch_functions:
        raise AmpValueError(f"{name}=True is for opt_level O1 and O4, and this is {level.opt_level}. Use O1 or O4.")
    return value


def _patch_type(level: PrecisionPolicy, name: str, value: Any) -> torch.dtype:
    if value != level.patch_torch_functions_type:
        expected = "float16 at O1, bfloat16 at O4, None elsewhere"
        raise AmpValueError(f"{name} is {value!r}, expected {expected}. This is {level.opt_level}.")
    return value


def _floating_dtype(level: PrecisionPolicy, name: str, value: Any) -> torch.dtype:
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise AmpTypeError(f"{name} is {value!r}, expected a floating torch.dtype such as torch.float16, or None.")
    return value


def _cast_model_type(level: PrecisionPolicy, name: str, value: Any) -> torch.dtype | bool:
    if value is False:
        return False
    if level.patch_torch_functions and value is not torch.float32:
        raise AmpValueError(
            f"{name} is {value!r}, and at {level.opt_level} weights stay fp32: autocast casts each op. Use O2, O3, O5."
        )
    return _floating_dtype(level, name, value)


def _several(accepts: Callable[[Any], bool], expected: str) -> Check:
    def check(level: PrecisionPolicy, name: str, value: Any) -> tuple[Any, ...]:
        # Check for a single entry first: a Sequential is iterable.
        if not accepts(value) and not isinstance(value, Iterable):
            raise AmpTypeError(f"{name} is {value!r}, expected {expected}, or several in a list, tuple or set.")
        entries = (value,) if accepts(value) else tuple(value)
        if wrong := [entry for entry in entries if not accepts(entry)]:
            raise AmpTypeError(f"{name} has {wrong[0]!r} in it, expected {expected}.")
        return entries

    return check


def _is_module_or_class(entry: Any) -> bool:
    return isinstance(entry, nn.Module) or (isinstance(entry, type) and issubclass(entry, nn.Module))


def _loss_scale(level: PrecisionPolicy, name: str, value: Any) -> float | Literal["dynamic"]:
    if isinstance(value, str) and value == "dynamic":
        return "dynamic"
    problem = f"{name} is {value!r}, expected 'dynamic' or a finite number above 0"
    if isinstance(value, bool):
        raise AmpTypeError(problem)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # the last for a tensor of several elements
        raise (AmpValueError if isinstance(value, str) else AmpTypeError)(problem) from error
    if not 0 < number < math.inf:
        raise AmpValueError(problem)
    return number


modules_or_classes = _several(_is_module_or_class, "a module class or a module")
_CHECKS: Mapping[str, Check] = {
    "enabled": _bool,
    "cast_model_type": _cast_model_type,
    "patch_torch_functions": _patch,
    "patch_torch_functions_type": _patch_type,
    "keep_batchnorm_fp32": _of_cast_models,
    "master_weights": _of_cast_models,
    "loss_scale": _loss_scale,
    "cast_model_outputs": _floating_dtype,
    "keep_fp32": _several(
        lambda entry: isinstance(entry, str) or _is_module_or_class(entry),
        "a pattern of module names, a module class or a module",
    ),
    "ops_fp32": _several(
        lambda entry: isinstance(entry, str) or (callable(entry) and not isinstance(entry, (type, nn.Module))),
        "the name of a torch function, or such a function",
    ),
}
# The arguments of ``initialize`` that override a level.
OVERRIDES = _CHECKS.keys() - {"enabled"}
