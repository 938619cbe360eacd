"""One rank of several that hold different parameters, as under tensor parallelism: prints what each scenario left.

python agreement_worker.py RENDEZVOUS_FILE RANKS RANK
"""

import contextlib
import datetime
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import ampctx
from ampctx import optimizers
from ampctx.amp import AmpSession, GradScaler

FILE, RANKS, RANK = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
STEPS = 5
OVERFLOW_AT = 2

OPTIMIZERS = {
    "plain": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5),
    "torch-fused": lambda params: torch.optim.Adam(params, lr=0.125, fused=True),
    "foreach": lambda params: torch.optim.Adam(params, lr=0.125, foreach=True),
    "ampctx": lambda params: optimizers.FusedAdam(params, lr=0.125),
}


def shard() -> nn.Module:
    """Of another size on each rank."""
    torch.manual_seed(RANK)
    return nn.Linear(4, 3 + RANK)


def loss_of(model: nn.Module, overflow: bool) -> torch.Tensor:
    loss = model(torch.full((2, 4), 0.5)).float().square().mean()
    return loss * float("inf") if overflow and RANK == 1 else loss


def weights(model: nn.Module) -> list[str]:
    return [v.hex() for p in model.parameters() for v in p.detach().double().flatten().tolist()]


def outcome(moved: list[bool], skipped: int, state: dict) -> dict:
    return {"moved": moved, "skipped": skipped, "scale": state["loss_scale"], "unskipped": state["unskipped"]}


def session_of(model, optimizer, level, group, **kwargs) -> AmpSession:
    session = AmpSession()
    session.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0, process_group=group, **kwargs
    )
    return session


def blocks(level, kind, group, body) -> dict:
    """``body(session, model, optimizer, overflow)`` makes the gradients of one step."""
    model = shard()
    optimizer = OPTIMIZERS[kind](model.parameters())
    session = session_of(model, optimizer, level, group)
    moved = []
    for step in range(STEPS):
        before = weights(model)
        optimizer.zero_grad()
        body(session, model, optimizer, step == OVERFLOW_AT)
        optimizer.step()
        moved.append(weights(model) != before)
    result = outcome(moved, session.skipped_steps(optimizer), session.state_dict()["loss_scaler0"])
    session.reset()
    return result


def one_block(session, model, optimizer, overflow, **kwargs):
    with session.scale_loss(loss_of(model, overflow), optimizer, **kwargs) as scaled:
        scaled.backward()


def delayed(session, model, optimizer, overflow):
    """The second of three backward passes overflows; the third judges the sum."""
    for i in range(3):
        with session.scale_loss(loss_of(model, overflow and i == 1) / 3, optimizer, delay_unscale=i < 2) as scaled:
            scaled.backward()


def ended_by_the_step(session, model, optimizer, overflow):
    one_block(session, model, optimizer, overflow, delay_unscale=True)


def ended_by_the_step_of_a_rank_without_gradients(session, model, optimizer, overflow):
    one_block(session, model, optimizer, overflow, delay_unscale=True)
    if RANK == 0:
        model.zero_grad()


def judged_later(session, model, optimizer, overflow):
    """The first block leaves its verdict to the second."""
    one_block(session, model, optimizer, overflow, delay_overflow_check=True)
    one_block(session, model, optimizer, False)


def outside(session, model, optimizer, overflow):
    """No block at all: the step judges what it finds in the model's 16-bit gradients."""
    loss_of(model, overflow).backward()


def outside_on_one_rank(session, model, optimizer, overflow):
    """As with experts that got no tokens: rank 0 has no gradients."""
    if RANK == 1:
        loss_of(model, overflow).backward()


def inside_and_outside(session, model, optimizer, overflow):
    one_block(session, model, optimizer, False)
    loss_of(model, overflow).backward()


def two_losses(group) -> dict:
    """Two optimizers and losses; the loss of the first overflows."""
    models = [shard(), shard()]
    opts = [OPTIMIZERS["plain"](model.parameters()) for model in models]
    session = session_of(models, opts, "O2", group, num_losses=2)
    moved = []
    for step in range(STEPS):
        before = [weights(model) for model in models]
        for i in range(2):
            opts[i].zero_grad()
            with session.scale_loss(loss_of(models[i], i == 0 and step == OVERFLOW_AT), opts[i], loss_id=i) as scaled:
                scaled.backward()
        for optimizer in opts:
            optimizer.step()
        moved.append([weights(model) != b for model, b in zip(models, before, strict=True)])
    skipped = [session.skipped_steps(optimizer) for optimizer in opts]
    result = {"moved": moved, "skipped": skipped, "state": session.state_dict()}
    session.reset()
    return result


def grad_scaler(kind, group, unscale=False, gradients_on_rank_0=True) -> dict:
    model = shard()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = GradScaler("cpu", process_group=group)
    moved, skipped = [], 0
    for step in range(STEPS):
        before = weights(model)
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(model, step == OVERFLOW_AT))
        if gradients_on_rank_0 or RANK > 0:
            loss.backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moved.append(weights(model) != before)
    state = scaler.state_dict()
    return outcome(moved, skipped, {"loss_scale": state["scale"], "unskipped": state["_growth_tracker"]})


def calls_of_all_reduce(group) -> list[int]:
    """How many collectives an exit with two optimizers is, then a step, then a delayed block."""
    models = [shard(), shard()]
    opts = [OPTIMIZERS["plain"](model.parameters()) for model in models]
    session = session_of(models, opts, "O2", group)
    counts, original = [], dist.all_reduce

    def counted(*args, **kwargs):
        counts[-1] += 1
        return original(*args, **kwargs)

    dist.all_reduce = counted
    try:
        counts.append(0)
        with session.scale_loss(loss_of(models[0], False) + loss_of(models[1], False), opts) as scaled:
            scaled.backward()
        counts.append(0)
        opts[0].step()
        counts.append(0)
        one_block(session, models[0], opts[0], False, delay_unscale=True)
    finally:
        dist.all_reduce = original
    session.reset()
    return counts


def a_rank_that_stays_away() -> dict:
    """Rank 1 takes no part in an exit: rank 0 gets an error, and cannot step on gradients that were not judged."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    model = shard()
    optimizer = OPTIMIZERS["plain"](model.parameters())
    session = session_of(model, optimizer, "O2", group)
    result = {}
    if RANK == 1:
        session.reset()
        return result
    try:
        one_block(session, model, optimizer, False)
    except ampctx.AmpRankError as error:
        result["exit"] = str(error).partition(". Another rank")[0]
    with contextlib.suppress(ampctx.AmpError):
        optimizer.step()
        result["stepped"] = True
    result["scale"] = session.state_dict()["loss_scaler0"]["loss_scale"]
    session.reset()
    return result


def all_of_two_ranks() -> dict:
    world = dist.group.WORLD
    results = {
        f"{level} {kind}": blocks(level, kind, world, one_block) for level in ("O1", "O2") for kind in OPTIMIZERS
    }
    for body in (delayed, ended_by_the_step, ended_by_the_step_of_a_rank_without_gradients, judged_later):
        for kind in ("plain", "ampctx"):
            results[f"{body.__name__} {kind}"] = blocks("O2", kind, world, body)
    for body in (outside, outside_on_one_rank, inside_and_outside):
        for kind in ("plain", "ampctx"):
            results[f"{body.__name__} {kind}"] = blocks("O2", kind, world, body)
    results["alone"] = blocks("O2", "plain", None, one_block)
    results["two losses"] = two_losses(world)
    results["scaler plain"] = grad_scaler("plain", world)
    results["scaler unscale_"] = grad_scaler("plain", world, unscale=True)
    results["scaler torch-fused"] = grad_scaler("torch-fused", world)
    results["scaler ampctx"] = grad_scaler("ampctx", world)
    results["scaler without gradients"] = grad_scaler("plain", world, gradients_on_rank_0=False)
    results["scaler alone"] = grad_scaler("plain", None)
    results["calls"] = calls_of_all_reduce(world)
    results["stays away"] = a_rank_that_stays_away()
    return results


def all_of_four_ranks() -> dict:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, other = pairs[RANK // 2], pairs[1 - RANK // 2]
    results = {
        "world": blocks("O2", "ampctx", dist.group.WORLD, one_block),
        "pairs": blocks("O2", "plain", mine, one_block),
    }
    try:
        GradScaler("cpu", process_group=other)
    except ampctx.AmpValueError as error:
        results["error"] = str(error)
    return results


dist.init_process_group("gloo", init_method=f"file://{FILE}", rank=RANK, world_size=RANKS)
print(json.dumps(all_of_two_ranks() if RANKS == 2 else all_of_four_ranks()), flush=True)
dist.barrier()
# gloo's threads may still be there at exit, and end the process with an abort then.
os._exit(0)
