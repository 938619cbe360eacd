"""Trains under amp for long while everything goes wrong at random, beside plain fp32 training of the same clean steps.

    python tests/reliability/soak.py --iterations 10000 --seed 0

Runs follow one another, each with a level, an optimizer and a number of losses of its own. Gradients are multiples of
a power of two, so that scaling, accumulation and masters are exact: after every step the weights that are stepped
equal those of the reference bit for bit, and so do skip decisions and the scale. Faults: inf and nan in a gradient,
exceptions in blocks and in steps, parameters without gradients, steps without any, freezing, new groups, weights
loaded, and a fresh process that goes on from a checkpoint. Prints what was done; exits with 1 on any discrepancy.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import figures
import torch
from torch import nn

from ampctx import optimizers
from ampctx.amp import AmpSession

LOW = {"O2": torch.float16, "O5": torch.bfloat16}
INTERVAL = 2000
OPTIMIZERS = {
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


class Run:
    """One training under amp and its reference. ``plan`` is all that it is made from."""

    def __init__(self, plan):
        self.plan = plan
        names = ["a", "b", "c", *plan["joined"]]
        self.plain, self.model = Weights(names), Weights(names)
        make = OPTIMIZERS[plan["optimizer"]]
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

    # --- one iteration ------------------------------------------------------------------------------------------------

    def factors(self, rng):
        """Multiples of 1/8 up to 1 for some of the parameters that train."""
        names = [name for name, p in self.plain.weights.items() if p.requires_grad]
        return {name: rng.randint(-8, 8) / 8 for name in names if rng.random() < 0.8}

    def block(self, factors, poison, loss_id, fail=None, delay=False):
        """A block of amp, and the same backward for the reference where it counts."""
        with self.session.scale_loss(self.total(self.model, factors), self.optimizer, loss_id, None, delay) as scaled:
            if fail == "before":
                raise ConnectionError(fail)
            if scaled.requires_grad:
                scaled.backward()
            for name, value in poison.items():
                grad = self.model.weights[name].grad
                if grad is not None:
                    grad[1] = value
            if fail == "after":
                raise ConnectionError(fail)

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

    def iterate(self, rng, faults):
        """Some blocks and a step. Returns whether the step was skipped."""
        clean, overflow = [], False
        delayed = rng.random() < 0.25
        blocks = rng.randint(1, 3)
        loss_id = rng.randrange(self.plan["losses"])
        verdict = False
        for i in range(blocks):
            if not delayed:
                loss_id, verdict = rng.randrange(self.plan["losses"]), False
            factors = {} if faults["no gradients"] else self.factors(rng)
            if i == 0 and faults["exception"]:
                self.fail(rng, factors, loss_id)
            poison = {}
            if i == blocks - 1 and faults["overflow"] and factors:
                poison = {rng.choice(sorted(factors)): rng.choice([float("inf"), float("-inf"), float("nan")])}
            last = i == blocks - 1
            self.block(factors, poison, loss_id, delay=delayed and not last)
            clean.append(factors)
            verdict = verdict or bool(poison)
            overflow = overflow or verdict
            if not delayed or last:
                self.update_scale(loss_id, verdict)
        before = self.values() if overflow else None
        self.step(rng, faults)
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

    def fail(self, rng, factors, loss_id):
        before = self.values()
        try:
            self.block(factors, {}, loss_id, fail=rng.choice(["before", "after"]))
        except ConnectionError:
            pass  # raised for this
        else:
            raise Discrepancy("an exception did not leave its block")
        self.equal("state after an exception", before, self.values())

    def step(self, rng, faults):
        if not faults["exception in step"]:
            self.optimizer.step()
            return
        # A hook of the user's that fails: the step has not begun, and is taken again.
        before = self.values()

        def refuse(*_):
            raise ConnectionError("hook")

        handle = self.optimizer.register_step_pre_hook(refuse)
        try:
            self.optimizer.step()  # the hook is not asked about a step that is skipped before it
        except ConnectionError:
            handle.remove()
            self.equal("state after an exception in step", before, self.values())
            self.optimizer.step()
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
        """Weights that 16 bits hold, into both."""
        values = {name: torch.full((5,), rng.randint(-16, 16) / 8) for name in self.plain.weights}
        for model in (self.plain, self.model):
            model.weights.load_state_dict(values)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, path):
        torch.save(
            {
                "plan": {**self.plan, "joined": self.joined},
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "masters": [p.detach() for p in self.session.master_params(self.optimizer)],
                "amp": self.session.state_dict(),
                "plain": self.plain.state_dict(),
                "reference": self.reference.state_dict(),
                "frozen": [name for name, p in self.plain.weights.items() if not p.requires_grad],
                "scales": self.scales,
            },
            path,
        )

    @classmethod
    def resume(cls, path):
        saved = torch.load(path, weights_only=True)
        run = cls(saved["plan"])
        run.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.session.load_state_dict(saved["amp"])
        for master, value in zip(run.session.master_params(run.optimizer), saved["masters"], strict=True):
            master.data.copy_(value)
        run.plain.load_state_dict(saved["plain"])
        run.reference.load_state_dict(saved["reference"])
        for name in saved["frozen"]:
            for model in (run.plain, run.model):
                model.weights[name].requires_grad_(False)
        run.scales = [list(scale) for scale in saved["scales"]]
        return run

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
    "no gradients": 0.03,
    "freeze": 0.08,
    "join": 0.01,
    "load": 0.02,
}


def train(run, rng, iterations, counts):
    for _ in range(iterations):
        faults = {kind: rng.random() < odds for kind, odds in FAULTS.items()}
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


def random_plan(rng):
    level = rng.choice(["O1", "O2", "O5"])
    return {
        "level": level,
        "optimizer": rng.choice(sorted(OPTIMIZERS)),
        "losses": rng.randint(1, 3),
        "max_scale": rng.choice([2.0**8, 2.0**11]),
        "joined": [],
    }


def continue_in_a_fresh_process(run, seed, iterations, counts):
    """Saves, goes on in a process of its own, and compares what that arrives at with what this one does."""
    with tempfile.TemporaryDirectory() as folder:
        here, there = Path(folder) / "here.pt", Path(folder) / "there.pt"
        run.save(here)
        arguments = ["--resume", here, "--save", there, "--iterations", str(iterations), "--seed", str(seed)]
        result = subprocess.run([sys.executable, __file__, *map(str, arguments)], capture_output=True, text=True)
        if result.returncode:
            raise Discrepancy(f"the resumed process: {result.stdout}{result.stderr}")
        train(run, random.Random(seed), iterations, counts)
        resumed = Run.resume(there)
        run.equal("training after a resume", run.values(), resumed.values())
        resumed.session.reset()


def soak(iterations, seed, length, resume_every):
    rng, counts = random.Random(seed), Counter()
    while counts["steps"] < iterations:
        plan = random_plan(rng)
        run = Run(plan)
        counts["runs"] += 1
        try:
            train(run, rng, min(length, iterations - counts["steps"]), counts)
            if resume_every and counts["runs"] % resume_every == 0:
                continue_in_a_fresh_process(run, rng.randrange(2**30), 10, counts)
                counts["resume"] += 1
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
        "--resume-every", type=int, default=20, help="runs between fresh processes; 0: none; default 20"
    )
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    parser.add_argument("--resume", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        if args.resume is not None:
            run = Run.resume(args.resume)
            train(run, random.Random(args.seed), args.iterations, Counter())
            run.save(args.save)
            return 0
        counts = soak(args.iterations, args.seed, args.length, args.resume_every)
    except Discrepancy as error:
        print(f"discrepancy: {error}")
        return 1
    kinds = ("runs", "steps", "skips", *FAULTS, "resume")
    for kind in kinds:
        print(f"{kind}: {counts[kind]}")
    print("lost: 0")
    if args.json is not None:
        figures.write(args.json, {**{kind: counts[kind] for kind in kinds}, "lost": 0})
    return 0


if __name__ == "__main__":
    sys.exit(main())
