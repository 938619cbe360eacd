"""What test_parallel_ddp.py runs on each rank. Values are chosen so that they are exact in every type."""

import contextlib
import copy
import functools
import io
import warnings

import torch
import torch.distributed as dist
from apex.parallel import DistributedDataParallel, Reducer
from apex.parallel import distributed as helpers
from torch import nn

from ampctx import amp, optimizers

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}


def ones_model(dtype=torch.float32):
    model = nn.Linear(3, 2).to(dtype)
    for p in model.parameters():
        nn.init.constant_(p, 1.0)
    return model


# --- how gradients are joined -----------------------------------------------------------------------------------------


def joined(dtype, copied=None, **options):
    """The gradient of weight is 2 on rank 0 and 6 on rank 1 before they are joined; that of bias 2 on both."""
    wrapped = DistributedDataParallel(ones_model(dtype), **options)
    if copied == "deepcopy":
        wrapped = copy.deepcopy(wrapped)
    if copied == "pickle":
        file = io.BytesIO()
        torch.save(wrapped, file)
        file.seek(0)
        wrapped = torch.load(file, weights_only=False)
    x = torch.full((2, 3), 1.0 + 2.0 * dist.get_rank(), dtype=dtype)
    wrapped(x).sum().backward()
    weight, bias = wrapped.module.weight.grad, wrapped.module.bias.grad
    assert weight.dtype == dtype
    return weight.unique().tolist(), bias.unique().tolist()


def large_fp16_sum(**options):
    """Gradients of 40000 on each rank, in fp16, where their sum is inf."""
    wrapped = DistributedDataParallel(ones_model(torch.float16), **options)
    wrapped(torch.full((1, 3), 40000.0, dtype=torch.float16)).sum().backward()
    return wrapped.module.weight.grad.unique().tolist()


def disabled():
    """The gradient after a backward of each rank's own, then after one more that is joined."""
    wrapped = DistributedDataParallel(ones_model())
    seen = []
    x = torch.full((2, 3), 1.0 + 2.0 * dist.get_rank())
    for switch in (wrapped.disable_allreduce, wrapped.enable_allreduce):
        switch()
        wrapped(x).sum().backward()
        seen.append(wrapped.module.weight.grad.unique().item())
    return seen


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.never = (nn.Linear(3, 2, bias=False) for _ in range(3))

    def forward(self, x, second):
        return self.first(x) + self.second(x) if second else self.first(x)


def unused_parameters():
    """Rank 0 uses both heads, the others the first alone; a third is used by nobody."""
    wrapped = DistributedDataParallel(TwoHeads(), delay_allreduce=True)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.ones(2, 3), second=dist.get_rank() == 0).sum().backward()
    heads = wrapped.module
    return heads.first.weight.grad.unique().item(), heads.second.weight.grad.unique().item(), heads.never.weight.grad


# --- trainings --------------------------------------------------------------------------------------------------------


def batch(step, block, rank):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + 10 * block + rank))


def torchs(model, delay_allreduce):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.parallel.DistributedDataParallel(
            model, broadcast_buffers=False, find_unused_parameters=delay_allreduce
        )


def masters_after(level, wrap, ranks, blocks=1, no_sync=False, fused=False, norm=True):
    """The masters after four steps on the batches of ``ranks``, ``blocks`` backward passes for each step."""
    torch.manual_seed(dist.get_rank() if wrap else 0)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)]
    model = nn.Sequential(*(layer for layer in layers if norm or not isinstance(layer, nn.BatchNorm1d)))
    sgd = optimizers.FusedSGD if fused else torch.optim.SGD
    optimizer = sgd(model.parameters(), lr=0.1, momentum=0.9)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    wrapped = wrap(model) if wrap else model
    for step in range(4):
        optimizer.zero_grad()
        for block in range(blocks):
            last = block == blocks - 1
            alone = wrapped.no_sync() if no_sync and not last else contextlib.nullcontext()
            with alone:
                loss = sum(wrapped(batch(step, block, r)).float().square().mean() for r in ranks)
                with amp.scale_loss(loss / blocks / len(ranks), optimizer, delay_unscale=not last) as scaled_loss:
                    scaled_loss.backward()
        optimizer.step()
    weights = torch.cat([p.detach().double().flatten() for p in amp.master_params(optimizer)])
    amp.reset()
    return weights


def trained(level, delay_allreduce=False, **options):
    """The weights of a training in apex's wrapper, and in torch's."""
    mine = [dist.get_rank()]
    ours = masters_after(
        level, lambda model: DistributedDataParallel(model, delay_allreduce=delay_allreduce), mine, **options
    )
    return ours, masters_after(level, lambda model: torchs(model, delay_allreduce), mine, **options)


def against_one_process(level):
    """The weights of a training in apex's wrapper, and of one without that sees the batches of all ranks."""
    ours = masters_after(level, DistributedDataParallel, [dist.get_rank()], norm=False)
    return ours, masters_after(level, None, range(dist.get_world_size()), norm=False)


# --- the rest ---------------------------------------------------------------------------------------------------------


def construction():
    """What a wrapper is, and what it did to parameters and buffers, which hold the rank before."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for tensor in [*model.parameters(), *model[1].buffers()]:
        tensor.data.fill_(dist.get_rank())
    wrapped = DistributedDataParallel(model, message_size=1000, prof=True, retain_allreduce_buffers=True)
    wrapped(torch.ones(4, 2))
    with amp_refusal() as refusal:
        amp.initialize(wrapped, opt_level="O1", verbosity=0)
    return {
        "parameters": [p.unique().tolist() for p in model.parameters()],
        "running_mean": model[1].running_mean.unique().tolist(),
        "is torch's": isinstance(wrapped, nn.parallel.DistributedDataParallel),
        "module": wrapped.module is model,
        "keys": list(wrapped.state_dict()),
        "world_size": wrapped.world_size,
        "bucket bytes": wrapped.bucket_bytes_cap,
        "refusal": refusal,
    }


@contextlib.contextmanager
def amp_refusal():
    messages = []
    try:
        yield messages
    except Exception as error:
        messages.append(f"{type(error).__name__}: {error}")


def reducer_of_a_module():
    model = ones_model()
    for p in model.parameters():
        nn.init.constant_(p, dist.get_rank() + 5.0)
    reducer = Reducer(model)
    model.weight.grad = torch.full_like(model.weight, 2.0 + 4.0 * dist.get_rank())
    reducer.reduce()
    return [p.unique().tolist() for p in model.parameters()], model.weight.grad.unique().tolist(), model.bias.grad


def reducer_of_gradients():
    values = [
        torch.full((2, i + 1), 2.0 + 4.0 * dist.get_rank(), dtype=dtype) for i, dtype in enumerate(DTYPES.values())
    ]
    Reducer([values[0], {"not": "a tensor"}, (values[1], [values[2]]), values[3], 5]).reduce()
    return [v.unique().tolist() for v in values]


def flat_calls():
    tensors = [torch.full((2, 2), float(dist.get_rank())), torch.full((3,), dist.get_rank(), dtype=torch.bfloat16)]
    helpers.flat_dist_call(tensors, dist.broadcast, (dist.get_world_size() - 1,))
    summed = [torch.full((2,), 4.0 * dist.get_rank())]
    helpers.flat_dist_call(summed, dist.all_reduce)
    return [t.unique().tolist() for t in tensors], summed[0].unique().tolist()


HOOKS = {
    "default": {},
    "delay": {"delay_allreduce": True},
    "sum": {"gradient_average": False},
    "predivide": {"gradient_predivide_factor": 2.0},
    "predivided-sum": {"gradient_average": False, "gradient_predivide_factor": 2.0},
    "fp32": {"allreduce_always_fp32": True},
    "fp32-delay": {"allreduce_always_fp32": True, "delay_allreduce": True},
    "many-buckets": {"message_size": 1},
}
TRAININGS = {
    "plain": {},
    "delay": {"delay_allreduce": True},
    "accumulation": {"blocks": 3},
    "accumulation-no-sync": {"blocks": 3, "no_sync": True},
    "fused-accumulation": {"blocks": 2, "fused": True, "delay_allreduce": True},
}
TRAINED_AT = ("O0", "O1", "O2", "O5")

SCENARIOS = {
    **{
        f"joined-{name}-{options}": functools.partial(joined, dtype, **HOOKS[options])
        for name, dtype in DTYPES.items()
        for options in HOOKS
    },
    **{
        f"joined-{copied}": functools.partial(joined, torch.float32, copied, gradient_average=False)
        for copied in ("deepcopy", "pickle")
    },
    "large": functools.partial(large_fp16_sum, gradient_predivide_factor=1.0, gradient_average=False),
    "large-fp32": functools.partial(large_fp16_sum, allreduce_always_fp32=True),
    "large-predivided": functools.partial(large_fp16_sum, gradient_predivide_factor=2.0),
    "disabled": disabled,
    "unused": unused_parameters,
    **{
        f"trained-{level}-{name}": functools.partial(trained, level, **options)
        for level in TRAINED_AT
        for name, options in TRAININGS.items()
    },
    **{f"one-process-{level}": functools.partial(against_one_process, level) for level in TRAINED_AT},
    "construction": construction,
    "reducer-module": reducer_of_a_module,
    "reducer-gradients": reducer_of_gradients,
    "flat": flat_calls,
}
