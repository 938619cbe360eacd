"""The ops from the end of backward to the end of a step. Each is a launch or more on a GPU, so the lists may only get
shorter. They allocate no tensor of a parameter's size. The CPU runs the same Python."""

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from kit import mlp, start, with_plans
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ampctx import clip_grad_norm_
from ampctx.optimizers import FusedAdam

# Ops that launch nothing: memory, views, casts to the same dtype, checks on the host, numbers of the host, and reads of
# addresses and layouts.
WITHOUT_LAUNCH = {"empty", "empty_like", "reshape", "to", "full", "resolve_conj", "resolve_neg", "read"}


def ops_of(call: Callable[[], object]) -> list[str]:
    """The ops that ``call`` makes, in order, without those that other ops make."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    found = []
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        caller = event.cpu_parent
        while caller is not None and "::" not in caller.name:
            caller = caller.cpu_parent
        name = event.name.rpartition("::")[2]
        if "::" in event.name and caller is None and name not in WITHOUT_LAUNCH:
            found.append(name)
    return found


def tail_of(session, level: str, clip: bool = False, losses: int = 1, batch_norm: bool = False, **options) -> list[str]:
    """The ops of the third iteration. By then everything is there that is kept from step to step."""
    model = mlp() if batch_norm else nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    session.initialize(model, optimizer, opt_level=level, num_losses=losses, verbosity=0, **options)
    found = []
    for _ in range(3):
        found.clear()
        for loss_id in range(losses):
            loss = model(torch.ones(4, 4)).float().square().mean()
            with ExitStack() as block:
                block.enter_context(session.scale_loss(loss, optimizer, loss_id=loss_id)).backward()
                found += ops_of(block.close)
        if clip:
            found += ops_of(lambda: clip_grad_norm_(session.master_params(optimizer), 1.0))
        found += ops_of(optimizer.step)
        optimizer.zero_grad()
    return found


CHECK, STEP = ["multi_tensor_unscale_l2norm"], ["multi_tensor_adam"]
CLIP = ["multi_tensor_scale_clipped"]
COUNTERS = ["count_skip"]
JOINED_NORM = ["stack", "linalg_vector_norm"]

UNSCALE_AND_UPDATE, CHECK_AND_UPDATE = ["multi_tensor_scale_and_update"], ["multi_tensor_unscale_l2norm_and_update"]

TAILS = {
    "O1": [*UNSCALE_AND_UPDATE, *STEP],
    "O2": [*CHECK_AND_UPDATE, *STEP],
    # The norm is taken anew: code may have changed gradients in place since the check.
    "O1, clip": [*UNSCALE_AND_UPDATE, *CHECK, *CLIP, *STEP],
    "O2, clip": [*CHECK_AND_UPDATE, *STEP],
    "O2, BatchNorm": [*CHECK, *UNSCALE_AND_UPDATE, *STEP, *STEP],
    "O2, BatchNorm, clip": [*CHECK, *UNSCALE_AND_UPDATE, *CHECK, *JOINED_NORM, *CLIP, "clone", *STEP, *STEP],
}


@pytest.mark.parametrize("case", TAILS)
@with_plans
def test_one_loss(session, case):
    found = tail_of(session, case[:2], clip="clip" in case, batch_norm="BatchNorm" in case)
    assert found == TAILS[case]


@with_plans
def test_static_scale(session):
    assert tail_of(session, "O5") == [*CHECK, "add_", *STEP]


@pytest.mark.parametrize(("level", "first"), [("O1", UNSCALE_AND_UPDATE), ("O2", CHECK_AND_UPDATE)])
@with_plans
def test_several_losses(session, level, first):
    assert tail_of(session, level, losses=2) == [
        *first,
        *["multi_tensor_axpby", "update_scale"],
        *["maximum", *STEP, *COUNTERS, *COUNTERS],
    ]


# --- memory -----------------------------------------------------------------------------------------------------------


def allocations(fn):
    """(op, bytes) of everything that is allocated in ``fn``."""
    # acc_events: torch 2.11 warns without it that a later cycle would clear the events.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        fn()
    return [(e.name, e.self_cpu_memory_usage) for e in profiled.events() if e.self_cpu_memory_usage > 0]


@pytest.mark.full(but=14)
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clip"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "FusedAdagrad", "FusedLAMB"])
@with_plans
def test_the_tail_allocates_nothing_but_scalars_and_partial_sums(session, name, level, clip):
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)), nn.BatchNorm1d(128))
    model, optimizer = start(session, level, name, model, loss_scale="dynamic")
    params = list(model.parameters())

    def tail(block):
        block.__exit__(None, None, None)
        if clip:
            clip_grad_norm_(session.master_params(optimizer), 1.0)
        optimizer.step()

    for _ in range(4):
        optimizer.zero_grad(set_to_none=True)
        block = session.scale_loss(torch.ones(()), optimizer)
        block.__enter__()
        for p in params:
            p.grad = torch.full_like(p, 1e-3)
        found = allocations(lambda block=block: tail(block))
    # A few flags, scales and norms; two sums in fp64 for each block of 2,048 elements; the scalars of
    # each tensor.
    blocks = sum(-(-p.numel() // 2048) for p in params)
    assert sum(size for _, size in found) < 512 + 32 * blocks + 64 * len(params), found
    assert max((size for _, size in found), default=0) < 4 * 128 * 128, found
