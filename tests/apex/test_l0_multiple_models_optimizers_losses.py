"""scale_loss with several models, losses and optimizers of torch."""

import pytest
import torch
from l0_scenarios import OPTIONS, check_run, every_case, every_scaler, every_zero


@pytest.mark.full(but=100)
@every_scaler
@every_zero
@every_case
def test_several_of_each(scenario, level, overflow, zero, n_scalers):
    check_run(scenario, level, overflow, zero, n_scalers, lambda groups: torch.optim.SGD(groups, **OPTIONS))
