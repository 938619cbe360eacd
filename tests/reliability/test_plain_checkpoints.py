"""The states of model, optimizer and amp are all that a run needs to go on bit for bit: a model's state dict holds the
fp32 masters, and loading fp32 values sets them."""

import logging
import warnings
from collections import OrderedDict
from functools import partial

import pytest
import torch
from host_reads import HostReads
from kit import assert_same, backward, loss_of, snapshot, through_a_file, train
from kit import start as start_with
from optimizer_kinds import KINDS, ORDERS
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from ampctx import AmpError
from ampctx.optimizers import FusedSGD

with_masters = pytest.mark.parametrize("level", ["O2", "O5"])


def tower(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def started(session, level, make="FusedAdam", seed=0, **options):
    return start_with(session, level, make, tower(seed), **options)


@pytest.fixture
def trained(session, level):
    """A model and its optimizer, after three steps."""
    model, optimizer = started(session, level)
    train(session, model, optimizer, 3)
    return model, optimizer


@pytest.fixture
def fresh(sessions, level):
    """Another run, with other weights."""
    other = sessions()
    return other, *started(other, level, seed=1)


def masters_of(session, optimizer):
    return [p.detach().clone() for p in session.master_params(optimizer)]


@pytest.mark.full(but=8)
@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("name", ["FusedAdam", "Adam-fused", "SGD-plain"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_saved_between_the_blocks_of_a_step_and_replayed_from_its_first(session, sessions, level, name, after):
    model, optimizer = started(session, level, KINDS[name])
    other = sessions()
    twin, twin_optimizer = started(other, level, KINDS[name], seed=1)
    train(session, model, optimizer, 3)

    def parts(window, run):
        for part in window:
            backward(run[0], loss_of(run[1], 10 + part), run[2], delay_unscale=part < 2)

    parts(range(after), (session, model, optimizer))
    state = through_a_file([model.state_dict(), optimizer.state_dict(), session.state_dict()])
    for part, content in zip((twin, twin_optimizer, other), state, strict=True):
        part.load_state_dict(content)
    parts(range(after, 3), (session, model, optimizer))
    parts(range(3), (other, twin, twin_optimizer))
    for run in ((session, model, optimizer), (other, twin, twin_optimizer)):
        run[2].step()
        run[2].zero_grad()
        train(*run, 3, first=20)
    for mine, theirs in ((twin, model), (twin_optimizer, optimizer), (other, session)):
        assert_same(mine.state_dict(), theirs.state_dict())


# --- what a model's state dict shows ----------------------------------------------------------------------------------


@with_masters
def test_it_shows_copies_of_the_masters_in_fp32(session, trained):
    model, optimizer = trained
    with HostReads() as reads:
        state = model.state_dict()
    assert reads.count == 0
    masters = list(session.master_params(optimizer))
    assert_same(list(state.values()), [p.detach() for p in masters])
    assert any(not torch.equal(p, master) for p, master in zip(model.parameters(), masters, strict=True))
    best = {name: value.clone() for name, value in state.items()}
    train(session, model, optimizer, 3)
    assert_same(dict(state), best)  # a snapshot
    assert not torch.equal(state["0.weight"], masters[0])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.fixed = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.fixed(self.embed(tokens)))


@with_masters
def test_parts_wrappers_ties_frozen_weights_and_hooks(session, level):
    torch.manual_seed(0)
    model = Tied()
    early = {}
    # Registered before and after initialize: what a hook of the user renames is the master.
    model.head.register_state_dict_post_hook(lambda m, s, prefix, _: early.update(before=s[prefix + "weight"]))
    _, optimizer = start_with(session, level, partial(torch.optim.SGD, lr=0.3), model)
    model.embed.register_state_dict_post_hook(lambda m, s, prefix, _: s.update(out=s.pop(prefix + "weight")))
    train(session, model, optimizer, 3, loss=lambda m, _: m(torch.arange(8)).float().square().mean())
    (master,) = [p for p in session.master_params(optimizer) if p.requires_grad]
    assert not torch.equal(model.embed.weight, master)
    state = model.state_dict()
    for shown in (state["out"], state["head.weight"], early["before"], model.head.state_dict()["weight"]):
        assert_same(shown, master.detach())
    assert state["out"] is not state["head.weight"]
    assert_same(state["fixed.weight"], model.fixed.weight.float())
    assert_same(nn.DataParallel(model).state_dict()["module.head.weight"], master.detach())
    assert_same(torch.compile(model, backend="eager").state_dict()["_orig_mod.head.weight"], master.detach())
    # An entry that leads to the parameter: its values are the master's.
    entry = model.state_dict(keep_vars=True)["head.weight"]
    assert_same(entry.detach(), master.detach())
    (gradient,) = torch.autograd.grad(entry.sum(), model.head.weight)
    assert_same(gradient, torch.ones_like(model.head.weight))
    # What stands in the place of a weight is shown itself.
    other = torch.zeros_like(model.head.weight)
    swapped = {"embed.weight": other, "head.weight": other}
    assert (
        torch.func.functional_call(Shown(model), {f"model.{k}": v for k, v in swapped.items()}, ())["out"].eq(0).all()
    )


class Shown(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self):
        return self.model.state_dict()


@pytest.mark.cuda
@with_masters
def test_a_model_that_was_moved_for_its_last_checkpoint_shows_the_masters(session, level):
    model, optimizer = start_with(session, level, "FusedAdam", tower().cuda())
    backward(session, model(torch.randn(16, 4, device="cuda")).square().mean(), optimizer)
    optimizer.step()
    model.cpu()
    state = model.state_dict()
    assert {v.device.type for v in state.values()} == {"cpu"}
    assert_same(list(state.values()), [m.cpu() for m in masters_of(session, optimizer)])
    model.cuda().load_state_dict(state)
    assert_same(list(model.state_dict().values()), [v.cuda() for v in state.values()])


@with_masters
def test_several_sessions_over_one_model_show_the_masters_of_each(session, sessions, level):
    model = tower()
    first, second = FusedSGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)
    session.initialize(model, first, opt_level=level, verbosity=0)
    other = sessions()
    other.allow_incoming_model_not_fp32 = True
    other.initialize(model, second, opt_level=level, verbosity=0)
    for step in range(3):
        for each, optimizer in ((session, first), (other, second)):
            train(each, model, optimizer, 1, step)
            model.zero_grad()
    masters = [*masters_of(session, first), *masters_of(other, second)]
    state = model.state_dict()
    assert_same(list(state.values()), masters)
    train(session, model, first)
    model.load_state_dict(state)
    assert_same([*masters_of(session, first), *masters_of(other, second)], masters)


# --- what loading does ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@with_masters
def test_wide_values_set_the_masters_without_a_host_read(session, level, dtype):
    """Also where all of a tensor's values are 16-bit numbers: best weights of before are those weights."""
    model, optimizer = started(session, level)
    state = {name: torch.randn_like(v, dtype=dtype) for name, v in model.state_dict().items()}
    state["0.bias"], state["2.bias"] = torch.ones(8, dtype=dtype), torch.zeros(2, dtype=dtype)
    with HostReads() as reads:
        model.load_state_dict(state)
    assert reads.count == 0
    assert_same(masters_of(session, optimizer), [v.float() for v in state.values()])


@with_masters
def test_the_best_weights_come_back_where_they_look_like_the_rounded_masters(session, level):
    model, optimizer = started(session, level, lambda p: torch.optim.SGD(p, lr=2.0**-13))
    model.load_state_dict({name: torch.ones_like(v) for name, v in model.state_dict().items()})
    best = model.state_dict()
    for p in session.master_params(optimizer):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(p.eq(1.0).all() for p in model.parameters())
    assert all(p.eq(1 - 2.0**-13).all() for p in session.master_params(optimizer))
    model.load_state_dict(best)
    assert all(p.eq(1.0).all() for p in session.master_params(optimizer))


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@with_masters
def test_checkpoints_of_before_keep_the_masters_of_amp_in_any_order(session, trained, fresh, order):
    model, optimizer = trained
    other, twin, twin_optimizer = fresh
    state = through_a_file(
        {
            "model": {n: p.detach().float() for n, p in model.named_parameters()},  # up-cast, as it was
            "optimizer": optimizer.state_dict(),
            "amp": session.state_dict(masters=True),
        }
    )
    for name in order:
        {"model": twin, "optimizer": twin_optimizer, "amp": other}[name].load_state_dict(state[name])
    assert_same(masters_of(other, twin_optimizer), masters_of(session, optimizer))
    for run in ((session, model, optimizer), (other, twin, twin_optimizer)):
        train(*run, 3)
    assert_same(twin.state_dict(), model.state_dict())
    # From the first block on, what is loaded counts.
    twin.load_state_dict(state["model"])
    assert_same(masters_of(other, twin_optimizer), list(state["model"].values()))


@with_masters
def test_a_load_that_fails_leaves_masters_that_fit_the_model(session, trained):
    model, optimizer = trained
    before = model.state_dict()
    state = {name: torch.randn_like(v) for name, v in before.items()}
    with pytest.raises(RuntimeError, match="size mismatch for 0.bias"):
        model.load_state_dict({**state, "0.bias": torch.zeros(3)})
    # torch has copied what fits.
    assert_same(dict(model.state_dict()), {**state, "0.bias": before["0.bias"]})
    with pytest.raises(AmpError, match="assign=True"):
        model.load_state_dict(dict(before), assign=True)
    assert_same(dict(model.state_dict()), {**state, "0.bias": before["0.bias"]})

    def refuse(*args):
        raise ValueError("refused")

    handle = model[2].register_load_state_dict_pre_hook(refuse)
    with pytest.raises(ValueError, match="refused"):
        model.load_state_dict(before)
    handle.remove()
    rounded = [m.to(p.dtype) for m, p in zip(masters_of(session, optimizer), model.parameters(), strict=True)]
    assert_same(rounded, [p.detach() for p in model.parameters()])


@with_masters
def test_a_hook_of_the_program_may_rename_keys(session, trained):
    model, _ = trained
    before, values = model.state_dict(), torch.randn(8, 4)

    def rename(module, state, prefix, *_):
        if prefix + "kernel" in state:
            state[prefix + "weight"] = state.pop(prefix + "kernel")

    model[0].register_load_state_dict_pre_hook(rename)  # after those of amp
    model.load_state_dict({"0.kernel": values}, strict=False)
    assert_same(dict(model.state_dict()), {**before, "0.weight": values})


# --- other ways to keep and to load -----------------------------------------------------------------------------------


def by_safetensors(state, tmp_path):
    files = pytest.importorskip("safetensors.torch")
    files.save_file(state, tmp_path / "model.safetensors")
    return files.load_file(tmp_path / "model.safetensors")


def by_dcp(state, tmp_path):
    import torch.distributed.checkpoint as dcp

    content = {"model": {name: torch.zeros_like(v) for name, v in state.items()}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp")
        dcp.load(content, checkpoint_id=tmp_path / "dcp")
    return content["model"]


WAYS = {"torch.save": lambda state, _: through_a_file(state), "safetensors": by_safetensors, "dcp": by_dcp}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@with_masters
def test_every_way_to_keep_a_state_dict_keeps_the_masters(session, level, way, tmp_path):
    model, optimizer = started(session, level)
    train(session, model, optimizer, 3)
    state, masters = way(model.state_dict(), tmp_path), masters_of(session, optimizer)
    assert {v.dtype for v in state.values()} == {torch.float32}
    train(session, model, optimizer, 3)
    model.load_state_dict(state)
    assert_same(masters_of(session, optimizer), masters)
    plain = tower(seed=2)
    plain.load_state_dict(state)
    assert_same([p.detach() for p in plain.parameters()], masters)
    # The calls of DCP for models.
    train(session, model, optimizer, 3)
    assert_same(list(get_model_state_dict(model).values()), masters_of(session, optimizer))
    set_model_state_dict(model, state)
    assert_same(masters_of(session, optimizer), masters)


# --- what the user is told --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("model", "amp"), ("amp", "model")], ids="-".join)
@pytest.mark.parametrize("rounded", [False, True])
@with_masters
def test_lost_masters_are_told_of_and_others_are_not(session, trained, fresh, rounded, order, said):
    model, _ = trained
    other, twin, twin_optimizer = fresh
    state = {"model": model.state_dict(), "amp": session.state_dict()}
    if rounded:
        state["model"] = OrderedDict((n, p.detach().float()) for n, p in model.named_parameters())
    for name in order:
        {"model": twin, "amp": other}[name].load_state_dict(state[name])
    train(other, twin, twin_optimizer, 3)
    other.load_state_dict(other.state_dict())
    assert ["the checkpoint has no fp32 master weights" in message for message in said()] == [True] * rounded


def test_a_state_of_amp_alone_loses_nothing(session, caplog, said):
    model, optimizer = started(session, "O2")
    with caplog.at_level(logging.WARNING, "ampctx"):
        session.load_state_dict({"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 5}})
        train(session, model, optimizer, 3)
    assert not caplog.records
    assert said() == []


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_save_between_a_block_and_its_step_changes_nothing(session, level):
    found = []
    for saves in (True, False):
        model, optimizer = start_with(session, level, "FusedAdam")
        backward(session, loss_of(model), optimizer)
        if saves:
            model.state_dict(), optimizer.state_dict(), session.state_dict(masters=True)
        optimizer.step()
        found.append(snapshot(optimizer, model))
        session.reset()
    assert_same(*found)
