"""LAMB, NovoGrad and LARC step by norms of whole parameters, and Muon by whole matrices, where ranks hold parts of
them."""

import warnings
from functools import partial

import pytest
import torch
from kit import backward, batch, muon, uneven
from rank_processes import RANK, RANKS, all_ranks, distance, flat_mesh, on_ranks, weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ampctx._errors import AmpValueError
from ampctx.amp import AmpSession, GradScaler
from ampctx.optimizers import LARC, FusedLAMB, FusedLion, FusedNovoGrad, FusedSGD

warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)  # torch's own, of a view

EXACT = 1e-6
STEPS = 6
OVERFLOW_AT = 3


def _larc(params, **options):
    return LARC(torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01), **options)


KINDS = {
    "LAMB": lambda params: FusedLAMB(params, lr=0.01),
    "NovoGrad": lambda params: FusedNovoGrad(params, lr=0.01, weight_decay=0.01),
    "NovoGrad-inf": lambda params: FusedNovoGrad(params, lr=0.01, norm_type=0, init_zero=True),
    "LARC": _larc,
    "LARC-fused": lambda params: LARC(FusedSGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)),
    "Muon": lambda params: muon(params),
    "Lion": lambda params: FusedLion(params, lr=0.01),
}
FAST = ("LAMB", "NovoGrad", "NovoGrad-inf", "LARC", "LARC-fused", "Muon")


def kinds(fast, full):
    return pytest.mark.parametrize("kind", [*fast, *(pytest.param(kind, marks=pytest.mark.full) for kind in full)])


def mlp(dtype=torch.float32) -> nn.Sequential:
    """Sizes that ranks do not divide evenly: some have no element of the last bias, and of the scale."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1)).to(dtype)


def fsdp(dtype=torch.float32, model=None, mesh=None) -> nn.Module:
    model = mlp(dtype) if model is None else model
    for layer in (*(layer for layer in model.children() if isinstance(layer, nn.Linear)), model):
        fully_shard(layer, mesh=mesh or flat_mesh())
    return model


def tensor_parallel(mesh=None) -> nn.Module:
    return parallelize_module(uneven(8), mesh or flat_mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


def two_dimensions() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return fsdp(model=tensor_parallel(mesh["tp"]), mesh=mesh["dp"])


def stepped(model, kind, api) -> None:
    """Trains on the same batches everywhere."""
    optimizer = KINDS[kind](model.parameters())
    session, scaler = AmpSession(), GradScaler("cpu", enabled=api == "scaler")
    if api != "scaler":
        session.initialize(model, optimizer, opt_level=api, loss_scale="dynamic", verbosity=0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step, 8, 5)).float().square().mean()
        if step == OVERFLOW_AT:
            loss = loss * torch.inf
        if session.policy is None:
            scaler.scale(loss).backward()
        else:
            backward(session, loss, optimizer)
        before = weights(model) if abs(step - OVERFLOW_AT) < 2 else None
        scaler.step(optimizer) if api == "scaler" else optimizer.step()
        scaler.update()
        if before is not None:
            moved = distance(before, weights(model)) > 0
            assert moved == (step != OVERFLOW_AT), step
    session.reset()


def as_alone(make, kind, api="O0", like=mlp) -> None:
    """Whether a run is that on this rank alone, on all ranks."""
    alone, model = like(), make()
    stepped(alone, kind, api)
    stepped(model, kind, api)
    assert distance(weights(alone), weights(model)) < EXACT
    assert max(distance(weights(model), other) for other in all_ranks(weights(model))) == 0.0


@kinds(FAST, [kind for kind in KINDS if kind not in FAST])
@on_ranks(2)
def test_steps_are_those_of_one_process(kind):
    as_alone(fsdp, kind)
    # Uneven parts, and one rank without any element of some parameters.
    assert RANK == 0 or 0 in [p.to_local().numel() for p in fsdp().parameters()]


@on_ranks(2)
def test_a_bias_that_is_whole_on_every_rank_counts_once():
    as_alone(tensor_parallel, "LAMB", like=partial(uneven, 8))


@kinds(("LAMB", "Muon"), ("NovoGrad", "NovoGrad-inf", "LARC"))
@on_ranks(2)
def test_a_grad_scaler_skips_on_every_rank(kind):
    as_alone(fsdp, kind, "scaler")


@kinds(("LAMB", "Muon"), ("NovoGrad", "LARC"))
@on_ranks(2)
def test_a_step_with_gradients_on_one_rank_returns_on_all(kind):
    """With norms of whole weights and of the last rank's gradients."""
    model, alone = fsdp(), mlp()
    parts, before = {}, {}
    for m, distributed in ((model, True), (alone, False)):
        optimizer = KINDS[kind](m.parameters())
        m(batch(0, 8, 5)).square().mean().backward()
        for name, p in m.named_parameters():
            if distributed:
                parts[name], before[name] = p.grad.to_local().clone(), p.detach().to_local().clone()
                if RANK < RANKS - 1:
                    p.grad = None
            else:
                # What the last rank has of it, and 0 elsewhere.
                there = all_ranks(parts[name])[-1]
                p.grad = torch.zeros_like(p)
                if there.numel():
                    p.grad[-len(there) :] = there
        optimizer.step()
    assert all(torch.equal(p.to_local(), before[name]) for name, p in model.named_parameters()) == (RANK == 0)
    theirs = all_ranks([p.to_local() for p in model.parameters()])[-1]
    expected = [p[-len(t) :] for p, t in zip(alone.parameters(), theirs, strict=True) if len(t)]
    assert distance([t for t in theirs if len(t)], expected) < EXACT


@pytest.mark.parametrize("make", [FusedLAMB, FusedNovoGrad, muon])
@on_ranks(2)
def test_bf16_parameters_with_remainders(make):
    models = [mlp(torch.bfloat16), fsdp(torch.bfloat16)]
    for model in models:
        optimizer = make(model.parameters(), lr=0.01, weight_decay=0.01, master_weights="split")
        for step in range(5):
            optimizer.zero_grad()
            model(batch(step, 8, 5).bfloat16()).float().square().mean().backward()
            optimizer.step()
    assert distance(*map(weights, models)) == 0.0


class Experts(nn.Module):
    """A stack of three matrices, which ranks share out, one layer that both hold in part, and a frozen one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.out = nn.Parameter(torch.randn(3, 5, 4) / 2), nn.Linear(4, 3, bias=False)
        self.frozen = nn.Linear(5, 5, bias=False).requires_grad_(False)

    def forward(self, x):
        return self.out(torch.einsum("bi,eij->bj", self.frozen(x), self.weight))


def sharded_experts():
    return fully_shard(Experts(), mesh=flat_mesh())


@on_ranks(2)
def test_muon_steps_the_experts_of_each_rank():
    """Whole matrices, uneven over the ranks; a frozen layer takes no part."""
    as_alone(sharded_experts, "Muon", like=Experts)
    first = next(sharded_experts().parameters())
    assert isinstance(first, DTensor)
    assert first.to_local().numel() == [40, 20][RANK]


def refused_by_muon(model, where=""):
    with pytest.raises(AmpValueError, match=f"{where}.*Put tensor-parallel parameters into a group with use_muon=Fal"):
        muon(model.parameters())


@on_ranks(2)
def test_muon_refuses_tensor_parallel_weights():
    refused_by_muon(tensor_parallel(), r"param_groups\[2\]\['params'\]\[0\] has placements \(Shard\(dim=1\),\)\.")


@pytest.mark.full
@on_ranks(4)
def test_four_ranks():
    for kind in FAST:
        as_alone(fsdp, kind)
        if kind != "Muon":
            as_alone(two_dimensions, kind, like=partial(uneven, 8))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    as_alone(lambda: fully_shard(mlp(), mesh=mesh), "Muon")
    refused_by_muon(two_dimensions())
