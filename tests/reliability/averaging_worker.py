"""One rank of two under DistributedDataParallel: prints averaged gradients, and what accumulation comes to.

python averaging_worker.py RENDEZVOUS_FILE RANKS RANK
"""

import contextlib
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ampctx import amp
from ampctx.distributed import average_hook

FILE, RANKS, RANK = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
HOOKS = {
    "torch": None,
    "default": lambda: average_hook(),
    "afterwards": lambda: average_hook(predivide=1),
    "fp32": lambda: average_hook(dtype=torch.float32),
    "fp32 afterwards": lambda: average_hook(predivide=1.0, dtype=torch.float32),
    "four": lambda: average_hook(predivide=4),
    "same type": lambda: average_hook(dtype=torch.float16),
}


class Weight(nn.Module):
    """Its gradient is the input."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=dtype))

    def forward(self, x):
        return (self.weight * x).sum()


def averaged(hook, values, dtype=torch.float16, **ddp) -> list[float]:
    """``values``: the gradients of rank 0 and of rank 1."""
    wrapped = DistributedDataParallel(Weight(dtype), **ddp)
    if hook is not None:
        wrapped.register_comm_hook(None, hook())
    wrapped(torch.tensor(values[RANK], dtype=dtype)).backward()
    return wrapped.module.weight.grad.tolist()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def accumulated(level, delay, one_batch) -> list[float]:
    """Gradients of 2 ranks times 3 micro-batches, in one or accumulated: what the optimizer gets.

    Blocks that unscale at once reduce at once; delayed ones stand in ``no_sync``.
    """
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.125)
    amp.initialize(network, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    # Small numbers with few bits: sums are exact in any order.
    data = torch.randint(-2, 3, (12, 4), generator=torch.Generator().manual_seed(1)).float()
    for p in amp.master_params(optimizer):
        p.data.mul_(8).round_().div_(8)
    with torch.no_grad():
        for p in network.parameters():
            p.mul_(8).round_().div_(8)
    wrapped = network if one_batch else DistributedDataParallel(network)
    parts = [data] if one_batch else data.view(RANKS, 3, 2, 4)[RANK]
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        with contextlib.nullcontext() if last or one_batch or not delay else wrapped.no_sync():
            # A sum over samples: the average over ranks is then half of that of the big batch.
            loss = wrapped(part).float().sum() / (RANKS if one_batch else 1)
            with amp.scale_loss(loss, optimizer, delay_unscale=delay and not last) as scaled:
                scaled.backward()
    result = torch.cat([p.grad.double().flatten() for p in amp.master_params(optimizer)]).tolist()
    amp.reset()
    return result


def sent_in(dtype) -> dict:
    """Four steps at O1, whose fp32 gradients travel in ``dtype``. The first, scaled and summed, are beyond fp16."""
    network = model()
    batches = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1))
    network(batches[0]).square().mean().backward()
    largest = max(p.grad.abs().max().item() for p in network.parameters())
    network.zero_grad()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.125)
    amp.initialize(network, optimizer, opt_level="O1", verbosity=0)
    wrapped = DistributedDataParallel(network)
    wrapped.register_comm_hook(None, average_hook(predivide=1, dtype=dtype))
    sent, all_reduce = [], dist.all_reduce

    def counted(t, *args, **kwargs):
        sent.append(t.numel() * t.element_size())
        return all_reduce(t, *args, **kwargs)

    dist.all_reduce = counted
    stepped = []
    for x in batches:
        optimizer.zero_grad()
        loss = wrapped(x).float().square().mean() * (45000 / 65536 / largest)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        stepped.append(amp.outcome(optimizer).stepped)
    dist.all_reduce = all_reduce
    weights = [v.hex() for p in network.parameters() for v in p.detach().double().flatten().tolist()]
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    amp.reset()
    return {"bytes": sum(sent), "stepped": stepped, "weights": weights, "scale": scale}


dist.init_process_group("gloo", init_method=f"file://{FILE}", rank=RANK, world_size=RANKS)
NEAR_MAX = [[60000.0, -65504.0, 1.0, 3.0]] * 2
TINY = [[2.0**-24, 3 * 2.0**-24, 2.0**-10, 0.0], [2.0**-24, 2.0**-24, 2.0**-10, 0.0]]
results: dict = {
    "near max": {name: averaged(hook, NEAR_MAX) for name, hook in HOOKS.items()},
    "tiny": {name: averaged(hook, TINY) for name, hook in HOOKS.items()},
    "fp32 gradients": averaged(HOOKS["default"], [[1.0, 2.0, 3.0, 4.0], [3.0, 2.0, 1.0, 0.0]], torch.float32),
    "bucket view": averaged(HOOKS["fp32"], NEAR_MAX, gradient_as_bucket_view=True),
    "sent": {str(dtype): sent_in(dtype) for dtype in (None, torch.float16, torch.bfloat16)},
}
for level in ("O0", "O1", "O2", "O3", "O4", "O5"):
    for delay in (False, True):
        results[f"{level} {delay}"] = accumulated(level, delay, False), accumulated(level, delay, True)
print(json.dumps(results), flush=True)
dist.barrier()
# gloo's threads may still be there at exit, and end the process with an abort then.
os._exit(0)
