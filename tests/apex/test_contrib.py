"""apex.contrib.xentropy."""

import pytest
import torch
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss

F16, B16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


LABELS = torch.tensor([3, 0, 6, 1, 0, 6])


def logits_of(dtype):
    return (4.0 * torch.randn(6, 7, generator=torch.Generator().manual_seed(0))).to(dtype).requires_grad_()


def by_formula(logits, smoothing, padding_idx):
    """Cross entropy with a target of 1 - smoothing on the label and smoothing / classes on every class."""
    target = torch.full_like(logits, smoothing / logits.size(1))
    target[torch.arange(len(LABELS)), LABELS] += 1.0 - smoothing
    losses = -(target * (logits - logits.exp().sum(1, keepdim=True).log())).sum(1)
    return torch.where(padding_idx == LABELS, torch.zeros_like(losses), losses)


@pytest.mark.parametrize("dtype", [F64, F32, F16, B16], ids=str)
@pytest.mark.parametrize("padding_idx", [0, 6, -100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("half_to_float", [False, True])
def test_losses_and_gradients(dtype, smoothing, padding_idx, half_to_float):
    logits = logits_of(dtype)
    exact = logits.detach().double().requires_grad_()
    losses = SoftmaxCrossEntropyLoss.apply(logits, LABELS, smoothing, padding_idx, half_to_float)
    expected = by_formula(exact, smoothing, padding_idx)
    assert losses.dtype == (F64 if dtype == F64 else F32)
    upstream = torch.tensor([1.0, 2.0, -1.0, 0.5, 4.0, 0.25])
    losses.backward(upstream.to(losses.dtype))
    expected.backward(upstream.double())
    for got, wanted in ((losses, expected), (logits.grad, exact.grad)):
        bound = 4.0 * torch.finfo(got.dtype).eps
        torch.testing.assert_close(got.double(), wanted, rtol=bound, atol=bound)
    assert logits.grad.dtype == dtype
    padding = padding_idx == LABELS
    assert losses[padding].eq(0.0).all()
    assert logits.grad[padding].eq(0.0).all()


def test_defaults_are_apexs():
    logits = logits_of(F16)
    losses = SoftmaxCrossEntropyLoss.apply(logits, LABELS)
    assert torch.equal(losses, SoftmaxCrossEntropyLoss.apply(logits, LABELS, 0.0, 0, False))
    assert losses[LABELS == 0].tolist() == [0.0, 0.0]


def test_padding_that_is_no_class():
    labels = torch.tensor([-1, 3, -1, 1, 2, 0])
    losses = SoftmaxCrossEntropyLoss.apply(logits_of(F32), labels, 0.1, -1)
    assert (losses == 0).tolist() == [True, False, True, False, False, False]


def test_all_rows_are_padding():
    logits = logits_of(F32)
    SoftmaxCrossEntropyLoss.apply(logits, torch.zeros(6, dtype=torch.int64), 0.1).sum().backward()
    assert logits.grad.eq(0.0).all()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [F32, F16, B16], ids=str)
def test_on_a_gpu_as_on_the_cpu(dtype):
    logits = logits_of(dtype)
    on_gpu = logits.detach().cuda().requires_grad_()
    expected = SoftmaxCrossEntropyLoss.apply(logits, LABELS, 0.1)
    losses = SoftmaxCrossEntropyLoss.apply(on_gpu, LABELS.cuda(), 0.1)
    expected.sum().backward()
    losses.sum().backward()
    torch.testing.assert_close(losses.cpu(), expected)
    torch.testing.assert_close(on_gpu.grad.cpu(), logits.grad)
