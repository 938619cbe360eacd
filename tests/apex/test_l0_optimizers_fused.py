"""What apex's suite for FusedAdam, FusedAdagrad and FusedSGD asks, through apex's names, beside torch.optim."""

import pytest
import torch
from apex import optimizers
from torch import nn

ITERATIONS = 7
SIZE = 278011  # no multiple of any block or vector length
SIZES = [[128, 64], [128], [128, 96], [1010, 32], [1]]

ADAM = {"lr": 5e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
ADAGRAD = {"lr": 5e-4, "eps": 1e-8, "weight_decay": 1e-5}
SGD = {"lr": 0.25, "momentum": 0.125}


def pairs(sizes, dtype=torch.float32, device="cpu"):
    """Parameters drawn from [0, 1), and the same again for the reference."""
    generator = torch.Generator().manual_seed(9876)
    drawn = [torch.rand(size, generator=generator).to(device, dtype) for size in sizes]
    return [nn.Parameter(t.clone()) for t in drawn], [nn.Parameter(t.clone()) for t in drawn]


def give_grads(ours, reference, step):
    """The same tensor objects to both."""
    generator = torch.Generator().manual_seed(step)
    for p, q in zip(ours, reference, strict=True):
        p.grad = q.grad = torch.rand(p.shape, generator=generator).to(p.device, p.dtype)


def differences(ours, reference):
    """The largest absolute difference, and the largest relative to the reference."""
    found = [((p - q).abs(), q.abs()) for p, q in zip(ours, reference, strict=True)]
    return max(d.max().item() for d, _ in found), max((d / q).max().item() for d, q in found)


def run(ours, reference, optimizer, reference_optimizer, iterations=ITERATIONS):
    for step in range(iterations):
        give_grads(ours, reference, step)
        optimizer.step()
        reference_optimizer.step()
        yield differences(ours, reference)


def check(cls, reference_cls, options, sizes=((SIZE,),), dtype=torch.float32, most=1e-3, reference_options=None):
    ours, reference = pairs(sizes, dtype)
    start = [p.detach().clone() for p in ours]
    by_reference = reference_cls(reference, **(options if reference_options is None else reference_options))
    for absolute, relative in run(ours, reference, cls(ours, **options), by_reference):
        assert absolute <= most
        assert relative <= 1
    assert all((p != before).any() for p, before in zip(ours, start, strict=True))


# --- Adam -------------------------------------------------------------------------------------------------------------

# In fp32 these are far inside apex's bound of 1e-3: a step is 5e-4.
ADAM_BOUND = 1e-6


@pytest.mark.parametrize(
    "options",
    [
        ADAM,
        {"lr": 0.01, "betas": (0.6, 0.9), "eps": 3e-6, "weight_decay": 0.0},
        {**ADAM, "betas": (0.5, 0.5), "eps": 1e-3},
    ],
    ids=["defaults", "lr-betas-eps", "betas-eps"],
)
@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "l2"])
def test_adam_is_torchs(options, adam_w_mode):
    check(
        optimizers.FusedAdam,
        torch.optim.Adam,
        {**options, "adam_w_mode": adam_w_mode},
        most=ADAM_BOUND,
        reference_options=options,
    )


@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "l2"])
def test_adam_with_weight_decay_is_torchs(adam_w_mode):
    options = {**ADAM, "weight_decay": 0.1}
    reference = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    check(
        optimizers.FusedAdam,
        reference,
        {**options, "adam_w_mode": adam_w_mode},
        most=ADAM_BOUND,
        reference_options=options,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_adam_steps_16_bit_parameters(dtype):
    """Once in apex's suite and unchecked. The state is fp32, so that a step is that of fp32 rounded."""
    ours, reference = pairs([[SIZE]], dtype)
    wide = [nn.Parameter(q.detach().float()) for q in reference]
    give_grads(ours, reference, 0)
    for p, q in zip(reference, wide, strict=True):
        q.grad = p.grad.float()
    optimizer = optimizers.FusedAdam(ours, **ADAM)
    optimizer.step()
    torch.optim.AdamW(wide, **ADAM).step()
    torch.testing.assert_close([p.detach() for p in ours], [q.detach().to(dtype) for q in wide])
    assert optimizer.state[ours[0]]["exp_avg"].dtype == torch.float32


def test_adam_of_many_parameters():
    check(optimizers.FusedAdam, torch.optim.Adam, ADAM, sizes=SIZES, most=ADAM_BOUND)


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("cls", [optimizers.FusedAdam, optimizers.FusedAdagrad, optimizers.FusedSGD])
def test_an_empty_group_is_tolerated(cls, when):
    ours, twins = pairs([[17]])
    optimizer, reference = cls(ours, lr=0.1), cls(twins, lr=0.1)
    if when == "before":
        optimizer.add_param_group({"params": []})
    for step in range(ITERATIONS):
        give_grads(ours, twins, step)
        optimizer.step()
        reference.step()
        if when == "between" and step == 2:
            optimizer.add_param_group({"params": []})
    assert torch.equal(ours[0], twins[0])


def test_an_empty_first_group_is_tolerated():
    ours, twins = pairs([[17]])
    optimizer = optimizers.FusedSGD([{"params": []}, {"params": ours}], lr=0.1)
    reference = optimizers.FusedSGD(twins, lr=0.1)
    give_grads(ours, twins, 0)
    optimizer.step()
    reference.step()
    assert torch.equal(ours[0], twins[0])


@pytest.mark.parametrize(
    ("cls", "reference_cls", "options"),
    [
        (optimizers.FusedAdam, torch.optim.Adam, ADAM),
        (optimizers.FusedAdagrad, torch.optim.Adagrad, ADAGRAD),
        (optimizers.FusedSGD, torch.optim.SGD, SGD),
    ],
    ids=["adam", "adagrad", "sgd"],
)
def test_groups_that_come_between_steps_are_stepped(cls, reference_cls, options):
    """apex's FusedAdam never stepped them."""
    ours, reference = pairs([[33], [5, 7]])
    optimizer, by_reference = cls(ours[:1], **options), reference_cls(reference[:1], **options)
    for absolute, _ in run(ours, reference, optimizer, by_reference, 2):
        assert absolute <= 1e-6
    for group in (optimizer, ours), (by_reference, reference):
        group[0].add_param_group({"params": group[1][1:], "lr": 0.01})
    before = ours[1].detach().clone()
    for absolute, _ in run(ours, reference, optimizer, by_reference):
        assert absolute <= 1e-6
    assert not torch.equal(ours[1], before)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("cls", "reference_cls", "options"),
    [
        (optimizers.FusedAdam, torch.optim.Adam, ADAM),
        (optimizers.FusedAdagrad, torch.optim.Adagrad, ADAGRAD),
        (optimizers.FusedSGD, torch.optim.SGD, SGD),
    ],
    ids=["adam", "adagrad", "sgd"],
)
def test_parameters_on_several_devices_are_stepped(cls, reference_cls, options):
    """apex raised, or needed the current device to be theirs."""
    on_host, reference = pairs([[33]])
    on_device, reference_on_device = pairs([[5, 7]], device="cuda")
    ours, reference = on_host + on_device, reference + reference_on_device
    for absolute, _ in run(ours, reference, cls(ours, **options), reference_cls(reference, **options)):
        assert absolute <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("cls", [optimizers.FusedAdam, optimizers.FusedAdagrad, optimizers.FusedSGD])
def test_channels_last_parameters(cls, dtype):
    ours, twins = pairs([[4, 3, 5, 5]], dtype)
    ours[0].data = ours[0].data.to(memory_format=torch.channels_last)
    optimizer, reference = cls(ours, lr=0.1), cls(twins, lr=0.1)
    for step in range(3):
        give_grads(ours, twins, step)
        optimizer.step()
        reference.step()
    assert ours[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(ours[0], twins[0])


# --- Adagrad ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [ADAGRAD, {**ADAGRAD, "weight_decay": 0.0}, {"lr": 0.01, "eps": 3e-6, "weight_decay": 0.0}],
    ids=["decay", "no-decay", "lr-eps"],
)
@pytest.mark.parametrize("sizes", [[[SIZE]], SIZES], ids=["one", "many"])
def test_adagrad_is_torchs(options, sizes):
    check(optimizers.FusedAdagrad, torch.optim.Adagrad, options, sizes=sizes, most=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_adagrad_steps_16_bit_parameters(dtype):
    ours, reference = pairs([[SIZE]], dtype)
    wide = [nn.Parameter(q.detach().float()) for q in reference]
    give_grads(ours, reference, 0)
    wide[0].grad = reference[0].grad.float()
    optimizers.FusedAdagrad(ours, **ADAGRAD).step()
    torch.optim.Adagrad(wide, **ADAGRAD).step()
    torch.testing.assert_close(ours[0].detach(), wide[0].detach().to(dtype))


# --- SGD --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [SGD, {"lr": 0.25}, {**SGD, "nesterov": True}, {**SGD, "dampening": 0.5}, {**SGD, "weight_decay": 0.01}],
    ids=["momentum", "plain", "nesterov", "dampening", "decay"],
)
@pytest.mark.parametrize("sizes", [[[SIZE]], SIZES], ids=["one", "many"])
def test_sgd_is_torchs(options, sizes):
    check(optimizers.FusedSGD, torch.optim.SGD, options, sizes=sizes, most=1e-6)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=["fp16", "bf16"])
def test_sgd_steps_16_bit_parameters(dtype, most):
    """Against torch's in fp32: each of our steps rounds the weights once, to at most half a place of 2."""
    ours, reference = pairs([[SIZE]], dtype)
    wide = [nn.Parameter(q.detach().float()) for q in reference]
    optimizer, by_reference = optimizers.FusedSGD(ours, **SGD), torch.optim.SGD(wide, **SGD)
    for step in range(ITERATIONS):
        give_grads(ours, reference, step)
        wide[0].grad = reference[0].grad.float()
        optimizer.step()
        by_reference.step()
        absolute, _ = differences([p.float() for p in ours], wide)
        assert absolute <= most * (step + 1)
