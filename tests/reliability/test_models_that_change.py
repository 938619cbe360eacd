"""A model that changes while it trains (frozen, unfrozen, extended, reloaded, reparametrized, without gradients) gives
what fp32 gives, or an error that names the parameter; no update is lost in silence."""

import warnings
from functools import partial

import pytest
import torch
from kit import OPTIMIZERS, assert_same, backward, start, train
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from ampctx import AmpError, GradScaler

CAST = ("O2", "O5")
MAKE = {name: partial(OPTIMIZERS[name], lr=0.125, momentum=0.5) for name in ("SGD-plain", "SGD-foreach", "SGD-fused")}
MAKE["FusedSGD"] = partial(OPTIMIZERS["FusedSGD"], lr=0.125, momentum=0.5)
# torch's fused SGD does not step a parameter that joins others with momentum.
REFERENCE = {**MAKE, "SGD-fused": MAKE["SGD-foreach"]}
SGD = partial(torch.optim.SGD, lr=0.125)
NO_GRADIENT = (
    "changes nothing: none of its parameters has a gradient. No loss reaches them, or zero_grad() ran after "
    "backward(). See `ampctx explain no-inf-checks-were-recorded`."
)
every_optimizer = pytest.mark.parametrize("name", MAKE)
few_optimizers = pytest.mark.parametrize("name", ["SGD-plain", "FusedSGD"])
ALL_BUT_O3 = ("O0", "O1", "O2", "O4", "O5")
every_level = pytest.mark.parametrize("level", ALL_BUT_O3)
cast_levels = pytest.mark.parametrize("level", CAST)


class Sum(nn.Module):
    """Named weights; the gradient of each element is the factor of that weight. Exact in every type."""

    def __init__(self, *names, start=2.0):
        super().__init__()
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.full((3,), start)) for name in names})

    def __getitem__(self, name):
        return self.weights[name]

    def loss(self, **factors):
        return sum((self.weights[name].float() * factor).sum() for name, factor in factors.items())


def under_amp(session, level, name=None, *, held="a", names=("a", "b"), **options):
    """A model of which the optimizer has the weights ``held``."""
    make = MAKE.get(name, SGD)
    options = {"max_loss_scale": 1024.0, **options}
    model = Sum(*names)
    return start(session, level, lambda _: make([model[n] for n in held]), model, **options)


def step(session, model, optimizer, **factors):
    backward(session, model.loss(**factors), optimizer)
    for each in optimizer if isinstance(optimizer, list) else [optimizer]:
        each.step()


# --- gradients that are not there -------------------------------------------------------------------------------------


@every_optimizer
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
def test_grad_scaler_steps_without_gradients_change_nothing_and_are_told_once(name, unscale, said):
    model = Sum("a")
    optimizer = MAKE[name](model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    scaler = GradScaler("cpu", growth_interval=2)
    for reached in (False, False, True, False, True):
        loss = scaler.scale(model.loss(a=1.0))
        if reached:
            loss.backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert scaler.outcome(optimizer).stepped
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
    assert said() == [f"{type(optimizer).__name__}.step() {NO_GRADIENT}"]
    # The steps with a gradient of 1, and momentum 0.5; iterations without do not count for the scale.
    assert model["a"].eq(2.0 - 0.125 * (1.0 + 1.5)).all()
    assert scaler.get_scale() == 2.0**17


@every_optimizer
@every_level
def test_unfrozen_within_the_block(session, level, name):
    model = Sum("a", "b")
    model["b"].requires_grad_(False)
    _, optimizer = start(session, level, MAKE[name], model, loss_scale=8.0)
    with session.scale_loss(model.loss(a=1.0), optimizer) as scaled:
        model["b"].requires_grad_(True)
        (scaled + 8.0 * model.loss(b=1.0)).backward()
    optimizer.step()
    assert all(weight.eq(1.875).all() for weight in model.parameters())


# --- parameter groups -------------------------------------------------------------------------------------------------


@every_level
@pytest.mark.parametrize("how", ["add_param_group", "by hand"])
def test_a_gradient_of_unknown_scale_does_not_join(session, level, how, said):
    model, optimizer = under_amp(session, level, loss_scale=64.0, verbosity=1)
    backward(session, model.loss(a=1.0, b=1.0), optimizer)  # gives b a gradient, multiplied by 64
    if how == "add_param_group":
        optimizer.add_param_group({"params": [model["b"]]})
    else:
        optimizer.param_groups[0]["params"].append(model["b"])
    optimizer.step()
    assert model["a"].eq(1.875).all()
    assert model["b"].eq(2.0).all()
    assert '"weights.b" joined the optimizer with a gradient from before' in said()[0]
    step(session, model, optimizer, b=1.0)
    assert model["b"].eq(1.875).all()


@pytest.mark.parametrize(
    ("level", "other"), [*((level, "a") for level in ALL_BUT_O3), *((level, "c") for level in CAST)]
)
def test_a_group_that_is_refused_changes_nothing(session, level, other):
    """It holds a parameter of this optimizer, or of another one, after one that gets a master."""
    model = Sum("a", "b", "c")
    both = [first, second] = [SGD([model[n]]) for n in "ac"]
    session.initialize(model, both, opt_level=level, max_loss_scale=1024.0, verbosity=0)
    refused = (AmpError, ValueError) if other == "a" else AmpError
    for _ in range(2):
        with pytest.raises(refused, match="already|more than one" if other == "a" else "is in two optimizers"):
            first.add_param_group({"params": [model["b"], model[other]]})
    step(session, model, both, a=1.0, b=1.0, c=1.0)
    assert [model[n].unique().tolist() for n in "abc"] == [[1.875], [2.0], [1.875]]
    model.zero_grad()
    second.add_param_group({"params": [model["b"]]})
    step(session, model, second, b=1.0)
    assert model["b"].eq(1.875).all()


@every_optimizer
@every_level
def test_a_parameter_moves_from_one_optimizer_to_another(session, level, name):
    plain, model = Sum("a", "b", "c"), Sum("a", "b", "c")
    reference = [REFERENCE[name]([plain["a"], plain["b"]]), REFERENCE[name]([plain["c"]])]
    moved = [MAKE[name]([model["a"], model["b"]]), MAKE[name]([model["c"]])]
    session.initialize(model, moved, opt_level=level, max_loss_scale=1024.0, verbosity=0)

    def both_backward(optimizers, delay=False, **factors):
        plain.loss(**factors).backward()
        backward(session, model.loss(**factors), optimizers, delay_unscale=delay)

    for i in range(4):
        if i == 2:
            for (first, second), each in ((reference, plain), (moved, model)):
                del first.param_groups[0]["params"][1]
                second.add_param_group({"params": [each["b"]]})
            both_backward(moved[1], delay=True, b=0.5)
            for first in (reference[0], moved[0]):
                first.zero_grad()  # has no say in the gradient of b any more
        both_backward(moved, a=1.0, b=1.0, c=1.0)
        for optimizer in (*reference, *moved):
            optimizer.step()
            optimizer.zero_grad()
    for n, p in plain.weights.items():
        assert torch.equal(model[n].float(), p), n


def test_a_group_that_joins_after_unscale_is_refused():
    model = Sum("a", "b")
    optimizer = MAKE["SGD-plain"]([model["a"]])
    scaler = GradScaler("cpu")
    scaler.scale(model.loss(a=1.0, b=1.0)).backward()
    scaler.unscale_(optimizer)
    optimizer.add_param_group({"params": [model["b"]]})
    for _ in range(2):
        with pytest.raises(AmpError, match=r"param_groups\[1\]\['params'\]\[0\] joined the optimizer after unscale_"):
            scaler.step(optimizer)
    model["b"].grad = None
    scaler.step(optimizer)
    scaler.update()
    assert model["a"].eq(1.875).all()
    assert model["b"].eq(2.0).all()


# --- weights that are loaded or edited --------------------------------------------------------------------------------


@every_level
def test_assigning_load_state_dict_is_refused(session, level):
    model, optimizer = under_amp(session, level, held="b")
    for _ in range(2):
        with pytest.raises(AmpError, match=r'load_state_dict\(assign=True\) .* in the place of "b" of a ParameterDict'):
            model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
    # The one that the optimizer steps is the model's still.
    step(session, model, optimizer, b=1.0)
    assert model["b"].eq(1.875).all()
    session.reset()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("level", ALL_BUT_O3)
def test_a_model_on_meta_that_is_materialized_under_amp_is_refused_at_the_load(session, level):
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    model, _optimizer = start(session, level, SGD, model)
    with pytest.raises(AmpError, match=r'to_empty\(\) has put a new tensor in the place of "weight".*call both before'):
        model.to_empty(device="cpu").load_state_dict(nn.Linear(4, 2).state_dict())


@few_optimizers
@cast_levels
def test_a_weight_whose_memory_was_freed_is_named_and_trains_on_when_it_is_back(session, level, name):
    model, optimizer = under_amp(session, level, name, names="a")
    step(session, model, optimizer, a=1.0)
    p = model["a"]
    values, storage = p.detach().clone(), p.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    for call in (optimizer.step, model.state_dict):
        with pytest.raises(AmpError, match='"weights.a" has no memory: its storage was freed'):
            call()
    storage.resize_(size)
    with torch.no_grad():
        p.copy_(values)
    step(session, model, optimizer, a=1.0)
    assert (p < values).all()


# --- conversions ------------------------------------------------------------------------------------------------------


def refuses(session, optimizer, match):
    with pytest.raises(AmpError, match=match), session.scale_loss(torch.ones(()), optimizer):
        pytest.fail("the block was entered")


@cast_levels
@pytest.mark.parametrize(
    "convert", [nn.Module.float, nn.Module.double, pytest.param(nn.Module.cuda, marks=pytest.mark.cuda)]
)
def test_a_model_converted_under_its_masters_is_refused(session, level, convert):
    model, optimizer = under_amp(session, level, names="a")
    convert(model)
    refuses(session, optimizer, r'"weights.a" is torch\.\w+ on \S+ now.*Move the model before amp.initialize')


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_a_model_halved_without_masters_is_refused(session, level):
    model, optimizer = under_amp(session, level, names="a")
    model.half()
    refuses(session, optimizer, '"weights.a" was converted to torch.float16 after.*If a loss casts its weights')
    model.float()
    step(session, model, optimizer, a=1.0)


@few_optimizers
@cast_levels
def test_a_weight_halved_beside_masters_is_refused_where_no_gradient_is_unscaled(session, level, name):
    model, optimizer = under_amp(session, level, name, names="a", loss_scale=1.0)
    optimizer.add_param_group({"params": [added := nn.Parameter(torch.ones(3))]})
    for _ in range(2):
        step(session, model, optimizer, a=1.0)
    added.data = added.data.half()
    with pytest.raises(AmpError, match="was converted to torch.float16 after"):
        step(session, model, optimizer, a=1.0)


@few_optimizers
@cast_levels
def test_swapped_tensors_are_the_weights(session, level, name):
    """As ``torch.__future__.set_swap_module_params_on_conversion`` has conversions of a model put in."""
    model, optimizer = under_amp(session, level, name, names="a")
    for value in (2.0, 4.0):
        step(session, model, optimizer, a=1.0)
        assert (model["a"] < value).all()
        assert (model["a"] > value - 1).all()
        torch.utils.swap_tensors(model["a"], nn.Parameter(torch.full((3,), 4.0, dtype=model["a"].dtype)))
    torch.utils.swap_tensors(model["a"], nn.Parameter(torch.full((3,), 8.0)))
    session.reset()  # although the weight is no 16-bit one any more
    assert model["a"].dtype == torch.float32


# --- modules ----------------------------------------------------------------------------------------------------------


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def tied(model):
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    extra = nn.Linear(8, 8)
    extra.weight = model[2].weight
    model.insert(4, extra)


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).T


def old_weight_norm(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model[0])


CHANGES = {
    "tied": tied,
    "weight_norm": lambda m: parametrizations.weight_norm(m[2]),
    "old weight_norm": old_weight_norm,
    "spectral_norm": lambda m: parametrizations.spectral_norm(m[2]),
    "old spectral_norm": lambda m: nn.utils.spectral_norm(m[2]),
    "orthogonal": lambda m: parametrizations.orthogonal(m[2]),
    "orthogonal, rectangular": lambda m: parametrizations.orthogonal(m[0]),
    "parametrize": lambda m: parametrize.register_parametrization(m[2], "weight", Symmetric()),
    "pruned": lambda m: prune.l1_unstructured(m[2], "weight", 0.3),
}
X = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
Y = torch.sin(X[:, :2])


def losses(session, model, optimizer):
    return torch.tensor(train(session, model, optimizer, 30, loss=lambda m, _: (m(X).float() - Y).square().mean()))


# A rounding moves an output by about its unit, u; through 3 layers and the loss, and back, some 10 of them add up.
ROUNDINGS = {"O1": 10 * 2.0**-11, "O2": 10 * 2.0**-11, "O4": 10 * 2.0**-8, "O5": 10 * 2.0**-8}
rounding_levels = pytest.mark.parametrize("level", ROUNDINGS)


@pytest.mark.full(but=24)
@rounding_levels
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("name", ["SGD-foreach", "FusedSGD"])
def test_reparametrized_models_train_as_in_fp32(session, level, change, name):
    plain, model = network(), network()
    for each in (plain, model):
        torch.manual_seed(1)
        change(each)
    expected = losses(None, plain, MAKE[name](plain.parameters()))
    _, optimizer = start(session, level, MAKE[name], model, max_loss_scale=1024.0)
    assert (losses(session, model, optimizer) - expected).abs().max() < ROUNDINGS[level] * expected[0]
    assert session.skipped_steps(optimizer) == 0
    assert expected[-1] < expected[0] / 2
    session.reset()
    assert (model(X) - plain(X)).abs().max() < 10 * ROUNDINGS[level]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@cast_levels
def test_what_a_parametrized_weight_is_made_from_stays_fp32(session, level):
    model = network()
    parametrizations.orthogonal(model[2])
    session.initialize(model, opt_level=level, verbosity=0)
    low = model[0].weight.dtype
    assert low in (torch.float16, torch.bfloat16)
    assert model[2].weight.dtype == model[2].bias.dtype == low
    assert {p.dtype for p in model[2].parametrizations.parameters()} == {torch.float32}
    gram = model[2].weight.float() @ model[2].weight.float().T
    torch.testing.assert_close(gram, torch.eye(8), atol=4 * torch.finfo(low).eps, rtol=0)


@cast_levels
def test_a_lazy_module_is_refused_until_a_forward_has_run(session, level):
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AmpError, match="lazy module has no values yet.*run one forward before amp.initialize"):
        session.initialize(model, optimizer, opt_level=level, verbosity=0)
    model(X)
    session.initialize(model, optimizer, opt_level=level, max_loss_scale=1024.0, verbosity=0)
    first, *_, last = losses(session, model, optimizer)
    assert last < first


def test_state_that_is_loaded_right_after_a_parameter_joined_keeps_its_bits(session):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam([model.weight])
    session.initialize(model, optimizer, opt_level="O2", loss_scale=64.0, verbosity=0)
    optimizer.param_groups[0]["params"].append(model.bias)
    moments = {name: torch.full((1,), 1 / 3) for name in ("exp_avg", "exp_avg_sq")}
    state = optimizer.state_dict() | {"state": {1: {"step": torch.tensor(1.0), **moments}}}
    optimizer.load_state_dict(state)
    (found,) = optimizer.state.values()
    assert_same([found[name] for name in moments], list(moments.values()))
