"""One rank of two or four that make mistakes, run out of batches or compress gradients: prints what each scenario left.

python rank_safety_worker.py RENDEZVOUS_FILE RANKS RANK [full]
"""

import datetime
import gc
import json
import logging
import os
import sys
import time

import torch
import torch.distributed as dist
from digests import digest
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ampctx
from ampctx import optimizers
from ampctx._collectives import broadcast_tree
from ampctx.amp import AmpSession

FILE, RANKS, RANK = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
FULL = "full" in sys.argv

START = 2.0**16
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.0625, momentum=0.5),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.0625),
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=0.0625),
    "FusedAdam-split": lambda params: optimizers.FusedAdam(params, lr=0.0625, master_weights="split"),
}


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def batch(*place):
    seed = sum(n * 100**i for i, n in enumerate(place))
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def started(level="O2", kind="SGD", model=None, **options):
    model = mlp() if model is None else model
    optimizer = OPTIMIZERS[kind](model.parameters())
    session = AmpSession()
    session.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, "loss_scale": "dynamic", **options})
    return session, model, optimizer


def train(session, model, optimizer, x):
    with session.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def all_state(session, model, optimizer) -> str:
    masters = list(session.master_params(optimizer))
    return digest(model.state_dict(), masters, optimizer.state_dict(), session.state_dict(masters=True))


def error_of(call) -> dict:
    began = time.monotonic()
    try:
        call()
    except ampctx.AmpRankError as error:
        return {"error": str(error), "soon": time.monotonic() - began < 1}
    return {}


# --- what differs -----------------------------------------------------------------------------------------------------


def scales_that_differ() -> dict:
    """Rank 1 has another scale."""
    world, results = dist.group.WORLD, {}
    mine = 1024.0 if RANK == 1 else START
    state = {"loss_scaler0": {"loss_scale": mine, "unskipped": 0}}
    session, _, _ = started()
    results["load"] = error_of(lambda: session.load_state_dict(state, process_group=world))
    results["check"] = error_of(session.check_ranks)
    session.reset()
    for level in ("O1", "O2"):
        session, model, optimizer = started(level, process_group=world)
        session.load_state_dict(state)
        weights = [*model.parameters(), *session.master_params(optimizer)]
        before = digest(weights)
        results[f"block {level}"] = error_of(lambda s=session, m=model, o=optimizer: train(s, m, o, batch(RANK)))
        results[f"block {level}"]["same"] = digest(weights) == before
        session.reset()
    scaler = ampctx.GradScaler("cpu", init_scale=mine, process_group=world)
    model = mlp()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    scaler.scale(model(batch(RANK)).sum()).backward()
    results["scaler"] = error_of(lambda: scaler.step(optimizer))
    unscaled = [p.grad.clone() for p in model.parameters()]
    scaler.load_state_dict({**scaler.state_dict(), "scale": START})
    scaler.step(optimizer)
    results["second try"] = all(map(torch.equal, unscaled, (p.grad for p in model.parameters())))
    model = mlp()
    results["initialize"] = error_of(lambda: started(model=model, loss_scale=128.0 - RANK, process_group=world))
    results["initialize"]["same"] = model[0].weight.dtype == torch.float32
    results["enabled"] = error_of(lambda: started(enabled=RANK == 0, process_group=world))
    return results


def other_differences() -> dict:
    """What ``check_ranks`` names."""
    results = {}

    def check(name, model=None, level="O2", change=None, loss_scale="dynamic", **given):
        session, model, optimizer = started(level if RANK else "O2", model=model, loss_scale=loss_scale)
        if change is not None and RANK == 1:
            change(session, model, optimizer)
        results[name] = error_of(lambda: session.check_ranks(**given))
        session.reset()

    check("nothing")
    check("count", change=lambda s, m, o: s.load_state_dict({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 3}}))
    static = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": RANK}}  # a count that nothing depends on
    check("count of a static scale", change=lambda s, m, o: s.load_state_dict(static), loss_scale=8.0)
    check("level", level="O3")
    check("names", model=nn.Sequential(*mlp()) if RANK else nn.ModuleDict({"a": mlp()}))
    check("shapes", model=nn.Linear(4, 2 + RANK))
    check("parts", model=nn.Linear(4, 2 + RANK), same_parameters=False)
    check("master", change=lambda s, m, o: next(s.master_params(o)).detach().view(-1)[0].mul_(1 + 2**-20))
    alone = dist.new_group([0]), dist.new_group([1])
    check("a group of one", model=nn.Linear(4, 2 + RANK), group=alone[RANK])
    return results


def former_optimizer() -> dict:
    """Rank 0 has not collected an optimizer that both have dropped."""
    gc.disable()
    session, model, optimizer = started("O1", "FusedAdam")
    optimizer.itself = optimizer
    del optimizer
    if RANK == 1:
        gc.collect()
    second = OPTIMIZERS["FusedAdam"](model.parameters())
    session.initialize(model, second, opt_level="O1", verbosity=0)
    kept = len(session._bindings)
    result = error_of(session.check_ranks)
    session.reset()
    gc.enable()
    return {"kept": kept, **result}


def loaded_by_one() -> dict:
    """Rank 0 loads weights before DistributedDataParallel wraps the model; both load the optimizer's state."""
    source = mlp(7)
    state = OPTIMIZERS["SGD"](source.parameters())
    source(batch(0)).square().mean().backward()
    state.step()
    session, model, optimizer = started("O5")
    if RANK == 0:
        model.load_state_dict(source.state_dict())
    DistributedDataParallel(model)
    optimizer.load_state_dict(state.state_dict())
    result = error_of(session.check_ranks)
    session.reset()
    return result


# --- collectives of ranks without gradients ---------------------------------------------------------------------------


def split_parameter(mesh) -> nn.Module:
    model = nn.Module()
    torch.manual_seed(0)
    model.weight = nn.Parameter(distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)]))
    return model


def gradients_on_one_rank() -> dict:
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    results = {}
    for order in (2.0, 3.0, float("inf")):
        model = split_parameter(mesh)
        if RANK == 0:
            part = torch.arange(6.0).reshape(2, 3)
            model.weight.grad = DTensor.from_local(part, mesh, [Shard(0)], shape=(4, 3), stride=(3, 1))
        norm = ampctx.clip_grad_norm_([model.weight], 1.0, norm_type=order)
        expected = torch.linalg.vector_norm(torch.arange(6.0), order)
        results[f"norm {order}"] = abs(norm.item() - expected.item()) < 1e-5
        if RANK == 0:
            left = torch.linalg.vector_norm(model.weight.grad.to_local(), order).item()
            results[f"clipped {order}"] = abs(left - 1.0) < 1e-4
    for inf in (False, True):
        model = split_parameter(mesh)
        session, _, optimizer = started("O1", model=model)
        part = torch.full((2, 3), float("inf") if inf else 1.0)
        before = model.weight.to_local().clone()
        # What a scale_loss block of a rank that its loss does not reach looks like.
        with session.scale_loss(torch.ones((), requires_grad=True), optimizer) as scaled:
            if RANK == 0:
                model.weight.grad = DTensor.from_local(part, mesh, [Shard(0)], shape=(4, 3), stride=(3, 1))
            else:
                scaled.backward()
        optimizer.step()
        results[f"step {inf}"] = [
            session.outcome(optimizer).stepped,
            not torch.equal(before, model.weight.to_local()),
            session.state_dict()["loss_scaler0"]["loss_scale"],
        ]
        session.reset()
    return results


def overflow_at_a_static_scale(level, group) -> dict:
    """Rank 1 overflows in one of four steps. Under DistributedDataParallel, or with other data on each rank."""
    session, model, optimizer = started(level, loss_scale=64.0, skip_nonfinite=True, process_group=group)
    wrapped = DistributedDataParallel(model) if group is None else model
    stepped = []
    for step in range(4):
        optimizer.zero_grad()
        loss = wrapped(batch(step, RANK)).float().square().mean()
        with session.scale_loss(loss * float("nan") if step == 2 and RANK else loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        stepped.append(session.outcome(optimizer).stepped)
    finite = all(torch.isfinite(p).all().item() for p in model.parameters())
    result = {"stepped": stepped, "finite": finite, "scale": session.state_dict()["loss_scaler0"]["loss_scale"]}
    session.reset()
    return result


# --- uneven inputs ----------------------------------------------------------------------------------------------------


def uneven(level, kind, epochs=3, batches=(2, 4), empty_first=False) -> dict:
    """Digests of all state after each epoch, and of the masters after each step that both ranks take. In the second
    epoch the first batch of rank 1 overflows, in each epoch its last one."""
    master_weights = "split" if kind.endswith("split") else None
    session, model, optimizer = started(level, kind, mlp(RANK), master_weights=master_weights)
    ddp = DistributedDataParallel(model)
    steps, states = [], []
    for epoch in range(epochs):
        mine = 0 if empty_first and epoch == 0 and RANK == 0 else batches[RANK]
        with Join([ddp, session.joinable(optimizer)]):
            for i in range(mine):
                overflow = RANK == 1 and (i == mine - 1 or (epoch == 1 and i == 0))
                optimizer.zero_grad()
                loss = ddp(batch(epoch, i, RANK)).float().square().mean()
                with session.scale_loss(loss * float("inf") if overflow else loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
                if i < min(batches) and not (empty_first and epoch == 0):
                    steps.append(digest(list(session.master_params(optimizer))))
        states.append(all_state(session, model, optimizer))
    session.check_ranks()
    finite = all(torch.isfinite(p).all().item() for p in session.master_params(optimizer))
    result = {"steps": steps, "states": states, "finite": finite, "scale": session.state_dict()["loss_scaler0"]}
    session.reset()
    return result


def uneven_with_two_optimizers() -> list[str]:
    """Digests of all state after each epoch: two models, two losses and scales."""
    torch.manual_seed(RANK)
    models = [nn.Linear(4, 4), nn.Linear(4, 2)]
    opts = [OPTIMIZERS[kind](model.parameters()) for kind, model in zip(("Adam", "FusedAdam"), models, strict=True)]
    session = AmpSession()
    session.initialize(models, opts, opt_level="O2", verbosity=0, num_losses=2)
    wrapped = list(map(DistributedDataParallel, models))
    states = []
    for epoch in range(2):
        with Join([*wrapped, *map(session.joinable, opts)]):
            for i in range(4 - 2 * RANK):
                for loss_id, (model, optimizer) in enumerate(zip(wrapped, opts, strict=True)):
                    optimizer.zero_grad()
                    loss = model(batch(epoch, i, RANK)).float().square().mean()
                    loss = loss * float("inf") if (i, loss_id) == (3, 1) else loss
                    with session.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
                        scaled.backward()
                    optimizer.step()
        states.append([all_state(session, model, optimizer) for model, optimizer in zip(models, opts, strict=True)])
    session.check_ranks()
    session.reset()
    return states


def joined_by_the_model_alone() -> list[str]:
    """What is logged where the model's own ``join`` has left the masters behind: on rank 1, whose batches end first."""
    session, model, optimizer = started("O2")
    session.verbosity = 1
    ddp = DistributedDataParallel(model)
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("ampctx").addHandler(handler)
    for epoch in range(2):
        with ddp.join():
            for i in range(3 - RANK):
                optimizer.zero_grad()
                with session.scale_loss(ddp(batch(epoch, i, RANK)).float().square().mean(), optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
    logging.getLogger("ampctx").removeHandler(handler)
    session.reset()
    return logged


def refused_joins() -> list[str]:
    results = []
    session, model, optimizer = started("O1")
    ddp = DistributedDataParallel(model)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    for make in (lambda: session.joinable(other), lambda: Join([session.joinable(optimizer), ddp])):
        try:
            make()
        except ampctx.AmpError as error:
            results.append(str(error))
    session.reset()
    session, model, optimizer = started("O1", process_group=dist.group.WORLD)
    try:
        session.joinable(optimizer)
    except ampctx.AmpError as error:
        results.append(str(error))
    session.reset()
    return results


def formats() -> list:
    """Strides and values of tensors that rank 0 sends."""
    made = torch.arange(108.0).view(4, 3, 3, 3)
    sent = [
        made.to(memory_format=torch.channels_last),
        made[:, ::2],
        made.transpose(0, 1),
        made[:1, :1, 0, 0].expand(3, 2),
    ]
    sent += [torch.tensor(3, dtype=torch.int16), torch.empty(0, 2), torch.tensor([True, False]), torch.tensor(1 + 2j)]
    found = broadcast_tree({"t": sent, "n": (1, "a")} if RANK == 0 else None, 0, dist.group.WORLD, "here")
    same = [a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found["t"], sent, strict=True)]
    return [found["n"], same, [t.stride() for t in found["t"][:3]]]


# --- compressed gradients ---------------------------------------------------------------------------------------------


def compressed(level, wrapped=True, overflow_at=None, doubles_at=None, steps=12, **options) -> dict:
    """PowerSGD from the third step on. At one step rank 1 overflows, or the scale doubles."""
    torch.manual_seed(0)
    session, model, optimizer = started(level, "SGD", nn.Linear(8, 8), max_loss_scale=1024.0, **options)
    ddp = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    hook = powerSGD_hook.powerSGD_hook
    if wrapped:
        ddp.register_comm_hook(None, ampctx.distributed.lossy(state, hook, optimizer))
    else:
        ddp.register_comm_hook(state, hook)
    errors = []
    for step in range(steps):
        if step == doubles_at:
            session.load_state_dict({"loss_scaler0": {"loss_scale": 2048.0, "unskipped": 0}})
        optimizer.zero_grad()
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * step + RANK))
        loss = ddp(x).float().square().mean()
        with session.scale_loss(loss * float("inf") if step == overflow_at and RANK else loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        errors.append(digest(state.error_dict))
    result = {
        "skipped": session.skipped_steps(optimizer),
        "scale": session.state_dict().get("loss_scaler0", {}).get("loss_scale"),
        "errors": errors,
        "dtypes": sorted({str(error.dtype) for error in state.error_dict.values()}),
        "largest": max(error.abs().max().item() for error in state.error_dict.values()),
        "weights": digest(model.state_dict()),
    }
    session.reset()
    return result


def compression() -> dict:
    plain = {"enabled": False}
    return {
        **{f"overflow {level}": compressed(level, overflow_at=5) for level in ("O1", "O2")},
        "overflow, not wrapped": compressed("O1", wrapped=False, overflow_at=5),
        **{f"doubles {level}": [compressed(level), compressed(level, doubles_at=7)] for level in ("O0", "O2")},
        "without amp": [compressed("O0", False, **plain), compressed("O0", True, **plain), compressed("O0")],
    }


UNEVEN = [("O1", "Adam"), ("O2", "FusedAdam"), ("O5", "SGD")]
MORE_UNEVEN = [
    *(("O1", "FusedAdam"), ("O2", "SGD"), ("O2", "Adam"), ("O5", "FusedAdam"), ("O5", "FusedAdam-split")),
]

dist.init_process_group(
    "gloo", init_method=f"file://{FILE}", rank=RANK, world_size=RANKS, timeout=datetime.timedelta(seconds=20)
)
results = (
    {"uneven": uneven("O2", "FusedAdam", batches=(2, 4, 3, 4))}
    if RANKS == 4
    else {
        "scales": scales_that_differ(),
        "others": other_differences(),
        "former": former_optimizer(),
        "loaded by one": loaded_by_one(),
        "no gradients": gradients_on_one_rank(),
        "static": {
            f"{level} {group is None}": overflow_at_a_static_scale(level, group)
            for level in ("O0", "O3", "O4", "O5")
            for group in (None, dist.group.WORLD)
        },
        "refused": refused_joins(),
        "formats": formats(),
        "two optimizers": uneven_with_two_optimizers(),
        "joined alone": joined_by_the_model_alone(),
        "compression": compression(),
        **{f"uneven {level} {kind}": uneven(level, kind) for level, kind in UNEVEN + FULL * MORE_UNEVEN},
        "uneven from the start": uneven("O2", "Adam", empty_first=True),
    }
)
print(json.dumps(results), flush=True)
dist.barrier()
# gloo's threads may still be there at exit, and end the process with an abort then.
os._exit(0)
