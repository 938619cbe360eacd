"""Trains under amp for long while everything goes wrong at random, beside plain fp32 training of the same clean steps.

    python tests/reliability/soak.py --iterations 10000 --seed 0

Runs follow one another, each with a level, an optimizer and a number of losses of its own. Gradients are multiples of
a power of two, so that scaling, accumulation and masters are exact: after every step the weights that are stepped
equal those of the reference bit for bit, and so do skip decisions and the scale. Faults: inf and nan in a gradient,
exceptions in blocks and in steps, the same inside closures, parameters without gradients, steps without any, freezing,
new groups, weights loaded, and a checkpoint, after a step or between blocks, from which a fresh process goes on that is
killed in the middle of a block, and another one from the checkpoint that the first wrote last. Prints what was done;
exits with 1 on any discrepancy.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import figures
import torch
from torch import nn

from ampctx import optimizers
from ampctx.amp import AmpSession

LOW = {"O2": torch.float16, "O5": torch.bfloat16}
INTERVAL = 2000
KINDS = {
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.5, foreach=True),
    "SGD plain": lambda p: torch.optim.SGD(p, lr=0.125, foreach=False),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.125, fused=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.0625, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.0625, fused=True),
    "FusedSGD": lambda p: optimizers.FusedSGD(p, lr=0.125, momentum=0.5, set_grad_none=True),
    "FusedAdam": lambda p: optimizers.FusedAdam(p, lr=0.0625),
}


class Discrepancy(Exception):
    """What amp did is not what plain training did."""


class Weights(nn.Module):
    """The gradient of an element is the factor that the loss has for its weight."""

    def __init__(self, names):
        super().__init__()
        self.weights = nn.ParameterDict({name: nn.Parameter(start(name)) for name in names})

    def loss(self, factors):
        return sum((self.weights[name].float() * factor).sum() for name, factor in factors.items())


def start(name):
    return torch.linspace(-1.0, 1.0, 5) + len(name)


class Block(NamedTuple):
    """What a block of an iteration is to do: the factors of its loss, and what to write into whose gradient."""

    factors: dict
    poison: dict
    loss_id: int
    delay: bool = False


class Run:
    """One training under amp and its reference. ``plan`` is all that it is made from."""

    def __init__(self, plan):
        self.plan = plan
        names = ["a", "b", "c", *plan["joined"]]
        self.plain, self.model = Weights(names), Weights(names)
        make = KINDS[plan["optimizer"]]
        groups = [["a", "b", "c"], *([name] for name in plan["joined"])]

        def of(model):
            return make([{"params": [model.weights[name] for name in group]} for group in groups])

        self.reference, self.optimizer = of(self.plain), of(self.model)
        self.session = AmpSession()
        self.session.initialize(
            self.model,
            self.optimizer,
            opt_level=plan["level"],
            loss_scale="dynamic",
            num_losses=plan["losses"],
            max_loss_scale=plan["max_scale"],
            verbosity=0,
        )
        self.joined = list(plan["joined"])
        # The rule of the scale, on the host: its value and how many clean updates there were in a row.
        self.scales = [[min(2.0**16, plan["max_scale"]), 0] for _ in range(plan["losses"])]
        self.skipped = 0
        self.begun = []  # factors of the blocks that the next step ends
        self.dies = False  # at the next backward

    # --- one iteration ------------------------------------------------------------------------------------------------

    def factors(self, rng):
        """Multiples of 1/8 up to 1 for some of the parameters that train."""
        names = [name for name, p in self.plain.weights.items() if p.requires_grad]
        return {name: rng.randint(-8, 8) / 8 for name in names if rng.random() < 0.8}

    def block(self, block, fail=None):
        """A block of amp."""
        loss = self.total(self.model, block.factors)
        with self.session.scale_loss(loss, self.optimizer, block.loss_id, None, block.delay) as scaled:
            if fail == "before":
                raise ConnectionError(fail)
            if scaled.requires_grad:
                scaled.backward()
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            for name, value in block.poison.items():
                grad = self.model.weights[name].grad
                if grad is not None:
                    grad[1] = value
            if fail == "after":
                raise ConnectionError(fail)
        if not block.delay:
            self.update_scale(block.loss_id, bool(block.poison))

    @staticmethod
    def total(model, factors):
        return model.loss(factors) if factors else torch.zeros(())

    def update_scale(self, loss_id, overflow):
        scale = self.scales[loss_id]
        if overflow:
            scale[0], scale[1] = scale[0] / 2, 0
        else:
            scale[1] += 1
            if scale[1] == INTERVAL:
                scale[0], scale[1] = min(scale[0] * 2, self.plan["max_scale"]), 0

    def draw(self, rng, faults):
        """The blocks of an iteration; a gradient overflows in the last one."""
        count, delayed = rng.randint(1, 3), rng.random() < 0.25
        loss_id, blocks = rng.randrange(self.plan["losses"]), []
        for i in range(count):
            if not delayed:
                loss_id = rng.randrange(self.plan["losses"])
            factors, poison, last = {} if faults["no gradients"] else self.factors(rng), {}, i == count - 1
            if last and faults["overflow"] and factors:
                poison = {rng.choice(sorted(factors)): rng.choice([float("inf"), float("-inf"), float("nan")])}
            blocks.append(Block(factors, poison, loss_id, delayed and not last))
        return blocks

    def iterate(self, rng, faults):
        """Some blocks and a step, or a step whose closure makes the blocks. Returns whether the step was skipped."""
        blocks = self.draw(rng, faults)
        overflow = any(block.poison for block in blocks)
        if faults["closure"]:
            before = self.values()
            if faults["exception"]:
                self.fail(rng, lambda fail: self.optimizer.step(self.closure(blocks, fail)))
            self.step(faults, self.closure(blocks))
        else:
            if faults["exception"]:
                self.fail(rng, lambda fail: self.block(blocks[0], fail))
            for block in blocks:
                self.block(block)
            before = self.values() if overflow else None
            self.step(faults)
        clean, self.begun = [*self.begun, *(block.factors for block in blocks)], []
        if overflow:
            self.skipped += 1
            self.equal("state after a skip", before, self.values())
        else:
            for factors in clean:
                if factors:
                    self.plain.loss(factors).backward()
            self.reference.step()
        self.reference.zero_grad()
        self.optimizer.zero_grad()
        return overflow

    def closure(self, blocks, fail=None):
        def evaluate():
            self.optimizer.zero_grad()
            for block in blocks:
                self.block(block, fail)
            return torch.zeros(())

        return evaluate

    def fail(self, rng, work):
        before = self.values()
        try:
            work(rng.choice(["before", "after"]))
        except ConnectionError:
            pass  # raised for this
        else:
            raise Discrepancy("an exception did not leave its block")
        self.equal("state after an exception", before, self.values())

    def step(self, faults, *closure):
        if not faults["exception in step"]:
            self.optimizer.step(*closure)
            return
        # A hook of the user's that fails: the step has not begun, and is taken again.
        before = self.values()

        def refuse(*_):
            raise ConnectionError("hook")

        handle = self.optimizer.register_step_pre_hook(refuse)
        try:
            self.optimizer.step(*closure)  # the hook is not asked about a step that is skipped before it
        except ConnectionError:
            handle.remove()
            self.equal("state after an exception in step", before, self.values())
            self.optimizer.step(*closure)
        handle.remove()

    # --- changes ------------------------------------------------------------------------------------------------------

    def freeze(self, rng):
        name, on = rng.choice(sorted(self.plain.weights)), rng.random() < 0.6
        for model in (self.plain, self.model):
            model.weights[name].requires_grad_(on)

    def join(self):
        name = "j" * (2 + len(self.joined))
        for model, optimizer in ((self.plain, self.reference), (self.model, self.optimizer)):
            p = nn.Parameter(start(name).to(model.weights["a"].dtype).to(LOW.get(self.plan["level"], torch.float32)))
            if model is self.plain:
                p = nn.Parameter(p.detach().float())
            model.weights[name] = p
            optimizer.add_param_group({"params": [p]})
        self.joined.append(name)

    def load(self, rng):
        """Weights that 16 bits hold, into both. A master that rounds to what is loaded stays what it is."""
        low = LOW.get(self.plan["level"], torch.float32)
        values = {name: torch.full((5,), rng.randint(-16, 16) / 8) for name in self.plain.weights}
        kept = {name: torch.where(p.to(low) == values[name], p, values[name]) for name, p in self.plain.weights.items()}
        self.model.weights.load_state_dict(values)
        self.plain.weights.load_state_dict(kept)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def begin(self, rng):
        """A block of the next step, which the checkpoint then comes after."""
        block = Block(self.factors(rng), {}, rng.randrange(self.plan["losses"]))
        self.block(block)
        self.begun.append(block.factors)

    def save(self, path, rng):
        content = {
            "plan": {**self.plan, "joined": self.joined},
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "amp": self.session.state_dict(masters=True, grads=bool(self.begun)),
            "plain": self.plain.state_dict(),
            "reference": self.reference.state_dict(),
            "frozen": [name for name, p in self.plain.weights.items() if not p.requires_grad],
            "scales": self.scales,
            "begun": self.begun,
            "rng": rng.getstate(),
        }
        torch.save(content, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)  # there is a whole one at any time

    @classmethod
    def resume(cls, path):
        """The run that was saved, and the state of its random numbers."""
        saved = torch.load(path, weights_only=True)
        run = cls(saved["plan"])
        for name in saved["frozen"]:
            for model in (run.plain, run.model):
                model.weights[name].requires_grad_(False)
        run.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.session.load_state_dict(saved["amp"])
        run.plain.load_state_dict(saved["plain"])
        run.reference.load_state_dict(saved["reference"])
        run.scales = [list(scale) for scale in saved["scales"]]
        run.begun = saved["begun"]
        return run, saved["rng"]

    # --- comparison ---------------------------------------------------------------------------------------------------

    def values(self):
        """Everything that a fault must leave as it is."""
        list(self.session.master_params(self.optimizer))  # masters of what was loaded or unfrozen
        tensors = [p.detach().clone() for p in self.model.parameters()]
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                tensors.append(p.detach().clone())
                state = self.optimizer.state.get(p, {}).values()
                # Zeros are what state starts as: a step that the device skips may make them.
                tensors += [v.clone() for v in state if torch.is_tensor(v) and v.any()]
        return tensors

    @staticmethod
    def equal(what, mine, theirs):
        same = len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))
        if not same:
            raise Discrepancy(f"{what} differs")

    def compare(self):
        stepped = {
            name: p.detach() for name, p in zip(self.names(), self.session.master_params(self.optimizer), strict=True)
        }
        for name, p in self.plain.weights.items():
            low = LOW.get(self.plan["level"], torch.float32)
            if not torch.equal(stepped[name].float(), p.detach()):
                raise Discrepancy(f"{name}: {stepped[name]} under amp, {p.detach()} without")
            if not torch.equal(self.model.weights[name].detach(), p.detach().to(low)):
                raise Discrepancy(f"{name} of the model is not the rounded master")
        if (counted := self.session.skipped_steps(self.optimizer)) != self.skipped:
            raise Discrepancy(f"{counted} steps were skipped, {self.skipped} should have been")
        state = self.session.state_dict()
        for i, (scale, clean) in enumerate(self.scales):
            entry = state[f"loss_scaler{i}"]
            if (entry["loss_scale"], entry["unskipped"]) != (scale, clean):
                raise Discrepancy(f"scale {i} is {entry}, expected {scale} and {clean}")

    def names(self):
        return ["a", "b", "c", *self.joined]


FAULTS = {
    "overflow": 0.08,
    "exception": 0.08,
    "exception in step": 0.03,
    "closure": 0.2,
    "no gradients": 0.03,
    "freeze": 0.08,
    "join": 0.01,
    "load": 0.02,
}


IN_CLOSURES = {"overflow in closure": "overflow", "exception in closure": "exception"}


def advance(run, rng, iterations, counts):
    for _ in range(iterations):
        faults = {kind: rng.random() < odds for kind, odds in FAULTS.items()}
        if run.begun:  # a closure would start with new gradients
            faults["closure"] = False
        if faults["freeze"]:
            run.freeze(rng)
        if faults["join"] and len(run.joined) < 4:
            run.join()
        else:
            faults["join"] = False
        if faults["load"]:
            run.load(rng)
        faults["overflow"] = run.iterate(rng, faults)  # in an iteration without gradients there is none
        counts["skips"] += faults["overflow"]
        run.compare()
        counts["steps"] += 1
        counts.update(kind for kind, there in faults.items() if there)
        counts.update(kind for kind, fault in IN_CLOSURES.items() if faults["closure"] and faults[fault])


def random_plan(rng):
    level = rng.choice(["O1", "O2", "O5"])
    return {
        "level": level,
        "optimizer": rng.choice(sorted(KINDS)),
        "losses": rng.randint(1, 3),
        "max_scale": rng.choice([2.0**8, 2.0**11]),
        "joined": [],
    }


def continue_in_fresh_processes(run, seed, iterations, counts):
    """Saves, goes on in a process that is killed half way and in another one that finishes, and compares what that
    arrives at with what this one does."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        run.begin(rng)
        counts["save between blocks"] += 1
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint.pt"
        run.save(checkpoint, rng)
        half = iterations // 2
        for count, dies, expected in ((half, ["--dies"], -signal.SIGKILL), (iterations - half, [], 0)):
            arguments = ["--resume", str(checkpoint), "--iterations", str(count), *dies]
            result = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
            if result.returncode != expected:
                raise Discrepancy(f"the resumed process ended with {result.returncode}: {result.stdout}{result.stderr}")
            counts["resume"] += 1
        counts["kill"] += 1
        advance(run, rng, iterations, counts)
        resumed, drawn = Run.resume(checkpoint)
        run.equal("training after a resume", run.values(), resumed.values())
        if (drawn, resumed.scales) != (rng.getstate(), run.scales):
            raise Discrepancy("the resumed process did not do the same iterations")
        resumed.session.reset()


def go_on(path, iterations, dies):
    """The resumed process: trains, saving after each iteration."""
    run, state = Run.resume(path)
    rng = random.Random()
    rng.setstate(state)
    for _ in range(iterations):
        advance(run, rng, 1, Counter())
        run.save(path, rng)
    if dies:
        run.dies = True
        run.begin(rng)


def soak(iterations, seed, length, resume_every):
    rng, counts = random.Random(seed), Counter()
    while counts["steps"] < iterations:
        plan = random_plan(rng)
        run = Run(plan)
        counts["runs"] += 1
        try:
            advance(run, rng, min(length, iterations - counts["steps"]), counts)
            if resume_every and counts["runs"] % resume_every == 0:
                continue_in_fresh_processes(run, rng.randrange(2**30), 10, counts)
        except Discrepancy as error:
            raise Discrepancy(f"{plan} after {counts['steps']} steps: {error}") from error
        run.session.reset()
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, default=50, help="iterations of one run; default 50")
    parser.add_argument(
        "--resume-every", type=int, default=10, help="runs between fresh processes; 0: none; default 10"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="put the counts there, in place of earlier ones")
    parser.add_argument("--resume", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dies", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        if args.resume is not None:
            go_on(args.resume, args.iterations, args.dies)
            return 0
        counts = soak(args.iterations, args.seed, args.length, args.resume_every)
    except Discrepancy as error:
        print(f"discrepancy: {error}")
        return 1
    kinds = ("runs", "steps", "skips", *FAULTS, *IN_CLOSURES, "save between blocks", "kill", "resume")
    for kind in kinds:
        print(f"{kind}: {counts[kind]}")
    print("lost: 0")
    if args.csv is not None:
        figures.write(args.csv, "soak-cpu", {**{f"soak/{kind}": counts[kind] for kind in kinds}, "soak/lost": 0})
    return 0


if __name__ == "__main__":
    sys.exit(main())
