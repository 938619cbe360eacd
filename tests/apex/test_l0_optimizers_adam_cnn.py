"""What apex's suite for FusedAdam under a GradScaler asks, through apex's names: a small network, and torch's Adam."""

import copy

import pytest
import torch
from apex.optimizers import FusedAdam
from torch import nn

ITERATIONS = 100
LR = 1e-5
# apex's bounds, for 16-bit weights; a step in fp32 is LR, and is held to a hundredth of that.
CLOSE = {"atol": 1e-3, "rtol": 1e-3}
TIGHT = {"atol": 1e-7, "rtol": 1e-6}


class Network(nn.Module):
    """Two convolutions, two linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 3, 3)
        self.conv2 = nn.Conv2d(3, 4, 3)
        self.linear1 = nn.Linear(16, 12)
        self.linear2 = nn.Linear(12, 5)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2)
        return self.linear2(self.linear1(x.flatten(1)).relu())


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.rand(6, 1, 14, 14, generator=generator), torch.randint(5, (6,), generator=generator)


def iterate(model, optimizer, scaler, step):
    images, labels = batch(step)
    optimizer.zero_grad()
    with torch.autocast("cpu"):
        loss = nn.functional.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


@pytest.mark.full(but=4)
@pytest.mark.parametrize("half_convolutions", [False, True], ids=["fp32", "half-convolutions"])
@pytest.mark.parametrize(
    "options",
    [{}, {"capturable": True}, {"capturable": True, "master_weights": True}, {"master_weights": True}],
    ids=["plain", "capturable", "capturable-masters", "masters"],
)
def test_fused_adam_follows_torchs_under_a_grad_scaler(options, half_convolutions):
    torch.manual_seed(0)
    reference = Network()
    model = copy.deepcopy(reference)
    if half_convolutions:
        model.conv1.half()
        model.conv2.half()
    by_torch = torch.optim.Adam(reference.parameters(), lr=LR)
    ours = FusedAdam(model.parameters(), lr=LR, **options)
    scaler, twin = (torch.amp.GradScaler("cpu", growth_interval=30) for _ in range(2))
    bounds = CLOSE if half_convolutions else TIGHT
    moved = 0
    for step in range(ITERATIONS):
        before = model.linear2.weight.detach().clone()
        expected = iterate(reference, by_torch, scaler, step)
        torch.testing.assert_close(iterate(model, ours, twin, step), expected, **bounds)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.detach().float(), q.detach(), **bounds)
        moved += not torch.equal(model.linear2.weight, before)
        # Differences do not add up: each iteration begins with the reference's weights.
        model.load_state_dict(reference.state_dict())
    assert moved == ITERATIONS
    assert twin.get_scale() == scaler.get_scale() == 2.0**19
    for p in model.parameters():
        assert ours.state[p]["step"].item() == ITERATIONS
        assert ("master_param" in ours.state[p]) == (p.dtype == torch.float16 and "master_weights" in options)


@pytest.mark.parametrize(
    "options", [{}, {"capturable": True, "master_weights": True}], ids=["plain", "capturable-masters"]
)
def test_an_overflow_is_skipped_and_not_counted(options):
    torch.manual_seed(0)
    model = Network().half()
    optimizer = FusedAdam(model.parameters(), lr=LR, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).half()
        if step == 2:
            model.conv2.weight.grad.view(-1)[-1] = float("inf")
        # A scaler knows its scale once it has scaled something.
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert scaler.get_scale() == 2.0
    assert {optimizer.state[p]["step"].item() for p in model.parameters()} == {3}


@pytest.mark.large
def test_a_tensor_of_more_than_2_to_the_31_elements():
    """28 GB."""
    p = nn.Parameter(torch.ones(2359332864, dtype=torch.float16))
    p.grad = torch.ones_like(p)
    FusedAdam([p], lr=0.5).step()
    # The first step is lr times the sign of the gradient.
    assert (p == 0.5).all()
