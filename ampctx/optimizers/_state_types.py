"""``state_dtype``: state in fp32, in bf16, or in 8-bit codes with a scale for each 64 elements (``kernels.codes``).

Codes are kept under keys of their own: ``exp_avg_codes`` and ``exp_avg_scales`` for ``exp_avg``. So torch's optimizers
refuse them with a KeyError, and do not train on codes as if they were floats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx._errors import AmpKeyError, AmpTypeError, AmpValueError
from ampctx._saved import plain
from ampctx.casts.arguments import autocast_off, map_leaves
from ampctx.kernels import codes as kernel_codes
from ampctx.kernels.codes import BLOCK, DTYPES
from ampctx.kernels.reference import compute_dtype, is_dense, same_layout
from ampctx.kernels.sharding import is_row_sharded, is_sharded, laid_out_as, like_rows_of, local, whole
from ampctx.kernels.spec import OPTIMIZERS, OpSpec
from ampctx.optimizers._options import Group, check_choice
from ampctx.weights.store import EXTRAS, STORES, follow

CODED = {state.key: state for spec in OPTIMIZERS.values() for state in spec.coded}
CODES_OF = {state.codes_key: key for key, state in CODED.items()}
SCALES_OF = {state.scales: key for key, state in CODED.items()}
_CHOICES = (torch.float32, torch.bfloat16, "8bit")
_WIDE = torch.float32
_MIN_8BIT_SIZE = 4096
State = dict[str, Any]
DAMAGED = "the file is damaged, or the run that saved it had diverged"
DEFAULTS: Group = {"state_dtype": _WIDE, "min_8bit_size": _MIN_8BIT_SIZE}


# --- the options ------------------------------------------------------------------------------------------------------


def _choices(group: Group) -> list[Any]:
    given = group.get("state_dtype", _WIDE)
    return list(given.values()) if isinstance(given, dict) else [given]


def is_reduced(group: Group) -> bool:
    """Whether some state may be below fp32."""
    return not {_WIDE}.issuperset(_choices(group))


def check(of: str, ops: Sequence[str], group: Group) -> None:
    """Checks ``state_dtype`` and ``min_8bit_size`` of a group. ``ops``: of the optimizer, which name its state."""
    if "state_dtype" not in group and "min_8bit_size" not in group:  # each step calls this
        return
    given, names = group.get("state_dtype", _WIDE), [state.key for op in ops for state in OPTIMIZERS[op].coded]
    if not names:
        if given is not _WIDE:
            raise AmpValueError(
                f"state_dtype is {given!r}, and {of} keeps a sum that grows, in torch.float32 alone. Leave it out."
            )
        return
    if isinstance(given, Mapping):
        if unknown := [name for name in given if name not in names]:
            raise AmpValueError(
                f"state_dtype has {unknown[0]!r}, and {of} keeps no such state in fewer bits: expected "
                f"{' or '.join(map(repr, names))}"
            )
        group["state_dtype"] = {name: check_choice(f"state_dtype[{name!r}]", v, _CHOICES) for name, v in given.items()}
    else:
        group["state_dtype"] = check_choice("state_dtype", given, _CHOICES)
    size = plain(group.get("min_8bit_size", _MIN_8BIT_SIZE))
    if isinstance(size, bool) or not isinstance(size, int):
        raise AmpTypeError(f"min_8bit_size must be an int, got {type(size).__name__}")
    if size < 0:
        raise AmpValueError(f"min_8bit_size is {size}, expected a number of elements >= 0")
    if "min_8bit_size" in group:
        group["min_8bit_size"] = size
    if group.get("amsgrad") and is_reduced(group):
        raise AmpValueError(
            f"state_dtype={given!r} does not go with amsgrad=True: its maximum must not be rounded. Leave out one."
        )


def smallest_coded(group: Group) -> float:
    """The size from which parameters of a group have codes; inf if none have."""
    return group.get("min_8bit_size", _MIN_8BIT_SIZE) if "8bit" in _choices(group) else math.inf


# --- forms of state ---------------------------------------------------------------------------------------------------


class Forms(NamedTuple):
    """How the states of some parameters are kept.

    sized: the op's lists of state of the parameters' size -> the key in the state; None for an empty list.
    along: its lists of one-element state, and of scales -> the key.
    dtypes: the state's key without "_codes" -> bf16, int8 or uint8. Others are in the type of arithmetic.
    """

    sized: Mapping[str, str | None]
    along: Mapping[str, str]
    dtypes: Mapping[str, torch.dtype]

    def keys(self, destination: str) -> list[str]:
        """The keys of a state with a write back, in the order of checkpoints."""
        scales = [key for key in self.along.values() if key in SCALES_OF]
        one_element = [key for key in self.along.values() if key not in SCALES_OF]
        extra = [EXTRAS[destination]] if destination in EXTRAS else []
        return [*one_element, *filter(None, self.sized.values()), *scales, *extra]


def forms_of(spec: OpSpec, group: Group, in_codes: bool) -> Forms:
    """``in_codes``: whether the parameters are large enough for codes."""
    sized = {state.name: state.key if not state.if_set or group[state.if_set] else None for state in spec.sized}
    along = {state.name: state.key for state in reversed(spec.one_element)}
    given = group.get("state_dtype", _WIDE)
    dtypes: dict[str, torch.dtype] = {}
    for state in spec.coded if is_reduced(group) else ():
        if sized.get(state.name) is None:
            continue
        of_state = given.get(state.key, _WIDE) if isinstance(given, dict) else given
        if of_state is torch.bfloat16:
            dtypes[state.key] = torch.bfloat16
        elif of_state == "8bit" and in_codes:
            sized[state.name] = state.codes_key
            along[state.scales] = state.scales
            dtypes[state.key] = DTYPES[state.code]
    return Forms(sized, along, dtypes)


def has_forms(state: Mapping[str, Any], forms: Forms) -> bool:
    """Whether no entry has another form, as after a change of ``state_dtype``."""
    for key, coded in CODED.items():
        found, want = state.get(key, state.get(coded.codes_key)), forms.dtypes.get(key)
        if found is not None and found.dtype is not want and (want is not None or found.dtype in _REDUCED):
            return False
    return True


_REDUCED = frozenset({torch.bfloat16, torch.int8, torch.uint8})


def convert(p: Tensor, state: dict[str, Any], forms: Forms) -> None:
    """Puts entries of another form into theirs: to nearest, and exactly to fp32."""
    for key, coded in CODED.items():
        if has_forms({k: state[k] for k in (key, coded.codes_key) if k in state}, forms):
            continue
        value = state.pop(key, None)
        if value is None:
            value = decoded(state.pop(coded.codes_key), state.pop(coded.scales))
        want = forms.dtypes.get(key)
        if want is not None and want in DTYPES.values():
            state[coded.codes_key], state[coded.scales] = encoded(p, value, want)
        else:
            state[key] = value.to(want or compute_dtype(p))


# --- codes ------------------------------------------------------------------------------------------------------------


def scales_shape(t: Tensor) -> tuple[int, ...]:
    """(rows, blocks of a row) where a row of a plain tensor is whole blocks and lies in one piece, else (blocks,)."""
    rows = t.shape[0] if t.dim() else 0
    row = t.numel() // rows if rows else 0
    if row and row % BLOCK == 0 and is_dense(t) and (rows == 1 or t.stride(0) == row):
        return rows, row // BLOCK
    return (kernel_codes.blocks_of(t.numel()),)


def zero_scales(codes: Tensor) -> Tensor:
    """Scales of 0. A DTensor if it can be sharded like the codes, else those of this rank's part."""
    (part,) = local([codes])
    if is_row_sharded(codes, BLOCK):
        return like_rows_of(codes, codes.shape[1:].numel() // BLOCK, torch.float32)
    return torch.zeros(scales_shape(part), dtype=torch.float32, device=part.device)


@torch.no_grad()
def encoded(p: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes to nearest, in the layout of ``p``, and their scales."""
    codes = torch.zeros_like(p, dtype=dtype, requires_grad=False)
    scales = zero_scales(codes)
    into, part, of_part = local([codes, value, scales])
    values = torch.empty_like(into, dtype=torch.float32).copy_(part)
    found, found_scales = kernel_codes.encode(kernel_codes.in_memory_order(values), dtype)
    kernel_codes.in_memory_order(into).copy_(found)
    of_part.copy_(found_scales.reshape(of_part.shape))
    return codes, scales


@torch.no_grad()
def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """The fp32 values, in the layout of the codes. Exact."""
    values = torch.empty_like(codes, dtype=torch.float32)
    from_, of_part, into = local([codes, scales, values])
    found = kernel_codes.decode(kernel_codes.in_memory_order(from_), of_part)
    kernel_codes.in_memory_order(into).copy_(found)
    return values


@torch.no_grad()
def restored(p: Tensor, name: str, key: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies the codes of state ``key`` for ``p``: bit for bit, or decoded where ``p`` is laid out otherwise. A
    collective if codes are sharded otherwise than ``p``."""
    coded = CODED[key]
    codes, scales = _checked(name, key, state)
    check_tensor(f"the state {coded.codes_key!r} of {name}", codes, p.shape, codes.dtype)
    mine = torch.zeros_like(p, dtype=codes.dtype, requires_grad=False)
    mine_scales = zero_scales(mine)
    if _lies_as(codes, mine) and _lies_as(scales, mine_scales):
        return {coded.codes_key: mine.copy_(codes), coded.scales: mine_scales.copy_(scales)}
    codes, scales = whole(codes), whole(scales)
    low, high = (x.item() for x in torch.aminmax(scales)) if scales.numel() else (0.0, 0.0)
    if not (low >= 0 and math.isfinite(high)):
        wrong, what = high if low >= 0 else low, "finite numbers >= 0"
        raise AmpValueError(f"the state {coded.scales!r} of {name} has {wrong!r}, expected {what}: {DAMAGED}")
    value = laid_out_as(decoded(codes, scales), p)
    return {key: torch.empty_like(p, dtype=torch.float32, requires_grad=False).copy_(value)}


def _lies_as(t: Any, mine: Any) -> bool:
    layouts = [(x.device_mesh, x.placements) if is_sharded(x) else None for x in (t, mine)]
    part, of_mine = local([t, mine])
    return layouts[0] == layouts[1] and part.shape == of_mine.shape and same_layout(part, of_mine)


def _checked(name: str, key: str, state: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The codes and scales of state ``key``, after checks of their types and shapes."""
    coded = CODED[key]
    for one, other in ((coded.codes_key, coded.scales), (coded.scales, coded.codes_key)):
        if other not in state:
            raise AmpKeyError(f"the state of {name} has {one!r} without {other!r}. Each is nothing without the other.")
    if key in state:
        raise AmpKeyError(f"the state of {name} has both {key!r} and {coded.codes_key!r}. Remove one of them.")
    codes, scales = state[coded.codes_key], state[coded.scales]
    check_tensor(f"the state {coded.codes_key!r} of {name}", codes, dtype=DTYPES[coded.code])
    check_tensor(f"the state {coded.scales!r} of {name}", scales, dtype=torch.float32)
    # Without values, so that each rank of a sharded state sees the whole.
    expected = tuple(zero_scales(codes).shape) if is_sharded(scales) else scales_shape(local([codes])[0])
    if tuple(scales.shape) != expected:
        raise AmpValueError(
            f"the state {coded.scales!r} of {name} has shape {tuple(scales.shape)}, expected {expected}: one for each "
            f"{BLOCK} elements of {coded.codes_key!r}, as they lie in memory"
        )
    return codes, scales


def check_tensor(
    where: str, value: Any, shape: torch.Size | None = None, dtype: torch.dtype | None = None, allows_meta: bool = False
) -> None:
    """Raises AmpValueError unless an entry of a checkpoint is a strided tensor of the shape, if one is given, and of
    the dtype: None for any floating one."""
    if not isinstance(value, Tensor):
        raise AmpValueError(f"{where} is of type {type(value).__name__}, expected a tensor")
    if value.is_meta and not allows_meta:
        raise AmpValueError(f"{where} is on the meta device, without values")
    if shape is not None and value.shape != shape:
        raise AmpValueError(f"{where} has shape {tuple(value.shape)}, the parameter has {tuple(shape)}")
    if value.layout != torch.strided:
        raise AmpValueError(f"{where} is of layout {value.layout}, expected torch.strided")
    if not value.is_floating_point() if dtype is None else value.dtype != dtype:
        raise AmpValueError(f"{where} is of {value.dtype}, expected {dtype or 'a floating type'}")


# --- the states of an optimizer ---------------------------------------------------------------------------------------


def states_of(optimizer: Any, forms: Forms, destination: str, params: list[Tensor]) -> list[State]:
    """The states of parameters. Creates missing entries, converts those of another form, and resyncs masters from
    the weights."""
    needed = set(forms.keys(destination))
    states = [optimizer.state[p] for p in params]
    for p, state in zip(params, states, strict=True):
        if not has_forms(state, forms):
            convert(p, state, forms)
        if not needed <= state.keys():
            optimizer._make_state(p, state, forms, destination)
        # Set by hand, as torch's optimizers kept it once.
        if isinstance(count := state.get("step"), (int, float)):
            state["step"] = torch.full((), float(count), dtype=torch.float32, device=p.device)
        if destination in EXTRAS:
            follow(p, state, optimizer._seen)
    return states


def forms_in(optimizer: Any, p: Tensor, group: Group) -> Forms:
    """The forms of the state of ``p`` with the options of a group."""
    return forms_of(OPTIMIZERS[optimizer._op_of(group)], group, p.numel() >= smallest_coded(group))


@torch.no_grad()
def first_state(optimizer: Any, p: Tensor, group: Group) -> State:
    """The state of a parameter before its first step."""
    state: State = {}
    optimizer._make_state(p, state, forms_in(optimizer, p, group), optimizer.layout_of(p))
    return state


def make_missing(optimizer: Any, p: Tensor, state: State, forms: Forms, destination: str) -> None:
    """Creates missing entries of a state."""
    for key in forms.keys(destination):
        if key in state:
            continue
        if (of := SCALES_OF.get(key)) is not None:
            state[key] = zero_scales(state[CODED[of].codes_key])
        elif key in forms.along.values():
            state[key] = torch.zeros((), dtype=torch.float32, device=p.device)
        else:
            if key == EXTRAS.get(destination):
                dtype = STORES[destination].dtype or p.dtype
            else:
                dtype = forms.dtypes.get(CODES_OF.get(key, key), compute_dtype(p))
            state[key] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
            if key == EXTRAS["copy"]:
                state[key].copy_(p)


# --- other formats ----------------------------------------------------------------------------------------------------


def unpacked(state: Mapping[str, Any], name: str = "a parameter") -> dict[str, Any]:
    """The state of a parameter with fp32 in place of codes and bf16. Exact; other entries as they are."""
    result: dict[str, Any] = {}
    for key, value in state.items():
        if key in SCALES_OF:
            _checked(name, SCALES_OF[key], state)
        elif key in CODES_OF:
            result[CODES_OF[key]] = decoded(*_checked(name, CODES_OF[key], state))
        elif key in CODED and isinstance(value, Tensor) and value.dtype == torch.bfloat16:
            result[key] = value.float()
        else:
            result[key] = value
    return result


def for_any_ranks(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """The states of a checkpoint, with fp32 in place of codes whose scales belong to this rank's part alone."""

    def is_local(state: Any) -> bool:
        pairs = [(state[codes], state[CODED[key].scales]) for codes, key in CODES_OF.items() if codes in state]
        return any(is_sharded(codes) and not is_sharded(scales) for codes, scales in pairs)

    found = {key: unpacked(state) for key, state in states.items() if isinstance(state, Mapping) and is_local(state)}
    return {**states, **found}


@autocast_off()
@torch.no_grad()
def unpack_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an optimizer's state dict in torch's format: state on the CPU, moments in fp32. Host sync for GPU state.

    The result loads into torch.optim.AdamW, SGD and others, and into ampctx's optimizers with any ``state_dtype``. It
    is exact: codes and bf16 are fp32 numbers. Of DTensors it has the whole tensors, and every rank must call it.

    Args:
        state_dict: what ``optimizer.state_dict()`` of an ampctx optimizer returned. It is not changed.

    Returns:
        a new dict; entries that are no tensors are shared. Its groups lack ``state_dtype`` and ``min_8bit_size``.

    Raises:
        AmpTypeError: no state dict of an optimizer.
        AmpKeyError: codes without their scales. AmpValueError: a wrong dtype or shape, by name.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise AmpTypeError("unpack_state: state_dict must be what optimizer.state_dict() returned")

    states = map_leaves(dict(state_dict["state"]), lambda t: whole(t.detach()).to("cpu", copy=True), objects=False)
    states |= {key: unpacked(s, f"parameter {key!r}") for key, s in states.items() if isinstance(s, Mapping)}
    groups = [{key: v for key, v in group.items() if key not in DEFAULTS} for group in state_dict["param_groups"]]
    return {**state_dict, "state": states, "param_groups": groups}
