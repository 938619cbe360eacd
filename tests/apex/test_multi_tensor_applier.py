"""apex.multi_tensor_apply: the names, and the calls that clients make through them."""

import amp_C
import pytest
import torch
from apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply as OfTheSubModule
from kernel_cases import flag, randn

import ampctx


def test_the_applier_is_that_of_ampctx():
    assert MultiTensorApply is OfTheSubModule is ampctx.MultiTensorApply
    assert multi_tensor_applier is ampctx.multi_tensor_applier
    assert multi_tensor_applier.chunk_size == 65536


def test_class_attributes_of_apex():
    assert MultiTensorApply.available is True
    assert MultiTensorApply.warned is False
    assert MultiTensorApply.import_err is None
    assert multi_tensor_applier.check_avail() is None


def test_call_goes_to_the_op():
    assert MultiTensorApply(333)(lambda *args: args, "flag", [["t"]], 1, 2) == (333, "flag", [["t"]], 1, 2)


@pytest.mark.parametrize("chunk", [333, 33333, 65536])
def test_clip_by_global_norm_as_training_scripts_write_it(chunk):
    grads = randn([(33, 5), (7,), (0,)])
    want = torch.cat([t.reshape(-1) for t in grads])
    want = want / want.double().norm().float()
    buf = flag()
    applier = MultiTensorApply(chunk)
    norm, _ = applier(amp_C.multi_tensor_l2norm, buf, [grads], False)
    applier(amp_C.multi_tensor_scale, buf, [grads, grads], 1.0 / norm)
    torch.testing.assert_close(torch.cat([t.reshape(-1) for t in grads]), want)
    assert buf.item() == 0
