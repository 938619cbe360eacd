"""Clips gradients by their total norm, without a host sync."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial, reduce
from numbers import Real
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from ampctx._collectives import check_process_group, maximum_over_ranks, reduced_over
from ampctx._decorators import outside_of_graphs, without_grad
from ampctx._errors import AmpError, AmpTypeError, AmpValueError, warn
from ampctx.kernels import foreach, tensor_loops
from ampctx.kernels.foreach import Clipped, PerDevice, Unread, joined_norm, move
from ampctx.kernels.ops import Scalar
from ampctx.kernels.plan import PlannedCall, run_once
from ampctx.kernels.sharding import any_sharded, are_placed, groups_of, local, place_grads, spreads_of, wrote
from ampctx.kernels.tensor_loops import all_there, device_of, dtype_of, grad_of, layout_of, set_each, stored_grad
from ampctx.weights import frames, masters
from ampctx.weights.pending import MasterParam, Pending, pending_in

# The attribute of gradients with the norm that a clip has found.
CLIPPED = "norm_before_clipping"


def strided_grad(parameter: Tensor) -> Tensor | None:
    """The tensor with the values of ``parameter.grad``, for reading and writing; None without a gradient.

    Coalesces a sparse gradient first and stores it in ``parameter.grad``: an optimizer applies the sum of duplicate
    entries, and that sum may overflow.
    """
    grad = parameter.grad
    if grad is None or grad.layout == torch.strided:
        return grad
    if grad.layout == torch.sparse_coo and not grad.is_coalesced():
        grad = parameter.grad = grad.coalesce()
    return grad.values()


def strided_grads(params: Iterable[Tensor]) -> list[Tensor]:
    """``strided_grad`` of those that have a gradient."""
    if not torch.compiler.is_compiling():
        grads = list(filter(partial(is_not, None), map(grad_of, params)))
        if set(map(layout_of, grads)) <= {torch.strided}:
            return grads
    return [grad for grad in map(strided_grad, params) if grad is not None]


def _checked_parameters(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(parameters, Tensor):
        return [parameters]
    if not isinstance(parameters, Iterable):
        raise AmpTypeError(
            f"parameters must be a tensor or an iterable of tensors, got {type(parameters).__name__}. Pass "
            "amp.master_params(optimizer) or model.parameters()."
        )
    found = list(parameters)
    if not all(issubclass(kind, Tensor) for kind in set(map(type, found))):
        i = next(i for i, p in enumerate(found) if not isinstance(p, Tensor))
        raise AmpTypeError(f"parameters[{i}] must be a tensor, got {type(found[i]).__name__}")
    if not found and isinstance(parameters, Iterator):
        warn("`parameters` is an empty generator, so nothing was clipped. Pass a new one, or a list.")
    return found


def _checked_max_norm(max_norm: float | Tensor) -> float | Tensor:
    if isinstance(max_norm, Tensor):
        if max_norm.numel() != 1:
            raise AmpValueError(f"max_norm has {max_norm.numel()} elements, expected a number or a one-element tensor")
        return max_norm.detach().reshape(())
    if isinstance(max_norm, bool) or not isinstance(max_norm, Real):
        raise AmpTypeError(f"max_norm must be a number or a one-element tensor, got {type(max_norm).__name__}")
    if not float(max_norm) >= 0.0:
        raise AmpValueError(f"max_norm is {max_norm}, expected a number >= 0")
    return float(max_norm)


def _checked_norm_type(norm_type: float | str) -> float:
    try:
        order = float(norm_type)
    except (TypeError, ValueError) as error:
        raise AmpTypeError(f"norm_type must be a number or 'inf', got {norm_type!r}") from error
    if math.isnan(order):
        raise AmpValueError("norm_type is nan, expected a number or 'inf'")
    return order


def norm_before_clipping(grads: Iterable[Tensor | None]) -> Tensor | None:
    """Removes and returns the norm that ``clip_grad_norm_`` has stored on the first dense gradient, None without one.
    No host sync."""
    for grad in grads:
        if grad is not None and grad.layout == torch.strided and grad.numel() > 0:
            return grad.__dict__.pop(CLIPPED, None)
    return None


@without_grad
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float | Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    process_group: Any = None,
) -> Tensor:
    """Scales all gradients in place by ``min(max_norm / (norm + 1e-6), 1)``. Returns the norm before. No host sync.

    Like ``torch.nn.utils.clip_grad_norm_``, and for sparse gradients, too (it coalesces them). The compiled ops compute
    the L2 norm in fp32, or fp64 for fp64 gradients, so that 16-bit gradients do not overflow. With an optimizer of
    ``ampctx.optimizers`` at O2 and O5, gradients stay in 16 bits until the step: clipping then only changes the factor
    that the step multiplies them by. The norm of DTensors is that of the whole tensors, by one all_reduce: every rank
    of their mesh must call this, with or without gradients.

    Example::

        norm = ampctx.clip_grad_norm_(amp.master_params(optimizer), max_norm=1.0)

    Args:
        parameters: a tensor or an iterable of tensors with or without ``.grad``, on any mix of devices and dtypes, such
            as ``amp.master_params(optimizer)``.
        max_norm: a number >= 0, or a one-element tensor, whose value is not checked.
        norm_type: the order of the norm, 2 by default, as in ``torch.linalg.vector_norm``. 'inf' is the largest
            magnitude.
        error_if_nonfinite: raise if the norm is inf or nan, before any gradient changes. Host sync.
        foreach: for other orders than 2, as in torch. The compiled ops ignore it.
        process_group: a ``torch.distributed.ProcessGroup`` whose ranks have other parameters of the model, such as the
            stages of a pipeline, or experts. The norm is then that of all of them, by one more all_reduce. Every rank
            must call this, with or without gradients. A parameter that several of its ranks pass counts for each. The
            group must serve the device of the norm; over gloo the host waits for it.

    Returns:
        The norm, a 0-d tensor on the device of the first non-empty gradient; ``tensor(0.)`` if there is none.

    Raises:
        AmpTypeError, AmpValueError: an invalid argument, by name.
        AmpError: inside a ``scale_loss`` block, or between delayed ones; a non-finite norm, with
            ``error_if_nonfinite``; a 16-bit model parameter whose gradient is in its fp32 master (after a block at O2
            or O5).
        AmpRankError: another rank of the group or of a DTensor's mesh has ended, or has left this call out.
    """
    found = _checked_parameters(parameters)
    max_norm, order = _checked_max_norm(max_norm), _checked_norm_type(norm_type)
    check_process_group(process_group)
    # dynamo cannot trace pending gradients, nor what ranks have yet to agree on.
    is_of_ranks = process_group is not None or any_sharded(found)
    leaves = torch.compiler.is_compiling() and (is_of_ranks or any(isinstance(p, MasterParam) for p in found))
    clip = _clip_outside_of_graphs if leaves else _clip
    return clip(found, max_norm, order, error_if_nonfinite, foreach, process_group)


def _clip(
    found: list[Tensor], max_norm: Scalar, order: float, raises: bool, use_foreach: bool | None, process_group: Any
) -> Tensor:
    """``raises``: on a norm that is not finite."""
    in_graph, are_sharded = torch.compiler.is_compiling(), any_sharded(found)
    for of in () if in_graph else list(frames.ALIVE):
        if of.frames:
            of.refuse_to_clip(found)
    pending = pending_in(found) if order == 2.0 else []
    if not (pending or in_graph) and masters.ALIVE:
        without = {id(p) for p in found if stored_grad(p) is None}
        for alive in list(masters.ALIVE) if without else ():
            alive.refuse_to_clip(without)
    touched, norm = _without(pending, found) if pending else found, None
    norms = [each.norm() for each in pending]
    is_usual = order == 2.0 and process_group is None and not (in_graph or raises)
    if touched and is_usual and not isinstance(max_norm, Tensor):
        norm = _clipped_by_plan(touched, max_norm, norms, are_sharded)
    if norm is None:
        given: list[Tensor] = []
        grads: list[Tensor] = []
        if touched or not pending:
            given, grads, norm = _norm(touched, order, use_foreach)
            if grads or are_sharded or not pending:
                norms.append(norm)
        norm = _over_group(joined_norm(norms), order, process_group)
        if raises and not torch.isfinite(norm):
            raise AmpError(
                f"The total norm of order {order} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. Skip the step, or pass error_if_nonfinite=False to scale by the non-finite norm anyway."
            )
        if grads:
            _scale_down(grads, max_norm, norm)
        wrote(given)
        if not in_graph:
            set_each(given, CLIPPED, norm)
    for each in pending:
        each.clip(norm, max_norm)
    return norm


def norm_of(params: list[Tensor], process_group: Any, call: str) -> Tensor:
    """The L2 norm of the gradients of parameters, over the ranks of DTensors and of a group. ``call``: for messages. No
    host sync."""
    return _over_group(_norm(params, call=call)[2], 2.0, process_group, call)


def raised_by_any_rank(flags: Tensor, params: list[Tensor], process_group: Any, call: str) -> Tensor:
    """Flags of this rank and of all ranks over which ``norm_of`` goes. No host sync."""
    groups = [*groups_of(params), *([] if process_group is None else [process_group])]
    return maximum_over_ranks(flags, groups, call, "whether it skips") if groups else flags


def _norm(
    params: list[Tensor], order: float = 2.0, use_foreach: bool | None = None, call: str = "clip_grad_norm_"
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The gradients of parameters, the parts of these that are not empty, and their norm."""
    if any_sharded(params):
        place_grads(params)
        whole = list(map(strided_grad, params))
        parts = [None if part is None or part.numel() == 0 else part for part in local(whole)]
        return _there(whole), _there(parts), _norm_over_ranks(params, parts, order, use_foreach, call)
    given = strided_grads(params)
    # An empty gradient has no part in any norm; torch refuses the infinity norm of one.
    grads = [grad for grad in given if grad.numel() > 0]
    return given, grads, _total_norm(grads, order, use_foreach)


def _over_group(norm: Tensor, order: float, process_group: Any, call: str = "clip_grad_norm_") -> Tensor:
    if process_group is None:
        return norm
    return _over_ranks(norm, order, [process_group], call, "the norm of its parameters")


def _clipped_by_plan(params: list[Tensor], max_norm: float, others: list[Tensor], are_sharded: bool) -> Tensor | None:
    """Clips fp32 gradients, of DTensors this rank's parts, by their norm, joined with ``others``, without torch's
    dispatcher. None, and nothing has changed, for other gradients, and for DTensors of several grids."""
    spreads = spreads_of(params) if are_sharded else []
    if len(spreads) > 1 or (spreads and len(spreads[0].counted) < len(params)):
        return None
    grads: Sequence[Any] = list(map(stored_grad, params))
    if not all_there(grads):
        params = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
        grads = list(map(stored_grad, params))
    parts: Any = local(grads)
    if set(map(dtype_of, parts)) != {torch.float32} or (are_sharded and not are_placed(params, grads)):
        return None
    calls = [
        PlannedCall("multi_tensor_unscale_l2norm", [(params, parts)], ()),
        PlannedCall("multi_tensor_scale_clipped", [(params, parts), (params, parts)], (1,)),
    ]
    norm, each = (torch.empty(size, dtype=torch.float32, device=parts[0].device) for size in ((), 0))
    flag = Unread().on(norm.device)
    first: list[tuple[Any, ...]] = [(flag, 1.0, False, norm, each)]
    grid = spreads[0].grid if spreads and spreads[0].joins else None
    if others or grid is not None:
        if not run_once([calls.pop(0)], first):
            return None
        norm = norm if grid is None else _over_ranks(norm, 2.0, grid.groups, "clip_grad_norm_", "the norm of its part")
        first, norm = [], joined_norm([*others, norm])
    if not run_once(calls, [*first, (flag, 1.0, move(norm, flag.device), max_norm)]):
        if first:
            return None
        _scale_down(parts, max_norm, norm)  # not anew: other ranks have joined their norms
    wrote(grads)
    set_each(grads, CLIPPED, norm)
    return norm


_clip_outside_of_graphs = outside_of_graphs(_clip)


def _without(pending: list[Pending], found: list[Tensor]) -> list[Tensor]:
    """The parameters without pending gradients."""
    if len(pending) == 1 and tensor_loops.same_items(found, pending[0].masters):
        return []
    untouched = {i for each in pending for i in each.ids}
    return [p for p in found if id(p) not in untouched] if untouched else found


def _total_norm(grads: Sequence[Tensor], order: float, use_foreach: bool | None) -> Tensor:
    if order == 2.0:
        return foreach.l2norm(grads, Unread())
    return torch.nn.utils.get_total_norm(grads, order, foreach=use_foreach)


def _there(tensors: list[Tensor | None]) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def _norm_over_ranks(
    params: list[Tensor], here: list[Tensor | None], order: float, use_foreach: bool | None, call: str
) -> Tensor:
    """The norm of the gradients of parameters, some of which are DTensors.

    One all_reduce for each grid with split parameters. The parameters decide about it: ranks may differ in which of
    them have gradients.
    """
    norms = []
    for grid, joins, places, counted in spreads_of(params):
        parts = _there([here[i] for i in counted])
        norm = _total_norm(parts, order, use_foreach) if parts else None
        if grid is not None and joins:
            # Ranks send one dtype, also those without a gradient.
            dtypes = {dtype.to_real() for dtype in set(map(dtype_of, (params[i] for i in places)))}
            dtype, device = reduce(torch.promote_types, dtypes, torch.float32), local([params[places[0]]])[0].device
            # Zeros are made on the device: a copy from the host would wait for it.
            norm = torch.zeros((), dtype=dtype, device=device) if norm is None else norm.to(device, dtype)
            norm = _over_ranks(norm, order, grid.groups, call, "the norm of its part")
        if norm is not None:
            norms.append(norm)
    if order == 2.0:
        return joined_norm(norms)
    return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms, order)


def _over_ranks(norm: Tensor, order: float, groups: list[Any], call: str, has: str) -> Tensor:
    """Joins the ranks' norms into one."""
    if not order > 0:
        raise AmpValueError(f"norm_type is {order}, expected a number above 0 or 'inf' where ranks join their norms")
    wide = norm.to(torch.float64)
    if order == math.inf:
        return maximum_over_ranks(wide, groups, call, has).to(norm.dtype)
    joined = reduced_over(wide**order, torch.distributed.ReduceOp.SUM, groups, call, has)
    return (joined ** (1 / order)).to(norm.dtype)


def _scale_down(grads: Sequence[Tensor], max_norm: float | Tensor, norm: Tensor) -> None:
    if norm.dtype == torch.float32 and not isinstance(max_norm, Tensor):
        return foreach.scale(grads, grads, Unread(), Clipped(1.0, norm, max_norm))
    bound = move(max_norm, norm.device) if isinstance(max_norm, Tensor) else max_norm
    coefficient = torch.clamp(bound / (norm + 1e-6), max=1.0)
    # The ops accept an fp64 factor only on the CPU.
    if {device.type for device in set(map(device_of, grads))} != {"cpu"}:
        coefficient = coefficient.float()
    foreach.scale(grads, grads, Unread(), PerDevice(coefficient))
