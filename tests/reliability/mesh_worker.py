"""One rank of two, over which parameters (DTensors) or the state of an optimizer (ZeroRedundancyOptimizer) are spread:
prints what each scenario left. With "meshes", one of four ranks over meshes of two dimensions.

python mesh_worker.py RENDEZVOUS_FILE RANKS RANK [meshes]
"""

import copy
import functools
import gc
import json
import os
import sys
import warnings
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ampctx
from ampctx import clip_grad_norm_, multi_tensor_applier, optimizers
from ampctx.amp import AmpSession, GradScaler
from ampctx.kernels.sharding import groups_of
from ampctx.masters import waiting
from ampctx.multi_tensor_apply import multi_tensor_l2norm

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # torch's own
    from torch.distributed.optim import ZeroRedundancyOptimizer

FILE, RANKS, RANK = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
STEPS = 5
OVERFLOW_AT = 2
# Below the first norms and above the last.
MAX_NORM = 0.5

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW-foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "Adam-fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "FusedSGD": lambda params: optimizers.FusedSGD(params, lr=0.1, momentum=0.9),
    "FusedSGD-without-state": lambda params: optimizers.FusedSGD(params, lr=0.1),
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=0.01),
    "FusedAdagrad": lambda params: optimizers.FusedAdagrad(params, lr=0.1),
}

ZERO = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "Adam-fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "FusedAdam": (optimizers.FusedAdam, {"lr": 0.01}),
    "FusedAdam-masters": (optimizers.FusedAdam, {"lr": 0.01, "master_weights": True}),
}
AT_LEVEL = {"O5": {"master_weights": False}}


def mlp(hidden=7) -> nn.Sequential:
    """Sizes that two ranks do not divide evenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, 3))


def fully_sharded(policy=None, dtype=None, **options) -> nn.Sequential:
    if policy is not None:
        options["mp_policy"] = policy
    model = mlp().to(dtype)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=MESH, **options)
    return fully_shard(model, mesh=MESH, **options)


def tensor_parallel() -> nn.Module:
    return parallelize_module(mlp(8), MESH, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def whole(t):
    t = t.detach()
    return (t.full_tensor() if isinstance(t, DTensor) else t).float().clone()


def weights(model) -> list[torch.Tensor]:
    return [whole(p) for p in model.parameters()]


def distance(some, others) -> float:
    return max((a.float() - b.float()).abs().max().item() for a, b in zip(some, others, strict=True))


def data(step, mine) -> torch.Tensor:
    """A batch of 8, or this rank's share of it."""
    batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
    return batch.chunk(RANKS)[RANK] if mine else batch


class Loop:
    """Steps of a model with a scale that moves: ``api`` is "scaler" or the opt level of a session of its own."""

    def __init__(self, model, optimizer, api, shares=True, overflow_on=1, **options):
        self.model, self.optimizer, self.shares, self.overflow_on = model, optimizer, shares, overflow_on
        self.session = self.scaler = None
        if api == "scaler":
            self.scaler = GradScaler("cpu")
        else:
            self.session = AmpSession()
            self.session.initialize(model, optimizer, opt_level=api, loss_scale="dynamic", verbosity=0, **options)
        self.norms, self.moved, self.scales, self.culprits = [], [], [], []

    def loss(self, step, part=slice(None)):
        loss = self.model(data(step, self.shares)[part]).float().square().mean()
        return loss * float("inf") if step == OVERFLOW_AT and self.overflow_on in (RANK, "all") else loss

    def backward(self, loss, **kwargs):
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            return
        with self.session.scale_loss(loss, self.optimizer, **kwargs) as scaled:
            scaled.backward()

    def step(self):
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.norms.append(clip_grad_norm_(params, MAX_NORM).item())
        if self.scaler is None:
            self.optimizer.step()
            outcome = self.session.outcome(self.optimizer)
        else:
            self.scaler.step(self.optimizer)
            outcome = self.scaler.outcome(self.optimizer)
            self.scaler.update()
        self.moved.append(outcome.stepped)
        self.culprits.append([culprit.name for culprit in outcome.culprits or ()])
        self.scales.append(self.scaler.get_scale() if self.session is None else self.session.loss_scales[0].value())

    def run(self, first=0, last=STEPS):
        for step in range(first, last):
            self.optimizer.zero_grad()
            self.backward(self.loss(step))
            self.step()
        return self

    def end(self):
        if self.session is not None:
            self.session.reset()
        return self


def against(twin: Loop, loop: Loop) -> dict:
    """How a run ended, and how far from that of a twin on this rank alone."""
    finite = [(a, b) for a, b in zip(loop.norms, twin.norms, strict=True) if torch.tensor([a, b]).isfinite().all()]
    return {
        "moved": loop.moved,
        "scales": loop.scales,
        "distance": distance(weights(loop.model), weights(twin.model)),
        "norms": max(abs(a - b) / b for a, b in finite),
        "finite": len(finite),
    }


def alone(kind, api, model=None, **options) -> Loop:
    model = mlp() if model is None else model
    optimizer = OPTIMIZERS[kind](model.parameters())
    return Loop(model, optimizer, api, shares=False, overflow_on="all", **options).run().end()


def fsdp(kind, api) -> dict:
    model = fully_sharded()
    return against(alone(kind, api), Loop(model, OPTIMIZERS[kind](model.parameters()), api).run().end())


def fsdp_that_casts(kind, api, dtype) -> dict:
    """fully_shard casts to 16 bits, and what it shards are the masters: as O2 or O5 in one process."""
    model = fully_sharded(MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    loop = Loop(model, OPTIMIZERS[kind](model.parameters()), api)
    seen = set()
    model[0].register_forward_hook(lambda module, args, output: seen.add(str(output.dtype)))
    loop.run().end()
    twin = alone(kind, "O2" if dtype == torch.float16 else "O5")
    return against(twin, loop) | {"layer": sorted(seen), "params": sorted({str(p.dtype) for p in model.parameters()})}


def train_by(model, kind, level, **options) -> tuple[dict, list[torch.Tensor]]:
    """What is left of a run with an overflow on one rank: figures, and the weights."""
    optimizer = OPTIMIZERS[kind](model.parameters())
    shards = list(model.parameters())
    loop = Loop(model, optimizer, level, **options).run()
    masters = list(loop.session.master_params(optimizer))
    model.reshard()
    figures = {"moved": loop.moved, "scales": loop.scales, "norms": str(loop.norms)}  # nan is not equal to itself
    shown = loop.session.master_state_dict(model)
    same = [a is b is c for a, b, c in zip(masters, shards, model.parameters(), strict=True)]
    figures["shards are masters"] = all(same) and all(shown[n].equal(p) for n, p in model.named_parameters())
    loop.end()
    return figures, [whole(t) for t in (*model.parameters(), *model.buffers())]


def one_level(kind, level) -> dict:
    """O2 or O5 of a sharded model, and the run of which it takes the place: a policy by hand, and O0."""
    dtype = {"O2": torch.float16, "O5": torch.bfloat16}[level]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    by_hand, expected = train_by(fully_sharded(policy), kind, "O0")
    figures, found = train_by(fully_sharded(), kind, level)
    accepted, by_policy = train_by(fully_sharded(policy), kind, level)
    return figures | {
        "equal": figures == by_hand == accepted and distance(found, expected) == distance(by_policy, expected) == 0,
        "far from fp32": distance(found, train_by(fully_sharded(), kind, "O0")[1]),
    }


def with_norms() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 6), nn.LayerNorm(6), nn.Linear(6, 3)
    return nn.Sequential(*layers)


def modules_in_fp32(kind, level) -> dict:
    """BatchNorm and a ``keep_fp32`` module: units of ampctx's making, and units by hand."""
    by_us = ampctx.distributed.fully_shard(with_norms(), level, mesh=MESH, units=nn.Linear, keep_fp32="4")
    by_hand = with_norms()
    for layer in (*by_hand[0:2], *by_hand[3:], by_hand):
        fully_shard(layer, mesh=MESH)
    seen = []
    for layer in (1, 4):
        by_us[layer].register_forward_hook(lambda module, args, output: seen.append(module.weight.dtype))
    figures, found = train_by(by_us, kind, level, keep_fp32="4")
    expected, others = train_by(by_hand, kind, level, keep_fp32="4")
    return figures | {"equal": figures == expected and distance(found, others) == 0, "seen": sorted(map(str, {*seen}))}


def tensor_parallel_run(kind, api) -> dict:
    model = tensor_parallel()
    loop = Loop(model, OPTIMIZERS[kind](model.parameters()), api, shares=False, overflow_on="all").run().end()
    return against(alone(kind, api, mlp(8)), loop)


def two_dimensions(kind, dp, tp) -> dict:
    """fully_shard over tensor parallelism."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(mlp(8), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["dp"])
    loop = Loop(model, OPTIMIZERS[kind](model.parameters()), "O0", shares=dp > 1, overflow_on=1 if dp > 1 else "all")
    with warnings.catch_warnings():
        # torch's own: the last layer's output is a view.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        loop.run().end()
    dims = {p.device_mesh.ndim for p in model.parameters()}
    return against(alone(kind, "O0", mlp(8)), loop) | {"dims": list(dims), "groups": len(groups_of(model.parameters()))}


class Replicated(Loop):
    """Weights on every rank, batches split: gradients are sums that are still to be made."""

    def loss(self, step, part=slice(None)):
        x = distribute_tensor(data(step, False), MESH, [Shard(0)])
        loss = self.model(x).square().mean().full_tensor()
        return loss * float("inf") if step == OVERFLOW_AT else loss

    def backward(self, loss, **kwargs):
        super().backward(loss, **kwargs)
        self.placements = sorted({str(p.grad.placements) for p in self.model.parameters()})


def replicated(kind, api) -> dict:
    model = distribute_module(mlp(), MESH)
    loop = Replicated(model, OPTIMIZERS[kind](model.parameters()), api).run().end()
    return against(alone(kind, api), loop) | {"placements": loop.placements}


def inf_in_one_shard(kind, api) -> dict:
    """What one rank alone can see: inf in its part of one gradient."""
    model = fully_sharded()
    loop = Loop(model, OPTIMIZERS[kind](model.parameters()), api)
    before = weights(model)
    if api == "scaler":
        loop.backward(loop.loss(0))
    else:
        with loop.session.scale_loss(loop.loss(0), loop.optimizer) as scaled:
            scaled.backward()
            if RANK == 1:
                model[2].weight.grad.to_local()[0, 0] = torch.inf
    if api == "scaler" and RANK == 1:
        model[2].weight.grad.to_local()[0, 0] = torch.inf
    loop.step()
    result = {"moved": loop.moved, "scales": loop.scales, "culprits": loop.culprits[0], "norms": loop.norms}
    loop.end()
    return result | {"same": distance(before, weights(model)) == 0}


def accumulation(api, synchronized) -> dict:
    """Four micro-batches, of which the last one alone is reduced over the ranks unless ``synchronized``."""
    model = fully_sharded()
    loop = Loop(model, OPTIMIZERS["SGD"](model.parameters()), api)
    for step in range(STEPS):
        loop.optimizer.zero_grad()
        for i in range(4):
            last = i == 3
            model.set_requires_gradient_sync(last or synchronized)
            delay = {} if api == "scaler" else {"delay_unscale": not last}
            loop.backward(loop.loss(step, slice(i, i + 1)) / 4, **delay)
        loop.step()
    return against(alone("SGD", api), loop.end())


def checkpoint(kind, api) -> dict:
    """A run that is saved and loaded in the middle, by torch.distributed.checkpoint's state dicts, against a whole."""
    model = fully_sharded()
    expected = Loop(model, OPTIMIZERS[kind](model.parameters()), api).run().end()
    model = fully_sharded()
    loop = Loop(model, OPTIMIZERS[kind](model.parameters()), api).run(last=3)
    saved = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(get_optimizer_state_dict(model, loop.optimizer))
    scale = (loop.scaler or loop.session).state_dict()
    loop.end()

    model = fully_sharded()
    loop = Loop(model, OPTIMIZERS[kind](model.parameters()), api)
    model.load_state_dict(saved)
    set_optimizer_state_dict(model, loop.optimizer, state)
    (loop.scaler or loop.session).load_state_dict(scale)
    loop.run(first=3).end()
    return {
        "distance": distance(weights(model), weights(expected.model)),
        "scales": loop.scales == expected.scales[3:],
        "kinds": sorted({type(v).__name__ for s in loop.optimizer.state.values() for v in s.values() if v.dim() > 0}),
    }


def sixteen_bit_parameters(**options) -> dict:
    """A model in bf16 and an optimizer with masters, or what stands for them, of its own."""
    models = [mlp().bfloat16(), fully_sharded(dtype=torch.bfloat16)]
    for model in models:
        optimizer = optimizers.FusedAdam(model.parameters(), lr=0.01, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            # The same on each rank: sums over the ranks round nothing off.
            model(data(step, False).bfloat16()).float().square().mean().backward()
            optimizer.step()
    return {"distance": distance(*map(weights, models))}


class Replicas(Loop):
    """DistributedDataParallel around the model."""

    def __init__(self, model, optimizer, api, **options):
        super().__init__(model, optimizer, api, **options)
        self.model = DistributedDataParallel(model)


def zero(kind, api) -> dict:
    """The state of the optimizer on the ranks, against all of it on each."""
    make, options = ZERO[kind]
    model = mlp()
    twin = Replicas(model, make(model.parameters(), **options), api, **AT_LEVEL.get(api, {})).run()
    model = mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=make, **options)
    loop = Replicas(model, optimizer, api, **AT_LEVEL.get(api, {})).run()
    found = {"kept": len([p for p in model.parameters() if optimizer.optim.state.get(p)])}
    optimizer.consolidate_state_dict(to=0)
    if RANK == 0:
        expected, state = (o.state_dict()["state"] for o in (twin.optimizer, optimizer))
        found["state"] = max(
            distance(map(torch.as_tensor, state[i].values()), map(torch.as_tensor, entries.values()))
            for i, entries in expected.items()
        )
        found["entries"] = len(state)
    return found | against(twin.end(), loop.end())


def flattened(kind) -> dict:
    """FSDP1, whose shards are plain tensors: inf in the part of one rank."""
    model = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = GradScaler("cpu", process_group=dist.group.WORLD)
    moved = []
    for step in range(STEPS):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(model(data(step, True)).square().mean()).backward()
        if step == OVERFLOW_AT and RANK == 1:
            next(model.parameters()).grad[0] = torch.inf
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        moved.append(distance(before, list(model.parameters())) > 0)
    return {"moved": moved, "scale": scaler.get_scale()}


def norms() -> dict:
    """clip_grad_norm_ of DTensors, plain tensors and both, beside torch's."""
    found = {}
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in ((5, 3), (1,), (4,), (2, 2))]
    layouts = [[Shard(0)], [Shard(0)], [Replicate()], None]

    def params(distributed):
        result = []
        for value, layout in zip(values, layouts, strict=True):
            sharded = distributed and layout is not None
            p = nn.Parameter(distribute_tensor(value, MESH, layout) if sharded else value.clone())
            p.grad = p.detach() * 2
            result.append(p)
        return result

    for order in (2.0, 1.0, float("inf")):
        for name, chosen in {"split": slice(0, 2), "with replicas": slice(0, 3)}.items():
            plain, ours = params(False)[chosen], params(True)[chosen]
            expected = nn.utils.clip_grad_norm_(plain, 1.0, order)
            norm = clip_grad_norm_(ours, 1.0, order)
            found[f"{name} {order}"] = [
                type(norm).__name__,
                abs(norm.item() / expected.item() - 1),
                distance([whole(p.grad) for p in ours], [p.grad for p in plain]),
            ]
    plain, ours = params(False), params(True)
    expected, norm = nn.utils.clip_grad_norm_(plain, 1.0), clip_grad_norm_(ours, 1.0)
    found["with plain tensors 2.0"] = [
        type(norm).__name__,
        abs(norm.item() / expected.item() - 1),
        distance([whole(p.grad) for p in ours], [p.grad for p in plain]),
    ]
    return found


def errors() -> dict:
    found = {}

    def message(name, action):
        try:
            action()
        except ampctx.AmpError as error:
            found[name] = str(error)

    for level, make in (("O3", fully_sharded), ("O2", tensor_parallel), ("O5", tensor_parallel)):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        message(level, functools.partial(AmpSession().initialize, model, optimizer, opt_level=level, verbosity=0))
        found[f"{level} dtypes"] = sorted({str(p.to_local().dtype) for p in model.parameters()})
        found[f"{level} step"] = "step" in vars(optimizer)
    session = AmpSession()
    session.allow_incoming_model_not_fp32 = True
    model = fully_sharded(dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    message("16-bit", lambda: session.initialize(model, optimizer, opt_level="O2", verbosity=0))
    for level in ("O2", "O5"):
        model = mlp()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
        start = functools.partial(AmpSession().initialize, model, optimizer, opt_level=level, verbosity=0)
        message(f"zero {level}", start)
        found[f"zero {level} dtypes"] = sorted({str(p.dtype) for p in model.parameters()})
    shards, flag = list(fully_sharded().parameters()), torch.zeros(1, dtype=torch.int32)
    message("multi_tensor_applier", lambda: multi_tensor_applier(multi_tensor_l2norm, flag, [shards]))
    # The same on every rank: nothing about a norm is missing here.
    replicas = list(distribute_module(mlp(), MESH).parameters())
    for p in replicas:
        p.grad = p.detach() / 2
    optimizers.FusedLAMB(replicas, lr=0.1).step()
    single = list(mlp().parameters())
    for p in single:
        p.grad = p.detach() / 2
    optimizers.FusedLAMB(single, lr=0.1).step()
    found["replicas"] = distance(list(map(whole, replicas)), single)
    return found


@contextmanager
def counted_all_reduce():
    """The bytes of each ``all_reduce`` of ours."""
    sizes, original = [], dist.all_reduce

    def counted(t, *args, **kwargs):
        sizes.append(t.nbytes)
        return original(t, *args, **kwargs)

    dist.all_reduce = counted
    try:
        yield sizes
    finally:
        dist.all_reduce = original


def calls_of_all_reduce(model, clips=True, api="O0") -> dict:
    """The collectives of ours at the end of a block, in clipping and in a step, and the norm beside torch's."""
    loop = Loop(model, OPTIMIZERS["FusedAdam"](model.parameters()), api, shares=False)
    block = loop.session.scale_loss(loop.loss(0), loop.optimizer)
    block.__enter__().backward()
    with counted_all_reduce() as at_exit:  # not those of fully_shard in the backward
        block.__exit__(None, None, None)
    norm = expected = 0.0
    with counted_all_reduce() as in_clip:
        if clips:
            grads = [p.grad for p in model.parameters()]
            expected = nn.utils.get_total_norm(list(map(whole, grads))).item()
            norm = clip_grad_norm_(model.parameters(), MAX_NORM).item()
    with counted_all_reduce() as in_step:
        loop.optimizer.step()
    assert loop.session.outcome(loop.optimizer).stepped
    loop.end()
    return {"bytes": [at_exit, in_clip, in_step], "norm": abs(norm - expected) / max(expected, 1e-9)}


def all_ranks(value) -> list:
    found = [None] * RANKS
    dist.all_gather_object(found, value)
    return found


def gradients_on_one_rank() -> dict:
    """After the block the last rank alone keeps its parts of the gradients."""
    model = fully_sharded()
    loop = Loop(model, OPTIMIZERS["FusedAdam"](model.parameters()), "O0")
    loop.run(last=1)
    loop.optimizer.zero_grad()
    loop.backward(loop.loss(1))
    if RANK < RANKS - 1:
        loop.optimizer.zero_grad()
    parts = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    expected = sum(all_ranks(sum(part.double().square().sum().item() for part in parts))) ** 0.5
    before = weights(model)
    loop.step()
    loop.end()
    moved = distance(before, weights(model)) > 0
    return {"norm": abs(loop.norms[-1] / expected - 1), "stepped": loop.moved, "moved": moved}


def flags_that_wait() -> dict:
    """Ranks agree on the overflow of a first block at the next one, or when the state with masters is asked for."""
    model = fully_sharded()
    loop = Loop(model, OPTIMIZERS["FusedAdam"](model.parameters()), "O0")
    scale = loop.session.loss_scales[0]
    scales = [scale.value()]
    loop.backward(loop.loss(OVERFLOW_AT))
    scales.append(scale.value())
    loop.backward(loop.loss(0))
    scales.append(scale.value())
    loop.step()  # the inf of the first block is in the sum, or there is none left: skipped all the same
    loop.optimizer.zero_grad()
    loop.backward(loop.loss(OVERFLOW_AT))
    named = loop.session.get_state_dict(model, loop.optimizer)["amp"]
    state = loop.session.state_dict(masters=True)
    assert named["loss_scaler0"]["loss_scale"] == state["loss_scaler0"]["loss_scale"]
    scales.append(state["loss_scaler0"]["loss_scale"])
    with counted_all_reduce() as later:
        loop.step()
    found = {"scales": scales, "moved": loop.moved, "saved": state["optimizers"][0]["overflows"], "later": later}
    loop.end()
    return found


def flags_left_behind() -> dict:
    """A scale that is loaded while a flag waits. Then an optimizer that one rank has collected, and no other."""
    model = fully_sharded()
    loop = Loop(model, OPTIMIZERS["FusedAdam"](model.parameters()), "O0")
    loop.backward(loop.loss(OVERFLOW_AT))
    loop.optimizer.zero_grad()
    loop.session.load_state_dict({"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}})
    loop.backward(loop.loss(0))
    loop.step()
    found = {"loaded": loop.session.state_dict()["loss_scaler0"], "moved": list(loop.moved)}
    loop.optimizer.zero_grad()
    loop.backward(loop.loss(0))
    kept = loop.optimizer if RANK == 0 else None
    loop.optimizer = OPTIMIZERS["FusedAdam"](model.parameters())
    gc.collect()
    loop.session.initialize(model, loop.optimizer, opt_level="O0", verbosity=0, loss_scale="dynamic")
    found["optimizers"] = len(loop.session._bindings)
    loop.backward(loop.loss(1))
    loop.step()
    found["moved"].append(loop.moved[-1])
    loop.backward(loop.loss(1))
    del kept
    loop.end()
    return {**found, "waiting": len(waiting.ALL)}


def a_scale_that_differs() -> dict:
    """Rank 1 alone has loaded another scale: clipping raises on every rank, and changes nothing."""
    model = fully_sharded()
    loop = Loop(model, OPTIMIZERS["FusedAdam"](model.parameters()), "O0").run(last=1)
    if RANK == 1:
        loop.session.load_state_dict({"loss_scaler0": {"loss_scale": 1000.5, "unskipped": 1}})
    loop.optimizer.zero_grad()
    loop.backward(loop.loss(1))
    before = [p.grad.to_local().clone() for p in model.parameters()]
    try:
        loop.step()
    except ampctx.AmpRankError as error:
        found = {"error": str(error)}
    after = [p.grad.to_local() for p in model.parameters()]
    loop.end()
    return found | {"same": all(map(torch.equal, before, after))}


def sums_that_a_rank_lacks() -> dict:
    """Gradients that are still to be added up: the first rank has none of one weight, and nobody one of another."""
    model = distribute_module(mlp(), MESH)
    loop = Replicated(model, OPTIMIZERS["FusedAdam"](model.parameters()), "O0").run(last=1)
    lacks, nobody_has = model[0].weight, model[2].weight
    loop.optimizer.zero_grad()
    with loop.session.scale_loss(loop.loss(1), loop.optimizer) as scaled:
        scaled.backward()
        placements = str(lacks.grad.placements)
        theirs = all_ranks(lacks.grad.to_local().double() / loop.session.loss_scales[0].value())[1:]
        if RANK == 0:
            lacks.grad = None
        nobody_has.grad = None
    arrived = distance([lacks.grad.to_local()], [sum(theirs)])
    before = weights(model)
    loop.step()
    loop.end()
    mine = [p.to_local() for p in model.parameters()]
    return {
        "placements": placements,
        "arrived": arrived,
        "none": nobody_has.grad is None,
        "moved": [not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)],
        "ranks": max(distance(mine, other) for other in all_ranks(mine)),
        "norms": len(set(all_ranks(loop.norms[-1]))),
    }


def two_by_two() -> dict:
    """Meshes of two dimensions on four ranks. A fifth has no part in them."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    if mesh.get_coordinate() is None:
        return {}

    def sharded(tp, **dp):
        model = mlp(8)
        if tp:
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for layer in (model[0], model[2], model):
            fully_shard(layer, **dp)
        return model

    results = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)  # torch's own, of a view
        for name, make in {
            "fsdp x tp": lambda: sharded(True, mesh=mesh["dp"]),
            "hsdp": lambda: sharded(False, mesh=mesh),
            "fsdp over dp": lambda: sharded(False, mesh=mesh["dp"]),
        }.items():
            results[name] = calls_of_all_reduce(make())
        for kind in ("SGD", "FusedAdam"):
            model = sharded(True, mesh=mesh["dp"])
            loop = Loop(model, OPTIMIZERS[kind](model.parameters()), "O0", shares=False, overflow_on="all").run()
            results[f"run {kind}"] = against(alone(kind, "O0", mlp(8)), loop.end())
        model = sharded(True, mesh=mesh["dp"])
        loop = Loop(model, OPTIMIZERS["FusedAdam"](model.parameters()), "O0", shares=False, overflow_on=None)
        with loop.session.scale_loss(loop.loss(0), loop.optimizer) as scaled:
            scaled.backward()
            if RANK == 3:
                model[0].weight.grad.to_local()[0, 0] = torch.inf
        loop.step()
        loop.end()
        results["inf in one shard"] = {"moved": loop.moved, "scales": loop.scales, "norms": loop.norms}
    return results


def everything() -> dict:
    results = {f"fsdp scaler {kind}": fsdp(kind, "scaler") for kind in OPTIMIZERS}
    for api, kind in (("O1", "SGD"), ("O1", "Adam-fused"), ("O1", "FusedAdam"), ("O0", "SGD"), ("O0", "FusedAdam")):
        results[f"fsdp {api} {kind}"] = fsdp(kind, api)
    for api, kind in (("scaler", "FusedAdam"), ("O0", "SGD"), ("O0", "Adam-fused")):
        results[f"fsdp-fp16 {api} {kind}"] = fsdp_that_casts(kind, api, torch.float16)
    results["fsdp-bf16 O0 SGD"] = fsdp_that_casts("SGD", "O0", torch.bfloat16)
    for level, kind in (("O5", "FusedAdam"), ("O2", "SGD")):
        results[f"level {level} {kind}"] = one_level(kind, level)
    results["in fp32"] = modules_in_fp32("FusedAdam", "O5")
    for api, kind in (("scaler", "SGD"), ("O1", "FusedAdam"), ("O4", "SGD")):
        results[f"tp {api} {kind}"] = tensor_parallel_run(kind, api)
    for dp, tp in ((1, 2), (2, 1)):
        results[f"2d {dp} {tp}"] = two_dimensions("FusedAdam", dp, tp)
    for api, kind in (("scaler", "SGD"), ("scaler", "FusedAdam"), ("O0", "Adam-fused")):
        results[f"replicated {api} {kind}"] = replicated(kind, api)
    for api in ("scaler", "O1"):
        for kind in ("SGD", "Adam-fused", "FusedAdam"):
            results[f"shard {api} {kind}"] = inf_in_one_shard(kind, api)
    for api, kind in (("scaler", "FusedAdam"), ("O1", "SGD"), ("O1", "FusedAdam"), ("O5", "FusedAdam")):
        results[f"checkpoint {api} {kind}"] = checkpoint(kind, api)
    for api, synchronized in (("scaler", True), ("O1", True), ("O1", False), ("O2", False)):
        results[f"accumulation {api} {synchronized}"] = accumulation(api, synchronized)
    for options in ({"master_weights": True}, {"master_weights": "split"}, {"write_back": "kahan"}, {}):
        name = "-".join(map(str, options.values())) or "rounded"
        results[f"bf16 {name}"] = sixteen_bit_parameters(**options)
    for api, kind in (("scaler", "AdamW"), ("scaler", "FusedAdam"), ("O1", "AdamW"), ("O1", "Adam-fused")):
        results[f"zero {api} {kind}"] = zero(kind, api)
    results["zero O5 FusedAdam-masters"] = zero("FusedAdam-masters", "O5")
    for kind in ("SGD", "FusedAdam"):
        results[f"flattened {kind}"] = flattened(kind)
    results["norms"] = norms()
    results["errors"] = errors()
    results["one rank"] = gradients_on_one_rank()
    results["waiting"] = flags_that_wait()
    results["left behind"] = flags_left_behind()
    results["other scale"] = a_scale_that_differs()
    results["lacking"] = sums_that_a_rank_lacks()
    results["calls fsdp"] = calls_of_all_reduce(fully_sharded(), api="O1")
    results["calls fsdp unclipped"] = calls_of_all_reduce(fully_sharded(), clips=False)
    results["calls tp"] = calls_of_all_reduce(tensor_parallel())
    return results


def of_two_dimensions() -> dict:
    """HSDP, and fully_shard over tensor parallelism, at O2 and O5."""

    def replicas(**options):
        model = mlp()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=pairs, **options)
        return model

    def over_tensor_parallelism(**options):
        model = parallelize_module(mlp(8), grid["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=grid["dp"], **options)
        return model

    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    results = {}
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)  # torch's own, see two_dimensions
    for name, make in (("hsdp", replicas), ("tp", over_tensor_parallelism)):
        for level, dtype in (("O2", torch.float16), ("O5", torch.bfloat16)):
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            by_hand, expected = train_by(make(mp_policy=policy), "FusedAdam", "O0")
            figures, found = train_by(make(), "FusedAdam", level)
            results[f"{name} {level}"] = figures | {"equal": figures == by_hand and distance(found, expected) == 0}
    return results


dist.init_process_group("gloo", init_method=f"file://{FILE}", rank=RANK, world_size=RANKS)
MESH = init_device_mesh("cpu", (RANKS,))
by_ranks = two_by_two if RANKS > 2 else everything
print(json.dumps((of_two_dimensions if "meshes" in sys.argv else by_ranks)()), flush=True)
dist.barrier()
# gloo's threads may still be there at exit, and end the process with an abort then.
os._exit(0)
