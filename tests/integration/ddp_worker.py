"""One rank of two, for test_ddp.py: runs all scenarios and prints what the ranks have to agree on.

python ddp_worker.py RENDEZVOUS_FILE RANKS RANK [BACKEND DEVICE]
"""

import contextlib
import json
import os
import sys

import torch
import torch.distributed as dist
from kit import backward, mlp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ampctx import amp, clip_grad_norm_, distributed, optimizers

FILE, RANKS, RANK = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
BACKEND, KIND = sys.argv[4:] or ("gloo", "cpu")
DEVICE = torch.device(KIND, RANK % torch.cuda.device_count()) if KIND == "cuda" else torch.device(KIND)


def batch(step, rank, n=8):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(10 * step + rank)).to(DEVICE)


def fingerprint(optimizer, model):
    """Every weight that is stepped and every weight of the model, exactly."""
    weights = torch.cat([p.detach().double().flatten() for p in amp.master_params(optimizer)])
    in_model = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    return [w.hex() for w in torch.cat([weights, in_model]).tolist()]


def plain(level, seed, steps=4, blocks=1, overflow=False, **ddp):
    """``blocks`` backward passes per step, all but the last in no_sync; on rank 1, step 2 overflows if asked for."""
    model = mlp(seed).to(DEVICE)
    optimizer = optimizers.FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    scale = "dynamic" if overflow else 128.0
    amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, max_loss_scale=4096.0, verbosity=0)
    wrapped = DistributedDataParallel(model, **ddp)
    for step in range(steps):
        optimizer.zero_grad()
        for block in range(blocks):
            last = block == blocks - 1
            x = batch(step * blocks + block, RANK)
            with contextlib.nullcontext() if last else wrapped.no_sync():
                loss = wrapped(x).float().square().mean() / blocks
                if overflow and step == 2 and RANK == 1:
                    loss = loss * float("inf")
                backward(amp, loss, optimizer, delay_unscale=not last)
        clip_grad_norm_(amp.master_params(optimizer), 0.5)
        optimizer.step()
    return [*fingerprint(optimizer, model), amp.skipped_steps(optimizer), amp.state_dict()["loss_scaler0"]]


def one_parameter_in_a_bucket_view(level):
    """Blocks that accumulate without no_sync, into a bucket of exactly one gradient."""
    model = nn.Linear(4, 4, bias=False, device=DEVICE)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    for value in (1.0, 2.0, 0.5):
        backward(amp, wrapped(torch.full((1, 4), value, device=DEVICE)).float().sum(), optimizer)
    return next(iter(amp.master_params(optimizer))).grad.unique().tolist()


def loaded(level, ranks, resumed=False, wrapped_first=False, make=torch.optim.Adam):
    """Weights that ``ranks`` load, wrapped afterwards: masters are equal, and exact where every rank loads."""
    model = mlp(RANK).to(DEVICE)
    optimizer = make(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    source = mlp(7).to(DEVICE)
    state = make(source.parameters(), lr=0.01)
    source(batch(0, 0)).square().mean().backward()
    state.step()
    if wrapped_first:
        DistributedDataParallel(model)
    if RANK in ranks:
        model.load_state_dict(source.state_dict())
        if resumed:
            optimizer.load_state_dict(state.state_dict())
    wrapped = model if wrapped_first else DistributedDataParallel(model)
    backward(amp, wrapped(batch(1, 0)).float().square().mean(), optimizer)
    masters = [p.detach() for p in amp.master_params(optimizer)]
    exact = all(torch.equal(m, p) for m, p in zip(masters, source.parameters(), strict=True))
    optimizer.step()
    return [*fingerprint(optimizer, model), exact]


def sharded(level):
    """fully_shard, and an overflow of the last rank: every rank skips that step, and clips by the norm of the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 2)).to(DEVICE)
    mesh = dist.init_device_mesh(KIND, (RANKS,))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, mp_policy=distributed.mixed_precision_policy(level))
    optimizer = optimizers.FusedAdam(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    norms = []
    for step in range(5):
        optimizer.zero_grad()
        loss = model(batch(step, RANK)).float().square().mean()
        loss = loss * float("inf") if step == 2 and RANK == RANKS - 1 else loss
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        norms.append(str(clip_grad_norm_(amp.master_params(optimizer), 0.5).item()))
        optimizer.step()
    return [*norms, amp.skipped_steps(optimizer), amp.state_dict()["loss_scaler0"]]


SCENARIOS = {
    "seeds": lambda level: plain(level, seed=RANK),
    "no-sync": lambda level: plain(level, seed=0, blocks=3),
    "bucket-views": lambda level: plain(level, seed=0, blocks=2, gradient_as_bucket_view=True),
    "overflow": lambda level: plain(level, seed=0, overflow=True),
    "one-parameter": one_parameter_in_a_bucket_view,
    "sharded": sharded,
    "loaded-by-one": lambda level: loaded(level, ranks=[0]),
    "loaded-by-all": lambda level: loaded(level, ranks=[0, 1], resumed=True),
    "loaded-into-wrapped": lambda level: loaded(level, ranks=[0, 1], wrapped_first=True, make=torch.optim.SGD),
}

LEVELS_OF = {
    **dict.fromkeys(("loaded-by-one", "loaded-by-all", "loaded-into-wrapped"), ("O0", "O2", "O5")),
    "overflow": ("O1", "O2"),
    "one-parameter": ("O0", "O1", "O2"),
    # gloo need not have its collectives for tensors on a GPU.
    "sharded": ("O1", "O2", "O5") if KIND == "cpu" or BACKEND == "nccl" else (),
}

own = {}
if KIND == "cuda":
    torch.cuda.set_device(DEVICE)
    own = {"device_id": DEVICE} if BACKEND == "nccl" else {}  # or torch warns at a barrier
dist.init_process_group(BACKEND, init_method=f"file://{FILE}", rank=RANK, world_size=RANKS, **own)
results = {}
for scenario, run in SCENARIOS.items():
    for level in LEVELS_OF.get(scenario, ("O0", "O1", "O2", "O5")):
        print(scenario, level, file=sys.stderr, flush=True)
        results[f"{scenario} {level}"] = run(level)
        amp.reset()
dist.barrier()  # before what is printed: more than a pipe holds, and one rank is read after the other
print(json.dumps(results), flush=True)
# gloo's threads may still be there at exit, and end the process with an abort then.
os._exit(0)
