import copy
import gc
import weakref

import pytest
import torch
from kit import LEVELS, backward, every_level, loss_of, mlp, start
from torch import nn

from ampctx import AmpError, AmpTypeError, amp
from ampctx.optimizers import FusedSGD, SplitMasters


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


@every_level
def test_returns_the_objects_in_the_shapes_given(session, level):
    model = mlp()
    assert session.initialize(model, opt_level=level, verbosity=0) is model
    for models_in_a_list in (False, True):
        for optimizers_in_a_list in (False, True):
            model = mlp()
            models = [model] if models_in_a_list else model
            optimizers = [sgd(model)] if optimizers_in_a_list else sgd(model)
            result = session.initialize(models, optimizers, opt_level=level, verbosity=0)
            assert isinstance(result, tuple)
            assert result[0] is models
            assert result[1] is optimizers
    assert session.initialize([mlp(1), mlp(2)], [], opt_level=level, verbosity=0)[1] == []


def test_enabled_false_touches_nothing(session):
    model = mlp()
    optimizer = sgd(model)
    step = optimizer.step
    result = session.initialize(model, optimizer, enabled=False, opt_level="bogus")
    assert result == (model, optimizer)
    assert repr(session) == "AmpSession(enabled=False; optimizers: 0)"
    assert optimizer.step == step
    assert all(p.dtype == torch.float32 for p in model.parameters())
    loss = loss_of(model)
    with session.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
        scaled.backward()
    optimizer.step()
    with session.disable_casts():
        pass
    assert session.state_dict() == {}
    session.load_state_dict({})
    session.initialize(mlp(), opt_level="O2", enabled=False)
    assert (session.policy.enabled, session.policy.input_dtype, session.policy.master_weights) == (False, None, False)


def test_state_without_masters_has_the_type_of_the_weights(session):
    model = mlp()
    optimizer = sgd(model)
    loss_of(model).backward()
    optimizer.step()
    for opt_level, dtype in (("O3", torch.float16), ("O0", torch.float32)):
        session.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
        assert {t.dtype for p in model.parameters() for t in (p, optimizer.state[p]["momentum_buffer"])} == {dtype}
        session.reset()


def test_gradients_from_before_initialize_are_kept(session):
    model = mlp()
    optimizer = sgd(model)
    loss_of(model, 1).backward()
    before = [p.grad.clone() for p in model.parameters()]
    session.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    backward(session, sum(p.float().sum() for p in model.parameters()), optimizer)
    for master, old in zip(amp.master_params(optimizer), before, strict=True):
        torch.testing.assert_close(master.grad, old + 1, rtol=2e-3, atol=2e-3)


class FP16_Optimizer:
    """A wrapper of apex's name."""


class Derived(FP16_Optimizer):
    pass


@pytest.mark.parametrize(
    ("models", "optimizers", "message"),
    [
        (mlp(), FP16_Optimizer(), "An incoming optimizer is an instance of .*FP16_Optimizer. It keeps fp32 masters"),
        (mlp(), [sgd(mlp()), Derived()], "An incoming optimizer is an instance of .*Derived. It keeps fp32 masters"),
        ("model", None, "models must be either a single model or a list"),
        ((mlp(),), None, "models must be either a single model or a list"),
        ([mlp(), 3], None, "Got int inside the list"),
        (mlp(), "sgd", "optimizers must be either a single optimizer or a list"),
        (mlp(), (sgd(mlp()),), "optimizers must be either a single optimizer or a list"),
    ],
    ids=range(7),
)
def test_wrong_types(session, models, optimizers, message):
    with pytest.raises(AmpTypeError, match=message):
        session.initialize(models, optimizers, verbosity=0)


def test_an_optimizer_goes_through_once(session):
    _model, optimizer = start(session, "O0", "SGD-foreach")
    with pytest.raises(AmpError, match="A given optimizer should only be passed through amp.initialize once"):
        session.initialize(mlp(), optimizer, opt_level="O0", verbosity=0)
    session.reset()
    session.initialize(mlp(), optimizer, opt_level="O0", verbosity=0)
    other = sgd(mlp())
    with pytest.raises(AmpError, match="A given optimizer should only be passed through amp.initialize once"):
        session.initialize(mlp(), [other, other], opt_level="O0", verbosity=0)


class Adapted(nn.Module):
    """A frozen 16-bit layer with a buffer, and an adapter."""

    def __init__(self, dtype, adapter=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(4, 4)
        self.base.register_buffer("table", torch.ones(4))
        self.base.to(dtype).requires_grad_(False)
        self.adapter = nn.Linear(4, 4).to(adapter)

    def forward(self, x):
        return self.base(x.to(self.base.weight.dtype)).float() + self.adapter(x.to(self.adapter.weight.dtype)).float()


BASES = [("O0", "bfloat16"), ("O0", "float16"), ("O1", "float16"), ("O4", "bfloat16"), ("O2", "float16")]
BASES += [("O2", "bfloat16"), ("O5", "bfloat16"), ("O3", "float16"), ("O3", "bfloat16")]


@pytest.mark.parametrize(("level", "dtype"), BASES)
def test_frozen_16_bit_parameters_stay_and_others_train_beside_them(session, level, dtype):
    model = Adapted(dtype := getattr(torch, dtype))
    before, optimizer = model.base.weight.clone(), sgd(model)
    start = model.adapter.weight.detach().clone()
    session.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    for _ in range(2):
        backward(session, model(torch.ones(2, 4)).square().mean(), optimizer)
        optimizer.step()
    assert model.base.weight.grad is None
    session.reset()
    assert model.base.weight.dtype == dtype
    assert torch.equal(model.base.weight, before)
    assert model.adapter.weight.dtype == torch.float32
    assert not torch.equal(model.adapter.weight, start)


def test_a_16_bit_parameter_that_was_allowed_may_be_unfrozen(session):
    session.allow_incoming_model_not_fp32 = True
    model = Adapted(torch.bfloat16)
    optimizer = sgd(model)
    session.initialize(model, optimizer, opt_level="O4", verbosity=0)
    model.base.requires_grad_(True)
    before = model.base.weight.detach().clone()
    backward(session, model(torch.ones(2, 4)).square().mean(), optimizer)
    optimizer.step()
    assert not torch.equal(model.base.weight, before)


ONE_TYPE = {level: torch.bfloat16 if level in ("O4", "O5") else torch.float16 for level in LEVELS}
REFUSED = [
    ("O5", torch.float16, torch.float32, "base.weight.* the 16-bit type of the level"),
    *((level, dtype, dtype, "adapter.weight") for level, dtype in ONE_TYPE.items()),
]


@pytest.mark.parametrize(("level", "base", "adapter", "name"), REFUSED, ids=str)
def test_16_bit_parameters_that_train_or_that_a_cast_would_round_are_refused(session, level, base, adapter, name):
    with pytest.raises(AmpError, match=f"Found param {name}"):
        session.initialize(Adapted(base, adapter), opt_level=level, verbosity=0)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_16_bit_parameter_that_is_unfrozen_without_a_master_is_refused(session, level):
    model = Adapted(torch.bfloat16)
    optimizer = sgd(model)
    session.initialize(model, optimizer, opt_level=level, verbosity=0)
    model.base.requires_grad_(True)
    with pytest.raises(AmpError, match='"base.weight" was converted .* after amp.initialize, or unfrozen'):
        backward(session, model(torch.ones(2, 4)).mean(), optimizer)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_parameter_is_unfrozen_where_the_optimizer_keeps_the_masters(session, level):
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = FusedSGD(model.parameters(), lr=0.1, master_weights=True)
    session.initialize(model, optimizer, opt_level=level, master_weights=False, loss_scale=1.0, verbosity=0)
    before = model[0].weight.clone()
    model[0].requires_grad_(True)
    backward(session, loss_of(model), optimizer)
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("master_weights", [None, False])
def test_a_failure_late_in_initialize_undoes_all_of_it(session, master_weights):
    class Broken(FusedSGD):
        __slots__ = ()

        def __setattr__(self, name, value):
            if name == "add_param_group":
                raise OSError("read-only")
            super().__setattr__(name, value)

    model = mlp()
    model.register_buffer("table", torch.randn(5))
    former = copy.deepcopy(model.state_dict())
    first, second = FusedSGD(model.parameters(), lr=0.1), Broken(mlp().parameters(), lr=0.1)
    with pytest.raises(OSError, match="read-only"):
        session.initialize(model, [first, second], opt_level="O5", master_weights=master_weights, verbosity=0)
    # To the last bit, which the cast had rounded away.
    torch.testing.assert_close(model.state_dict(), former, rtol=0, atol=0)
    assert list(amp.master_params(first)) == list(model.parameters())
    assert not first.state
    assert "step" not in vars(first)
    assert "step" not in vars(second)
    assert session.policy is None


SHOWN = {
    "O0": "float32 model, loss scale 1",
    "O1": "float16 autocast, dynamic loss scale 65536",
    "O2": "float16 model, fp32 masters, dynamic loss scale 65536",
    "O3": "float16 model, no masters, loss scale 1",
    "O4": "bfloat16 autocast, loss scale 1",
    "O5": "bfloat16 model, fp32 masters, loss scale 1",
}


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        *(({"opt_level": level}, f"{level}: {shown}") for level, shown in SHOWN.items()),
        ({"opt_level": "O5", "master_weights": False}, "O5: bfloat16 model, no masters, loss scale 1"),
        ({"opt_level": "O2", "cast_model_type": False, "loss_scale": 0.5}, "O2: no casts, loss scale 0.5"),
        (
            {"opt_level": "O1", "num_losses": 2, "init_scale": 2.0**24},
            "O1: float16 autocast, dynamic loss scale 16777216 and 16777216",
        ),
    ],
)
def test_verbosity_1_prints_a_line_which_the_repr_shows_too(session, options, shown, capsys):
    assert repr(session) == "AmpSession(not initialized)"
    model = mlp()
    optimizer = SplitMasters(torch.optim.SGD, model.parameters())
    session.initialize(model, optimizer, **options)
    assert capsys.readouterr().out == f"ampctx: {shown}\n"
    assert repr(session) == f"AmpSession({shown}; optimizers: 1)"


def test_a_string_for_enabled_is_a_slip(session):
    with pytest.raises(AmpTypeError, match="Did you mean opt_level='O2'"):
        session.initialize(mlp(), None, "O2")


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("incoming", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_batch_norms_of_models_that_come_in_another_type_are_fp32(session, level, incoming):
    session.allow_incoming_model_not_fp32 = True
    model, optimizer = start(session, level, "SGD-foreach", mlp().to(incoming))
    assert {t.dtype for t in model[1].state_dict().values() if t.is_floating_point()} == {torch.float32}
    backward(session, loss_of(model), optimizer)
    optimizer.step()
    session.reset()
    assert {p.dtype for p in model.parameters()} <= {incoming, torch.float32}


@every_level
def test_a_session_does_not_keep_the_model_alive(session, level):
    model, optimizer = start(session, level, "SGD-foreach", verbosity=1)
    with session.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    master = next(session.master_params(optimizer))
    kept = [weakref.ref(t) for t in (model, *([] if master is next(model.parameters()) else [master]))]
    del model, optimizer, master
    gc.collect()
    assert [ref() for ref in kept if ref() is not None] == [], scaled  # a graph keeps its leaves
