"""Steps by norms of whole tensors, put together of ops: NovoGrad; LAMB and the norms of LARC where ranks hold parts of
DTensors; and both optimizers for apex's amp_C.

The op of LAMB makes norms, directions and steps at once. That serves neither ranks, none of which knows a norm, nor
amp_C, whose LAMB leaves its updates behind. Here the op of LAMB makes Adam's directions (a step of length -1 from
weights of 0), the op of SGD averages gradients likewise, and takes the steps.

Norms over ranks: each rank makes sums of squares of its parts, one all_reduce adds up those of all parameters, and the
step goes on with the roots. Every rank sends a number for each parameter with parts, in the order of groups: 0 where
it has no elements or no gradient.

No host sync.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx._collectives import reduced_over
from ampctx.kernels import foreach
from ampctx.kernels.foreach import Factor, PerDevice, Unread, move, product, taken
from ampctx.kernels.grouping import buckets
from ampctx.kernels.reference import Tensors, compute_dtype, widest
from ampctx.kernels.sharding import any_sharded, is_split, local, spreads_of, wrote
from ampctx.kernels.spec import SPECS
from ampctx.optimizers import _work
from ampctx.optimizers._options import Group
from ampctx.optimizers._work import Work
from ampctx.weights.step import Step
from ampctx.weights.store import STORES

Lists = Mapping[str, Tensors]

_INF = float("inf")
_SGD: dict[str, Any] = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
_SGD |= {"nesterov": False, "wd_after_momentum": False}
_PLAIN = ("nearest", False, False)
# What the op of LAMB leaves out where it makes directions.
_NO_STEP: dict[str, Any] = {"lr": -1.0, "weight_decay": 0.0, "adam_w_mode": True, "use_nvlamb": False}
_NO_STEP |= {"global_grad_norm": 0.0, "max_grad_norm": 0.0}


# --- on lists of tensors ----------------------------------------------------------------------------------------------


def run_op(op: str, lists: Lists, along: Lists, numbers: Mapping[str, Any]) -> None:
    """An op of ``ampctx.optimizer_ops``, once for each combination of dtypes and layouts. ``lists``: of parameter size;
    those of state may be left out. ``along``: its other lists."""
    kind = ("copy", False, False) if "extras" in lists else _PLAIN
    empty: dict[str, Any] = {name: [] for name in ("extras", *(state.name for state in SPECS[op].sized))}
    for device, fused, rows in buckets(*lists.values(), along=list(along.values())):
        named = {**empty, **dict(zip([*lists, *along], rows, strict=True))}
        _work.call(op, Work({}, kind, device, fused, [], named), {"maximize": False, "seed": 0, **numbers})


def stacked(numbers: Tensors) -> Tensor:
    """One-element tensors as one tensor."""
    return torch.stack([t.reshape(()) if t.dim() else t for t in numbers])


def multiply(tensors: Tensors, factors: Tensor) -> None:
    """Each tensor times its factor, in place: no op takes one for each tensor."""
    deque(map(Tensor.mul_, tensors, factors.unbind()), maxlen=0)


def divide(tensors: Tensors, divisors: Tensor) -> None:
    """Each tensor by its divisor, in place."""
    deque(map(Tensor.div_, tensors, divisors.unbind()), maxlen=0)


def adapt(updates: Tensors, of_params: Tensor, of_updates: Tensor) -> None:
    """LAMB's ratio: each update times ||p|| / ||u||, or 1 where a norm is 0."""
    multiply(updates, torch.where((of_params != 0) & (of_updates != 0), of_params / of_updates, 1.0))


class Layers:
    """Tensors that step together, in any mix of dtypes and layouts.

    ``lists``: by the names of the ops' arguments: grads, params, moments, and ``extras`` that become copies of params.
    Where ``found_inf``, one element, is not 0, the ops change nothing.
    """

    def __init__(self, lists: Lists, found_inf: Tensor) -> None:
        self.lists, self.found_inf = lists, found_inf
        self.dtype = compute_dtype(*(t for tensors in lists.values() for t in tensors))

    def new(self) -> list[Tensor]:
        """Zeros in the layouts of the params and the type of arithmetic."""
        return [torch.zeros_like(p, dtype=self.dtype, requires_grad=False) for p in self.lists["params"]]

    def run(self, op: str, lists: Lists, along: Lists, inv_scale: Any = 1.0, **numbers: Any) -> None:
        """Calls an op that rounds nothing to 16 bits but ``extras``."""
        factor = inv_scale.on(self.found_inf.device) if isinstance(inv_scale, PerDevice) else inv_scale
        run_op(op, lists, along, {"found_inf": self.found_inf, "inv_scale": factor, **numbers})

    def directions(
        self, factor: Factor, weights: Tensors, weight_decay: float, adam_w_mode: bool, taken: Tensor, **options: Any
    ) -> list[Tensor]:
        """Adam's directions for the gradients times ``factor``, with weight decay, as new tensors. Moments advance.

        ``taken``: the steps before, a number for each tensor; overwritten. After a skip directions are decay alone.
        """
        read = self.lists["grads"]
        if weight_decay != 0 and not adam_w_mode:
            read = self.new()
            foreach.axpby(self.lists["grads"], weights, read, Unread(), factor, weight_decay)
            factor = 1.0
        updates = self.new()
        moments = {name: self.lists[name] for name in ("exp_avgs", "exp_avg_sqs")}
        scales = {name: self.lists[name] for name in ("exp_avg_scales", "exp_avg_sq_scales") if name in self.lists}
        lists = {"grads": read, "params": updates, **moments}
        self.run("lamb", lists, {"steps": list(taken.unbind()), **scales}, factor, **{**options, **_NO_STEP})
        if weight_decay != 0 and adam_w_mode:
            foreach.axpby(updates, weights, updates, Unread(), 1.0, weight_decay)
        return updates

    def norms(self, factor: Factor, order: float) -> Tensor:
        """The norm of each gradient times ``factor``: of order 2 or inf."""
        grads = self.lists["grads"]
        if order == _INF:
            largest = torch.stack(list(map(_largest, grads))).to(self.dtype)
            return (largest * (factor.on(largest.device) if isinstance(factor, PerDevice) else factor)).abs()
        return foreach.unscale_l2norms(grads, Unread(), factor)[1].to(self.dtype)

    def normalized(
        self,
        factor: Factor,
        weights: Tensors,
        norms: Tensor,
        taken: Tensor,
        *,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        grad_averaging: bool,
        reg_inside_moment: bool,
        inf_norm: bool,
        init_zero: bool,
    ) -> list[Tensor]:
        """NovoGrad's moves for the gradients times ``factor``, without decoupled decay, as new tensors. The averages
        and the running norms advance.

        norms: of these gradients. taken: the steps before, a number for each tensor; overwritten.
        """
        of_grads, taken = self.lists["exp_avg_sqs"], taken + 1
        n = stacked(of_grads).to(self.dtype)
        blended = beta2 * n + (1 - beta2) * norms
        if not inf_norm:
            blended = (beta2 * n * n + (1 - beta2) * norms * norms).sqrt()
        if not init_zero:
            blended = torch.where(taken == 1, norms, blended)
        blended = torch.where(self.found_inf.reshape(()) != 0, n, blended)
        foreach.scale(list(blended.unbind()), of_grads, Unread(), 1.0)
        c1, d = torch.ones_like(blended), blended + eps
        if bias_correction:
            t = taken.to(widest(taken.device))
            c1, rsc2 = (1 - beta1**t).to(self.dtype), (1 / (1 - beta2**t).sqrt()).to(self.dtype)
            d = blended * rsc2 + eps
        read = self.lists["grads"]
        if reg_inside_moment:
            read = self.new()
            foreach.scale(self.lists["grads"], read, Unread(), factor)
            divide(read, d)
            foreach.axpby(read, weights, read, Unread(), 1.0, weight_decay)
            factor = 1.0
        moves = self.new()
        averaged = {"grads": read, "params": moves, "momentum_buffers": self.lists["exp_avgs"]}
        # Counts of the step after this one: at 0 the op would start the average with the whole gradient.
        along: dict[str, Tensors] = {"steps": list(taken.unbind())}
        if "exp_avg_scales" in self.lists:
            along["momentum_buffer_scales"] = self.lists["exp_avg_scales"]
        options = {**_SGD, "momentum": beta1, "dampening": beta1 if grad_averaging else 0.0}
        self.run("sgd", averaged, along, factor, lr=-1.0, **options)
        divide(moves, c1 if reg_inside_moment else d * c1)
        return moves

    def step(self, moves: Tensors, lr: Any, **options: Any) -> None:
        """``params -= lr * moves``, with SGD's options."""
        kept = {name: self.lists[name] for name in ("params", "momentum_buffers", "extras") if name in self.lists}
        steps = torch.ones(len(moves), dtype=torch.float32, device=self.found_inf.device).unbind()
        self.run("sgd", {"grads": moves, **kept}, {"steps": steps}, lr=lr, **{**_SGD, **options})


def take_step(work: Work, moves: Tensors, arguments: Mapping[str, Any], **options: Any) -> None:
    """``params -= lr * (inv_scale * moves + weight_decay * params)`` of a call with these ``arguments`` of its
    optimizer, whose gradients have been unscaled and turned round. The step counts advance. ``options``: of SGD."""
    lists = {"grads": moves, "momentum_buffers": [], **{n: work.lists[n] for n in ("params", "extras", "steps")}}
    given = {"inv_scale": 1.0, "maximize": False, "unscale_grads": False, **_SGD}
    given |= {name: arguments[name] for name in ("found_inf", "lr", "seed")}
    _work.call("sgd", work._replace(lists=lists), {**given, **options})
    if work.sharded:
        wrote(work.members)


# --- over ranks -------------------------------------------------------------------------------------------------------


def any_split(groups: Iterable[Group]) -> bool:
    """Whether some parameters are DTensors of which other ranks hold other elements."""
    params = [p for group in groups for p in group["params"]]
    return any_sharded(params) and any(spread.joins for spread in spreads_of(params))


class Norms:
    """Norms of tensors of an optimizer's parameters, joined over the ranks, on which its groups are the same. ``call``:
    for messages of failed collectives."""

    def __init__(self, groups: Sequence[Group], call: str) -> None:
        self._call = call
        self.params = list({id(p): p for group in groups for p in group["params"]}.values())
        self._place = {id(p): i for i, p in enumerate(self.params)}
        parted = [p for p in self.params if is_split(p)]
        spreads, self.device = spreads_of(parted), local(parted[:1])[0].device
        self._split = set(map(id, parted))
        # The places of the parameters with parts, of each grid. Parameters of meshes of one rank need nobody.
        joined = [(spread.grid, spread.places) for spread in spreads if spread.grid is not None]
        self._joined = [(grid, [self._place[id(parted[i])] for i in places]) for grid, places in joined]
        # Ids of those whose part another rank counts.
        self._elsewhere = self._split - {id(parted[i]) for spread in spreads for i in spread.counted}

    def _index(self, places: Sequence[int]) -> Tensor:
        return move(torch.tensor(places, dtype=torch.int64, device="cpu"), self.device)

    def empty(self) -> Tensor:
        """A number of 0 for each parameter."""
        return torch.zeros(len(self.params), dtype=widest(self.device), device=self.device)

    def add(self, values: Tensor, params: Tensors, tensors: Tensors, factor: Factor = 1, order: float = 2) -> None:
        """Sets ``values`` of the parameters to the squares of the L2 norms of ``tensors``, times the square of a
        factor; or with order inf to their largest magnitudes."""
        pairs = zip(params, tensors, strict=True)
        counted = [(self._place[id(p)], t) for p, t in pairs if id(p) not in self._elsewhere]
        if not counted:
            return
        places, parts = map(list, zip(*counted, strict=True))
        if order == _INF:
            scaled = torch.stack([move(_largest(t), self.device).to(values.dtype) for t in parts])
            scaled = scaled * (factor.on(self.device).to(values.dtype) if isinstance(factor, PerDevice) else factor)
            values.index_copy_(0, self._index(places), scaled.abs())
            return
        for found, norms in foreach.unscale_l2norms_of(parts, Unread(), factor)[1]:
            index = self._index([places[i] for i in found])
            values.index_copy_(0, index, move(norms, self.device).to(values.dtype).square())

    def join(self, *rows: Tensor, order: float = 2.0) -> list[Tensor]:
        """The norms in rows of numbers of all ranks. One all_reduce for each grid."""
        reduce, values = torch.distributed.ReduceOp, torch.stack(rows)
        op = reduce.MAX if order == _INF else reduce.SUM
        for grid, places in self._joined:
            index = self._index(places)
            sent = values.index_select(1, index)
            reduced_over(sent, op, grid.groups, self._call, "sums over its parts of parameters")
            values.index_copy_(1, index, sent)
        return list(values if order == _INF else values.sqrt())

    def add_idle(self, values: Tensor, stepped: Tensors) -> None:
        """Sets ``values`` of parameters with parts that have no gradient on this rank: another one may have."""
        with_gradient = set(map(id, stepped))
        idle = [p for p in self.params if id(p) in self._split and id(p) not in with_gradient]
        self.add(values, idle, local(idle))

    def of_params(self, values: Tensor, params: Tensors) -> Tensor:
        return values.index_select(0, self._index([self._place[id(p)] for p in params]))

    def of(self, values: Tensor, call: StepLayers) -> Tensor:
        """The values of the parameters of a call, on its device and in its type of arithmetic."""
        return move(self.of_params(values, call.work.members), call.work.device).to(call.dtype)


def _largest(t: Tensor) -> Tensor:
    wide = t.to(compute_dtype(t))
    return torch.linalg.vector_norm(wide, _INF) if t.numel() else torch.zeros((), dtype=wide.dtype, device=t.device)


class StepLayers(Layers):
    """The tensors of one op call of an optimizer's step."""

    def __init__(self, optimizer: Any, work: Work, step: Step) -> None:
        # The skip counts are for the op that takes the step.
        self.arguments, self.skips = optimizer._arguments(work, step._replace(counts=None)), step.counts
        super().__init__(work.lists, self.arguments["found_inf"])
        self.optimizer, self.work, self.group = optimizer, work, work.group
        self.inv_scale = step.inv_scale
        if work.is_pending and step.pending is not None:
            self.inv_scale = product(step.pending.inv_scale, self.inv_scale)
        if step.unscales and not work.is_pending:
            _work.unscale(self.lists["grads"], step.found_inf, self.inv_scale)
            self.inv_scale = 1.0

    def weights(self) -> Tensors:
        """The weights before the step: with what they lack in 16 bits."""
        params, extras, store = self.lists["params"], self.lists["extras"], STORES.get(self.work.kind[0])
        if store is None or store.mode == "copy":
            return params
        return [store.fp32(p, extra.reshape(p.shape)) for p, extra in zip(params, extras, strict=True)]

    def taken(self) -> Tensor:
        """A copy of the step counts."""
        return stacked(self.lists["steps"])

    def signed(self, factor: Factor) -> Factor:
        return product(factor, -1.0) if self.group["maximize"] else factor

    def run(self, op: str, lists: Lists, along: Lists, inv_scale: Any = 1.0, **numbers: Any) -> None:
        work = self.work._replace(kind=_PLAIN, lists={"extras": [], **lists, **along})
        factor = inv_scale.on(work.device) if isinstance(inv_scale, PerDevice) else inv_scale
        given = {"maximize": False, "seed": self.group["seed"], "unscale_grads": False}
        _work.call(op, work, {"found_inf": self.found_inf, "inv_scale": factor, **given, **numbers})

    def finish(self, moves: Tensors, **options: Any) -> None:
        skips = () if self.skips is None else taken(self.skips, self.work.device)
        take_step(self.work, moves, self.arguments, skips=skips, **options)


def lamb(optimizer: Any, works: Sequence[Work], step: Step) -> None:
    """A step of LAMB. Two all_reduces; one where no group needs a ratio of norms."""
    norms = Norms(optimizer.param_groups, f"{type(optimizer).__name__}.step()")
    calls = [StepLayers(optimizer, work, step) for work in works]
    of_w, of_g, of_u = norms.empty(), norms.empty(), norms.empty()
    weights = [call.weights() for call in calls]
    for call, w in zip(calls, weights, strict=True):
        norms.add(of_w, call.work.members, w)
        norms.add(of_g, call.work.members, call.lists["grads"], call.inv_scale)
    norms.add_idle(of_w, [p for call in calls for p in call.work.members])
    of_w, of_g = norms.join(of_w, of_g)
    total = torch.linalg.vector_norm(of_g)
    updates = []
    for call, w in zip(calls, weights, strict=True):
        factor, options = call.inv_scale, optimizer._op_options(call.group)
        if most := call.group["max_grad_norm"]:
            norm = move(total, call.work.device)
            factor = product(PerDevice(torch.where(norm > most, most / norm, 1.0).to(call.dtype)), factor)
        updates.append(call.directions(call.signed(factor), w, taken=call.taken(), **options))
        norms.add(of_u, call.work.members, updates[-1])

    def has_ratio(group: Group) -> bool:
        return bool(optimizer.use_nvlamb) or group["weight_decay"] != 0

    if any(map(has_ratio, optimizer.param_groups)):
        (of_u,) = norms.join(of_u)
    for call, moves in zip(calls, updates, strict=True):
        if has_ratio(call.group):
            adapt(moves, norms.of(of_w, call), norms.of(of_u, call))
        call.finish(moves)


def novograd(optimizer: Any, works: Sequence[Work], step: Step) -> None:
    """A step of NovoGrad over ranks. One all_reduce, and another one if groups differ in their ``norm_type``."""
    norms = Norms(optimizer.param_groups, f"{type(optimizer).__name__}.step()")
    calls = [StepLayers(optimizer, work, step) for work in works]
    by_order: dict[float, Tensor] = {}
    for order in dict.fromkeys(map(norm_order, optimizer.param_groups)):
        values = norms.empty()
        for call in calls:
            if norm_order(call.group) == order:
                norms.add(values, call.work.members, call.lists["grads"], call.inv_scale, order)
        (by_order[order],) = norms.join(values, order=order)
    for call in calls:
        novograd_step(call, norms.of(by_order[norm_order(call.group)], call))


def norm_order(group: Group) -> float:
    """The order of NovoGrad's norms."""
    return _INF if group["norm_type"] == 0 else 2.0


def novograd_step(call: StepLayers, norms: Tensor) -> None:
    """A step of NovoGrad with the norms of the unscaled gradients."""
    options = call.optimizer._op_options(call.group)
    moves = call.normalized(call.signed(call.inv_scale), call.weights(), norms, call.taken(), **options)
    call.finish(moves, weight_decay=0.0 if options["reg_inside_moment"] else options["weight_decay"])


def larc_norms(
    groups: Sequence[Group], members: Sequence[tuple[list[Tensor], list[Tensor]]], inv_scale: Factor
) -> list[list[Tensors]]:
    """For each group the norms of its gradients and of its parameters, where ranks hold parts, by one all_reduce; else
    none. ``members``: for each group its gradients and their parameters."""
    if not any_split(groups):
        return [[] for _ in groups]
    norms = Norms(groups, "LARC.step()")
    of_g, of_w = norms.empty(), norms.empty()
    for grads, params in members:
        norms.add(of_g, params, local(grads), inv_scale)
        norms.add(of_w, params, local(params))
    norms.add_idle(of_w, [p for _, params in members for p in params])
    joined = norms.join(of_g, of_w)
    return [[norms.of_params(values, params).unbind() for values in joined] for _, params in members]
