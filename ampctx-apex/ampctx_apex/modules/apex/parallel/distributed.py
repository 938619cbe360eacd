"""apex.parallel.distributed: torch's DistributedDataParallel with apex's constructor, ``Reducer``, flat collectives."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import apex_C
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampctx import AmpValueError

from .optimized_sync_batchnorm import SyncBatchNorm


@torch.no_grad()
def flat_dist_call(tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Runs ``call(flat, *extra_args)`` on the joined tensors of each type, in place. ``dist.all_reduce`` averages."""
    buckets: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for bucket in buckets.values():
        flat = apex_C.flatten(bucket)
        call(flat, *(extra_args or ()))
        if call is dist.all_reduce:
            flat /= dist.get_world_size()
        for tensor, synced in zip(bucket, apex_C.unflatten(flat, bucket), strict=True):
            tensor.copy_(synced)


def _tensors(nested: Any) -> Iterator[Tensor]:
    """The tensors in nested iterables, without other objects."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, Iterable) and not isinstance(nested, str):
        for item in nested:
            yield from _tensors(item)


class Reducer:
    """Averages gradients over all ranks when ``reduce()`` is called.

    Args:
        module_or_grads_list: a module, whose parameters are broadcast from rank 0 now and whose gradients are averaged;
            or tensors in any nesting of iterables, which are averaged themselves.
    """

    def __init__(self, module_or_grads_list: Any) -> None:
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            flat_dist_call(self.module.parameters(), dist.broadcast, (0,))
        else:
            self.grads = list(_tensors(module_or_grads_list))

    def reduce(self) -> None:
        grads = self.grads
        if self.module is not None:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat_dist_call(grads, dist.all_reduce)


# --- DistributedDataParallel ------------------------------------------------------------------------------------------


class _Averaging(NamedTuple):
    """How gradients are joined where it is not torch's way: g * after * sum over the ranks of (g * before)."""

    before: float
    after: float
    always_fp32: bool


def _reduce_bucket(how: _Averaging, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook of torch's DistributedDataParallel."""
    buffer = bucket.buffer()
    upcast = how.always_fp32 and buffer.dtype in (torch.float16, torch.bfloat16)
    joined = buffer.float() if upcast else buffer
    if how.before != 1.0:
        joined.mul_(how.before)
    work = dist.all_reduce(joined, async_op=True)
    assert work is not None

    def finish(_: Any) -> Tensor:
        if how.after != 1.0:
            joined.mul_(how.after)
        return buffer.copy_(joined) if upcast else joined

    return work.get_future().then(finish)


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with apex's constructor and defaults: parameters are broadcast from rank 0 at
    construction, buffers stay each rank's own, gradients are averaged during backward.

    Args:
        module: what to wrap, after ``amp.initialize``.
        message_size: elements in a bucket, at the size of the largest parameter type.
        delay_allreduce: parameters may stay out of a forward, as with torch's find_unused_parameters. Where there are
            none such, torch says so once on stderr.
        allreduce_always_fp32: 16-bit gradients are joined in fp32.
        gradient_average: False leaves the sum over the ranks (of gradients divided by ``gradient_predivide_factor``).
        gradient_predivide_factor: gradients are divided by it before they are joined, and by the rest of the number of
            ranks after that.
        allreduce_trigger_params, retain_allreduce_buffers, num_allreduce_streams, allreduce_communicators,
            gradient_average_split_factor, prof: taken without effect. torch chooses when and where to communicate.

    Raises:
        AmpValueError: ``shared_param`` is given, or trigger parameters or several streams with ``delay_allreduce``.
        RuntimeError: no parameter requires a gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: Any = None,
        prof: bool = False,
    ) -> None:
        if shared_param is not None:
            raise AmpValueError("shared_param is no longer an option. Leave it out; shared parameters work without it.")
        if delay_allreduce and allreduce_trigger_params is not None:
            raise AmpValueError("allreduce_trigger_params may only be given with delay_allreduce=False")
        if delay_allreduce and num_allreduce_streams > 1:
            raise AmpValueError("num_allreduce_streams may only be above 1 with delay_allreduce=False")
        element = max((p.element_size() for p in module.parameters() if p.requires_grad), default=4)
        with warnings.catch_warnings():
            # Newer torch has another flag for later broadcasts, but none so far that spares the first one.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(
                module,
                broadcast_buffers=False,
                bucket_cap_mb=message_size * element / 2**20,
                find_unused_parameters=bool(delay_allreduce),
            )
        self.message_size = message_size
        self.delay_allreduce = delay_allreduce
        self.retain_allreduce_buffers = retain_allreduce_buffers
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = gradient_predivide_factor
        self.world_size = float(dist.get_world_size())
        self.prof = prof
        self._set_averaging()

    def _set_averaging(self) -> None:
        if self.gradient_average and self.gradient_predivide_factor == 1.0 and not self.allreduce_always_fp32:
            return
        after = self.gradient_predivide_factor / self.world_size if self.gradient_average else 1.0
        how = _Averaging(1.0 / self.gradient_predivide_factor, after, self.allreduce_always_fp32)
        self.register_comm_hook(how, _reduce_bucket)

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        # Private of torch: refuses SyncBatchNorm on the CPU, where ours works.
        if any(isinstance(m, nn.SyncBatchNorm) and not isinstance(m, SyncBatchNorm) for m in module.modules()):
            super()._passing_sync_batchnorm_handle(module)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.world_size = float(dist.get_world_size())
        # torch's hooks are on the reducer, which is new.
        self._set_averaging()

    def enable_allreduce(self) -> None:
        """Undoes ``disable_allreduce`` from the next forward on."""
        self.require_backward_grad_sync = True

    def disable_allreduce(self) -> None:
        """Skips gradient averaging from the next forward on, as torch's ``no_sync``."""
        self.require_backward_grad_sync = False
