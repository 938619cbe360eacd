"""Clipping and reading gradients in the wrong place, and parameters that no optimizer steps: said once."""

import copy
import gc
import io
import logging
import pickle

import pytest
import torch
from kit import backward, batch, loss_of, mlp, start, train
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import ampctx
from ampctx import AmpError, AmpSession

MAKE = {"ours": "FusedAdam", "torch": "SGD-foreach"}


def begin(session, level, make="SGD-foreach", **options):
    return start(session, level, make, verbosity=1, **options)


def at_any_moment(in_block, before_step, after_step):
    return {"in_block": in_block, "before_step": before_step, "after_step": after_step}


@pytest.fixture
def said(caplog):
    """Warnings so far, but those of skipped steps."""
    caplog.set_level(logging.WARNING, "ampctx")
    of_skips = ("Gradient overflow", "ampctx: ")
    return lambda: [m for m in caplog.messages if not m.startswith(of_skips)]


def grad_norm(params):
    total = torch.zeros(())
    for p in params:
        if p.grad is not None:
            total = total + p.grad.float().norm()
    return total


SCRIPT = """
norms = []
for i, (name, p) in enumerate(model.named_parameters()):
    if p.grad is not None:
        norms.append(p.grad.norm())
"""


def norm_beside_a_gradient_penalty(model):
    x = torch.ones(1, requires_grad=True)
    total = torch.autograd.grad(x, x)[0]
    for i, (_name, p) in enumerate(model.named_parameters()):
        total = total + i * (0.0 if p.grad is None else p.grad.norm())
    return total


CLIPS = {
    "a generator": lambda model: clip_grad_norm_(model.parameters(), 1.0),
    "some of them": lambda model: clip_grad_norm_((p for p in model.parameters() if p.requires_grad), 1.0),
    "by value": lambda model: clip_grad_value_(model.parameters(), 1.0),
    "by ours": lambda model: ampctx.clip_grad_norm_(model.parameters(), 1.0),
}
READS = {
    "a loop": lambda model: grad_norm(model.parameters()),
    "names": lambda model: {n: p.grad.norm() for n, p in model.named_parameters() if p.grad is not None},
    "beside other gradients": lambda model: norm_beside_a_gradient_penalty(model),
    "in a script": lambda model: exec(SCRIPT, {"model": model}),
    "a sum": lambda model: sum(p.grad.float().norm() for p in model.parameters() if p.grad is not None),
}


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize(("level", "options"), [("O1", {}), ("O2", {}), ("O5", {"loss_scale": 128.0})])
@pytest.mark.full(but=4)
def test_clipping_scaled_gradients_is_said_once(session, said, level, options, clip):
    model, optimizer = begin(session, level, **options)
    train(session, model, optimizer, in_block=lambda: clip(model), steps=3)
    [message] = said()
    assert message.startswith("model.parameters() were clipped inside a scale_loss block")
    assert "Clip amp.master_params(optimizer) after the block" in message


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize(
    ("level", "reason"), [("O1", "multiplied by the loss scale"), ("O5", "at the end of the block")]
)
def test_reading_gradients_by_master_params_in_a_block_is_said_once(session, said, level, reason, clips):
    model, optimizer = begin(session, level)
    read = (lambda p: clip_grad_norm_(p, 1.0)) if clips else grad_norm
    train(session, model, optimizer, in_block=lambda: read(session.master_params(optimizer)), steps=3)
    [message] = said()
    assert message.startswith("amp.master_params(optimizer): gradients were " + ("clipped" if clips else "read"))
    assert reason in message


def test_a_loop_over_masters_in_a_block_is_seen_where_it_stands(session, said):
    model, optimizer = begin(session, "O1")
    with session.scale_loss(loss_of(model), optimizer) as scaled_loss:
        scaled_loss.backward()
        norms = [p.grad.norm() for p in session.master_params(optimizer)]
    assert len(norms) == len(list(model.parameters()))
    [message] = said()
    assert message.startswith("amp.master_params(optimizer): gradients were read inside a scale_loss block")


def test_clipping_between_delayed_blocks_is_said(session, said):
    model, optimizer = begin(session, "O1")
    backward(session, loss_of(model), optimizer, delay_unscale=True)
    clip_grad_norm_(session.master_params(optimizer), 1.0)
    [message] = said()
    assert "clipped between blocks with delay_unscale=True" in message


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("use", [*list(CLIPS.values())[:3], *READS.values()], ids=[*list(CLIPS)[:3], *READS])
@pytest.mark.full(but=7)
def test_gradients_that_are_in_masters_are_said_once(session, said, level, name, use):
    model, optimizer = begin(session, level, MAKE[name])
    train(session, model, optimizer, before_step=lambda: use(model), steps=3)
    [message] = said()
    clips = use in CLIPS.values()
    assert message.startswith('model.parameters(): "0.weight", "0.bias", "3.weight" and 1 more had grad None')
    assert f"{'clipped' if clips else 'read'} after a scale_loss block" in message
    assert f"{'Clip' if clips else 'Read'} those of amp.master_params(optimizer)" in message


SEEN = {
    "after the step": ("after_step", lambda model: grad_norm(model.parameters())),
    "DP": ("before_step", lambda model: clip_grad_norm_(nn.DataParallel(model).parameters(), 1.0)),
    "around": ("before_step", lambda model: clip_grad_norm_(nn.Sequential(model).parameters(), 1.0)),
    "part": ("before_step", lambda model: clip_grad_norm_(model[0].parameters(), 1.0)),
}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(("when", "use"), SEEN.values(), ids=SEEN)
def test_wrappers_and_parts_of_a_model_and_reads_after_the_step_are_seen(session, said, name, when, use):
    model, optimizer = begin(session, "O5", MAKE[name])
    train(session, model, optimizer, **{when: lambda: use(model)})
    assert len(said()) == 1


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("norm_type", [2.0, 1.0])
@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.full(but=4)
def test_our_clipping_refuses_parameters_whose_gradients_are_in_masters(session, said, name, norm_type, as_list):
    model, optimizer = begin(session, "O5", MAKE[name])
    params = list(model.parameters()) if as_list else model.parameters()
    backward(session, loss_of(model), optimizer)
    with pytest.raises(AmpError, match=r'clip_grad_norm_: "0.weight" has no gradient.*Pass amp.master_params'):
        ampctx.clip_grad_norm_(params, 1.0, norm_type)
    assert not said()
    assert ampctx.clip_grad_norm_(session.master_params(optimizer), 1e-3) > 1e-3
    # Before a backward nobody has a gradient, and there is nothing to refuse.
    optimizer.step()
    optimizer.zero_grad()
    assert ampctx.clip_grad_norm_(model.parameters(), 1.0) == 0


def right(session, model, optimizer):
    """What programs do with parameters that is no mistake, at any moment."""
    device = next(model.parameters()).device
    n = sum(p.numel() for p in model.parameters() if p.requires_grad)
    for p in model.parameters():
        p.detach().float().norm()
    model.requires_grad_(True)
    names = dict(model.named_parameters()), [p.dtype for p in model.parameters()], model.state_dict()
    params = list(model.parameters())
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert [sum(p.numel() for p in c.parameters()) for c in copies] == [n, n]
    for p in session.master_params(optimizer):
        p.detach().norm()
    return device, names, params


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.full(but=3)
def test_what_programs_do_with_weights_is_not_a_mistake(session, said, level, name):
    model, optimizer = begin(session, level, MAKE[name])

    def clip():
        right(session, model, optimizer)
        clip_grad_norm_(session.master_params(optimizer), 1.0)
        clip_grad_value_(session.master_params(optimizer), 1.0)
        ampctx.clip_grad_norm_(session.master_params(optimizer), 1.0)
        assert grad_norm(session.master_params(optimizer)) > 0
        masters = list(session.master_params(optimizer))
        master_of = dict(zip(model.parameters(), masters, strict=True))
        for p in model.parameters():
            assert master_of[p].grad.shape == p.shape
        for p, master in zip(model.parameters(), masters, strict=True):
            assert master.grad.shape == p.shape

    def zero_by_hand():
        right(session, model, optimizer)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()
        for p in model.parameters():
            if p.grad is not None:
                p.grad = None
        model.zero_grad()

    train(session, model, optimizer, **at_any_moment(lambda: right(session, model, optimizer), clip, zero_by_hand))
    assert said() == []


def of_inputs(model, masters):
    """A gradient of something else in the function that goes over weights."""
    inputs = torch.randn(2, 3, requires_grad=True)
    for x, scale in [(inputs, 2.0)]:
        (x * scale).sum().backward()
        x.grad.sign()
    return [p.detach().norm() for p in model.parameters()], sum(p.numel() for _, p in model.named_parameters())


def by_autograd(model, masters):
    inputs = torch.randn(2, 3, requires_grad=True)
    (found,) = torch.autograd.grad(inputs.pow(2).sum(), inputs)
    for p in model.parameters():
        found = found.norm() + p.detach().float().norm()


def of_masters(model, masters):
    norms = []
    for p in masters:
        norms.append(0.0 if p.grad is None else p.grad.norm())
    for _, p in model.named_parameters():
        norms.append(p.detach().float().norm())


class Logger:
    grad = 0.0

    def __call__(self, model, masters):
        for p in model.parameters():
            assert self.grad < p.numel()


@pytest.mark.parametrize(
    "walk", [of_inputs, by_autograd, of_masters, Logger()], ids=lambda f: getattr(f, "__name__", "")
)
def test_other_gradients_beside_a_walk_over_weights_are_not_taken_for_theirs(session, said, walk):
    model, optimizer = begin(session, "O5")
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    train(session, model, optimizer, **at_any_moment(*[lambda: walk(model, masters)] * 3))
    assert said() == []


@pytest.mark.parametrize(("level", "options"), [("O0", {}), ("O4", {}), ("O1", {"loss_scale": 1.0}), ("O3", {})])
def test_without_scale_and_masters_gradients_may_be_used_anywhere(session, said, level, options):
    before = nn.Module._named_members
    model, optimizer = begin(session, level, **options)
    use = [lambda f=f: f(model) for f in (*CLIPS.values(), *READS.values())]
    use.append(lambda: clip_grad_norm_(session.master_params(optimizer), 1.0))
    train(session, model, optimizer, **at_any_moment(*[lambda: [f() for f in use]] * 3))
    assert said() == []
    assert nn.Module._named_members is before


def test_gradients_of_an_open_block_may_be_averaged_over_ranks_by_hand(session, said):
    model, optimizer = begin(session, "O2")

    def average():
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(2)

    train(session, model, optimizer, in_block=average)
    assert said() == []


def test_another_model_may_be_read_while_one_waits_for_its_step(session, said):
    """As in a GAN: the discriminator's gradients are done with when the generator's are there."""
    models, optimizers = [mlp(0), mlp(1)], []
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in models]
    session.initialize(models, optimizers, opt_level="O2", verbosity=1)
    other = mlp(2)
    for seed in range(2):
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            backward(session, loss_of(model, seed), optimizer)
            grad_norm(other.parameters())
            if seed == 0 and i == 0:
                grad_norm(models[1].parameters())
            optimizer.step()
            optimizer.zero_grad()
    assert said() == []


def test_nothing_is_said_at_verbosity_0(session, said):
    model, optimizer = begin(session, "O2")
    session.verbosity = 0
    clip, read = (lambda: CLIPS["a generator"](model)), (lambda: READS["a loop"](model))
    train(session, model, optimizer, in_block=clip, before_step=read)
    assert said() == []


def test_reset_ends_the_look_out_and_sessions_share_it():
    before = nn.Module._named_members
    sessions = [AmpSession(), AmpSession()]
    kept = [begin(s, "O2") for s in sessions]
    assert nn.Module._named_members is not before
    sessions[0].reset()
    assert nn.Module._named_members is not before
    del kept
    sessions.pop().reset()
    assert nn.Module._named_members is before
    # Of a session that nobody has any more, too.
    sessions.clear()
    session = AmpSession()
    begin(session, "O2")
    del session
    gc.collect()
    assert nn.Module._named_members is before


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # torch's own, of what it reads and of what is to go
def test_graphs_and_exports_of_a_model_that_walks_over_itself(session, said):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

        def forward(self, x):
            total = sum(p.float().square().sum() for p in self.parameters())
            for _, p in self.named_parameters():
                total = total + p.float().sum()
            return self.body(x.to(next(self.parameters()).device)) * total

    model, optimizer = begin(session, "O5", model=Model())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        backward(session, compiled(batch(seed)).square().mean(), optimizer)
        compiled(batch(seed))  # gradients are in the masters
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(compiled(batch()), model(batch()))
    assert said() == []
    for strict in (True, False):
        exported = torch.export.export(model, (batch(),), strict=strict).module()
        torch.testing.assert_close(exported(batch()), model(batch()))
    torch.jit.save(torch.jit.trace(model, batch()), io.BytesIO())
    torch.jit.script(model.body)
    torch.fx.symbolic_trace(model.body)
    assert said() == []
    train(session, model, optimizer, before_step=lambda: clip_grad_norm_(compiled.parameters(), 1.0))
    assert len(said()) == 1


# --- parameters that no optimizer steps -------------------------------------------------------------------------------


def replace_layer(model):
    model[3] = nn.Linear(8, 2)


def replace_weight(model):
    model[3].weight = nn.Parameter(torch.randn(2, 8))


@pytest.mark.parametrize("replace", [replace_layer, replace_weight])
@pytest.mark.parametrize(("level", "when"), [("O1", "before"), ("O1", "after"), ("O2", "before"), ("O4", "after")])
@pytest.mark.full(but=4)
def test_replaced_parameters_are_named_after_the_first_step(session, said, level, when, replace):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if when == "before":
        replace(model)
    session.initialize(model, optimizer, opt_level=level, verbosity=1)
    if when == "after":
        replace(model)
    train(session, model, optimizer, steps=3)
    [message] = said()
    names, n = ('"3.weight", "3.bias"', 2) if replace is replace_layer else ('"3.weight"', 1)
    assert message.startswith(f"SGD.step(): {names} got gradients and are in no optimizer")
    assert f"SGD has {n} that no model has" in message
    assert "(2, 8)" in message


def test_an_optimizer_of_another_model_is_named(session, said):
    model, optimizer = begin(session, "O1", lambda _: torch.optim.SGD(mlp().parameters(), lr=0.01))
    train(session, model, optimizer)
    assert any("got gradients and are in no optimizer" in m and "SGD has 6 that no model has" in m for m in said())


@pytest.mark.parametrize("closure", [False, True])
def test_parameters_that_were_left_out_are_named(session, said, closure):
    model = mlp()
    optimizer = begin(session, "O1", lambda _: torch.optim.SGD(model[3].parameters(), lr=0.01), model=model)[1]

    def evaluate():
        optimizer.zero_grad()
        backward(session, loss_of(model), optimizer)

    for _ in range(2):
        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
    [message] = said()
    assert message.startswith('SGD.step(): "0.weight", "0.bias", "1.weight" and 1 more got gradients')
    assert "that no model has" not in message


def test_what_is_not_to_train_or_trains_elsewhere_is_not_named(session, said):
    """Frozen and unused parameters, a teacher, one whose gradients nobody wants, an optimizer without amp, and a loss
    with a parameter of its own."""
    model, teacher, critic = mlp(0), mlp(1), mlp(2)
    model.unused = nn.Linear(3, 3)
    model.by_another = nn.Parameter(torch.ones(()))
    model[1].requires_grad_(False)
    temperature = nn.Parameter(torch.ones(()))
    params = [p for n, p in model.named_parameters() if n != "by_another" and not n.startswith("unused")]
    optimizer = torch.optim.SGD([*params, temperature], lr=0.01)
    plain = torch.optim.SGD([model.by_another], lr=0.01)
    session.initialize([model, teacher, critic], optimizer, opt_level="O4", verbosity=1)
    for seed in range(2):
        x = model[:4](batch(seed)).float()
        with torch.no_grad():
            wanted = teacher(batch(seed)).float()
        loss = ((x - wanted) * temperature * model.by_another).square().mean() + critic(x.repeat(1, 2)).float().mean()
        backward(session, loss, optimizer)
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    assert said() == []


@pytest.mark.parametrize("optimizers", [None, []])
def test_without_optimizers_there_is_nothing_to_say(session, said, optimizers):
    model = mlp()
    session.initialize(model, optimizers, opt_level="O4", verbosity=1)
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.01)
    train(session, model, optimizer)
    assert said() == []


def test_models_of_two_sessions_with_one_loss_are_both_trained(said):
    sessions = [AmpSession(), AmpSession()]
    (first, a), (second, b) = [begin(s, "O4") for s in sessions]
    try:
        for _ in range(2):
            loss = second(first(batch()).repeat(1, 2)).float().square().mean()
            backward(sessions[0], loss, a)
            a.step()
            b.step()
            a.zero_grad()
            b.zero_grad()
        assert said() == []
    finally:
        for session in reversed(sessions):
            session.reset()
