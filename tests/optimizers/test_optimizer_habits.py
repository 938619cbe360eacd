"""What users of torch.optim expect of an optimizer: groups, hooks, schedulers, closures, layouts, and the errors."""

from __future__ import annotations

import math

import pytest
import torch
from kit import assert_same, params_of, snapshot
from optimizer_cases import BY_NAME, give, parameters, run
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampctx._errors import AmpError, AmpTypeError, AmpValueError
from ampctx.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

# --- groups and gradients ---------------------------------------------------------------------------------------------


def test_parameters_and_state_are_exchanged_in_place():
    """As losses over sampled classes do: each step has a new parameter, with a part of the state, in its group."""
    results = []
    for make in (torch.optim.SGD, FusedSGD):
        weights, buffers = torch.arange(20.0).view(5, 4).cos(), torch.zeros(5, 4)
        optimizer = make([{"params": [nn.Parameter(torch.zeros(1))]}], lr=0.1, momentum=0.9)
        for rows in ([0, 1, 3], [1, 2, 4], [0, 1, 3], [0, 1, 3]):
            optimizer.state.clear()
            part = nn.Parameter(weights[rows])
            optimizer.param_groups[0]["params"][0] = part
            optimizer.state[part]["momentum_buffer"] = buffers[rows]
            part.grad = weights[rows].sin()
            optimizer.step()
            weights[rows], buffers[rows] = part.detach(), optimizer.state[part]["momentum_buffer"]
        results.append((weights, buffers))
    torch.testing.assert_close(*results)


def test_a_count_that_is_set_by_hand_may_be_a_number():
    params = parameters(shapes=[(3,), (3,)])
    for p, count in zip(params, (3, torch.tensor(3.0)), strict=True):
        p.data, p.grad = torch.ones(3), torch.ones(3)
        optimizer = FusedAdam([p])
        optimizer.state[p] = {"step": count, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
        optimizer.step()
        assert torch.equal(optimizer.state[p]["step"], torch.tensor(4.0))
    assert_same([params[0].detach()], [params[1].detach()])


def test_novograd_of_gradients_of_zero():
    """The divisor is eps: no 0 / 0, and the weights decay."""
    params = parameters(shapes=[(3,), (0,), ()])
    expected = [0.95 * p.detach() for p in params]
    optimizer = FusedNovoGrad(params, lr=0.5, weight_decay=0.1)
    give(params, map(torch.zeros_like, params))
    optimizer.step()
    torch.testing.assert_close([p.detach() for p in params], expected)
    assert [optimizer.state[p]["exp_avg_sq"] for p in params] == [0, 0, 0]


@pytest.mark.parametrize("name", BY_NAME)
def test_zero_grad(name):
    optimizer = BY_NAME[name](parameters(shapes=[(3,)]))
    (p,) = params_of(optimizer)
    assert optimizer.set_grad_none
    for argument, expected in [((), optimizer.set_grad_none), ((True,), True), ((False,), False)]:
        p.grad = torch.ones(3)
        optimizer.zero_grad(*argument)
        assert (p.grad is None) is expected
        assert expected or p.grad.eq(0).all()
    p.grad = torch.ones(3)
    optimizer.zero_grad(set_to_none=True)
    assert p.grad is None
    optimizer.set_grad_none = not optimizer.set_grad_none
    p.grad = torch.ones(3)
    optimizer.zero_grad()
    assert (p.grad is None) is optimizer.set_grad_none


# --- hooks, closures, schedulers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_NAME)
def test_hooks_run_once_around_a_step(name):
    FusedLAMB(parameters())  # torch wraps the step of each class that has instances: of a base class, too
    optimizer = BY_NAME[name](parameters(shapes=[(3,)]))
    seen = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append("before"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(o.state[params_of(o)[0]]["step"].item()))
    run(optimizer, 2)
    assert seen == ["before", 1, "before", 2]


def test_profilers_and_hooks_of_all_optimizers_see_each_step():
    """ampctx leaves out what torch wraps around a step where nobody looks."""
    optimizer = FusedAdam(parameters(shapes=[(3,)]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run(optimizer, 2)
        optimizer.zero_grad()
    seen_by_profiler = [event.name for event in profiler.events()]
    assert seen_by_profiler.count("Optimizer.step#FusedAdam.step") == 2
    assert "Optimizer.zero_grad#FusedAdam.zero_grad" in seen_by_profiler
    seen = []
    before = register_optimizer_step_pre_hook(lambda o, *_: seen.append(o))
    after = register_optimizer_step_post_hook(lambda o, *_: seen.append("after"))
    try:
        run(optimizer, 1)
    finally:
        before.remove()
        after.remove()
    run(optimizer, 1)
    assert seen == [optimizer, "after"]


@pytest.mark.parametrize("name", BY_NAME)
def test_closures(name):
    (p,) = parameters(shapes=[(3,)])
    optimizer = BY_NAME[name]([p])
    start = p.detach().clone()

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == start.square().sum().item()
    assert optimizer.step(closure=closure).item() < start.square().sum().item()
    assert optimizer.step() is None
    with torch.no_grad():
        optimizer.step(closure)
    assert optimizer.state[p]["step"] == 4


def test_tensor_lr_is_read_at_each_step():
    lr = torch.tensor(0.5)
    (p,) = parameters(shapes=[(3,)])
    optimizer = FusedSGD([p], lr=lr)
    assert optimizer.param_groups[0]["lr"] is lr
    start = p.detach().clone()
    p.grad = torch.ones(3)
    optimizer.step()
    lr.fill_(0.25)
    optimizer.step()
    assert_same([p.detach()], [start - 0.75])


CAPTURABLE = {
    "adam": lambda p, **o: FusedAdam(p, capturable=True, weight_decay=0.0, **o),
    "lamb": lambda p, **o: FusedLAMB(p, capturable=True, weight_decay=0.0, **o),
}
on_capturable = pytest.mark.parametrize("make", CAPTURABLE.values(), ids=CAPTURABLE)


@on_capturable
def test_capturable_groups_never_share_an_lr_tensor(make):
    lr = torch.tensor(0.5)
    params = parameters(shapes=[(3,)] * 4)
    optimizer = make(
        [{"params": [params[0]], "lr": lr}, {"params": [params[1]], "lr": lr}, {"params": [params[2]]}], lr=lr
    )
    optimizer.add_param_group({"params": [params[3]]})
    rates = [group["lr"] for group in optimizer.param_groups]
    assert len({id(t) for t in [lr, *rates]}) == 5
    scheduler = lr_scheduler.LambdaLR(optimizer, [lambda e, k=k: 1 / (1 + k * e) for k in range(4)])
    run(optimizer, 1)
    scheduler.step()
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))
    assert [rate.item() for rate in [lr, *rates]] == pytest.approx([0.5, 0.5, 0.25, 0.5 / 3, 0.125])


@on_capturable
def test_distributed_checkpoints_leave_a_capturable_lr(make):
    distributed = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters(), lr=0.5)
    kept = optimizer.param_groups[0]["lr"]
    before = [p.detach().clone() for p in model.parameters()]
    distributed.get_optimizer_state_dict(model, optimizer)
    assert_same([p.detach() for p in model.parameters()], before)
    run(optimizer, 1)
    assert optimizer.param_groups[0]["lr"] is kept
    assert kept.item() == 0.5


@pytest.mark.parametrize(
    ("lr", "kind", "message"),
    [
        ("fast", AmpTypeError, "lr must be a number, got str"),
        (None, AmpTypeError, "lr must be a number, got NoneType"),
        (-1.0, AmpValueError, r"Invalid learning rate: -1.0 \(lr\)"),
        (torch.ones(2), AmpValueError, "Tensor lr must be 1-element: lr has 2 elements"),
    ],
)
@on_capturable
def test_a_capturable_lr_that_cannot_be_used_is_named_and_nothing_changes(make, lr, kind, message):
    optimizer = make([{"params": parameters(shapes=[(3,)])}, {"params": parameters(shapes=[(2,)])}])
    run(optimizer, 1)
    before = snapshot(optimizer)
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.5, lr
    with pytest.raises(kind, match=message):
        run(optimizer, 1)
    assert_same(snapshot(optimizer), before)
    assert optimizer.param_groups[0]["lr"] == 0.5


SIGNATURES = {
    FusedAdam: (1e-3, True, (0.9, 0.999), 1e-8, True, 0.0, False, True, False, False),
    FusedSGD: (0.1, 0, 0, 0, False, False, True, True),
    FusedLAMB: (1e-3, True, (0.9, 0.999), 1e-6, 0.01, False, True, True, True, 1.0, False),
    FusedNovoGrad: (1e-3, True, (0.9, 0.999), 1e-8, 0.0, False, False, True, 2, False, True),
    FusedAdagrad: (1e-2, 1e-10, 0.0, True, False),
}


@pytest.mark.parametrize("cls", SIGNATURES, ids=lambda cls: cls.__name__)
def test_positional_arguments_are_apexs(cls):
    positional = cls(parameters(), *SIGNATURES[cls])
    by_default = cls(parameters(), **({"lr": 0.1} if cls is FusedSGD else {}))
    assert positional.defaults == by_default.defaults
    for name in ("adam_w_mode", "set_grad_none", "capturable", "master_weights", "use_nvlamb", "moment_mode"):
        assert getattr(positional, name, None) == getattr(by_default, name, None)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_NAME)
def test_sparse_gradients_are_refused_by_name_before_anything_changes(name):
    embedding = nn.Embedding(5, 3, sparse=True)
    (dense,) = parameters(shapes=[(3,)])
    optimizer = BY_NAME[name]([{"params": [("bias", dense)]}, {"params": [("table", embedding.weight)]}])
    dense.grad = torch.ones(3)
    embedding(torch.tensor([1, 1])).sum().backward()
    before = [dense.detach().clone(), embedding.weight.detach().clone()]
    message = r"does not support sparse gradients, and param_groups\[1\]\['params'\]\[0\] \(table\) has one"
    with pytest.raises(AmpError, match=f"{type(optimizer).__name__} {message}"):
        optimizer.step()
    assert_same([dense.detach(), embedding.weight.detach()], before)
    assert not optimizer.state


ERRORS = [
    (FusedAdam, {"lr": -1.0}, AmpValueError, r"Invalid learning rate: -1.0 \(lr\), expected a number >= 0"),
    (FusedAdam, {"lr": math.nan}, AmpValueError, "Invalid learning rate: nan"),
    (FusedAdam, {"lr": torch.tensor(-1.0)}, AmpValueError, "Invalid learning rate: -1.0"),
    (FusedAdam, {"lr": torch.ones(2)}, AmpValueError, "Tensor lr must be 1-element: lr has 2 elements"),
    (FusedAdam, {"lr": "fast"}, AmpTypeError, "lr must be a number, got str"),
    (FusedAdam, {"eps": -1e-8}, AmpValueError, r"Invalid epsilon value: -1e-08 \(eps\)"),
    (FusedAdam, {"betas": (1.0, 0.9)}, AmpValueError, "Invalid beta parameter at index 0: 1.0 .*expected .*< 1"),
    (FusedAdam, {"betas": (0.9, -0.1)}, AmpValueError, "Invalid beta parameter at index 1: -0.1"),
    (FusedAdam, {"betas": 0.9}, AmpTypeError, "betas must be a pair of numbers, got 0.9"),
    (FusedAdam, {"weight_decay": -1}, AmpValueError, "Invalid weight_decay value: -1"),
    (FusedAdam, {"write_back": "up"}, AmpValueError,
        "write_back is 'up', expected 'nearest' or 'stochastic' or 'kahan'"),
    (FusedAdam, {"master_weights": "whole"}, AmpValueError, "master_weights is 'whole', expected False or True or 'sp"),
    (FusedAdam, {"seed": 1.5}, AmpTypeError, "seed must be an int, got float"),
    (FusedAdam, {"seed": -1}, AmpValueError, r"seed is -1, expected 0 to 2\*\*62 - 1"),
    (FusedAdam, {"write_back": "kahan", "master_weights": True}, AmpValueError,
        "write_back='kahan' is for 16-bit para"),
    (FusedSGD, {}, AmpValueError, "parameter group didn't specify a value of required optimization parameter lr"),
    (FusedSGD, {"lr": 0.1, "momentum": -1.0}, AmpValueError, "Invalid momentum value: -1.0"),
    (FusedSGD, {"lr": 0.1, "nesterov": True}, AmpValueError,
        "Nesterov momentum requires a momentum and zero dampening"),
    (FusedSGD, {"lr": 0.1, "nesterov": True, "momentum": 0.9, "dampening": 0.1}, AmpValueError,
        "Nesterov momentum requires"),
    (FusedLAMB, {"amsgrad": True}, AmpError, "FusedLAMB does not support the AMSGrad variant"),
    (FusedLAMB, {"max_grad_norm": -1.0}, AmpValueError, "Invalid max_grad_norm value: -1.0"),
    (FusedNovoGrad, {"amsgrad": True}, AmpError, "FusedNovoGrad does not support the AMSGrad variant"),
    (FusedNovoGrad, {"norm_type": 1}, AmpValueError, "norm_type is 1, expected 2"),
    (FusedAdagrad, {"eps": -1.0}, AmpValueError, "Invalid epsilon value"),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "options", "kind", "message"), ERRORS)
def test_errors(cls, options, kind, message):
    with pytest.raises(kind, match=message):
        cls(parameters(), **options)


SHARED = {
    "maximize": True,
    "write_back": "kahan",
    "seed": 7,
    "min_8bit_size": 1,
    "master_weights": True,
    "capturable": True,
    "set_grad_none": False,
}


@pytest.mark.parametrize("option", [*SHARED, "rate"])
@pytest.mark.parametrize("name", BY_NAME)
def test_a_class_takes_or_refuses_the_shared_options(name, option):
    value = SHARED.get(option, 1.0)
    if option == "rate" or (name, option) == ("adagrad", "min_8bit_size"):
        kind = type(BY_NAME[name](parameters())).__name__
        with pytest.raises(AmpTypeError, match=rf"^{kind}.__init__\(\) got an unexpected keyword argument '{option}'"):
            BY_NAME[name](parameters(), **{option: value})
    else:
        optimizer = BY_NAME[name](parameters(), **{option: value})
        assert vars(optimizer).get(option, optimizer.param_groups[0].get(option)) == value


@pytest.mark.parametrize("name", BY_NAME)
def test_a_misspelt_argument_names_the_nearest(name):
    for wrong, right in {"weight_deacy": "weight_decay", "writeback": "write_back"}.items():
        with pytest.raises(AmpTypeError, match=rf"got an unexpected keyword argument '{wrong}'\. Did you mean {right}"):
            BY_NAME[name](parameters(), **{wrong: 1.0})
