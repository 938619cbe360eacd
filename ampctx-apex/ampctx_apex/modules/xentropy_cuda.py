"""xentropy_cuda: cross entropy with label smoothing and its gradient, on any device. No gradient flows through.

``apex.contrib.xentropy.SoftmaxCrossEntropyLoss`` is the differentiable form.
"""

from __future__ import annotations

import torch
from ampctx_apex.arguments import check_tensor, without_autocast
from torch import Tensor
from torch.nn import functional as F

from ampctx import AmpValueError

_FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _checked(op: str, logits: Tensor, labels: Tensor) -> Tensor:
    """``labels`` as indices: a negative label becomes 0, and the caller sets its row to 0."""
    check_tensor(op, "logits", logits, dtypes=_FLOATING)
    if logits.dim() != 2:
        raise AmpValueError(f"{op}: logits has shape {tuple(logits.shape)}, expected [rows, classes]")
    check_tensor(op, "labels", labels, dtypes=(torch.int64,), shape=logits.shape[:1], beside=("logits", logits))
    return labels.clamp(min=0).unsqueeze(1)


@torch.no_grad()
def forward(logits: Tensor, labels: Tensor, smoothing: float, half_to_float: bool = False) -> tuple[Tensor, Tensor]:
    """The loss of each row, and the logarithm of its sum of exponentials, which ``backward`` takes. No host sync.

    Args:
        logits: [rows, classes], fp32, fp16, bf16 or fp64.
        labels: [rows], int64 class numbers. A negative one has a loss of 0.
        smoothing: the share of the target that is spread evenly over all classes.
        half_to_float: has no effect: both results are fp32.

    Returns:
        Two tensors [rows], fp32 (fp64 for fp64 logits).
    """
    index = _checked("forward", logits, labels)
    with without_autocast(logits):
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # Not the logits less log_sum, which cancels where they are large.
        log_probabilities = F.log_softmax(wide, dim=1)
        losses = (smoothing - 1.0) * log_probabilities.gather(1, index).squeeze(1)
        if smoothing:
            losses = losses - smoothing * log_probabilities.mean(1)
        return losses.masked_fill(labels < 0, 0.0), wide.logsumexp(1)


@torch.no_grad()
def backward(grad_loss: Tensor, logits: Tensor, max_log_sum_exp: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """The gradient of the logits, like ``logits``. No host sync.

    Args:
        grad_loss: [rows], the gradient of the losses, of any floating type; 0 for rows of padding.
        logits, labels, smoothing: as for ``forward``. The gradient of a negative label's row is 0.
        max_log_sum_exp: [rows], the second result of ``forward``.
    """
    index = _checked("backward", logits, labels)
    rows, beside = logits.shape[:1], ("logits", logits)
    check_tensor("backward", "grad_loss", grad_loss, dtypes=_FLOATING, shape=rows, beside=beside)
    check_tensor("backward", "max_log_sum_exp", max_log_sum_exp, dtypes=_FLOATING, shape=rows, beside=beside)
    with without_autocast(logits):
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        grad = (wide - max_log_sum_exp.to(wide.dtype).unsqueeze(1)).exp_()
        if smoothing:
            grad.sub_(smoothing / logits.size(1))
        grad.scatter_add_(1, index, grad.new_full(index.shape, smoothing - 1.0))
        factor = grad_loss.to(wide.dtype).masked_fill(labels < 0, 0.0)
        return grad.mul_(factor.unsqueeze(1)).to(logits.dtype)
