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


ADAM_OPTIONS = (
    ADAM,
    {"lr": 0.01, "betas": (0.6, 0.9), "eps": 3e-6, "weight_decay": 0.0},
    {**ADAM, "betas": (0.5, 0.5), "eps": 1e-3},
    {**ADAM, "weight_decay": 0.1},
)
ADAGRAD_OPTIONS = (ADAGRAD, {**ADAGRAD, "weight_decay": 0.0}, {"lr": 0.01, "eps": 3e-6, "weight_decay": 0.0})
SGD_OPTIONS = (
    {"lr": 0.25},
    SGD,
    {**SGD, "nesterov": True},
    {**SGD, "dampening": 0.5},
    {**SGD, "weight_decay": 0.01},
)
# Ours, torch's, the options of both, and more of ours.
CASES = [
    *((optimizers.FusedAdam, torch.optim.AdamW, options, {}) for options in ADAM_OPTIONS),
    *((optimizers.FusedAdam, torch.optim.Adam, options, {"adam_w_mode": False}) for options in ADAM_OPTIONS),
    *((optimizers.FusedAdagrad, torch.optim.Adagrad, options, {}) for options in ADAGRAD_OPTIONS),
    *((optimizers.FusedSGD, torch.optim.SGD, options, {}) for options in SGD_OPTIONS),
]


@pytest.mark.parametrize("sizes", [[[SIZE]], SIZES], ids=["one", "many"])
@pytest.mark.parametrize(("cls", "reference_cls", "options", "more"), CASES)
def test_steps_are_torchs(cls, reference_cls, options, more, sizes):
    """apex's bound for Adam is 1e-3: a step is 5e-4."""
    ours, reference = pairs(sizes)
    start = [p.detach().clone() for p in ours]
    for absolute, relative in run(ours, reference, cls(ours, **options, **more), reference_cls(reference, **options)):
        assert absolute <= 1e-6
        assert relative <= 1
    assert all((p != before).any() for p, before in zip(ours, start, strict=True))


PAIRS = {
    "adam": (optimizers.FusedAdam, torch.optim.AdamW, ADAM),
    "adagrad": (optimizers.FusedAdagrad, torch.optim.Adagrad, ADAGRAD),
    "sgd": (optimizers.FusedSGD, torch.optim.SGD, SGD),
}
each = pytest.mark.parametrize(("cls", "reference_cls", "options"), PAIRS.values(), ids=PAIRS)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=["fp16", "bf16"])
@each
def test_16_bit_parameters(cls, reference_cls, options, dtype, most):
    """The state is fp32, so that a first step is that of fp32 rounded. Each later step rounds the weights once, to at
    most half a place of 2."""
    ours, reference = pairs([[SIZE]], dtype)
    wide = [nn.Parameter(q.detach().float()) for q in reference]
    optimizer, by_reference = cls(ours, **options), reference_cls(wide, **options)
    for step in range(ITERATIONS if cls is optimizers.FusedSGD else 1):
        give_grads(ours, reference, step)
        wide[0].grad = reference[0].grad.float()
        optimizer.step()
        by_reference.step()
        if step == 0:
            torch.testing.assert_close(ours[0].detach(), wide[0].detach().to(dtype))
        absolute, _ = differences([p.float() for p in ours], wide)
        assert absolute <= most * (step + 1)
    assert all(v.dtype == torch.float32 for v in optimizer.state[ours[0]].values() if v.dim())


@pytest.mark.parametrize("when", ["first", "before", "between"])
@each
def test_an_empty_group_is_tolerated(cls, reference_cls, options, when):
    ours, twins = pairs([[17]])
    optimizer = cls([{"params": []}, {"params": ours}] if when == "first" else ours, lr=0.1)
    reference = cls(twins, lr=0.1)
    for step in range(ITERATIONS):
        if (when, step) in (("before", 0), ("between", 3)):
            optimizer.add_param_group({"params": []})
        give_grads(ours, twins, step)
        optimizer.step()
        reference.step()
    assert torch.equal(ours[0], twins[0])


@each
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
@each
def test_parameters_on_several_devices_are_stepped(cls, reference_cls, options):
    """apex raised, or needed the current device to be theirs."""
    on_host, reference = pairs([[33]])
    on_device, reference_on_device = pairs([[5, 7]], device="cuda")
    ours, reference = on_host + on_device, reference + reference_on_device
    for absolute, _ in run(ours, reference, cls(ours, **options), reference_cls(reference, **options)):
        assert absolute <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@each
def test_channels_last_parameters(cls, reference_cls, options, dtype):
    ours, twins = pairs([[4, 3, 5, 5]], dtype)
    ours[0].data = ours[0].data.to(memory_format=torch.channels_last)
    for _ in run(ours, twins, cls(ours, lr=0.1), cls(twins, lr=0.1), 3):
        pass
    assert ours[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(ours[0], twins[0])
