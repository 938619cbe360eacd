"""The ops over lists of any mix, and how they are bucketed."""

import pytest
import torch

from ampctx import foreach
from ampctx.foreach import FoundInf, PerDevice
from ampctx.kernels import foreach as kernels
from ampctx.kernels import ops
from ampctx.kernels.grouping import buckets

CHANNELS_LAST = torch.channels_last


def mixed():
    """One tensor of every kind that gradients come in."""
    torch.manual_seed(0)
    return {
        "fp32": torch.randn(5),
        "fp16": torch.randn(5).half(),
        "bf16": torch.randn(3, 2).bfloat16(),
        "fp64": torch.randn(4).double(),
        "channels-last": torch.randn(2, 3, 4, 4).to(memory_format=CHANNELS_LAST),
        "empty": torch.empty(0),
        "strided": torch.randn(6, 4)[:, ::2],
        "transposed": torch.randn(6, 4).t(),
        "0-d": torch.randn(()),
        "complex": torch.randn(4, dtype=torch.complex64),
    }


def test_alike_tensors_share_a_bucket_whatever_their_shapes():
    src = [torch.randn(2, 3), torch.randn(7), torch.empty(0)]
    dst = [t.half() for t in src]
    (bucket,) = buckets(src, dst)
    assert bucket.fused
    assert bucket.lists == [src, dst]


def test_buckets_by_dtype_device_and_layout():
    a, b, c = torch.randn(3), torch.randn(4).half(), torch.randn(2, 3, 4, 4)
    last = c.to(memory_format=CHANNELS_LAST)
    meta = torch.randn(3, device="meta")
    found = buckets([a, b, c, last, meta, a], [a, b, last, last, meta, a])
    assert [(x.device.type, x.fused, len(x.lists[0])) for x in found] == [
        ("cpu", True, 3),
        ("cpu", True, 1),
        ("cpu", False, 1),
        ("meta", True, 1),
    ]
    assert buckets([], []) == []


KINDS = [torch.zeros(3, dtype=d) for d in (torch.complex64, torch.int32)]
KINDS += [torch.zeros(3).to(torch.float8_e4m3fn), torch.eye(3).to_sparse()]


@pytest.mark.parametrize("tensor", KINDS, ids=lambda t: f"{t.layout}-{t.dtype}")
def test_tensors_without_a_kernel(tensor):
    assert [b.fused for b in buckets([tensor], [tensor])] == [False]
    if tensor.dtype == torch.int32:  # which dtypes a kernel takes is the caller's to say
        assert [b.fused for b in buckets([tensor], [tensor], known_dtypes=(torch.int32,))] == [True]


def test_scale_and_axpby_over_a_mix():
    x, y = mixed(), mixed()
    flag = FoundInf()
    out = [t.clone() for t in x.values()]
    foreach.scale(list(x.values()), out, flag, 0.5)
    for name, t, o in zip(x, x.values(), out, strict=True):
        assert torch.equal(o, t * 0.5), name
        assert o.stride() == t.clone().stride(), name
    foreach.axpby(list(x.values()), list(y.values()), out, flag, 2.0, PerDevice(torch.tensor(-1.0)))
    for name, t, o in zip(x, x.values(), out, strict=True):
        torch.testing.assert_close(o, t, msg=name)
    assert flag.joined(torch.device("cpu")).item() == 0


@pytest.mark.parametrize("name", [n for n in mixed() if n != "empty"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_one_bad_element_anywhere_raises_the_flag(name, bad):
    x = mixed()
    x[name].fill_(bad) if x[name].dim() == 0 else x[name][(-1,) * x[name].dim()].fill_(bad)
    flag = FoundInf()
    foreach.scale(list(x.values()), [t.clone() for t in x.values()], flag, 1.0)
    assert flag.joined(torch.device("cpu")).item() == 1


def test_l2norm_over_a_mix():
    x = mixed()
    expected = sum(t.to(torch.complex128).abs().square().sum() for t in x.values()).sqrt()
    torch.testing.assert_close(foreach.l2norm(list(x.values()), FoundInf()).double(), expected, rtol=1e-3, atol=1e-3)
    assert foreach.l2norm([], FoundInf()).item() == 0


def test_lists_that_go_along_are_split_with_the_others_and_decide_nothing():
    values = [torch.zeros(3), torch.zeros(2).half(), torch.zeros(4)]
    counts = [torch.tensor(i) for i in range(3)]
    first, second = buckets(values, along=[counts])
    assert [t.item() for t in first.lists[1]] == [0, 2]
    assert [t.item() for t in second.lists[1]] == [1]
    (alone,) = buckets(values[:1], along=[counts[:1]])
    assert (alone.fused, alone.lists) == (True, [values[:1], counts[:1]])
    with pytest.raises(ValueError, match=r"different lengths: \[1, 0\]"):
        buckets([torch.ones(1)], [])
    with pytest.raises(ValueError, match="lists of different lengths"):
        buckets(values, along=[counts[:2]])


def test_norms_of_each_over_a_mix_are_in_the_order_of_the_list():
    tensors = list(mixed().values())
    tensors = tensors[::2] + tensors[1::2]
    tensors[3].view(-1)[-1] = float("nan")
    flag = FoundInf()
    total, each = foreach.unscale_l2norms(tensors, flag, PerDevice(torch.tensor(0.5)))
    want = torch.stack([t.to(torch.complex128).norm().double() * 0.5 for t in tensors])
    torch.testing.assert_close(each, want, rtol=1e-5, atol=0, equal_nan=True)
    assert total.isnan()
    assert flag.joined(torch.device("cpu")).item() == 1
    alike, finite = [torch.randn(5), torch.randn(0), torch.randn(3)], FoundInf()
    total, each = foreach.unscale_l2norms(alike, finite, 1.0)
    torch.testing.assert_close(each, torch.stack([t.norm() for t in alike]))
    torch.testing.assert_close(total, each.norm())
    assert [t.shape for t in foreach.unscale_l2norms([], finite, 1.0)] == [(), (0,)]
    assert finite.joined(torch.device("cpu")).item() == 0


def test_the_last_check_updates_the_scale_if_one_flag_knows_all():
    """A flag on another device would be joined too late."""
    cpu, meta = torch.device("cpu"), torch.device("meta")
    state = torch.full((), 8.0), *(torch.zeros((), dtype=torch.int32) for _ in range(2))
    update = ops.ScaleUpdate(*state, 2.0, 0.5, 1, 1, 0.0, 64.0)
    gradients = [torch.ones(3)]
    several = FoundInf()
    several.update = update
    several.on(meta)
    foreach.scale(gradients, gradients, several, 1.0, last=True)
    assert (several.is_updated, state[0].item()) == (False, 8.0)

    found_inf = FoundInf()
    found_inf.update = update
    foreach.scale(gradients, gradients, found_inf, 1.0)
    assert (found_inf.is_updated, state[0].item()) == (False, 8.0)
    kernels.unscale_l2norms_of(gradients, found_inf, 1.0, last=True)
    assert (found_inf.is_updated, state[0].item()) == (True, 16.0)
    foreach.scale(gradients, gradients, found_inf, 1.0, last=True)
    assert state[0].item() == 16.0, "once"
    found_inf.on(cpu).fill_(1.0)
    found_inf.update = update
    foreach.scale(gradients, gradients, found_inf, 1.0, last=True)
    assert state[0].item() == 8.0


def test_flags_join_and_a_clear_one_serves_its_device_alone():
    flag = FoundInf()
    flag.per_device[torch.device("cpu")] = torch.tensor(0.0)
    flag.per_device[torch.device("meta")] = torch.empty((), device="meta")
    assert FoundInf().joined(torch.device("cpu")).item() == 0
    assert flag.joined(torch.device("meta")).device.type == "meta"
    found_inf = FoundInf()
    clear = found_inf.clear = torch.zeros(())
    assert found_inf.on(torch.device("meta")) is not clear
    found_inf = FoundInf()
    found_inf.clear = clear
    assert found_inf.on(torch.device("cpu")) is clear
    assert found_inf.joined(torch.device("cpu")) is clear
