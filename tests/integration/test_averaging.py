"""torch.optim.swa_utils beside amp: averages of the weights, their learning rate, and the batch norm that goes with
them. What averages are made of is in tests/reliability/test_copies_and_averages.py."""

import pytest
import torch
from kit import backward, every_level, start
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from ampctx import AmpSession

DATA = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(0))


def run(session, level, make):
    """A run with SWA from its third step on. Returns the model, its average and the learning rates, and keeps the
    optimizer, which holds the masters."""
    model, optimizer = start(session, level, make, loss_scale=128.0)
    # At O3 there are no masters: what is averaged are the 16-bit weights, behind the casts of the model itself.
    source = model if level == "O3" else session.master_model(model)
    average, schedule = AveragedModel(source), SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    rates = []
    for i, x in enumerate(DATA):
        backward(session, model(x).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if i >= 2 and session.outcome(optimizer).stepped:
            average.update_parameters(source)
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
    return model, average, rates, optimizer


@pytest.mark.parametrize("make", ["FusedSGD", "SGD-foreach"])
@every_level
def test_swa_from_the_loop_to_the_batch_norm_of_the_average(session, level, make):
    model, average, rates, _optimizer = run(session, level, make)
    twin = AmpSession()
    _, expected, wanted, _ = run(twin, "O0", make)
    twin.reset()
    assert rates == wanted
    tolerance = 1e-6 if level == "O0" else 0.05
    for got, of_fp32 in zip(average.module.parameters(), expected.module.parameters(), strict=True):
        assert got.dtype == (torch.float16 if level == "O3" else torch.float32)
        torch.testing.assert_close(got.float(), of_fp32, rtol=tolerance, atol=tolerance)

    trained = model[1].running_mean.clone()
    update_bn(DATA, average)
    with session.disable_casts():
        update_bn(DATA, expected)
        evaluated = expected.eval()(DATA[0])
    norms = average.module[1], expected.module[1]
    assert norms[0].num_batches_tracked == len(DATA)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(norms[0], name).float(), getattr(norms[1], name), rtol=0.05, atol=0.02)
    assert torch.equal(model[1].running_mean, trained)
    with torch.no_grad():
        torch.testing.assert_close(average.eval()(DATA[0]).float(), evaluated, rtol=0.05, atol=0.05)
