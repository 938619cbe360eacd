"""One rank of several over which the parameters of LAMB, NovoGrad, LARC and Muon are split: prints how far each run is
from the same run on this rank alone.

python layerwise_worker.py RENDEZVOUS_FILE RANKS RANK [full]
"""

import datetime
import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ampctx._errors import AmpValueError
from ampctx.amp import AmpSession, GradScaler
from ampctx.optimizers import LARC, FusedLAMB, FusedLion, FusedNovoGrad

sys.path.append(str(Path(__file__).resolve().parents[1]))
from kit import muon

FILE, RANKS, RANK = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
FULL = "full" in sys.argv[4:]
STEPS = 20
OVERFLOW_AT = 7


def _larc(params, **options):
    return LARC(torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01), **options)


OPTIMIZERS = {
    "LAMB": lambda params: FusedLAMB(params, lr=0.01),
    "LAMB-nv": lambda params: FusedLAMB(params, lr=0.01, weight_decay=0.0, use_nvlamb=True),
    "LAMB-without-ratio": lambda params: FusedLAMB(params, lr=0.01, weight_decay=0.0, max_grad_norm=0.0),
    "LAMB-l2": lambda params: FusedLAMB(params, lr=0.01, adam_w_mode=False, maximize=True, grad_averaging=False),
    "NovoGrad": lambda params: FusedNovoGrad(params, lr=0.01, weight_decay=0.01),
    "NovoGrad-inf": lambda params: FusedNovoGrad(params, lr=0.01, norm_type=0, init_zero=True),
    "NovoGrad-inside": lambda params: FusedNovoGrad(params, lr=0.01, weight_decay=0.01, reg_inside_moment=True),
    "LARC": _larc,
    "LARC-unclipped": lambda params: _larc(params, clip=False),
    "Lion": lambda params: FusedLion(params, lr=0.01),
    "Muon": lambda params: muon(params),
}
FAST = ("LAMB", "NovoGrad", "NovoGrad-inf", "LARC", "Muon")


def mlp(dtype=torch.float32) -> nn.Sequential:
    """Sizes that ranks do not divide evenly: some have no element of the last bias, and of the scale."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1)).to(dtype)


def fsdp(dtype=torch.float32) -> nn.Module:
    model = mlp(dtype)
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=MESH)
    return fully_shard(model, mesh=MESH)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def tensor_parallel(mesh=None) -> nn.Module:
    return parallelize_module(small(), mesh or MESH, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def two_dimensions() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(mesh["tp"])
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["dp"])
    return model


def whole(t) -> torch.Tensor:
    t = t.detach()
    return (t.full_tensor() if isinstance(t, DTensor) else t).float().clone()


def weights(model) -> list[torch.Tensor]:
    return [whole(p) for p in model.parameters()]


def distance(some, others) -> float:
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(some, others, strict=True))


def all_ranks(value) -> list:
    found = [None] * RANKS
    dist.all_gather_object(found, value)
    return found


def data(step) -> torch.Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(step))


class Counted:
    """The bytes of each ``all_reduce`` of ours."""

    def __enter__(self):
        self.sizes, self._original = [], dist.all_reduce

        def counted(t, *args, **kwargs):
            self.sizes.append(t.nbytes)
            return self._original(t, *args, **kwargs)

        dist.all_reduce = counted
        return self.sizes

    def __exit__(self, *error):
        dist.all_reduce = self._original


def train(model, kind, api) -> list[list[int]]:
    """Trains on the same batches everywhere. Returns the bytes of the collectives of each step."""
    optimizer = OPTIMIZERS[kind](model.parameters())
    sizes = []
    session = scaler = None
    if api == "scaler":
        scaler = GradScaler("cpu")
    elif api != "plain":
        session = AmpSession()
        session.initialize(model, optimizer, opt_level=api, loss_scale="dynamic", verbosity=0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(data(step).to(next(model.parameters()).dtype)).float().square().mean()
        if step == OVERFLOW_AT and api != "plain":
            loss = loss * torch.inf
        if scaler is not None:
            scaler.scale(loss).backward()
        elif session is None:
            loss.backward()
        else:
            with session.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        before = weights(model) if abs(step - OVERFLOW_AT) < 2 else None
        with Counted() as calls:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        sizes.append(calls)
        if before is not None:
            moved = distance(before, weights(model)) > 0
            assert moved == (step != OVERFLOW_AT or api == "plain"), step
    if session is not None:
        session.reset()
    return sizes


def run(make, kind, api="O0", like=mlp) -> dict:
    alone, model = like(), make()
    train(alone, kind, api)
    sizes = train(model, kind, api)
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {
        "distance": distance(weights(alone), weights(model)),
        "ranks": max(distance(weights(model), other) for other in all_ranks(weights(model))),
        "bytes": sizes[-1],
        "elements": [part.numel() for part in parts],
    }


def sixteen_bit(kind, **options) -> dict:
    """bf16 parameters with fp32 masters, or with what stands for them, of the optimizer's own."""
    classes = {"LAMB": FusedLAMB, "NovoGrad": FusedNovoGrad, "Muon": muon}
    models = [mlp(torch.bfloat16), fsdp(torch.bfloat16)]
    for model in models:
        optimizer = classes[kind](model.parameters(), lr=0.01, weight_decay=0.01, **options)
        for step in range(5):
            optimizer.zero_grad()
            model(data(step).bfloat16()).float().square().mean().backward()
            optimizer.step()
    return {"distance": distance(*map(weights, models))}


def gradients_on_one_rank(kind) -> dict:
    """The last rank alone has gradients: a step returns on all, with norms of whole weights and its gradients."""
    model, alone = fsdp(), mlp()
    parts, before, kept = {}, [], False
    for m, distributed in ((model, True), (alone, False)):
        optimizer = OPTIMIZERS[kind](m.parameters())
        m(data(0)).square().mean().backward()
        for name, p in m.named_parameters():
            if distributed:
                parts[name] = p.grad.to_local().clone()
                if RANK < RANKS - 1:
                    p.grad = None
            else:
                # What the last rank has of it, and 0 elsewhere.
                there = all_ranks(parts[name])[-1]
                p.grad = torch.zeros_like(p)
                if there.numel():
                    p.grad[-len(there) :] = there
        before = [p.detach().to_local().clone() for p in m.parameters()] if distributed else before
        optimizer.step()
        if distributed:
            kept = all(torch.equal(p.to_local(), was) for p, was in zip(m.parameters(), before, strict=True))
    theirs = all_ranks([p.to_local() for p in model.parameters()])[-1]
    expected = [p[-len(t) :] for p, t in zip(alone.parameters(), theirs, strict=True) if len(t)]
    return {"kept": kept, "distance": distance([t for t in theirs if len(t)], expected)}


class Experts(nn.Module):
    """A stack of three matrices, which ranks share out, one layer that both hold in part, and a frozen one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.out = nn.Parameter(torch.randn(3, 5, 4) / 2), nn.Linear(4, 3, bias=False)
        self.frozen = nn.Linear(5, 5, bias=False).requires_grad_(False)

    def forward(self, x):
        return self.out(torch.einsum("bi,eij->bj", self.frozen(x), self.weight))


def refused_by_muon(model) -> str:
    try:
        muon(model.parameters())
    except AmpValueError as error:
        return str(error)
    return "taken"


def everything() -> dict:
    results = {f"fsdp O0 {kind}": run(fsdp, kind) for kind in (OPTIMIZERS if FULL else FAST)}
    results["tp O0 LAMB"] = run(tensor_parallel, "LAMB", like=small)
    results["experts Muon"] = run(lambda: fully_shard(Experts(), mesh=MESH), "Muon", like=Experts)
    results["tp Muon"] = refused_by_muon(tensor_parallel())
    results["fsdp plain NovoGrad"] = run(fsdp, "NovoGrad", "plain")
    for kind in ("LAMB-nv", "Muon", "NovoGrad", "LARC") if FULL else ("LAMB-nv", "Muon"):
        results[f"one rank {kind}"] = gradients_on_one_rank(kind)
    for kind in FAST if FULL else ("LAMB", "Muon"):
        results[f"fsdp scaler {kind}"] = run(fsdp, kind, "scaler")
    extras = ({"master_weights": "split"}, {"master_weights": True}, {"write_back": "kahan"})
    for kind in ("LAMB", "NovoGrad", "Muon") if FULL else ("LAMB", "Muon"):
        for options in extras if FULL else extras[:1]:
            results[f"bf16 {kind} {next(iter(options.values()))}"] = sixteen_bit(kind, **options)
    return results


def of_four_ranks() -> dict:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)  # torch's own, of a view
        results = {f"2x2 O0 {kind}": run(two_dimensions, kind, like=small) for kind in FAST if kind != "Muon"}
        results["2x2 Muon"] = refused_by_muon(two_dimensions())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results["hsdp Muon"] = run(lambda: fully_shard(mlp(), mesh=mesh), "Muon")
    return results | {f"fsdp O0 {kind}": run(fsdp, kind) for kind in FAST}


dist.init_process_group(
    "gloo", init_method=f"file://{FILE}", rank=RANK, world_size=RANKS, timeout=datetime.timedelta(seconds=20)
)
MESH = init_device_mesh("cpu", (RANKS,))
print(json.dumps(of_four_ranks() if RANKS == 4 else everything()), flush=True)
dist.barrier()
# gloo's threads may still be there at exit, and end the process with an abort then.
os._exit(0)
