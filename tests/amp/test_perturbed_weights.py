"""SAM by hand: between ``first_step`` and ``second_step`` the weights are perturbed, and nothing takes them for the
model's own. Sums that an exception has left half made are never stepped."""

import pytest
import torch
from host_reads import HostReads
from kit import SAM, backward, start
from torch import nn

from ampctx import AmpError


class Training:
    def __init__(self, session, level, scale=4.0):
        self.session = session
        self.model = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            self.model.weight.fill_(1.0)
        _, self.optimizer = start(session, level, SAM, self.model, loss_scale=scale)

    def backward(self, value=1.0):
        backward(self.session, self.loss(value), self.optimizer)

    def loss(self, value=1.0):
        return self.model(torch.ones(1, 4)).float().sum() * value

    def weights(self):
        (stepped,) = self.session.master_params(self.optimizer)
        assert torch.equal(stepped.to(self.model.weight.dtype), self.model.weight)
        return stepped.detach().unique().tolist()

    def climb(self):
        self.backward()
        self.optimizer.first_step(zero_grad=True)
        assert self.weights() == [1.5]

    def spoil(self, monkeypatch):
        """Leaves gradients of an exception that came while they were added up."""
        self.backward()
        self.interrupt(monkeypatch)

    def interrupt(self, monkeypatch):
        def interrupted(found_inf):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(self.session._bindings[self.optimizer].gradients, "commit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                self.backward()


@pytest.fixture(params=["O0", "O1", "O2", "O5"])
def training(request, session):
    return Training(session, request.param)


def test_reset_takes_the_weights_back(training):
    training.climb()
    training.session.reset()
    assert training.model.weight.detach().unique().tolist() == [1.0]
    assert training.model.weight.dtype == torch.float32


@pytest.mark.parametrize("grads", [False, True])
def test_perturbed_masters_are_not_saved(training, grads):
    training.climb()
    with pytest.raises(AmpError, match=r"between first_step\(\) and second_step\(\)\..*Save after second_step"):
        training.session.state_dict(masters=True, grads=grads)
    assert "loss_scaler0" in training.session.state_dict()  # apex's format, without weights
    training.backward()
    training.optimizer.second_step(zero_grad=True)
    assert training.weights() == [0.75]
    training.session.state_dict(masters=True, grads=grads)


def test_a_models_state_dict_shows_the_weights_that_are_there(training):
    training.climb()
    assert training.model.state_dict()["weight"].unique().tolist() == [1.5]
    training.backward(1.0 + 2.0**-7)
    training.optimizer.second_step(zero_grad=True)
    (stepped,) = training.session.master_params(training.optimizer)
    assert torch.equal(training.model.state_dict()["weight"], stepped)
    assert training.model.state_dict()["weight"].unique().tolist() == [0.75 - 2.0**-9]


def test_a_second_first_step_is_refused_and_nothing_is_lost(training):
    training.climb()
    training.backward()
    with pytest.raises(AmpError, match=r"first_step\(\) was called a second time.*optimizer.second_step\(\) first"):
        training.optimizer.first_step(zero_grad=True)
    assert training.weights() == [1.5]
    training.optimizer.second_step(zero_grad=True)
    assert training.weights() == [0.75]
    training.backward()
    training.optimizer.first_step(zero_grad=True)
    assert training.weights() == [1.25]


def test_second_step_without_gradients_only_takes_the_weights_back(training):
    """What the refusal of a second ``first_step`` advises."""
    training.climb()
    training.optimizer.zero_grad()
    training.optimizer.second_step()
    assert training.weights() == [1.0]


def test_a_first_step_that_was_skipped_may_be_followed_by_another(session):
    training = Training(session, "O2", "dynamic")
    training.backward(float("inf"))
    training.optimizer.first_step(zero_grad=True)
    assert training.weights() == [1.0]
    training.climb()


def test_reset_drops_sums_left_half_made(training, monkeypatch):
    training.spoil(monkeypatch)
    training.session.reset()
    assert training.model.weight.grad is None
    training.optimizer.step()
    assert training.model.weight.detach().unique().tolist() == [1.0]


def test_a_block_on_sums_left_half_made_is_refused_at_once(training, monkeypatch):
    training.spoil(monkeypatch)
    with pytest.raises(AmpError, match=r"amp.scale_loss was called after an exception.*optimizer.zero_grad\(\)"):
        training.backward()
    with pytest.raises(AmpError, match=r"optimizer.step\(\) was called after an exception"):
        training.optimizer.step()
    training.optimizer.zero_grad()
    training.backward(2.0)
    training.optimizer.step()
    assert training.weights() == [0.5]


def test_a_nested_block_goes_on_where_another_one_was_interrupted(training, monkeypatch):
    """The blocks that are open end as blocks do; the step then refuses."""
    with training.session.scale_loss(training.loss(), training.optimizer) as scaled:
        scaled.backward()
        training.interrupt(monkeypatch)
        training.backward()
    with pytest.raises(AmpError, match=r"optimizer.step\(\) was called after an exception"):
        training.optimizer.step()


def test_second_step_after_a_skipped_first_step_reads_nothing(session):
    training = Training(session, "O2", "dynamic")
    training.backward(float("inf"))
    training.optimizer.first_step(zero_grad=True)
    training.backward()
    with HostReads() as reads:
        training.optimizer.second_step(zero_grad=True)
    assert reads.count == 0
    assert training.weights() == [1.0]
    assert session.skipped_steps(training.optimizer) == 1
