"""The state of a run by names of parameters: any layout of masters, engine and number of ranks loads what another one
has saved, bit for bit."""

import contextlib
import copy
import json
import logging

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from digests import digest
from kit import backward, batch
from rank_processes import RANK, RANKS, all_ranks, flat_mesh, on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ampctx import AmpError, optimizers
from ampctx.amp import AmpSession

OVERFLOW_AT, SAVED_AT, STEPS = 2, 5, 15
KEPT_BY_OPTIMIZER = {"opt_level": "O5", "master_weights": False}
# The engine, arguments of initialize and of the optimizer.
LAYOUTS = {
    "ddp-O1": ("ddp", {"opt_level": "O1"}, {}),
    "ddp-O2": ("ddp", {"opt_level": "O2"}, {}),
    "ddp-O5": ("ddp", {"opt_level": "O5"}, {}),
    "ddp-O5-torch": ("ddp", {"opt_level": "O5"}, torch.optim.AdamW),
    "ddp-masters": ("ddp", KEPT_BY_OPTIMIZER, {"master_weights": True}),
    "ddp-split": ("ddp", KEPT_BY_OPTIMIZER, {"master_weights": "split"}),
    "shards": ("policy", {"opt_level": "O0"}, {}),
    "shards-torch": ("policy", {"opt_level": "O0"}, torch.optim.AdamW),
    "masters": ("16 bits", KEPT_BY_OPTIMIZER, {"master_weights": True}),
    "split": ("16 bits", KEPT_BY_OPTIMIZER, {"master_weights": "split"}),
    "kahan": ("16 bits", KEPT_BY_OPTIMIZER, {"write_back": "kahan"}),
    "stochastic": ("16 bits", KEPT_BY_OPTIMIZER, {"write_back": "stochastic", "seed": 3}),
}
ROUNDED = ("kahan", "stochastic")
# What two ranks check in the fast set.
FEW = ("ddp-O5", "split")


class Run:
    """A model whose sizes no number of ranks divides, in one layout."""

    def __init__(self, layout, seed=0):
        engine, options, of_optimizer = LAYOUTS[layout]
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.session = AmpSession()
        if engine != "ddp":
            self.session.allow_incoming_model_not_fp32 = True
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            model = model.to(torch.bfloat16 if engine == "16 bits" else None)
            for module in (model[0], model[2], model):
                fully_shard(module, mesh=flat_mesh(), **({"mp_policy": policy} if engine == "policy" else {}))
        if isinstance(of_optimizer, dict):
            self.optimizer = optimizers.FusedAdam(model.parameters(), lr=0.01, **of_optimizer)
        else:
            self.optimizer = of_optimizer(model.parameters(), lr=0.01)
        self.session.initialize(model, self.optimizer, loss_scale="dynamic", verbosity=0, **options)
        self.model = DistributedDataParallel(model) if engine == "ddp" else model
        self.heard = []
        self.session.on_step(lambda *_: self.heard.append(1))

    def steps(self, first, last):
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss = self.model(batch(100 * step + RANK, 4, 5)).float().square().mean()
            loss = loss * float("inf") if step == OVERFLOW_AT and RANK == 0 else loss
            backward(self.session, loss, self.optimizer)
            self.optimizer.step()
            for name, buffer in self.model.named_buffers():
                if name.endswith("steps"):
                    buffer.add_(1)
        return self

    def load(self, path, partial=False, **options):
        planner = dcp.DefaultLoadPlanner(allow_partial_load=partial)
        stateful = self.session.Stateful(self.model, self.optimizer, **options)
        dcp.load({"app": stateful}, checkpoint_id=path, planner=planner)
        return self

    def full(self, **options):
        return self.session.get_state_dict(self.model, self.optimizer, full_state_dict=True, **options)

    def set(self, state, **options):
        self.session.set_state_dict(self.model, self.optimizer, state, **options)
        return self

    def digests(self):
        """Of weights, of moments, of the loss scale, and of everything, with whole tensors."""
        state = self.full()
        in_fp32 = {name: value.float() for name, value in state["model"].items()}
        return [digest(part) for part in (in_fp32, state["optim"], state["amp"]["loss_scaler0"], state)]

    def end(self):
        self.session.reset()


@contextlib.contextmanager
def nothing_logged():
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("ampctx").addHandler(handler)
    yield
    logging.getLogger("ampctx").removeHandler(handler)
    assert messages == []


def save(directory, layouts):
    """Saves each layout in the middle of a run, and digests of then and of the end."""
    for layout in layouts:
        run = Run(layout).steps(0, SAVED_AT)
        path = directory / f"{layout}-{RANKS}"
        dcp.save({"app": run.session.Stateful(run.model, run.optimizer)}, checkpoint_id=path)
        saved = run.digests()
        end = run.steps(SAVED_AT, STEPS).digests()
        assert end != saved
        assert all(other == [saved, end] for other in all_ranks([saved, end]))
        if RANK == 0:
            (path / "digests").write_text(json.dumps([saved, end]))
        run.end()


def load(directory, layouts, numbers):
    """Loads what each number of ranks has saved; with the number of these ranks, goes on to the end."""
    for layout in layouts:
        for number in numbers:
            path, run = directory / f"{layout}-{number}", Run(layout, seed=1)
            saved, end = json.loads((path / "digests").read_text())
            if number == RANKS and isinstance(run.model, DistributedDataParallel):
                # Its second iteration orders buckets anew, so that sums over four ranks round otherwise in the first.
                run.steps(0, 2)
                run.heard.clear()
            run.load(path)
            assert (run.digests(), run.heard) == (saved, []), path.name
            if number == RANKS:
                assert run.steps(SAVED_AT, STEPS).digests() == end, path.name
            run.end()


def convert(directory, layouts):
    """Loads each layout into each."""
    for there in layouts:
        weights, moments, scale, _ = json.loads((directory / f"{there}-{RANKS}" / "digests").read_text())[0]
        for here in layouts:
            other_level = LAYOUTS[there][1]["opt_level"] != LAYOUTS[here][1]["opt_level"]
            # No other layout has entries for the compensations.
            partial = here == "kahan" != there
            run = Run(here, seed=1).load(directory / f"{there}-{RANKS}", partial, allow_level_change=other_level)
            found = run.digests()
            assert found[1:3] == [moments, scale], (there, here)
            assert here in ROUNDED or found[0] == weights, (there, here)
            run.end()


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    on_ranks(2)(save)(directory=directory, layouts=FEW)
    return directory


@on_ranks(2)
def test_two_ranks_resume_bit_for_bit_and_layouts_load_each_other(saved_by_two):
    with nothing_logged():
        load(saved_by_two, FEW, [2])
        convert(saved_by_two, FEW)


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory):
    """What 1, 2 and 4 ranks have saved of every layout."""
    directory = tmp_path_factory.mktemp("saved")
    for number in (1, 2, 4):
        on_ranks(number)(save)(directory=directory, layouts=[*LAYOUTS])
    return directory


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_loads_what_another_has_saved(saved_by, ranks):
    on_ranks(ranks)(load)(directory=saved_by, layouts=[*LAYOUTS], numbers=(1, 2, 4))


@pytest.mark.full
def test_any_layout_loads_what_another_has_saved(saved_by):
    on_ranks(2)(convert)(directory=saved_by, layouts=[*LAYOUTS])


@on_ranks(2)
def test_whole_tensors_load_into_any_engine(tmp_path):
    """State dicts of whole tensors, between engines and through one rank's file."""
    with nothing_logged():
        split = Run("split").steps(0, SAVED_AT)
        expected, full = split.digests(), split.full(cpu_offload=True)
        assert full == {} or RANK == 0
        if RANK == 0:
            torch.save(full, tmp_path / "whole")
        dist.barrier()
        loaded = torch.load(tmp_path / "whole", weights_only=True)
        assert {t.dtype for t in loaded["model"].values()} == {torch.float32, torch.int64}
        ddp = Run("ddp-O5", seed=1).set(loaded, process_group=dist.group.WORLD)
        back = Run("split", seed=1).set(ddp.full())
        # DTensors into plain parameters, of the same process.
        plain = Run("ddp-O5", seed=1).set(back.session.get_state_dict(back.model, back.optimizer))
        assert ddp.digests()[:3] == plain.digests()[:3] == expected[:3]
        assert back.digests() == expected
        assert back.heard + ddp.heard == []
        for run in (split, ddp, back, plain):
            run.end()


@on_ranks(2)
def test_the_functions_of_torch_make_no_step_of_the_run_and_refuse_masters():
    """None hears of the step that builds state, and masters are refused by name."""
    run, saved = Run("shards"), Run("shards").steps(0, 2)
    set_optimizer_state_dict(run.model, run.optimizer, get_optimizer_state_dict(saved.model, saved.optimizer))
    assert digest(run.full()["optim"]) == digest(saved.full()["optim"])
    assert run.heard == []
    assert not run.session.outcome(run.optimizer).stepped
    ddp = Run("ddp-O5")
    for _ in range(2):
        message = r"torch's get_optimizer_state_dict(?s:.*)amp\.get_state_dict\(model, optimizer\)"
        with pytest.raises(AmpError, match=f"^{message}"):
            get_optimizer_state_dict(ddp.model, ddp.optimizer)
        assert len(ddp.optimizer.state) == 0 or ddp.heard
        ddp.steps(0, 2)
    for each in (run, saved, ddp):
        each.end()


@on_ranks(2)
def test_names_are_those_of_torch_under_wrappers():
    """Around and inside of a model."""
    outside, inside = DistributedDataParallel(nn.Linear(2, 2)), nn.ModuleDict({"a": nn.Linear(2, 2)})
    inside["module"] = DistributedDataParallel(nn.Sequential(nn.ModuleDict({"module": nn.Linear(2, 2)})))
    for model in (outside, inside):
        session, optimizer = AmpSession(), torch.optim.Adam(model.parameters())
        session.initialize([], optimizer, verbosity=0)
        assert list(session.get_state_dict(model, optimizer)["optim"]) == list(get_model_state_dict(model))
        session.reset()


WRONG = {
    "no model": (lambda t: t.pop("model"),
        'AmpKeyError: state_dict has no "model", only optim, optimizers, amp. Pass what'),
    "missing weight": (lambda t: t["model"].pop("0.weight"),
        'AmpKeyError: state_dict["model"] has no "0.weight", which the model has here. Build'),
    "unknown weight": (lambda t: t["model"].update(head=torch.ones(2)),
        'AmpKeyError: state_dict["model"] has "head", and the model here has not. Build'),
    "shape": (lambda t: t["model"].update({"0.weight": torch.ones(2, 2)}),
        'AmpValueError: state_dict["model"]["0.weight"] is of shape (2, 2) and torch.float32, expected (7, 5'),
    "missing state": (lambda t: t["optim"].pop("2.bias"),
        'AmpKeyError: state_dict["optim"] has no "2.bias", which is stepped here. It was frozen'),
    "unknown state": (lambda t: t["optim"].update(head={"step": torch.ones(())}),
        'AmpKeyError: state_dict["optim"] has "head", and no optimizer here steps it'),
    "missing moment": (lambda t: t["optim"]["2.bias"].pop("exp_avg"),
        'AmpKeyError: state_dict["optim"]["2.bias"] has no "exp_avg", and the optimizer here keeps'),
    "moment": (lambda t: t["optim"]["2.bias"].update(exp_avg=torch.ones(4)),
        'AmpValueError: state_dict["optim"]["2.bias"]["exp_avg"] is of shape (4,) and torch.float32, expected'),
    "nan": (lambda t: t["optim"]["2.bias"]["exp_avg"].fill_(torch.nan),
        "AmpValueError: the state 'exp_avg' of param_groups[0]['params'][3] has nan"),
    "level": (lambda t: t["amp"].update(opt_level="O2"),
        """AmpValueError: state_dict["amp"]["opt_level"] is 'O2', and amp.initialize was given opt_level='O5'"""),
    "scale": (lambda t: t["amp"]["loss_scaler0"].pop("loss_scale"),
        """AmpKeyError: state_dict["loss_scaler0"]: the loss scale's state has no "loss_scale\""""),
    "facts": (lambda t: t["optimizers"].update({"0.weight": {}}),
        'AmpTypeError: state_dict["optimizers"]["0.weight"] must be a tuple of one dict'),
}  # fmt: skip


@on_ranks(2)
def test_a_state_that_does_not_fit_is_refused_on_every_rank_and_changes_nothing():
    run = Run("split").steps(0, 2)
    tree, before = run.full(), run.digests()
    for name, (change, message) in WRONG.items():
        given = copy.deepcopy(tree)
        change(given)
        with pytest.raises(AmpError) as caught:
            run.set(given)
        # A nan is in the part of rank 0, and the other reads none.
        if name != "nan" or RANK == 0:
            assert f"{type(caught.value).__name__}: {caught.value}".startswith(message), name
        assert run.digests() == before, name
    run.end()
