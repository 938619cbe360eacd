"""Defines the ops of ``torch.ops.ampctx``: schema, fallback without compiled kernels, and fake kernel of each.

``ampctx.kernels.ops`` has the calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx.kernels import reference, step_checks
from ampctx.kernels.extension import Extension
from ampctx.kernels.spec import SPECS

NAMESPACE = "ampctx"

_RULE = (
    "float growth_factor, float backoff_factor, int growth_interval, int hysteresis, float min_scale, float max_scale"
)
SCHEMAS = (
    "multi_tensor_scale(Tensor[] src, Tensor(a!)[] dst, Tensor(b!) found_inf, Tensor scale) -> ()",
    "multi_tensor_scale_and_update(Tensor[] src, Tensor(a!)[] dst, Tensor(b!) found_inf, Tensor scale,"
    f" Tensor(c!) loss_scale, Tensor(d!) growth_tracker, Tensor(e!) hysteresis_tracker, {_RULE}) -> ()",
    "multi_tensor_scale_clipped(Tensor[] src, Tensor(a!)[] dst, Tensor(b!) found_inf, Tensor scale, Tensor grad_norm,"
    " float max_norm) -> ()",
    "multi_tensor_axpby(Tensor[] x, Tensor[] y, Tensor(a!)[] out, Tensor(b!) found_inf, Tensor a, Tensor b,"
    " int arg_to_check) -> ()",
    "multi_tensor_l2norm(Tensor[] tensors, Tensor(a!) found_inf, bool per_tensor) -> (Tensor, Tensor)",
    "multi_tensor_unscale_l2norm(Tensor[] tensors, Tensor(a!) found_inf, Tensor inv_scale, bool per_tensor)"
    " -> (Tensor, Tensor)",
    "multi_tensor_unscale_l2norm_and_update(Tensor[] tensors, Tensor(a!) found_inf, Tensor inv_scale, bool per_tensor,"
    f" Tensor(b!) loss_scale, Tensor(c!) growth_tracker, Tensor(d!) hysteresis_tracker, {_RULE})"
    " -> (Tensor, Tensor, Tensor)",
    "update_scale(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor(c!) hysteresis_tracker, Tensor found_inf,"
    f" {_RULE}) -> ()",
    "block_factors(Tensor scale) -> (Tensor, Tensor, Tensor)",
    "count_skip(Tensor(a!) counts, Tensor found_inf, Tensor flag, Tensor scale, int slot, bool is_first) -> ()",
    *(schema for spec in SPECS.values() for schema in spec.schemas),
)

_TENSOR_LIST = re.compile(r"Tensor(\(\w!\))?\[\]")


def _handle_overload(schema: str) -> str:
    """The overload of an op that takes tensor-list handles (numbers) instead of lists."""
    return re.sub(_TENSOR_LIST, "int", schema.replace("(", ".held(", 1))


# These have no fallback: only compiled kernels use handles.
_COMPILED_SCHEMAS = (
    "hold_tensors(Tensor[] tensors, int number=0) -> int",
    *map(_handle_overload, filter(_TENSOR_LIST.search, SCHEMAS)),
)


# --- fallbacks: the reference behind the kernels' own checks ----------------------------------------------------------


def _check(op, found_inf, lists, **factors):
    reference.check_lists(op, lists)
    reference.check_scalars(op, found_inf, lists, **factors)


def _scale_checked(src, dst, found_inf, scale):
    _check("multi_tensor_scale", found_inf, {"src": src, "dst": dst}, scale=scale)
    reference.multi_tensor_scale(src, dst, found_inf, scale)


def _scale_clipped_checked(src, dst, found_inf, scale, grad_norm, max_norm):
    op = "multi_tensor_scale_clipped"
    _check(op, found_inf, {"src": src, "dst": dst}, scale=scale, grad_norm=grad_norm)
    reference.multi_tensor_scale(src, dst, found_inf, reference.clipped(scale, grad_norm, max_norm))


def _axpby_checked(x, y, out, found_inf, a, b, arg_to_check):
    _check("multi_tensor_axpby", found_inf, {"x": x, "y": y, "out": out}, a=a, b=b)
    if arg_to_check not in (-1, 0, 1):
        raise RuntimeError(f"multi_tensor_axpby: arg_to_check is {arg_to_check}, expected -1, 0 or 1")
    reference.multi_tensor_axpby(x, y, out, found_inf, a, b, arg_to_check)


def _l2norm_checked(tensors, found_inf, per_tensor):
    _check("multi_tensor_l2norm", found_inf, {"tensors": tensors})
    return reference.multi_tensor_l2norm(tensors, found_inf, per_tensor)


def _unscale_l2norm_checked(tensors, found_inf, inv_scale, per_tensor):
    _check("multi_tensor_unscale_l2norm", found_inf, {"tensors": tensors}, inv_scale=inv_scale)
    return reference.multi_tensor_unscale_l2norm(tensors, found_inf, inv_scale, per_tensor)


def _check_update(op, found_inf, lists, loss_scale, growth_tracker, hysteresis_tracker, *rule):
    first_name, first = next(iter(lists.items()))
    state = {"loss_scale": loss_scale, "growth_tracker": growth_tracker, "hysteresis_tracker": hysteresis_tracker}
    reference.check_scale_state(op, state, f"{first_name}[0]" if first else "found_inf", found_inf.device)
    reference.check_scale_rule(op, *rule)


def _scale_and_update_checked(src, dst, found_inf, scale, *update):
    op, lists = "multi_tensor_scale_and_update", {"src": src, "dst": dst}
    _check(op, found_inf, lists, scale=scale)
    _check_update(op, found_inf, lists, *update)
    reference.multi_tensor_scale(src, dst, found_inf, scale)
    reference.update_scale(*update[:3], found_inf, *update[3:])


def _unscale_l2norm_and_update_checked(tensors, found_inf, inv_scale, per_tensor, *update):
    op, lists = "multi_tensor_unscale_l2norm_and_update", {"tensors": tensors}
    _check(op, found_inf, lists, inv_scale=inv_scale)
    _check_update(op, found_inf, lists, *update)
    norm, each = reference.multi_tensor_unscale_l2norm(tensors, found_inf, inv_scale, per_tensor)
    reference.update_scale(*update[:3], found_inf, *update[3:])
    return norm, each, norm.clone()


def _update_scale_checked(scale, growth_tracker, hysteresis_tracker, found_inf, *rule):
    op = "update_scale"
    device = torch.device("cpu") if scale is None else scale.device
    reference.check_flag(op, found_inf, "scale", device)
    state = {"scale": scale, "growth_tracker": growth_tracker, "hysteresis_tracker": hysteresis_tracker}
    reference.check_scale_state(op, state, "scale", device)
    reference.check_scale_rule(op, *rule)
    reference.update_scale(scale, growth_tracker, hysteresis_tracker, found_inf, *rule)


def _block_factors_checked(scale):
    reference.require_one_element(scale, "block_factors: scale", (torch.float32,))
    return reference.block_factors(scale)


def _count_skip_checked(counts, found_inf, flag, scale, slot, is_first):
    op = "count_skip"
    if counts is None:
        raise RuntimeError(f"{op}: counts is None, expected a tensor")
    if counts.dtype != torch.float32:
        raise RuntimeError(f"{op}: counts has dtype {counts.dtype}, expected float32")
    if not 0 <= slot < counts.numel() // 2 - 1:
        raise RuntimeError(f"{op}: slot is {slot}, counts has {counts.numel()} elements")
    if not counts.is_contiguous():
        raise RuntimeError(f"{op}: counts is not contiguous")
    for given in (found_inf, flag):
        reference.check_flag(op, given, "counts", counts.device)
    reference.require_one_element(scale, f"{op}: scale", (torch.float32,))
    if scale.device != counts.device:
        raise RuntimeError(f"{op}: scale is on {scale.device}, counts is on {counts.device}")
    reference.count_skip(reference.skip_counts(counts, slot), found_inf, flag, scale, is_first)


FALLBACKS = {
    "multi_tensor_scale": _scale_checked,
    "multi_tensor_scale_and_update": _scale_and_update_checked,
    "multi_tensor_scale_clipped": _scale_clipped_checked,
    "multi_tensor_axpby": _axpby_checked,
    "multi_tensor_l2norm": _l2norm_checked,
    "multi_tensor_unscale_l2norm": _unscale_l2norm_checked,
    "multi_tensor_unscale_l2norm_and_update": _unscale_l2norm_and_update_checked,
    "update_scale": _update_scale_checked,
    "block_factors": _block_factors_checked,
    "count_skip": _count_skip_checked,
    **step_checks.FALLBACKS,
}


# --- fake kernels: shapes only, for torch.compile and FakeTensorMode -------------------------------------------------


def _check_fake(tensors: Sequence[Tensor], scalars: Sequence[Tensor] = ()) -> None:
    """Refuses mixed devices. Calls with a meta tensor come here too, and must not silently do nothing.

    ``scalars`` may be on the CPU.
    """
    devices = {t.device for t in tensors}
    if len(devices) > 1 or any(t.device.type != "cpu" and t.device not in devices for t in scalars if devices):
        found = sorted({str(t.device) for t in (*tensors, *scalars)})
        raise RuntimeError(f"{NAMESPACE}: an op takes tensors of one device, and got {' and '.join(found)}")


def _fake_nothing(*args):
    _check_fake(
        [t for arg in args if isinstance(arg, (list, tuple)) for t in arg],
        [arg for arg in args if isinstance(arg, Tensor)],
    )


def _fake_update_scale(scale, growth_tracker, hysteresis_tracker, found_inf, *rule):
    _check_fake([scale, growth_tracker, hysteresis_tracker, found_inf])


def _fake_block_factors(scale):
    return tuple(scale.new_empty(()) for _ in range(3))


def _fake_norms(tensors, found_inf, *args):
    _check_fake(tensors, [found_inf, *(arg for arg in args if isinstance(arg, Tensor))])
    per_tensor = next(arg for arg in args if isinstance(arg, bool))
    like = tensors[0] if tensors else found_inf
    dtype = reference.compute_dtype(*tensors)
    n = len(tensors) if per_tensor else 0
    return like.new_empty((), dtype=dtype), like.new_empty(n, dtype=dtype)


def _fake_norms_and_update(*args):
    norm, each = _fake_norms(*args)
    return norm, each, torch.empty_like(norm)


FAKES: dict[str, Callable[..., Any]] = {
    "multi_tensor_scale": _fake_nothing,
    "multi_tensor_scale_and_update": _fake_nothing,
    "multi_tensor_scale_clipped": _fake_nothing,
    "multi_tensor_axpby": _fake_nothing,
    "multi_tensor_l2norm": _fake_norms,
    "multi_tensor_unscale_l2norm": _fake_norms,
    "multi_tensor_unscale_l2norm_and_update": _fake_norms_and_update,
    "update_scale": _fake_update_scale,
    "block_factors": _fake_block_factors,
    "count_skip": lambda counts, *others: _check_fake([counts, *(t for t in others if isinstance(t, Tensor))]),
    **dict.fromkeys(step_checks.FALLBACKS, _fake_nothing),
}


def _routed(name: str, found: Callable[[], Extension]) -> Callable[..., Any]:
    """Calls the kernel that ``found()`` has for the arguments, or else the fallback."""
    fallback: Any = FALLBACKS[name]

    def route(*args: Any) -> Any:
        return (found().kernel_for(name, args) or fallback)(*args)

    return route


def define(namespace: str, found: Callable[[], Extension] | None = None) -> torch.library.Library:
    """Defines every op in ``namespace`` with its fallback and fake kernel, for as long as the returned object lives.

    ``found()`` gives the kernels that fallbacks hand calls on to.
    """
    library = torch.library.Library(namespace, "DEF")
    for schema in SCHEMAS:
        name = schema.partition("(")[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, _routed(name, found) if found else FALLBACKS[name], "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{name}", FAKES[name], lib=library)
    for schema in _COMPILED_SCHEMAS:
        library.define(schema)
    return library
