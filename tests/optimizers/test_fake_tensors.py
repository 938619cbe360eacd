"""Every optimizer x FakeTensorMode: steps, for estimates of memory, and the state that real tensors have."""

from __future__ import annotations

import pytest
import torch
from kit import LEVELS, batch, mlp, params_of, start
from optimizer_cases import BY_NAME, MODES, STEPPED_BY
from torch import nn
from torch._subclasses import FakeTensorMode

from ampctx import AmpSession, clip_grad_norm_

SMALLER = {"8bit": {"state_dtype": "8bit", "min_8bit_size": 0}, "bf16 state": {"state_dtype": torch.bfloat16}}
ROWS = [
    *((name, how) for name in STEPPED_BY for how in ("fp32", *LEVELS)),
    *((name, how) for name in BY_NAME for how in [*MODES, *SMALLER][1:]),
    ("split-masters", "bf16"),
]
# Masters beside those on the host, fp16 weights with remainders of bf16, sums that grow in few bits.
REFUSED = [("offload", "O2"), ("offload", "O5"), ("split-masters", "O3"), *(("adagrad", how) for how in SMALLER)]


def forms(optimizer):
    """Names, dtypes and shapes of state."""
    states = [optimizer.state[p] for p in params_of(optimizer)]
    return [{k: (v.dtype, v.shape) if isinstance(v, torch.Tensor) else v for k, v in s.items()} for s in states]


def alone(name, how):
    dtype, options = MODES.get(how, (torch.float32, SMALLER.get(how, {})))
    if how in SMALLER and name == "adam":
        options = {**options, "amsgrad": False}
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3, 64), (2, 3, 2), (5,))]
    optimizer = STEPPED_BY[name](params, **options)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    return forms(optimizer)


def by_amp(name, level):
    session = AmpSession()
    try:
        model, optimizer = start(session, level, STEPPED_BY[name], mlp(), loss_scale="dynamic", max_loss_scale=64.0)
        for _ in range(3):
            with session.scale_loss(model(batch()).float().square().mean(), optimizer) as scaled:
                scaled.backward()
            clip_grad_norm_(session.master_params(optimizer), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return forms(optimizer)
    finally:
        session.reset()


@pytest.mark.full(but=24)
@pytest.mark.parametrize(("name", "how"), [row for row in ROWS if row not in REFUSED])
def test_fake_tensors_step_and_have_the_state_of_real_ones(name, how):
    run = by_amp if how in LEVELS else alone
    with FakeTensorMode():
        estimated = run(name, how)
    assert estimated == run(name, how)
