"""The tail of an iteration, from the end of backward to new weights, allocates no tensor of a parameter's size."""

from __future__ import annotations

import pytest
import torch
from kit import start, with_plans
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ampctx import clip_grad_norm_


def allocations(fn):
    """(op, bytes) of everything that is allocated in ``fn``."""
    # acc_events: torch 2.11 warns without it that a later cycle would clear the events.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        fn()
    return [(e.name, e.self_cpu_memory_usage) for e in profiled.events() if e.self_cpu_memory_usage > 0]


@pytest.mark.full(but=14)
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clip"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "FusedAdagrad", "FusedLAMB", "FusedNovoGrad"])
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
