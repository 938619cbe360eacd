"""Each hint is said once, of the mistake that it is for, and of no correct program. Then the loop pays nothing."""

import warnings

import pytest
import torch
from host_reads import HostReads
from kit import LEVELS, assert_same, backward, batch, in_thread, loss_of, mlp, probe, probes, start, train
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_

from ampctx import AmpSession, AmpWarning
from ampctx.amp.hints import ENOUGH_STEPS, FIRST_STEPS

SCALED = [("O0", 128.0), ("O1", "dynamic"), ("O4", 128.0), ("O2", "dynamic"), ("O5", 128.0)]


# --- a correct loop ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_nobody_listens_after_the_first_steps(session, said, level):
    models, both = probes(session, level, loss_scale="dynamic", verbosity=1)
    for i in range(FIRST_STEPS):
        assert session._hints, i
        for model, optimizer in zip(models, both, strict=True):
            backward(session, model.loss(1.0), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    assert session._hints == said() == []


def test_nothing_is_said_at_verbosity_0(session, said):
    model, optimizer = probe(session, "O1", loss_scale="dynamic", verbosity=0)
    assert session._hints == []
    model.loss(1.0).backward()
    optimizer.step()
    assert said() == []


@pytest.mark.parametrize("level", LEVELS)
def test_a_warning_that_is_an_error_changes_nothing_and_the_loop_goes_on(session, level):
    model, optimizer = probe(session, level, loss_scale="dynamic", verbosity=1)
    before = [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpWarning)
        with pytest.raises(AmpWarning, match=PLAIN), session.scale_loss(model.loss(1.0), optimizer):
            model.loss(1.0).backward()
        assert_same(list(model.parameters()), before)
        assert all(p.grad is None for p in model.parameters())
        backward(session, model.loss(1.0), optimizer)
        optimizer.step()
    assert not any(map(torch.equal, model.parameters(), before))


def test_a_warning_names_the_line_of_the_program(session):
    _, optimizer = probe(session, "O1", verbosity=1)
    with pytest.warns(AmpWarning, match="none of its parameters has a gradient") as told:
        optimizer.step()
    assert [warning.filename for warning in told] == [__file__]


# --- backward through the loss that is not scaled ---------------------------------------------------------------------

PLAIN = "amp.scale_loss: gradients have arrived in the block, and no backward went through the scaled loss"


@pytest.mark.parametrize("second", [False, True], ids=["", "second-optimizer"])
@pytest.mark.parametrize(("level", "scale"), SCALED)
def test_a_backward_past_the_scaled_loss_is_said_once(session, said, level, scale, second):
    models, both = probes(session, level, loss_scale=scale, verbosity=1)
    model, optimizer = models[second], both[second]
    if second:
        backward(session, models[0].loss(1.0), both[0])
    for _ in range(3):
        loss = model.loss(1.0)
        with session.scale_loss(loss, optimizer):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    (message,) = said()
    assert message.startswith(PLAIN)
    assert "Call scaled_loss.backward(), not loss.backward()" in message


def _by_grad(scaled, model):
    for p, grad in zip(model.parameters(), torch.autograd.grad(scaled, list(model.parameters())), strict=True):
        p.grad = grad


def _compiled(scaled, model):
    # Private by name, and what switches compiled autograd on for a graph that is there.
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        scaled.backward()
    assert model.weight.grad is not None


BACKWARDS = {
    "backward": lambda scaled, model: scaled.backward(),
    "divided": lambda scaled, model: (scaled / 2 + scaled / 2).backward(),
    "create_graph": lambda scaled, model: (scaled + 0 * scaled.square()).backward(create_graph=True),
    "grad": _by_grad,
    "thread": lambda scaled, model: in_thread(scaled.backward),
    "compiled": pytest.param(_compiled, marks=pytest.mark.full),
    "none": lambda scaled, model: None,
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("how", BACKWARDS.values(), ids=BACKWARDS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_every_backward_through_the_scaled_loss_counts(session, said, level, how):
    model, optimizer = probe(session, level, loss_scale="dynamic", verbosity=1)
    with session.scale_loss(model.loss(1.0), optimizer) as scaled:
        how(scaled, model)
    assert said() == []


def test_gradients_by_hand_and_those_of_delayed_blocks_are_no_plain_backward(session, said):
    model, optimizer = probe(session, "O2", 2, loss_scale="dynamic", verbosity=1)
    with session.scale_loss(torch.zeros(()), optimizer):
        model.weight.grad = torch.ones_like(model.weight)
    optimizer.zero_grad()
    backward(session, model.loss(1.0), optimizer, delay_unscale=True)
    with session.scale_loss(model.loss(1.0), optimizer, loss_id=1):
        pass
    assert said() == []


# --- hooks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize(("level", "scale"), SCALED)
def test_hooks_on_parameters_are_said_to_see_scaled_gradients(session, said, level, scale, register):
    model = mlp()
    getattr(model[3].bias, register)(lambda _: None)
    model, optimizer = start(session, level, "SGD-foreach", model, loss_scale=scale, verbosity=1)
    train(session, model, optimizer, steps=2)
    (message,) = said()
    assert message.startswith('amp.scale_loss: hooks on "3.bias" see gradients multiplied by the loss scale.')


@pytest.mark.parametrize("options", [{"loss_scale": 1.0}, {"loss_scale": 1.0, "skip_nonfinite": True}])
def test_hooks_are_right_where_the_scale_is_1(session, said, options):
    model = mlp()
    model[3].bias.register_hook(lambda grad: grad.clamp(-1, 1))
    model, optimizer = start(session, "O4", "SGD-foreach", model, verbosity=1, **options)
    train(session, model, optimizer)
    assert said() == []


# --- clipping by torch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["model", "masters"])
@pytest.mark.parametrize("where", ["block", "delayed", "after"])
@pytest.mark.parametrize("level", LEVELS)
def test_torchs_clipping_of_scaled_gradients_or_of_none_is_said_once(session, said, level, where, of):
    before = clip_grad._clip_grads_with_norm_
    model, optimizer = probe(session, level, verbosity=1)
    has_masters, is_scaled = level in ("O2", "O5"), level in ("O1", "O2", "O5")

    def clip():
        clip_grad_norm_(model.parameters() if of == "model" else session.master_params(optimizer), 1.0)

    for _ in range(FIRST_STEPS):
        with session.scale_loss(model.loss(1.0), optimizer, delay_unscale=where == "delayed") as scaled:
            scaled.backward()
            if where == "block":
                clip()
        if where != "block":
            clip()
        optimizer.step()
        optimizer.zero_grad()
    found = said()
    expected = {"block": "inside a scale_loss block", "delayed": "was called between", "after": "has no gradient"}[
        where
    ]
    is_said = is_scaled if where != "after" else has_masters and of == "model"
    assert [m.startswith("torch.nn.utils.clip_grad_norm_") and expected in m for m in found] == [True] * is_said
    assert clip_grad._clip_grads_with_norm_ is before


# --- a forgotten scale_loss, a forgotten loss_id ----------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_forgotten_scale_loss_is_said_once(session, said, level):
    models, both = probes(session, level, loss_scale="dynamic", verbosity=1)
    for optimizer, model in zip(both, models, strict=True):
        for _ in range(2):
            model.loss(1.0).backward()
            optimizer.step()
    (message,) = said()
    assert message.startswith(
        "SGD.step(): no scale_loss block has named this optimizer, and its loss scale is dynamic."
    )


@pytest.mark.parametrize("level", LEVELS)
def test_plain_backwards_pass_where_the_scale_is_static_or_blocks_are_there_too(session, said, level):
    model, optimizer = probe(session, level, loss_scale=1.0, verbosity=1)
    model.loss(1.0).backward()
    optimizer.step()
    session.reset()
    model, optimizer = probe(session, level, loss_scale="dynamic", verbosity=1)
    optimizer.step(lambda: backward(session, model.loss(1.0), optimizer))
    optimizer.zero_grad()
    model.loss(1.0).backward()
    optimizer.step()
    assert said() == []


def run_losses(session, number, used, steps=ENOUGH_STEPS, rarely=False):
    """``rarely``: the second optimizer takes no step."""
    models, both = probes(session, "O1", loss_scale="dynamic", num_losses=number, verbosity=1)
    for _ in range(steps):
        for loss_id, model, optimizer in list(zip(used, models, both, strict=True))[: 1 if rarely else 2]:
            backward(session, model.loss(0.0), optimizer, loss_id=loss_id)
            optimizer.step()
            optimizer.zero_grad()


def test_loss_ids_that_are_never_used_are_named_once(session, said):
    run_losses(session, 3, (0, 0), steps=2 * ENOUGH_STEPS)
    (message,) = said()
    assert message.startswith("amp.initialize(num_losses=3): after 100 steps of each optimizer")
    assert "no scale_loss block has used loss_id=1, 2." in message


@pytest.mark.parametrize(
    ("number", "used", "steps", "rarely"),
    [
        *((2, (0, 1), 100, False), (2, (-1, 0), 100, False), (1, (0, 0), 100, False)),
        *((2, (0, 0), 99, False), (2, (0, 0), 100, True)),
    ],
)
def test_nothing_is_said_of_loss_ids_that_are_used_or_may_be_still(session, said, number, used, steps, rarely):
    run_losses(session, number, used, steps, rarely)
    assert said() == []


# --- steps without gradients, parameters without an optimizer ---------------------------------------------------------


@pytest.mark.parametrize("make", ["SGD-foreach", "FusedAdam"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_step_without_gradients_is_said_once(session, said, level, make):
    model, optimizer = start(session, level, make, verbosity=1)
    for _ in range(2):
        backward(session, loss_of(model), optimizer)
        optimizer.zero_grad()
        optimizer.step()
    (message,) = said()
    assert message.startswith(f"{type(optimizer).__name__}.step() changes nothing: none of its parameters has a grad")


def replace_layer(model):
    model[3] = nn.Linear(8, 2)


def replace_weight(model):
    model[3].weight = nn.Parameter(torch.randn(2, 8))


@pytest.mark.full(but=4)
@pytest.mark.parametrize("replace", [replace_layer, replace_weight])
@pytest.mark.parametrize(("level", "when"), [("O1", "before"), ("O1", "after"), ("O2", "before"), ("O4", "after")])
def test_replaced_parameters_are_named_after_the_first_step(session, said, level, when, replace):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if when == "before":
        replace(model)
    session.initialize(model, optimizer, opt_level=level, verbosity=1)
    if when == "after":
        replace(model)
    train(session, model, optimizer, steps=3)
    (message,) = said()
    names = '"3.weight", "3.bias"' if replace is replace_layer else '"3.weight"'
    assert message.startswith(f"SGD.step(): {names} got gradients and are in no optimizer")


LEFT_OUT = '"0.weight", "0.bias", "1.weight" and 1 more'


@pytest.mark.parametrize("closure", [False, True])
def test_parameters_that_were_left_out_are_named(session, said, closure):
    model = mlp()
    optimizer = start(session, "O1", lambda _: torch.optim.SGD(model[3].parameters(), lr=0.01), model, verbosity=1)[1]

    def evaluate():
        optimizer.zero_grad()
        backward(session, loss_of(model), optimizer)

    for _ in range(2):
        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
    (message,) = said()
    assert message.startswith(f"SGD.step(): {LEFT_OUT} got gradients")


def test_each_initialize_of_a_session_names_what_it_left_out(session, said):
    runs = []
    for _ in range(2):
        model = mlp()
        runs.append(
            start(session, "O1", lambda _, m=model: torch.optim.SGD(m[3].parameters(), lr=0.01), model, verbosity=1)
        )
    for model, optimizer in [*runs, *runs]:
        train(session, model, optimizer, steps=1)
    assert [message.split(" got ")[0] for message in said()] == [f"SGD.step(): {LEFT_OUT}"] * 2


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_what_is_not_to_train_or_trains_elsewhere_is_not_named(session, said, level):
    """Frozen and unused parameters, a teacher, one whose gradients nobody wants, an optimizer without amp, a second one
    under amp, and a loss with a parameter of its own."""
    model, teacher, critic = mlp(0), mlp(1), mlp(2)
    model.unused = nn.Linear(3, 3)
    model.head, model.by_another = nn.Linear(2, 2), nn.BatchNorm1d(2)
    model[1].requires_grad_(False)
    temperature = nn.Parameter(torch.ones(()))
    params = [p for n, p in model.named_parameters() if not n.startswith(("by_another", "unused", "head"))]
    both = [torch.optim.SGD(p, lr=0.01) for p in ([*params, temperature], model.head.parameters())]
    plain = torch.optim.SGD(model.by_another.parameters(), lr=0.01)
    session.initialize([model, teacher, critic], both, opt_level=level, verbosity=1)
    for seed in range(2):
        x = batch(seed)
        for module in (*model[:4], model.head):
            x = module(x.to(module.weight.dtype) if hasattr(module, "weight") else x)
        with torch.no_grad():
            wanted = teacher(batch(seed)).float()
        loss = ((model.by_another(x.float()) - wanted) * temperature).square().mean()
        backward(session, loss + critic(x.repeat(1, 2)).float().mean(), both)
        for optimizer in (*both, plain):
            optimizer.step()
            optimizer.zero_grad()
    assert said() == []


@pytest.mark.parametrize("optimizers", [None, []])
def test_without_optimizers_there_is_nothing_to_say(session, said, optimizers):
    model = mlp()
    session.initialize(model, optimizers, opt_level="O4", verbosity=1)
    train(session, model, torch.optim.SGD(model[3].parameters(), lr=0.01))
    assert said() == []


def test_models_of_two_sessions_with_one_loss_are_both_trained(said):
    sessions = [AmpSession(), AmpSession()]
    (first, a), (second, b) = [start(s, "O4", "SGD-foreach", verbosity=1) for s in sessions]
    try:
        for _ in range(2):
            loss = second(first(batch()).repeat(1, 2)).float().square().mean()
            backward(sessions[0], loss, a)
            for optimizer in (a, b):
                optimizer.step()
                optimizer.zero_grad()
        assert said() == []
    finally:
        for session in reversed(sessions):
            session.reset()


# --- optimizers that step other tensors than their masters, averages without one --------------------------------------


class Keeps(torch.optim.SGD):
    """Steps the parameters that it was given, as some programs' optimizers do."""

    def __init__(self, params):
        self.kept = list(params)
        super().__init__(self.kept, lr=0.1)

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for p in self.kept if p.grad is not None):
            p.sub_(p.grad, alpha=0.1)


class WritesData(torch.optim.SGD):
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.data.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("first_is_skipped", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_step_that_changes_no_master_is_said_once(session, said, level, first_is_skipped):
    model, optimizer = start(session, level, Keeps, verbosity=1, loss_scale="dynamic")
    train(session, model, optimizer, steps=4, overflow_at=[0] if first_is_skipped else [])
    (message,) = said()
    assert message.startswith("Keeps.step() has changed no fp32 master weight")
    assert not session._hints


@pytest.mark.parametrize("make", [WritesData, torch.optim.LBFGS, lambda params: torch.optim.SGD(params, lr=0.0)])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_steps_that_write_in_another_way_or_have_no_rate_are_right(session, said, level, make):
    model, optimizer = start(session, level, make, verbosity=1, loss_scale=1.0)

    def evaluate():
        optimizer.zero_grad()
        backward(session, loss := loss_of(model), optimizer)
        return loss

    for _ in range(3):
        evaluate()
        optimizer.step(*[evaluate] * isinstance(optimizer, torch.optim.LBFGS))
    assert said() == []


def test_a_step_that_writes_few_rows_in_another_way_is_right(session, said):
    model, optimizer = start(session, "O2", WritesData, nn.Embedding(100, 4), verbosity=1, loss_scale=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        backward(session, model(torch.tensor([50, 60])).square().sum(), optimizer)
        optimizer.step()
    assert said() == []


@pytest.mark.parametrize("assigns", [False, True])
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_an_average_in_16_bits_is_said_once(session, said, level, assigns):
    model, average = mlp(0), mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.initialize([model, average], optimizer, opt_level=level, verbosity=1)

    @torch.no_grad()
    def follow():
        for kept, p in zip(average.parameters(), model.parameters(), strict=True):
            if assigns:
                kept.data = kept.data * 0.9 + p.data * 0.1
            else:
                kept.lerp_(p, 0.1)

    train(session, model, optimizer, steps=3, after_step=follow)
    (message,) = said()
    assert message.startswith('amp: "models[1].0.weight", "models[1].0.bias", "models[1].')
    assert "An average in 16 bits loses small changes" in message


@pytest.mark.full(but=4)
@pytest.mark.parametrize("source", ["model", "masters"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_an_averaged_model_of_a_16_bit_model_is_said_once(session, said, only_new_objects, level, source):
    model, optimizer = start(session, level, verbosity=1)

    def now():
        return model if source == "model" else session.master_model(model)

    average = torch.optim.swa_utils.AveragedModel(now())
    _ = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2).half())  # of another model
    train(session, model, optimizer, steps=3, after_step=lambda: average.update_parameters(now()))
    expected = ["amp: an AveragedModel was made of a 16-bit model."] * (level != "O1" and source == "model")
    assert [message[:49] for message in said()] == expected


# --- a scale that bad batches push down -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["SGD-foreach", "FusedSGD"])
@pytest.mark.parametrize("history", [0, 10])
def test_a_scale_below_1_is_logged_once_with_the_rate_of_skips(session, caplog, make, history):
    counts = []
    for verbosity in (1, 0):
        model, optimizer = start(session, "O1", make, verbosity=verbosity, max_loss_scale=2.0, history=history)
        with HostReads() as reads, warnings.catch_warnings():
            warnings.simplefilter("error", AmpWarning)  # the step has to be recorded
            train(session, model, optimizer, steps=8, overflow_at=(1, 4, 6))
        counts.append(reads.count)
        session.reset()
    (message,) = [m for m in caplog.messages if "loss scale fell" in m]
    assert message.startswith("ampctx: the loss scale fell to 0.5, after 2 skips in 5 steps.")
    assert "min_loss_scale=1.0" in message
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("bound", "overflow_at"), [({"min_loss_scale": 0.25}, (1, 4, 7)), ({}, range(8))], ids=str)
def test_a_lower_bound_that_was_chosen_and_overflows_for_ever_are_no_matter_of_bad_batches(
    session, caplog, bound, overflow_at
):
    model, optimizer = start(session, "O1", "SGD-foreach", verbosity=1, max_loss_scale=2.0, **bound)
    train(session, model, optimizer, steps=8, overflow_at=overflow_at)
    assert not any("loss scale fell" in message for message in caplog.messages)
