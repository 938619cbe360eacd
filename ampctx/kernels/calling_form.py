"""Checks the arguments of apex's multi_tensor calls (flag, lists, numbers) and prepares them for the ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, SupportsFloat, TypeAlias

import torch
from torch import Tensor

from ampctx._errors import AmpTypeError, AmpValueError
from ampctx.kernels import foreach
from ampctx.kernels.foreach import FoundInf, PerDevice, move
from ampctx.kernels.reference import KERNEL_DTYPES
from ampctx.kernels.sharding import is_sharded

TensorLists: TypeAlias = Sequence[Sequence[Tensor]]
Number: TypeAlias = float | Tensor


def check_tensor(
    op: str,
    name: str,
    value: Any,
    *,
    dtypes: Sequence[torch.dtype] = (),
    shape: Sequence[int] | None = None,
    beside: tuple[str, Tensor] | None = None,
) -> Tensor:
    """Returns ``value``: a strided tensor of one of the ``dtypes``, of the shape, and on the device of ``beside``, a
    tensor with its name, where these are given."""
    where = f"{op}: {name}"
    if not isinstance(value, Tensor):
        raise AmpTypeError(f"{where} must be a tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise AmpTypeError(f"{where} is not a strided tensor: pass {name}.to_dense()")
    if dtypes and value.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise AmpTypeError(f"{where} has dtype {value.dtype}, expected {names}")
    if shape is not None and tuple(value.shape) != tuple(shape):
        raise AmpValueError(f"{where} has shape {tuple(value.shape)}, expected {tuple(shape)}")
    if beside is not None and value.device != beside[1].device:
        raise AmpValueError(f"{where} is on {value.device}, and {beside[0]} is on {beside[1].device}")
    return value


class Call:
    """The checked arguments of one call: ``lists`` by name, all on ``device`` (the flag's if the lists are empty).

    Dtypes and memory layouts may differ. The caller may omit the last ``optional`` lists.
    """

    def __init__(
        self, op: str, noop_flag: Tensor, tensor_lists: TensorLists, names: Sequence[str], optional: int = 0
    ) -> None:
        self.op = op
        check_tensor(op, "noop_flag", noop_flag, dtypes=(torch.int32, torch.float32))
        if noop_flag.numel() == 0:
            raise AmpValueError(f"{op}: noop_flag has no element, expected one or more")
        # Its first element, as a view.
        self._flag = noop_flag[(0,) * noop_flag.dim()]
        self.lists = dict(zip(names, self._split(tensor_lists, names, optional), strict=False))
        self.length = len(self.lists[names[0]])
        self._first = (f"{names[0]}[0]", self.lists[names[0]][0]) if self.length else ("noop_flag", self._flag)
        for name, tensors in self.lists.items():
            if len(tensors) != self.length:
                raise AmpValueError(f"{op}: {name} has {len(tensors)} tensors, {names[0]} has {self.length}")
            for i, (t, like) in enumerate(zip(tensors, self.lists[names[0]], strict=True)):
                where = f"{name}[{i}]"
                if is_sharded(t):
                    fix = "pass its to_local(), and join flags and norms over the ranks"
                    raise AmpTypeError(f"{op}: {where} is a DTensor: {fix}")
                check_tensor(op, where, t, dtypes=KERNEL_DTYPES, beside=self._first)
                if t.numel() != like.numel():
                    raise AmpValueError(f"{op}: {where} has {t.numel()} elements, {names[0]}[{i}] has {like.numel()}")
        self.device = self._first[1].device

    def _split(self, tensor_lists: TensorLists, names: Sequence[str], optional: int) -> list[list[Tensor]]:
        expected = f"{self.op}: tensor_lists must be [{', '.join(names)}], each a list of tensors; got"
        if isinstance(tensor_lists, Tensor) or any(isinstance(tensors, Tensor) for tensors in tensor_lists):
            raise AmpTypeError(f"{expected} a tensor")
        try:
            lists = [list(tensors) for tensors in tensor_lists]
        except TypeError:
            kinds = ", ".join(type(tensors).__name__ for tensors in tensor_lists)
            raise AmpTypeError(f"{expected} [{kinds}]") from None
        if not len(names) - optional <= len(lists) <= len(names):
            counts = " or ".join(str(len(names) - missing) for missing in range(optional, -1, -1))
            raise AmpValueError(
                f"{self.op}: tensor_lists has {len(lists)} lists, expected {counts}: {', '.join(names)}"
            )
        return lists

    def __getitem__(self, name: str) -> list[Tensor]:
        return self.lists[name]

    @contextmanager
    def flag(self) -> Iterator[Tensor]:
        """The flag as a 0-d tensor on the device of the lists; copied back to the caller's at the end."""
        if self._flag.device == self.device:
            yield self._flag
            return
        here = move(self._flag, self.device)
        yield here
        self._flag.copy_(move(here, self._flag.device))

    def no_flag(self) -> Tensor:
        """A cleared flag, for ops that run even if the caller's flag is set."""
        return torch.zeros((), dtype=torch.float32, device=self.device)

    def number(self, name: str, value: Number) -> float:
        """``value`` as a float. Host sync for a tensor on a GPU."""
        self._check_number(name, value)
        return float(value)

    def factor(self, name: str, value: Number) -> Number:
        """``value`` as a float or a 0-d tensor, as the ops take factors. No host sync."""
        self._check_number(name, value)
        if not isinstance(value, Tensor):
            return float(value)
        value = value.detach().reshape(())
        if value.device.type == "cpu":
            return value if value.dtype == torch.float64 else value.float()
        return move(value, self.device).float()

    def tensor(self, name: str, value: Number) -> Tensor:
        """``value`` as a 0-d fp32 tensor on the device of the lists. No host sync."""
        value = self.factor(name, value)
        if isinstance(value, Tensor):
            return move(value, self.device).float()
        return torch.full((), value, dtype=torch.float32, device=self.device)

    def vector(self, name: str, value: Tensor) -> Tensor:
        """Checks that ``value`` is an fp32 tensor with one element per index, on the device of the lists."""
        shape, beside = (self.length,), self._first
        return check_tensor(self.op, name, value, dtypes=(torch.float32,), shape=shape, beside=beside).detach()

    def one_of(self, name: str, value: int, allowed: Sequence[int]) -> int:
        if value not in allowed:
            raise AmpValueError(f"{self.op}: {name} is {value!r}, expected {' or '.join(map(str, allowed))}")
        return int(value)

    def _check_number(self, name: str, value: Any) -> None:
        if not isinstance(value, SupportsFloat):
            raise AmpTypeError(f"{self.op}: {name} must be a number or a tensor, got {type(value).__name__}")
        if isinstance(value, Tensor) and value.numel() != 1:
            raise AmpValueError(f"{self.op}: {name} has {value.numel()} elements, expected 1")


def found_in(flag: Tensor) -> FoundInf:
    """Wraps a 0-d ``flag`` for the functions of ``ampctx.foreach``."""
    found = FoundInf()
    found.per_device[flag.device] = flag
    return found


def foreach_factor(value: Number) -> float | PerDevice:
    """Wraps a factor for the functions of ``ampctx.foreach``."""
    return PerDevice(value) if isinstance(value, Tensor) else value


@torch.no_grad()
def norms(
    op: str, noop_flag: Tensor, tensor_lists: TensorLists, inv_scale: Number, per_tensor: bool | None
) -> tuple[Tensor, Tensor]:
    """The norm of ``tensor_lists = [tensors]`` times ``inv_scale``, shape ``[1]``; and each tensor's, or none."""
    call = Call(op, noop_flag, tensor_lists, ("tensors",))
    factor = foreach_factor(call.factor("inv_scale", inv_scale))
    if not call.length:
        total = torch.zeros(1, dtype=torch.float32, device=call.device)
        return total, total.new_empty(0)
    with call.flag() as flag:
        if per_tensor:
            total, each = foreach.unscale_l2norms(call["tensors"], found_in(flag), factor)
        else:
            total = foreach.unscale_l2norm(call["tensors"], found_in(flag), factor)
            each = total.new_empty(0)
    return total.reshape(1), each
