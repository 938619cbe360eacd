"""Calls of the optimizer ops: arguments by name, made up, copied, run on any backend, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from backends import ALL_FLOATS, COMPILED, CUDA, EMULATED, FULL_BLOCKS, REFERENCE, SHUFFLED, Backend, _factor
from torch import Tensor

from ampctx.kernels import codes
from ampctx.kernels.reference_steps import NO_NUMBERS, NO_ROWS, WRITE_BACKS
from ampctx.kernels.spec import SPECS

LOW = (torch.float16, torch.bfloat16)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The backends whose results are compared with the reference's.
on_kernels = pytest.mark.parametrize(
    "backend",
    [COMPILED, EMULATED, SHUFFLED, FULL_BLOCKS, pytest.param(CUDA, marks=pytest.mark.cuda)],
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
LION = Optimizer("lion", "multi_tensor_lion", ("exp_avgs",), {"beta1": 0.9, "beta2": 0.99})
MUON = Optimizer("muon", "multi_tensor_muon", ("momentum_buffers",), {"momentum": 0.95, "nesterov": True})
_LAMB = {**_ADAM, "eps": 1e-6, "max_grad_norm": 1.0, "grad_averaging": True, "use_nvlamb": False}
_LAMB |= {"global_grad_norm": torch.tensor(4.0)}
LAMB = Optimizer("lamb", "multi_tensor_lamb", ADAM.states, _LAMB)
LAMB_WITHOUT_RATIO = Optimizer("lamb-without-ratio", LAMB.op, LAMB.states, {**_LAMB, "weight_decay": 0.0})
ELEMENTWISE = (ADAM, AMSGRAD, SGD, MOMENTUM, ADAGRAD, LION, MUON)
STEP_OPS = (*ELEMENTWISE, LAMB, LAMB_WITHOUT_RATIO)
UNSCALING = tuple(replace(o, op=o.op.replace("tensor_", "tensor_unscaling_")) for o in STEP_OPS)
on_optimizers = pytest.mark.parametrize("optimizer", STEP_OPS, ids=lambda o: o.name)
_NEVER_NEGATIVE = ("exp_avg_sqs", "max_exp_avg_sqs", "sums")


@dataclass
class Call:
    """All tensors and numbers of a call. ``run`` changes the tensors, as the op does."""

    optimizer: Optimizer
    lists: dict[str, list[Tensor]]
    options: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> list[Tensor]:
        return self.lists[name]

    @property
    def op(self) -> str:
        return self.optimizer.op

    @property
    def elementwise(self) -> list[str]:
        """The lists that are in use and agree in sizes and layouts."""
        alone = ("steps", *SCALES)
        return [name for name, tensors in self.lists.items() if tensors and name not in alone]

    def clone(self) -> Call:
        """The same on other memory; layouts stay."""
        copied = {name: [t.clone() for t in tensors] for name, tensors in self.lists.items()}
        return Call(self.optimizer, copied, dict(self.options))

    def arguments(self, found_inf: Tensor, inv_scale: Tensor, lr: Tensor) -> tuple:
        """In the order of the schema."""
        given = {**DEFAULTS, **self.lists, **self.options}
        given |= {"found_inf": found_inf, "inv_scale": inv_scale, "lr": lr}
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
        """Every bit of every tensor."""
        for (name, a), (_, b) in zip(self.tensors(), other.tensors(), strict=True):
            assert torch.equal(bits(a), bits(b)), f"{name}: {(a.double() - b.double()).abs().max()}"

    def assert_agrees(self, expected: Call) -> None:
        """With the reference: every bit where that can be, else to rounding. Norms are sums, in another order there;
        and torch's fp64 root is not exact."""
        if any(t.dtype == torch.float64 for _, t in self.tensors()):
            for (name, a), (_, b) in zip(self.tensors(), expected.tensors(), strict=True):
                torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
        elif self._has_norms():
            assert_nearly_same(self, expected)
        else:
            self.assert_same(expected)

    def _has_norms(self) -> bool:
        is_lamb = self.op.replace("unscaling_", "") == LAMB.op
        return is_lamb and (self.options["use_nvlamb"] or self.options["weight_decay"] != 0)


def assert_nearly_same(call: Call, expected: Call) -> None:
    """For fp32 to 1e-5. In 16 bits a last bit of fp32 decides now and then between two neighbours: nearly all elements
    are the same, the others are neighbours. Of split and kahan weights, the whole is compared."""
    whole = {2: ("split", 1e-5), 3: ("kahan", 1e-4)}.get(call.options["write_back"])
    others, total = 0, 0
    for (name, a), (_, b) in zip(call.tensors(), expected.tensors(), strict=True):
        if whole and name.startswith(("params", "extras")):
            continue
        message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        if a.dtype == torch.float32:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=message)
        elif not a.is_floating_point():
            assert torch.equal(a, b), name
        else:
            torch.testing.assert_close(a, b, rtol=torch.finfo(a.dtype).eps, atol=1e-7, msg=message)
            others += int((bits(a) != bits(b)).sum())
            total += a.numel()
    assert others <= max(2, total // 100), f"{others} of {total} 16-bit elements differ"
    for i in range(len(call["params"]) if whole else 0):
        a, b = (_joined(c["params"][i], c["extras"][i], whole[0]) for c in (call, expected))
        torch.testing.assert_close(a, b, rtol=whole[1], atol=1e-6)


def _joined(p: Tensor, extra: Tensor, write_back: str) -> Tensor:
    extra = extra.reshape(p.shape)
    if write_back == "kahan":
        return p.float() + extra.float()
    return ((bits(p).int() << 16) + extra.int()).view(torch.float32)


# The lists of scales, by the state that they belong to.
CODED = {state.name: state for spec in SPECS.values() for state in spec.coded}
SCALES = {state.scales: [] for state in CODED.values()}
# Those whose states may be codes.
WITH_CODES = tuple(o for o in STEP_OPS if CODED.keys() >= {*o.states} != set())
DEFAULTS = {"skips": [], "grad_norm": _factor(0.0), "max_norm": -1.0, "stochastic_state": False, **SCALES}
DEFAULTS |= {"numbers": NO_NUMBERS, "table": NO_ROWS[0], "rows": NO_ROWS[1]}


def encoded(values: list[Tensor], code: str) -> tuple[list[Tensor], list[Tensor]]:
    """Codes in the layouts of fp32 ``values``, and their scales."""
    found, scales = [], []
    for t in values:
        of_t = torch.empty_like(t, dtype=codes.DTYPES[code])
        flat, of_blocks = codes.encode(codes.in_memory_order(t), of_t.dtype)
        codes.in_memory_order(of_t).copy_(flat)
        found.append(of_t)
        scales.append(of_blocks)
    return found, scales


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
    state: torch.dtype | str = torch.float32,
    extra: torch.dtype = torch.float16,
    write_back: str = "nearest",
    counts: Sequence[int] = (0, 1, 5),
    seed: int = 0,
    **options: Any,
) -> Call:
    """A call with random tensors of these sizes; ``counts`` are the steps taken before, in turn.

    ``state``: "8bit" for codes; "mixed" for codes beside bf16.
    """
    lists = {
        "grads": backend.randn(sizes, grad, seed=1),
        "params": backend.randn(sizes, param, seed=2),
        "max_exp_avg_sqs": [],
        "momentum_buffers": [],
        **SCALES,
        "steps": [torch.full((), float(counts[i % len(counts)]), device=backend.device) for i in range(len(sizes))],
    }
    for i, name in enumerate(optimizer.states):
        dtype = state if isinstance(state, torch.dtype) else torch.float32
        values = backend.randn(sizes, dtype, seed=3 + i)
        lists[name] = [v.abs() for v in values] if name in _NEVER_NEGATIVE else values
        if state == "8bit" or (state == "mixed" and i == 0):
            lists[name], lists[CODED[name].scales] = encoded(lists[name], CODED[name].code)
        elif state == "mixed":
            lists[name] = [t.bfloat16() for t in lists[name]]
    lists["extras"] = make_extras(backend, sizes, write_back, param, extra)
    names = argument_names(optimizer.op)
    decay = {"weight_decay": 0.1} if "weight_decay" in names else {}
    numbers = {**decay, **optimizer.options, "maximize": False, **options, "seed": seed}
    lists = {name: lists[name] for name in names if name in lists}
    return Call(optimizer, lists, {**numbers, "write_back": WRITE_BACKS.index(write_back)})


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
