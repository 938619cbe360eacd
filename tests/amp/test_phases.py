"""The table of phases is what the code does: a random walk of a user's calls goes by it, whatever comes after what."""

import random

import pytest
import torch
from ampctx.amp.phases import PERTURBED, READY, SKIPPED, TABLE, Mark, StackChange
from kit import SAM, Probe

from ampctx import AmpError, optimizers
from ampctx.amp import AmpSession
from ampctx.weights.frames import Phase

STEPS_OF_A_WALK = 150
WALKS = 7


MAKE = {
    "sgd": lambda params: torch.optim.SGD(params, lr=2.0**-12),
    "ampctx": lambda params: optimizers.FusedAdam(params, lr=2.0**-12),
    "sam": lambda params: SAM(params, lr=2.0**-12),
}


class Interrupted(Exception):
    pass


class Walk:
    """A model under amp, the calls of a user, and where the table says that they lead."""

    def __init__(self, seed, level, kind):
        self.rng = random.Random(seed)
        self.model = Probe()
        self.optimizer = MAKE[kind](self.model.parameters())
        self.session = AmpSession()
        self.session.initialize(
            self.model, self.optimizer, opt_level=level, loss_scale="dynamic", max_loss_scale=16.0, verbosity=0
        )
        self.binding = self.session._bindings[self.optimizer]
        self.blocks = []
        # What the table says.
        self.depth, self.window, self.step, self.incomplete = 0, False, READY, False
        self.visited = set()

    @property
    def gradients(self):
        return Phase.OPEN if self.depth else Phase.WINDOW if self.window else Phase.IDLE

    # --- calls --------------------------------------------------------------------------------------------------------

    def enter(self):
        block = self.session.scale_loss(
            self.model.loss(self.rng.choice([1.0, 1.0, float("inf")])),
            self.optimizer,
            delay_unscale=self.rng.random() < 0.4,
            delay_overflow_check=self.rng.random() < 0.1,
        )
        scaled = block.__enter__()
        self.blocks.append((block, self.delays(block)))
        if self.rng.random() < 0.8:
            scaled.backward()

    @staticmethod
    def delays(block):
        return block.gen.gi_frame.f_locals["delay_unscale"]

    def exit(self):
        self.blocks.pop()[0].__exit__(None, None, None)

    def exit_raised(self):
        assert not self.blocks.pop()[0].__exit__(Interrupted, Interrupted(), None)

    def exit_interrupted(self):
        """An exception in the middle of what the end of a block assigns."""
        gradients = self.binding.gradients
        block, _ = self.blocks.pop()

        def interrupt(*args):
            raise Interrupted

        gradients._apply = interrupt
        try:
            with pytest.raises(Interrupted):
                block.__exit__(None, None, None)
        finally:
            del gradients._apply

    def save(self):
        self.saved = self.session.state_dict(masters=True)

    def load(self):
        self.session.load_state_dict(self.saved)

    def call(self, event):
        if event in ("step", "first_step", "second_step"):
            getattr(self.optimizer, event)()
        elif event == "zero_grad":
            self.optimizer.zero_grad()
        elif event == "master_params":
            list(self.session.master_params(self.optimizer))
        elif event == "add_param_group":
            self.__dict__.pop("saved", None)  # which does not fit any more
            self.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
        else:
            getattr(self, event.replace(" ", "_"))()

    # --- the walk -----------------------------------------------------------------------------------------------------

    def choose(self):
        events = ["enter"] * 6 + ["exit"] * 6 + ["exit raised", "exit interrupted", "step", "step", "zero_grad"]
        events += ["master_params", "save"]
        events += ["add_param_group"] if self.rng.random() < 0.1 else []
        events += ["load"] if hasattr(self, "saved") else []
        events += ["first_step", "second_step"] * 2 if hasattr(self.optimizer, "first_step") else []
        return self.rng.choice([e for e in events if self.blocks or not e.startswith("exit")])

    def go(self):
        event = self.choose()
        row_name = event
        if event == "enter" and self.depth:
            row_name = "enter nested"
        if event == "exit" and self.blocks[-1][1] and self.depth == 1:
            row_name = "exit delayed"
        if event == "exit interrupted" and self.blocks[-1][1] and self.depth == 1:
            event = row_name = "exit raised"  # what a delayed block leaves needs no sums
        row = TABLE[row_name]
        refused = (
            self.gradients not in row.gradients
            or self.step not in row.steps
            or (self.incomplete and row.incomplete is Mark.REFUSED)
        )
        before = self.everything()
        try:
            self.call(event)
        except AmpError:
            assert refused, f"{event} was refused in {self.gradients}, {self.step}, incomplete={self.incomplete}"
            assert self.everything() == before
        else:
            assert not refused, f"{event} was taken in {self.gradients}, {self.step}, incomplete={self.incomplete}"
            if event == "first_step" and self.binding.phase is SKIPPED:
                row = TABLE["first_step skipped"]
                assert self.session.outcome(self.optimizer).skipped
            self.follow(row, event)
        self.check(event)

    def follow(self, row, event):
        self.step = row.steps[self.step]
        if row.blocks is StackChange.PUSH:
            self.depth += 1
        elif row.blocks is StackChange.POP:
            self.depth -= 1
            self.window &= self.depth > 0
        elif row.blocks is StackChange.DELAY:
            self.depth, self.window = 0, True
        elif row.blocks is StackChange.UNDO:
            self.depth -= 1
        elif row.blocks is StackChange.CLEAR:
            self.window = False
        if row.incomplete in (Mark.ENDS, Mark.BEGINS):
            self.incomplete = row.incomplete is Mark.BEGINS

    def everything(self):
        gradients = self.binding.gradients
        return gradients.phase, gradients.depth, gradients.window, self.binding.phase, gradients.incomplete

    def check(self, event):
        gradients = self.binding.gradients
        at = f"after {event}"
        assert gradients.depth == self.depth == len(self.blocks), at
        assert (gradients.window is not None) == self.window, at
        assert gradients.phase is self.gradients, at
        assert self.binding.phase is self.step, at
        assert gradients.incomplete == self.incomplete, at
        assert (self.binding.restore_unperturbed is not None) == (self.step is PERTURBED), at
        for p, master in self.binding.masters.pairs:
            assert torch.equal(master.to(p.dtype), p), at
        self.visited.add((self.gradients, self.step, self.incomplete))


def walks(level, kind, numbers):
    for number in numbers:
        walk = Walk(number, level, kind)
        for _ in range(STEPS_OF_A_WALK):
            walk.go()
        yield walk
        while walk.blocks:
            walk.exit_raised()
        walk.session.reset()


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_random_walk_goes_by_the_table(level, kind):
    visited = set()
    for walk in walks(level, kind, range(WALKS)):
        visited |= walk.visited
    steps = (READY, PERTURBED, SKIPPED) if kind == "sam" else (READY,)
    assert visited >= {(gradients, step, False) for gradients in Phase for step in steps}
    assert visited >= {(gradients, READY, True) for gradients in (Phase.IDLE, Phase.OPEN)}
