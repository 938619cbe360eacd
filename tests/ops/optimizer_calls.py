"""Calls of the element-wise optimizer ops: arguments by name, made up, copied, run on any backend, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from backends import ALL_FLOATS, COMPILED, CUDA, EMULATED, REFERENCE, SHUFFLED, Backend, _factor
from torch import Tensor

from ampctx._reference_optimizers import WRITE_BACKS

LOW = (torch.float16, torch.bfloat16)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The backends whose results are compared with the reference's.
on_kernels = pytest.mark.parametrize(
    "backend",
    [COMPILED, EMULATED, SHUFFLED, pytest.param(CUDA, marks=pytest.mark.cuda)],
    indirect=True,
    ids=lambda b: b.name,
)


@dataclass(frozen=True)
class Optimizer:
    """An op in one of its forms: the lists of its states, its numbers as far as they are not the defaults."""

    name: str
    op: str
    states: tuple[str, ...]
    options: dict[str, Any]


_ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "bias_correction": True, "adam_w_mode": True}
_SGD = {"dampening": 0.1, "nesterov": False, "wd_after_momentum": False}
ADAM = Optimizer("adam", "multi_tensor_adam", ("exp_avgs", "exp_avg_sqs"), _ADAM)
AMSGRAD = Optimizer("amsgrad", "multi_tensor_adam", (*ADAM.states, "max_exp_avg_sqs"), _ADAM)
SGD = Optimizer("sgd", "multi_tensor_sgd", (), {"momentum": 0.0, **_SGD})
MOMENTUM = Optimizer("momentum", "multi_tensor_sgd", ("momentum_buffers",), {"momentum": 0.9, **_SGD})
ADAGRAD = Optimizer("adagrad", "multi_tensor_adagrad", ("sums",), {"eps": 1e-10, "adagrad_w_mode": False})
OPTIMIZERS = (ADAM, AMSGRAD, SGD, MOMENTUM, ADAGRAD)
on_optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
_NEVER_NEGATIVE = ("exp_avg_sqs", "max_exp_avg_sqs", "sums")


@dataclass
class Call:
    """All tensors and numbers of a call. ``run`` changes the tensors, as the op does."""

    op: str
    lists: dict[str, list[Tensor]]
    options: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> list[Tensor]:
        return self.lists[name]

    def clone(self) -> Call:
        """The same on other memory; layouts stay."""
        copied = {name: [t.clone() for t in tensors] for name, tensors in self.lists.items()}
        return Call(self.op, copied, dict(self.options))

    def arguments(self, found_inf: Tensor, inv_scale: Tensor, lr: Tensor) -> tuple:
        """In the order of the schema."""
        given = {**self.lists, **self.options, "found_inf": found_inf, "inv_scale": inv_scale, "lr": lr}
        return tuple(given[name] for name in argument_names(self.op))

    def run(self, backend: Backend, found_inf: Tensor | None = None, inv_scale=0.5, lr=0.01, times: int = 1) -> Call:
        flag = found_inf if found_inf is not None else backend.flag()
        for _ in range(times):
            getattr(backend.ops, self.op).default(*self.arguments(flag, _factor(inv_scale), _factor(lr)))
        return self

    def expected(self, **how) -> Call:
        """What the reference makes of this call, which stays as it is."""
        return self.clone().run(REFERENCE_ON[self["grads"][0].device.type if self["grads"] else "cpu"], **how)

    def tensors(self) -> list[tuple[str, Tensor]]:
        return [(f"{name}[{i}]", t) for name, tensors in self.lists.items() for i, t in enumerate(tensors)]

    def assert_same(self, other: Call) -> None:
        """Every bit of every tensor; where fp64 takes part, to rounding, as torch's fp64 root is not exact."""
        exact = not any(t.dtype == torch.float64 for _, t in self.tensors())
        for (name, a), (_, b) in zip(self.tensors(), other.tensors(), strict=True):
            if exact:
                assert torch.equal(bits(a), bits(b)), f"{name}: {(a.double() - b.double()).abs().max()}"
            else:
                torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


REFERENCE_ON = {
    "cpu": REFERENCE,
    "cuda": Backend("reference-cuda", namespace=REFERENCE.namespace, device="cuda", fp64=True),
}


def bits(t: Tensor) -> Tensor:
    return t.view(INTEGERS[t.element_size()])


def argument_names(op: str) -> list[str]:
    return [argument.name for argument in getattr(torch.ops.ampctx, op).default._schema.arguments]


def make_call(
    backend: Backend,
    optimizer: Optimizer,
    sizes: Sequence,
    *,
    grad: torch.dtype = torch.float32,
    param: torch.dtype = torch.float32,
    state: torch.dtype = torch.float32,
    extra: torch.dtype = torch.float16,
    write_back: str = "nearest",
    counts: Sequence[int] = (0, 1, 5),
    seed: int = 0,
    **options: Any,
) -> Call:
    """A call with random tensors of these sizes; ``counts`` are the steps taken before, in turn."""
    lists = {
        "grads": backend.randn(sizes, grad, seed=1),
        "params": backend.randn(sizes, param, seed=2),
        "max_exp_avg_sqs": [],
        "momentum_buffers": [],
        "steps": [torch.full((), float(counts[i % len(counts)]), device=backend.device) for i in range(len(sizes))],
    }
    for i, name in enumerate(optimizer.states):
        values = backend.randn(sizes, state, seed=3 + i)
        lists[name] = [v.abs() for v in values] if name in _NEVER_NEGATIVE else values
    lists["extras"] = make_extras(backend, sizes, write_back, param, extra)
    numbers = {"weight_decay": 0.1, **optimizer.options, "maximize": False, **options, "seed": seed}
    lists = {name: lists[name] for name in argument_names(optimizer.op) if name in lists}
    return Call(optimizer.op, lists, {**numbers, "write_back": WRITE_BACKS.index(write_back)})


def make_extras(backend: Backend, sizes, write_back: str, param: torch.dtype, extra: torch.dtype):
    if write_back == "copy":
        return backend.randn(sizes, extra, seed=9)
    if write_back == "kahan":
        return [t / 512 for t in backend.randn(sizes, param, seed=9)]
    if write_back == "split":
        generator = torch.Generator().manual_seed(9)
        shapes = [size if isinstance(size, tuple) else (size,) for size in sizes]
        draws = [torch.randint(-(1 << 15), 1 << 15, shape, generator=generator) for shape in shapes]
        return [draw.to(backend.device, torch.int16) for draw in draws]
    return []


def takes(write_back: str, param: torch.dtype) -> bool:
    """Whether params of this type go with the write back."""
    return {"split": param == torch.bfloat16, "kahan": param in LOW}.get(write_back, param in ALL_FLOATS)
