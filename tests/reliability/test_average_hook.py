"""Averaging fp16 gradients over ranks neither overflows nor loses small ones, and accumulation equals one big batch."""

import math

import pytest
import torch
from kit import backward
from rank_processes import RANK, all_ranks, counted_all_reduce, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ampctx import AmpTypeError, AmpValueError, amp
from ampctx.distributed import average_hook

HOOKS = {
    "torch": None,
    "default": {},
    "afterwards": {"predivide": 1},
    "fp32": {"dtype": torch.float32},
    "fp32 afterwards": {"predivide": 1.0, "dtype": torch.float32},
    "four": {"predivide": 4},
    "same type": {"dtype": torch.float16},
}
NEAR_MAX = [60000.0, -65504.0, 1.0, 3.0]
SMALLEST = 2.0**-24


class Weight(nn.Module):
    """Its gradient is the input."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=dtype))

    def forward(self, x):
        return (self.weight * x).sum()


def averaged(hook, mine, dtype=torch.float16, **ddp) -> list[float]:
    wrapped = DistributedDataParallel(Weight(dtype), **ddp)
    if HOOKS[hook] is not None:
        wrapped.register_comm_hook(None, average_hook(**HOOKS[hook]))
    wrapped(torch.tensor(mine, dtype=dtype)).backward()
    return wrapped.module.weight.grad.tolist()


@pytest.mark.full(but=3)
@pytest.mark.parametrize("hook", HOOKS)
@on_ranks(2)
def test_gradients_near_the_largest_fp16_number_are_averaged(hook):
    """Dividing after the sum alone overflows."""
    assert averaged(hook, NEAR_MAX) == ([math.inf, -math.inf, 1.0, 3.0] if hook == "afterwards" else NEAR_MAX)


@pytest.mark.parametrize("hook", ["fp32", "fp32 afterwards", "afterwards", "torch", "default"])
@on_ranks(2)
def test_the_smallest_gradients_are_kept_unless_they_are_divided_before_the_sum_in_fp16(hook):
    """What the options are for: half of the smallest number is 0 in fp16."""
    found = averaged(hook, [SMALLEST, (3 - 2 * RANK) * SMALLEST, 2.0**-10, 0.0])
    if hook in ("torch", "default"):
        assert (found[0], found[2]) == (0.0, 2.0**-10)
    else:
        assert found == [SMALLEST, 2 * SMALLEST, 2.0**-10, 0.0]


@on_ranks(2)
def test_other_types_and_bucket_views():
    mine = [3.0, 2.0, 1.0, 0.0] if RANK else [1.0, 2.0, 3.0, 4.0]
    assert averaged("default", mine, torch.float32) == [2.0, 2.0, 2.0, 2.0]
    assert averaged("fp32", NEAR_MAX, gradient_as_bucket_view=True) == NEAR_MAX


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def sent_in(dtype) -> tuple:
    """Bytes, steps taken, scale and weights of four steps at O1, whose fp32 gradients travel in ``dtype``. The first,
    scaled and summed, are beyond fp16."""
    network = model()
    batches = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1))
    network(batches[0]).square().mean().backward()
    largest = max(p.grad.abs().max().item() for p in network.parameters())
    network.zero_grad()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.125)
    amp.initialize(network, optimizer, opt_level="O1", verbosity=0)
    wrapped = DistributedDataParallel(network)
    wrapped.register_comm_hook(None, average_hook(predivide=1, dtype=dtype))
    stepped = []
    with counted_all_reduce() as sent:
        for x in batches:
            optimizer.zero_grad()
            loss = wrapped(x).float().square().mean() * (45000 / 65536 / largest)
            backward(amp, loss, optimizer)
            optimizer.step()
            stepped.append(amp.outcome(optimizer).stepped)
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    amp.reset()
    return sum(sent), stepped, scale, [p.tolist() for p in network.parameters()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@on_ranks(2)
def test_gradients_of_o1_travel_in_16_bits(dtype):
    """Half of the bytes. What overflows on the way skips the step on all ranks, and the scale falls."""
    of_full, stepped_in_full, full_scale, full_weights = sent_in(None)
    assert stepped_in_full == [True] * 4
    sent, stepped, scale, weights = found = sent_in(dtype)
    assert all(other == found for other in all_ranks(found))
    assert sent * 2 == of_full == 4 * 4 * (8 * 4 + 8 + 2 * 8 + 2)
    skips = stepped.index(True)
    assert stepped == [False] * skips + [True] * (4 - skips)
    assert (skips > 0) == (dtype == torch.float16)
    assert scale == full_scale / 2**skips
    assert weights != full_weights


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"predivide": "2"}, AmpTypeError, "predivide must be a number or None, got str"),
        ({"predivide": True}, AmpTypeError, "predivide must be a number or None, got bool"),
        ({"predivide": 0}, AmpValueError, "predivide is 0, expected a finite number > 0"),
        ({"predivide": math.inf}, AmpValueError, "predivide is inf, expected a finite number > 0"),
        ({"dtype": "float32"}, AmpTypeError, "dtype must be a torch.dtype or None, got str"),
        ({"dtype": torch.int32}, AmpValueError, "dtype is torch.int32, expected a floating type"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_arguments_are_checked(arguments, error, message):
    with pytest.raises(error, match=message):
        average_hook(**arguments)
