"""A run of several optimizers, losses and initialize calls resumes bit for bit, and so does one with a history."""

import copy

import pytest
import torch
from faults import Fault, fault_at_line, lines_of
from kit import assert_same, backward, batch, every_level, mlp, start, through_a_file

from ampctx import AmpSession, clip_grad_norm_
from ampctx.optimizers import FusedAdam


class Pair:
    """Two models with an optimizer each, given to one initialize call, or to one after the other."""

    def __init__(self, level, calls, seed):
        self.session = AmpSession()
        self.dynamic = level in ("O1", "O2")
        self.models = [mlp(seed, outputs=4), mlp(seed + 1, outputs=4)]
        self.optimizers = [
            FusedAdam(self.models[0].parameters(), lr=0.01),
            torch.optim.SGD(self.models[1].parameters(), lr=0.05, momentum=0.9),
        ]
        options = {"opt_level": level, "verbosity": 0, "num_losses": 2}
        if calls == "one":
            self.session.initialize(self.models, self.optimizers, **options)
            scales = [*self.session.loss_scales]
        else:
            scales = []
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                self.session.initialize(model, optimizer, **options)
                scales += self.session.loss_scales
        # Times their reciprocals in fp32 they are not 1.
        for i, scale in enumerate(scales):
            scale.set((1006.0, 1011.0, 996.0, 994.0)[i] if self.dynamic else (41.0, 47.0, 55.0, 61.0)[i])

    def loss(self, step, i, factor=1.0):
        return self.models[i](self.models[1 - i](batch(step)).detach()).float().square().mean() * factor

    def begin(self, step):
        """Blocks of either optimizer and of both, one with an overflow whose scale update is left to a later one."""
        overflows = torch.inf if self.dynamic and step in (2, 5) else 1.0
        for loss_id, optimizers, options in (
            (0, self.optimizers[0], {"delay_overflow_check": True}),
            (1, self.optimizers[1], {}),
        ):
            factor = overflows if loss_id == 0 else 1.0
            backward(self.session, self.loss(step, loss_id, factor), optimizers, loss_id=loss_id, **options)
        self.optimizers[1].step()
        backward(self.session, self.loss(step + 50, 1), self.optimizers[1], delay_unscale=True)

    def finish(self, step):
        loss = self.loss(step, 1)
        backward(self.session, loss, self.optimizers[1], loss_id=0)
        if step % 2:  # else the gradients of its first block wait in 16 bits for the clip and the step
            backward(self.session, self.loss(step + 70, 0), self.optimizers[0], loss_id=0)
        for optimizer in self.optimizers:
            clip_grad_norm_(self.session.master_params(optimizer), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    def saved(self):
        return {
            "models": [m.state_dict() for m in self.models],
            "optimizers": [o.state_dict() for o in self.optimizers],
            "amp": self.session.state_dict(masters=True),
        }

    def load(self, content):
        self.session.load_state_dict(content["amp"])
        for kind in ("optimizers", "models"):
            for target, state in zip(getattr(self, kind), content[kind], strict=True):
                target.load_state_dict(state)

    def rest(self, saves=False):
        """``saves``: between the blocks, too, which changes nothing."""
        losses = []
        for step in range(2, 9):
            self.begin(step)
            if saves:
                self.saved()
            losses.append(self.finish(step))
        return copy.deepcopy({"losses": losses, **self.saved()})


@pytest.mark.parametrize("calls", ["one", "two"])
@every_level
def test_two_optimizers_after_their_steps(level, calls):
    run = Pair(level, calls, seed=0)
    for step in range(2):
        run.begin(step)
        run.finish(step)
    content = through_a_file(run.saved())
    went_on = run.rest()
    run.begin(5)  # leaves gradients, a window and, where scales move, a flag and an update behind
    resumed = Pair(level, calls, seed=5)
    for back in (run, resumed):
        back.load(copy.deepcopy(content))
        assert_same(back.rest(saves=back is run), went_on)
        back.session.reset()
    if calls == "two":
        assert set(content["amp"]["optimizers"][0]["loss_scales"]) == {"loss_scaler0", "loss_scaler1"}
        assert "loss_scales" not in content["amp"]["optimizers"][1]


def started_with_two_losses(make="SGD-plain"):
    session = AmpSession()
    return session, *start(session, "O1", make, num_losses=2)


def block_of(run, loss_id, factor=1.0):
    backward(run[0], run[1](torch.ones(4, 4)).sum() * factor, run[2], loss_id=loss_id)


def test_loading_ends_what_an_interrupted_block_has_left_incomplete():
    def made():
        run = started_with_two_losses()
        run[0].loss_scales[0].set(64.0)
        return run

    run = made()
    state = through_a_file(run[0].state_dict(masters=True))
    places = lines_of(lambda: block_of(run, 0))
    run[0].reset()
    for place in places[::10]:
        run = made()
        with pytest.raises(Fault), fault_at_line(place):
            block_of(run, 0)
        run[0].load_state_dict(state)
        block_of(run, 0)
        run[2].step()
        assert run[0].outcome(run[2]).stepped
        run[0].reset()
