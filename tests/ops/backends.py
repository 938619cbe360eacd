"""The backends that every op test runs on, and the tensors they run on."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ampctx.kernels.definitions import SCHEMAS
from ampctx.kernels.spec import SPECS

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ALL_FLOATS = (*FLOATS, torch.float64)
NON_FINITE = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
# The CPU cuts tensors into blocks of 2048 elements, the emulated GPU gives blocks multiples of 512.
CHUNKS = (512, 2048)

SIZES = {
    "no-tensors": [],
    "one-empty": [0],
    "one-element": [1],
    "odd": [1, 3, 7, 9, 33, 1001],
    **{f"chunk{off:+d}" if off else "chunk": [chunk + off for chunk in CHUNKS] for off in (-1, 0, 1)},
    "empties-anywhere": [0, 5, 0, 0, 2049, 1, 0],
    "many-chunks": [3 * 2048 + 5, 1, 17, 5000],
    "20k-tiny": [1 + i % 7 for i in range(20_000)],
    "one-large": [1 << 20],
}


def short(dtype: torch.dtype) -> str:
    """fp16 for torch.float16, and so on: for test ids."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def combinations(dtypes: Sequence[torch.dtype], lists: int) -> list[tuple[torch.dtype, ...]]:
    return list(itertools.product(dtypes, repeat=lists))


def combination_id(dtypes: Sequence[torch.dtype]) -> str:
    return "->".join(map(short, dtypes))


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


RULE = {
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "hysteresis": 1,
    "min_scale": 0.0,
    "max_scale": float("inf"),
}


@dataclass(frozen=True)
class Backend:
    """Kernels behind one namespace of ops, for tensors on one device."""

    name: str
    namespace: str = "ampctx"
    device: str = "cpu"
    fp64: bool = False

    @property
    def ops(self):
        return getattr(torch.ops, self.namespace)

    def serves(self, *dtypes: torch.dtype) -> bool:
        return self.fp64 or torch.float64 not in dtypes

    def randn(self, sizes: Sequence, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
        """Tensors of the given sizes or shapes, cut out of one, so that their alignment varies."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [size if isinstance(size, tuple) else (size,) for size in sizes]
        counts = [torch.Size(shape).numel() for shape in shapes]
        values = torch.randn(sum(counts), generator=generator).to(self.device, dtype)
        return [part.view(shape) for part, shape in zip(values.split(counts), shapes, strict=True)]

    def flag(self, value: float = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((), value, dtype=dtype, device=self.device)

    def scale(self, src, dst, found_inf, factor) -> None:
        self.ops.multi_tensor_scale.default(src, dst, found_inf, _factor(factor))

    def axpby(self, x, y, out, found_inf, a, b, arg_to_check=-1) -> None:
        self.ops.multi_tensor_axpby.default(x, y, out, found_inf, _factor(a), _factor(b), arg_to_check)

    def l2norm(self, tensors, found_inf, inv_scale=None, per_tensor=True) -> tuple[Tensor, Tensor]:
        if inv_scale is None:
            return self.ops.multi_tensor_l2norm.default(tensors, found_inf, per_tensor)
        return self.ops.multi_tensor_unscale_l2norm.default(tensors, found_inf, _factor(inv_scale), per_tensor)

    def update_scale(self, scale, growth, hysteresis_tracker, found_inf, **rule) -> None:
        self.ops.update_scale.default(scale, growth, hysteresis_tracker, found_inf, *{**RULE, **rule}.values())

    def scale_and_update(self, src, dst, found_inf, factor, state, **rule) -> None:
        """``state``: the loss scale and its two trackers."""
        op = self.ops.multi_tensor_scale_and_update.default
        op(src, dst, found_inf, _factor(factor), *state, *{**RULE, **rule}.values())

    def scale_clipped(self, src, dst, found_inf, factor, grad_norm, max_norm) -> None:
        op = self.ops.multi_tensor_scale_clipped.default
        op(src, dst, found_inf, _factor(factor), _factor(grad_norm), max_norm)

    def l2norm_and_update(self, tensors, found_inf, factor, state, per_tensor=True, **rule) -> tuple[Tensor, ...]:
        """The norm, that of each tensor, and the first again."""
        op = self.ops.multi_tensor_unscale_l2norm_and_update.default
        return op(tensors, found_inf, _factor(factor), per_tensor, *state, *{**RULE, **rule}.values())

    def count_skip(self, counts, found_inf, flag, scale, slot, is_first) -> None:
        self.ops.count_skip.default(counts, found_inf, flag, scale, slot, is_first)

    def block_factors(self, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.ops.block_factors.default(scale)


def serves_or_refuses(backend: Backend, call, *dtypes: torch.dtype) -> bool:
    """Makes the call. False where the backend has no kernels for fp64: it then refuses, and says so."""
    if backend.serves(*dtypes):
        call()
        return True
    with pytest.raises(RuntimeError, match="has dtype torch.float64, expected float32, float16(,| or) bfloat16"):
        call()
    return False


def with_threads(call, counts=(1, 2)) -> list:
    """What a call gives with each number of threads."""
    threads, found = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            found.append(call())
    finally:
        torch.set_num_threads(threads)
    return found


def _factor(value: float | Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)


COMPILED = Backend("cpu", fp64=True)
REFERENCE = Backend("reference", namespace="ampctx_reference", fp64=True)
EMULATED = Backend("emulated", namespace="ampctx_emulated")
SHUFFLED = Backend("emulated-shuffled", namespace="ampctx_emulated")
FULL_BLOCKS = Backend("emulated-256", namespace="ampctx_emulated_256")  # threads to a block, as on a GPU
CUDA = Backend("cuda", device="cuda")


_STEPS = {op for spec in SPECS.values() for op in spec.ops}
PLAIN_OPS = [name for schema in SCHEMAS if (name := schema.partition("(")[0]) not in _STEPS]


def right_call(backend: Backend, op: str, sizes: Sequence = (2,)) -> dict:
    """The arguments by name of an op that takes no step, with lists of tensors of these sizes."""
    numbers = {**RULE, "max_norm": 0.25, "arg_to_check": -1, "per_tensor": True, "slot": 1, "is_first": True}
    given: dict = {}
    for i, argument in enumerate(getattr(backend.ops, op).default._schema.arguments):
        name, kind = argument.name, str(argument.type)
        if kind == "List[Tensor]":
            given[name] = backend.randn(sizes, seed=i)
        elif kind == "Tensor":
            value, shape = 0.0 if name in ("found_inf", "flag") else 0.5, (6,) if name == "counts" else ()
            dtype = torch.int32 if name.endswith("_tracker") else torch.float32
            given[name] = torch.full(shape, value, device=backend.device).to(dtype)
        else:
            given[name] = numbers[name]
    return given


def refused(backend: Backend, op: str, message: str):
    """The kernels say exactly this; the fallback names the same op, argument and index, and has words of its own."""
    if backend is not REFERENCE:
        return pytest.raises(RuntimeError, match=re.escape(f"{op}: {message}"))
    argument = re.escape(message.split()[0]).replace("found_inf", "(found_inf|flag)")  # a kernel calls both found_inf
    return pytest.raises(RuntimeError, match=f"{op}: {argument} ")
