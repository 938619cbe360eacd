"""A damaged, foreign or mismatching checkpoint of a run is an error that names the entry, and changes nothing."""

import copy

import pytest
import torch
from kit import NAN, assert_same, backward, loss_of, mlp, start, train
from torch import nn

from ampctx import AmpError, AmpKeyError, AmpTypeError, AmpValueError
from ampctx.optimizers import FusedAdam


@pytest.fixture
def started(sessions):
    """Makes runs."""

    def started(level="O2", seed=0, make="FusedAdam"):
        session = sessions()
        return session, *start(session, level, make, mlp(seed), num_losses=2)

    return started


def block(run, seed=0, **kwargs):
    backward(run[0], loss_of(run[1], seed), run[2], **kwargs)


def go_on(run):
    train(*run)


def everything(run):
    session, model, optimizer = run
    return copy.deepcopy([dict(model.state_dict()), optimizer.state_dict(), session.state_dict(masters=True)])


def saved(run):
    """The state of a run with a delayed block open."""
    block(run, 7, delay_unscale=True)
    return copy.deepcopy(run[0].state_dict(masters=True))


def within(*path):
    """An edit of the entry that a path leads to: ``edit(parent, key)``."""

    def decorate(edit):
        def apply(state):
            parent = state
            for key in path[:-1]:
                parent = parent[key]
            edit(parent, path[-1])

        return apply

    return decorate


def put(value, *path):
    return within(*path)(lambda parent, key: parent.__setitem__(key, value))


def change(fn, *path):
    return within(*path)(lambda parent, key: parent.__setitem__(key, fn(parent[key])))


def drop(*path):
    return within(*path)(lambda parent, key: parent.pop(key))


FIRST = ("optimizers", 0)
SCALE = {"loss_scale": 2.0, "unskipped": 0}
DAMAGE = {
    "another level": (put("O5", "opt_level"), AmpValueError, r'"opt_level"\] is \'O5\', and .*opt_level=\'O2\''),
    "a later format": (put(2, "format"), AmpValueError, r'"format"\] is 2. This version .* up to 1, and .* what its'),
    "a later format's entry": (lambda s: s.update(format=2, shadow=1), AmpValueError, 'does not know "shadow"'),
    "format no int": (put("2", "format"), AmpTypeError, r'"format"\] must be a int, got str'),
    "no level": (drop("opt_level"), AmpKeyError, 'state_dict has no "opt_level"'),
    "nan scale": (put(NAN, "loss_scaler1", "loss_scale"), AmpValueError, "loss_scaler1.*loss_scale is nan"),
    "scale missing": (drop("loss_scaler1"), AmpValueError, "1 loss scales, and num_losses=2"),
    "a scale more": (put(SCALE, "loss_scaler2"), AmpValueError, "3 loss scales, and num_losses=2"),
    "foreign key": (put({}, "epoch"), AmpKeyError, 'state_dict has "epoch", which this version'),
    "optimizers missing": (drop("optimizers"), AmpKeyError, 'state_dict has no "optimizers"'),
    "no optimizer": (put([], "optimizers"), AmpValueError, r'"optimizers"\] has 0 entries, and 1 optimizers'),
    "optimizers no list": (put({}, "optimizers"), AmpTypeError, r'"optimizers"\] must be a list, got dict'),
    "optimizer no dict": (put(3, *FIRST), AmpTypeError, r'"optimizers"\]\[0\] must be a dict, got int'),
    "unknown entry": (put({}, *FIRST, "gradients"), AmpKeyError, r'\[0\] has "gradients", which this version'),
    "count": (put(5, *FIRST, "params"), AmpValueError, r'\["params"\] is 5, and the optimizer has 6 parameters'),
    "masters missing": (drop(*FIRST, "masters"), AmpKeyError, r'\["optimizers"\]\[0\] has no "masters"'),
    "master missing": (drop(*FIRST, "masters", 4), AmpKeyError, r'\["masters"\] has no 4.*shape \(2, 8\)'),
    "master of batch norm": (change(lambda m: {**m, 2: torch.ones(8)}, *FIRST, "masters"), AmpKeyError,
        r'\["masters"\] has 2, and that parameter of shape \(8,\) has none here'),
    "master out of range": (put(torch.ones(1), *FIRST, "masters", 9), AmpKeyError, r'\["masters"\] has 9.*0 to 5'),
    "master's shape": (put(torch.ones(8, 2), *FIRST, "masters", 4), AmpValueError,
        r'\["masters"\]\[4\] is of shape \(8, 2\).*expected \(2, 8\)'),
    "master's dtype": (change(torch.Tensor.half, *FIRST, "masters", 4), AmpValueError, r"torch.float16, expected"),
    "master no tensor": (put([1.0], *FIRST, "masters", 4), AmpTypeError, r'\["masters"\]\[4\] must be a Tensor'),
    "master on meta": (change(lambda m: m.to("meta"), *FIRST, "masters", 4), AmpValueError,
        r'\["masters"\]\[4\] is torch.strided on meta, expected a dense'),
    "master sparse": (change(torch.Tensor.to_sparse, *FIRST, "masters", 4), AmpValueError,
        r'\["masters"\]\[4\] is torch.sparse_coo on cpu, expected a dense'),
    "place no int": (change(lambda m: {True: m[1], **{i: t for i, t in m.items() if i != 1}}, *FIRST, "masters"),
        AmpKeyError, r'\["masters"\] has True'),
    "names no list": (put({}, *FIRST, "names"), AmpTypeError, r'\["names"\] must be a list, got dict'),
    "another name": (put("head.weight", *FIRST, "names", 4), AmpValueError,
        r'\["names"\]\[4\] is \'head.weight\', and that parameter is \'3.weight\' here'),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_state_names_the_entry_and_changes_nothing(started, name):
    edit, error, message = DAMAGE[name]
    source = started(seed=1)
    go_on(source)
    state = saved(source)
    run = started()
    go_on(run)
    block(run, 3, delay_unscale=True)
    before = everything(run)

    edit(state)
    with pytest.raises(error, match=message):
        run[0].load_state_dict(state)
    assert_same(everything(run), before)


@pytest.mark.parametrize("format", [1, None])
def test_the_state_that_is_damaged_above_loads(started, format):
    """States had no number before there was one."""
    source, run = started(seed=1), started()
    go_on(source)
    state = saved(source)
    assert state.pop("format") == 1
    run[0].load_state_dict(state if format is None else {**state, "format": format})


def two_networks(sessions, swapped, seed):
    """Of one shape: by shapes alone their masters can be taken for one another."""
    torch.manual_seed(seed)
    models = [nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]
    optimizers = [FusedAdam(m.parameters(), lr=0.01) for m in models]
    session = sessions()
    session.initialize(models, optimizers[::-1] if swapped else optimizers, opt_level="O2", verbosity=0)
    return session, models, optimizers


def test_optimizers_in_another_order(sessions):
    session, models, _ = two_networks(sessions, False, seed=1)
    other, *others = two_networks(sessions, True, seed=2)
    for model, source in zip(others[0], models, strict=True):
        model.load_state_dict(source.state_dict())
    before = copy.deepcopy([other.state_dict(masters=True), *(m.state_dict() for m in others[0])])
    with pytest.raises(AmpValueError, match=r"\[\"names\"\]\[0\] is 'models\[0\].0.weight', .* 'models\[1\].0.weight'"):
        other.load_state_dict(session.state_dict(masters=True))
    assert_same([other.state_dict(masters=True), *(m.state_dict() for m in others[0])], before)


def test_names_may_be_left_out_where_parameters_were_renamed(started):
    source, run = started(seed=1), started()
    go_on(source)
    state = saved(source)
    state["optimizers"][0]["names"][0] = "formerly.weight"
    with pytest.raises(AmpValueError, match=r'delete state_dict\["optimizers"\]\[0\]\["names"\]'):
        run[0].load_state_dict(state)
    del state["optimizers"][0]["names"]
    run[0].load_state_dict(state)
    assert_same(run[0].state_dict(masters=True)["optimizers"][0]["masters"], state["optimizers"][0]["masters"])


def test_a_parameter_of_no_model_has_no_name_that_could_be_wrong(sessions):
    """A model may be gone, or not have been given, in one of the runs."""
    runs = []
    for models in ([], None):
        torch.manual_seed(len(runs))
        model = nn.Linear(4, 4)
        optimizer = FusedAdam(model.half().parameters(), lr=0.01)
        session = sessions()
        session.allow_incoming_model_not_fp32 = True
        session.initialize(model if models is None else models, optimizer, opt_level="O2", verbosity=0)
        runs.append((session, model, optimizer))
    runs[1][0].load_state_dict(runs[0][0].state_dict(masters=True))
    assert torch.equal(runs[0][1].weight, runs[1][1].weight)


def test_saved_and_not_loaded_inside_a_block(started):
    session, model, optimizer = run = started()
    state = session.state_dict(masters=True)
    with session.scale_loss(model(torch.ones(4, 4)).sum(), optimizer) as scaled:
        assert_same(session.state_dict(masters=True), state)
        with pytest.raises(AmpError, match="load_state_dict was called inside a scale_loss block"):
            session.load_state_dict(state)
        assert set(session.state_dict()) == {"loss_scaler0", "loss_scaler1"}
        scaled.backward()
    go_on(run)


def test_gradients_that_are_not_saved_are_reported_and_dropped_by_loading(started, said):
    run = started()
    go_on(run)
    state = copy.deepcopy(run[0].state_dict(masters=True))
    assert said() == []
    block(run)
    run[0].state_dict(masters=True)
    assert "gradients that no step has used are not in the state" in said()[0]
    run[0].load_state_dict(state)
    assert all(p.grad is None for p in (*run[1].parameters(), *run[0].master_params(run[2])))
