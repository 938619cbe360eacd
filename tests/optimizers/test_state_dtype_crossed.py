"""state_dtype x active casts x load order: a run that loads what another has saved goes on bit for bit."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from kit import LEVELS, assert_same, loss_of, snapshot, through_a_file, train
from optimizer_cases import BY_NAME
from torch import nn

from ampctx import AmpSession
from ampctx.optimizers import LARC, SplitMasters, unpack_state

MAKE = {
    **BY_NAME,
    "larc": lambda params, **options: LARC(BY_NAME["sgd"](params, **options)),
    "split-masters": lambda params, seed: SplitMasters(torch.optim.AdamW, params),
}
TYPES = {"fp32": {}, "bf16": {"state_dtype": torch.bfloat16}, "8bit": {"state_dtype": "8bit", "min_8bit_size": 0}}
# Without amp, casts are those of torch: also while an optimizer steps and loads.
CASTS = {
    "no": contextlib.nullcontext,
    "fp16": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "bf16": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
}
AMP = {**{level: {"opt_level": level} for level in LEVELS}, "split": {"opt_level": "O5", "master_weights": "split"}}
# Sums that grow, state of torch, fp16 weights with remainders of bf16, no split masters.
REFUSED = {
    *itertools.product(("adagrad", "split-masters"), ("bf16", "8bit"), [*CASTS, *AMP]),
    ("split-masters", "fp32", "O3"),
    *itertools.product(("larc", "mixed-lamb"), TYPES, ["split"]),
}
ROWS = [row for row in itertools.product(MAKE, TYPES, [*CASTS, *AMP]) if row not in REFUSED]
PARTS = ("model", "optimizer", "amp")
# Under amp ``initialize`` has its place in the order; amp's own state needs it.
ORDERS = [o for o in itertools.permutations(("initialize", *PARTS)) if o.index("initialize") < o.index("amp")]


class Run:
    def __init__(self, name, kind, casts, seed):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, 3), nn.LayerNorm(3), nn.Linear(3, 5))
        options = {"amsgrad": False} if name == "adam" else {}
        self.optimizer = MAKE[name](list(self.model.parameters()), seed=seed, **options, **TYPES[kind])
        self.casts, self.amp = casts, AmpSession() if casts in AMP else None

    def initialize(self):
        self.amp.initialize(self.model, self.optimizer, loss_scale=64.0, verbosity=0, **AMP[self.casts])

    def train(self, first):
        return train(self.amp, self.model, self.optimizer, 2, first, loss_of)

    def saved(self):
        return through_a_file({part: getattr(self, part).state_dict() for part in PARTS if getattr(self, part)})


@pytest.mark.full(but=90)
@pytest.mark.parametrize(("name", "kind", "casts"), ROWS)
def test_a_run_goes_on_in_any_order_of_loads(name, kind, casts):
    with CASTS.get(casts, contextlib.nullcontext)(), contextlib.ExitStack() as resets:
        run = Run(name, kind, casts, seed=1)
        if run.amp:
            resets.callback(run.amp.reset)
            run.initialize()
        run.train(0)
        saved = run.saved()
        unpacked = unpack_state(saved["optimizer"])
        losses = run.train(2)
        for order in ORDERS if run.amp else (PARTS, PARTS[::-1]):
            if casts == "split" and order[0] != "initialize":
                continue  # fp32 weights take no remainders
            other = Run(name, kind, casts, seed=2)
            for part in order:
                if part == "initialize":
                    resets.callback(other.amp.reset)
                    other.initialize()
                elif part in saved:
                    getattr(other, part).load_state_dict(saved[part])
            assert other.train(2) == losses, order
            assert_same(snapshot(other.optimizer, other.model), snapshot(run.optimizer, run.model), str(order))
    assert_same(unpacked, unpack_state(saved["optimizer"]))
