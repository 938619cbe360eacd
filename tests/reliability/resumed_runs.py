"""Training runs that are saved in the middle and go on: in the process that saved, and in another one, a worker that
resumes every run that is saved in a folder and writes what came of it."""

import itertools
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from kit import OPTIMIZERS, backward, larc, start
from torch import nn

from ampctx import AmpSession

_ADAM = partial(OPTIMIZERS["FusedAdam"], weight_decay=0.1)
KINDS = {
    **OPTIMIZERS,
    "FusedAdam": _ADAM,
    "FusedNovoGrad": partial(OPTIMIZERS["FusedNovoGrad"], weight_decay=0.1),
    "LARC": larc,
    "AdamW-foreach": partial(OPTIMIZERS["AdamW-foreach"], amsgrad=True),
    "FusedAdam-stochastic": partial(_ADAM, write_back="stochastic", seed=3),
    "FusedAdam-kahan": partial(_ADAM, write_back="kahan"),
    "FusedAdam-masters": partial(_ADAM, master_weights=True),
    "FusedAdam-split": partial(_ADAM, master_weights="split"),
}
for _name in ("FusedMixedPrecisionLamb", "AdamW-fused", "Adagrad-fused", "Adam-foreach", "SGD-foreach", "Adagrad-plain",
              "Adagrad-foreach"):  # fmt: skip
    del KINDS[_name]  # the same classes once more
# Of kinds of steps for 16-bit parameters alone; "split" for bf16 ones.
BY_ITSELF = ("FusedAdam-masters", "FusedAdam-split", "FusedAdam-kahan", "FusedAdam-stochastic")
# torch's own fused SGD (2.13) steps fp16 parameters on the CPU from memory that nobody wrote: no two runs agree.
UNUSABLE = ("O3", "SGD-fused")
# Where in an iteration the run is saved.
MOMENTS = ("after the step", "after a skip", "before the first block")
ORDERS = tuple(itertools.permutations(("model", "optimizer", "amp")))
SAVED_AT, LOSSES = 6, 10
# The iteration whose gradients overflow, besides those of a moment.
OVERFLOWS_AT = SAVED_AT + 4


class Case(NamedTuple):
    """``masters``: amp's state has them, too. Without them a state is saved after a step."""

    level: str
    optimizer: str
    moment: str = "after the step"
    order: tuple[str, ...] = ORDERS[0]
    masters: bool = True

    def __str__(self) -> str:
        parts = [*self[:3], *self.order, *(["masters"] if self.masters else [])]
        return "-".join(parts).replace(" ", "_")


class Run:
    """One training run, saved before the iteration ``SAVED_AT``."""

    def __init__(self, case: Case, seed: int):
        self.case, self.session = case, AmpSession()
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))
        options = (
            {"cast_model_type": torch.bfloat16} if (case.optimizer, case.level) == ("FusedAdam-split", "O3") else {}
        )
        _, self.optimizer = start(self.session, case.level, KINDS[case.optimizer], self.model, num_losses=2, **options)

    def fresh(self):
        """A scale that is no power of two, and that is about to grow."""
        dynamic = self.case.level in ("O1", "O2")
        # times its reciprocal in fp32 it is not 1
        value = 1006.0 if dynamic or self.case.level == "O5" else 41.0
        entry = {"loss_scale": value, "unskipped": 2000 - SAVED_AT - 2}
        self.session.load_state_dict({"loss_scaler0": entry, "loss_scaler1": entry})
        return self

    def loss(self, step):
        # The CPU's alone: torch.manual_seed formats three stacks, to seed other devices later.
        torch.default_generator.manual_seed(100 * step + 2)
        loss = self.model(torch.randn(16, 4)).float().square().mean()
        overflows = step == OVERFLOWS_AT or (step == SAVED_AT - 1 and self.case.moment == "after a skip")
        return loss * torch.inf if overflows and self.dynamic else loss

    @property
    def dynamic(self):
        return self.case.level in ("O1", "O2")

    def finish(self, step):
        loss = self.loss(step)
        backward(self.session, loss, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def saved(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "amp": self.session.state_dict(masters=self.case.masters),
        }

    def load(self, content):
        parts = {"model": self.model, "optimizer": self.optimizer, "amp": self.session}
        for name in self.case.order:
            parts[name].load_state_dict(content[name])
        return self

    def until_saved(self):
        for step in range(SAVED_AT if self.case.moment != "before the first block" else 0):
            self.finish(step)
        return self

    def rest(self):
        """What comes after the save: losses, scales, every parameter, master, buffer and piece of state."""
        losses = [self.finish(step) for step in range(SAVED_AT, SAVED_AT + LOSSES)]
        weights = [*self.model.parameters(), *self.session.master_params(self.optimizer)]
        return {"losses": losses, **self.saved(), "weights": [p.detach().clone() for p in weights]}


def main(directory):
    cases = torch.load(directory / "cases", weights_only=False)
    for case in cases:
        # Built with other weights: all has to come from the checkpoint.
        run = Run(Case(*case), seed=1)
        run.load(torch.load(directory / f"{run.case}.pt", weights_only=True))
        torch.save(run.rest(), directory / f"resumed-{run.case}.pt")
        run.session.reset()
    print(len(cases))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
