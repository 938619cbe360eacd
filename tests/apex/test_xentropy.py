"""apex.contrib.xentropy and xentropy_cuda against torch's cross entropy in fp64."""

import pytest
import torch
import xentropy_cuda
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from torch.nn import functional as F

from ampctx import AmpTypeError, AmpValueError

F16, B16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LABELS = torch.tensor([0, 6, 2, 3, 6, 1])


def case(dtype, rows=6):
    generator = torch.Generator().manual_seed(0)
    logits = (4.0 * torch.randn(rows, 7, generator=generator)).to(dtype)
    return logits, LABELS[:rows], torch.randn(rows, generator=generator)


def loss(logits, *options, labels=LABELS):
    return SoftmaxCrossEntropyLoss.apply(logits, labels, *options)


def exact(logits, labels, smoothing, grad_loss):
    wide = logits.detach().double().requires_grad_()
    losses = F.cross_entropy(wide, labels, reduction="none", label_smoothing=smoothing)
    return losses.detach(), torch.autograd.grad(losses, wide, grad_loss.double())[0]


def assert_near(got, wanted):
    bound = 8.0 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), wanted, rtol=bound, atol=bound)


# --- the class --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, F32, F16, B16], ids=str)
@pytest.mark.parametrize("padding_idx", [0, 6, -100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("half_to_float", [False, True])
def test_losses_and_gradients(dtype, smoothing, padding_idx, half_to_float):
    logits, _, upstream = case(dtype)
    losses = loss(logits.requires_grad_(), smoothing, padding_idx, half_to_float)
    losses.backward(upstream.to(losses.dtype))
    assert losses.dtype == (F64 if dtype == F64 else F32)
    assert logits.grad.dtype == dtype
    kept = padding_idx != LABELS
    wanted, wanted_grad = exact(logits, LABELS, smoothing, upstream)
    assert_near(losses, torch.where(kept, wanted, 0.0))
    assert_near(logits.grad, torch.where(kept[:, None], wanted_grad, 0.0))


def test_defaults_are_apexs():
    logits = case(F16)[0]
    assert torch.equal(loss(logits), loss(logits, 0.0, 0, False))
    assert loss(logits)[LABELS == 0].tolist() == [0.0]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [F32, F16, B16], ids=str)
def test_on_a_gpu_as_on_the_cpu(dtype):
    logits = case(dtype)[0].requires_grad_()
    on_gpu = logits.detach().cuda().requires_grad_()
    expected, losses = loss(logits, 0.1), loss(on_gpu, 0.1, labels=LABELS.cuda())
    expected.sum().backward()
    losses.sum().backward()
    torch.testing.assert_close(losses.cpu(), expected)
    torch.testing.assert_close(on_gpu.grad.cpu(), logits.grad)


# --- the extension ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [6, 1, 0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("half_to_float", [False, True])
@pytest.mark.parametrize("dtype", [F64, F32, F16, B16], ids=str)
def test_losses_and_gradients_of_the_extension(dtype, half_to_float, smoothing, rows):
    logits, labels, grad_loss = case(dtype, rows)
    losses, log_sum = xentropy_cuda.forward(logits, labels, smoothing, half_to_float)
    wide = F64 if dtype == F64 else F32
    assert (losses.dtype, log_sum.dtype) == (wide, wide)
    wanted, wanted_grad = exact(logits, labels, smoothing, grad_loss)
    assert_near(losses, wanted)
    assert_near(log_sum, logits.double().logsumexp(1))
    assert not any(t.requires_grad for t in xentropy_cuda.forward(logits.clone().requires_grad_(), labels, smoothing))
    for given in (grad_loss.to(wide), grad_loss.to(dtype)):
        grad = xentropy_cuda.backward(given, logits, log_sum, labels, smoothing)
        assert grad.dtype == dtype
        bound = 8.0 * torch.finfo(dtype).eps
        torch.testing.assert_close(grad.double(), wanted_grad, rtol=bound, atol=bound)


def test_padding_by_the_caller_and_negative_labels():
    """As programs use it: they set the rows of padding to 0, after forward and before backward."""
    logits, labels, grad_loss = case(F32)
    labels = labels.clone()
    labels[2] = -100
    losses, log_sum = xentropy_cuda.forward(logits, labels, 0.1, False)
    assert losses[2] == 0.0
    losses.masked_fill_(labels == 6, 0)
    wanted = loss(logits.requires_grad_(), 0.1, 6, labels=labels.clamp(min=0))
    wanted = wanted.masked_fill(labels < 0, 0.0)
    torch.testing.assert_close(losses, wanted)
    grad = xentropy_cuda.backward(grad_loss.masked_fill(labels == 6, 0), logits, log_sum, labels, 0.1)
    assert not grad[labels == 6].any()
    assert not grad[2].any()
    torch.testing.assert_close(grad, torch.autograd.grad(wanted, logits, grad_loss)[0])


LOGITS, _, GRAD = case(F32)
LOSSES, LOG_SUM = xentropy_cuda.forward(LOGITS, LABELS, 0.0)


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        ("forward", (LOGITS.int(), LABELS, 0.0), AmpTypeError, "logits has dtype torch.int32, expected float32 or"),
        ("forward", (LOGITS[0], LABELS, 0.0), AmpValueError, r"logits has shape \(7,\), expected \[rows, classes\]"),
        ("forward", (LOGITS, LABELS.int(), 0.0), AmpTypeError, "labels has dtype torch.int32, expected int64"),
        ("forward", (LOGITS, LABELS[1:], 0.0), AmpValueError, r"labels has shape \(5,\), expected \(6,\)"),
        ("backward", (None, LOGITS, LOG_SUM, LABELS, 0.0), AmpTypeError, "grad_loss must be a tensor, got NoneType"),
        ("backward", (GRAD, LOGITS, LOGITS, LABELS, 0.0), AmpValueError, r"max_log_sum_exp has shape \(6, 7\), exp"),
    ],
)
def test_errors_name_the_argument(name, arguments, error, message):
    with pytest.raises(error, match=f"^{name}: {message}"):
        getattr(xentropy_cuda, name)(*arguments)
