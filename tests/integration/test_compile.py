"""torch.compile beside amp: containers, the tail, whole iterations. Models that it wraps: amp/test_wrap_order.py."""

import copy
from collections import OrderedDict

import pytest
import torch
from kit import OPTIMIZERS, Net, assert_same, backward, goes_on_where_dynamo_ends, start, traces_switches
from torch import nn

from ampctx import AmpSession, clip_grad_norm_, ops

# Hooks of the model that is compiled get graphs of their own from torch, which asks what goes into one for ``.grad``.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
X = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


# --- what goes into a model and comes out of it -----------------------------------------------------------------------


class Passes(nn.Linear):
    def forward(self, x, given):
        return {"value": super().forward(x), "more": (x, [x, "kept"])}, given


def test_containers_come_through_whole(session):
    """Dynamo copies mappings without their entries and cannot compare tuples: no cast has it do so."""
    model, x = Passes(3, 3), torch.randn(2, 3)
    session.initialize(model, opt_level="O2", verbosity=0)
    given = OrderedDict(value=x, note="kept")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for got, wanted in zip(compiled(x, given), model(x, given), strict=True):
        assert type(got) is type(wanted)
        assert str(got) == str(wanted)


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


@traces_switches
@pytest.mark.parametrize("make", ["FusedAdam", "FusedLAMB", pytest.param("FusedMuon", marks=pytest.mark.full)])
def test_the_tail_is_one_graph(make):
    results = []
    for compiled in (False, True):
        params = with_gradients()
        optimizer = OPTIMIZERS[make](params, lr=0.1)
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


@goes_on_where_dynamo_ends
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own use
@pytest.mark.parametrize(("level", "make"), [("O1", "SGD-foreach"), ("O2", "FusedAdam")])
def test_a_compiled_iteration_does_what_the_plain_one_does(level, make):
    """amp's own part runs outside of graphs: what it keeps between steps is nothing for a graph to hold. Also where the
    program compiles ``step`` first."""

    def with_compiled_step(params):
        optimizer = OPTIMIZERS[make](params)
        optimizer.step = torch.compile(optimizer.step, backend="eager")
        return optimizer

    results = []
    for compiled in ("nothing", "iteration", "step"):
        session = AmpSession()
        made_by = with_compiled_step if compiled == "step" else make
        model, optimizer = start(session, level, made_by, Net(), loss_scale="dynamic")

        def iterate(scale, session=session, model=model, optimizer=optimizer):
            loss = (model(X) * scale).float().square().mean()
            backward(session, loss, optimizer)
            clip_grad_norm_(session.master_params(optimizer), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        if compiled == "iteration":
            iterate = torch.compile(iterate, backend="eager")
        losses = [iterate(torch.tensor(scale)).item() for scale in (1.0, 1.0, 1e30, 1.0)]
        history = session.history(optimizer)
        results.append((str(losses), history.skipped, history.scale, copy.deepcopy(model.state_dict())))
        session.reset()
    plain, *others = results
    assert plain[1] == [False, False, True, False]
    for other in others:
        assert plain[:3] == other[:3]
        assert_same(other[3], plain[3])


def test_fullgraph_says_why_a_step_under_amp_is_in_no_graph(session):
    _, optimizer = start(session, "O2", "FusedAdam", Net())
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
