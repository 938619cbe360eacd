"""The form of apex's multi-tensor functions, told once: how they are called, and what each argument may be."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx import spi
from ampctx.spi import Call, Number

Kind = Callable[[Call, str, Any], Any]


def _kinds(kind: Kind, names: str) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


def _one_of(*allowed: int) -> Kind:
    return lambda call, name, value: call.one_of(name, value, allowed)


# What becomes of an argument, by its name. The host reads none of factors and tensors, and the other tensors.
_KINDS: dict[str, Kind] = {
    **_kinds(Call.number, "beta1 beta2 eps wd weight_decay decay momentum dampening trust_coefficient"),
    **_kinds(Call.factor, "lr scale"),
    **_kinds(Call.tensor, "step inv_scale global_grad_norm max_grad_norm max_global_grad_norm"),
    **_kinds(Call.vector, "grad_norms param_norms per_tensor_decay per_tensor_param_norm per_tensor_update_norm"),
    **_kinds(
        lambda call, name, value: bool(value),
        "bias_correction grad_averaging nesterov first_run wd_after_momentum use_nvlamb is_skipped per_tensor",
    ),
    **_kinds(_one_of(0, 1), "mode moment_mode"),
    **_kinds(_one_of(0, 2), "norm_type"),
}


def multi_tensor(
    lists: str, arguments: str, optional: int = 0, op: str = "", **kinds: Kind
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes ``function(call, name=value, ...)`` a function of ``(chunk_size, noop_flag, tensor_lists, *arguments)``.

    Args:
        lists: the names of the lists, in their order. The caller may omit the last ``optional``.
        arguments: the names of the others, some with a number as default: ``"lr mode=1"``.
        op: the name of the function; that of the decorated one without it.
        kinds: what becomes of some arguments, in place of ``_KINDS``.
    """
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    parts = [part.partition("=") for part in arguments.split()]
    given = [inspect.Parameter(name, kind, default=int(value) if value else empty) for name, _, value in parts]
    first = [inspect.Parameter(name, kind) for name in ("chunk_size", "noop_flag", "tensor_lists")]
    signature, kinds = inspect.Signature([*first, *given]), {**_KINDS, **kinds}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name_of = op or function.__name__

        @torch.no_grad()
        @functools.wraps(function)
        def served(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name_of}: {error}") from None
            bound.apply_defaults()
            _, noop_flag, tensor_lists = (bound.arguments.pop(parameter.name) for parameter in first)
            call = Call(name_of, noop_flag, tensor_lists, lists.split(), optional)
            named = {
                name: kinds[name](call, name, value) if name in kinds else value
                for name, value in bound.arguments.items()
            }
            return function(call, **named)

        vars(served)["__signature__"] = signature
        served.__name__ = served.__qualname__ = name_of
        return served

    return decorate


def run_op(
    op: str, call: Call, lists: Mapping[str, Sequence[Tensor]], taken: Number, found_inf: Tensor, **arguments: Any
) -> None:
    """One op call for each combination of dtypes and layouts in ``lists``, which are named as the op names them.

    Args:
        taken: the number of steps before this one.
        found_inf: nothing happens where it is not 0.
        arguments: the op's others, and ``exp_avg_sqs`` of NovoGrad.
    """
    along = {name: arguments.pop(name) for name in ("exp_avg_sqs",) if name in arguments}
    steps = call.tensor("step", taken).repeat(call.length).unbind()
    spi.run_op(op, lists, {"steps": steps, **along}, {"found_inf": found_inf, **arguments})
