"""What type checkers say of the public names. test_types has mypy check this file, with what ``--strict`` asks for.

It runs, too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import ampctx
from ampctx import amp, distributed, optimizers


def programs() -> None:
    first, second = nn.Linear(4, 2), nn.Linear(4, 2)
    of_first, of_second = optimizers.FusedAdam(first.parameters(), lr=0.1), torch.optim.SGD(second.parameters(), lr=0.1)

    # The shapes of initialize.
    session = ampctx.AmpSession()
    assert_type(session.initialize(first, enabled=False), nn.Linear)
    assert_type(session.initialize([first, second], enabled=False), list[nn.Linear])
    assert_type(session.initialize(first, of_first, enabled=False), tuple[nn.Linear, optimizers.FusedAdam])
    both = session.initialize([first, second], [of_second], opt_level="O2", enabled=False)
    assert_type(both, tuple[list[nn.Linear], list[torch.optim.SGD]])
    session.initialize(first, [of_first], enabled=False)
    session.initialize([first], of_first, enabled=False)

    model, optimizer = amp.initialize(first, of_first, opt_level="O1", loss_scale="dynamic", init_scale=8.0)
    handle = amp.on_skip(lambda optimizer, outcome: print(outcome.culprits))
    loss = model(torch.ones(2, 4)).mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert_type(scaled_loss, Tensor)
        scaled_loss.backward()  # type: ignore[no-untyped-call]
    assert_type(ampctx.clip_grad_norm_(amp.master_params(optimizer), 1.0), Tensor)
    optimizer.step()
    optimizer.zero_grad()
    handle.remove()

    outcome = amp.outcome(optimizer)
    assert_type(outcome.stepped, bool)
    assert_type([culprit.name for culprit in outcome.culprits], list[str])
    assert_type(amp.loss_scale(), float)
    assert_type(amp.skipped_steps(optimizer), int)
    assert_type(amp.history(optimizer).skipped, list[bool])
    assert_type(amp.count_ops(model, torch.ones(1, 4)).cast_count, int)
    assert_type(amp.OPT_LEVELS["O2"].opt_level, str)
    amp.load_state_dict(amp.state_dict())
    amp.reset()

    guarded = optimizers.FusedAdam(second.parameters(), master_weights="split", skip_nonfinite=True)
    guarded.found_inf = torch.zeros(())
    optimizers.Offloaded(optimizers.FusedAdam, second.parameters(), lr=1e-3, master_weights=True)
    assert_type(guarded.outcome.reason, "str | None")
    scaler = ampctx.GradScaler("cpu", init_scale=8.0)
    assert_type(scaler.outcome(guarded).overflowed, tuple[int, ...])
    distributed.average_hook(dtype=torch.float32)
    try:
        ampctx.clip_grad_norm_([], -1.0)
    except ampctx.AmpValueError as error:
        assert_type(error, ampctx.AmpValueError)


if __name__ == "__main__":
    programs()
