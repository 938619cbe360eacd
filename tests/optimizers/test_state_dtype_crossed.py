"""State_dtype x what keeps the weights x active casts x order of loads: a run that loads what another has saved goes on
bit for bit."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from kit import LEVELS, assert_same, batch, snapshot, through_a_file, train
from optimizer_cases import BY_NAME, LOW, parameters
from torch import nn

from ampctx import AmpSession
from ampctx.optimizers import LARC, SplitMasters, unpack_state

MAKE = {
    **BY_NAME,
    "larc": lambda params, **options: LARC(BY_NAME["sgd"](params, **options)),
    "split-masters": lambda params, seed, lr, **_: SplitMasters(torch.optim.AdamW, params, lr=lr),
}
TYPES: dict[str, dict] = {
    "fp32": {},
    "bf16": {"state_dtype": torch.bfloat16},
    "8bit": {"state_dtype": "8bit", "min_8bit_size": 0},
    "mixed": {"state_dtype": {"exp_avg": "8bit", "exp_avg_sq": torch.bfloat16}, "min_8bit_size": 0},
}


class How(NamedTuple):
    """``casts``: those of torch's autocast, which are active while an optimizer steps and loads, too, as at O1 and O4.
    ``dtype``: of the weights, ``own``: how the optimizer keeps what they round off. ``amp``: for ``initialize``."""

    casts: torch.dtype = torch.float32
    dtype: torch.dtype = torch.float32
    own: dict[str, Any] | None = None
    amp: dict[str, Any] | None = None


MASTERS, SPLIT = {"master_weights": True}, {"master_weights": "split"}
OWN = {
    **{f"{d}-masters": How(dtype=LOW[d], own=MASTERS) for d in LOW},
    "bf16-split": How(dtype=torch.bfloat16, own=SPLIT),
    **{f"{d}-{w}": How(dtype=LOW[d], own={"write_back": w}) for d in LOW for w in ("kahan", "stochastic")},
}
HOW = {
    **{f"{d} casts": How(dtype) for d, dtype in {"no": torch.float32, **LOW}.items()},
    **{d: How(dtype=dtype) for d, dtype in {**LOW, "fp64": torch.float64}.items()},
    **OWN,
    **{level: How(amp={"opt_level": level}) for level in LEVELS},
    "O5-own-masters": How(own=MASTERS, amp={"opt_level": "O5", "master_weights": False}),
    "O5-own-split": How(own=SPLIT, amp={"opt_level": "O5", "master_weights": False}),
}
OF_OWN = [*OWN, *(how for how in HOW if how.startswith("O5-"))]
# Sums that grow, state of torch, one state alone; fp64; no masters of its own; fp16 weights with remainders of bf16.
REFUSED = {
    *itertools.product(("adagrad", "split-masters"), ("bf16", "8bit"), HOW),
    *itertools.product(MAKE, [*TYPES][1:], ["fp64"]),
    *itertools.product({*MAKE} - {"adam", "lamb"}, ["mixed"], HOW),
    *itertools.product(("larc", "split-masters"), TYPES, OF_OWN),
    *itertools.product(["split-masters"], TYPES, ["fp16", "O3"]),
}
ROWS = [row for row in itertools.product(MAKE, TYPES, HOW) if row not in REFUSED]
PARTS = ("model", "optimizer", "amp")
# Amp's own state needs ``initialize``.
ORDERS = [o for o in itertools.permutations(("initialize", *PARTS)) if o.index("initialize") < o.index("amp")]


class Odd(nn.Module):
    """Parameters of many shapes beside layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 3), nn.BatchNorm1d(3), nn.Linear(3, 5))
        self.odd = nn.ParameterList(parameters(shapes=[(), (0,), (65,), (3, 128), (2, 8, 3, 3), (5, 4)]))

    def forward(self, x):
        return self.layers(x).float().square().mean() + sum(p.float().sin().sum() for p in self.odd)


class Run:
    def __init__(self, name, kind, how, seed):
        torch.manual_seed(seed)
        self.how, self.model = how, Odd().to(how.dtype)
        options = {"amsgrad": False} if name == "adam" else {}
        options |= {"lr": 0.01 * seed, "seed": seed, **(how.own or {}), **TYPES[kind]}
        self.optimizer, self.amp = (
            MAKE[name](list(self.model.parameters()), **options),
            AmpSession() if how.amp else None,
        )

    def initialize(self):
        self.amp.initialize(self.model, self.optimizer, loss_scale=64.0, verbosity=0, **self.how.amp)

    def train(self, first):
        loss = lambda model, step: model(batch(step, 8, 64).to(self.how.dtype))  # noqa: E731
        return train(self.amp, self.model, self.optimizer, 2, first, loss)

    def saved(self):
        return through_a_file({part: getattr(self, part).state_dict() for part in PARTS if getattr(self, part)})


@pytest.mark.full(but=36)
@pytest.mark.parametrize(("name", "kind", "how"), ROWS)
def test_a_run_goes_on_in_any_order_of_loads(name, kind, how):
    how = HOW[how]
    # Without a cache, which would hold casts of weights from before a step.
    casts = torch.autocast("cpu", how.casts, how.casts != torch.float32, cache_enabled=False)
    with casts, contextlib.ExitStack() as resets:
        run = Run(name, kind, how, seed=1)
        if run.amp:
            resets.callback(run.amp.reset)
            run.initialize()
        run.train(0)
        saved = run.saved()
        unpacked = unpack_state(saved["optimizer"])
        losses = run.train(2)
        for order in ORDERS if run.amp else (PARTS, PARTS[::-1]):
            if how.own and order[0] != "initialize":
                continue  # fp32 weights take no masters or remainders
            other = Run(name, kind, how, seed=2)
            for part in order:
                if part == "initialize":
                    resets.callback(other.amp.reset)
                    other.initialize()
                elif part in saved:
                    getattr(other, part).load_state_dict(saved[part])
            assert other.train(2) == losses, order
            assert_same(snapshot(other.optimizer, other.model), snapshot(run.optimizer, run.model), str(order))
    assert_same(unpacked, unpack_state(saved["optimizer"]))
