"""A param group that joins during training: against the same training in fp64 without amp."""

import pytest
import torch
from apex import amp
from apex.optimizers import FusedSGD
from kit import every_level
from l0 import (
    ZERO,
    Mixed,
    assert_exact,
    batch,
    initialize_mixed,
    low_of,
    reference_model,
    set_scales,
    zero_grads,
)  # fmt: skip


def three_steps(models, optimizer, backward, zero, when, passes):
    """The second model's parameters join during the first one or after it."""
    first, second = models
    dtype = first.wide.dtype

    def join():
        optimizer.add_param_group({"params": list(second.parameters()), "momentum": 0.5})

    joined = False
    for iteration in range(3):
        for i in range(passes):
            loss = first(batch(iteration, i, dtype))
            if joined:
                loss = loss + second(batch(iteration, i + 1, dtype))
            backward(loss)
            if when == "add-before-step" and not joined:
                join()
                joined = True
        optimizer.step()
        if when == "zero-then-add":
            zero_grads(zero, models, [optimizer])
        if not joined:
            join()
            joined = True
        if when != "zero-then-add":
            zero_grads(zero, models, [optimizer])


@pytest.mark.full(but=90)
@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD], ids=["SGD", "FusedSGD"])
@pytest.mark.parametrize("passes", [1, 2], ids=["one-backward", "two-backwards"])
@pytest.mark.parametrize("when", ["zero-then-add", "add-then-zero", "add-before-step"])
@pytest.mark.parametrize("zero", ZERO)
@every_level
def test_a_late_group_trains(level, zero, when, passes, make):
    expected = [reference_model(0), reference_model(1)]
    plain = torch.optim.SGD(expected[0].parameters(), lr=0.5, momentum=0.25)
    three_steps(expected, plain, torch.Tensor.backward, "optimizer", when, passes)

    models = [Mixed(0, low_of(level)), Mixed(1, low_of(level))]
    optimizer = make(models[0].parameters(), lr=0.5, momentum=0.25)
    initialize_mixed(models, optimizer, level)
    set_scales(4.0)

    def backward(loss):
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    three_steps(models, optimizer, backward, zero, when, passes)
    masters = list(amp.master_params(optimizer))
    assert len(masters) == 4
    for model, reference in zip(models, expected, strict=True):
        for p, value in zip(model.parameters(), reference.parameters(), strict=True):
            assert_exact(p, value.detach())
    for master, value in zip(masters, (p for m in expected for p in m.parameters()), strict=True):
        assert_exact(master, value.detach())
    assert [group["momentum"] for group in optimizer.param_groups] == [0.25, 0.5]
    stash = optimizer._amp_stash
    assert all(p is model.narrow for p, model in zip(stash.all_fp16_params, models, strict=True))
    if level in ("O2", "O5"):
        assert all(master.dtype == torch.float32 for master in masters)
        assert all(p is m for p, m in zip(stash.all_fp32_from_fp16_params, masters[1::2], strict=True))
        assert all(p is model.wide for p, model in zip(stash.all_fp32_from_fp32_params, models, strict=True))
    else:
        assert all(p is model.wide for p, model in zip(stash.all_fp32_params, models, strict=True))
