"""Defines the ops of ``torch.ops.ampctx``: schema, fallback without compiled kernels, and fake kernel of each.

``ampctx.kernels.ops`` has the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx.kernels import reference
from ampctx.kernels.extension import Extension
from ampctx.kernels.fallbacks import fallback
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

FALLBACKS = {schema.partition("(")[0]: fallback(schema) for schema in SCHEMAS}


# --- fake kernels: shapes only, for torch.compile and FakeTensorMode -------------------------------------------------


def _check_fake(tensors: Sequence[Tensor], scalars: Sequence[Tensor] = ()) -> None:
    """Refuses mixed devices; ``scalars`` may be on the CPU. Calls with a meta tensor come here, too."""
    devices = {t.device for t in tensors}
    if len(devices) > 1 or any(t.device.type != "cpu" and t.device not in devices for t in scalars if devices):
        found = sorted({str(t.device) for t in (*tensors, *scalars)})
        raise RuntimeError(f"{NAMESPACE}: an op takes tensors of one device, and got {' and '.join(found)}")


def _fake_nothing(*args):
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    scalars = [arg for arg in args if isinstance(arg, Tensor)]
    _check_fake([t for tensors in lists for t in tensors], scalars) if lists else _check_fake(scalars)


def _fake_norms(tensors, found_inf, *args):
    _check_fake(tensors, [found_inf, *(arg for arg in args if isinstance(arg, Tensor))])
    per_tensor = next(arg for arg in args if isinstance(arg, bool))
    like = tensors[0] if tensors else found_inf
    dtype = reference.compute_dtype(*tensors)
    n = len(tensors) if per_tensor else 0
    again = [()] if len(args) > 2 else []  # with an update, the total a second time
    return tuple(like.new_empty(size, dtype=dtype) for size in ((), n, *again))


FAKES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(FALLBACKS, _fake_nothing),
    **{name: _fake_norms for name in FALLBACKS if "l2norm" in name},
    "block_factors": lambda scale: tuple(scale.new_empty(()) for _ in range(3)),
}


def _routed(name: str, found: Callable[[], Extension]) -> Callable[..., Any]:
    """Calls the kernel that ``found()`` has for the arguments, or else the fallback."""
    fallback: Any = FALLBACKS[name]

    def route(*args: Any) -> Any:
        return (found().kernel_for(name, args) or fallback)(*args)

    return route


def define(namespace: str, found: Callable[[], Extension] | None = None) -> torch.library.Library:
    """Defines every op in ``namespace`` with its fallback and fake kernel, for as long as the returned object lives.
    ``found()`` gives the kernels that fallbacks hand calls on to."""
    library = torch.library.Library(namespace, "DEF")
    for schema in SCHEMAS:
        name = schema.partition("(")[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, _routed(name, found) if found else FALLBACKS[name], "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{name}", FAKES[name], lib=library)
    # Hands tensors to the readers of csrc/tensors.h. Autograd has no part in it.
    library.define("read(Tensor[] tensors) -> ()")
    library.impl("read", torch.library.fallthrough_kernel, "Autograd")
    return library
