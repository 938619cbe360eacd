"""The form of apex's multi-tensor functions, told once: how they are called, and what each argument may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, SupportsFloat, TypeAlias

import torch
from torch import Tensor

from ampctx import AmpTypeError, AmpValueError, spi
from ampctx.foreach import FoundInf, PerDevice, move
from ampctx_apex.arguments import check_tensor, positional

TensorLists: TypeAlias = Sequence[Sequence[Tensor]]
Number: TypeAlias = float | Tensor


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
                if spi.is_sharded(t):
                    fix = "pass its to_local(), and join flags and norms over the ranks"
                    raise AmpTypeError(f"{op}: {where} is a DTensor: {fix}")
                check_tensor(op, where, t, dtypes=spi.KERNEL_DTYPES, beside=self._first)
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
        shape = (self.length,)
        return check_tensor(self.op, name, value, dtypes=(torch.float32,), shape=shape, beside=self._first).detach()

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


Kind = Callable[[Call, str, Any], Any]


def _kinds(kind: Kind, names: str) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


def _one_of(*allowed: int) -> Kind:
    def check(call: Call, name: str, value: Any) -> int:
        if value not in allowed:
            raise AmpValueError(f"{call.op}: {name} is {value!r}, expected {' or '.join(map(str, allowed))}")
        return int(value)

    return check


# What becomes of an argument, by its name. The host reads none of factors and tensors, and the other tensors.
_KINDS: dict[str, Kind] = {
    **_kinds(Call.number, "beta1 beta2 eps wd weight_decay decay momentum dampening"),
    **_kinds(Call.factor, "lr scale a b"),
    **_kinds(Call.tensor, "step inv_scale global_grad_norm max_grad_norm max_global_grad_norm"),
    **_kinds(Call.vector, "grad_norms per_tensor_decay per_tensor_param_norm per_tensor_update_norm"),
    **_kinds(
        lambda call, name, value: bool(value),
        "bias_correction grad_averaging nesterov first_run wd_after_momentum use_nvlamb per_tensor",
    ),
    **_kinds(_one_of(0, 1), "mode moment_mode"),
    **_kinds(_one_of(0, 2), "norm_type"),
    **_kinds(_one_of(-1, 0, 1), "arg_to_check"),
}


def multi_tensor(
    lists: str, arguments: str, optional: int = 0, op: str = "", **kinds: Kind
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes ``function(call, name=value, ...)`` a function of ``(chunk_size, noop_flag, tensor_lists, *arguments)``.

    Args:
        lists: the names of the lists, in their order. The caller may omit the last ``optional``.
        arguments: the names of the others, some with a number as default: ``"lr mode=1"``.
        op: the name of the function; that of the decorated one without it.
        kinds: what becomes of some arguments, in place of ``_KINDS``.
    """
    kinds = {**_KINDS, **kinds}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name_of = op or function.__name__

        def body(chunk_size: Any, noop_flag: Any, tensor_lists: Any, **given: Any) -> Any:
            call = Call(name_of, noop_flag, tensor_lists, lists.split(), optional)
            return function(call, **{n: kinds[n](call, n, v) if n in kinds else v for n, v in given.items()})

        served = positional(name_of, f"chunk_size noop_flag tensor_lists {arguments}", body)
        served.__doc__, served.__module__ = function.__doc__, function.__module__
        return served

    return decorate


def run_op(
    op: str, call: Call, lists: Mapping[str, Sequence[Tensor]], taken: Number, found_inf: Tensor, **arguments: Any
) -> None:
    """One op call for each combination of dtypes and layouts in ``lists``, which are named as the op names them.

    Args:
        taken: the number of steps before this one.
        found_inf: nothing happens where it is not 0.
        arguments: the op's others.
    """
    steps = call.tensor("step", taken).repeat(call.length).unbind()
    spi.run_op(op, lists, {"steps": steps}, {"found_inf": found_inf, **arguments})
