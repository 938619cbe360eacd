"""``state_dtype`` where ranks hold parts of parameters (fully_shard): steps, checkpoints of any number of ranks."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from digests import digest
from rank_processes import RANK, RANKS, all_ranks, flat_mesh, on_ranks, whole
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from ampctx.amp import AmpSession
from ampctx.optimizers import FusedAdam, FusedLAMB, FusedLion, FusedNovoGrad, Offloaded, unpack_state

KINDS = {
    "8bit": (FusedAdam, "8bit"),
    "bf16": (FusedAdam, torch.bfloat16),
    "mixed": (FusedAdam, {"exp_avg": "8bit", "exp_avg_sq": torch.bfloat16}),
    "lamb": (FusedLAMB, "8bit"),
    "novograd": (FusedNovoGrad, "8bit"),
    "lion": (FusedLion, "8bit"),
    "on the host": (lambda *params, **options: Offloaded(FusedAdam, *params, **options), "8bit"),
}
CODES = {"exp_avg": ("exp_avg_codes", "exp_avg_scales"), "exp_avg_sq": ("exp_avg_sq_codes", "exp_avg_sq_scales")}
CODED = {"8bit": 2, "bf16": 0, "mixed": 1, "lamb": 2, "novograd": 1, "lion": 1, "on the host": 2}
# Rows of whole blocks, rows that are not, one dimension, and one too small for codes. No number of ranks divides all.
SHAPES = {"rows": (7, 128), "cut": (9, 70), "flat": (1000,), "small": (5, 64)}
# Above the parts of "rows" and "flat", and below the whole parameters; "small" keeps fp32.
MIN_8BIT_SIZE = 600
every_kind = pytest.mark.parametrize("kind", KINDS)


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
        self.model = fully_shard(Model(seed), mesh=flat_mesh()) if sharded else Model(seed)
        given = {"state_dtype": state_dtype, "min_8bit_size": MIN_8BIT_SIZE, "lr": 0.01, "seed": 3, **options}
        self.optimizer = cls(self.model.parameters(), **given)
        self.session = None

    def steps(self, first, last):
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


def unsharded(t):
    return t.detach().full_tensor() if isinstance(t, DTensor) else t.detach()


def off(a, b):
    return (whole(a) - whole(b)).abs().max().item()


def as_alone(run, alone) -> bool:
    """Whether the first rows have the bits of a process with whole tensors, weights and state.

    Random bits go by places in a part and by its number, so those of part 0 are those of the whole.
    """
    mine, theirs = run.names()["rows"], alone.names()["rows"]
    pairs = [(part(mine), theirs.detach())]
    for key, value in run.state("rows").items():
        pairs.append((part(value), alone.state("rows")[key]))
    return all(torch.equal(a, b[: len(a)] if b.dim() else b) for a, b in pairs)


@every_kind
@on_ranks(2)
def test_steps_are_those_of_whole_tensors(kind):
    """And a skipped step changes no byte."""
    alone, run = Run(kind, sharded=False).steps(0, 1), Run(kind).steps(0, 1)
    # Adam and Lion step by what they read, zeros; LAMB steps along the rounded averages.
    found = max(off(a, b) for a, b in zip(alone.names().values(), run.names().values(), strict=True))
    assert found <= {"lamb": 0.05, "novograd": 1e-6}.get(kind, 0.0)
    # From state of zeros: the same scales, and codes beside each other where other bits were drawn.
    for key, value in run.state("rows").items():
        if key.endswith("_scales"):
            assert torch.equal(unsharded(value), alone.state("rows")[key])
        if key.endswith("_codes"):
            assert (unsharded(value).int() - alone.state("rows")[key].int()).abs().max() <= 1
    alone.steps(1, 4)
    run.steps(1, 4)
    # LAMB and NovoGrad multiply by norms of the whole, to which other parts add other random bits.
    assert as_alone(run, alone) or RANK > 0 or kind in ("lamb", "novograd")
    before = run.bits()
    run.optimizer.found_inf = torch.ones(())
    assert run.steps(4, 5).bits() == before
    del run.optimizer.found_inf
    mine, theirs = (unpack_state(each.optimizer.state_dict())["state"] for each in (run, alone))
    for i, state in theirs.items():
        largest = state["exp_avg"].abs().max().item()
        assert off(mine[i]["exp_avg"], state["exp_avg"]) < (0.02 if kind == "bf16" else 0.04) * largest
    assert run.steps(4, 5).bits() != before


@every_kind
@on_ranks(2)
def test_codes_are_of_rows_of_whole_blocks_and_by_the_size_of_the_whole_parameter(kind):
    """A state dict has fp32 of others."""
    run, coded = Run(kind).steps(0, 3), list(CODES)[: CODED[kind]]
    states = run.optimizer.state_dict()["state"].values()
    saved = {
        f"{name} {key}": (type(value), value.dtype, tuple(value.shape))
        for name, state in zip(SHAPES, states, strict=True)
        for key, value in state.items()
    }
    for name in SHAPES:
        expected = set() if name == "small" else {key for of in coded for key in CODES[of]}
        assert {key for key in run.state(name) if key.endswith(("_codes", "_scales"))} == expected
    for of in coded:
        codes, scales = CODES[of]
        assert saved[f"rows {codes}"] == (DTensor, torch.int8 if of == "exp_avg" else torch.uint8, (7, 128))
        assert saved[f"rows {scales}"] == (DTensor, torch.float32, (7, 2))
        for name in ("cut", "flat", "small"):
            assert saved[f"{name} {of}"] == (DTensor, torch.float32, SHAPES[name])
            assert f"{name} {codes}" not in saved
    if kind in ("bf16", "mixed"):
        assert saved["rows exp_avg_sq"] == (DTensor, torch.bfloat16, (7, 128))


@on_ranks(2)
def test_parts_are_rounded_by_other_random_bits_and_copies_by_the_same():
    for placement in (Shard(0), Replicate()):
        p = nn.Parameter(DTensor.from_local(torch.zeros(8, 128), flat_mesh(), [placement], run_check=False))
        optimizer = FusedLion([p], state_dtype=torch.bfloat16, seed=3)
        p.grad = DTensor.from_local(torch.full((8, 128), 0.3), flat_mesh(), [placement], run_check=False)
        optimizer.step()
        first, *_, last = all_ranks(part(optimizer.state[p]["exp_avg"]))
        differ = (first != last).sum().item() / first.numel()
        assert 0.2 < differ < 0.7 if placement == Shard(0) else differ == 0.0


@every_kind
@on_ranks(2)
def test_training_resumes_bit_for_bit(kind):
    """torch's state dict of the same sharding, into a run with other weights."""
    run, other = Run(kind).steps(0, 3), Run(kind, seed=1)
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    with torch.no_grad():
        for p, q in zip(other.model.parameters(), run.model.parameters(), strict=True):
            part(p).copy_(part(q))
    assert other.bits() == run.bits()
    assert other.steps(3, 5).bits() == run.steps(3, 5).bits()


# --- distributed checkpoints ------------------------------------------------------------------------------------------


def tree_of(run) -> dict:
    """What ``dcp`` saves: by names, since every rank has the same."""
    states = run.optimizer.state_dict()["state"].values()
    return {"model": run.names(), "optim": dict(zip(SHAPES, states, strict=True))}


def digests_of(run) -> dict:
    """Of whole weights and of the codes and moments that a state dict has."""
    tree = tree_of(run)
    entries = {f"{n} {key}": unsharded(value) for n, state in tree["optim"].items() for key, value in state.items()}
    return {key: digest(value) for key, value in entries.items()} | {
        f"{name} weight": digest(unsharded(p)) for name, p in tree["model"].items()
    }


def load(path, sharded):
    """A run that has loaded what other ranks have saved, after a step of its own, so that it has entries to fill; and
    how far its averages are off."""
    run = Run("8bit", sharded, seed=1).steps(9, 10)
    tree = tree_of(run)
    if not sharded:
        # A whole tensor keeps codes where parts have fp32: the file has what they can exchange.
        unpacked = unpack_state(run.optimizer.state_dict())["state"]
        tree["optim"].update(cut=unpacked[1], flat=unpacked[2])
    # Each rank is in one of the subgroups, alone.
    dcp.load(tree, checkpoint_id=path, process_group=None if sharded else dist.new_subgroups(1)[0])
    checkpoint = run.optimizer.state_dict()
    checkpoint["state"] = dict(enumerate(tree["optim"].values()))
    run.optimizer.load_state_dict(checkpoint)
    values = unpack_state(run.optimizer.state_dict())["state"]
    saved = [{key: whole(v) for key, v in state.items()} for state in tree["optim"].values()]
    return run, max(
        off(values[i]["exp_avg"], saved[i]["exp_avg"]) / saved[i]["exp_avg"].abs().max().item()
        for i in range(len(SHAPES))
        if "exp_avg" in saved[i]
    )


def save(directory):
    """What two ranks save, with digests of it: of all, and by rank of its bits then and two steps later."""
    run = Run("8bit").steps(0, 3)
    dcp.save(tree_of(run), checkpoint_id=directory / "dcp")
    digests, of_ranks = digests_of(run), all_ranks([run.bits(), run.steps(3, 5).bits()])
    if RANK == 0:
        (directory / "digests").write_text(json.dumps([digests, of_ranks]))


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory):
    directory = tmp_path_factory.mktemp("state_types")
    on_ranks(2)(save)(directory=directory)
    return directory


def assert_loaded(found, saved):
    """Codes of whole rows, fp32 and weights to the bit; codes of rows that are cut otherwise to nearest."""
    exact = {key for key in saved if key in found and not key.startswith(("cut exp", "flat exp"))}
    assert {"rows exp_avg_codes", "rows exp_avg_scales", "rows exp_avg_sq_codes", "rows exp_avg_sq_scales"} < exact
    assert {key: found[key] for key in exact} == {key: saved[key] for key in exact}


@on_ranks(2)
def test_the_ranks_that_saved_resume_from_a_distributed_checkpoint(saved_by_two):
    digests, of_ranks = json.loads((saved_by_two / "digests").read_text())
    run, off_by = load(saved_by_two / "dcp", sharded=True)
    assert (digests_of(run), off_by) == (digests, 0.0)
    bits, end = of_ranks[RANK]
    assert run.bits() == bits != end
    assert run.steps(3, 5).bits() == end


@on_ranks(2)
def test_one_process_loads_what_two_ranks_saved(saved_by_two):
    digests, _ = json.loads((saved_by_two / "digests").read_text())
    run, off_by = load(saved_by_two / "dcp", sharded=False)
    found = digests_of(run)
    assert_loaded(found, digests)
    assert "cut exp_avg_codes" in found
    assert 0 < off_by < 0.008
    found = [found, off_by, run.bits(), run.steps(3, 5).bits()]
    assert all(other == found for other in all_ranks(found))


@pytest.mark.full
@on_ranks(4)
def test_four_ranks_load_what_two_saved(saved_by_two):
    run, off_by = load(saved_by_two / "dcp", sharded=True)
    assert_loaded(digests_of(run), json.loads((saved_by_two / "digests").read_text())[0])
    assert off_by < 0.008


@on_ranks(2)
def test_a_state_by_names_goes_to_fp32_of_whole_tensors_and_back():
    """Decoded codes are exact, and come back as they were."""
    run = Run("8bit").in_amp().steps(0, 3)
    tree, before = run.tree(full_state_dict=True), run.bits()
    assert {v.dtype for state in tree["optim"].values() for v in state.values()} == {torch.float32}
    plain = Run("fp32", sharded=False, seed=1, min_8bit_size=4096).in_amp()
    plain.session.set_state_dict(plain.model, plain.optimizer, tree)
    there = plain.tree(full_state_dict=True)
    assert digest(there["model"], there["optim"]) == digest(tree["model"], tree["optim"])
    back, sharded = (Run("8bit", seed=1).in_amp() for _ in range(2))
    back.session.set_state_dict(back.model, back.optimizer, there)
    sharded.session.set_state_dict(sharded.model, sharded.optimizer, run.tree())
    assert back.bits() == sharded.bits() == before
    assert back.steps(3, 5).bits() == run.steps(3, 5).bits() == sharded.steps(3, 5).bits()
    for each in (run, plain, back, sharded):
        each.end()
