"""pytorch-ignite: its trainer with ``amp_mode="apex"``, and that project's own tests of it."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import training
from apex import amp
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import MeanSquaredError, VariableAccumulation
from training import FIRST_SCALE, assert_same_weights, batches, by_hand, loss_of, mlp, on_levels, scale, sgd, weights

from ampctx import amp as library_amp


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


@on_levels
def test_an_overflow_skips_the_step_and_halves_the_scale(level):
    trainer, model, _ = trainer_of(level)
    steps, scales = [], []

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        steps.append([p.detach().clone() for p in model.parameters()])
        scales.append(scale())

    trainer.run(batches(4, overflow_at=1))
    training.assert_the_second_is_skipped(scales, steps)


def test_evaluation_between_epochs():
    """The evaluator of ignite knows nothing of apex: the model casts by itself."""
    trainer, model, _ = trainer_of("O2")
    evaluator = create_supervised_evaluator(model, metrics={"mse": MeanSquaredError()})
    data, found = batches(12), []

    @trainer.on(Events.STARTED | Events.EPOCH_COMPLETED)
    def evaluate():
        found.append(evaluator.run(data).metrics["mse"])

    trainer.run(data, max_epochs=2)
    assert found[0] > found[1] > found[2]


def test_amp_is_an_object_to_save(tmp_path):
    """``Checkpoint`` takes the module for its ``state_dict`` and ``load_state_dict``."""
    data = batches(6, overflow_at=1)
    trainer, model, optimizer = trainer_of("O1")
    trainer.run(data[:3])
    saved = {"model": model, "optimizer": optimizer, "amp": amp}
    checkpoint = Checkpoint(saved, DiskSaver(str(tmp_path)))
    checkpoint(trainer)
    trainer.run(data[3:])
    expected = weights(model)
    library_amp.reset()

    trainer, model, optimizer = trainer_of("O1")
    assert scale() == FIRST_SCALE
    path = tmp_path / checkpoint.last_checkpoint
    Checkpoint.load_objects({"model": model, "optimizer": optimizer, "amp": amp}, torch.load(path))
    assert scale() == FIRST_SCALE / 2
    trainer.run(data[3:])
    assert_same_weights(model, expected)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_metrics_of_fp32_values_stay_fp32(level):
    amp.initialize(mlp(), opt_level=level, verbosity=0)
    values = torch.rand(100)
    metric = VariableAccumulation(lambda a, x: a + x)
    for value in values:
        metric.update(value)
    total, count = metric.compute()
    assert total.item() == pytest.approx(values.sum().item())
    assert count == len(values)


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


@pytest.fixture
def theirs(monkeypatch):
    """Their test module, whose trainers are made after ``amp.initialize``: the helpers call that on a GPU alone."""
    monkeypatch.syspath_prepend(SOURCES)
    module = importlib.import_module("tests.ignite.engine.test_create_supervised")
    level = []

    def create(model, optimizer, *args, **kwargs):
        model, optimizer = amp.initialize(model, optimizer, opt_level=level[0], verbosity=0)
        return create_supervised_trainer(model, optimizer, *args, **kwargs)

    monkeypatch.setattr(module, "create_supervised_trainer", create)
    yield module, level
    for name in [n for n in sys.modules if n == "tests" or n.startswith("tests.")]:
        del sys.modules[name]


TRAINERS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "model-transform": {"with_model_transform": True},
    "model-fn": {"with_model_fn": True},
}


@from_sources
@on_levels
@pytest.mark.parametrize("options", TRAINERS.values(), ids=TRAINERS)
def test_their_test_of_the_apex_trainer(theirs, options, level):
    module, levels = theirs
    levels.append(level)
    module._test_create_supervised_trainer(model_device="cpu", trainer_device="cpu", amp_mode="apex", **options)


@from_sources
def test_their_test_of_a_wrong_number_of_accumulation_steps(theirs):
    module, levels = theirs
    levels.append("O2")
    module._test_create_supervised_trainer_wrong_accumulation("cpu", "cpu", "apex")
