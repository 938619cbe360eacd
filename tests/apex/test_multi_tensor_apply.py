"""apex's applier, and the functions of amp_C that scale and take norms."""

import math

import apex_on_ranks  # noqa: F401
import pytest
import torch
from amp_C import (
    multi_tensor_axpby,
    multi_tensor_l2norm,
    multi_tensor_l2norm_mp,
    multi_tensor_scale,
    multi_tensor_unscale_l2norm,
)
from apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from rank_processes import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import ampctx
from ampctx import AmpTypeError, AmpValueError

CHUNKS = [1, 333, 2048 * 32]


def tensors(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator).to(dtype) for n in (1, 0, 333, 334, 70000)]


@pytest.fixture(params=[torch.int32, torch.float32], ids=["int32", "fp32"])
def flag(request):
    return torch.zeros(1, dtype=request.param)


@pytest.fixture(params=CHUNKS)
def applier(request):
    return MultiTensorApply(request.param)


def test_applier_hands_on_chunk_size_flag_lists_and_arguments():
    applier = MultiTensorApply(333)
    assert applier(lambda *args: args, "flag", [["a"], ["b"]], 1, 2) == (333, "flag", [["a"], ["b"]], 1, 2)


def test_default_applier_is_that_of_apex():
    assert multi_tensor_applier.chunk_size == 65536
    assert MultiTensorApply.available
    assert multi_tensor_applier.check_avail() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scale(applier, flag, dtype):
    src, dst = tensors(dtype=dtype), [torch.empty_like(t) for t in tensors()]
    assert applier(multi_tensor_scale, flag, [src, dst], 0.5) is None
    for s, d in zip(src, dst, strict=True):
        assert torch.equal(d, s.float() * 0.5)
    assert flag.item() == 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_scale_raises_the_flag(applier, flag, bad):
    src = tensors()
    src[3][-1] = bad
    applier(multi_tensor_scale, flag, [src, src], 1.0)
    assert flag.tolist() == [1]


@pytest.mark.parametrize(("arg_to_check", "raised"), [(-1, 1), (0, 0), (1, 1)])
def test_axpby(applier, flag, arg_to_check, raised):
    x, y = tensors(0), tensors(1)
    y[4][0] = math.inf
    out = [torch.empty_like(t) for t in x]
    applier(multi_tensor_axpby, flag, [x, y, out], 2.0, -1.0, arg_to_check)
    torch.testing.assert_close(out, [2 * a - b for a, b in zip(x, y, strict=True)])
    assert flag.tolist() == [raised]


NORMS = [(multi_tensor_l2norm, 1.0), (multi_tensor_l2norm_mp, 1.0), (multi_tensor_unscale_l2norm, 0.25)]


@pytest.mark.parametrize("per_tensor", [True, False, None])
@pytest.mark.parametrize(("norm", "factor"), NORMS)
def test_norms_have_the_shapes_of_apex(applier, flag, norm, factor, per_tensor):
    given = tensors()
    total, each = applier(norm, flag, [given], *([torch.tensor([factor])] if factor < 1 else []), per_tensor)
    assert total.shape == (1,)
    assert each.shape == ((5,) if per_tensor else (0,))
    torch.testing.assert_close(total, torch.cat(given).norm().reshape(1) * factor, rtol=1e-4, atol=0)
    if per_tensor:
        torch.testing.assert_close(each, torch.stack([t.norm() for t in given]) * factor, rtol=1e-4, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(given, tensors(), strict=True))
    assert flag.item() == 0


def test_norms_leave_per_tensor_out_by_default_and_raise_the_flag(flag):
    given = [torch.tensor([math.nan])]
    assert multi_tensor_l2norm(65536, flag, [given])[1].numel() == 0
    assert flag.tolist() == [1]
    assert multi_tensor_unscale_l2norm(65536, flag, [given], 1.0)[1].numel() == 0


@pytest.mark.parametrize(
    ("chunk_size", "kind", "message"),
    [
        (0, AmpValueError, "chunk_size is 0, expected an int > 0"),
        (-1, AmpValueError, "chunk_size is -1"),
        (2.0, AmpTypeError, "chunk_size must be an int, got float"),
        (True, AmpTypeError, "chunk_size must be an int, got bool"),
    ],
)
def test_chunk_size_errors(chunk_size, kind, message):
    with pytest.raises(kind, match=message):
        MultiTensorApply(chunk_size)


def test_lists_of_mixed_types_and_memory_formats_go_by_index():
    image = torch.randn(2, 3, 4, 4)
    src = [
        torch.randn(5),
        torch.randn(4).half(),
        image.to(memory_format=torch.channels_last),
        torch.randn(6, 4)[:, ::2],
    ]
    dst = [torch.zeros(5), torch.zeros(2, 2), torch.zeros_like(image), torch.zeros(6, 2).bfloat16()]
    flag = torch.zeros(2, dtype=torch.int32)
    multi_tensor_applier(multi_tensor_scale, flag, [src, dst], torch.tensor(0.5))
    for s, d in zip(src, dst, strict=True):
        assert torch.equal(d, (s * 0.5).reshape(d.shape).to(d.dtype))
    total, each = multi_tensor_applier(multi_tensor_l2norm, flag, [src], True)
    torch.testing.assert_close(each, torch.stack([t.float().norm() for t in src]))
    torch.testing.assert_close(total, each.norm().reshape(1))
    assert flag.tolist() == [0, 0]


def test_a_number_may_be_a_tensor_of_any_type():
    for factor in (torch.tensor(2), torch.tensor([2.0]).half(), torch.tensor(2.0).double(), 2):
        dst = [torch.zeros(3)]
        multi_tensor_applier(multi_tensor_scale, torch.zeros(1), [[torch.ones(3)], dst], factor)
        assert dst[0].tolist() == [2.0] * 3


@on_ranks(1)
def test_parts_of_a_tensor_are_refused():
    part = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)))
    with pytest.raises(AmpTypeError, match=r"multi_tensor_l2norm: tensors\[0\] is a DTensor: pass its to_local\(\)"):
        multi_tensor_applier(multi_tensor_l2norm, torch.zeros(1), [[part]])


@pytest.mark.parametrize("name", ["MultiTensorApply", "multi_tensor_applier", "multi_tensor_apply"])
def test_ampctx_itself_says_where_the_calling_form_is(name):
    with pytest.raises(ImportError, match=rf"ampctx\.{name} is apex\.multi_tensor_apply .*ampctx\.ops"):
        exec(f"from ampctx import {name}", {})
    assert name not in ampctx.__all__
