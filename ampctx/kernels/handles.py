"""Lists of tensors that ops take as numbers: compiled kernels keep what they have read of the tensors.

A list goes through torch's dispatcher tensor by tensor, which costs more than a small tensor's kernel. A handle does
not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampctx._errors import AmpTypeError, AmpValueError
from ampctx.kernels import tensor_loops
from ampctx.kernels.definitions import NAMESPACE, define
from ampctx.kernels.extension import Extension, load
from ampctx.kernels.tensor_loops import device_of, grad_of, layout_of

_library = define(NAMESPACE, lambda: extension)
extension: Extension = load(NAMESPACE, define)
tensor_loops.use(extension.passes)
_ops = torch.ops.ampctx


def _listed(tensors: Iterable[Tensor], name: str) -> list[Tensor]:
    """A copy of the list. It keeps the tensors alive, so that addresses read from them stay valid."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise AmpTypeError(f"{name} is a {type(tensors).__name__}, expected a list of tensors")
    return list(tensors)


def _check_types(tensors: Sequence[Any], name: str) -> None:
    for i, t in enumerate(tensors):
        if not isinstance(t, Tensor):
            raise AmpTypeError(f"{name}[{i}] is a {type(t).__name__}, expected a tensor")


# Not derived from Sequence: its isinstance() is a function of Python, which each op call would pay for each list.
if TYPE_CHECKING:
    _Listed = Sequence[Tensor]
else:
    _Listed = object


class HeldTensors(_Listed):
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
        if not tensor_loops.all_resolved(self.tensors):
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

    index, count = Sequence.index, Sequence.count


Sequence.register(HeldTensors)


class ReadTensors(HeldTensors):
    """A handle from ``read``, ``read_grads`` or ``hold_grads``: its tensors are of one dtype and device, and dense.

    One from ``read`` or ``read_grads`` is valid for calls made at once, before any tensor changes.
    """

    def __init__(self, tensors: list[Tensor], number: int, owner: Any, are_contiguous: bool = False) -> None:
        self.tensors, self.number, self._owner, self._are_contiguous = tensors, number, owner, are_contiguous

    @property
    def are_contiguous(self) -> bool:
        return self._are_contiguous or bool(extension.are_contiguous(self.number))

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype


# isinstance() of each list in each op call would cost more.
HANDLES = frozenset((HeldTensors, ReadTensors))


def is_watched() -> bool:
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
    if is_watched():
        return None
    number, owner = extension.new_list()
    return _as_read(listed, number, owner) if extension.read_tensors(listed, number) else None


# From so many tensors on, reading a list takes less time than the dispatcher.
_MANY = 24


def read_each(lists: Sequence[Sequence[Tensor]]) -> list[ReadTensors] | None:
    """Handles for the lists of an op call. None if the dispatcher has to take one of them, or is faster."""
    found: list[ReadTensors] = []
    for i, tensors in enumerate(lists):
        again = next((k for k in range(i) if lists[k] is tensors), None)
        known = found[again] if again is not None else read(tensors) if len(tensors) >= _MANY else None
        if known is None:
            return None
        found.append(known)
    return found


def read_grads(params: Iterable[Tensor]) -> tuple[list[Tensor | None], ReadTensors | None]:
    """The ``.grad`` of each parameter, and a handle for those that are not None, or None as from ``read``.

    Raises:
        AmpTypeError: ``params`` is not a list of tensors.
        TypeError: a ``.grad`` property changed the length of the list.
    """
    listed = params if type(params) is list else _listed(params, "read_grads: params")
    grads: list[Any] = []
    try:
        if is_watched() or extension.read_grads is None:
            return list(map(grad_of, listed)), None
        number, owner = extension.new_list()
        if not (read := extension.read_grads(listed, grads, False, number)):
            return grads, None
    except AttributeError:
        _check_types(listed, "read_grads: params")
        raise
    # A copy, because the caller may change ``grads``.
    present = list(grads) if read == 1 else [g for g in grads if g is not None]
    return grads, _as_read(present, number, owner)


def hold(tensors: Iterable[Tensor]) -> HeldTensors | None:
    """A tensor-list handle, or None as from ``read`` for tensors that an op call would copy or not take.

    The tensors may mix dtypes and devices.
    """
    listed = _listed(tensors, "hold: tensors")
    if is_watched() or not listed or not extension.passes or not tensor_loops.are_plain(listed):
        return None
    served = all(map(extension.serves, {device.type for device in map(device_of, listed)}))
    if not served or set(map(layout_of, listed)) != {torch.strided} or not tensor_loops.all_resolved(listed):
        return None
    return HeldTensors(listed)


def collect_grads(params: list[Tensor]) -> tuple[list[Any], bool]:
    """The ``.grad`` of each parameter, and whether all are there and plain tensors. False also if that is not known."""
    if extension.collect_grads is None:
        return list(map(grad_of, params)), False
    grads: list[Any] = []
    return grads, bool(extension.collect_grads(params, grads))


def hold_grads(grads: list[Tensor], are_plain: bool = False) -> ReadTensors | None:
    """A handle for gradients that stays valid for as long as it is kept. None as from ``read``, and also if a gradient
    is a part of a larger storage. ``are_plain``: it is known that they are plain tensors."""
    if is_watched() or not grads or not extension.passes or not (are_plain or tensor_loops.are_plain(grads)):
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
    held: HeldTensors | None = params if isinstance(params, HeldTensors) else None
    if held is not None:
        listed = held.tensors
    else:
        listed = params if type(params) is list else _listed(params, "read_along: params")
    found: list[Any] = [] if grads is None else _listed(grads, "read_along: grads")
    if is_watched() or extension.read_grads is None:
        return None
    if held is None:
        _check_types(listed, "read_along: params")
        if (held := hold(listed)) is None:
            return None
    number, owner = extension.new_list()
    read = extension.read_along(listed, found, number, held.number)
    return _as_read(found, number, owner, read == 2) if read else None


def read_entries(dicts: list[Any], key: str) -> ReadTensors | None:
    """A handle for ``entries[key]`` of each dict, or None as from ``read``, and where a dict lacks the key."""
    if is_watched() or not extension.passes:
        return None
    number, owner = extension.new_list()
    found: list[Tensor] = []
    return _as_read(found, number, owner) if extension.read_entries(dicts, key, found, number) else None


def lie_alike(grads: HeldTensors, params: HeldTensors) -> bool:
    """Whether each gradient is laid out as its parameter, on the same device, and the parameters are of one dtype.
    Gradients stand for any list that goes along with parameters."""
    return bool(extension.lie_alike(grads.number, params.number))


def _as_read(tensors: list[Tensor], number: int, owner: Any, are_contiguous: bool = False) -> ReadTensors | None:
    found = ReadTensors(tensors, number, owner, are_contiguous)
    # Without compiled kernels for the device the fallback runs, which takes tensors only.
    served = "cpu" in extension.backends if tensors[0].is_cpu else extension.serves(tensors[0].device.type)
    return found if served else None


def are_apart(lists: Sequence[Sequence[Tensor]]) -> bool:
    """Whether no two non-empty tensors of the lists begin at the same address. No host sync."""
    if all(map(isinstance, lists, repeat(ReadTensors))):
        return bool(extension.are_apart([tensors.number for tensors in lists]))  # type: ignore[attr-defined]
    places = [t.data_ptr() for t in chain.from_iterable(lists) if t.numel()]
    return len(set(places)) == len(places)
