"""Tensors, flags and devices for the tests of apex's extensions."""

import pytest
import torch

FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

SIZES = {
    "one": [1],
    "odd": [1, 3, 7, 1001],
    "empty-last": [33, 5, 0],
    "empties": [0, 5, 0, 0, 2049, 1],
    "many": [1 + i % 7 for i in range(120)],
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def randn(sizes, dtype=torch.float32, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    shapes = [size if isinstance(size, tuple) else (size,) for size in sizes]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def copies(lists):
    return [[t.clone() for t in tensors] for tensors in lists]


def wide(lists):
    """The lists in fp64, index by index: an independent computation starts from these."""
    return list(zip(*([t.double() for t in tensors] for tensors in lists), strict=True))


def flag(value=0, dtype=torch.int32, device="cpu"):
    return torch.tensor([value], dtype=dtype, device=device)


def norm_tensors(count, dtype, parameter_dtype, rows=(5,)):
    """The input of a norm over (3, 4), so many parameters, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((*rows, 3, 4), generator=generator) + 1.0
    parameters = [(torch.randn(3, 4, generator=generator) + 1.5).to(parameter_dtype) for _ in range(count)]
    return x.to(dtype), parameters, torch.randn(x.shape, generator=generator).to(dtype)


def norm_formula(centers, eps, x, weight=None, bias=None):
    """Of a layer norm, which centers, or of an RMS norm."""
    dims = (-2, -1)
    x = x - x.mean(dims, keepdim=True) if centers else x
    x = x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def assert_lists(got, want):
    """``want`` in fp64, rounded to the type of what was got, within the tolerance of that type."""
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(g, w.to(g.dtype), msg=lambda text, i=i: f"index {i}: {text}")


def assert_same(lists, before):
    for tensors, old in zip(lists, before, strict=True):
        for t, o in zip(tensors, old, strict=True):
            assert torch.equal(t, o)
