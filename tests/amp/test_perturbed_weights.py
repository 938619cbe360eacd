"""SAM by hand: between ``first_step`` and ``second_step`` the weights are perturbed, and nothing takes them for the
model's own. Sums that an exception has left half made are never stepped."""

import re

import pytest
import torch
from faults import Fault, fault_at_line, lines_of, refusal
from host_reads import HostReads
from kit import SAM, backward, levels_by_default, start
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


@pytest.fixture(params=["O0", "O1", "O2", "O5"])
def training(request, session):
    return Training(session, request.param)


def test_reset_takes_the_weights_back(training):
    training.climb()
    training.session.reset()
    assert training.model.weight.detach().unique().tolist() == [1.0]
    assert training.model.weight.dtype == torch.float32


def test_perturbed_masters_are_not_saved(training):
    training.climb()
    with pytest.raises(AmpError, match=r"between first_step\(\) and second_step\(\)\..*Save after second_step"):
        training.session.state_dict(masters=True)
    assert "loss_scaler0" in training.session.state_dict()  # apex's format, without weights
    training.backward()
    training.optimizer.second_step(zero_grad=True)
    assert training.weights() == [0.75]
    training.session.state_dict(masters=True)


def half_made(session, level):
    """Trainings with a gradient of 1 whose next block an exception has ended, at each third of its lines in turn."""
    training = Training(session, level)
    training.backward()
    places = lines_of(training.backward)
    session.reset()
    assert len(places) > 30
    for place in places[::3]:
        training = Training(session, level)
        training.backward()
        with pytest.raises(Fault), fault_at_line(place):
            training.backward()
        yield training
        session.reset()


def step(training):
    training.optimizer.step()


def block_and_step(training):
    training.backward()
    step(training)


def nested_block_and_step(training):
    """The block that is open ends as blocks do; the step then refuses."""
    with training.session.scale_loss(training.loss(0.0), training.optimizer) as scaled:
        scaled.backward()
        training.backward()
    step(training)


REFUSED = r"(amp.scale_loss|step\(\)) was called after an exception.*optimizer.zero_grad\(\)"


@pytest.mark.parametrize("comes", [step, block_and_step, nested_block_and_step])
@levels_by_default("O1", "O2", of=("O0", "O1", "O2", "O5"))
def test_sums_left_half_made_are_refused_and_others_are_whole(session, level, comes):
    """Without the interrupted block or with it; a refusal names the way out, which works."""
    found = set()
    for training in half_made(session, level):
        if message := refusal(comes, training):
            assert re.search(REFUSED, message)
            assert training.weights() == [1.0]
            training.optimizer.zero_grad()
            training.backward(2.0)
            training.optimizer.step()
            assert training.weights() == [0.5]
        else:
            found.update(training.weights())
    assert found <= ({0.75, 0.5} if comes is step else {0.5, 0.25})
    assert found


@levels_by_default("O1", "O2", of=("O0", "O1", "O2", "O5"))
def test_reset_drops_sums_left_half_made(session, level):
    for training in half_made(session, level):
        session.reset()
        training.optimizer.step()
        assert set(training.model.weight.flatten().tolist()) in ({1.0}, {0.75}, {0.5})


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
