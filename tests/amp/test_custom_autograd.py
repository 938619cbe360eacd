"""Custom autograd functions under O1 and O4: torch's custom_fwd and custom_bwd as they are, and apex's registration."""

import pytest
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd

LOW = {"O1": torch.float16, "O4": torch.bfloat16}
seen = []


@pytest.fixture(autouse=True)
def _nothing_seen():
    seen.clear()


class Product(torch.autograd.Function):
    """As somebody wrote it who did not think of autocast."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        product = a.mm(b)
        seen.append(product.dtype)
        return product

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        grad_b = a.t().mm(grad)
        seen.append(grad_b.dtype)
        return grad.mm(b.t()), grad_b


def custom(cast_inputs, function=Product):
    """As torch's decorators write it: without ``cast_inputs`` with the casts of the forward, else without casts."""
    forward = custom_fwd(function.forward, device_type="cpu", cast_inputs=cast_inputs)
    backward = custom_bwd(function.backward, device_type="cpu")
    return type("Custom", (function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        # A generator of its own: the global one belongs to all threads.
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 2, generator=generator))
        nn.init.uniform_(self.linear.weight, -0.5, 0.5, generator=generator)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return self.function.apply(self.linear(x), self.weight)


TYPES = [None, torch.float32, torch.float16, torch.bfloat16]
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def gradients(session, level, function):
    net = Model(function)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.initialize(net, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    loss = net(X).float().square().mean()
    with session.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    return [p.grad for p in session.master_params(optimizer)]


@pytest.mark.parametrize("cast_inputs", TYPES, ids=str)
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_custom_fwd_computes_as_under_torch_autocast(session, level, cast_inputs):
    function = custom(cast_inputs)
    net = Model(function)
    with torch.autocast("cpu", LOW[level]):
        output = net(X)
    loss = output.float().square().mean()
    (loss * 128).backward()
    expected, types = [p.grad / 128 for p in net.parameters()], list(seen)
    assert types == [cast_inputs or LOW[level]] * 2

    seen.clear()
    assert all(map(torch.equal, gradients(session, level, function), expected))
    assert seen == types


@pytest.mark.parametrize("cast_inputs", TYPES, ids=str)
@pytest.mark.parametrize(("level", "low"), [("O0", torch.float32), ("O2", torch.float16), ("O5", torch.bfloat16)])
def test_custom_fwd_takes_what_it_gets_where_ops_are_not_cast(session, level, low, cast_inputs):
    assert all(grad is not None for grad in gradients(session, level, custom(cast_inputs)))
    assert seen == [low] * 2


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize(("kind", "cast_inputs"), [("half", None), ("float", torch.float32)])
def test_a_function_without_the_decorators_has_to_be_registered(session, level, kind, cast_inputs):
    with pytest.raises(RuntimeError, match="expected m1 and m2 to have the same dtype") as raised:
        gradients(session, level, Product)
    assert not hasattr(Exception, "add_note") or "custom_fwd and custom_bwd" in raised.value.__notes__[0]
    session.reset()
    seen.clear()
    expected, types = gradients(session, level, custom(cast_inputs)), list(seen)
    session.reset()
    seen.clear()

    before = dict(vars(Product))
    getattr(session, f"register_{kind}_function")(Product, "apply")
    assert all(map(torch.equal, gradients(session, level, Product), expected))
    assert seen == types
    session.reset()
    assert dict(vars(Product)) == before


class Again(torch.autograd.Function):
    """Activation checkpointing of somebody's own, whose inner backward runs where grad is on, or after."""

    @staticmethod
    def forward(ctx, block, is_inside, x):
        ctx.block, ctx.is_inside, ctx.x = block, is_inside, x
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.block(x)
            seen.append(output.dtype)
            if ctx.is_inside:
                output.backward(grad)
        if not ctx.is_inside:
            output.backward(grad)
        return None, None, x.grad


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_block_that_a_backward_runs_again_has_the_casts_of_its_forward(session, level):
    def gradients(run):
        torch.manual_seed(0)
        net = nn.ModuleList([nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        session.initialize(net, optimizer, opt_level=level, loss_scale=128.0, verbosity=0, keep_fp32="1.2")
        with session.scale_loss(run(net[1], net[0](X)).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
            assert torch.mm(X, X.t()).dtype == torch.float32
        grads = [p.grad for p in net.parameters()]
        session.reset()
        return grads

    expected = gradients(lambda block, x: block(x))
    for is_inside in (False, True):
        assert all(map(torch.equal, gradients(lambda block, x: Again.apply(block, is_inside, x)), expected))  # noqa: B023
    seen.clear()
    gradients(lambda block, x: custom(torch.float32, Again).apply(block[0], True, x))
    assert seen == [torch.float32]
