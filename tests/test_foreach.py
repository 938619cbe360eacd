"""The ops over lists of any mix, and how they are bucketed."""

import pytest
import torch

from ampctx import foreach
from ampctx.foreach import FoundInf, PerDevice

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
