"""Every Ctrl-C of the user's arrives."""

import gc
import random
import signal
import sys
import time
import traceback

import pytest
import torch
from kit import start, train
from torch import nn

from ampctx import optimizers
from ampctx.amp import AmpSession


def steps(_):
    """Of an optimizer alone. With a weakref callback for each list, 1 in 80 interrupts was swallowed."""
    params = [nn.Parameter(torch.ones(3))]
    params[0].grad = torch.ones(3)
    return optimizers.FusedAdam(params, lr=1e-3).step


def training(level):
    """Whole iterations, where 1 in 200 was."""
    session = AmpSession()
    model, optimizer = start(session, level, "FusedAdam", nn.Linear(4, 2))

    def iterate():
        optimizer.zero_grad()  # which the end of a block asks for after an interrupt
        train(session, model, optimizer, 1)

    return iterate


@pytest.mark.parametrize(
    ("make", "level", "interrupts"),
    [
        pytest.param(steps, "", 400, id="steps"),
        *(pytest.param(training, level, 800, marks=pytest.mark.full, id=level) for level in ("O1", "O2")),
    ],
)
def test_every_interrupt_of_a_loop_arrives(make, level, interrupts, monkeypatch):
    iterate = make(level)
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
    assert not swallowed
    delays = random.Random(0)
    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(interrupts):
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
    assert not swallowed, [(s.object, s.err_msg, traceback.extract_tb(s.exc_traceback)) for s in swallowed]
    assert (sent, caught) == (interrupts, interrupts)


@pytest.mark.parametrize("left", [1, 2, 3])
def test_an_interrupt_within_any_op_of_a_first_step_arrives(left):
    def interrupt(frame, *_):
        nonlocal left
        left -= frame.f_code is torch._ops.OpOverload.__call__.__code__
        if left == 0:
            raise KeyboardInterrupt

    step = steps("")
    with pytest.raises(KeyboardInterrupt):
        step(sys.settrace(interrupt))  # until it raises
