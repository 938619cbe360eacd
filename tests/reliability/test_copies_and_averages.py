"""Moving averages are fed from fp32 masters; copies of models and optimizers are right, or say that they are not."""

import copy
from functools import partial

import pytest
import torch
from kit import COPIES, assert_same, backward, batch, each_copy, every_level, loss_of, mlp, same, start, train
from rank_processes import CONTEXT
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from ampctx import AmpError
from ampctx.casts.arguments import ModelHook
from ampctx.optimizers import FusedAdam

every_optimizer = pytest.mark.parametrize("name", ["FusedSGD", "SGD-fused", "SGD-plain"])


@pytest.fixture
def trained(session, level, request):
    """A model and its optimizer, after two steps."""
    model, optimizer = start(session, level, request.node.callspec.params.get("name", "FusedSGD"))
    train(session, model, optimizer)
    return model, optimizer


def moves_by_plain_steps(model, optimizer):
    """Whether a step without amp changes the weights."""
    before = model[0].weight.detach().clone()
    loss_of(model).backward()
    optimizer.step()
    return not torch.equal(model[0].weight, before)


# --- moving averages --------------------------------------------------------------------------------------------------


def averaged(session, level, make):
    """A run with SWA from its third step on. Returns the model, its average and the learning rates, and keeps the
    optimizer, which holds the masters."""
    model, optimizer = start(session, level, make, loss_scale=128.0)
    # At O3 there are no masters: what is averaged are the 16-bit weights, behind the casts of the model itself.
    source = model if level == "O3" else session.master_model(model)
    average, schedule, rates = AveragedModel(source), SWALR(optimizer, swa_lr=0.05, anneal_epochs=2), []
    for step in range(6):
        train(session, model, optimizer, 1, step)
        if step >= 2 and session.outcome(optimizer).stepped:
            average.update_parameters(source)
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
    return model, average, rates, optimizer


@pytest.mark.parametrize("make", ["FusedSGD", "SGD-foreach"])
@every_level
def test_swa_from_the_loop_to_the_batch_norm_of_the_average(session, sessions, level, make):
    model, average, rates, _optimizer = averaged(session, level, make)
    _, expected, wanted, _ = averaged(sessions(), "O0", make)
    assert rates == wanted
    tolerance = 1e-6 if level == "O0" else 0.05
    for got, of_fp32 in zip(average.module.parameters(), expected.module.parameters(), strict=True):
        assert got.dtype == (torch.float16 if level == "O3" else torch.float32)
        torch.testing.assert_close(got.float(), of_fp32, rtol=tolerance, atol=tolerance)

    trained, data = model[1].running_mean.clone(), [batch(step) for step in range(6)]
    update_bn(data, average)
    with session.disable_casts():
        update_bn(data, expected)
        evaluated = expected.eval()(data[0])
    norms = average.module[1], expected.module[1]
    assert norms[0].num_batches_tracked == len(data)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(norms[0], name).float(), getattr(norms[1], name), rtol=0.05, atol=0.02)
    assert torch.equal(model[1].running_mean, trained)
    with torch.no_grad():
        torch.testing.assert_close(average.eval()(data[0]).float(), evaluated, rtol=0.05, atol=0.05)


# --- the model over its masters ---------------------------------------------------------------------------------------


@every_level
def test_the_master_model_holds_the_masters_themselves(session, trained, level):
    model, optimizer = trained
    source = session.master_model(model)
    assert all(p is q for p, q in zip(source.parameters(), session.master_params(optimizer), strict=True))
    assert all(a is b for a, b in zip(source.buffers(), model.buffers(), strict=True))
    assert [n for n, _ in source.named_parameters()] == [n for n, _ in model.named_parameters()]
    hooks = [h for m in source.modules() for d in vars(m).values() if isinstance(d, dict) for h in d.values()]
    assert not any(isinstance(hook, ModelHook) for hook in hooks)
    train(session, model, optimizer)
    dtype, plain = torch.float16 if level == "O3" else torch.float32, mlp()
    plain.load_state_dict(session.master_state_dict(model))
    with session.disable_casts():
        out = source.eval()(torch.ones(3, 4, dtype=dtype))
        assert out.dtype == dtype
        assert level == "O3" or torch.equal(out, plain.eval()(torch.ones(3, 4)))


def test_masters_in_the_optimizers_state_have_no_model(session):
    model, optimizer = start(session, "O3", partial(FusedAdam, master_weights=True))
    train(session, model, optimizer)
    with pytest.raises(AmpError, match=r"the master weight of 0.weight is in the optimizer's state"):
        session.master_model(model)


# --- copies -----------------------------------------------------------------------------------------------------------


@each_copy
@every_level
def test_a_copied_model_trains_on_its_own_weights(trained, copied):
    model, _ = trained
    twin = copied(model)
    assert {t.dtype for t in twin.state_dict().values() if t.is_floating_point()} == {torch.float32}
    before = [p.detach().clone() for p in model.parameters()]
    assert torch.equal(model.eval()(batch()), twin.eval()(batch()))
    twin.train()
    assert moves_by_plain_steps(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    assert same(model.parameters(), before)
    assert not torch.equal(twin.eval()(batch()), model.eval()(batch()))


def _in_another_process(model, x, results):
    results.put(model.eval()(x).detach().float().tolist())


@pytest.mark.full(but=1)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_model_goes_to_another_process(trained):
    (model, _), x = trained, batch(n=3)
    results = CONTEXT.Queue()
    process = CONTEXT.Process(target=_in_another_process, args=(model, x, results))
    process.start()
    out = results.get(timeout=600)
    process.join(600)
    assert process.exitcode == 0
    assert out == model.eval()(x).tolist()


@each_copy
@every_optimizer
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_copied_optimizer_with_masters_refuses_to_step(session, sessions, trained, level, name, copied):
    model, optimizer = trained
    twin_model, twin = copied((model, optimizer))
    scheduler = torch.optim.lr_scheduler.ConstantLR(twin)
    with pytest.raises(AmpError, match="SGD is a copy of one under amp.*no model follows them"):
        twin.step()
    with pytest.raises(AmpError, match="SGD is a copy of one under amp"):
        scheduler.optimizer.step()
    # It is a snapshot that can be gone back to.
    expected = copy.deepcopy(optimizer.state_dict())
    train(session, model, optimizer)
    twin.param_groups[0]["lr"] = expected["param_groups"][0]["lr"]
    optimizer.load_state_dict(twin.state_dict())
    state = optimizer.state_dict()["state"]
    for i, kept in expected["state"].items():
        assert_same(state[i]["momentum_buffer"], kept["momentum_buffer"])
    train(session, model, optimizer)
    # The copied model is fit for a session of its own.
    other = sessions()
    other.allow_incoming_model_not_fp32 = True
    train(other, *start(other, level, name, twin_model))


@every_optimizer
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
def test_a_copied_pair_without_masters_is_a_plain_pair(session, trained, level, name):
    if level == "O2":
        session.reset()
    assert moves_by_plain_steps(*copy.deepcopy(trained))


class Wrapper:
    """As many are: no torch optimizer, and without a word about copies."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.add_param_group = optimizer.add_param_group

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


class TakesAllAlong(torch.optim.SGD):
    def __getstate__(self):
        return self.__dict__.copy()


@each_copy
@every_level
@pytest.mark.parametrize(
    "make", [lambda p: Wrapper(torch.optim.SGD(p, lr=0.1)), lambda p: TakesAllAlong(p, lr=0.1)], ids=["wrapper", "sgd"]
)
def test_a_copy_that_takes_all_attributes_along_leaves_the_original_alone(session, sessions, level, make, copied):
    model = mlp()
    optimizer = make(model.parameters())
    if isinstance(optimizer, TakesAllAlong):  # replaces step, too
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    start(session, level, lambda _: optimizer, model)
    train(session, model, optimizer)
    twin = copied(optimizer)
    backward(session, loss_of(model), optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    for group in twin.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    if level in ("O2", "O5"):
        with pytest.raises(AmpError, match="is a copy of one under amp"):
            twin.step()
    else:
        first = twin.param_groups[0]["params"][0]
        value = first.detach().clone()
        twin.step()
        assert not torch.equal(first, value)
    twin.zero_grad()
    assert same(model.parameters(), before)
    assert all(p.grad is not None for p in session.master_params(optimizer))
    optimizer.step()
    assert not torch.equal(model[0].weight, before[0])
    # Nothing of the session is on the copy: it can have one of its own.
    if level not in ("O2", "O5"):
        sessions().initialize([], twin, opt_level="O0", verbosity=0)


@pytest.mark.parametrize("copied", [*COPIES.values(), copy.copy], ids=[*COPIES, "copy"])
@pytest.mark.parametrize("initialized", [False, True])
def test_a_session_belongs_to_its_process(session, initialized, copied):
    if initialized:
        start(session, "O1")
    with pytest.raises(AmpError, match=r"an AmpSession cannot be copied or pickled.*call its initialize\(\), and load"):
        copied(session)
