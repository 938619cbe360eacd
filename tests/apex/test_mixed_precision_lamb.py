"""apex.optimizers.FusedMixedPrecisionLamb: FusedLAMB with lr on the device and masters for one dtype."""

import copy

import pytest
import torch
from apex.optimizers import FusedMixedPrecisionLamb
from kit import assert_same, params_of, snapshot
from torch import nn

from ampctx import AmpError, AmpTypeError, AmpValueError, optimizers

F16, B16 = torch.float16, torch.bfloat16
DEFAULTS = (1e-3, 0, True, (0.9, 0.999), 1e-6, 0.01, False, True, True, 1.0, False, None)


def parameters(*dtypes):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(3, 4, generator=generator).to(dtype)) for dtype in dtypes]


def run(optimizer, steps, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for p in params_of(optimizer):
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def test_arguments_and_attributes_are_apexs():
    positional, by_default = (
        FusedMixedPrecisionLamb(parameters(F16), *DEFAULTS),
        FusedMixedPrecisionLamb(parameters(F16)),
    )
    assert positional.defaults == by_default.defaults
    for optimizer in (positional, by_default):
        assert (optimizer.reduced_precision_dtype, optimizer.adam_w_mode, optimizer.use_nvlamb) == (None, 1, False)
        assert optimizer._step_supports_amp_scaling
        assert optimizer.param_groups[0]["lr"].shape == ()


@pytest.mark.parametrize("dtype", [torch.float32, F16, B16])
@pytest.mark.parametrize("options", [{}, {"adam_w_mode": False}, {"weight_decay": 0.0, "use_nvlamb": True}], ids=str)
def test_steps_as_FusedLAMB_with_masters(dtype, options):
    reduced = None if dtype == torch.float32 else dtype
    optimizer = FusedMixedPrecisionLamb(parameters(dtype, dtype), lr=0.1, reduced_precision_dtype=reduced, **options)
    expected = optimizers.FusedLAMB(parameters(dtype, dtype), 0.1, capturable=True, master_weights=True, **options)
    run(optimizer, 3)
    run(expected, 3)
    assert_same(snapshot(optimizer), snapshot(expected))


def test_reduced_precision_dtype_chooses_what_has_masters():
    half, brain, full = parameters(F16, B16, torch.float32)
    optimizer = FusedMixedPrecisionLamb([half, brain, full])
    run(optimizer, 1)
    assert all("master_param" not in state for state in optimizer.state.values())
    optimizer.reduced_precision_dtype = B16  # as apex's own tests set it
    before = [p.detach().clone() for p in (half, brain, full)]
    run(optimizer, 2)
    assert [p for p in (half, brain, full) if "master_param" in optimizer.state[p]] == [brain]
    assert all(not torch.equal(p, q) for p, q in zip((half, brain, full), before, strict=True))
    assert optimizer.param_groups_full_precision[0]["params"][1] is optimizer.state[brain]["master_param"]


def test_groups_added_after_the_first_step_are_stepped_and_count_from_the_given_step():
    first, late = parameters(B16, B16)
    optimizer = FusedMixedPrecisionLamb([first], lr=0.1, reduced_precision_dtype=B16, step=10)
    run(optimizer, 1)
    optimizer.add_param_group({"params": [late]})
    before = late.detach().clone()
    run(optimizer, 1)
    assert not torch.equal(late, before)
    assert (optimizer.state[first]["step"], optimizer.state[late]["step"]) == (12, 11)
    assert torch.equal(late, optimizer.state[late]["master_param"].to(B16))


def test_masters_of_a_checkpoint_wait_for_the_reduced_precision_dtype():
    optimizer = FusedMixedPrecisionLamb(parameters(F16), reduced_precision_dtype=F16)
    run(optimizer, 3)
    resumed = FusedMixedPrecisionLamb([nn.Parameter(p.detach().clone()) for p in params_of(optimizer)])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.reduced_precision_dtype = F16
    run(optimizer, 2, first=3)
    run(resumed, 2, first=3)
    assert_same(snapshot(resumed), snapshot(optimizer))


def test_copies_and_pickles_continue(tmp_path):
    optimizer = FusedMixedPrecisionLamb(parameters(B16), step=3, adam_w_mode=False, reduced_precision_dtype=B16)
    run(optimizer, 1)
    torch.save(optimizer, tmp_path / "optimizer.pt")
    others = copy.deepcopy(optimizer), torch.load(tmp_path / "optimizer.pt", weights_only=False)
    run(optimizer, 1, first=1)
    for other in others:
        run(other, 1, first=1)
        assert_same(snapshot(other), snapshot(optimizer))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"amsgrad": True}, AmpError, "FusedMixedPrecisionLamb does not support the AMSGrad"),
        ({"step": 1.0}, AmpTypeError, "step must be an int, the number of steps so far, got float"),
        ({"step": -1}, AmpValueError, "Invalid step value: -1"),
        ({"reduced_precision_dtype": torch.int8}, AmpValueError, "reduced_precision_dtype is torch.int8"),
    ],
    ids=str,
)
def test_errors(options, kind, message):
    with pytest.raises(kind, match=message):
        FusedMixedPrecisionLamb(parameters(F16), **options)


def test_ampctx_itself_says_where_the_class_is():
    message = r"FusedMixedPrecisionLamb of ampctx-apex\. For new code: FusedLAMB\(.*master_weights=True\)"
    with pytest.raises(ImportError, match=message):
        exec("from ampctx.optimizers import FusedMixedPrecisionLamb", {})
