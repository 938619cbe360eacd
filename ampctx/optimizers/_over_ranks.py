"""Steps by the whole of each parameter where parameters are DTensors split over ranks: LAMB, NovoGrad, LARC and Muon.

Muon gathers its matrices. The others need norms, which no rank knows. So each makes sums of squares of its parts, one
all_reduce adds up those of all parameters, and the step goes on with the roots. Every rank sends a number for each
split parameter in the order of the groups: 0 where it has no elements or no gradient. The ops of LAMB and NovoGrad make
these norms themselves, so their steps are put together here from ops that do not: that of LAMB makes Adam's directions
(a step of length -1 from weights of 0), that of SGD averages gradients likewise, and takes the steps.

No host sync.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx._collectives import named_collective
from ampctx.casts.arguments import autocast_off
from ampctx.kernels import foreach
from ampctx.kernels.foreach import Factor, PerDevice, Unread, move, product
from ampctx.kernels.reference import compute_dtype, scalar, widest
from ampctx.kernels.reference_steps import join
from ampctx.kernels.sharding import Grid, any_sharded, by_layout, grids_of, is_split, local, wrote
from ampctx.optimizers import _work
from ampctx.optimizers._options import Group
from ampctx.optimizers._orthogonal import has_split_matrices, stacks
from ampctx.optimizers._work import Scaling, Work

_SGD: dict[str, Any] = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "wd_after_momentum": False}
_INF = float("inf")


def any_split(groups: Iterable[Group]) -> bool:
    """Whether some parameters are DTensors of which this rank may hold only some of the elements."""
    return any(any_sharded(group["params"]) and any(map(is_split, group["params"])) for group in groups)


class Norms:
    """Norms of tensors that belong to the parameters of an optimizer, joined over the ranks.

    Args:
        groups: its groups, the same on every rank.
        call: for messages of failed collectives.
    """

    def __init__(self, groups: Sequence[Group], call: str) -> None:
        self._call = call
        self.params = list({id(p): p for group in groups for p in group["params"]}.values())
        self._place = {id(p): i for i, p in enumerate(self.params)}
        split = {of: alike for of, alike in by_layout(self.params).items() if is_split(alike[0])}
        self._split = {id(p) for alike in split.values() for p in alike}
        grids = grids_of(alike[0] for alike in split.values())
        # The places of the split parameters of each grid. Parameters of meshes of one rank need nobody.
        self._joined: dict[Grid, list[int]] = {grid: [] for grid in grids.values()}
        # Ids of those whose part another rank counts.
        self._elsewhere: set[int] = set()
        for (mesh, _), alike in split.items():
            if (grid := grids.get(mesh)) is not None:
                self._joined[grid] += [self._place[id(p)] for p in alike]
                self._elsewhere.update(map(id, () if grid.counts(alike[0]) else alike))
        self.device = local([self.params[min(map(self._place.__getitem__, self._split))]])[0].device

    def _index(self, places: Sequence[int], device: torch.device) -> Tensor:
        return move(torch.tensor(places, dtype=torch.int64), device)

    def empty(self) -> Tensor:
        """A number of 0 for each parameter."""
        return torch.zeros(len(self.params), dtype=widest(self.device), device=self.device)

    def add(
        self,
        values: Tensor,
        params: Sequence[Tensor],
        tensors: Sequence[Tensor],
        factor: Factor = 1.0,
        order: float = 2.0,
    ) -> None:
        """Sets ``values`` of the parameters to the squares of the L2 norms of ``tensors``, times the square of a
        factor; or with order inf to their largest magnitudes."""
        counted = [
            (self._place[id(p)], t) for p, t in zip(params, tensors, strict=True) if id(p) not in self._elsewhere
        ]
        if not counted:
            return
        places, parts = [place for place, _ in counted], [t for _, t in counted]
        if order == _INF:
            largest = [_largest(t) for t in parts]
            scaled = torch.stack([move(x, self.device).to(values.dtype) for x in largest])
            scaled = scaled * (factor.on(self.device).to(values.dtype) if isinstance(factor, PerDevice) else factor)
            values.index_copy_(0, self._index(places, self.device), scaled.abs())
            return
        for found, norms in foreach.unscale_l2norms_of(parts, Unread(), factor)[1]:
            index = self._index([places[i] for i in found], self.device)
            values.index_copy_(0, index, move(norms, self.device).to(values.dtype).square())

    def join(self, *rows: Tensor, order: float = 2.0) -> list[Tensor]:
        """The norms in rows of numbers of all ranks. One all_reduce for each grid."""
        op = torch.distributed.ReduceOp
        values = torch.stack(rows)
        for grid, places in self._joined.items():
            index = self._index(places, self.device)
            sent = values.index_select(1, index)
            grid.reduce(sent, op.MAX if order == _INF else op.SUM, self._call, "sums over its parts of parameters")
            values.index_copy_(1, index, sent)
        return list(values if order == _INF else values.sqrt())

    def add_idle(self, values: Tensor, stepped: Sequence[Tensor]) -> None:
        """Sets ``values`` of split parameters that have no gradient on this rank: another one may have."""
        with_gradient = set(map(id, stepped))
        idle = [p for p in self.params if id(p) in self._split and id(p) not in with_gradient]
        self.add(values, idle, local(idle))

    def of_params(self, values: Tensor, params: Sequence[Tensor]) -> Tensor:
        return values.index_select(0, self._index([self._place[id(p)] for p in params], self.device))

    def of(self, values: Tensor, call: _Call) -> Tensor:
        """The values of the parameters of a call, on its device and in its type of arithmetic."""
        return move(self.of_params(values, call.members), call.work.device).to(call.dtype)


def _largest(t: Tensor) -> Tensor:
    wide = t.to(compute_dtype(t))
    return torch.linalg.vector_norm(wide, _INF) if t.numel() else torch.zeros((), dtype=wide.dtype, device=t.device)


class _Call:
    """One call of a step, whose tensors are those of ``work``."""

    def __init__(self, optimizer: Any, work: Work, scaling: Scaling) -> None:
        self.optimizer, self.work, self.scaling = optimizer, work, scaling
        self.group, self.members = work.group, work.members
        self.grads, self.params = work.lists["grads"], work.lists["params"]
        self.dtype = compute_dtype(*(t for name in work.lists for t in work.lists[name]))
        found_inf = scaling.found_inf
        self.found_inf = optimizer._zero_flag(work.device) if found_inf is None else found_inf.on(work.device)
        self.skip = self.found_inf.reshape(()) != 0
        self.inv_scale = scaling.inv_scale
        if work.is_lazy and scaling.lazy is not None:
            self.inv_scale = product(scaling.lazy.inv_scale, self.inv_scale)
        if scaling.unscales and not work.is_lazy:
            self.inv_scale = self._unscale(self.inv_scale)

    def _unscale(self, inv_scale: Factor) -> Factor:
        """Stores the unscaled gradients, unless the step is skipped."""
        factor = inv_scale.on(self.work.device) if isinstance(inv_scale, PerDevice) else inv_scale
        foreach.scale(self.grads, self.grads, Unread(), PerDevice(torch.where(self.skip, 1.0, factor)))
        return 1.0

    def weights(self) -> Sequence[Tensor]:
        """The weights before the step: with what they lack in 16 bits."""
        write_back, extras = self.work.kind[0], self.work.lists["extras"]
        if write_back == "split":
            return [join(p, extra.reshape(p.shape)) for p, extra in zip(self.params, extras, strict=True)]
        if write_back == "kahan":
            return [p.float() + extra.reshape(p.shape).float() for p, extra in zip(self.params, extras, strict=True)]
        return self.params

    def new(self) -> list[Tensor]:
        return [torch.zeros_like(p, dtype=self.dtype, requires_grad=False) for p in self.params]

    def signed(self, factor: Factor) -> Factor:
        return product(factor, -1.0) if self.group["maximize"] else factor

    def run(self, op: str, lists: Mapping[str, Any], inv_scale: Factor, lr: float, options: Mapping[str, Any]) -> None:
        """Calls an op that writes to ``lists`` alone, and rounds nothing to 16 bits."""
        work = self.work._replace(kind=("nearest", False, False), lists={"extras": [], **lists})
        none = {"maximize": False, "seed": self.group["seed"], "unscale_grads": False, "skips": ()}
        factor = inv_scale.on(self.work.device) if isinstance(inv_scale, PerDevice) else inv_scale
        _work.call(op, work, {"found_inf": self.found_inf, "inv_scale": factor, "lr": lr, **none, **options})

    def step(self, moves: Sequence[Tensor], weight_decay: float = 0.0) -> None:
        """``p -= lr * (move + weight_decay * p)``, and the step counts advance."""
        work, group, device = self.work, self.group, self.work.device
        lists = {"grads": moves, "params": self.params, "momentum_buffers": [], "extras": work.lists["extras"]}
        lr, skips = group["lr"], self.scaling.skips
        _work.call(
            "sgd",
            work._replace(lists={**lists, "steps": work.lists["steps"]}),
            {
                **_SGD,
                "found_inf": self.found_inf,
                "inv_scale": 1.0,
                "lr": _work.on_device(lr, device) if isinstance(lr, Tensor) else lr,
                "weight_decay": weight_decay,
                "maximize": False,
                "seed": group["seed"],
                "unscale_grads": False,
                "skips": () if skips is None else skips.take(device, moves),
            },
        )
        if work.sharded:
            wrote(self.members)


def _multiply(tensors: Sequence[Tensor], factors: Tensor) -> None:
    """Each tensor times its factor: no op takes one for each tensor."""
    for t, factor in zip(tensors, factors.unbind(), strict=True):
        t.mul_(factor)


def lamb(optimizer: Any, works: Sequence[Work], scaling: Scaling) -> None:
    """A step of LAMB. Two all_reduces; one where no group needs a ratio of norms."""
    norms = Norms(optimizer.param_groups, f"{type(optimizer).__name__}.step()")
    calls = [_Call(optimizer, work, scaling) for work in works]
    of_w, of_g, of_u = norms.empty(), norms.empty(), norms.empty()
    weights = [call.weights() for call in calls]
    for call, w in zip(calls, weights, strict=True):
        norms.add(of_w, call.members, w)
        norms.add(of_g, call.members, call.grads, call.inv_scale)
    norms.add_idle(of_w, [p for call in calls for p in call.members])
    of_w, of_g = norms.join(of_w, of_g)
    total = torch.linalg.vector_norm(of_g)
    directions = []
    for call, w in zip(calls, weights, strict=True):
        directions.append(_directions(call, w, move(total, call.work.device)))
        norms.add(of_u, call.members, directions[-1])
    if any(_has_ratio(optimizer, group) for group in optimizer.param_groups):
        (of_u,) = norms.join(of_u)
    for call, updates in zip(calls, directions, strict=True):
        if _has_ratio(optimizer, call.group):
            norm, norm_of_u = (norms.of(values, call) for values in (of_w, of_u))
            has_both = (norm != 0) & (norm_of_u != 0)
            _multiply(updates, torch.where(has_both, norm / norm_of_u, 1.0))
        call.step(updates)


def _has_ratio(optimizer: Any, group: Group) -> bool:
    return bool(optimizer.use_nvlamb) or group["weight_decay"] != 0


def _directions(call: _Call, weights: Sequence[Tensor], norm: Tensor) -> list[Tensor]:
    """Adam's directions with weight decay, as new tensors. Moments advance."""
    optimizer, group = call.optimizer, call.group
    options, decay = optimizer._op_options(group), group["weight_decay"]
    factor = call.inv_scale
    if most := group["max_grad_norm"]:
        down = torch.where(norm > most, most / norm, torch.ones_like(norm)).to(call.dtype)
        factor = product(PerDevice(down), factor)
    factor, read = call.signed(factor), call.grads
    if not optimizer.adam_w_mode and decay != 0:
        read = call.new()
        foreach.axpby(call.grads, weights, read, Unread(), _factor_of_op(factor), decay)
        factor = 1.0
    updates = call.new()
    # The step of SGD that follows advances the counts themselves.
    steps = list(torch.stack([step.reshape(()) for step in call.work.lists["steps"]]).unbind())
    lists = {"grads": read, "params": updates, "steps": steps}
    moments = ("exp_avgs", "exp_avg_sqs", "exp_avg_scales", "exp_avg_sq_scales")
    lists.update((name, call.work.lists[name]) for name in moments if name in call.work.lists)
    plain = {"weight_decay": 0.0, "max_grad_norm": 0.0, "use_nvlamb": False, "adam_w_mode": True}
    call.run("lamb", lists, _factor_of_op(factor), -1.0, {**options, **plain, "global_grad_norm": 0.0})
    if optimizer.adam_w_mode and decay != 0:
        foreach.axpby(updates, weights, updates, Unread(), 1.0, decay)
    return updates


def _factor_of_op(factor: Factor) -> Factor:
    """The ops accept an fp64 factor only on the CPU."""
    if isinstance(factor, PerDevice) and factor.value.device.type != "cpu":
        return PerDevice(factor.value.float())
    return factor


def novograd(optimizer: Any, works: Sequence[Work], scaling: Scaling) -> None:
    """A step of NovoGrad. One all_reduce, and another one if groups differ in their ``norm_type``."""
    norms = Norms(optimizer.param_groups, f"{type(optimizer).__name__}.step()")
    calls = [_Call(optimizer, work, scaling) for work in works]
    by_order: dict[float, Tensor] = {}
    for order in dict.fromkeys(map(_order, optimizer.param_groups)):
        values = norms.empty()
        for call in calls:
            if _order(call.group) == order:
                norms.add(values, call.members, call.grads, call.inv_scale, order)
        (by_order[order],) = norms.join(values, order=order)
    for call in calls:
        _novograd_step(optimizer, call, norms.of(by_order[_order(call.group)], call))


def _order(group: Group) -> float:
    return _INF if group["norm_type"] == 0 else 2.0


def _novograd_step(optimizer: Any, call: _Call, norm: Tensor) -> None:
    group, work, skip = call.group, call.work, call.skip
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    kept = work.lists["exp_avg_sqs"]
    n = torch.stack([each.reshape(()) for each in kept]).to(call.dtype)
    taken = torch.stack([step.reshape(()) for step in work.lists["steps"]]) + 1
    blended = beta2 * n + (1 - beta2) * norm
    if group["norm_type"] != 0:
        blended = (beta2 * n * n + (1 - beta2) * norm * norm).sqrt()
    if not group["init_zero"]:
        blended = torch.where(taken == 1, norm, blended)
    blended = torch.where(skip, n, blended)
    for each, new in zip(kept, blended.unbind(), strict=True):
        each.copy_(new.reshape(each.shape))
    rc1, rsc2 = torch.ones_like(blended), torch.ones_like(blended)
    if group["bias_correction"]:
        t = taken.to(widest(taken.device))
        rc1, rsc2 = (1 / (1 - beta1**t)).to(call.dtype), (1 / (1 - beta2**t).sqrt()).to(call.dtype)
    denominator = blended * rsc2 + group["eps"]
    read, factor, inside = call.grads, call.signed(call.inv_scale), optimizer.moment_mode == 0
    if inside:
        read = call.new()
        foreach.scale(call.grads, read, Unread(), _factor_of_op(factor))
        _multiply(read, 1 / denominator)
        foreach.axpby(read, call.weights(), read, Unread(), 1.0, decay)
        factor = 1.0
    moves = call.new()
    # Of the step after this one: at 0 the op would start the average with the whole gradient.
    begun = list(taken.unbind())
    lists = {"grads": read, "params": moves, "momentum_buffers": work.lists["exp_avgs"], "steps": begun}
    lists["momentum_buffer_scales"] = work.lists.get("exp_avg_scales", ())
    dampening = beta1 if group["grad_averaging"] else 0.0
    average = {**_SGD, "momentum": beta1, "dampening": dampening, "weight_decay": 0.0}
    call.run("sgd", lists, _factor_of_op(factor), -1.0, average)
    _multiply(moves, rc1 if inside else rc1 / denominator)
    call.step(moves, 0.0 if inside else decay)


def muon(optimizer: Any, works: Sequence[Work], scaling: Scaling) -> None:
    """A step of FusedMuon. One all_gather for each stack of split matrices, in bf16: each rank orthogonalises all of
    them, and takes its rows."""
    directions: dict[Tensor, Tensor] = {}
    calls = []
    for work in works:
        if work.group["use_muon"] and has_split_matrices(work.members[0]):
            arguments = optimizer._arguments(work, scaling)
            directions.update(zip(work.members, optimizer.directions(work, arguments), strict=True))
            calls.append((work, arguments))
        else:
            optimizer._launch(work, scaling, None)
    for group in optimizer.param_groups:
        if group["use_muon"]:
            # A parameter without gradient on this rank takes part: another rank may have one.
            members = [p for p in group["params"] if has_split_matrices(p) and (p in directions or p.requires_grad)]
            for placed, alike in by_layout(members).items():
                for places in stacks((p.shape, p.numel()) for p in alike):
                    with autocast_off():
                        _orthogonalize_rows(optimizer, group, placed, [alike[i] for i in places], directions)
    for work, arguments in calls:
        optimizer.descend(work, arguments, [directions[p] for p in work.members])


def _orthogonalize_rows(
    optimizer: Any, group: Group, placed: Any, params: Sequence[Tensor], directions: dict[Tensor, Tensor]
) -> None:
    """Replaces the directions of the rank's rows of ``params``, which have one shape and lie on ``placed``: mesh and
    placements."""
    tensor, (mesh, placements) = sys.modules["torch.distributed.tensor"], placed
    own = [directions[p] if p in directions else _no_direction(p) for p in params]
    stacked = [tensor.Replicate() if each.is_replicate() else tensor.Shard(1) for each in placements]
    shape = torch.Size((len(params), *params[0].shape))
    rows = tensor.DTensor.from_local(
        torch.stack(own), mesh, stacked, run_check=False, shape=shape, stride=torch.empty(shape, device="meta").stride()
    )
    call = f"{type(optimizer).__name__}.step()"
    with named_collective(call, grids_of(params)[mesh].groups[0], f"{len(params)} of the matrices to gather"):
        whole = rows.full_tensor()
    if not any(p in directions for p in params):
        return
    updates = torch.stack(optimizer.orthogonalized(group, whole.unbind()))
    everywhere = [tensor.Replicate()] * mesh.ndim
    mine = tensor.DTensor.from_local(updates, mesh, everywhere, run_check=False).redistribute(mesh, stacked).to_local()
    directions.update(zip(params, mine.unbind(), strict=True))


def _no_direction(p: Tensor) -> Tensor:
    (rows,) = local([p])
    return torch.zeros(rows.shape, dtype=torch.bfloat16, device=rows.device)


STEPS = {"lamb": lamb, "novograd": novograd, "muon": muon}


@torch.no_grad()
def larc(
    groups: Sequence[Group], decays: Sequence[float], members: Sequence[tuple[list[Tensor], list[Tensor]]],
    found_inf: PerDevice | None, inv_scale: Factor, trust_coefficient: float, eps: float, clip: bool,
) -> None:  # fmt: skip
    """Rewrites gradients as the op of LARC does. One all_reduce.

    ``members``: for each group its gradients and their parameters.
    """
    norms = Norms(groups, "LARC.step()")
    of_w, of_g = norms.empty(), norms.empty()
    for grads, params in members:
        norms.add(of_w, params, local(params))
        norms.add(of_g, params, local(grads), inv_scale)
    norms.add_idle(of_w, [p for _, params in members for p in params])
    of_w, of_g = norms.join(of_w, of_g)
    for group, decay, (grads, params) in zip(groups, decays, members, strict=True):
        w_norms, g_norms = (norms.of_params(values, params) for values in (of_w, of_g))
        rates = trust_coefficient * w_norms / (g_norms + w_norms * decay + eps)
        if clip:
            lr = group["lr"]
            rates = (rates / (move(lr, rates.device) if isinstance(lr, Tensor) else lr)).clamp(max=1.0)
        is_adapted = (w_norms != 0) & (g_norms != 0)
        rates = torch.where(is_adapted, rates, 1.0)
        decays_of = torch.where(is_adapted, -decay if group.get("maximize", False) else decay, 0.0)
        for g, w, rate, of_decay in zip(local(grads), local(params), rates.unbind(), decays_of.unbind(), strict=True):
            dtype, inv = compute_dtype(g, w), inv_scale.on(g.device) if isinstance(inv_scale, PerDevice) else inv_scale
            rate, of_decay = (scalar(value, g, dtype) for value in (rate, of_decay))
            new = ((g.to(dtype) * inv + of_decay * w.to(dtype)) * rate).to(g.dtype)
            g.copy_(new if found_inf is None else torch.where(found_inf.on(g.device).reshape(()) != 0, g, new))
        wrote(grads)
