"""Every Ctrl-C of the user's arrives, and leaves no list of tensors behind."""

import gc
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from kit import start, train, with_plans
from torch import nn

from ampctx import optimizers
from ampctx.amp import AmpSession
from ampctx.kernels import handles

INTERRUPTS = 800


def steps(_):
    """Of an optimizer alone. With a weakref callback for each list, 1 in 80 interrupts was swallowed."""
    params = [nn.Parameter(torch.ones(3))]
    params[0].grad = torch.ones(3)
    return AmpSession(), optimizers.FusedAdam(params, lr=1e-3).step


def training(level):
    """Whole iterations, where 1 in 200 was."""
    session = AmpSession()
    model, optimizer = start(session, level, "FusedAdam", nn.Linear(4, 2))
    return session, lambda: train(session, model, optimizer, 1)


@pytest.mark.parametrize(
    ("make", "level"),
    [
        pytest.param(steps, "", id="steps"),
        pytest.param(training, "O1", marks=pytest.mark.full, id="O1"),
        pytest.param(training, "O2", marks=pytest.mark.full, id="O2"),
    ],
)
@with_plans
def test_every_interrupt_of_a_loop_arrives(make, level, monkeypatch):
    session, iterate = make(level)
    sent = caught = 0
    swallowed = []

    def interrupt(*_):
        nonlocal sent
        sent += 1
        raise KeyboardInterrupt

    # Finalizers of objects that other tests have left would swallow an interrupt, if they were collected in the loop.
    gc.collect()
    gc.freeze()
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)
    for _ in range(5):
        iterate()
    start = time.perf_counter()
    for _ in range(20):
        iterate()
    seconds = (time.perf_counter() - start) / 20
    first, _ = handles.extension.new_list()
    assert not swallowed
    delays = random.Random(0)
    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(INTERRUPTS):
            before = sent
            try:
                signal.setitimer(signal.ITIMER_REAL, delays.uniform(1e-5, 2 * seconds))
                while sent == before:
                    iterate()
            except KeyboardInterrupt:
                caught += 1
            finally:
                torch.set_grad_enabled(True)  # torch's own no_grad may be left half way
    finally:
        signal.signal(signal.SIGALRM, former)
        gc.unfreeze()
    assert (sent, caught, [repr(s.object) for s in swallowed]) == (INTERRUPTS, INTERRUPTS, [])

    session.reset()
    del session, iterate
    gc.collect()
    last, _ = handles.extension.new_list()
    assert last - first > 100
    assert not any(map(handles.extension.are_contiguous, range(first, last)))  # none is known any more


@pytest.mark.full
def test_lists_that_are_held_at_the_end_of_the_process_do_no_harm():
    code = (
        "import torch; from ampctx import ops; kept = [make([torch.ones(3)]) for make in (ops.HeldTensors, ops.read)]"
    )
    result = subprocess.run([sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
