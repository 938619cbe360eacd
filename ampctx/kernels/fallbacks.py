"""The fallback of each op, where no kernel is compiled: checks the arguments, then runs the plain-torch reference.

It refuses the calls that the kernels refuse (csrc/check.h, csrc/library.cpp), in words of its own, before
anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx.kernels import codes, reference
from ampctx.kernels.reference import KERNEL_DTYPES, has_memory, same_layout
from ampctx.kernels.reference_steps import COPY, KAHAN, LOW_PRECISION, SPLIT, WRITE_BACKS, run
from ampctx.kernels.spec import SPECS, OpSpec

_STEPS = {op: (spec, op == spec.unscaling_op) for spec in SPECS.values() for op in spec.ops}
_F32, _I32, _CPU = (torch.float32,), (torch.int32,), torch.device("cpu")
_FLAG, _ON_CPU = (torch.float32, torch.int32), (torch.float32, torch.float64)
# Single tensors with a fixed dtype. All others are factors, which may be on the CPU.
_STATE = {"found_inf": _FLAG, "flag": _FLAG, "loss_scale": _F32, "growth_tracker": _I32, "hysteresis_tracker": _I32}
_FP32, _INT32 = torch.finfo(torch.float32), torch.iinfo(torch.int32)
# A rule that makes the loss scale 0, inf or nan, or overflows a tracker, is refused.
_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "growth_factor": ("a finite number of at least 1", lambda x: 1 <= x < float("inf")),
    "backoff_factor": ("a number above 0 and at most 1", lambda x: 0 < x <= 1),
    "min_scale": ("a number from 0 to the largest fp32", lambda x: 0 <= x <= _FP32.max),
    "max_scale": ("a number from the smallest normal fp32 up", lambda x: x >= _FP32.tiny),
    "hysteresis": ("an int from 0 to the largest int32", lambda x: 0 <= x <= _INT32.max),
    "arg_to_check": ("-1, 0 or 1", lambda x: x in (-1, 0, 1)),
    "write_back": (f"0 to {len(WRITE_BACKS) - 1}", lambda x: 0 <= x < len(WRITE_BACKS)),
}


def _check(
    where: str,
    t: Tensor | None,
    dtypes: Sequence[torch.dtype],
    device: torch.device | None,
    numel: int | None = 1,
    like: Tensor | None = None,
) -> None:
    """Raises RuntimeError if a tensor does not fit. ``like``: it needs the layout of this one; None: contiguous."""
    if t is None:  # torch passes None as an undefined tensor
        problem = "is None, expected a tensor"
    elif t.layout != torch.strided:
        problem = "is not a strided tensor"
    elif t.dtype not in dtypes:
        *most, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        problem = f"has dtype {t.dtype}, expected {', '.join(most)}{' or ' if most else ''}{last}"
    elif t.device != device:
        problem = f"is on {t.device}, expected {device}"
    elif numel is not None and t.numel() != numel:
        problem = f"has {t.numel()} elements, expected {numel}"
    elif t.numel() == 0:
        return
    elif not (t.is_contiguous() if like is None else same_layout(t, like)):
        problem = "is not contiguous" if like is None else "is not dense, or not laid out as the first list"
    elif not has_memory(t):
        problem = "has no memory: its storage has been freed or made smaller"
    else:
        return
    raise RuntimeError(f"{where} {problem}")


def _check_list(
    op: str,
    name: str,
    tensors: Sequence[Tensor],
    first: Sequence[Tensor],
    dtypes: Sequence[torch.dtype] = KERNEL_DTYPES,
    numel: Callable[[Tensor], int] | None = None,
) -> None:
    """Checks a list that goes along with the first, in size and layout too. ``numel``: in another size."""
    if len(tensors) != len(first):
        raise RuntimeError(f"{op}: {name} has {len(tensors)} tensors, expected {len(first)}")
    for i, (t, like) in enumerate(zip(tensors, first, strict=True)):
        where = f"{op}: {name}[{i}]"
        _check(where, t, dtypes, first[0].device, (numel or Tensor.numel)(like), None if numel else like)
        if t.dtype != tensors[0].dtype:
            raise RuntimeError(f"{where} has dtype {t.dtype}, {name}[0] has {tensors[0].dtype}")


def _check_step(op: str, spec: OpSpec, given: Mapping[str, Any], device: torch.device | None) -> None:
    """Checks the lists of a step, and what its write back and the forms of its state need."""
    grads, mode = given["grads"], given.get("write_back", 0)
    weights = {SPLIT: (torch.bfloat16,), KAHAN: LOW_PRECISION}.get(mode, KERNEL_DTYPES)
    alike = {"grads": KERNEL_DTYPES, "params": weights}
    for state in spec.sized:
        if given[state.name] or not state.if_set:
            alike[state.name] = (*KERNEL_DTYPES, *((codes.DTYPES[state.code],) if state.code else ()))
    if mode in (COPY, SPLIT, KAHAN):
        of_params = tuple({p.dtype for p in given["params"]})
        alike["extras"] = {SPLIT: (torch.int16,), KAHAN: of_params}.get(mode, KERNEL_DTYPES)
    elif given["extras"]:
        raise RuntimeError(f"{op}: extras has {len(given['extras'])} tensors, expected none for this write_back")
    for name, dtypes in alike.items():
        _check_list(op, name, given[name], grads, dtypes)
    for state in spec.one_element:
        _check_list(op, state.name, given[state.name], grads, _F32, lambda grad: 1)
    if len(given["skips"]) not in (0, 5):
        raise RuntimeError(f"{op}: skips has {len(given['skips'])} tensors, expected none or 5")
    for i, t in enumerate(given["skips"]):
        _check(f"{op}: skips[{i}]", t, _F32, device)
    is_rounded = "stochastic_state" if given["stochastic_state"] else ""
    for state in spec.coded:
        scales = given[state.scales]
        if given[state.name] and given[state.name][0].dtype == codes.DTYPES[state.code]:
            _check_list(op, state.scales, scales, grads, _F32, lambda grad: codes.blocks_of(grad.numel()))
            is_rounded = f"{state.name} in codes"
        elif scales:
            raise RuntimeError(f"{op}: {state.scales} has {len(scales)} tensors, expected none without codes")
    if is_rounded:
        if torch.float64 in {given[name][0].dtype for name in alike if given[name]}:
            raise RuntimeError(f"{op}: {is_rounded} does not go with float64 tensors")
        if any(given[state.name] for state in spec.sized if not state.code):
            raise RuntimeError(f"{op}: {is_rounded} does not go with state that must not be rounded down")
    numbers, expected = given["numbers"], sum(grad.numel() > 0 for grad in grads)
    if numbers is None or numbers.numel() or numbers.dtype != torch.int64:
        _check(f"{op}: numbers", numbers, (torch.int64,), device, expected)
    table, rows, width = given["table"], given["rows"], len(spec.columns)
    _check(f"{op}: table", table, (torch.float64,), _CPU, None)
    _check(f"{op}: rows", rows, (torch.int64,), _CPU, len(grads) if table.numel() else 0)
    if table.numel() % width or (rows.numel() and not 0 <= rows.min() <= rows.max() < table.numel() // width):
        raise RuntimeError(f"{op}: rows or table do not fit: expected numbers of rows, and rows of {width}")


def fallback(schema: str) -> Callable[..., Any]:
    """The fallback of the op with this schema."""
    op, _, rest = schema.partition(" -> ")[0].rstrip(")").partition("(")
    kinds = {name: kind for kind, name in map(str.split, rest.split(", "))}
    lists = [name for name, kind in kinds.items() if kind.endswith("[]")]
    checked_before = (*lists, "numbers", "table", "rows")
    tensors = [name for name, kind in kinds.items() if kind.startswith("Tensor") and name not in checked_before]
    spec, unscales = _STEPS.get(op, (None, False))

    def checked(*arguments: Any) -> Any:
        given = dict(zip(kinds, arguments, strict=True))
        for name, (expected, fits) in _RANGES.items():
            if name in given and not fits(given[name]):
                raise RuntimeError(f"{op}: {name} is {given[name]}, expected {expected}")
        first = given[lists[0]] if lists else ()
        device = next((t.device for t in (*first, *map(given.__getitem__, tensors)) if t is not None), None)
        if spec is not None:
            _check_step(op, spec, given, device)
        else:
            for name in lists:
                _check_list(op, name, given[name], first)
        for name in tensors:
            t = given[name]
            if lists and name not in _STATE and t is not None and t.device.type == "cpu":  # a factor
                _check(f"{op}: {name}", t, _ON_CPU, t.device)
            else:
                _check(f"{op}: {name}", t, _STATE.get(name, _F32), device, None if name == "counts" else 1)
        if "slot" in given and not 0 <= given["slot"] < given["counts"].numel() // 2 - 1:
            raise RuntimeError(f"{op}: slot is {given['slot']}, counts has {given['counts'].numel()} elements")
        if spec is not None:
            return run(spec.name, {**given, "unscale_grads": unscales})
        if not op.endswith("_and_update"):
            return getattr(reference, op)(*arguments)
        place = list(kinds).index("loss_scale")
        found = getattr(reference, op.removesuffix("_and_update"))(*arguments[:place])
        update: Any = (*arguments[place : place + 3], given["found_inf"], *arguments[place + 3 :])
        reference.update_scale(*update)
        return found and (*found, found[0].clone())  # of norms, the total again

    return checked
