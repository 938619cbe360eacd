"""``ampctx info --test``: ten calls of each op on a device, compared with plain torch on copies of the same tensors."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from ampctx.kernels import codes
from ampctx.kernels.definitions import FALLBACKS, NAMESPACE, SCHEMAS
from ampctx.kernels.reference_steps import COPY, KAHAN, NO_NUMBERS, SPLIT
from ampctx.kernels.spec import SPECS, OpSpec

_SIZES = 1, 7, 64, 2049, 20_011
_DTYPES = torch.float32, torch.float16, torch.bfloat16
# Sums in another order differ in the last bits, which decide between neighbours in 16 bits.
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def differences(device: torch.device) -> dict[str, str]:
    """By kind of op, the first call that differs from plain torch; "" if none does. Host sync."""
    found: dict[str, str] = {}
    specs = {op: spec for spec in SPECS.values() for op in spec.ops}
    for schema in SCHEMAS:
        op, _, rest = schema.partition(" -> ")[0].rstrip(")").partition("(")
        kinds = {name: kind for kind, name in map(str.split, rest.split(", "))}
        calls = (_difference(op, _arguments(specs.get(op), kinds, i, device)) for i in range(10))
        kind = re.sub("multi_tensor_|unscaling_|unscale_|_and_update|_clipped", "", op)
        kind = kind if op.startswith("multi_tensor_") else "loss scale"
        found[kind] = found.get(kind) or next(filter(None, calls), "")
    return found


def _difference(op: str, given: dict[str, Any]) -> str:
    expected = deepcopy(given)
    try:
        given["result"] = list(getattr(getattr(torch.ops, NAMESPACE), op).default(*given.values()) or ())
        expected["result"] = list(FALLBACKS[op](*expected.values()) or ())
        for (name, ours), (_, theirs) in zip(_tensors(given), _tensors(expected), strict=True):
            rtol = _TOLERANCES.get(ours.dtype, 0.0)
            if not torch.allclose(ours.cpu().double(), theirs.cpu().double(), rtol, rtol / 10, equal_nan=True):
                return f"{op} differs in {name}, {ours.numel()} elements of {ours.dtype}"
    except RuntimeError as error:
        return f"{op} raises {str(error).splitlines()[0]}"
    return ""


def _tensors(given: dict[str, Any]) -> list[tuple[str, Tensor]]:
    return [(k, t) for k, of in given.items() for t in (of if isinstance(of, list) else [of]) if isinstance(t, Tensor)]


def _arguments(spec: OpSpec | None, kinds: dict[str, str], i: int, device: torch.device) -> dict[str, Any]:
    """The arguments of call ``i``. ``kinds``: those of the op's arguments, by name, in its schema."""
    generator = torch.Generator().manual_seed(i)
    states = {state.name: state for state in (*spec.sized, *spec.one_element)} if spec else {}
    scales = [state.scales for state in states.values() if state.code]
    small = ["skips", *(state.name for state in states.values() if state.one_element)]
    exact = spec is not None and spec.elementwise
    mode, in_codes = i % 5 if exact else i % 2, exact and i % 4 == 1
    # Of lists; None: the list is empty.
    params = {SPLIT: torch.bfloat16, KAHAN: torch.float16}.get(mode, _DTYPES[i // 2 % 3])
    extras = {COPY: torch.float16, SPLIT: torch.int16, KAHAN: params}.get(mode)
    dtypes = {"params": params, "extras": extras, **dict.fromkeys(small, torch.float32)}
    dtypes |= dict.fromkeys(scales, torch.float32 if in_codes else None)
    dtypes |= {name: codes.DTYPES[state.code] for name, state in states.items() if in_codes and state.code}
    dtypes |= {name: None for name, state in states.items() if state.if_set and i % 4 > (1 if state.code else 0)}
    width = len(spec.columns) if spec and i % 3 == 0 else 0  # of the rows of numbers, if any
    table = torch.rand(3 * width, dtype=torch.float64, generator=generator)
    given: dict[str, Any] = {"write_back": mode, "seed": i, "arg_to_check": i % 3 - 1, "numbers": NO_NUMBERS}
    given |= {"table": table, "rows": torch.tensor([0, 1, 2, 0, 1] if width else [], dtype=torch.int64)}
    given["stochastic_state"] = bool(scales) and i % 4 > 0 and i % 3 == 0

    def made(place: int, name: str, kind: str) -> Any:
        if kind.endswith("[]"):
            dtype = dtypes.get(name, _DTYPES[(i + place) % 3])
            sizes: Any = [()] * 5 if name in small else map(codes.blocks_of, _SIZES) if name in scales else _SIZES
            drawn = [torch.randn(size, generator=generator) for size in sizes] if dtype else []
            drawn = [t.abs() for t in drawn] if dtype == torch.uint8 or name in (*states, *scales, *small) else drawn
            if spec is None and i == 3:
                drawn[3][5] = torch.inf
            whole = name == "steps" or (dtype is not None and not dtype.is_floating_point)
            return [(t * 25).floor().to(device, dtype) if whole else t.to(device, dtype) for t in drawn]
        if kind.startswith("Tensor"):
            value = float(i % 3 == 2) if name in ("found_inf", "flag") else 0.5
            dtype = torch.int32 if name.endswith("_tracker") else torch.float32
            return torch.full((6,) if name == "counts" else (), value, dtype=dtype, device=device)
        if kind == "float":
            return {"growth_factor": 2.0, "max_norm": (-1.0, 0.5)[i % 2]}.get(name, 0.5)
        return 1 if kind == "int" else (i + place) % 2 == 0

    return {name: given.get(name, made(place, name, kind)) for place, (name, kind) in enumerate(kinds.items())}
