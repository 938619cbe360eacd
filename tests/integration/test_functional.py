"""torch.func over models under amp: functional_call, gradients per sample, ensembles, Jacobians."""

import pytest
import torch
from kit import LEVELS, assert_same, backward, start
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vmap

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
ROUNDING = {"O0": 1e-6, "O1": 2e-3, "O2": 2e-3, "O3": 2e-3, "O4": 2e-2, "O5": 2e-2}


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


def started(session, level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    return start(session, level, model=model, loss_scale=64.0)


def loss_of(output):
    return output.float().square().sum()


def relative(got, expected):
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(got, expected, strict=True))


def test_functional_call_is_a_call_and_grad_what_backward_gives(session, level):
    model, _ = started(session, level)
    parameters = dict(model.named_parameters())
    output = model(X)
    assert_same(functional_call(model, parameters, (X,)), output)
    loss = loss_of(output)
    with session.disable_casts():  # as in a scale_loss block
        expected = torch.autograd.grad(loss, list(model.parameters()))
    got = grad(lambda p: loss_of(functional_call(model, p, (X,))))(parameters)
    assert_same(got, dict(zip(parameters, expected, strict=True)))
    assert all(gradient.dtype == parameters[name].dtype for name, gradient in got.items())


# torch's own use of torch.jit.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_vmap_over_an_ensemble_jacobians_and_forward_mode(session, level):
    model, _ = started(session, level)
    state = stack_module_state([model, model])
    outputs = vmap(lambda p, b, x: functional_call(model, (p, b), (x,)), in_dims=(0, 0, None))(*state, X)
    assert relative(outputs, [model(X)] * 2) < ROUNDING[level]
    jacobian = jacrev(lambda x: model(x).float())(X[0])
    direction = torch.ones(4)
    _, along = jvp(lambda x: model(x).float(), (X[0],), (direction,))
    assert relative([along], [jacobian @ direction]) < ROUNDING[level]


def test_masters_go_with_the_master_model(session):
    """The model casts its inputs to the type of its own weights, so that others do not fit: its copy without casts has
    them."""
    model, _optimizer = started(session, "O2")
    masters = session.master_model(model)
    parameters = dict(masters.named_parameters())
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        functional_call(model, parameters, (X,))
    gradients = grad(lambda p: loss_of(functional_call(masters, p, (X,))))(parameters)
    assert {g.dtype for g in gradients.values()} == {torch.float32}
    alone = torch.autograd.grad(loss_of(masters(X)), list(masters.parameters()))
    assert relative(gradients.values(), alone) < 1e-5


@pytest.mark.parametrize("level", ["O1", "O2"], indirect=True)
def test_gradients_of_torch_func_are_stepped_by_way_of_a_block(session, level):
    """They are not scaled. A functional loss inside of ``scale_loss`` is, and takes the ordinary way."""
    model, optimizer = started(session, level)
    before = [p.detach().clone() for p in session.master_params(optimizer)]
    loss = loss_of(functional_call(model, dict(model.named_parameters()), (X,)))
    backward(session, loss, optimizer)
    optimizer.step()
    assert session.outcome(optimizer).stepped
    assert not any(torch.equal(a, b) for a, b in zip(before, session.master_params(optimizer), strict=True))
