"""Ranks that differ say so, ranks without batches or gradients do not stop the others."""

import contextlib
import gc
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from digests import digest
from kit import backward, mlp, scale_of
from rank_processes import RANK, ROOT, all_ranks, counted_all_reduce, environment, flat_mesh, on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ampctx import AmpError, AmpRankError, AmpSession, AmpTypeError, GradScaler, clip_grad_norm_, optimizers
from ampctx._collectives import device_for
from ampctx.distributed import lossy, mixed_precision_policy

START = 2.0**16
KINDS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.0625, momentum=0.5),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.0625),
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=0.0625),
    "FusedAdam-split": lambda params: optimizers.FusedAdam(params, lr=0.0625, master_weights="split"),
}


def batch(*place):
    seed = sum(n * 100**i for i, n in enumerate(place))
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def started(level="O2", kind="SGD", model=None, **options):
    model = mlp() if model is None else model
    optimizer = KINDS[kind](model.parameters())
    session = AmpSession()
    session.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, "loss_scale": "dynamic", **options})
    return session, model, optimizer


def step(session, model, optimizer, x, factor=1.0, **options):
    optimizer.zero_grad()
    backward(session, model(x).float().square().mean() * factor, optimizer, **options)
    optimizer.step()


@contextlib.contextmanager
def refused(*texts):
    """On every rank, by what they have compared, and not because a collective was given up."""
    with pytest.raises(AmpRankError) as caught:
        yield
    assert "a collective failed" not in str(caught.value)
    for text in texts:
        assert text in str(caught.value)


# --- wrappers that average nothing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
@on_ranks(2)
def test_a_model_that_was_wrapped_before_its_weights_were_cast_is_refused(level):
    """At the first forward of the wrapper; a new one of the same model averages, until ``reset`` casts back."""
    refusal = pytest.raises(AmpError, match="DistributedDataParallel: the model was wrapped before amp.initialize")
    model = mlp()
    wrapped = DistributedDataParallel(nn.Sequential(model))  # around the model's parent
    session, _, optimizer = started(level, model=model)
    if cast := level in ("O2", "O3", "O5"):
        with refusal:
            wrapped(batch(RANK))
        with torch.no_grad():
            wrapped(batch(RANK))
        wrapped = DistributedDataParallel(wrapped.module)
    step(session, wrapped, optimizer, batch(RANK))
    first, second = all_ranks(digest([*model.parameters()]))
    assert first == second
    session.reset()
    with refusal if cast else contextlib.nullcontext():
        wrapped(batch(RANK))


# --- what differs -----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_loss_scales_that_differ_are_an_error_on_every_rank():
    """Rank 1 has another scale."""
    mine = 1024.0 if RANK == 1 else START
    state = {"loss_scaler0": {"loss_scale": mine, "unskipped": 0}}
    texts = "loss scales differ between ranks", f"rank {RANK} of a group of 2 ranks [0, 1], and has", str(mine)
    session, _, _ = started()
    with refused(*texts):
        session.load_state_dict(state, process_group=dist.group.WORLD)
    with refused(*texts):
        session.check_ranks()
    session.reset()
    for level in ("O1", "O2"):
        session, model, optimizer = started(level, process_group=dist.group.WORLD)
        session.load_state_dict(state)
        kept = [*model.parameters(), *session.master_params(optimizer)]
        before = digest(kept)
        with refused(*texts):
            step(session, model, optimizer, batch(RANK))
        assert digest(kept) == before
        session.reset()
    # A second step after the error does not unscale twice.
    scaler, model = GradScaler("cpu", init_scale=mine, process_group=dist.group.WORLD), mlp()
    optimizer = KINDS["SGD"](model.parameters())
    scaler.scale(model(batch(RANK)).sum()).backward()
    with refused(*texts):
        scaler.step(optimizer)
    unscaled = [p.grad.clone() for p in model.parameters()]
    scaler.load_state_dict({**scaler.state_dict(), "scale": START})
    scaler.step(optimizer)
    assert all(map(torch.equal, unscaled, (p.grad for p in model.parameters())))


# By what rank 1 has otherwise: options of initialize and of the optimizer, and what each rank is told that it has.
ON_A_MESH = {
    "level": ({"opt_level": "O5"}, {}, "opt levels", ("O2", "O5")),
    "static scale": ({"loss_scale": 64.0}, {}, "loss scales", ("128.0 (static)", "64.0 (static)")),
    "dynamic": ({"loss_scale": "dynamic"}, {}, "loss scales", ("128.0 (static)", "65536.0")),
    "skips": ({"skip_nonfinite": True}, {}, "loss scales", ("128.0 (static)", "128.0")),
    "enabled": ({"enabled": False}, {}, "opt levels", ("O2", "enabled=False")),
    "option": ({"cast_model_outputs": torch.float16}, {}, "options of amp.initialize", ("=None", "=torch.float16")),
    "lr": ({}, {"lr": 0.1}, "optimizers and their options", ("AdamW(lr=0.01, betas", "AdamW(lr=0.1, betas")),
    "betas": ({}, {"betas": (0.8, 0.99)}, "optimizers and their options", ("betas=(0.9, 0.999)", "betas=(0.8, 0.99)")),
    "decay": ({}, {"weight_decay": 0.0}, "optimizers and their options", ("weight_decay=0.01", "weight_decay=0.0")),
    "frozen": ({}, {}, "shapes of parameters", ("(6, 4), (6,), (2, 6)", "(6, 4) frozen, (6,)")),
    "a tensor": ({}, {"lr": torch.tensor(0.01, dtype=torch.float64)}, None, None),
}


@pytest.mark.parametrize("case", ON_A_MESH)
@on_ranks(2)
def test_initialize_compares_the_ranks_of_a_mesh(case):
    """Without ``process_group``, in one all_reduce, and before it changes anything."""
    options, of_optimizer, what, has = ON_A_MESH[case]
    given = {"opt_level": "O2", "loss_scale": 128.0, "verbosity": 0, **(options if RANK else {})}
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    fully_shard(model, mesh=flat_mesh(), mp_policy=mixed_precision_policy(given["opt_level"]))
    model[0].weight.requires_grad_(not (RANK and case == "frozen"))
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **(of_optimizer if RANK else {})})
    session = AmpSession()
    refusal = refused(f"{what}", " differ between ranks", has[RANK]) if what else contextlib.nullcontext()
    with counted_all_reduce() as sizes, refusal:
        session.initialize(model, optimizer, **given)
    assert len(sizes) == 1
    assert (session.policy is None) == (what is not None)
    session.reset()


DIFFERENT = {
    "count": ("counts of clean steps", ["0", "3"]),
    "level": ("opt levels and options of amp.initialize and", ["O2", "O3"]),
    "lr": ("optimizers and their options differ", ["SGD(lr=0.0625", "SGD(lr=0.125"]),
    "names": ("names of parameters", ["6: a.0.weight", "6: 0.weight"]),
    "shapes": ("shapes of parameters and values of parameters", ["(2, 4), (2,)", "(3, 4), (3,)"]),
    "master": ("values of parameters", ["the checksum", "the checksum"]),
    "nothing": None,
    "count of a static scale": None,
    "parts": None,
    "a group of one": None,
}


@pytest.mark.parametrize("case", DIFFERENT)
@on_ranks(2)
def test_check_ranks_names_what_differs_and_what_this_rank_has(case):
    """And is silent about what may be."""
    model = {
        "names": lambda: nn.Sequential(*mlp()) if RANK else nn.ModuleDict({"a": mlp()}),
        **dict.fromkeys(("shapes", "parts", "a group of one"), lambda: nn.Linear(4, 2 + RANK)),
    }.get(case, mlp)()
    static = case == "count of a static scale"
    level = "O3" if case == "level" and RANK else "O2"
    session, _, optimizer = started(level, model=model, loss_scale=8.0 if static else "dynamic")
    if static:  # a count that nothing depends on
        session.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": RANK}})
    elif RANK == 1 and case == "count":
        session.load_state_dict({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 3}})
    elif RANK == 1 and case == "lr":
        optimizer.param_groups[0]["lr"] *= 2
    elif RANK == 1 and case == "master":
        next(session.master_params(optimizer)).detach().view(-1)[0].mul_(1 + 2**-20)
    given = {"same_parameters": False} if case == "parts" else {}
    if case == "a group of one":
        given["group"] = [dist.new_group([0]), dist.new_group([1])][RANK]
    if DIFFERENT[case] is None:
        session.check_ranks(**given)
    else:
        what, has = DIFFERENT[case]
        with refused(f"amp.check_ranks: {what}", f": {has[RANK]}"):
            session.check_ranks(**given)
    session.reset()


@on_ranks(2)
def test_check_ranks_leaves_out_an_optimizer_that_no_rank_uses_any_more():
    """Rank 0 has not collected an optimizer that both have dropped."""
    gc.disable()
    session, model, optimizer = started("O1", "FusedAdam")
    optimizer.itself = optimizer
    dropped = weakref.ref(optimizer)
    del optimizer
    if RANK == 1:
        gc.collect()
    second = KINDS["FusedAdam"](model.parameters())
    session.initialize(model, second, opt_level="O1", verbosity=0)
    assert (dropped() is None) == (RANK == 1)
    session.check_ranks()
    session.reset()
    gc.enable()


# --- collectives of ranks without gradients ---------------------------------------------------------------------------


def split_parameter() -> tuple[nn.Module, callable]:
    """A parameter of which each rank has two rows, and a function that gives such a gradient."""
    model = nn.Module()
    torch.manual_seed(0)
    model.weight = nn.Parameter(distribute_tensor(torch.randn(4, 3), flat_mesh(), [Shard(0)]))

    def give(part):
        model.weight.grad = DTensor.from_local(part, flat_mesh(), [Shard(0)], shape=(4, 3), stride=(3, 1))

    return model, give


@on_ranks(2)
def test_a_rank_without_gradients_takes_part_in_clipping_and_steps():
    for order in (2.0, 3.0, float("inf")):
        model, give = split_parameter()
        if RANK == 0:
            give(torch.arange(6.0).reshape(2, 3))
        norm = clip_grad_norm_([model.weight], 1.0, norm_type=order)
        assert abs(norm.item() - torch.linalg.vector_norm(torch.arange(6.0), order).item()) < 1e-5
        if RANK == 0:
            left = torch.linalg.vector_norm(model.weight.grad.to_local(), order).item()
            assert abs(left - 1.0) < 1e-4
    for overflow in (False, True):
        model, give = split_parameter()
        session, _, optimizer = started("O1", model=model)
        before = model.weight.to_local().clone()
        # What a scale_loss block of a rank that its loss does not reach looks like.
        with session.scale_loss(torch.ones((), requires_grad=True), optimizer) as scaled:
            if RANK == 0:
                give(torch.full((2, 3), float("inf") if overflow else 1.0))
            else:
                scaled.backward()
        optimizer.step()
        assert session.outcome(optimizer).stepped == (not overflow)
        assert torch.equal(before, model.weight.to_local()) == (overflow or RANK == 1)
        assert scale_of(session) == (START / 2 if overflow else START)
        session.reset()


@pytest.mark.full(but=4)
@pytest.mark.parametrize("wrapped", [True, False], ids=["DistributedDataParallel", "process_group"])
@pytest.mark.parametrize("level", ["O0", "O3", "O4", "O5"])
@on_ranks(2)
def test_a_static_scale_can_skip_together_and_stay(level, wrapped):
    """Rank 1 overflows in one of four steps. Under DistributedDataParallel, or with other data on each rank."""
    group = None if wrapped else dist.group.WORLD
    session, model, optimizer = started(level, loss_scale=64.0, skip_nonfinite=True, process_group=group)
    ddp = DistributedDataParallel(model) if wrapped else model
    stepped = []
    for i in range(4):
        step(session, ddp, optimizer, batch(i, RANK), float("nan") if i == 2 and RANK else 1.0)
        stepped.append(session.outcome(optimizer).stepped)
    assert stepped == [True, True, False, True]
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert scale_of(session) == 64.0
    session.reset()


# --- compressed gradients ---------------------------------------------------------------------------------------------


def compressed(level, wrapped=True, overflow_at=None, doubles_at=None, **options) -> dict:
    """PowerSGD from the third step on. At one step rank 1 overflows, or the scale doubles."""
    torch.manual_seed(0)
    session, model, optimizer = started(level, "SGD", nn.Linear(8, 8), max_loss_scale=1024.0, **options)
    ddp = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    hook = powerSGD_hook.powerSGD_hook
    if wrapped:
        ddp.register_comm_hook(None, lossy(state, hook, optimizer))
    else:
        ddp.register_comm_hook(state, hook)
    errors = []
    for i in range(12):
        if i == doubles_at:
            session.load_state_dict({"loss_scaler0": {"loss_scale": 2048.0, "unskipped": 0}})
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * i + RANK))
        step(session, ddp, optimizer, x, float("inf") if i == overflow_at and RANK else 1.0)
        errors.append(digest(state.error_dict))
    result = {
        "skipped": session.skipped_steps(optimizer),
        "scale": session.state_dict().get("loss_scaler0", {}).get("loss_scale"),
        "errors": errors,
        "dtypes": {error.dtype for error in state.error_dict.values()},
        "largest": max(error.abs().max().item() for error in state.error_dict.values()),
        "weights": digest(model.state_dict()),
    }
    session.reset()
    return result


@on_ranks(2)
def test_one_overflow_of_compressed_gradients_is_one_skip():
    assert compressed("O1", wrapped=False, overflow_at=5)["skipped"] > 1
    for level in ("O1", "O2"):
        found = compressed(level, overflow_at=5)
        assert (found["skipped"], found["scale"], found["dtypes"]) == (1, 512.0, {torch.float32})
        assert 0 < found["largest"] < 1  # of gradients that are not scaled
        assert len(set(all_ranks(found["weights"]))) == 1


@pytest.mark.parametrize("level", ["O0", "O2"])
@on_ranks(2)
def test_the_error_of_a_compression_does_not_depend_on_the_scale(level):
    kept, doubled = compressed(level), compressed(level, doubles_at=7)
    assert (kept["scale"], doubled["scale"]) == (1024.0, 2048.0)
    assert len(set(kept["errors"])) > 5
    assert (kept["errors"], kept["weights"]) == (doubled["errors"], doubled["weights"])


# --- without other ranks ----------------------------------------------------------------------------------------------


def test_one_process_has_nothing_to_compare():
    session, *_ = started()
    assert session.check_ranks() is None
    session.reset()


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda s, o: AmpSession().check_ranks(), AmpError, "check_ranks was called before amp.initialize"),
        (lambda s, o: s.check_ranks([0, 1]), AmpTypeError, "group must be a torch.distributed.ProcessGroup, got list"),
        (lambda s, o: s.load_state_dict(s.state_dict(), process_group=0), AmpTypeError, "process_group must be"),
        (lambda s, o: lossy(None, "hook", o), AmpTypeError, "hook must be callable"),
        (lambda s, o: lossy(None, print, None), AmpTypeError, "optimizer must be an optimizer, got NoneType"),
        (
            lambda s, o: AmpSession().initialize(torch.nn.Linear(1, 1), skip_nonfinite="yes"),
            AmpTypeError,
            "skip_nonfinite must be True or False, got str",
        ),
    ],
)
def test_wrong_calls_name_what_is_wrong(call, kind, message):
    session, _, optimizer = started()
    with pytest.raises(kind, match=message):
        call(session, optimizer)
    session.reset()


@pytest.mark.parametrize(
    ("backends", "expected"),
    [("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda"), ("cpu:gloo", "cpu"), ("xpu:xccl,cuda:nccl", "xpu")],
)
def test_numbers_on_the_cpu_go_to_a_device_that_the_group_takes(backends, expected):
    assert device_for(backends, torch.device("cpu")) == torch.device(expected)


@pytest.mark.full
@pytest.mark.parametrize("point", ["before the block", "in the block", "after backward", "in the exit"])
def test_every_rank_ends_after_one_has_raised(tmp_path, point):
    worker = str(ROOT / "tests" / "reliability" / "raising_worker.py")
    command = [sys.executable, worker, str(tmp_path / "rendezvous"), "2"]
    ranks = [
        subprocess.Popen([*command, str(rank), point], env=environment(), stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=600)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode != 0 for rank in ranks)
    assert (
        "AmpRankError: the end of an amp.scale_loss block: a collective failed on rank 0 of a group of 2" in errors[0]
    )
    assert ("layout" if point == "in the exit" else f"ValueError: rank 1 raises {point}") in errors[1]


def flat(value):
    """The leaves of a nested state, by their paths."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {f"{key}.{path}": leaf for key, part in items for path, leaf in flat(part).items()}
    return {"": value}


@pytest.mark.full
def test_a_run_that_torchrun_restarts_ends_with_the_bits_of_one_that_nothing_ended(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ends = []
    for name, killed_at in (("whole", -1), ("killed", 5)):
        folder = tmp_path / name
        folder.mkdir()
        worker = [str(ROOT / "tests" / "reliability" / "restart_worker.py"), str(folder), str(killed_at)]
        done = subprocess.run(
            [*torchrun, "--max-restarts", "1", *worker], env=environment(), capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        assert (folder / "killed").exists() == (killed_at >= 0)
        ends += [flat(torch.load(folder / f"end{rank}.pt", weights_only=True)) for rank in range(2)]
    for other in ends[1:]:
        assert other.keys() == ends[0].keys()
        for path, leaf in other.items():
            same = torch.equal if isinstance(leaf, torch.Tensor) else lambda a, b: a == b
            assert same(leaf, ends[0][path]), path
