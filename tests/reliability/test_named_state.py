"""The state of a run by names of parameters, in one process: every optimizer and level resumes bit for bit, and what
does not fit is refused."""

import copy
import logging

import pytest
import torch
from resumed_runs import OPTIMIZERS
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from ampctx import AmpError, AmpKeyError, AmpSession, AmpTypeError, AmpValueError, amp
from ampctx.amp.named_entries import names_of
from ampctx.optimizers import FusedAdam
from ampctx.optimizers._state import divided, joined

KEPT_BY_OPTIMIZER = {"opt_level": "O5", "master_weights": False}


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))


def started(make, seed=0, model=None, **options):
    model = mlp(seed) if model is None else model
    optimizer = make(model.parameters())
    session = AmpSession()
    session.initialize(model, optimizer, **{"loss_scale": "dynamic", "verbosity": 0, **options})
    return session, model, optimizer


def train(session, model, optimizer, first, last):
    for step in range(first, last):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        with session.scale_loss(loss * float("inf") if step == 1 else loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def assert_same(a, b, where=""):
    """The same keys, values and bits."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    else:
        assert a == b, where


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_bit_for_bit(name, tmp_path):
    kept = name.removeprefix("FusedAdam-") in ("masters", "split", "kahan", "stochastic")
    options = KEPT_BY_OPTIMIZER if kept else {"opt_level": "O5"}
    first = started(OPTIMIZERS[name], **options)
    train(*first, 0, 3)
    torch.save(first[0].get_state_dict(*first[1:]), tmp_path / "state")
    train(*first, 3, 6)
    expected = first[0].get_state_dict(*first[1:])
    state = torch.load(tmp_path / "state", weights_only=True)
    before = copy.deepcopy(state)
    second = started(OPTIMIZERS[name], seed=1, **options)
    heard = []
    second[0].on_step(lambda *_: heard.append(1))
    second[0].set_state_dict(*second[1:], state)
    assert_same(second[0].get_state_dict(*second[1:]), before)
    assert heard == []
    train(*second, 3, 6)
    assert_same(second[0].get_state_dict(*second[1:]), expected)
    assert_same(state, before)  # the run has its own tensors


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4"])
def test_every_level_resumes_bit_for_bit(level):
    first = started(OPTIMIZERS["Adam-plain"], opt_level=level)
    train(*first, 0, 3)
    state = copy.deepcopy(first[0].get_state_dict(*first[1:]))
    train(*first, 3, 6)
    second = started(OPTIMIZERS["Adam-plain"], seed=1, opt_level=level)
    second[0].set_state_dict(*second[1:], state)
    train(*second, 3, 6)
    assert_same(second[0].get_state_dict(*second[1:]), first[0].get_state_dict(*first[1:]))


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
            back, rest = divided("kahan", total, dtype, compensation)
            assert torch.equal(back, p)
            assert rest is compensation


@pytest.mark.parametrize("destination", ["copy", "split", "kahan"])
def test_fp32_weights_are_divided_and_joined(destination):
    weight = torch.randn(1000) * 10 ** torch.linspace(-30, 30, 1000)
    p, extra = divided(destination, weight, torch.bfloat16)
    assert p.dtype == torch.bfloat16
    key = {"copy": "master_param", "split": "remainder", "kahan": "compensation"}[destination]
    found = joined(p, {key: extra})
    tolerance = 2.0**-16 if destination == "kahan" else 0
    assert ((found - weight).abs() <= tolerance * weight.abs()).all()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_names_are_those_of_torch():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.ModuleDict({"a": torch.compile(mlp()), "b": checkpoint_wrapper(mlp())})
    model["b"].tied = model["a"]._orig_mod[0].weight
    assert names_of(model).keys() == get_model_state_dict(model).keys() - {
        f"{part}.1.{name}" for part in "ab" for name in ("running_mean", "running_var", "num_batches_tracked")
    }


def test_tied_weights():
    def tied(seed):
        model = mlp(seed)
        model[3] = nn.Linear(7, 7)
        model.append(nn.Linear(7, 7))
        model[4].weight = model[3].weight
        return model

    options = {**KEPT_BY_OPTIMIZER}
    first = started(OPTIMIZERS["FusedAdam-split"], model=tied(0), **options)
    train(*first, 0, 3)
    state = first[0].get_state_dict(*first[1:])
    assert torch.equal(state["model"]["3.weight"], state["model"]["4.weight"])
    second = started(OPTIMIZERS["FusedAdam"], model=tied(1), opt_level="O5")
    second[0].set_state_dict(*second[1:], copy.deepcopy(state))
    assert_same(second[0].get_state_dict(*second[1:])["model"], state["model"])


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_a_group_has_twice():
    def twice(params):
        params = list(params)
        return FusedAdam([*params, params[0]], master_weights="split")

    first, second = started(twice, **KEPT_BY_OPTIMIZER), started(twice, seed=1, **KEPT_BY_OPTIMIZER)
    train(*first, 0, 3)
    state = copy.deepcopy(first[0].get_state_dict(*first[1:]))
    second[0].set_state_dict(*second[1:], state)
    assert_same(second[0].get_state_dict(*second[1:]), state)


def test_parameters_without_state_stay_so():
    """SGD starts a buffer from the first gradient, not from zeros."""

    def make(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)

    def gradients(session, model, optimizer, with_second):
        optimizer.zero_grad()
        loss = model[0](torch.ones(1, 5)).square().sum() + (model[3](torch.ones(1, 7)).sum() if with_second else 0)
        with session.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    first = started(make, opt_level="O1", loss_scale=1.0)
    gradients(*first, False)
    assert len(first[2].state) == 2
    state = copy.deepcopy(first[0].get_state_dict(*first[1:]))
    assert state["optimizers"]["0.weight"][0]["without_state"] == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert len(first[2].state) == 2
    gradients(*first, True)
    second = started(make, seed=1, opt_level="O1", loss_scale=1.0)
    second[0].set_state_dict(*second[1:], state)
    gradients(*second, True)
    assert_same(second[0].get_state_dict(*second[1:]), first[0].get_state_dict(*first[1:]))


@pytest.mark.parametrize("deferred", [False, True])
def test_an_overflow_that_is_to_skip_a_step_is_saved(deferred):
    first = started(OPTIMIZERS["FusedAdam"], opt_level="O2")
    train(*first, 0, 1)
    session, model, optimizer = first
    optimizer.zero_grad()
    loss = model(torch.ones(2, 5)).float().sum() * float("inf")
    with session.scale_loss(loss, optimizer, delay_overflow_check=deferred) as scaled:
        scaled.backward()
    state = copy.deepcopy(session.get_state_dict(model, optimizer))
    second = started(OPTIMIZERS["FusedAdam"], seed=1, opt_level="O2")
    second[0].set_state_dict(*second[1:], state)
    second[2].step()
    assert not second[0].outcome(second[2]).stepped
    optimizer.step()
    for each in (first, second):
        train(*each, 2, 4)
    assert_same(second[0].get_state_dict(*second[1:]), session.get_state_dict(model, optimizer))


class Gan:
    """Two models, optimizers and losses."""

    def __init__(self, seed=0):
        self.models = nn.ModuleDict({"g": mlp(seed), "d": mlp(seed + 10)})
        self.optimizers = [FusedAdam(self.models["g"].parameters()), torch.optim.Adam(self.models["d"].parameters())]
        self.session = AmpSession()
        models = list(self.models.values())
        self.session.initialize(models, self.optimizers, opt_level="O2", num_losses=2, verbosity=0)

    def train(self, first, last):
        for step in range(first, last):
            for i, (name, optimizer) in enumerate(zip("gd", self.optimizers, strict=True)):
                x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
                optimizer.zero_grad()
                loss = self.models[name](x).float().square().mean() * (float("inf") if step == i == 1 else 1)
                with self.session.scale_loss(loss, optimizer, loss_id=i) as scaled:
                    scaled.backward()
                optimizer.step()

    def state(self):
        return self.session.get_state_dict(self.models, self.optimizers)


def test_several_models_optimizers_and_losses():
    first, second = Gan(), Gan(1)
    first.train(0, 3)
    state = copy.deepcopy(first.state())
    assert [state["amp"][f"loss_scaler{i}"]["loss_scale"].item() for i in range(2)] == [2.0**16, 2.0**15]
    second.session.set_state_dict(second.models, second.optimizers[::-1], state)
    for each in (first, second):
        each.train(3, 6)
    assert_same(second.state(), first.state())


def test_an_optimizer_that_refuses_its_state_undoes_the_others():
    run = Gan()
    run.train(0, 3)
    state = copy.deepcopy(run.state())
    given = copy.deepcopy(state)
    given["optim"]["d.0.bias"]["exp_avg"] += 1
    given["optim"]["g.0.bias"]["exp_avg"][0] = torch.nan
    with pytest.raises(AmpValueError, match="has nan"):
        run.session.set_state_dict(run.models, run.optimizers[::-1], given)
    assert_same(run.state(), state)
    run.train(3, 4)


def test_groups_may_change_and_keep_their_options():
    def in_groups(sizes, rates):
        def make(params):
            params = list(params)
            groups = []
            for size, rate in zip(sizes, rates, strict=True):
                groups.append({"params": params[:size], "lr": rate})
                params = params[size:]
            return FusedAdam(groups)

        return make

    first = started(in_groups((2, 4), (0.1, 0.2)), opt_level="O1")
    train(*first, 0, 2)
    state = first[0].get_state_dict(*first[1:])
    second = started(in_groups((2, 2, 2), (0.0, 0.0, 0.0)), opt_level="O1")
    second[0].set_state_dict(*second[1:], copy.deepcopy(state))
    assert [group["lr"] for group in second[2].param_groups] == [0.1, 0.2, 0.2]
    assert_same(second[0].get_state_dict(*second[1:])["optim"], state["optim"])
    third = started(in_groups((4, 2), (0.0, 0.0)), opt_level="O1")
    with pytest.raises(AmpValueError, match=r"0\.weight and 1\.weight are in one param group here, and had lr=0\.1"):
        third[0].set_state_dict(*third[1:], state)


def test_a_rate_on_the_device_stays_the_same_tensor():
    first = started(lambda p: FusedAdam(p, lr=0.125), opt_level="O1")
    second = started(lambda p: FusedAdam(p, lr=0.5, capturable=True), opt_level="O1")
    rate = second[2].param_groups[0]["lr"]
    second[0].set_state_dict(*second[1:], first[0].get_state_dict(*first[1:]))
    assert second[2].param_groups[0]["lr"] is rate
    assert rate.item() == 0.125


def test_another_level_keeps_a_static_scale():
    first = started(OPTIMIZERS["FusedAdam"], opt_level="O2")
    train(*first, 0, 3)
    state = first[0].get_state_dict(*first[1:])
    for scale, expected in (("dynamic", 2.0**15), (8.0, 8.0)):
        second = started(OPTIMIZERS["FusedAdam"], opt_level="O5", loss_scale=scale)
        with pytest.raises(AmpValueError, match="allow_level_change=True"):
            second[0].set_state_dict(*second[1:], copy.deepcopy(state))
        second[0].set_state_dict(*second[1:], copy.deepcopy(state), allow_level_change=True)
        found = second[0].get_state_dict(*second[1:])
        assert found["amp"]["loss_scaler0"]["loss_scale"].item() == expected
        assert_same(found["model"], state["model"])


def test_rounding_is_said(caplog):
    first = started(OPTIMIZERS["FusedAdam"], opt_level="O5")
    train(*first, 0, 3)
    state = first[0].get_state_dict(*first[1:])
    for name in ("FusedAdam-kahan", "FusedAdam-stochastic"):
        second = started(OPTIMIZERS[name], seed=1, **KEPT_BY_OPTIMIZER)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ampctx"):
            second[0].set_state_dict(*second[1:], copy.deepcopy(state))
        assert "0.weight and others had more bits in the run that was saved (masters)" in caplog.text
        found = second[0].get_state_dict(*second[1:])["model"]["0.weight"].float()
        bits = 16 if name == "FusedAdam-kahan" else 8
        assert ((found - state["model"]["0.weight"]).abs() <= 2.0**-bits * found.abs()).all()


def test_a_disabled_run():
    first = started(OPTIMIZERS["Adam-plain"], enabled=False)
    train(*first, 0, 1)
    state = copy.deepcopy(first[0].get_state_dict(*first[1:]))
    assert state.keys() == {"model", "optim", "optimizers"}
    second = started(OPTIMIZERS["Adam-plain"], seed=1, enabled=False)
    second[0].set_state_dict(*second[1:], state)
    assert_same(second[0].get_state_dict(*second[1:]), state)


def test_looking_at_state_calls_no_hook_of_a_step():
    session, model, optimizer = started(OPTIMIZERS["Adam-plain"], opt_level="O1")
    heard = []
    optimizer.register_step_post_hook(lambda *_: heard.append(1))
    state = session.get_state_dict(model, optimizer, cpu_offload=True)
    assert state["optim"]["0.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert heard == []
    assert not optimizer.state


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s, m, o: AmpSession().get_state_dict(m, o), AmpError, "before amp.initialize"),
        (lambda s, m, o: s.get_state_dict([m], o), AmpTypeError, r"model must be .* nn\.ModuleDict"),
        (lambda s, m, o: s.get_state_dict(m[0], o), AmpError, "the model has no parameter 2 of FusedAdam"),
        (lambda s, m, o: s.get_state_dict(m, torch.optim.SGD(m.parameters())), AmpError, "did not go through"),
        (lambda s, m, o: s.get_state_dict(m, m), AmpTypeError, "optimizer"),
        (lambda s, m, o: s.set_state_dict(m, o, []), AmpTypeError, "state_dict must be a dict, got list"),
        (lambda s, m, o: s.set_state_dict(m, o, {}), AmpKeyError, "state_dict is empty on this rank"),
        (lambda s, m, o: s.set_state_dict(m, o, {"x": 1}), AmpKeyError, r'no "model", only x\. Pass what'),
    ],
)
def test_wrong_calls_name_what_is_wrong(call, error, message):
    run = started(OPTIMIZERS["FusedAdam"], opt_level="O2")
    with pytest.raises(error, match=message):
        call(*run)


def test_calls_inside_a_block_are_refused():
    session, model, optimizer = started(OPTIMIZERS["FusedAdam"], opt_level="O2")
    state = session.get_state_dict(model, optimizer)
    with session.scale_loss(model(torch.ones(2, 5)).float().sum(), optimizer):
        with pytest.raises(AmpError, match=r"amp\.get_state_dict was called inside a scale_loss block"):
            session.get_state_dict(model, optimizer)
        with pytest.raises(AmpError, match=r"amp\.set_state_dict was called inside a scale_loss block"):
            session.set_state_dict(model, optimizer, state)


def test_an_optimizer_that_needs_a_closure_is_refused_before_its_first_step():
    session, model, optimizer = started(torch.optim.LBFGS, opt_level="O1")
    with pytest.raises(AmpError, match=r"LBFGS does not show which state it keeps.*Take a step first"):
        session.get_state_dict(model, optimizer)


def test_an_optimizer_that_keeps_its_state_with_the_first_parameter():
    def stepped(seed):
        session, model, optimizer = started(torch.optim.LBFGS, seed, opt_level="O1", loss_scale=1.0)

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(4, 5)).float().square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        return session, model, optimizer

    session, model, optimizer = stepped(0)
    state = copy.deepcopy(session.get_state_dict(model, optimizer))
    assert list(state["optim"]) == ["0.weight"]
    other, other_model, other_optimizer = stepped(1)
    other.set_state_dict(other_model, other_optimizer, state)
    assert_same(other.get_state_dict(other_model, other_optimizer), state)


def test_sparse_gradients():
    def run(seed):
        torch.manual_seed(seed)
        return started(torch.optim.SparseAdam, model=nn.Embedding(4, 3, sparse=True), opt_level="O1")

    session, model, optimizer = run(0)
    with session.scale_loss(model(torch.tensor([1, 2])).square().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    state = copy.deepcopy(session.get_state_dict(model, optimizer))
    assert state["optim"]["weight"]["exp_avg"].any()
    other, other_model, other_optimizer = run(1)
    other.set_state_dict(other_model, other_optimizer, state)
    assert_same(other.get_state_dict(other_model, other_optimizer), state)


def test_state_of_no_parameter_is_refused():
    session, model, optimizer = started(torch.optim.SGD, opt_level="O1")
    optimizer.state["global"]["n"] = 1
    with pytest.raises(AmpError, match=r"SGD keeps state\['global'\], which belongs to no parameter"):
        session.get_state_dict(model, optimizer)


def test_the_default_session_has_them():
    assert amp.get_state_dict.__self__ is amp.Stateful.__self__ is amp.set_state_dict.__self__
