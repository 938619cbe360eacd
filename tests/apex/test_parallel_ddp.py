"""apex.parallel.DistributedDataParallel and Reducer, over gloo. Values are exact in every type."""

import contextlib
import io

import apex_on_ranks  # noqa: F401
import pytest
import torch
import torch.distributed as dist
from apex.parallel import DistributedDataParallel, Reducer
from apex.parallel.distributed import flat_dist_call
from rank_processes import RANK, RANKS, on_ranks
from torch import nn

from ampctx import AmpError, AmpValueError, amp

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# Options, and what becomes of the gradients of weight, 2 and 6 on the two ranks, and of bias, 2 and 2.
HOOKS = {
    "default": ({}, 4.0, 2.0),
    "delay": ({"delay_allreduce": True}, 4.0, 2.0),
    "sum": ({"gradient_average": False}, 8.0, 4.0),
    "predivide": ({"gradient_predivide_factor": 2.0}, 4.0, 2.0),
    "predivided-sum": ({"gradient_average": False, "gradient_predivide_factor": 2.0}, 4.0, 2.0),
    "fp32": ({"allreduce_always_fp32": True}, 4.0, 2.0),
    "fp32-delay": ({"allreduce_always_fp32": True, "delay_allreduce": True}, 4.0, 2.0),
    "many-buckets": ({"message_size": 1}, 4.0, 2.0),
}


def ones_model(dtype=torch.float32):
    model = nn.Linear(3, 2).to(dtype)
    for p in model.parameters():
        nn.init.constant_(p, 1.0)
    return model


def values(*tensors):
    return [t.unique().tolist() for t in tensors]


# --- how gradients are joined -----------------------------------------------------------------------------------------


def joined(wrapped):
    """Values of the gradients of weight and bias."""
    weight, bias = wrapped.module.weight, wrapped.module.bias
    wrapped(torch.full((2, 3), 1.0 + 2.0 * RANK, dtype=weight.dtype)).sum().backward()
    assert weight.grad.dtype == weight.dtype
    return values(weight.grad, bias.grad)


@pytest.mark.full(but=12)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(2)
def test_gradients_are_joined(dtype, hook):
    options, weight, bias = HOOKS[hook]
    assert joined(DistributedDataParallel(ones_model(dtype), **options)) == [[weight], [bias]]


@on_ranks(2)
def test_disabled_gradients_are_each_ranks_own():
    wrapped = DistributedDataParallel(ones_model())
    wrapped.disable_allreduce()
    assert joined(wrapped)[0] == [2.0 + 4.0 * RANK]
    wrapped.enable_allreduce()
    assert joined(wrapped)[0] == [8.0]  # 2 + 2 and 6 + 6, averaged


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.never = (nn.Linear(3, 2, bias=False) for _ in range(3))

    def forward(self, x, second):
        return self.first(x) + self.second(x) if second else self.first(x)


@on_ranks(2)
def test_parameters_that_are_not_used():
    """Rank 0 uses both heads, the other the first alone; a third is used by nobody."""
    heads = TwoHeads()
    wrapped = DistributedDataParallel(heads, delay_allreduce=True)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.ones(2, 3), second=RANK == 0).sum().backward()
    assert values(heads.first.weight.grad, heads.second.weight.grad) == [[2.0], [1.0]]
    assert heads.never.weight.grad is None


# --- the rest ---------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_construction():
    """What a wrapper is, and what it does to parameters and buffers, which hold the rank before. It prints nothing."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for tensor in [*model.parameters(), *model[1].buffers()]:
        tensor.data.fill_(RANK)
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        wrapped = DistributedDataParallel(model, message_size=1000, prof=True, retain_allreduce_buffers=True)
        wrapped(torch.ones(4, 2))
    assert printed.getvalue() == ""
    with pytest.raises(AmpError, match="^Incoming model is an instance of torch.nn.parallel.Distributed"):
        amp.initialize(wrapped, opt_level="O1", verbosity=0)
    assert values(*model.parameters()) == [[0.0]] * 4
    # A tenth of the batch mean, which is 0 on all ranks, and the rest each rank's own.
    assert model[1].running_mean.tolist() == pytest.approx([0.9 * RANK] * 2, abs=1e-6)
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    assert wrapped.module is model
    assert list(wrapped.state_dict()) == [f"module.{name}" for name in model.state_dict()]
    assert (wrapped.world_size, wrapped.bucket_bytes_cap) == (2.0, 4000)


@on_ranks(2)
def test_reducer_of_a_module():
    model = ones_model()
    for p in model.parameters():
        nn.init.constant_(p, RANK + 5.0)
    reducer = Reducer(model)
    model.weight.grad = torch.full_like(model.weight, 2.0 + 4.0 * RANK)
    reducer.reduce()
    assert values(*model.parameters(), model.weight.grad) == [[5.0], [5.0], [4.0]]
    assert model.bias.grad is None


@on_ranks(2)
def test_reducer_of_gradients_and_flat_calls():
    grads = [torch.full((2, i + 1), 2.0 + 4.0 * RANK, dtype=dtype) for i, dtype in enumerate(DTYPES)]
    Reducer([grads[0], {"not": "a tensor"}, (grads[1], [grads[2]]), grads[3], 5]).reduce()
    assert values(*grads) == [[4.0]] * len(DTYPES)
    tensors = [torch.full((2, 2), float(RANK)), torch.full((3,), RANK, dtype=torch.bfloat16)]
    flat_dist_call(tensors, dist.broadcast, (RANKS - 1,))
    summed = [torch.full((2,), 4.0 * RANK)]
    flat_dist_call(summed, dist.all_reduce)
    assert values(*tensors, *summed) == [[1.0], [1.0], [2.0]]  # a sum is averaged


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_param": True}, "shared_param is no longer an option"),
        ({"delay_allreduce": True, "allreduce_trigger_params": []}, "allreduce_trigger_params may only be given with"),
        ({"delay_allreduce": True, "num_allreduce_streams": 2}, "num_allreduce_streams may only be above 1 with"),
        ({}, "process group has not been initialized"),
    ],
    ids=["shared-param", "trigger-params", "streams", "no-group"],
)
def test_what_it_refuses(options, message):
    with pytest.raises(AmpValueError if options else ValueError, match=message):
        DistributedDataParallel(nn.Linear(1, 1), **options)
