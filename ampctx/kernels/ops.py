"""The ops of ``torch.ops.ampctx``: schema, docstring, typed call and fake kernel of each.

An op takes lists of tensors on one device. A list has one dtype (fp32, fp16 or bf16, and fp64 on the CPU). Tensors at
one index have equally many elements and the same memory layout (contiguous, or any dense layout that all share).
Tensors and lists may be empty. Anything else, such as a tensor whose storage was freed, raises a RuntimeError that
names list and index, and changes nothing. ``ampctx.foreach`` has the same arithmetic for mixed lists. One tensor may
stand at the same index of two lists; any other overlap of memory gives undefined results. No op waits for the device.

``found_inf`` is a one-element fp32 or int32 tensor on the device of the lists. An op writes 1 into it when it finds inf
or nan in its input, and never clears it. Factors are floats or one-element tensors, on the device of the lists (fp32)
or on the CPU. Arithmetic is fp32 (fp64 if any tensor is), rounded on the store as torch's ``copy_`` rounds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, repeat
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx._errors import AmpTypeError, AmpValueError
from ampctx.kernels import extension as _extension
from ampctx.kernels import passes, reference_steps
from ampctx.kernels import reference as _reference
from ampctx.kernels.each import all_there, device_of, grad_of, layout_of
from ampctx.kernels.spec import SPECS

NAMESPACE = "ampctx"

_RULE = (
    "float growth_factor, float backoff_factor, int growth_interval, int hysteresis, float min_scale, float max_scale"
)
_SCHEMAS = (
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
    *map(_handle_overload, filter(_TENSOR_LIST.search, _SCHEMAS)),
)


# --- fallbacks: the reference behind the kernels' own checks ----------------------------------------------------------


def _check(op, found_inf, lists, **factors):
    _reference.check_lists(op, lists)
    _reference.check_scalars(op, found_inf, lists, **factors)


def _scale_checked(src, dst, found_inf, scale):
    _check("multi_tensor_scale", found_inf, {"src": src, "dst": dst}, scale=scale)
    _reference.multi_tensor_scale(src, dst, found_inf, scale)


def _scale_clipped_checked(src, dst, found_inf, scale, grad_norm, max_norm):
    op = "multi_tensor_scale_clipped"
    _check(op, found_inf, {"src": src, "dst": dst}, scale=scale, grad_norm=grad_norm)
    _reference.multi_tensor_scale(src, dst, found_inf, _reference.clipped(scale, grad_norm, max_norm))


def _axpby_checked(x, y, out, found_inf, a, b, arg_to_check):
    _check("multi_tensor_axpby", found_inf, {"x": x, "y": y, "out": out}, a=a, b=b)
    if arg_to_check not in (-1, 0, 1):
        raise RuntimeError(f"multi_tensor_axpby: arg_to_check is {arg_to_check}, expected -1, 0 or 1")
    _reference.multi_tensor_axpby(x, y, out, found_inf, a, b, arg_to_check)


def _l2norm_checked(tensors, found_inf, per_tensor):
    _check("multi_tensor_l2norm", found_inf, {"tensors": tensors})
    return _reference.multi_tensor_l2norm(tensors, found_inf, per_tensor)


def _unscale_l2norm_checked(tensors, found_inf, inv_scale, per_tensor):
    _check("multi_tensor_unscale_l2norm", found_inf, {"tensors": tensors}, inv_scale=inv_scale)
    return _reference.multi_tensor_unscale_l2norm(tensors, found_inf, inv_scale, per_tensor)


def _check_update(op, found_inf, lists, loss_scale, growth_tracker, hysteresis_tracker, *rule):
    first_name, first = next(iter(lists.items()))
    state = {"loss_scale": loss_scale, "growth_tracker": growth_tracker, "hysteresis_tracker": hysteresis_tracker}
    _reference.check_scale_state(op, state, f"{first_name}[0]" if first else "found_inf", found_inf.device)
    _reference.check_scale_rule(op, *rule)


def _scale_and_update_checked(src, dst, found_inf, scale, *update):
    op, lists = "multi_tensor_scale_and_update", {"src": src, "dst": dst}
    _check(op, found_inf, lists, scale=scale)
    _check_update(op, found_inf, lists, *update)
    _reference.multi_tensor_scale(src, dst, found_inf, scale)
    _reference.update_scale(*update[:3], found_inf, *update[3:])


def _unscale_l2norm_and_update_checked(tensors, found_inf, inv_scale, per_tensor, *update):
    op, lists = "multi_tensor_unscale_l2norm_and_update", {"tensors": tensors}
    _check(op, found_inf, lists, inv_scale=inv_scale)
    _check_update(op, found_inf, lists, *update)
    norm, each = _reference.multi_tensor_unscale_l2norm(tensors, found_inf, inv_scale, per_tensor)
    _reference.update_scale(*update[:3], found_inf, *update[3:])
    return norm, each, norm.clone()


def _update_scale_checked(scale, growth_tracker, hysteresis_tracker, found_inf, *rule):
    op = "update_scale"
    device = torch.device("cpu") if scale is None else scale.device
    _reference.check_flag(op, found_inf, "scale", device)
    state = {"scale": scale, "growth_tracker": growth_tracker, "hysteresis_tracker": hysteresis_tracker}
    _reference.check_scale_state(op, state, "scale", device)
    _reference.check_scale_rule(op, *rule)
    _reference.update_scale(scale, growth_tracker, hysteresis_tracker, found_inf, *rule)


def _block_factors_checked(scale):
    _reference.require_one_element(scale, "block_factors: scale", (torch.float32,))
    return _reference.block_factors(scale)


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
        _reference.check_flag(op, given, "counts", counts.device)
    _reference.require_one_element(scale, f"{op}: scale", (torch.float32,))
    if scale.device != counts.device:
        raise RuntimeError(f"{op}: scale is on {scale.device}, counts is on {counts.device}")
    _reference.count_skip(_reference.skip_counts(counts, slot), found_inf, flag, scale, is_first)


_FALLBACKS = {
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
    **reference_steps.FALLBACKS,
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
    dtype = _reference.compute_dtype(*tensors)
    n = len(tensors) if per_tensor else 0
    return like.new_empty((), dtype=dtype), like.new_empty(n, dtype=dtype)


def _fake_norms_and_update(*args):
    norm, each = _fake_norms(*args)
    return norm, each, torch.empty_like(norm)


_FAKES: dict[str, Callable[..., Any]] = {
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
    **dict.fromkeys(reference_steps.FALLBACKS, _fake_nothing),
}


def _routed(name: str, found: Callable[[], _extension.Extension]) -> Callable[..., Any]:
    """Calls the kernel that ``found()`` has for the arguments, or else the fallback."""
    fallback: Any = _FALLBACKS[name]

    def route(*args: Any) -> Any:
        return (found().kernel_for(name, args) or fallback)(*args)

    return route


def define(namespace: str, found: Callable[[], _extension.Extension] | None = None) -> torch.library.Library:
    """Defines every op in ``namespace`` with its fallback and fake kernel, for as long as the returned object lives.

    ``found()`` gives the kernels that fallbacks hand calls on to.
    """
    library = torch.library.Library(namespace, "DEF")
    for schema in _SCHEMAS:
        name = schema.partition("(")[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, _routed(name, found) if found else _FALLBACKS[name], "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{name}", _FAKES[name], lib=library)
    for schema in _COMPILED_SCHEMAS:
        library.define(schema)
    return library


_library = define(NAMESPACE, lambda: extension)
extension: _extension.Extension = _extension.load(NAMESPACE, define)
passes.use(extension.passes)
_ops = torch.ops.ampctx


# --- the calls -------------------------------------------------------------------------------------------------------


def factor(value: float | Tensor) -> Tensor:
    """A factor as the ops take it: tensors unchanged, numbers as fp64 on the CPU. Do not write to the result."""
    if isinstance(value, Tensor):
        return value
    # 0.0 and -0.0 are one key.
    return _number(float(value)) if value == 0 or _is_watched() else _kept_number(float(value))


def _number(value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float64, device="cpu")


_kept_number = lru_cache(maxsize=64)(_number)


def _listed(tensors: Iterable[Tensor], name: str) -> list[Tensor]:
    """A copy of the list. It keeps the tensors alive, so that addresses read from them stay valid."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise AmpTypeError(f"{name} is a {type(tensors).__name__}, expected a list of tensors")
    return list(tensors)


def _check_types(tensors: Sequence[Any], name: str) -> None:
    for i, t in enumerate(tensors):
        if not isinstance(t, Tensor):
            raise AmpTypeError(f"{name}[{i}] is a {type(t).__name__}, expected a tensor")


def can_be_held(tensor: Tensor) -> bool:
    """Whether torch's dispatcher hands an op the tensor itself and not a copy."""
    # _is_zerotensor is private; torch has no public name for it.
    return not (tensor.is_neg() or tensor._is_zerotensor())


class HeldTensors(Sequence[Tensor]):
    """A tensor-list handle: the compiled ops keep the list, and a call passes a number instead of the tensors.

    Use it for a list that many calls share; every op takes it in place of any list. Each call still checks dtype, size,
    layout and memory of the tensors. No host sync.

    Args:
        tensors: one or more tensors on one device.

    Raises:
        AmpTypeError: ``tensors`` is not a list of tensors.
        AmpValueError: the list is empty, or torch's dispatcher would copy a tensor, such as a negating view.
        NotImplementedError: the device of the tensors has no compiled kernels.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = _listed(tensors, "HeldTensors: tensors")
        if not self.tensors:
            raise AmpValueError("HeldTensors: the list is empty. Pass one or more tensors of one device.")
        _check_types(self.tensors, "HeldTensors: tensors")
        if not all(map(can_be_held, self.tensors)):
            raise AmpValueError(
                "HeldTensors: a tensor is a negating view or has no memory, so torch would hand over a copy. "
                "Pass its clone()."
            )
        extension.serves(self.tensors[0].device.type)  # registers late kernels
        # The owner comes first, so that an interrupt cannot leak the list.
        self.number, self._owner = extension.new_list()
        self.number = _ops.hold_tensors.default(self.tensors, self.number)

    @property
    def are_contiguous(self) -> bool:
        return bool(extension.are_contiguous(self.number))

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __getitem__(self, index: Any) -> Any:
        return self.tensors[index]


class ReadTensors(HeldTensors):
    """A handle from ``read``, ``read_grads`` or ``hold_grads``: its tensors are of one dtype and device, and dense.

    One from ``read`` or ``read_grads`` is valid for calls made at once, before any tensor changes.
    """

    def __init__(self, tensors: list[Tensor], number: int, owner: Any) -> None:
        self.tensors, self.number, self._owner = tensors, number, owner

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype


def _is_watched() -> bool:
    """Whether torch.compile or a TorchDispatchMode must see the tensors of each op call."""
    # Private; torch has no public test for a TorchDispatchMode.
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def read(tensors: Iterable[Tensor]) -> ReadTensors | None:
    """A handle for tensors used at once. It avoids the dispatcher, which costs more than a small tensor's kernel.

    Returns:
        None if the tensors are not plain, dense and of one device and dtype, if nothing is compiled, or under
        torch.compile or a TorchDispatchMode. Then pass the list itself: the op takes it or says what is wrong.

    Raises:
        AmpTypeError: ``tensors`` is not a list.
    """
    listed = _listed(tensors, "read: tensors")
    if _is_watched():
        return None
    number, owner = extension.new_list()
    return _as_read(listed, number, owner) if extension.read_tensors(listed, number) else None


def read_grads(params: Iterable[Tensor]) -> tuple[list[Tensor | None], ReadTensors | None]:
    """The ``.grad`` of each parameter, and a handle for those that are not None, or None as from ``read``.

    Raises:
        AmpTypeError: ``params`` is not a list of tensors.
        TypeError: a ``.grad`` property changed the length of the list.
    """
    listed = params if type(params) is list else _listed(params, "read_grads: params")
    grads: list[Any] = []
    try:
        if _is_watched() or extension.read_grads is None:
            return list(map(grad_of, listed)), None
        number, owner = extension.new_list()
        if not extension.read_grads(listed, grads, False, number):
            return grads, None
    except AttributeError:
        _check_types(listed, "read_grads: params")
        raise
    # A copy, because the caller may change ``grads``.
    present = list(grads) if all_there(grads) else [g for g in grads if g is not None]
    return grads, _as_read(present, number, owner)


def hold(tensors: Iterable[Tensor]) -> HeldTensors | None:
    """A tensor-list handle, or None as from ``read`` for tensors that an op call would copy or not take.

    The tensors may mix dtypes and devices.
    """
    listed = _listed(tensors, "hold: tensors")
    if _is_watched() or not listed or not extension.passes or not passes.are_plain(listed):
        return None
    served = all(map(extension.serves, {device.type for device in map(device_of, listed)}))
    if not served or set(map(layout_of, listed)) != {torch.strided} or not all(map(can_be_held, listed)):
        return None
    return HeldTensors(listed)


def hold_grads(grads: list[Tensor]) -> ReadTensors | None:
    """A handle for gradients that stays valid for as long as it is kept. None as from ``read``, and also if a gradient
    is a part of a larger storage."""
    if _is_watched() or not grads or not extension.passes or not passes.are_plain(grads):
        return None
    number, owner = extension.new_list()
    found = _as_read(grads, number, owner)
    if found is None:
        return None
    try:
        # A negated gradient is held as the copy that the dispatcher makes, which has its values.
        _ops.hold_tensors.default(grads, number)
    except NotImplementedError:  # of a sparse tensor
        return None
    return found if extension.is_uniform(number, True) else None


def read_along(params: Iterable[Tensor], grads: Iterable[Tensor] | None = None) -> ReadTensors | None:
    """A handle for the gradients (default: each ``.grad``), or None as from ``read``.

    Also None if a gradient is missing or laid out differently from its parameter, or if the parameters mix dtypes.
    Raises as ``read_grads``. A ``HeldTensors`` of the parameters is faster than a list.
    """
    if isinstance(params, HeldTensors):
        listed = params.tensors
    else:
        listed = params if type(params) is list else _listed(params, "read_along: params")
    found: list[Any] = [] if grads is None else _listed(grads, "read_along: grads")
    if _is_watched() or extension.read_grads is None:
        return None
    number, owner = extension.new_list()
    try:
        read = _as_read(found, number, owner) if extension.read_grads(listed, found, True, number) else None
    except AttributeError:
        _check_types(listed, "read_along: params")
        raise
    if read is None:
        return None
    held = params if isinstance(params, HeldTensors) else hold(listed)
    return read if held is not None and lie_alike(read, held) else None


def read_entries(dicts: list[Any], key: str) -> ReadTensors | None:
    """A handle for ``entries[key]`` of each dict, or None as from ``read``, and where a dict lacks the key."""
    if _is_watched() or not extension.passes:
        return None
    number, owner = extension.new_list()
    found: list[Tensor] = []
    return _as_read(found, number, owner) if extension.read_entries(dicts, key, found, number) else None


def lie_alike(grads: HeldTensors, params: HeldTensors) -> bool:
    """Whether each gradient is laid out as its parameter, on the same device, and the parameters are of one dtype.
    Gradients stand for any list that goes along with parameters."""
    return bool(extension.lie_alike(grads.number, params.number))


def _as_read(tensors: list[Tensor], number: int, owner: Any) -> ReadTensors | None:
    found = ReadTensors(tensors, number, owner)
    device = tensors[0].device.type
    # Without compiled kernels for the device the fallback runs, which takes tensors only.
    served = "cpu" in extension.backends if device == "cpu" else extension.serves(device)
    return found if served else None


def are_apart(lists: Sequence[Sequence[Tensor]]) -> bool:
    """Whether no two non-empty tensors of the lists begin at the same address. No host sync."""
    if all(map(isinstance, lists, repeat(ReadTensors))):
        return extension.are_apart([tensors.number for tensors in lists])  # type: ignore[attr-defined]
    places = [t.data_ptr() for t in chain.from_iterable(lists) if t.numel()]
    return len(set(places)) == len(places)


_NO_LIST: Any = SimpleNamespace(number=0)
_number_of = attrgetter("number")


def call(op: Any, lists: Sequence[Sequence[Tensor]], *others: Any) -> Any:
    """Calls an op of ``torch.ops.ampctx``. If one list is a handle, the others become handles too."""
    try:
        if not any(map(isinstance, lists, repeat(HeldTensors))):
            return op.default(*lists, *others)
        known = [t if isinstance(t, HeldTensors) else HeldTensors(t) if len(t) else _NO_LIST for t in lists]
        return op.held(*map(_number_of, known), *others)
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise


def raise_out_of_memory(error: RuntimeError) -> None:
    """Raises torch.OutOfMemoryError for a kernel's own error: C++ without torch's headers cannot throw it."""
    if str(error).startswith("ampctx: out of memory: "):  # csrc/error.h
        raise torch.OutOfMemoryError(str(error)) from None


def wrote(*lists: Sequence[Tensor]) -> None:
    """Tells autograd that the tensors changed, which a C++ op outside autograd does not do by itself."""
    if not torch.compiler.is_compiling():
        for tensors in lists:
            passes.bump_versions(tensors.tensors if isinstance(tensors, HeldTensors) else tensors)


class ScaleUpdate(NamedTuple):
    """The arguments of ``update_scale`` but its flag, for a call that checks gradients and then updates the scale by
    its own flag."""

    scale: Tensor
    growth_tracker: Tensor
    hysteresis_tracker: Tensor
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    min_scale: float
    max_scale: float


def multi_tensor_scale(
    src: Sequence[Tensor], dst: Sequence[Tensor], found_inf: Tensor, scale: float | Tensor,
    update: ScaleUpdate | None = None,
) -> None:  # fmt: skip
    """Computes ``dst[i] = src[i] * scale``, and sets ``found_inf`` if an element of ``src`` is inf or nan.

    Inf and nan are copied. A finite value that overflows the dtype of ``dst`` does not set ``found_inf``. No host sync.

    Args:
        src, dst: lists of tensors, fp32, fp16 or bf16 (fp64 on the CPU). ``dst`` may be ``src``.
        found_inf: one element, fp32 or int32, on the device of the lists.
        scale: a number or a one-element tensor, fp32 on the device of the lists or on the CPU.
        update: what ``update_scale`` does with ``found_inf`` afterwards, in the same launch. None by default.
    """
    if update is None:
        call(_ops.multi_tensor_scale, (src, dst), found_inf, factor(scale))
    else:
        call(_ops.multi_tensor_scale_and_update, (src, dst), found_inf, factor(scale), *update)
        wrote(update[:3])
    wrote(dst)


def multi_tensor_scale_clipped(
    src: Sequence[Tensor], dst: Sequence[Tensor], found_inf: Tensor, scale: float | Tensor,
    grad_norm: float | Tensor, max_norm: float,
) -> None:  # fmt: skip
    """``multi_tensor_scale`` by ``scale * min(max_norm / (grad_norm + 1e-6), 1)``. The launch forms that factor in
    fp32, as torch's clip does. A negative ``max_norm`` clips nothing. No host sync."""
    op = _ops.multi_tensor_scale_clipped
    call(op, (src, dst), found_inf, factor(scale), factor(grad_norm), max_norm)
    wrote(dst)


def multi_tensor_axpby(
    x: Sequence[Tensor], y: Sequence[Tensor], out: Sequence[Tensor], found_inf: Tensor, a: float | Tensor,
    b: float | Tensor, arg_to_check: int = -1,
) -> None:  # fmt: skip
    """Computes ``out[i] = a * x[i] + b * y[i]``, and sets ``found_inf`` if a checked input has inf or nan.

    No host sync.

    Args:
        x, y, out: lists of tensors, fp32, fp16 or bf16 (fp64 on the CPU). ``out`` may be ``x`` or ``y``.
        found_inf: one element, fp32 or int32, on the device of the lists.
        a, b: numbers or one-element tensors, fp32 on the device of the lists or on the CPU.
        arg_to_check: check ``x`` (0), ``y`` (1) or both (-1).
    """
    call(_ops.multi_tensor_axpby, (x, y, out), found_inf, factor(a), factor(b), arg_to_check)
    wrote(out)


def multi_tensor_l2norm(
    tensors: Sequence[Tensor], found_inf: Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Computes the L2 norm of all tensors together and, with ``per_tensor``, of each.

    Only an inf or nan element sets ``found_inf``. A sum of squares beyond the fp32 range gives an infinite norm without
    the flag. The order of summation is fixed, so two calls agree to the last bit. No host sync.

    Returns:
        The total norm, 0-d, and one norm per tensor (none without ``per_tensor``). Both are fp32 (fp64 for fp64 input).
    """
    return call(_ops.multi_tensor_l2norm, (tensors,), found_inf, per_tensor)


def multi_tensor_unscale_l2norm(
    tensors: Sequence[Tensor], found_inf: Tensor, inv_scale: float | Tensor, per_tensor: bool = False,
    update: ScaleUpdate | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes ``multi_tensor_l2norm`` of ``t * inv_scale`` in one read. Does not change the tensors. No host sync.

    ``update``: as for ``multi_tensor_scale``.
    """
    if update is None:
        return call(_ops.multi_tensor_unscale_l2norm, (tensors,), found_inf, factor(inv_scale), per_tensor)
    return unscale_l2norm_and_update(tensors, found_inf, inv_scale, per_tensor, update)[:2]


def unscale_l2norm_and_update(
    tensors: Sequence[Tensor], found_inf: Tensor, inv_scale: float | Tensor, per_tensor: bool, update: ScaleUpdate
) -> tuple[Tensor, Tensor, Tensor]:
    """``multi_tensor_unscale_l2norm`` with an update, and its total norm again, in memory of its own. No host sync."""
    op = _ops.multi_tensor_unscale_l2norm_and_update
    norms = call(op, (tensors,), found_inf, factor(inv_scale), per_tensor, *update)
    wrote(update[:3])
    return norms


def update_scale(
    scale: Tensor, growth_tracker: Tensor, hysteresis_tracker: Tensor, found_inf: Tensor, *,
    growth_factor: float = 2.0, backoff_factor: float = 0.5, growth_interval: int = 2000, hysteresis: int = 1,
    min_scale: float = 0.0, max_scale: float = float("inf"),
) -> None:  # fmt: skip
    """Updates the loss scale in place, on one-element tensors of one device: fp32 ``scale``, int32 trackers.

    If ``found_inf`` is not 0, the growth tracker restarts and the hysteresis tracker falls by one. Once that is 0, the
    scale becomes ``max(scale * backoff_factor, min_scale)``. Otherwise the hysteresis tracker is refilled, and after
    ``growth_interval`` clean updates in a row the scale becomes ``min(scale * growth_factor, max_scale)``.

    The scale stays between the smallest normal fp32 and the largest fp32. ``hysteresis=1`` is torch.amp's rule; higher
    values follow Megatron's and apex's update_scale_hysteresis. No host sync.

    Raises:
        RuntimeError: ``growth_factor`` < 1, ``backoff_factor`` outside (0, 1], a bound that is nan or beyond fp32, or
            ``hysteresis`` beyond int32.
    """
    state = (scale, growth_tracker, hysteresis_tracker)
    call(
        _ops.update_scale, (), *state, found_inf,
        growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale,
    )  # fmt: skip
    wrote(state)


def block_factors(scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Makes what a ``scale_loss`` block takes of an fp32 ``scale`` of one element, in one launch. No host sync.

    Returns:
        A copy of the scale, 1 / scale, and a flag of 0: three new 0-d fp32 tensors, which later updates of the scale do
        not change.
    """
    return call(_ops.block_factors, (), scale)


def count_skip(
    counts: Tensor, found_inf: Tensor, flag: Tensor, scale: Tensor, slot: int, is_first: bool
) -> None:  # fmt: skip
    """Counts a step that the device may skip, in ``counts``: fp32, contiguous, 2 elements and 2 for each slot.

    With ``is_first`` ``counts[0]`` counts steps whose ``found_inf`` is set, and ``counts[1]`` those in a row. For the
    loss of the slot, ``counts[2 + 2 * slot]`` counts steps whose ``flag`` is set, and the next element is the scale.
    Takes tensors of one device. No host sync.
    """
    call(_ops.count_skip, (), counts, found_inf, flag, scale, slot, is_first)
