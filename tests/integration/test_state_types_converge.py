"""State in bf16 and in 8-bit codes trains as fp32 state does; bf16 that is rounded to nearest does not.

The program is examples/state_types.py: a character model, beta2 = 0.999, gradients ten times as large in the first
200 of 1,500 steps.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("matplotlib", reason="the example draws plots: pip install 'ampctx[examples]'")
pytest.importorskip("tqdm", reason="the example shows a progress bar: pip install 'ampctx[examples]'")

from ampctx.kernels import steps
from ampctx.optimizers import _step_plan, unpack_state

STEPS = 1500


class Run(NamedTuple):
    loss: float  # held out, in nats
    roots: Tensor  # sqrt(v) of all elements
    largest_update: float  # |u| of the last step, before lr


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    import state_types

    yield state_types
    torch.set_num_threads(threads)
    for name in ("state_types", "char_lm", "shared"):
        sys.modules.pop(name)


def run(example, text, seed: int, kind: str) -> Run:
    sizes = {"batch_size": 16, "context": 32, "heads": 1, "layers": 1, "min_8bit_size": 0}
    schedule = {"steps": STEPS, "large_steps": 200, "eval_every": STEPS, "lr": 3e-3, "seed": seed}
    args = SimpleNamespace(opt_level="O0", device="cpu", **sizes, **schedule)
    _, optimizer, curve = example.train(args, text, kind)
    states = unpack_state(optimizer.state_dict())["state"].values()
    m, v = (torch.cat([state[key].flatten() for state in states]) for key in ("exp_avg", "exp_avg_sq"))
    u = (m / (1 - 0.9**STEPS)) / ((v / (1 - 0.999**STEPS)).sqrt() + 1e-8)
    return Run(curve[-1][1] * math.log(2), v.sqrt(), u.abs().max().item())


def failures(found: Run, exact: Run) -> list[str]:
    ratio = (found.roots / exact.roots).nanmedian().item()
    failed = []
    if not abs(found.loss - exact.loss) <= 0.02:
        failed.append(f"loss {found.loss:.4f} instead of {exact.loss:.4f}")
    if not 0.97 <= ratio <= 1.03:
        failed.append(f"sqrt(v) is {ratio:.3f} times as large")
    if not found.largest_update <= 4 * exact.largest_update:
        failed.append(f"|u| up to {found.largest_update:.2f} instead of {exact.largest_update:.2f}")
    return failed


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_losses_stay_together(example, monkeypatch, seed):
    text = example.Text(torch.device("cpu"))
    exact = run(example, text, seed, "fp32")
    assert failures(run(example, text, seed, "bf16"), exact) == []
    assert failures(run(example, text, seed, "8bit"), exact) == []
    adam = steps.adam
    monkeypatch.setattr(_step_plan, "make_plan", lambda *given: None)  # a plan does not call steps.adam
    monkeypatch.setattr(steps, "adam", lambda *lists, **given: adam(*lists, **{**given, "stochastic_state": False}))
    to_nearest = failures(run(example, text, seed, "bf16"), exact)
    assert len(to_nearest) == 2, f"rounding to nearest should fail by loss and sqrt(v): {to_nearest}"
