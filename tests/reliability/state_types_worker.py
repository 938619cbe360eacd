"""One rank of two or four over which parameters with state in bf16 and in 8-bit codes are spread: prints what it found.

python state_types_worker.py RENDEZVOUS_FILE RANKS RANK ACTION DIRECTORY

ACTION: "both", what two ranks check, or "load", what other numbers of ranks load of it.
"""

import datetime
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from digests import digest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from ampctx.amp import AmpSession
from ampctx.optimizers import FusedAdam, FusedLAMB, FusedLion, FusedNovoGrad, unpack_state

FILE, RANKS, RANK, ACTION, DIRECTORY = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5])
MIXED = {"exp_avg": "8bit", "exp_avg_sq": torch.bfloat16}
KINDS = {
    "8bit": (FusedAdam, "8bit"),
    "bf16": (FusedAdam, torch.bfloat16),
    "mixed": (FusedAdam, MIXED),
    "lamb": (FusedLAMB, "8bit"),
    "novograd": (FusedNovoGrad, "8bit"),
    "lion": (FusedLion, "8bit"),
}
# Rows of whole blocks, rows that are not, one dimension, and one too small for codes. No number of ranks divides all.
SHAPES = {"rows": (7, 128), "cut": (9, 70), "flat": (1000,), "small": (5, 64)}
# Above the parts of "rows" and "flat", and below the whole parameters; "small" keeps fp32.
MIN_8BIT_SIZE = 600


class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, x):
        return sum((p * x).square().mean() for p in self.parameters())


class Run:
    def __init__(self, kind, sharded=True, seed=0, **options):
        cls, state_dtype = KINDS.get(kind, (FusedAdam, torch.float32))
        self.model = fully_shard(Model(seed), mesh=MESH) if sharded else Model(seed)
        given = {"state_dtype": state_dtype, "min_8bit_size": MIN_8BIT_SIZE, "lr": 0.01, "seed": 3, **options}
        self.optimizer = cls(self.model.parameters(), **given)
        self.session = None

    def train(self, first, last):
        """The same gradients on every rank, given by hand, so that parts are those of the whole to the last bit."""
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            for p in self.model.parameters():
                grad = torch.randn(p.shape, generator=generator) * 0.1 ** (step % 3)
                p.grad = like(grad, p)
            self.optimizer.step()
        return self

    def names(self):
        return dict(self.model.named_parameters())

    def state(self, name):
        return self.optimizer.state[self.names()[name]]

    def bits(self):
        """Of this rank's weights and state."""
        found = {}
        for name, p in self.names().items():
            found[name] = [part(p), {key: part(value) for key, value in self.state(name).items()}]
        return digest(found)

    def in_amp(self):
        self.session = AmpSession()
        self.session.initialize(self.model, self.optimizer, opt_level="O0", verbosity=0)
        return self

    def tree(self, **options):
        return self.session.get_state_dict(self.model, self.optimizer, **options)

    def end(self):
        self.session.reset()


def like(value, p):
    """This rank's part of ``value`` as a DTensor laid out as ``p``, or ``value``."""
    if not isinstance(p, DTensor):
        return value
    rows = value.chunk(RANKS)
    mine = rows[RANK] if len(rows) > RANK else value[:0]
    return DTensor.from_local(mine, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def part(t):
    return t.detach().to_local() if isinstance(t, DTensor) else t.detach()


def whole(t):
    t = t.detach()
    return t.full_tensor() if isinstance(t, DTensor) else t


def off(a, b):
    return (whole(a).float() - whole(b).float()).abs().max().item()


def as_alone(run, alone) -> bool:
    """Whether the first rows have the bits of a process with whole tensors, weights and state.

    Random bits go by places in a part and by its number, so those of part 0 are those of the whole.
    """
    mine, theirs = run.names()["rows"], alone.names()["rows"]
    pairs = [(part(mine), theirs.detach())]
    for key, value in run.state("rows").items():
        pairs.append((part(value), alone.state("rows")[key]))
    return all(torch.equal(a, b[: len(a)] if b.dim() else b) for a, b in pairs)


def codes_off(run, alone) -> int:
    """The largest difference of codes of whole blocks."""
    keys = [key for key in run.state("rows") if key.endswith("_codes")]
    differences = [whole(run.state("rows")[key]).int() - alone.state("rows")[key].int() for key in keys]
    return max((d.abs().max().item() for d in differences), default=0)


def steps(kind) -> dict:
    """Against a process with whole tensors."""
    alone, run = Run(kind, sharded=False).train(0, 1), Run(kind).train(0, 1)
    # From state of zeros: the same scales, and codes beside each other where other bits were drawn.
    scales = [key for key in run.state("rows") if key.endswith("_scales")]
    found = {
        "weights": max(off(a, b) for a, b in zip(alone.names().values(), run.names().values(), strict=True)),
        "scales": all(torch.equal(whole(run.state("rows")[key]), alone.state("rows")[key]) for key in scales),
        "codes": codes_off(run, alone),
    }
    alone.train(1, 4)
    run.train(1, 4)
    found["as alone"] = as_alone(run, alone)
    before = run.bits()
    run.optimizer.found_inf = torch.ones(())
    found["skipped"] = run.train(4, 5).bits() == before
    del run.optimizer.found_inf
    found["keys"] = {name: sorted(run.state(name)) for name in SHAPES}
    states = run.optimizer.state_dict()["state"].values()
    found["saved"] = {
        f"{name} {key}": [type(value).__name__, str(value.dtype), list(value.shape)]
        for name, state in zip(SHAPES, states, strict=True)
        for key, value in state.items()
    }
    mine, theirs = (unpack_state(each.optimizer.state_dict())["state"] for each in (run, alone))
    largest = {i: theirs[i]["exp_avg"].abs().max().item() for i in theirs}
    found["averages"] = max(off(mine[i]["exp_avg"], theirs[i]["exp_avg"]) / largest[i] for i in theirs)
    found["moved"] = run.train(4, 5).bits() != before
    return found


def random_bits() -> dict:
    """Of parts with the same values: how many elements differ between ranks, where they hold parts and where copies."""
    found = {}
    for name, placement in (("parts", Shard(0)), ("copies", Replicate())):
        p = nn.Parameter(DTensor.from_local(torch.zeros(8, 128), MESH, [placement], run_check=False))
        optimizer = FusedLion([p], state_dtype=torch.bfloat16, seed=3)
        p.grad = DTensor.from_local(torch.full((8, 128), 0.3), MESH, [placement], run_check=False)
        optimizer.step()
        mine = part(optimizer.state[p]["exp_avg"]).contiguous()
        of_ranks = [torch.empty_like(mine) for _ in range(RANKS)]
        dist.all_gather(of_ranks, mine)
        found[name] = (of_ranks[0] != of_ranks[-1]).sum().item() / mine.numel()
    return found


def resumes(kind) -> bool:
    """torch's state dict of the same sharding, bit for bit, into a run with other weights."""
    run = Run(kind).train(0, 3)
    other = Run(kind, seed=1)
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    with torch.no_grad():
        for p, q in zip(other.model.parameters(), run.model.parameters(), strict=True):
            part(p).copy_(part(q))
    return other.bits() == run.bits() and other.train(3, 5).bits() == run.train(3, 5).bits()


def tree_of(run) -> dict:
    """What ``dcp`` saves: by names, since every rank has the same."""
    states = run.optimizer.state_dict()["state"].values()
    return {"model": run.names(), "optim": dict(zip(SHAPES, states, strict=True))}


def digests_of(run) -> dict:
    """Of whole weights and of the codes and moments that a state dict has."""
    tree = tree_of(run)
    entries = {f"{n} {key}": whole(value) for n, state in tree["optim"].items() for key, value in state.items()}
    return {key: digest(value) for key, value in entries.items()} | {
        f"{name} weight": digest(whole(p)) for name, p in tree["model"].items()
    }


def save(path) -> dict:
    run = Run("8bit").train(0, 3)
    dcp.save(tree_of(run), checkpoint_id=path)
    return {"digests": digests_of(run), "bits": run.bits(), "end": run.train(3, 5).bits()}


def load(path, sharded) -> dict:
    """Loads what other ranks have saved. The new run has taken a step, so that it has entries to fill."""
    run = Run("8bit", sharded, seed=1).train(9, 10)
    tree = tree_of(run)
    if not sharded:
        # A whole tensor keeps codes where parts have fp32: the file has what they can exchange.
        unpacked = unpack_state(run.optimizer.state_dict())["state"]
        tree["optim"].update(cut=unpacked[1], flat=unpacked[2])
    dcp.load(tree, checkpoint_id=path, process_group=None if sharded else ALONE)
    checkpoint = run.optimizer.state_dict()
    checkpoint["state"] = dict(enumerate(tree["optim"].values()))
    run.optimizer.load_state_dict(checkpoint)
    found = {"digests": digests_of(run), "bits": run.bits()}
    values = unpack_state(run.optimizer.state_dict())["state"]
    saved = [{key: whole(v) for key, v in state.items()} for state in tree["optim"].values()]
    found["off"] = max(
        off(values[i]["exp_avg"], saved[i]["exp_avg"]) / saved[i]["exp_avg"].abs().max().item()
        for i in range(len(SHAPES))
        if "exp_avg" in saved[i]
    )
    found["end"] = run.train(3, 5).bits()
    return found


def by_names() -> dict:
    """ "8bit" of parts into fp32 of whole tensors, and back: decoded codes are exact, and come back as they were."""
    run = Run("8bit").in_amp().train(0, 3)
    tree, before = run.tree(full_state_dict=True), run.bits()
    plain = Run("fp32", sharded=False, seed=1, min_8bit_size=4096).in_amp()
    plain.session.set_state_dict(plain.model, plain.optimizer, tree)
    there = plain.tree(full_state_dict=True)
    back = Run("8bit", seed=1).in_amp()
    back.session.set_state_dict(back.model, back.optimizer, there)
    sharded = Run("8bit", seed=1).in_amp()
    sharded.session.set_state_dict(sharded.model, sharded.optimizer, run.tree())
    result = {
        "dtypes": sorted({str(v.dtype) for state in tree["optim"].values() for v in state.values()}),
        "plain": digest(there["model"], there["optim"]) == digest(tree["model"], tree["optim"]),
        "back": back.bits() == before,
        "sharded": sharded.bits() == before,
        "end": back.train(3, 5).bits() == run.train(3, 5).bits() == sharded.train(3, 5).bits(),
    }
    for each in (run, plain, back, sharded):
        each.end()
    return result


def both() -> dict:
    results = {f"steps {kind}": steps(kind) for kind in KINDS}
    results |= {f"resumes {kind}": resumes(kind) for kind in KINDS}
    results["random bits"] = random_bits()
    results["saved"] = save(DIRECTORY / "dcp")
    results["loaded"] = load(DIRECTORY / "dcp", sharded=True)
    results["by names"] = by_names()
    dist.barrier()
    results["alone"] = load(DIRECTORY / "dcp", sharded=False)
    return results


dist.init_process_group(
    "gloo", init_method=f"file://{FILE}", rank=RANK, world_size=RANKS, timeout=datetime.timedelta(seconds=20)
)
MESH = init_device_mesh("cpu", (RANKS,))
# Each rank is in one of these, alone.
ALONE = dist.new_subgroups(1)[0]
print(json.dumps(both() if ACTION == "both" else {"loaded": load(DIRECTORY / "dcp", sharded=True)}), flush=True)
dist.barrier()
# gloo's threads may still be there at exit, and end the process with an abort then.
os._exit(0)
