import functools
import pickle
import types

import pytest
import torch
import torch.nn.functional as F
from kit import start, train
from torch import nn

from ampctx import AmpTypeError, AmpValueError
from ampctx.casts.autocast import Autocast
from ampctx.casts.functions import FunctionCasts, Shared

HALF, BF16, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
KINDS = ["half", "float", "promote"]


@pytest.fixture
def switch():
    """Stands where a session does: ``dtype`` is the 16-bit type, None where nothing is cast."""
    return types.SimpleNamespace(dtype=None)


@pytest.fixture
def casts(switch):
    return FunctionCasts(lambda: switch.dtype)


def casting(casts, kind):
    return getattr(casts, f"{kind}_function")


def t(dtype=FLOAT, n=2):
    return torch.ones(n, dtype=dtype)


def seen(*args, **kwargs):
    """Returns what it was called with."""
    return args, kwargs


# --- semantics --------------------------------------------------------------------------------------------------------

# what goes in -> what each kind makes of it, at fp16
MIXTURES = {
    "fp32": ((FLOAT,), {"half": (HALF,), "float": (FLOAT,), "promote": (FLOAT,)}),
    "fp16": ((HALF,), {"half": (HALF,), "float": (FLOAT,), "promote": (HALF,)}),
    "bf16": ((BF16,), {"half": (HALF,), "float": (FLOAT,), "promote": (BF16,)}),
    "fp64": ((DOUBLE,), {"half": (HALF,), "float": (DOUBLE,), "promote": (DOUBLE,)}),
    "fp16+fp32": ((HALF, FLOAT), {"half": (HALF, HALF), "float": (FLOAT, FLOAT), "promote": (FLOAT, FLOAT)}),
    "fp16+fp64": ((HALF, DOUBLE), {"half": (HALF, HALF), "float": (FLOAT, DOUBLE), "promote": (DOUBLE, DOUBLE)}),
    "fp16+bf16": ((HALF, BF16), {"half": (HALF, HALF), "float": (FLOAT, FLOAT), "promote": (FLOAT, FLOAT)}),
    "fp16+int": (
        (HALF, torch.int64),
        {"half": (HALF, torch.int64), "float": (FLOAT, torch.int64), "promote": (HALF, torch.int64)},
    ),
    "complex": ((torch.complex64,), dict.fromkeys(KINDS, (torch.complex64,))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MIXTURES)
def test_what_each_kind_casts(casts, switch, kind, name):
    given, expected = MIXTURES[name]
    fn = casting(casts, kind)(seen)
    args = tuple(t(d) for d in given)
    assert fn(*args)[0] == args  # inactive: the same objects
    switch.dtype = HALF
    got, _ = fn(*args)
    assert tuple(a.dtype for a in got) == expected[kind]
    assert all(a is b for a, b in zip(got, args, strict=True) if a.dtype == b.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_nested_and_keyword_arguments(casts, switch, kind):
    fn = casting(casts, kind)(seen)
    switch.dtype = HALF
    ints = torch.arange(2)
    args, kwargs = fn([t(), (t(HALF), "text")], ints, None, 3, named={"x": t(HALF), "n": 1}, flag=True)
    expected = HALF if kind == "half" else FLOAT
    assert (args[0][0].dtype, args[0][1][0].dtype, kwargs["named"]["x"].dtype) == (expected,) * 3
    assert args[1] is ints
    assert (args[0][1][1], args[2], args[3], kwargs["named"]["n"], kwargs["flag"]) == ("text", None, 3, 1, True)
    assert isinstance(args[0], list)
    assert isinstance(args[0][1], tuple)


@pytest.mark.parametrize("kind", KINDS)
def test_torch_autocast_is_off_inside_float_functions_alone(casts, kind):
    autocast = Autocast([], HALF)
    undo = autocast.enable()
    try:
        fn = casting(FunctionCasts(lambda: HALF if autocast.active else None), kind)(lambda a, b: (a @ b, a.exp()))
        product, power = fn(torch.eye(2), torch.eye(2))
        assert product.dtype == (FLOAT if kind == "float" else HALF)
        assert power.dtype == FLOAT
        assert torch.eye(2).mm(torch.eye(2)).dtype == HALF
        with pytest.raises(ZeroDivisionError):
            casting(FunctionCasts(lambda: HALF), kind)(lambda: 1 / 0)()
        assert torch.eye(2).mm(torch.eye(2)).dtype == HALF
        with autocast.suspended():
            assert fn(torch.eye(2), torch.eye(2))[0].dtype == FLOAT
    finally:
        undo()


def test_a_half_method_may_use_its_own_fp32_weights(session):
    class Custom(torch.nn.Linear):
        forward = session.half_function(torch.nn.Linear.forward)

    session.initialize(Custom(2, 3), opt_level="O1", verbosity=0)
    assert Custom(2, 3)(torch.ones(1, 2)).dtype == HALF


# --- what can be decorated --------------------------------------------------------------------------------------------


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.dtype = x.dtype
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        assert grad.dtype == ctx.dtype
        return grad * 2


at_import = FunctionCasts(lambda: HALF).half_function


@at_import
def decorated_at_import(x):
    """Has a docstring."""
    return x.dtype


def test_functions_keep_their_name_and_can_be_pickled():
    assert decorated_at_import.__name__ == "decorated_at_import"
    assert decorated_at_import.__doc__ == "Has a docstring."
    assert pickle.loads(pickle.dumps(decorated_at_import)) is decorated_at_import
    assert decorated_at_import(t()) == HALF
    decorated_at_import.note = "kept"
    assert at_import(decorated_at_import).note == "kept"
    assert "_parameters" not in vars(at_import(nn.ReLU()))  # the state of an object does not come along


@torch.library.custom_op("ampctx_function_casts::times", mutates_args=())
def times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y


times.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
CALLABLES = {
    "builtin": (torch.add, 2),
    "unary-builtin": (torch.sigmoid, 1),
    "F.linear": (F.linear, 2),
    "method": (torch.Tensor.add, 2),
    "packet": (torch.ops.aten.add, 2),
    "overload": (torch.ops.aten.add.Tensor, 2),
    "Function.apply": (Double.apply, 1),
    "bound": (nn.Bilinear(2, 2, 2, bias=False).forward, 2),
    "module": (nn.ReLU(), 1),
    "custom-packet": (torch.ops.ampctx_function_casts.times, 2),
    "custom-overload": (torch.ops.ampctx_function_casts.times.default, 2),
    "custom-op": (times, 2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLABLES)
def test_callables_of_every_sort(casts, switch, name, kind):
    fn, arguments = CALLABLES[name]
    if name == "bound" and kind != "float":
        fn = nn.Bilinear(2, 2, 2, bias=False).half().forward
    wrapped = casting(casts, kind)(fn)
    switch.dtype = HALF
    given = FLOAT if kind == "half" else HALF
    x = torch.ones(2, 2, dtype=given, requires_grad=True)
    out = wrapped(*[x] * arguments)
    assert out.dtype == (FLOAT if kind == "float" else HALF)
    out.float().sum().backward()
    assert x.grad.dtype == given


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_called_is_refused(casts, kind):
    with pytest.raises(AmpTypeError, match=f"{kind}_function: fn must be callable, got int"):
        casting(casts, kind)(3)


# --- register and install ---------------------------------------------------------------------------------------------


@pytest.fixture
def library():
    """A module with a function."""
    module = types.ModuleType("library")
    module.f = seen
    module.constant = 3
    return module


def test_registered_functions_cast_while_installed(casts, switch, library):
    casts.register_half_function(library, "f")
    assert library.f is seen
    undo = casts.cast_registered()
    x = t()
    assert library.f(x)[0][0] is x
    switch.dtype = HALF
    assert library.f(x)[0][0].dtype == HALF
    undo()
    assert library.f is seen
    # The queue stays for a later initialize.
    undo = casts.cast_registered()
    assert library.f(x)[0][0].dtype == HALF
    undo()
    assert library.f is seen


@pytest.mark.parametrize("name", ["missing", "constant"])
def test_what_is_no_function_is_refused(casts, library, name):
    with pytest.raises(AmpValueError, match=rf"^No function named {name} in module <module 'library'>"):
        casts.register_float_function(library, name)
    casts.cast_registered()()


def test_registering_twice_and_installing_twice_wraps_once(casts, switch, library):
    casts.register_half_function(library, "f")
    casts.register_half_function(library, "f")
    first = casts.cast_registered()
    wrapped = library.f
    second = casts.cast_registered()
    assert library.f is wrapped
    assert wrapped.__wrapped__ is seen
    library.g = seen
    casts.register_half_function(library, "g")
    third = casts.cast_registered()
    assert library.g is not seen
    for undo in (third, second, first):
        undo()
    assert (library.f, library.g) == (seen, seen)


def test_kinds_apply_in_the_order_of_registration(casts, switch, library):
    casts.register_half_function(library, "f")
    casts.register_float_function(library, "f")
    undo = casts.cast_registered()
    switch.dtype = HALF
    # float was put around half, so half has the last word.
    assert library.f(t(DOUBLE))[0][0].dtype == HALF
    undo()
    assert library.f is seen


class Base:
    def method(self, x):
        return x.dtype

    @staticmethod
    def static(x):
        return x.dtype

    @classmethod
    def of_class(cls, x):
        return x.dtype


class Derived(Base):
    def method(self, x):
        return super().method(x)


@pytest.mark.parametrize("owner", [Base, Derived], ids=["own", "inherited"])
@pytest.mark.parametrize("name", ["method", "static", "of_class"])
def test_attributes_of_classes(casts, switch, owner, name):
    before = dict(vars(owner))
    casts.register_half_function(owner, name)
    undo = casts.cast_registered()
    switch.dtype = HALF
    assert getattr(owner(), name)(t()) == HALF
    if name != "method":
        assert getattr(owner, name)(t()) == HALF
    undo()
    assert dict(vars(owner)) == before
    assert getattr(owner(), name)(t()) == FLOAT


def test_a_failing_install_puts_everything_back(casts, library):
    class ReadOnly(type):
        def __setattr__(cls, name, value):
            raise AttributeError("read-only")

    class Closed(metaclass=ReadOnly):
        def method(self):
            pass

    casts.register_half_function(library, "f")
    casts.register_half_function(Closed, "method")
    with pytest.raises(AttributeError, match="read-only"):
        casts.cast_registered()
    assert library.f is seen


def test_two_sessions_undone_in_any_order(library):
    dtypes = {"first": None, "second": None}
    undo = {}
    for name in dtypes:
        casts = FunctionCasts(functools.partial(dtypes.get, name))
        casts.register_half_function(library, "f")
        undo[name] = casts.cast_registered()
    dtypes["first"] = HALF
    undo["first"]()
    dtypes |= {"first": None, "second": HALF}
    assert library.f(t())[0][0].dtype == HALF
    undo["second"]()
    dtypes["second"] = None
    x = t()
    assert library.f(x)[0][0] is x


def test_one_may_let_go_while_another_installs():
    shared, undone = Shared(), []
    first = shared.acquire("a", lambda: functools.partial(undone.append, "a"))

    def install():
        first()  # as of a session that is collected at this moment
        return functools.partial(undone.append, "b")

    second = shared.acquire("b", install)
    assert (undone, "a" in shared, "b" in shared) == (["a"], False, True)
    with pytest.raises(ZeroDivisionError):
        shared.acquire("c", lambda: 1 / 0)
    assert "c" not in shared
    for _ in range(2):
        second()
    assert undone == ["a", "b"]


def test_sigmoid_in_fp32_makes_bce_usable(session):
    session.register_float_function(torch, "sigmoid")
    net = session.initialize(nn.Sequential(nn.Linear(2, 1), nn.Sigmoid()), opt_level="O1", verbosity=0)
    loss = F.binary_cross_entropy(net(torch.ones(3, 2)), torch.ones(3, 1))
    assert loss.dtype == FLOAT
    assert loss.isfinite()


def test_what_amp_computes_for_itself_is_not_cast(session):
    """The loss scale and its inverse are fp32 whatever the user has registered."""
    for name in ("div", "mul", "reciprocal"):
        session.register_half_function(torch, name)
    model = nn.ParameterList([torch.ones(4)])
    model, optimizer = start(session, "O1", functools.partial(torch.optim.SGD, lr=0.5), model)
    train(session, model, optimizer, 1, loss=lambda model, _: model[0].sum())
    assert torch.equal(model[0].detach(), torch.full((4,), 0.5))
