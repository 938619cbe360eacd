"""The CPU reads pieces of a large tensor at once. That changes no result, at any length."""

import pytest
import torch

from ampctx import optimizer_ops
from ampctx.kernels import ops

# Around the borders of blocks, of pieces, and of calls that take several blocks.
SIZES = [8191, 8192, 8193, 32_769, 131_072, 131_077, 4 * 131_072 + 2049]
sizes = pytest.mark.parametrize("size", SIZES)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def noise(size, seed):
    return torch.randn(size + 1, generator=torch.Generator().manual_seed(seed))[1:]  # begins within a line of the cache


@sizes
@pytest.mark.parametrize("src", FLOATS)
@pytest.mark.parametrize("dst", FLOATS)
def test_scale_is_elementwise(size, src, dst):
    x, flag = noise(size, 0).to(src), torch.zeros(())
    out = torch.empty(size, dtype=dst)
    ops.multi_tensor_scale([x], [out], flag, 0.3)
    assert torch.equal(out, (x.float() * 0.3).to(dst))
    assert flag == 0


@sizes
def test_an_element_anywhere_raises_the_flag(size):
    for place in (0, size // 4 - 1, size // 4, size // 2, 3 * size // 4, size - 2048, size - 1):
        x = torch.zeros(size)
        x[place] = torch.inf
        flags = [torch.zeros(()) for _ in range(2)]
        ops.multi_tensor_l2norm([x], flags[0])
        ops.multi_tensor_scale([x], [x], flags[1], 0.5)
        assert [flag.item() for flag in flags] == [1, 1], place


@sizes
def test_norm_is_that_of_all_elements(size):
    x, flag = noise(size, 1), torch.zeros(())
    norm, _ = ops.multi_tensor_unscale_l2norm([x], flag, 0.3)
    torch.testing.assert_close(norm.double(), (x.double() * 0.3).norm(), rtol=1e-6, atol=0)


@sizes
def test_a_step_is_elementwise(size):
    """One tensor gets the bits of its parts."""

    def stepped(parts):
        columns = [list(noise(size, seed).abs().split(parts)) for seed in range(4)]
        steps = [torch.zeros(()) for _ in columns[0]]
        options = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
        optimizer_ops.adam(*columns, [], [], steps, torch.zeros(()), 0.5, 0.1, **options)
        return torch.cat(columns[1])

    assert torch.equal(stepped(size), stepped(1000))
