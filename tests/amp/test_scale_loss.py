"""scale_loss: unscaling, accumulation, exceptions, errors."""

import logging

import pytest
import torch
from kit import INF, LEVELS, START, Probe, backward, every_level, grads, probe, start
from torch import nn

from ampctx import AmpError, AmpIndexError, AmpTypeError
from ampctx.optimizers import FusedAdam


@pytest.mark.parametrize("level", LEVELS)
def test_yields_the_scaled_fp32_loss(session, level):
    model, optimizer = probe(session, level, loss_scale=64.0)
    loss = model.loss(1.0)
    with session.scale_loss(loss.half(), optimizer) as scaled:
        assert scaled.dtype == torch.float32
        assert scaled.item() == loss.half().item() * 64
    with session.scale_loss(loss.double(), optimizer) as scaled:
        assert scaled.dtype == torch.float64


def test_a_static_scale_of_one_leaves_gradients_as_backward_left_them(session):
    table, optimizer = start(session, "O0", "SGD-plain", nn.Embedding(4, 2, sparse=True))
    with session.scale_loss(table(torch.tensor([1, 1])).sum(), optimizer) as scaled:
        scaled.backward()
        grad = table.weight.grad
        assert not grad.is_coalesced()
    assert table.weight.grad is grad


def test_errors_of_scale_loss(session):
    def enter(loss, *args, **options):
        with session.scale_loss(loss, *args, **options):
            pytest.fail("the block was entered")

    with pytest.raises(
        AmpError, match="Invoked 'with amp.scale_loss', but internal Amp state has not been initialized"
    ):
        enter(torch.ones(()), [])
    model, optimizer = probe(session, "O2", n_losses=2)
    stranger = torch.optim.SGD(Probe().parameters(), lr=0.1)
    for kind, message, args in (
        (AmpIndexError, "loss_id is 2, and num_losses=2", (model.loss(1.0), optimizer, 2)),
        (AmpTypeError, "loss is torch.complex64", (torch.ones(()) * 1j, optimizer)),
        (AmpTypeError, "loss must be a tensor, got float", (1.0, optimizer)),
        (AmpError, r"\[1\] \(SGD\) did not go through amp.initialize", (model.loss(1.0), (optimizer, stranger))),
        *(
            (
                AmpTypeError,
                "loss_id must be an int, got .*from 0 to num_losses - 1",
                (model.loss(1.0), optimizer, loss_id),
            )
            for loss_id in ("0", None, 1.0, True, [0], torch.tensor(1))
        ),
    ):
        with pytest.raises(kind, match=message):
            enter(*args)
    backward(session, model.loss(1.0), optimizer)
    for call in (optimizer.step, session.reset):
        with pytest.raises(AmpError, match="inside a scale_loss block"), session.scale_loss(model.loss(1.0), optimizer):
            call()


def test_messages_go_to_the_logger_and_are_few(session, caplog):
    model, optimizer = probe(session, "O1")
    session.verbosity = 1
    with caplog.at_level(logging.WARNING, "ampctx"):
        for _ in range(100):
            backward(session, model.loss(INF), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    texts = [r.getMessage() for r in caplog.records]
    assert texts[0] == "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 2048.0"
    assert texts[1].startswith("ampctx: non-finite gradients: weight (3 inf of 3), norm.weight")
    assert texts[2].startswith("ampctx: a few skipped steps are normal")
    assert sum(t.startswith("ampctx: a few skipped") for t in texts) == 1
    assert len(texts) < 20
    assert "ampctx: 64 steps skipped so far" in texts
    caplog.clear()
    session.verbosity = 0
    backward(session, model.loss(INF), optimizer)
    optimizer.step()
    assert not caplog.records


def test_an_integer_of_numpy_is_a_loss_id(session):
    np = pytest.importorskip("numpy")
    model, optimizer = probe(session, "O1", n_losses=2)
    backward(session, model.loss(float("inf")), optimizer, loss_id=np.int64(1))
    optimizer.step()
    assert set(session.outcome(optimizer).overflowed) == {1}
    assert session.state_dict()["loss_scaler1"]["loss_scale"] == START / 2


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("kind", ["one-tensor", "two-views"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_gradient_that_two_parameters_hold_is_unscaled_once(session, level, kind, to_none):
    """As code does that ties weights by hand, in some of its blocks."""
    model = nn.ParameterList([torch.ones(3), torch.ones(3), torch.ones(2)])
    optimizer = FusedAdam(model.parameters())
    model, optimizer = session.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    first, second, other = model.parameters()
    for is_shared in (True, False, True):
        with session.scale_loss(first.sum() + 5 * second.sum() + other.sum(), optimizer) as loss:
            loss.backward()
            if is_shared:
                second.grad = first.grad if kind == "one-tensor" else first.grad.view(3)
        assert [g[0].item() for g in grads(session, optimizer)] == [1.0, 1.0 if is_shared else 5.0, 1.0]
        optimizer.zero_grad(set_to_none=to_none)


def test_optimizers_of_one_block_unscale_a_gradient_that_they_share_once(session):
    model = nn.ParameterList([torch.ones(3), torch.ones(3)])
    opts = [FusedAdam([p]) for p in model]
    session.initialize(model, opts, loss_scale=64.0, verbosity=0)
    with session.scale_loss(model[0].sum(), opts) as loss:
        loss.backward()
        model[1].grad = model[0].grad
    assert [p.grad[0].item() for p in model] == [1.0, 1.0]


def test_a_shared_gradient_is_added_to_those_of_both_parameters(session):
    model = nn.ParameterList([torch.ones(3), torch.ones(3), torch.ones(3)])
    model, optimizer = session.initialize(model, FusedAdam(model.parameters()), loss_scale=64.0, verbosity=0)
    first, second, third = model.parameters()
    for p, before in ((first, 1.0), (second, 2.0)):
        p.grad = torch.full((3,), before)
    with session.scale_loss(4 * first.sum(), optimizer) as loss:
        loss.backward()
        second.grad = third.grad = first.grad
    assert [p.grad[0].item() for p in (first, second, third)] == [5.0, 6.0, 4.0]


@every_level
def test_a_block_after_an_overflow_inside_has_the_new_scale(session, level):
    model, optimizer = probe(session, level, loss_scale="dynamic", init_scale=START)
    with session.scale_loss(model.loss(1.0), optimizer):
        backward(session, model.loss(INF), optimizer)
        with session.scale_loss(torch.ones(()), optimizer) as scaled:
            assert scaled == START / 2


@every_level
def test_a_load_between_blocks_leaves_the_gradients_of_the_one_around(session, level):
    model, optimizer = probe(session, level, loss_scale=4.0)
    with session.scale_loss(model.loss(1.0), optimizer) as scaled:
        scaled.backward(retain_graph=True)
        model.load_state_dict(model.state_dict())
        backward(session, model.loss(2.0), optimizer)
    assert all(grad.eq(3.0).all() for grad in grads(session, optimizer))


class Wrapper(torch.optim.Optimizer):
    """Passes calls on to an optimizer, as those of accelerate and Fabric do. It sets up nothing of its own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattribute__(self, name):
        own = name in ("optimizer", "__dict__", "__class__")
        return object.__getattribute__(self, name) if own else getattr(self.optimizer, name)


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_that_a_framework_wraps_after_initialize_is_the_one_inside(session, level):
    model, optimizer = probe(session, level)
    wrapper = Wrapper(optimizer)
    backward(session, model.loss(0.5), wrapper)
    for grad in grads(session, optimizer):
        assert torch.equal(grad, torch.full_like(grad, 0.5))
    wrapper.step()
    assert session.outcome(wrapper) is session.outcome(optimizer)
    assert session.outcome(optimizer).stepped


@pytest.mark.parametrize(
    ("levels", "options", "is_refused"),
    [
        *(("O2 O2", {}, True), ("O5 O2", {}, True), ("O1 O4", {}, True), ("O5 O5", {}, False)),
        ("O2 O2", {"loss_scale": 8.0}, False),
    ],
)
def test_optimizers_of_several_calls_share_no_loss_unless_at_one_static_scale(session, levels, options, is_refused):
    (one, first), (two, second) = [probe(session, level, **options) for level in levels.split()]
    for model, optimizer in ((one, first), (two, second)):
        backward(session, model.loss(1.0), optimizer)
    if is_refused:
        with pytest.raises(AmpError, match=r"went through several amp.initialize calls.*share a loss to one call"):
            backward(session, one.loss(1.0) + two.loss(1.0), [first, second])
    else:
        backward(session, one.loss(1.0) + two.loss(1.0), [first, second])
    for optimizer in (first, second):
        assert grads(session, optimizer)[0].mean().item() == (1.0 if is_refused else 2.0)
