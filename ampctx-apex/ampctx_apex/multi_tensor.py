"""The form of apex's multi-tensor functions, told once: how they are called, and what each argument may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ampctx import spi
from ampctx.spi import Call, Number
from ampctx_apex.arguments import positional

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
    kinds = {**_KINDS, **kinds}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name_of = op or function.__name__

        def body(chunk_size: Any, noop_flag: Any, tensor_lists: Any, **given: Any) -> Any:
            call = Call(name_of, noop_flag, tensor_lists, lists.split(), optional)
            return function(call, **{n: kinds[n](call, n, v) if n in kinds else v for n, v in given.items()})

        served = positional(name_of, f"chunk_size noop_flag tensor_lists {arguments}", body)
        served.__doc__, served.__module__ = function.__doc__, function.__module__
        return served

    return decorate


def run_op(
    op: str, call: Call, lists: Mapping[str, Sequence[Tensor]], taken: Number, found_inf: Tensor, **arguments: Any
) -> None:
    """One op call for each combination of dtypes and layouts in ``lists``, which are named as the op names them.

    Args:
        taken: the number of steps before this one.
        found_inf: nothing happens where it is not 0.
        arguments: the op's others.
    """
    steps = call.tensor("step", taken).repeat(call.length).unbind()
    spi.run_op(op, lists, {"steps": steps}, {"found_inf": found_inf, **arguments})
