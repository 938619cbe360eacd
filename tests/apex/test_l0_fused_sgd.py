"""FusedSGD with several models, losses and optimizers.

With materialize_master_grads=False, apex leaves gradients scaled and those of masters None, and its test does not look
at them. Here the flag is an attribute and no more: gradients are there, and true, either way.
"""

import pytest
from apex.optimizers import FusedSGD
from l0_scenarios import OPTIONS, check_run, every_case, every_scaler, every_zero


@pytest.mark.full(but=100)
@pytest.mark.parametrize("materialize", [True, False], ids=["materialized", "not-materialized"])
@every_scaler
@every_zero
@every_case
def test_several_of_each(scenario, level, overflow, zero, n_scalers, materialize):
    def make(groups):
        return FusedSGD(groups, **OPTIONS, materialize_master_grads=materialize)

    check_run(scenario, level, overflow, zero, n_scalers, make)
