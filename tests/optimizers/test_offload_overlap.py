"""``overlap="forward"``: a thread steps while the program goes on, and whoever needs a weight waits for it."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time

import pytest
import torch
from kit import assert_same, backward, params_of, snapshot
from torch import nn
from torch.nn import functional

import ampctx
from ampctx.amp import AmpSession
from ampctx.optimizers import FusedAdam, _offload

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def small_calls(monkeypatch):
    monkeypatch.setattr(_offload, "CALL_ELEMENTS", 20)


class Tied(nn.Module):
    """A weight that two modules own, and an attention whose out_proj is never called."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        x = self.first(x).unsqueeze(0)
        return self.last(self.norm(x + self.attention(x, x, x, need_weights=False)[0])).squeeze(0)


class ReadsTooEarly(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(functional.linear(x, self.inner.weight))


def make(overlap="forward", kind=Tied, **options):
    torch.manual_seed(0)
    model = kind().bfloat16()
    return model, FusedAdam(
        model.parameters(), lr=0.01, master_weights="split", offload="cpu", overlap=overlap, **options
    )


def loss_of(model):
    return model(X.bfloat16()).float().square().mean()


def iterate(model, optimizer, steps, waits=False):
    for _ in range(steps):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        if waits:
            optimizer.wait()


class Held:
    """Keeps the thread of an optimizer busy, so that its step waits. ``release`` after ``seconds`` at the latest."""

    def __init__(self, optimizer, seconds=60.0):
        self._gate = threading.Event()
        optimizer._offload._thread.submit(self._gate.wait, seconds)

    def release(self):
        self._gate.set()

    def release_soon(self):
        threading.Timer(0.1, self.release).start()


def in_flight(kind=Tied):
    """A model whose step has begun and cannot end, its weights after that step, and the way to let it."""
    model, optimizer = make(kind=kind)
    other, resident = make(overlap=None, kind=kind)
    iterate(model, optimizer, 2, waits=True)
    iterate(other, resident, 3)
    loss_of(model).backward()
    held = Held(optimizer)
    optimizer.step()
    return model, optimizer, other, resident, held


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def test_100_steps_have_the_bits_of_steps_that_wait():
    found = []
    for overlap in (None, "forward"):
        model, optimizer = make(overlap)
        iterate(model, optimizer, 100)
        optimizer.wait()
        found.append(snapshot(optimizer))
    assert_same(*found)


def test_step_returns_before_the_weights_are_there():
    model, optimizer, other, _, held = in_flight()
    optimizer.zero_grad()
    time.sleep(0.05)
    assert all(value.isnan().all() for value in values(model))
    held.release()
    optimizer.wait()
    assert_same(values(model), values(other))


def load_state(model, optimizer):
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})


READERS = {
    "a forward": lambda model, optimizer: model(X.bfloat16()),
    "a forward without autograd": lambda model, optimizer: torch.no_grad()(model)(X.bfloat16()),
    "wait": lambda model, optimizer: optimizer.wait(),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "load_state_dict": load_state,
    "the model's state_dict": lambda model, optimizer: model.state_dict(),
    "the model's load_state_dict": lambda model, optimizer: model.load_state_dict({}, strict=False),
    "param_groups_master": lambda model, optimizer: optimizer.param_groups_master,
    "masters_follow_model": lambda model, optimizer: optimizer.masters_follow_model(),
    "add_param_group": lambda model, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "a copy": lambda model, optimizer: copy.deepcopy(optimizer),
    "a pickle": lambda model, optimizer: pickle.dumps(optimizer),
    "the next step": lambda model, optimizer: (optimizer.zero_grad(), optimizer.step()),
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_who_reads_is_made_to_wait(reader):
    model, optimizer, other, _, held = in_flight()
    held.release_soon()
    READERS[reader](model, optimizer)
    assert_same(values(model), values(other))


def test_a_module_waits_for_its_own_weights_only():
    model, optimizer = make(kind=lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    iterate(model, optimizer, 1)
    loss_of(model).backward()
    optimizer.step()
    model[0](X.bfloat16())
    assert list(optimizer._offload._flights[0].twins) == [model[1].weight, model[1].bias]
    model[1](X.bfloat16())
    assert optimizer._offload._flights == []


def test_a_weight_that_is_read_too_early_is_nan():
    model, _optimizer, other, _, held = in_flight(ReadsTooEarly)
    held.release_soon()
    assert loss_of(model).isnan()
    assert_same(loss_of(model), loss_of(other))


@pytest.mark.parametrize("reader", ["a forward", "wait", "state_dict", "the next step"])
def test_an_exception_of_the_thread_reaches_the_next_call(reader):
    model, optimizer = make()
    iterate(model, optimizer, 1)
    optimizer.wait()
    optimizer.state[model.norm.bias]["exp_avg"] = torch.zeros(3)
    loss_of(model).backward()
    optimizer.step()
    with pytest.raises(Exception, match="3|size|elements"):
        READERS[reader](model, optimizer)
    optimizer.wait()


def test_a_skipped_step_changes_nothing():
    model, optimizer = make()
    iterate(model, optimizer, 1)
    optimizer.wait()
    before = snapshot(optimizer)
    loss_of(model).backward()
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    optimizer.wait()
    assert_same(snapshot(optimizer), before)


@pytest.mark.parametrize("level", ["O0", "O5"])
def test_under_amp_with_clipping_and_skips(level):
    found = []
    for overlap in (None, "forward"):
        torch.manual_seed(0)
        model, session = Tied(), AmpSession()
        kept = "split" if level == "O5" else False
        optimizer = FusedAdam(model.parameters(), lr=0.01, master_weights=kept, offload="cpu", overlap=overlap)
        session.initialize(
            model, optimizer, opt_level=level, loss_scale="dynamic", max_loss_scale=2.0**10, verbosity=0,
            master_weights=False,
        )  # fmt: skip
        for step in range(20):
            loss = model(X).float().square().mean() * (float("nan") if step % 7 == 3 else 1.0)
            backward(session, loss, optimizer)
            ampctx.clip_grad_norm_(session.master_params(optimizer), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        assert session.skipped_steps(optimizer) == 3
        optimizer.wait()
        found.append(snapshot(optimizer))
        session.reset()
    assert_same(*found)


def test_a_closure_begins_with_the_weights_of_the_step_before():
    found = []
    for overlap in (None, "forward"):
        model, optimizer = make(overlap)
        session = AmpSession()
        session.allow_incoming_model_not_fp32 = True
        session.initialize(model, optimizer, opt_level="O0", loss_scale="dynamic", verbosity=0, cast_model_type=False)
        for step in range(6):

            def closure(step=step, model=model, optimizer=optimizer, session=session):
                optimizer.zero_grad()
                backward(session, loss_of(model) * (float("inf") if step == 3 else 1.0), optimizer)

            optimizer.step(closure)
        optimizer.wait()
        found.append(snapshot(optimizer))
        session.reset()
    assert_same(*found)


def test_a_copy_of_the_model_is_its_own():
    model, optimizer = make()
    iterate(model, optimizer, 1)
    optimizer.wait()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.state_dict()
        assert_same(values(copied), values(model))


def test_an_optimizer_that_is_dropped_ends_its_step():
    model, optimizer, other, _, held = in_flight()
    held.release_soon()
    del optimizer
    gc.collect()
    assert_same(values(model), values(other))
    model(X.bfloat16())


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_a_compiled_model_waits():
    found = []
    for overlap in (None, "forward"):
        model, optimizer = make(overlap)
        compiled = torch.compile(model, backend="eager")
        for _ in range(5):
            compiled(X.bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
        found.append(snapshot(optimizer))
    assert_same(*found)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("overlap", [None, "forward"])
def test_memory_does_not_grow(overlap, only_new_objects):
    model, optimizer = make(overlap)

    def tensors():
        optimizer.wait()
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()), threading.active_count()

    iterate(model, optimizer, 4)
    before = tensors()
    iterate(model, optimizer, 20)
    assert tensors() == before


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"overlap": "backward", "offload": "cpu"}, "overlap is 'backward', expected None or 'forward'"),
        ({"overlap": "forward"}, "pass offload='cpu', too"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, match):
    with pytest.raises(ampctx.AmpValueError, match=match):
        FusedAdam([nn.Parameter(torch.ones(2))], **options)
    assert params_of(FusedAdam([nn.Parameter(torch.ones(2))]))
