"""torch.compile beside amp: models before or after ``initialize``, the tail of an iteration, whole iterations."""

import copy
import dataclasses
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from kit import backward, muon
from torch import nn

from ampctx import AmpSession, clip_grad_norm_, ops, optimizers

# Hooks of the model that is compiled get graphs of their own from torch, which asks what goes into one for ``.grad``.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
X = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


@pytest.fixture
def session():
    session = AmpSession()
    yield session
    session.reset()


class Net(nn.Module):
    """Ops of every column of the cast table, batch norm, and outputs in a dict."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)
        self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x, scale=None):
        x = self.norm(self.conv(x)).flatten(1)
        x = F.softmax(F.layer_norm(self.hidden(x), (8,)), -1)
        return {"logits": self.head(x if scale is None else x * scale), "classes": 2}


def loss_of(output):
    return output["logits"].float().square().mean()


def train(session, model, optimizer, forward, steps=2):
    losses = []
    for _ in range(steps):
        loss = loss_of(forward(X))
        backward(session, loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# aot_eager goes through the dispatcher as inductor does, eager stops at dynamo's graph.
@pytest.mark.full(but=4)
@pytest.mark.parametrize(
    ("level", "when", "backend"),
    [("O1", "before", "aot_eager"), ("O2", "before", "aot_eager"), *((level, "after", "eager") for level in LEVELS)],
)
def test_a_compiled_model_trains_and_evaluates_as_the_plain_one(session, level, when, backend):
    plain, model = Net(), Net()
    twin = AmpSession()
    optimizer = optimizers.FusedAdam(plain.parameters(), lr=0.01)
    twin.initialize(plain, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    expected = train(twin, plain, optimizer, plain)
    evaluated = plain.eval()(X)
    twin.reset()

    compiled = None
    if when == "before":
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert compiled(X)["logits"].dtype == torch.float32
        model.norm.reset_running_stats()
    optimizer = optimizers.FusedAdam(model.parameters(), lr=0.01)
    session.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    if compiled is None:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert train(session, model, optimizer, compiled) == expected
    output = compiled.eval()(X)
    assert output["classes"] == 2
    assert output["logits"].dtype == evaluated["logits"].dtype
    assert torch.equal(output["logits"], evaluated["logits"])

    session.reset()
    assert compiled(X)["logits"].dtype == torch.float32
    assert torch.equal(compiled(X)["logits"], model(X)["logits"])


def test_a_wrapper_of_torch_compile_is_initialized_as_the_model_it_is(session):
    model = Net()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    session.initialize(compiled, optimizer, opt_level="O2", verbosity=0)
    train(session, compiled, optimizer, compiled)
    assert model.head.weight.dtype == torch.float16
    assert torch.equal(compiled(X)["logits"], model(X.half())["logits"].float())


# --- what goes into a model and comes out of it -----------------------------------------------------------------------


class Named(NamedTuple):
    value: torch.Tensor
    note: str


@dataclasses.dataclass
class Record:
    value: torch.Tensor
    note: str


class Attributed(dict):
    pass


@dataclasses.dataclass
class ModelOutput(OrderedDict):
    """In the manner of transformers: entries that are attributes, too."""

    value: torch.Tensor | None = None
    note: str | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def attributed(x):
    result = Attributed(value=x, note="kept", more=(x, 1))
    result.origin = "here"
    return result


CONTAINERS = {
    "tuple": lambda x: (x, "kept", (x, 1)),
    "list": lambda x: [x, "kept", [x, 1]],
    "dict": lambda x: {"value": x, "note": "kept", "more": {"value": (x, [x])}},
    "ordered": lambda x: OrderedDict(value=x, note="kept"),
    "subclass": attributed,
    "named": lambda x: Named(x, "kept"),
    "dataclass": lambda x: Record(x, "kept"),
    "model-output": lambda x: ModelOutput(x, "kept"),
}


class Passes(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.linear, self.make = nn.Linear(3, 3), make

    def forward(self, x, given):
        return self.make(self.linear(x)), given


@pytest.mark.full(but=3)
@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_containers_come_through_whole(session, make):
    """Dynamo copies mappings without their entries and cannot compare tuples: no cast has it do so."""
    model = Passes(make)
    session.initialize(model, opt_level="O2", verbosity=0)
    x = torch.randn(2, 3)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for got, wanted in zip(compiled(x, make(x)), model(x, make(x)), strict=True):
        assert type(got) is type(wanted)
        assert str(got) == str(wanted)
        assert vars(got).keys() == vars(wanted).keys() if hasattr(wanted, "__dict__") else True


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_functions_of_the_user_and_disabled_casts_break_no_graph(session, level):
    half, wide, widest = session.half_function, session.float_function, session.promote_function

    @half
    def scores(q, options):
        return q @ options["keys"][0].T

    @wide
    def normalized(x, nested):
        return x.exp() / nested[0][0].exp().sum(-1, keepdim=True)

    @widest
    def joined(a, b):
        return torch.cat([a, b])

    class Attention(nn.Linear):
        def forward(self, x):
            first = scores(super().forward(x), {"keys": (x, 1)})
            second = normalized(first, ((first,), "x"))
            with session.disable_casts():
                exact = super().forward(x)
                with session.disable_casts():
                    product = exact @ exact.T
            return first, second, joined(first, x), exact, product, super().forward(x)

    model = Attention(4, 4)
    session.initialize(model, opt_level=level, verbosity=0)
    x = torch.randn(4, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for got, wanted in zip(compiled(x), model(x), strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)
    session.reset()
    assert {got.dtype for got in compiled(x)} == {torch.float32}


# --- the tail ---------------------------------------------------------------------------------------------------------

FUSED = {
    "FusedAdam": lambda p: optimizers.FusedAdam(p, lr=0.1),
    "FusedLAMB": lambda p: optimizers.FusedLAMB(p, lr=0.1),
    "FusedMuon": lambda p: muon(p, lr=0.1),
}


def with_gradients(bad=False):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((4, 3), (5,), ())]
    for p in params:
        p.grad = 8 * torch.randn(p.shape)
    if bad:
        params[1].grad[2] = float("inf")
    return params


def tail_of(params, optimizer, state):
    """Unscale, check, clip, step and move the scale, as a loop of one's own does it."""
    scale, growth, hysteresis, found_inf = state

    def tail():
        grads = [p.grad for p in params]
        found_inf.zero_()
        ops.multi_tensor_scale(grads, grads, found_inf, 1 / scale)
        norm = clip_grad_norm_(params, 0.5)
        optimizer.found_inf = found_inf
        optimizer.step()
        ops.update_scale(scale, growth, hysteresis, found_inf, growth_interval=2)
        return norm

    return tail


@pytest.mark.parametrize(
    "make",
    [FUSED["FusedAdam"], FUSED["FusedLAMB"], pytest.param(FUSED["FusedMuon"], marks=pytest.mark.full)],
    ids=FUSED,
)
def test_the_tail_is_one_graph(make):
    results = []
    for compiled in (False, True):
        params = with_gradients()
        optimizer = make(params)
        integers = [torch.tensor(n, dtype=torch.int32) for n in (0, 1)]
        state = torch.tensor(8.0), *integers, torch.zeros(())
        tail = tail_of(params, optimizer, state)
        if compiled:
            tail = torch.compile(tail, backend="eager", fullgraph=True)
        norms = []
        for bad in (False, True, False):
            for p, fresh in zip(params, with_gradients(bad), strict=True):
                p.grad.copy_(fresh.grad)
            norms.append(tail())
        results.append([*norms, *state, *params, *(v for p in params for v in optimizer.state[p].values())])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


# --- whole iterations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "make"),
    [("O1", lambda p: torch.optim.SGD(p, lr=0.1)), ("O2", FUSED["FusedAdam"])],
    ids=["O1-SGD", "O2-FusedAdam"],
)
def test_a_compiled_iteration_does_what_the_plain_one_does(level, make):
    """amp's own part runs outside of graphs: what it keeps between steps is nothing for a graph to hold."""
    results = []
    for compiled in (False, True):
        session, model = AmpSession(), Net()
        optimizer = make(model.parameters())
        session.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)

        def iterate(scale, session=session, model=model, optimizer=optimizer):
            loss = loss_of(model(X, scale))
            backward(session, loss, optimizer)
            clip_grad_norm_(session.master_params(optimizer), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        if compiled:
            iterate = torch.compile(iterate, backend="eager")
        losses = [iterate(torch.tensor(scale)).item() for scale in (1.0, 1.0, 1e30, 1.0)]
        history = session.history(optimizer)
        results.append((str(losses), history.skipped, history.scale, copy.deepcopy(model.state_dict())))
        session.reset()
    plain, other = results
    assert plain[:3] == other[:3]
    assert plain[1] == [False, False, True, False]
    for name, value in plain[3].items():
        assert torch.equal(value, other[3][name]), name


def test_fullgraph_says_why_a_step_under_amp_is_in_no_graph(session):
    model = Net()
    optimizer = optimizers.FusedAdam(model.parameters())
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with pytest.raises(Exception, match="amp keeps gradients apart and decides about steps on the host"):
        torch.compile(lambda: optimizer.step(), backend="eager", fullgraph=True)()


def test_clipping_without_kernels_is_in_the_graph():
    """Of complex gradients."""
    clipped = []
    for compiled in (False, True):
        p = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
        p.grad = torch.tensor([3 + 4j, 0, 1j])
        clip = torch.compile(clip_grad_norm_, backend="eager", fullgraph=True) if compiled else clip_grad_norm_
        clipped += [(clip([p], 1.0), p.grad)]
    torch.testing.assert_close(clipped[1], clipped[0])
