"""pytorch-ignite: its trainer with ``amp_mode="apex"``, and that project's own tests of it."""

import subprocess
import sys
from pathlib import Path

import pytest
from apex import amp
from ignite.engine import Events, create_supervised_trainer
from training import assert_same_weights, batches, by_hand, loss_of, mlp, on_levels, sgd


def trainer_of(level, accumulate=1):
    model = mlp()
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    trainer = create_supervised_trainer(
        model, optimizer, loss_of, amp_mode="apex", gradient_accumulation_steps=accumulate
    )
    return trainer, model, optimizer


@pytest.mark.parametrize("accumulate", [1, 3])
@on_levels
def test_the_trainer_does_what_the_loop_does(level, accumulate):
    expected = mlp()
    data = batches(12)
    losses, after = by_hand(expected, sgd(expected), data, level, accumulate=accumulate)

    trainer, model, _ = trainer_of(level, accumulate)
    outputs = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: outputs.append(engine.state.output))
    trainer.run(data)
    assert_same_weights(model, after)
    assert outputs == pytest.approx(losses)
    assert outputs[-1] < outputs[0]


# --- the project's own tests, from its source archive ----------------------------------------------------------------

SOURCES = next(Path(sys.prefix).glob("clients/sources/pytorch_ignite-*/"), None)
from_sources = pytest.mark.skipif(SOURCES is None, reason="'make test-clients' unpacks the sources of pytorch-ignite")
TESTS = "tests/ignite/engine/test_create_supervised.py"


@from_sources
def test_their_tests_pass_with_our_apex_in_the_process():
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"]
    run = subprocess.run([*command, TESTS], cwd=SOURCES, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(run.stdout.split(" passed")[0].split()[-1]) >= 14
