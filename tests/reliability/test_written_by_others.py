"""Masters and weights that other code than the step writes: schedules that swap weights, averages, edits, loads."""

import copy
import pickle

import pytest
import torch
from kit import LOW, assert_same, loss_of, params_of, start, train
from torch import Tensor

LEVELS_WITH_MASTERS = [level for level in LOW if level != "O3"]
by_level = pytest.mark.parametrize("level", LEVELS_WITH_MASTERS)
by_optimizer = pytest.mark.parametrize("name", ["SGD-plain", "FusedAdam"])


def assert_rounded(model, optimizer):
    for p, master in zip(model.parameters(), params_of(optimizer), strict=True):
        assert torch.equal(p, master.to(p.dtype))


class Averaging(torch.optim.SGD):
    """``eval`` swaps other weights in, as schedule-free optimizers do, and ``train`` the former ones."""

    @torch.no_grad()
    def eval(self):
        self.former = [p.clone() for p in params_of(self)]
        for p in params_of(self):
            p.data.mul_(0.5)

    @torch.no_grad()
    def train(self):
        for p, former in zip(params_of(self), self.former, strict=True):
            p.data.copy_(former)


@by_level
@pytest.mark.parametrize("by_eval", [True, False])
def test_written_masters_are_the_weights_without_a_forward_of_the_model(session, level, by_eval):
    """Of eval(), or of a loop. A part of the model may be called alone, or a method; or the weights are read."""
    model, optimizer = start(session, level, lambda params: Averaging(params, lr=0.1), loss_scale=64.0)
    train(session, model, optimizer, 2)
    x, masters = torch.ones(2, 4, dtype=model[0].weight.dtype), [p.detach().clone() for p in params_of(optimizer)]
    before, halved = model[0](x), [p.detach() * 0.5 for p in model.parameters()]
    optimizer.eval() if by_eval else [p.detach().mul_(0.5) for p in session.master_params(optimizer)]
    assert_rounded(model, optimizer)
    assert_same([p.detach() for p in model.parameters()], halved)
    assert torch.equal(model[0](x), before / 2)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same([p.detach() for p in twin.parameters()], halved)
    if by_eval:
        model(torch.ones(2, 4))
        optimizer.train()
        assert torch.equal(model[0](x), before)
        assert_same([p.detach() for p in params_of(optimizer)], masters)


def exchanged(p, value):
    p.data = value.to(p.dtype)


@by_level
@by_optimizer
@pytest.mark.parametrize(
    ("keep", "put"), [(Tensor.clone, Tensor.copy_), (lambda p: p.data, exchanged)], ids=["copy", "data"]
)
def test_an_average_in_the_model_during_a_validation_leaves_masters_alone(session, level, name, keep, put):
    model, optimizer = start(session, level, name, loss_scale=64.0)
    train(session, model, optimizer, 3)
    masters = [master.detach().clone() for master in params_of(optimizer)]
    params = list(model.parameters())
    average = [master.detach() * 0.9 for master in params_of(optimizer)]
    with torch.no_grad():
        trained = [keep(p) for p in params]
        list(map(put, params, average))
        model(torch.ones(4, 4))
        shown = [value.to(p.dtype).float() for value, p in zip(average, params, strict=True)]
        for state in (model.state_dict(), session.master_state_dict(model)):
            assert_same([state[n].float() for n, _ in model.named_parameters()], shown)
        saved = session.state_dict(masters=True)["optimizers"][0]["masters"]
        assert all(torch.equal(value, shown[i]) for i, value in saved.items())
        list(map(put, params, trained))
    with session.scale_loss(loss_of(model), optimizer):
        assert_same([master.detach() for master in params_of(optimizer)], masters)
    with torch.no_grad():
        list(map(put, params, average))  # to stay: the next block or step takes it
    assert_same([master.detach() for master in session.master_params(optimizer)], shown)


@by_level
@by_optimizer
@pytest.mark.parametrize(("after", "steps"), [(1, 101), (99, 1)])
def test_a_write_through_data_is_told_once_by_name(session, level, name, after, steps, said):
    model, optimizer = start(session, level, name, loss_scale=64.0, verbosity=1)
    train(session, model, optimizer, after)
    with torch.no_grad():
        model[3].weight.mul_(1.5)  # seen by its version
    session.master_params(optimizer)
    assert said() == []
    model[3].weight.data.mul_(2)
    train(session, model, optimizer, steps)
    (told,) = said()
    assert '"3.weight" was written through .data' in told
