"""apex.contrib.xentropy: the cross entropy with label smoothing and a padding label, over torch's log-softmax."""

from typing import Any

import torch
from ampctx_apex.autograd_class import AutogradClass, grads, run
from torch import Tensor
from torch.nn import functional as F


class SoftmaxCrossEntropyLoss(AutogradClass):
    """Cross entropy of each row, called as ``SoftmaxCrossEntropyLoss.apply(logits, labels, ...)``."""

    @staticmethod
    def apply(
        logits: Tensor,
        labels: Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> Tensor:
        """The loss of each row, computed in fp32 (fp64 for fp64 logits).

        Args:
            logits: [rows, classes], any floating type.
            labels: [rows], int64 class numbers.
            smoothing: the share of the target that is spread evenly over all classes.
            padding_idx: rows with this label have a loss and a gradient of 0. Note the default, class 0.
            half_to_float: has no effect: the losses are fp32 for 16-bit logits.

        Returns:
            [rows], fp32 (fp64 for fp64 logits).
        """
        wide = torch.promote_types(logits.dtype, torch.float32)
        log_probabilities = F.log_softmax(logits, dim=-1, dtype=wide)
        losses = F.nll_loss(log_probabilities, labels, ignore_index=padding_idx, reduction="none")
        if smoothing:
            uniform = -log_probabilities.mean(dim=-1)
            losses = (1.0 - smoothing) * losses + smoothing * uniform
            losses = losses.masked_fill(labels == padding_idx, 0.0)
        return losses

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> Tensor:
        return run(ctx, lambda t: SoftmaxCrossEntropyLoss.apply(t, labels, smoothing, padding_idx), logits)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        return *grads(ctx, grad_loss), None, None, None, None
