"""Initialize many times, free everything, several configurations at once."""

import gc
import itertools
import math
import weakref
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from kit import OPTIMIZERS, every_level, mlp, start, train
from torch import nn

from ampctx import AmpError, AmpSession

every_optimizer = pytest.mark.parametrize("name", ["FusedAdam", "Adam-plain"])


def alive():
    """How many objects that hold others are alive, the entries of lists, dicts and sets, and the bytes of tensors."""
    gc.collect()
    objects = gc.get_objects()
    entries = sum(len(o) for o in objects if issubclass(type(o), (list, dict, set, deque)))
    return len(objects), entries, sum(t.nbytes for t in objects if issubclass(type(t), torch.Tensor))


def surroundings():
    """What initialize may replace outside the objects it is given."""
    functions = {
        (owner.__name__, name): value
        for owner in (torch, F, torch.Tensor, nn.Module, torch.optim.Optimizer)
        for name, value in vars(owner).items()
        if callable(value)
    }
    state = [
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
    ]
    return functions, state


def shape_of(model, optimizer):
    """What of the objects reset() has to bring back, besides their values."""
    return [
        [(n, p.dtype, id(p)) for n, p in model.named_parameters()],
        [(n, b.dtype) for n, b in model.named_buffers()],
        [{n: len(d) for n, d in vars(m).items() if n.endswith("_hooks")} for m in model.modules()],
        sorted(vars(optimizer)),
        [[id(p) for p in g["params"]] for g in optimizer.param_groups],
        [sorted(g) for g in optimizer.param_groups],
    ]


@pytest.fixture(scope="module", autouse=True)
def new_objects_alone():
    """What torch makes at first use is there. What is alive before is frozen: collecting and counting do not
    go through all of it each time."""
    for name in ("FusedAdam", "Adam-plain"):
        session = AmpSession()
        train(session, *start(session, "O1", name))
        session.reset()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@every_optimizer
@every_level
@pytest.mark.full(but=3)
def test_init_reset_rounds_leave_nothing(level, name):
    session, rounds = AmpSession(), 20
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    weights = {k: v.clone() for k, v in model.state_dict().items()}

    def one_round():
        model.load_state_dict(weights)
        session.initialize(model, optimizer, opt_level=level, verbosity=0)
        train(session, model, optimizer)
        session.reset()

    around = surroundings()
    for _ in range(rounds):  # what torch keeps for later is there then
        one_round()
    shape, counts = shape_of(model, optimizer), [alive()]
    for _ in range(4):
        for _ in range(rounds // 4):
            one_round()
        counts.append(alive())
    # What rounds leave grows in each quarter of them. What the process makes once, at any time, does not.
    for kind in zip(*counts, strict=True):
        assert min(after - before for before, after in itertools.pairwise(kind)) <= rounds // 8
    assert shape_of(model, optimizer) == shape
    assert surroundings() == around


@pytest.mark.full(but=12)
@every_optimizer
@every_level
@pytest.mark.parametrize("first", ["session", "optimizer", "model"])
def test_without_reset_everything_goes_with_its_last_reference(level, name, first):
    around = surroundings()
    parts = {"session": AmpSession(), "model": mlp()}
    parts["optimizer"] = OPTIMIZERS[name](parts["model"].parameters())
    session, model, optimizer = parts["session"], parts["model"], parts["optimizer"]
    session.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(session, model, optimizer)
    masters = [p for g in optimizer.param_groups for p in g["params"]]
    alive = [weakref.ref(o) for o in (session, model, optimizer, *model.parameters(), *masters)]
    del masters
    gc.collect()
    gc.disable()
    try:
        del session, model, optimizer
        del parts[first]
        parts.clear()
        assert not [ref() for ref in alive if ref() is not None]
    finally:
        gc.enable()
    assert surroundings() == around


def test_functions_registered_with_a_session_end_with_it():
    class Namespace:
        @staticmethod
        def f(x):
            return x

    original = Namespace.f
    session = AmpSession()
    session.register_half_function(Namespace, "f")
    session.initialize(mlp(), opt_level="O1", verbosity=0)
    assert Namespace.f(torch.ones(1)).dtype == torch.float16
    del session
    assert Namespace.f is original


@pytest.mark.parametrize(("a", "b"), [("O2", "O5"), ("O3", "O0"), ("O5", "O3"), ("O2", "O2")])
def test_two_sessions_side_by_side_are_as_each_alone(a, b):
    alone, both = [], []
    for level in (a, b):
        session = AmpSession()
        alone.append(train(session, *start(session, level, "FusedAdam"), 6))
        session.reset()
    for level in (a, b):
        session = AmpSession()
        both.append((session, *start(session, level, "FusedAdam")))
    for step in range(6):
        for run, losses in zip(both, alone, strict=True):
            assert train(*run, 1, step) == [losses[step]]
    for session, *_ in both:
        session.reset()


@every_level
def test_an_optimizer_is_in_one_session_at_a_time(level):
    first, second = AmpSession(), AmpSession()
    second.allow_incoming_model_not_fp32 = True
    model, optimizer = start(first, level, "Adam-plain")
    with pytest.raises(AmpError, match=r"optimizers\[0\] \(Adam\) is under amp in another AmpSession"):
        start(second, level, lambda _: optimizer, model)
    for session in (first, second):
        if session is second:
            start(second, level, lambda _: optimizer, model)
        train(session, model, optimizer)
        session.reset()


GARBAGE = {
    "no dict": lambda state, p: state.__setitem__(p, [1.0, torch.ones(2)]),
    "None": lambda state, p: state.__setitem__(p, None),
    "a tensor": lambda state, p: state.__setitem__(p, torch.ones(3)),
    "keys": lambda state, p: state.update({"note": 3, 7: None, (1, 2): {"x": torch.ones(1)}}),
    "shapes": lambda state, p: state[p].update(
        {"odd": torch.ones(2, 3, 4), 3: torch.ones(0), "m": torch.ones(1).int()}
    ),
    "values": lambda state, p: state[p].update({"exp_avg": "x", "f": print, "nan": float("nan")}),
    "meta": lambda state, p: state[p].update({"exp_avg": torch.empty(p.shape, device="meta")}),
    "sparse": lambda state, p: state[p].update({"exp_avg": torch.zeros(p.shape).to_sparse()}),
}


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@every_optimizer
def test_reset_with_garbage_in_the_state_of_an_optimizer(session, name, level, garbage):
    model, optimizer = start(session, level, name)
    train(session, model, optimizer)
    params = optimizer.param_groups[0]["params"]
    GARBAGE[garbage](optimizer.state, params[0])
    GARBAGE[garbage](optimizer.state, params[-1])
    session.reset()
    assert session.policy is None
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    optimizer.state.clear()
    start(session, level, lambda _: optimizer, model)
    assert all(math.isfinite(loss) for loss in train(session, model, optimizer))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_error_in_reset_leaves_no_session_that_is_half_there(level):
    class Stuck(torch.optim.SGD):
        def __delattr__(self, name):
            raise RuntimeError("stuck")

    session, before = AmpSession(), surroundings()
    model, optimizer = start(session, level, lambda p: Stuck(p, lr=0.01))
    train(session, model, optimizer)
    with pytest.raises(RuntimeError, match="stuck"):
        session.reset()
    assert session.policy is None
    assert surroundings() == before
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    train(session, *start(session, level, "FusedAdam", model))
    session.reset()
