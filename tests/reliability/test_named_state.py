"""The state of a run by names of parameters, in one process: every optimizer and level resumes bit for bit, and what
does not fit is refused."""

import copy
import logging
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kit import INF, assert_same, backward, batch, mlp, start, through_a_file, train
from optimizer_kinds import KINDS as TORCHS_AND_OURS
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from ampctx import AmpError, AmpKeyError, AmpSession, AmpTypeError, AmpValueError, AmpWarning
from ampctx.optimizers import FusedAdam, Offloaded, SplitMasters
from ampctx.weights.store import STORES, joined

KINDS = {**TORCHS_AND_OURS, "SplitMasters": partial(SplitMasters, torch.optim.NAdam, lr=0.01)}
KEPT_BY_OPTIMIZER = {"opt_level": "O5", "master_weights": False}


class Run:
    """A session, model and optimizer, and the state of these by names."""

    def __init__(self, make="FusedAdam", seed=0, model=None, opt_level="O5", **options):
        self.session = AmpSession()
        model = mlp(seed, 7, 5, 3) if model is None else model
        options = {"loss_scale": "dynamic", **options}
        self.model, self.optimizer = start(self.session, opt_level, KINDS.get(make, make), model, **options)

    def steps(self, first, last):
        train(self.session, self.model, self.optimizer, last - first, first, overflow_at=(1,))
        return self

    def backward(self, loss, **options):
        backward(self.session, loss, self.optimizer, **options)

    def get(self, **options):
        return copy.deepcopy(self.session.get_state_dict(self.model, self.optimizer, **options))

    def set(self, state, **options):
        self.session.set_state_dict(self.model, self.optimizer, copy.deepcopy(state), **options)
        return self


@pytest.mark.parametrize("name", KINDS)
def test_every_optimizer_resumes_bit_for_bit(name):
    kept = name.removeprefix("FusedAdam-") in ("masters", "split", "kahan", "stochastic", "SplitMasters")
    options = KEPT_BY_OPTIMIZER if kept else {}
    fresh, first = Run(name, **options), Run(name, **options).steps(0, 3)
    assert [s.keys() for s in fresh.get()["optim"].values()] == [s.keys() for s in first.get()["optim"].values()]
    assert first.get()["model"]["0.weight"].dtype == torch.float32
    state = through_a_file(first.get())
    before = copy.deepcopy(state)
    second, heard = Run(name, seed=1, **options), []
    second.session.on_step(lambda *_: heard.append(1))
    second.session.set_state_dict(second.model, second.optimizer, state)
    assert_same(second.get(), before)
    assert heard == []
    assert_same(second.steps(3, 6).get(), first.steps(3, 6).get())
    assert_same(state, before)  # the run has its own tensors


OFFLOAD = partial(Offloaded, FusedAdam, lr=0.01, master_weights="split")


@pytest.mark.parametrize(
    ("saves", "loads", "options"),
    [
        *(("Adam-plain", "Adam-plain", {"opt_level": level}) for level in ("O0", "O1", "O2", "O3", "O4")),
        ("FusedAdam-split", OFFLOAD, KEPT_BY_OPTIMIZER),
        (OFFLOAD, "FusedAdam-split", KEPT_BY_OPTIMIZER),
    ],
)
def test_every_level_and_place_of_state_resumes_bit_for_bit(saves, loads, options):
    first, second = Run(saves, **options).steps(0, 3), Run(loads, seed=1, **options)
    second.set(first.get())
    assert_same(second.steps(3, 6).get(), first.steps(3, 6).get())


def test_weights_and_compensations_come_back_from_their_sums():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        p = every.view(dtype)
        p = p[torch.isfinite(p)]
        unit = torch.nextafter(p.abs(), torch.full_like(p, torch.inf)).float() - p.abs().float()
        unit = torch.where(torch.isfinite(unit), unit, 0)
        # Up to half a unit, ties among them, and tiny ones.
        for factor in (0.5, -0.5, 2.0**-20, 0.0, None):
            some = torch.rand(p.shape, generator=generator) - 0.5 if factor is None else torch.full(p.shape, factor)
            compensation = (some * unit).to(dtype)
            total = joined(p, {"compensation": compensation})
            back, rest = STORES["kahan"].divided(total, dtype, compensation)
            assert torch.equal(back, p)
            assert rest is compensation


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_names_are_those_of_torch():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.ModuleDict({"a": torch.compile(mlp()), "b": checkpoint_wrapper(mlp())})
    model["b"].tied = model["a"]._orig_mod[0].weight
    run = Run("Adam-plain", model=model, opt_level="O1")
    assert run.get()["optim"].keys() == get_model_state_dict(model).keys() - {
        f"{part}.1.{name}" for part in "ab" for name in ("running_mean", "running_var", "num_batches_tracked")
    } - {"b.tied"}


def test_tied_weights():
    def tied(seed):
        model = mlp(seed, 7, 5, 3)
        model[3] = nn.Linear(7, 7)
        model.append(nn.Linear(7, 7))
        model[4].weight = model[3].weight
        return model

    state = Run("FusedAdam-split", model=tied(0), **KEPT_BY_OPTIMIZER).steps(0, 3).get()
    assert torch.equal(state["model"]["3.weight"], state["model"]["4.weight"])
    assert_same(Run(model=tied(1)).set(state).get()["model"], state["model"])


def test_parameters_without_state_stay_so():
    """SGD starts a buffer from the first gradient, not from zeros."""
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)

    def step(run, with_second):
        run.optimizer.zero_grad()
        loss = run.model[0](torch.ones(1, 5)).square().sum()
        run.backward(loss + (run.model[3](torch.ones(1, 7)).sum() if with_second else 0))
        run.optimizer.step()

    first, second = (Run(make, seed, opt_level="O1", loss_scale=1.0) for seed in range(2))
    step(first, False)
    assert len(first.optimizer.state) == 2
    state = first.get()
    assert state["optimizers"]["0.weight"][0]["without_state"] == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert len(first.optimizer.state) == 2
    second.set(state)
    for run in (first, second):
        step(run, True)
    assert_same(second.get(), first.get())


def test_a_state_inside_an_accumulation_is_that_of_the_step_before():
    first, second = Run(opt_level="O2").steps(0, 2), Run(seed=1, opt_level="O2")
    expected = first.get()
    first.model.eval()  # or the statistics of BatchNorm have moved
    first.backward(first.model(torch.ones(2, 5)).float().sum() * INF, delay_unscale=True)
    first.model.train()
    with pytest.warns(AmpWarning, match="gradients that no step has used are not in the state"):
        second.set(first.get())
    assert_same(second.get(), expected)
    first.optimizer.zero_grad()
    assert_same(second.steps(2, 4).get(), first.steps(2, 4).get())


class Gan:
    """Two models, optimizers and losses."""

    def __init__(self, seed=0, calls=1):
        self.models = nn.ModuleDict({"g": mlp(seed), "d": mlp(seed + 10)})
        self.optimizers = [FusedAdam(self.models["g"].parameters()), torch.optim.Adam(self.models["d"].parameters())]
        self.session = AmpSession()
        pairs = [*zip(self.models.values(), self.optimizers, strict=True)]
        for model, optimizer in pairs if calls == 2 else [[list(each) for each in zip(*pairs, strict=True)]]:
            self.session.initialize(model, optimizer, opt_level="O2", num_losses=2, verbosity=0)

    def steps(self, first, last):
        for step in range(first, last):
            for i, (name, optimizer) in enumerate(zip("gd", self.optimizers, strict=True)):
                optimizer.zero_grad()
                loss = self.models[name](batch(step)).float().square().mean() * (INF if 1 <= step <= 1 + i else 1)
                backward(self.session, loss, optimizer, loss_id=i)
                optimizer.step()
        return self

    def get(self):
        return copy.deepcopy(self.session.get_state_dict(self.models, self.optimizers))

    def set(self, state):
        self.session.set_state_dict(self.models, self.optimizers[::-1], copy.deepcopy(state))


def test_several_models_optimizers_and_losses():
    first, second = Gan().steps(0, 3), Gan(1)
    state = first.get()
    assert [state["amp"][f"loss_scaler{i}"]["loss_scale"].item() for i in range(2)] == [2.0**15, 2.0**14]
    second.set(state)
    assert_same(second.steps(3, 6).get(), first.steps(3, 6).get())


def test_the_losses_of_two_initialize_calls():
    first, second = Gan(calls=2).steps(0, 3), Gan(1, calls=2)
    state = through_a_file(first.session.state_dict(masters=True))
    assert set(state["optimizers"][0]["loss_scales"]) == {"loss_scaler0", "loss_scaler1"}
    assert "loss_scales" not in state["optimizers"][1]
    second.session.load_state_dict(state)
    assert_same(second.session.state_dict(masters=True), state)
    assert state["optimizers"][0]["loss_scales"]["loss_scaler0"]["loss_scale"] == 2.0**15


def test_an_optimizer_that_refuses_its_state_undoes_the_others():
    run = Gan().steps(0, 3)
    state, given = run.get(), run.get()
    given["optim"]["d.0.bias"]["exp_avg"] += 1
    given["optim"]["g.0.bias"]["exp_avg"][0] = torch.nan
    with pytest.raises(AmpValueError, match="has nan"):
        run.set(given)
    assert_same(run.get(), state)
    run.steps(3, 4)


def test_groups_may_change_and_keep_their_options():
    def in_groups(sizes, rates):
        def make(params):
            params, groups = list(params), []
            for size, rate in zip(sizes, rates, strict=True):
                groups.append({"params": params[:size], "lr": rate})
                params = params[size:]
            return FusedAdam(groups)

        return Run(make, opt_level="O1")

    state = in_groups((2, 4), (0.1, 0.2)).steps(0, 2).get()
    second = in_groups((2, 2, 2), (0.0, 0.0, 0.0)).set(state)
    assert [group["lr"] for group in second.optimizer.param_groups] == [0.1, 0.2, 0.2]
    assert_same(second.get()["optim"], state["optim"])
    with pytest.raises(AmpValueError, match=r"0\.weight and 1\.weight are in one param group here, and had lr=0\.1"):
        in_groups((4, 2), (0.0, 0.0)).set(state)


def test_a_rate_on_the_device_stays_the_same_tensor():
    first = Run(partial(FusedAdam, lr=0.125), opt_level="O1")
    second = Run(partial(FusedAdam, lr=0.5, capturable=True), opt_level="O1")
    rate = second.optimizer.param_groups[0]["lr"]
    second.set(first.get())
    assert second.optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.125


def test_another_level_keeps_a_static_scale():
    state = Run(opt_level="O2").steps(0, 3).get()
    for scale, expected in (("dynamic", 2.0**15), (8.0, 8.0)):
        second = Run(loss_scale=scale)
        with pytest.raises(AmpValueError, match="allow_level_change=True"):
            second.set(state)
        found = second.set(state, allow_level_change=True).get()
        assert found["amp"]["loss_scaler0"]["loss_scale"].item() == expected
        assert_same(found["model"], state["model"])


@pytest.mark.parametrize(("name", "bits"), [("FusedAdam-kahan", 16), ("FusedAdam-stochastic", 8)])
def test_rounding_is_said(name, bits, caplog):
    state = Run().steps(0, 3).get()
    with caplog.at_level(logging.WARNING, "ampctx"):
        second = Run(name, seed=1, **KEPT_BY_OPTIMIZER).set(state)
    assert "0.weight and others had more bits in the run that was saved (masters)" in caplog.text
    found = second.get()["model"]["0.weight"].float()
    assert ((found - state["model"]["0.weight"]).abs() <= 2.0**-bits * found.abs()).all()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize("fault", ["another level", "cut off"])
def test_a_load_that_fails_changes_nothing(tmp_path, fault):
    """torch.distributed.checkpoint reads into the tensors that it is given, and then anything may be wrong."""

    def part(run):
        return {"app": run.session.Stateful(run.model, run.optimizer)}

    dcp.save(part(Run().steps(0, 3)), checkpoint_id=tmp_path)
    run = Run(seed=1, opt_level="O2" if fault == "another level" else "O5").steps(0, 2)
    before = run.get()
    (file,) = tmp_path.glob("*.distcp")
    if fault == "cut off":
        file.write_bytes(file.read_bytes()[: file.stat().st_size * 3 // 4])
    with pytest.raises(AmpValueError if fault == "another level" else dcp.api.CheckpointException):
        dcp.load(part(run), checkpoint_id=tmp_path)
    assert_same(run.get(), before)


def test_a_later_format_and_an_unknown_entry_of_amp_are_refused_by_their_names():
    run = Run().steps(0, 1)
    state = run.get()
    facts = state["optimizers"]["0.weight"][0]
    assert facts.pop("format") == 1
    run.set(state)  # states had no number before there was one
    facts.update(format=2, shards=())
    with pytest.raises(AmpValueError, match=r'\["0\.weight"\]\[0\]\["format"\] is 2\. .* does not know "shards"'):
        run.set(state)
    before = run.get()
    for place, name, value, error, message in (
        (
            ("amp",),
            "shadow",
            1,
            AmpKeyError,
            r'state_dict\["amp"\] has "shadow", which this version of ampctx does not',
        ),
        ((), "shadow", {}, AmpKeyError, 'state_dict has "shadow"'),
        (("amp", "loss_scaler0"), "warmup", 3, AmpKeyError, 'has "warmup"'),
        (("amp",), "ampctx", "99.0", AmpValueError, r'\["ampctx"\] is .99.0., and this is ampctx'),
        (("optimizers", "0.weight", 0), "shards", (), AmpKeyError, r'\["0.weight"\]\[0\] has "shards"'),
        (("optimizers", "0.weight", 0, "layout"), "0.bias", "9bit", AmpValueError, r"\[\"0.bias\"\] is '9bit'"),
        (("optimizers", "0.weight", 0, "groups", 0), "write_back", "9bit", AmpTypeError, "write_back is an argument"),
    ):
        state = inside = copy.deepcopy(before)
        for key in place:
            inside = inside[key]
        inside[name] = value
        for other_level in (False, True):
            with pytest.raises(error, match=message):
                run.set(state, allow_level_change=other_level)
        assert_same(run.get(), before)


def test_a_disabled_run():
    state = Run("Adam-plain", enabled=False).steps(0, 1).get()
    assert state.keys() == {"model", "optim", "optimizers"}
    assert_same(Run("Adam-plain", seed=1, enabled=False).set(state).get(), state)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s, m, o: AmpSession().get_state_dict(m, o), AmpError, "before amp.initialize"),
        (lambda s, m, o: s.get_state_dict([m], o), AmpTypeError, r"model must be .* nn\.ModuleDict"),
        (lambda s, m, o: s.get_state_dict(m[0], o), AmpError, "the model has no parameter 2 of FusedAdam"),
        (lambda s, m, o: s.get_state_dict(m, torch.optim.SGD(m.parameters())), AmpError, "did not go through"),
        (lambda s, m, o: s.get_state_dict(m, m), AmpTypeError, "optimizer"),
        (lambda s, m, o: s.set_state_dict(m, o, []), AmpTypeError, "state_dict must be a dict, got list"),
        (lambda s, m, o: s.set_state_dict(m, o, {}), AmpKeyError, r'no "model", only nothing.*rank 0 alone has'),
        (lambda s, m, o: s.set_state_dict(m, o, {"x": 1}), AmpKeyError, r'no "model", only x\. Pass what'),
    ],
)
def test_wrong_calls_name_what_is_wrong(call, error, message):
    run = Run(opt_level="O2")
    with pytest.raises(error, match=message):
        call(run.session, run.model, run.optimizer)


def test_a_state_inside_a_block_is_that_of_the_step_before_and_none_is_loaded_there():
    run = Run(opt_level="O2").steps(0, 2)
    run.model.eval()  # or the statistics of BatchNorm have moved
    expected = run.get()
    with run.session.scale_loss(run.model(torch.ones(2, 5)).float().mean(), run.optimizer) as scaled:
        for _ in range(2):
            with pytest.warns(AmpWarning, match="gradients that no step has used are not in the state"):
                assert_same(run.get(), expected)
            with pytest.raises(AmpError, match=r"amp\.set_state_dict was called inside a scale_loss block"):
                run.set(expected)
            scaled.backward(retain_graph=True)
    run.optimizer.step()
    assert not run.session.outcome(run.optimizer).skipped


def test_an_optimizer_that_needs_a_closure_is_refused_before_its_first_step():
    """It keeps its state with the first parameter then."""

    def stepped(seed):
        run = Run(torch.optim.LBFGS, seed, opt_level="O1", loss_scale=1.0)
        with pytest.raises(AmpError, match=r"LBFGS does not show which state it keeps.*Take a step first"):
            run.get()

        def closure():
            run.optimizer.zero_grad()
            loss = run.model(torch.ones(4, 5)).float().square().mean()
            loss.backward()
            return loss

        run.optimizer.step(closure)
        return run

    state = stepped(0).get()
    assert list(state["optim"]) == ["0.weight"]
    assert_same(stepped(1).set(state).get(), state)


def test_state_of_no_parameter_is_refused():
    run = Run(torch.optim.SGD, opt_level="O1")
    run.optimizer.state["global"]["n"] = 1
    with pytest.raises(AmpError, match=r"SGD keeps state\['global'\], which belongs to no parameter"):
        run.get()
