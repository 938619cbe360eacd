"""The ops of ``torch.ops.ampctx``: schema, docstring, typed call and fake kernel of each.

An op takes lists of tensors of one device; within a list all tensors have one dtype (fp32, fp16 or bf16, and fp64 on
the CPU), and tensors at the same index agree in number of elements and memory layout (contiguous, or any dense layout
that all share). Tensors may be empty, lists may be empty. Anything else (a tensor whose storage was freed, too) is a
RuntimeError that names list and index, and changes nothing; ``ampctx.foreach`` has the same arithmetic for lists of any
mix. A tensor may be the one at the same index of another list; other overlap of memory is neither served nor looked
for. No op waits for the device.

``found_inf`` is a one-element fp32 or int32 tensor on the device of the lists. An op writes 1 into it when it meets inf
or nan in its input and never clears it. Factors are floats or one-element tensors, on the device of the lists (fp32) or
on the CPU. Arithmetic is fp32, or fp64 where an fp64 tensor takes part, rounded on the store
as torch's ``copy_`` rounds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ampctx._errors import AmpTypeError, AmpValueError
from ampctx.kernels import extension as _extension
from ampctx.kernels import reference as _reference
from ampctx.kernels import reference_steps
from ampctx.kernels.each import all_there, grad_of
from ampctx.kernels.spec import SPECS

NAMESPACE = "ampctx"

_SCHEMAS = (
    "multi_tensor_scale(Tensor[] src, Tensor(a!)[] dst, Tensor(b!) found_inf, Tensor scale) -> ()",
    "multi_tensor_axpby(Tensor[] x, Tensor[] y, Tensor(a!)[] out, Tensor(b!) found_inf, Tensor a, Tensor b,"
    " int arg_to_check) -> ()",
    "multi_tensor_l2norm(Tensor[] tensors, Tensor(a!) found_inf, bool per_tensor) -> (Tensor, Tensor)",
    "multi_tensor_unscale_l2norm(Tensor[] tensors, Tensor(a!) found_inf, Tensor inv_scale, bool per_tensor)"
    " -> (Tensor, Tensor)",
    "update_scale(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor(c!) hysteresis_tracker, Tensor found_inf,"
    " float growth_factor, float backoff_factor, int growth_interval, int hysteresis, float min_scale,"
    " float max_scale) -> ()",
    *(schema for spec in SPECS.values() for schema in spec.schemas),
)

_TENSOR_LIST = re.compile(r"Tensor(\(\w!\))?\[\]")


def _held(schema: str) -> str:
    """The overload of an op that takes numbers of known lists in the place of lists."""
    return re.sub(_TENSOR_LIST, "int", schema.replace("(", ".held(", 1))


# Without a fallback: there is nothing to hold tensors for but the compiled kernels.
_COMPILED_SCHEMAS = (
    "hold_tensors(Tensor[] tensors, int number=0) -> int",
    "fill_storages(Tensor[] tensors) -> bool",
    *map(_held, filter(_TENSOR_LIST.search, _SCHEMAS)),
)


# --- what serves where no compiled kernel does: the reference behind the kernels' own checks -------------------------


def _check(op, found_inf, lists, **factors):
    _reference.check_lists(op, lists)
    _reference.check_scalars(op, found_inf, lists, **factors)


def _scale_checked(src, dst, found_inf, scale):
    _check("multi_tensor_scale", found_inf, {"src": src, "dst": dst}, scale=scale)
    _reference.multi_tensor_scale(src, dst, found_inf, scale)


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


def _update_scale_checked(scale, growth_tracker, hysteresis_tracker, found_inf, *rule):
    _reference.check_scale_state(scale, growth_tracker, hysteresis_tracker, found_inf)
    _reference.check_scale_rule(*rule)
    _reference.update_scale(scale, growth_tracker, hysteresis_tracker, found_inf, *rule)


_FALLBACKS = {
    "multi_tensor_scale": _scale_checked,
    "multi_tensor_axpby": _axpby_checked,
    "multi_tensor_l2norm": _l2norm_checked,
    "multi_tensor_unscale_l2norm": _unscale_l2norm_checked,
    "update_scale": _update_scale_checked,
    **reference_steps.FALLBACKS,
}


# --- fake kernels: shapes only, for torch.compile and FakeTensorMode -------------------------------------------------


def _check_fake(tensors: Sequence[Tensor], scalars: Sequence[Tensor] = ()) -> None:
    """A call with a tensor of the meta device comes here too, where nothing is computed, and must not pass for one
    that was made. ``scalars`` may be on the CPU."""
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


def _fake_norms(tensors, found_inf, *args):
    _check_fake(tensors, [found_inf, *(arg for arg in args if isinstance(arg, Tensor))])
    per_tensor = args[-1]
    like = tensors[0] if tensors else found_inf
    dtype = _reference.compute_dtype(*tensors)
    n = len(tensors) if per_tensor else 0
    return like.new_empty((), dtype=dtype), like.new_empty(n, dtype=dtype)


_FAKES = {
    "multi_tensor_scale": _fake_nothing,
    "multi_tensor_axpby": _fake_nothing,
    "multi_tensor_l2norm": _fake_norms,
    "multi_tensor_unscale_l2norm": _fake_norms,
    "update_scale": _fake_update_scale,
    **dict.fromkeys(reference_steps.FALLBACKS, _fake_nothing),
}


def _routed(name: str, found: Callable[[], _extension.Extension]) -> Callable[..., Any]:
    """The fallback of an op, for calls that do not belong to a kernel of ``found()``."""
    fallback: Any = _FALLBACKS[name]

    def route(*args: Any) -> Any:
        return (found().kernel_for(name, args) or fallback)(*args)

    return route


def define(namespace: str, found: Callable[[], _extension.Extension] | None = None) -> torch.library.Library:
    """Defines every op in ``namespace`` with its fallback and fake kernel. The ops live as long as the returned
    object. ``found()``, where given, has kernels that fallbacks hand calls to."""
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
_ops = torch.ops.ampctx


# --- the calls -------------------------------------------------------------------------------------------------------


def factor(value: float | Tensor) -> Tensor:
    """A factor as the ops take it: a tensor as it is, a number in fp64 on the CPU."""
    return value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)


def _listed(tensors: Iterable[Tensor], name: str) -> list[Tensor]:
    """A list of the caller's own: what was read lies where it lay only while somebody keeps the tensors."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise AmpTypeError(f"{name} is a {type(tensors).__name__}, expected a list of tensors")
    return list(tensors)


def _check_types(tensors: Sequence[Any], name: str) -> None:
    for i, t in enumerate(tensors):
        if not isinstance(t, Tensor):
            raise AmpTypeError(f"{name}[{i}] is a {type(t).__name__}, expected a tensor")


def can_be_held(tensor: Tensor) -> bool:
    """Whether the dispatcher hands the tensor itself to an op, and no copy."""
    # _is_zerotensor is private; nothing public tells of these.
    return not (tensor.is_neg() or tensor._is_zerotensor())


class HeldTensors(Sequence[Tensor]):
    """A list of tensors, not empty and on one device, that the compiled ops keep: a call with it hands over a number.

    For lists that many calls have in common; the ops take it for any of their lists. They look at the tensors
    themselves at every call, as at those of any list.

    Raises:
        AmpTypeError: no list of tensors.
        AmpValueError: an empty list, or a tensor for which the dispatcher would leave a copy with the library, such as
            a view that negates.
        NotImplementedError: no kernel is compiled for the device of the tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = _listed(tensors, "HeldTensors: tensors")
        if not self.tensors:
            raise AmpValueError("HeldTensors: the list is empty, expected tensors of one device")
        _check_types(self.tensors, "HeldTensors: tensors")
        if not all(map(can_be_held, self.tensors)):
            raise AmpValueError("HeldTensors: a tensor is a view that negates, or has no memory: give a clone() of it")
        extension.serves(self.tensors[0].device.type)  # registers what does
        # The owner first: an interrupt leaves no list behind that nobody lets go.
        self.number, self._owner = extension.new_list()
        self.number = _ops.hold_tensors.default(self.tensors, self.number)

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __getitem__(self, index: Any) -> Any:
        return self.tensors[index]


class ReadTensors(HeldTensors):
    """A list as its tensors lie at this moment, for calls that are made at once: by ``read`` and ``read_grads``."""

    def __init__(self, tensors: list[Tensor], number: int, owner: Any) -> None:
        self.tensors, self.number, self._owner = tensors, number, owner

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def are_contiguous(self) -> bool:
        return bool(extension.read_is_contiguous(self.number))


def _is_watched() -> bool:
    """Whether somebody looks at the ops that are called, with the tensors that they are given."""
    # Private; nothing public tells of a TorchDispatchMode.
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def read(tensors: Iterable[Tensor]) -> ReadTensors | None:
    """The tensors without a way through the dispatcher, which costs more than a small tensor's kernel.

    None where they are not plain tensors of one device and dtype that each fill a block of memory, where nothing is
    compiled, or under torch.compile and a TorchDispatchMode: the ops take the list itself then, or say what is wrong
    with it. AmpTypeError for what is no list.
    """
    listed = _listed(tensors, "read: tensors")
    if _is_watched():
        return None
    number, owner = extension.new_list()
    return _as_read(listed, number, owner) if extension.read_tensors(listed, number) else None


def read_grads(params: Iterable[Tensor]) -> tuple[list[Tensor | None], ReadTensors | None]:
    """The ``.grad`` of each parameter, and those that are there as ``read`` has them.

    Raises:
        AmpTypeError: no list of tensors.
        TypeError: the code of a ``.grad`` makes the list longer or shorter.
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
    # Not the list that the caller gets, who may change it.
    present = list(grads) if all_there(grads) else [g for g in grads if g is not None]
    return grads, _as_read(present, number, owner)


def read_along(params: Iterable[Tensor], grads: Iterable[Tensor] | None = None) -> ReadTensors | None:
    """``read`` of the gradients, those in ``.grad`` unless others are given: where each parameter has one that lies in
    memory as the parameter does, and the parameters are of one dtype, too. Raises as ``read_grads``."""
    listed = params if type(params) is list else _listed(params, "read_along: params")
    found: list[Any] = [] if grads is None else _listed(grads, "read_along: grads")
    if _is_watched() or extension.read_grads is None:
        return None
    number, owner = extension.new_list()
    try:
        return _as_read(found, number, owner) if extension.read_grads(listed, found, True, number) else None
    except AttributeError:
        _check_types(listed, "read_along: params")
        raise


def _as_read(tensors: list[Tensor], number: int, owner: Any) -> ReadTensors | None:
    found = ReadTensors(tensors, number, owner)
    device = tensors[0].device.type
    # Where no kernel is compiled for a device, lists go to the fallback, which takes tensors.
    served = "cpu" in extension.backends if device == "cpu" else extension.serves(device)
    return found if served else None


def are_apart(lists: Sequence[Sequence[Tensor]]) -> bool:
    """Whether no two tensors of the lists begin at one place in memory. Empty ones begin nowhere. No host sync."""
    if all(map(isinstance, lists, repeat(ReadTensors))):
        return extension.read_are_apart([tensors.number for tensors in lists])  # type: ignore[attr-defined]
    places = [t.data_ptr() for t in chain.from_iterable(lists) if t.numel()]
    return len(set(places)) == len(places)


def fill_storages(tensors: ReadTensors) -> bool:
    """Whether the storage of each is of its own size, so that no other tensor has a part in it beside the tensor. (One
    that shares all of it may.) No host sync."""
    return _ops.fill_storages.default(tensors.tensors)


_NO_LIST: Any = SimpleNamespace(number=0)
_number_of = attrgetter("number")


def call(op: Any, lists: Sequence[Sequence[Tensor]], *others: Any) -> Any:
    """An op of ``torch.ops.ampctx``, by its overload for lists: where the library knows one, it gets to know all."""
    try:
        if not any(map(isinstance, lists, repeat(HeldTensors))):
            return op.default(*lists, *others)
        known = [t if isinstance(t, HeldTensors) else HeldTensors(t) if len(t) else _NO_LIST for t in lists]
        return op.held(*map(_number_of, known), *others)
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise


def raise_out_of_memory(error: RuntimeError) -> None:
    """Raises torch.OutOfMemoryError if memory is what a kernel lacks. C++ without torch's headers cannot throw it."""
    if str(error).startswith("ampctx: out of memory: "):  # csrc/error.h
        raise torch.OutOfMemoryError(str(error)) from None


def wrote(*lists: Sequence[Tensor]) -> None:
    """Tells autograd that the tensors changed; a C++ op outside autograd does not do so by itself."""
    if not torch.compiler.is_compiling():
        for tensors in lists:
            torch.autograd.graph.increment_version(tensors.tensors if isinstance(tensors, HeldTensors) else tensors)


def multi_tensor_scale(src: Sequence[Tensor], dst: Sequence[Tensor], found_inf: Tensor, scale: float | Tensor) -> None:
    """``dst[i] = src[i] * scale``; ``found_inf`` becomes 1 if an element of ``src`` is inf or nan.

    ``dst`` may be ``src``. Inf and nan are carried over. A finite value that becomes inf because the type of ``dst`` is
    narrower is not flagged. No host sync.
    """
    call(_ops.multi_tensor_scale, (src, dst), found_inf, factor(scale))
    wrote(dst)


def multi_tensor_axpby(
    x: Sequence[Tensor], y: Sequence[Tensor], out: Sequence[Tensor], found_inf: Tensor, a: float | Tensor,
    b: float | Tensor, arg_to_check: int = -1,
) -> None:  # fmt: skip
    """``out[i] = a * x[i] + b * y[i]``, with the finite check on ``x`` (0), ``y`` (1) or both (-1, the default).

    ``out`` may be ``x`` or ``y``. No host sync.
    """
    call(_ops.multi_tensor_axpby, (x, y, out), found_inf, factor(a), factor(b), arg_to_check)
    wrote(out)


def multi_tensor_l2norm(
    tensors: Sequence[Tensor], found_inf: Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """``(sqrt(sum of squares of everything), the same of each tensor)``.

    The first is 0-d, the second has one element per tensor, or none unless ``per_tensor``; both fp32 (fp64 for fp64
    input). ``found_inf`` tells of inf and nan elements alone: a sum of squares that leaves the fp32 range is an
    infinite norm and not an infinite gradient. The order of summation is fixed, so two calls agree to the last bit. No
    host sync.
    """
    return call(_ops.multi_tensor_l2norm, (tensors,), found_inf, per_tensor)


def multi_tensor_unscale_l2norm(
    tensors: Sequence[Tensor], found_inf: Tensor, inv_scale: float | Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """``multi_tensor_l2norm`` of ``t * inv_scale``, in one read; the tensors are left as they are. No host sync."""
    return call(_ops.multi_tensor_unscale_l2norm, (tensors,), found_inf, factor(inv_scale), per_tensor)


def update_scale(
    scale: Tensor, growth_tracker: Tensor, hysteresis_tracker: Tensor, found_inf: Tensor, *,
    growth_factor: float = 2.0, backoff_factor: float = 0.5, growth_interval: int = 2000, hysteresis: int = 1,
    min_scale: float = 0.0, max_scale: float = float("inf"),
) -> None:  # fmt: skip
    """The loss-scale rule, in place on one-element tensors of one device: fp32 ``scale``, int32 trackers.

    With ``found_inf`` != 0: the hysteresis tracker falls by one, and once it is 0 the scale becomes
    ``max(scale * backoff_factor, min_scale)``; the growth tracker restarts. Otherwise the hysteresis tracker is
    refilled, and after ``growth_interval`` clean updates in a row the scale becomes ``min(scale * growth_factor,
    max_scale)``. The scale never becomes 0 (its floor is the smallest normal fp32) nor inf. ``hysteresis=1`` is the
    rule of torch.amp; a higher value that of Megatron's and apex's update_scale_hysteresis. The growth tracker stops at
    the largest int32. No host sync.

    Raises RuntimeError for a rule that would not keep to that: a growth factor below 1, a backoff factor above 1 or not
    above 0, bounds that are nan or beyond fp32, a hysteresis that int32 does not hold.
    """
    state = (scale, growth_tracker, hysteresis_tracker)
    call(
        _ops.update_scale, (), *state, found_inf,
        growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale,
    )  # fmt: skip
    wrote(state)
