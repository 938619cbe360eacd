"""The ops from the end of backward to the end of a step. Each is a launch or more on a GPU, so the lists may only get
shorter. The CPU runs the same Python."""

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from kit import mlp, with_plans
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ampctx import clip_grad_norm_
from ampctx.optimizers import FusedAdam

# Ops that launch nothing: memory, views, casts to the same dtype, checks on the host, and numbers of the host.
WITHOUT_LAUNCH = {"empty", "empty_like", "reshape", "to", "full", "resolve_conj", "resolve_neg"}


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
