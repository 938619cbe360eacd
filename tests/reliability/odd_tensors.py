"""Tensors that a kernel must not take for ordinary ones, by name: for the fuzzer and the tests of odd inputs."""

from __future__ import annotations

import torch
from torch import Tensor


def _inference(size: int) -> Tensor:
    with torch.inference_mode():
        return torch.ones(size)


def _freed(size: int, offset: int = 0) -> Tensor:
    """What FSDP leaves of a parameter between its uses."""
    t = torch.ones(size + offset)[offset:]
    t.untyped_storage().resize_(0)
    return t


def _shrunk(size: int, offset: int = 0) -> Tensor:
    """The last element is behind the end of the storage."""
    t = torch.ones(size + offset)[offset:]
    t.untyped_storage().resize_(4 * max(size + offset - 1, 0))
    return t


class Subclass(Tensor):
    pass


# Name to maker; each takes a number of elements, and gives as many where it can.
ODD = {
    "int8": lambda n: torch.ones(n, dtype=torch.int8),
    "int16": lambda n: torch.ones(n, dtype=torch.int16),
    "int32": lambda n: torch.ones(n, dtype=torch.int32),
    "int64": lambda n: torch.ones(n, dtype=torch.int64),
    "bool": lambda n: torch.ones(n, dtype=torch.bool),
    "fp16": lambda n: torch.ones(n, dtype=torch.float16),
    "bf16": lambda n: torch.ones(n, dtype=torch.bfloat16),
    "fp64": lambda n: torch.ones(n, dtype=torch.float64),
    "float8": lambda n: torch.ones(n).to(torch.float8_e4m3fn),
    "complex64": lambda n: torch.ones(n, dtype=torch.complex64),
    "conjugated": lambda n: torch.ones(n, dtype=torch.complex64).conj(),
    "negative-view": lambda n: torch.ones(n, dtype=torch.complex64).conj().imag,
    "zero-tensor": lambda n: torch._efficientzerotensor(n),
    "quantized": lambda n: torch.quantize_per_tensor(torch.ones(n), 1.0, 0, torch.qint8),
    "meta": lambda n: torch.ones(n, device="meta"),
    "huge-meta": lambda n: torch.ones(1 << 40, device="meta"),
    "sparse": lambda n: torch.ones(n).to_sparse(),
    "sparse-uncoalesced": lambda n: torch.sparse_coo_tensor([[0, 0]], [1.0, 1.0], (max(n, 1),), check_invariants=False),
    "csr": lambda n: torch.ones(1, max(n, 1)).to_sparse_csr(),
    "mkldnn": lambda n: torch.ones(max(n, 1)).to_mkldnn(),
    "nested": lambda n: torch.nested.nested_tensor([torch.ones(n), torch.ones(1)], layout=torch.jagged),
    "freed": _freed,
    "freed-view": lambda n: _freed(n, 3),
    "shrunk": _shrunk,
    "shrunk-view": lambda n: _shrunk(n, 1),
    "expanded": lambda n: torch.ones(1).expand(n),
    "expanded-huge": lambda n: torch.ones(1).expand(1 << 40),
    "gaps": lambda n: torch.ones(2 * n)[::2],
    "flipped-strides": lambda n: torch.ones(2, n).t(),
    "transposed": lambda n: torch.ones(n, 1).t(),
    "overlapping-windows": lambda n: torch.ones(n + 1).as_strided((max(n // 2, 1), 2), (1, 1) if n > 1 else (1, 0)),
    "0-d": lambda n: torch.ones(()),
    "empty": lambda n: torch.ones(0),
    "empty-of-many-dimensions": lambda n: torch.ones(3, 0, 1 << 20),
    "too-many": lambda n: torch.ones(n + 1),
    "64-dimensions": lambda n: torch.ones((n,) + (1,) * 63),
    "requires-grad": lambda n: torch.ones(n, requires_grad=True),
    "not-a-leaf": lambda n: torch.ones(n, requires_grad=True) * 2,
    "parameter": lambda n: torch.nn.Parameter(torch.ones(n)),
    "lazy-parameter": lambda n: torch.nn.UninitializedParameter(),
    "subclass": lambda n: torch.ones(n).as_subclass(Subclass),
    "inference": _inference,
}  # fmt: skip

WRONG_OBJECTS = (
    None, 3, -1, 2.5, float("nan"), float("inf"), 1 << 62, 1 << 70, -(1 << 63), True, "x", b"", {}, (), [], [None],
    [[]], [3], [1.5], ["x"], 1j, object, torch.float32, torch.device("cpu"), range(3), slice(None),
)  # fmt: skip


def make_odd(name: str, size: int) -> Tensor:
    return ODD[name](size)
