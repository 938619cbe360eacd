"""The checks of the optimizer ops' fallbacks: the kernels' own (csrc/library_optimizers.h), with the same messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx.kernels import codes, reference
from ampctx.kernels.reference_steps import KAHAN, LOW_PRECISION, NEAREST, SPLIT, STOCHASTIC, WRITE_BACKS, run
from ampctx.kernels.spec import END, SPECS, OpSpec

_KNOWN = "float32, float16, bfloat16 or float64"


def _check_extras(op: str, grads: Sequence[Tensor], params: Sequence[Tensor], extras, write_back: int) -> None:
    if not 0 <= write_back < len(WRITE_BACKS):
        raise RuntimeError(f"{op}: write_back is {write_back}, expected 0 to {len(WRITE_BACKS) - 1}")
    if write_back in (NEAREST, STOCHASTIC):
        if extras:
            raise RuntimeError(f"{op}: extras has {len(extras)} tensors, expected none to go with this write_back")
        return
    allowed = ((torch.int16,), "int16") if write_back == SPLIT else (reference.KERNEL_DTYPES, _KNOWN)
    reference.check_lists(op, {"grads": grads, "extras": extras}, {"extras": allowed})
    if not params:
        return
    if write_back == SPLIT and params[0].dtype != torch.bfloat16:
        raise RuntimeError(f"{op}: params[0] has dtype {params[0].dtype}, expected bfloat16 to go with remainders")
    if write_back == KAHAN and params[0].dtype not in LOW_PRECISION:
        raise RuntimeError(
            f"{op}: params[0] has dtype {params[0].dtype}, expected float16 or bfloat16 to go with compensations"
        )
    if write_back == KAHAN and extras[0].dtype != params[0].dtype:
        raise RuntimeError(f"{op}: extras[0] has dtype {extras[0].dtype}, params[0] has {params[0].dtype}")


def _check_one_element(op: str, name: str, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    if len(tensors) != len(grads):
        raise RuntimeError(f"{op}: {name} has {len(tensors)} tensors, grads has {len(grads)}")
    for i, t in enumerate(tensors):
        where = f"{op}: {name}[{i}]"
        reference.require_one_element(t, where, (torch.float32,))
        if t.device != grads[0].device:
            raise RuntimeError(f"{where} is on {t.device}, grads[0] is on {grads[0].device}")


def _check_skips(op: str, skips: Sequence[Tensor], grads: Sequence[Tensor], found_inf: Tensor) -> None:
    if skips and len(skips) != 5:
        raise RuntimeError(f"{op}: skips has {len(skips)} tensors, expected none or 5")
    decided_by, device = ("grads[0]", grads[0].device) if grads else ("found_inf", found_inf.device)
    for i, t in enumerate(skips):
        reference.require_one_element(t, f"{op}: skips[{i}]", (torch.float32,))
        if t.device != device:
            raise RuntimeError(f"{op}: skips[{i}] is on {t.device}, {decided_by} is on {device}")


_CODED = {
    code: ((*reference.KERNEL_DTYPES, dtype), f"float32, float16, bfloat16, float64 or {dtype}".replace("torch.", ""))
    for code, dtype in codes.DTYPES.items()
}


def _check_state_types(op: str, spec: OpSpec, given: Mapping[str, Any]) -> None:
    """Checks what goes with codes, and with states that are rounded at random."""
    grads, lists = (
        given["grads"],
        [given[name] for name in ("grads", "params", *(s.name for s in spec.sized), "extras")],
    )
    is_f64 = any(tensors and tensors[0].dtype == torch.float64 for tensors in lists)
    coded = [s for s in spec.coded if given[s.name] and given[s.name][0].dtype == codes.DTYPES[s.code]]
    for state in spec.coded:
        scales = given[state.scales]
        if state in coded:
            _check_scales(op, state.scales, scales, grads)
        elif scales:
            raise RuntimeError(
                f"{op}: {state.scales} has {len(scales)} tensors, expected none: {state.name} has no codes"
            )
    if not coded and not given["stochastic_state"]:
        return
    what = f"{coded[0].name} in codes" if coded else "stochastic_state"
    if is_f64:
        raise RuntimeError(f"{op}: {what} does not go with float64 tensors")
    for state in spec.sized:
        if not state.code and given[state.name]:
            raise RuntimeError(f"{op}: {what} does not go with {state.name}, which must not be rounded down")


def _check_scales(op: str, name: str, scales: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    if len(scales) != len(grads):
        raise RuntimeError(f"{op}: {name} has {len(scales)} tensors, grads has {len(grads)}")
    for i, (t, grad) in enumerate(zip(scales, grads, strict=True)):
        where = f"{op}: {name}[{i}]"
        if t.layout != torch.strided:
            raise RuntimeError(f"{where} is not a strided tensor")
        if t.dtype != torch.float32:
            raise RuntimeError(f"{where} has dtype {t.dtype}, expected float32")
        if t.device != grad.device:
            raise RuntimeError(f"{where} is on {t.device}, grads[0] is on {grads[0].device}")
        expected = codes.blocks_of(grad.numel())
        if t.numel() != expected:
            raise RuntimeError(
                f"{where} has {t.numel()} elements, expected {expected}: one for each {codes.BLOCK} of grads[{i}]"
            )
        if not t.is_contiguous():
            raise RuntimeError(f"{where} is not contiguous")
        if t.numel() and not reference.has_memory(t):
            raise RuntimeError(f"{where} {reference.NO_MEMORY}")


def _check_numbers(op: str, numbers: Tensor, grads: Sequence[Tensor]) -> None:
    if numbers is None:
        raise RuntimeError(f"{op}: numbers is None, expected a tensor")
    if numbers.dtype != torch.int64:
        raise RuntimeError(f"{op}: numbers has dtype {numbers.dtype}, expected int64")
    if numbers.numel() == 0:
        return
    expected = sum(grad.numel() > 0 for grad in grads)
    if numbers.numel() != expected:
        raise RuntimeError(
            f"{op}: numbers has {numbers.numel()} elements, expected none or {expected}: one for each tensor with "
            "elements"
        )
    if numbers.device != grads[0].device:
        raise RuntimeError(f"{op}: numbers is on {numbers.device}, grads[0] is on {grads[0].device}")
    if not numbers.is_contiguous():
        raise RuntimeError(f"{op}: numbers is not contiguous")
    if not reference.has_memory(numbers):
        raise RuntimeError(f"{op}: numbers {reference.NO_MEMORY}")


def _checked(spec: OpSpec, unscale_grads: bool = False) -> Callable[..., None]:
    """The fallback of an op: checks the arguments, then calls ``run``."""
    numbers = [number.name for number in spec.numbers]
    end = END if spec.takes_step else ()
    names = [*spec.lists, *spec.tensors, *numbers, *end]
    op = spec.unscaling_op if unscale_grads else spec.op

    def fallback(*arguments: Any) -> None:
        given = dict(zip(names, arguments, strict=True))
        grads, params = given["grads"], given["params"]
        lists = {state.name: given[state.name] for state in spec.sized if given[state.name] or not state.if_set}
        reference.check_lists(
            op, {"grads": grads, "params": params, **lists}, {s.name: _CODED[s.code] for s in spec.coded}
        )
        if spec.takes_step:
            _check_extras(op, grads, params, given["extras"], given["write_back"])
            _check_one_element(op, "steps", given["steps"], grads)
        factors = {name: given[name] for name in spec.tensors[1:] if name not in (*spec.factors, "numbers")}
        reference.check_scalars(op, given["found_inf"], {"grads": grads}, **factors)
        for state in spec.one_element:
            if state.name != "steps":
                _check_one_element(op, state.name, given[state.name], grads)
        if spec.takes_step:
            _check_skips(op, given["skips"], grads, given["found_inf"])
        reference.check_scalars(
            op, given["found_inf"], {"grads": grads}, **{name: given[name] for name in spec.factors}
        )
        if spec.takes_step:
            _check_state_types(op, spec, given)
            _check_numbers(op, given["numbers"], grads)
        run(spec.name, {**given, "unscale_grads": unscale_grads})

    return fallback


FALLBACKS = {spec.op: _checked(spec) for spec in SPECS.values()}
FALLBACKS |= {spec.unscaling_op: _checked(spec, True) for spec in SPECS.values() if spec.takes_step}
