"""apex.parallel.optimized_sync_batchnorm: torch's SyncBatchNorm with apex's options, on the CPU as well."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# The base of all of torch's batch norms: private by name alone, and the one test of "is a batch norm" there is.
from torch.nn.modules.batchnorm import _BatchNorm

from ampctx import AmpAssertionError, AmpValueError


class _SyncedOnCpu(torch.autograd.Function):
    """Batch norm of [N, C, *] with the statistics of all ranks in ``group``; torch's own is for GPUs.

    Computes in fp32 (fp64 for fp64 input), returns the type of the input. Ranks may have different N, also 0. The
    gradients of weight and bias are each rank's own, as those of every other parameter.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        eps: float,
        momentum: float,
        group: Any,
    ) -> Tensor:
        dims = [0, *range(2, x.dim())]
        shape = [1, -1] + [1] * (x.dim() - 2)
        x_wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # In fp64, so that the count is exact.
        sums = x_wide.sum(dims).double()
        sums = torch.cat([sums, sums.new_tensor([x.numel() // x.size(1)])])
        dist.all_reduce(sums, group=group)
        count = sums[-1].item()
        if count <= 1:
            raise AmpValueError(f"Expected more than 1 value per channel when training, got {count:.0f} over all ranks")
        mean = (sums[:-1] / count).to(x_wide.dtype)
        centred = x_wide - mean.view(shape)
        squares = centred.square().sum(dims).double()
        dist.all_reduce(squares, group=group)
        invstd = (squares / count + eps).rsqrt().to(x_wide.dtype)
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((squares / (count - 1)).to(running_var.dtype), momentum)
        out = centred * invstd.view(shape)
        if weight is not None:
            out = out * weight.view(shape)
        if bias is not None:
            out = out + bias.view(shape)
        ctx.save_for_backward(x, weight, bias, mean, invstd)
        ctx.count, ctx.group = count, group
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, invstd = ctx.saved_tensors
        dims = [0, *range(2, x.dim())]
        shape = [1, -1] + [1] * (x.dim() - 2)
        grad = grad.to(mean.dtype)
        normalized = (x.to(mean.dtype) - mean.view(shape)) * invstd.view(shape)
        grad_bias, grad_weight = grad.sum(dims), (grad * normalized).sum(dims)
        grad_x = None
        if ctx.needs_input_grad[0]:
            means = torch.stack([grad_bias, grad_weight])
            dist.all_reduce(means, group=ctx.group)
            by_bias, by_weight = means / ctx.count
            factor = invstd if weight is None else invstd * weight
            grad_x = (grad - by_bias.view(shape) - normalized * by_weight.view(shape)) * factor.view(shape)
            grad_x = grad_x.to(x.dtype)
        return (
            grad_x,
            None if weight is None else grad_weight.to(weight.dtype),
            None if bias is None else grad_bias.to(bias.dtype),
            *[None] * 5,
        )


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch.nn.SyncBatchNorm with apex's options. Ranks synchronise in training mode, on GPUs and (gloo) on the CPU.

    Args:
        num_features, eps, momentum, affine, track_running_stats, process_group: as torch's.
        channel_last: the channels are the last dimension of input, ``z`` and output.
        fuse_relu: the output goes through a ReLU.
    """

    # For modules that were pickled by an apex that did not have these.
    channel_last = False
    fuse_relu = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def _specify_process_group(self, process_group: Any) -> None:
        self.process_group = process_group

    def _specify_channel_last(self, channel_last: bool) -> None:
        self.channel_last = channel_last

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Batch norm of [N, C, *], or with ``channel_last`` [N, *, C]; then ``+ z``; then ReLU with ``fuse_relu``."""
        channel_last = self.channel_last and input.dim() > 2
        x = input.movedim(-1, 1) if channel_last else input
        on_cpu = self.training and x.device.type == "cpu" and dist.is_initialized()
        out = self._synced_on_cpu(x) if on_cpu else super().forward(x)
        out = out.movedim(1, -1) if channel_last else out
        if z is not None:
            out = out + z
        return F.relu(out) if self.fuse_relu else out

    def _synced_on_cpu(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        if x.size(1) != self.num_features:
            raise AmpValueError(
                f"expected {self.num_features} channels, got {x.size(1)} in an input of {tuple(x.shape)}"
            )
        momentum = self.momentum
        running_mean = running_var = None
        if self.track_running_stats:
            running_mean, running_var, batches = self.running_mean, self.running_var, self.num_batches_tracked
            assert batches is not None
            batches.add_(1)
            if momentum is None:
                momentum = 1.0 / batches.item()
        return _SyncedOnCpu.apply(
            x, self.weight, self.bias, running_mean, running_var, self.eps, momentum, self.process_group
        )


def _as_sync(module: _BatchNorm, process_group: Any, channel_last: bool) -> SyncBatchNorm:
    sync = SyncBatchNorm(
        module.num_features,
        module.eps,
        module.momentum,
        module.affine,
        module.track_running_stats,
        process_group,
        channel_last=channel_last,
    )
    # The same objects: an optimizer that was built before goes on with them. apex made copies.
    sync.weight, sync.bias = module.weight, module.bias
    sync.running_mean, sync.running_var = module.running_mean, module.running_var
    sync.num_batches_tracked = module.num_batches_tracked
    return sync.train(module.training)


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Replaces all batch norms in ``module`` by SyncBatchNorm, with the same parameters, buffers and training mode.

    Returns:
        ``module``, or what takes its place where it is a batch norm itself. A module that is used in several places is
        so afterwards.
    """
    if isinstance(module, _BatchNorm):
        return _as_sync(module, process_group, channel_last)
    converted: dict[nn.Module, SyncBatchNorm] = {}
    for name, child in list(module.named_modules(remove_duplicate=False)):
        if isinstance(child, _BatchNorm):
            if child not in converted:
                converted[child] = _as_sync(child, process_group, channel_last)
            parent, _, attribute = name.rpartition(".")
            module.get_submodule(parent).add_module(attribute, converted[child])
    return module


def create_syncbn_process_group(group_size: int) -> Any:
    """The group of ``group_size`` neighbouring ranks that this rank is in. To be called by all ranks.

    Returns:
        A process group; None, which stands for all ranks, with ``group_size=0``.

    Raises:
        AmpAssertionError: the number of ranks is not a multiple of ``group_size``.
    """
    if group_size == 0:
        return None
    world_size = dist.get_world_size()
    if not 0 < group_size <= world_size or world_size % group_size:
        raise AmpAssertionError(f"group_size {group_size} does not divide the {world_size} ranks")
    mine = None
    # Every rank takes part in making every group.
    for first in range(0, world_size, group_size):
        group = dist.new_group(list(range(first, first + group_size)))
        if first <= dist.get_rank() < first + group_size:
            mine = group
    return mine


__all__ = ["SyncBatchNorm"]
