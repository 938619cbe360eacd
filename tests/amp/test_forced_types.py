"""keep_fp32 and ops_fp32 of initialize: modules and functions in fp32, in the same words at every opt level."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from kit import (
    LEVELS,
    LOW,
    TORCH_2_11,
    backward,
    batch,
    each_copy,
    every_level,
    goes_on_where_dynamo_ends,
    in_thread,
    start,
    train,
)
from torch import nn

from ampctx import AmpKeyError, AmpTypeError, AmpValueError
from ampctx.amp import AmpSession

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
SIXTEEN = {"O0": FLOAT, "O1": HALF, "O4": BF16, **LOW}
KEEP = ["head.*", nn.LayerNorm]
# dynamo looks at the gradient of what it compiles a hook for.
of_compiled_hooks = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")


class Network(nn.Module):
    """Linear, LayerNorm, Linear, softmax, head: ``types`` has the types on the way."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.types = {}

    def attend(self, x):
        weights = (self.body(self.norm(x)) * 4).softmax(-1)
        self.types["weights"] = weights.dtype
        return weights

    def forward(self, x):
        x = self.first(x)
        self.types["first"] = x.dtype
        return self.head(self.attend(x))


class Seen:
    """A forward hook that notes the types of a module's input and output. Copies and pickles as it is."""

    def __init__(self):
        self.types = None

    def __call__(self, module, args, output):
        self.types = args[0].dtype, output.dtype


def watch(module):
    """What ``module`` computes on and gives: last in, so before amp's hook takes the output."""
    seen = Seen()
    module.register_forward_hook(seen, prepend=True)
    return seen


def initialize(session, model, level, **kwargs):
    return start(session, level, "SGD-foreach", model, max_loss_scale=1024.0, **kwargs)[1]


# --- keep_fp32: what is kept and what it computes in ------------------------------------------------------------------


class Listed(nn.Module):
    """Containers without a forward pass it on to what they hold."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.ModuleDict({"a": nn.Linear(4, 4)})])
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.blocks[1]["a"](self.blocks[0](x)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.out = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.body(self.embed(torch.arange(7))))


def shared():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model.append(model[0])


def normed():
    return nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))


HEAD = ["head", "head.0", "head.1", "head.2"]
# The model, keep_fp32, and the modules that compute in fp32 then.
KEPT = {
    "name": (Network, "head", HEAD),
    "pattern": (Network, "head.*", HEAD[1:]),
    "wildcard": (Network, "h*", HEAD),
    "class": (Network, [nn.Sequential], HEAD),
    "module": (Network, lambda model: model.head, HEAD),
    "pattern and class": (Network, KEEP, ["norm", *HEAD[1:]]),
    "whole model": (Network, "*", ["first", "norm", "body", *HEAD]),
    "without a forward": (Listed, "blocks", ["blocks.0", "blocks.1.a"]),
    "tied": (Tied, ["out", "embed"], ["out", "embed"]),
    "shared": (shared, "2", ["0"]),
    "parametrized": (normed, "1", ["1"]),
}


@every_level
@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_computes_in_fp32(session, level, name):
    make, keep, kept = KEPT[name]
    torch.manual_seed(0)
    model, x = make(), batch(n=6)
    expected = model(x)
    optimizer = initialize(session, model, level, keep_fp32=keep(model) if name == "module" else keep)
    seen = [watch(model.get_submodule(module)) for module in kept]
    inside = {m for module in kept for m in model.get_submodule(module).modules()}
    others = [watch(m) for m in model.modules() if type(m) is nn.Linear and m not in inside]
    out = model(x)
    backward(session, out.float().square().mean(), optimizer)
    optimizer.step()
    assert {types[1] for types in (s.types for s in seen)} == {FLOAT}
    assert {types[0] for types in (s.types for s in seen)} <= {FLOAT, torch.int64}
    assert {s.types[1] for s in others} <= {SIXTEEN[level]}
    in_fp32 = {id(p) for module in kept for p in model.get_submodule(module).parameters()}
    assert in_fp32 <= {id(p) for p in session.master_params(optimizer)}  # they need no masters
    for n, p in model.named_parameters():
        assert p.dtype == (FLOAT if id(p) in in_fp32 else LOW.get(level, FLOAT)), n
    assert torch.is_autocast_enabled("cpu") == (level in ("O1", "O4"))
    if name == "whole model":
        assert torch.equal(out, expected)
    if name == "parametrized":
        assert model[1].weight.dtype == FLOAT
    session.reset()
    assert {p.dtype for p in model.parameters()} == {FLOAT}
    assert not any(m._forward_pre_hooks for m in model.modules())


@every_level
def test_a_weight_of_a_module_that_is_kept_and_of_one_that_is_not(session, level):
    model, inside = Tied(), nn.Sequential(nn.Sequential(linear := nn.Linear(4, 4), nn.ReLU()), linear)
    for given, keep, names in ((model, "out", ("out", "embed")), (inside, "0", ("0.0", "1"))):
        message = rf'^keep_fp32 covers "{names[0]}.weight", which is also "{names[1]}.weight" in a module'
        with pytest.raises(AmpValueError, match=message):
            session.initialize(given, opt_level=level, verbosity=0, keep_fp32=keep)
    assert {p.dtype for p in [*model.parameters(), *inside.parameters()]} == {FLOAT}


@every_level
@pytest.mark.parametrize("keep", ["self_attn", "self_attn.out_proj", nn.LayerNorm, nn.Linear], ids=str)
def test_attention_with_its_fast_path(session, level, keep):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(4, 8), layer)
    x = torch.randn(2, 3, 4)
    expected = model(x).detach()
    session.initialize(model, opt_level=level, verbosity=0, keep_fp32=f"1.{keep}" if isinstance(keep, str) else keep)
    torch.testing.assert_close(model(x).float(), expected, rtol=0.05, atol=0.05)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x).float(), expected, rtol=0.05, atol=0.05)
    attention_kept = keep is not nn.LayerNorm
    assert layer.self_attn.in_proj_weight.dtype == (FLOAT if attention_kept else LOW.get(level, FLOAT))


# --- tables: buffers of modules without parameters --------------------------------------------------------------------


class Rotary(nn.Module):
    """Angles of far positions, from one table in fp32 and one in fp64. Gives containers and a word."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", 1e4 ** -(torch.arange(4) / 4), persistent=False)
        self.register_buffer("phases", torch.arange(4).double() / 3)
        self.register_buffer("order", torch.arange(4))

    def forward(self, x, *, at):
        assert (x.dtype, self.frequencies.dtype, self.phases.dtype) == (FLOAT, FLOAT, torch.float64)
        angles = torch.outer(at.float(), self.frequencies[self.order]) + self.phases
        return {"rotated": [x * angles.cos()], "at": at}, "angles"


class Rotated(nn.Module):
    """``Outer`` has no parameters either: what is inside it gives fp32."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Rotary()

        def forward(self, x):
            found, word = self.inner(x, at=torch.arange(2000, 2000 + len(x)))
            assert (found["rotated"][0].dtype, word) == (torch.float64, "angles")
            return found["rotated"][0], found["at"]

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.outer, self.last = nn.Linear(4, 4), self.Outer(), nn.Linear(4, 3)

    def forward(self, x):
        x, at = self.outer(self.first(x))
        assert at.dtype == torch.int64
        return self.last(x)


@of_compiled_hooks
@goes_on_where_dynamo_ends
@pytest.mark.parametrize("level", LOW)
def test_modules_with_buffers_and_no_parameters_compute_in_fp32(session, level, said):
    x, reference, model = batch(n=6), Rotated(), Rotated()
    reference.last.double()
    expected, names = reference(x).detach().float(), list(model.state_dict())
    optimizer = start(session, level, "SGD-foreach", model, loss_scale=8.0, verbosity=1)[1]
    given = []
    model.last.register_forward_pre_hook(lambda module, args: given.append(args[0].dtype))
    for called in (model, copy.deepcopy(model), torch.compile(model, backend="eager", fullgraph=True)):
        torch.testing.assert_close(called(x), expected, rtol=0.05, atol=0.02)
    assert {*given} == {LOW[level]}
    train(session, model, optimizer, 2)
    for (name, b), exact in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert (b.dtype, torch.equal(b, exact)) == (exact.dtype, True), name
    assert list(model.state_dict()) == names
    session.reset()
    assert not any(m._forward_pre_hooks for m in model.outer.modules())
    assert said() == []


@pytest.mark.parametrize("level", LOW)
def test_a_model_of_buffers_alone(session, level):
    model = session.initialize(Rotary(), opt_level=level, verbosity=0)
    out, word = model(batch(n=6).to(LOW[level]), at=torch.arange(6))
    assert (out["rotated"][0].dtype, out["at"].dtype, word) == (FLOAT, torch.int64, "angles")


class Beside(nn.Linear):
    """A linear layer with a table, and buffers that are none: a mask, numbers with few digits, statistics."""

    def __init__(self, value=0.1):
        super().__init__(4, 4)
        self.register_buffer("table", torch.full((3, 3), value))
        self.register_buffer("mask_table", torch.full((3, 3), -torch.inf).triu())
        self.register_buffer("empty_table", torch.ones(0))
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.norm.running_var += 0.1


def without_a_forward():
    model = nn.Module()
    model.holder, model.fc = nn.Module(), nn.Linear(4, 4)
    model.holder.register_buffer("table", torch.full((3,), 0.1))
    return model


ROUNDED = {
    "beside parameters": (Beside, "table"),
    "too large": (lambda: Beside(-1e38), "table"),
    "beside those of children": (lambda: nn.Sequential(nn.Sequential(Beside())), "0.0.table"),
    "of a module without forward": (without_a_forward, "holder.table"),
    "few digits": (lambda: Beside(0.25), None),
}


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("level", LOW)
def test_buffers_beside_parameters_are_cast_with_a_warning(session, level, name, said):
    make, rounded = ROUNDED[name]
    model = make()
    for verbosity in (1, 0):
        session.initialize(model, opt_level=level, verbosity=verbosity)
        assert {b.dtype for n, b in model.named_buffers() if n.endswith("table")} == {LOW[level]}
        session.reset()
    found = [text.partition("16 bits: ")[2].partition(". A ")[0] for text in said()]
    assert found == ([] if rounded is None else [rounded])


# --- keep_fp32: copies, threads, failures -----------------------------------------------------------------------------


@every_level
@each_copy
def test_copies_of_the_model(session, level, copied):
    model = Network()
    session.initialize(model, opt_level=level, verbosity=0, keep_fp32=KEEP)
    seen = watch(model.head[0])
    x = batch(n=6)
    expected = model(x)
    twin = copied(model)
    with torch.no_grad():
        model.head[0].weight.zero_()
    seen.types = None
    assert torch.equal(twin(x), expected) or (copied is not copy.deepcopy and level in ("O1", "O4"))
    assert seen.types is None  # nothing of the original ran
    session.reset()
    assert twin(x.to(twin.first.weight.dtype)).isfinite().all()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_casts_come_back_after_an_exception_and_elsewhere(session, level):
    model = Network()
    session.initialize(model, opt_level=level, verbosity=0, keep_fp32=["head", "norm"])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.head(torch.ones(2, 5))
    assert torch.is_autocast_enabled("cpu")
    assert model.body(torch.ones(2, 8)).dtype == SIXTEEN[level]

    def interrupt(module, args):
        raise KeyboardInterrupt

    # Before amp's hook of what is kept, after it, and in what follows.
    for module, prepend in ((model.head, True), (model.norm, False), (model.body, False)):
        handle = module.register_forward_pre_hook(interrupt, prepend=prepend)
        with pytest.raises(KeyboardInterrupt):
            model(batch(n=6))
        handle.remove()
        assert torch.is_autocast_enabled("cpu") or not prepend  # the next forward switches them on again
        model(batch(n=6))
        assert model.types["first"] == SIXTEEN[level]
        assert torch.is_autocast_enabled("cpu")
    with session.disable_casts():
        model(batch(n=6))
        assert not torch.is_autocast_enabled("cpu")
    seen = watch(model.head[0])
    assert in_thread(lambda: (model(batch(n=6)).dtype, torch.is_autocast_enabled("cpu"))) == (FLOAT, False)
    assert seen.types == (FLOAT, FLOAT)


def test_a_failed_initialize_leaves_nothing(session):
    class Closed(torch.optim.SGD):
        def __setattr__(self, name, value):
            if callable(value):
                raise AttributeError("read-only")
            super().__setattr__(name, value)

    model, softmax, method = Network(), torch.softmax, torch.Tensor.softmax
    for level in LEVELS:
        with pytest.raises(AttributeError, match="read-only"):
            start(session, level, Closed, model, keep_fp32=KEEP, ops_fp32="softmax")
        assert {p.dtype for p in model.parameters()} == {FLOAT}
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
        assert torch.softmax is softmax
        assert torch.Tensor.softmax is method
        assert not torch.is_autocast_enabled("cpu")


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_a_run_that_kept_other_modules_is_refused():
    sessions, runs = [AmpSession(), AmpSession()], []
    for session, keep in zip(sessions, ("head", None), strict=True):
        model = Network()
        optimizer = initialize(session, model, "O2", keep_fp32=keep)
        train(session, model, optimizer, 1)
        runs.append((model, optimizer, session.state_dict(masters=True)))
    hint = "Pass amp.initialize the same keep_fp32 as in"
    with pytest.raises(AmpKeyError, match=f"that parameter of shape .* has none here.*{hint}"):
        sessions[0].load_state_dict(runs[1][2])
    with pytest.raises(AmpKeyError, match=f"has no .* that parameter of shape .* has one here.*{hint}"):
        sessions[1].load_state_dict(runs[0][2])
    for session in sessions:
        session.reset()


# --- ops_fp32 ---------------------------------------------------------------------------------------------------------


def computed(x, fn):
    """``fn`` of ``x`` where rounding its result once tells whether it was computed in fp32."""
    return fn(x.float()).to(x.dtype)


FORMS = {
    "method": lambda x: x.softmax(-1),
    "torch": lambda x: torch.softmax(x, -1),
    "functional": lambda x: F.softmax(x, dim=-1),
    "special": lambda x: torch.special.softmax(x, -1),
    "module": nn.Softmax(-1),
}


class Op(nn.Module):
    """Hands what a 16-bit layer gives to ``fn``, and the result to a 16-bit layer."""

    def __init__(self, fn):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.fn, self.last = nn.Linear(4, 4), fn, nn.Linear(4, 4)
        self.given = self.got = None

    def forward(self, x):
        self.given = self.first(x)
        self.got = self.fn(self.given)
        return self.last(self.got)


@pytest.mark.parametrize("form", FORMS)
@every_level
def test_every_form_of_a_call_computes_in_fp32(session, level, form):
    model = Op(FORMS[form])
    session.initialize(model, opt_level=level, verbosity=0, ops_fp32={"softmax"})
    model(torch.randn(32, 4) * 4)
    exact = model.given.detach().float().softmax(-1)
    assert model.got.dtype == LOW.get(level, FLOAT)
    assert torch.equal(model.got, exact.to(model.got.dtype))


@every_level
@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("matmul", lambda x: x @ x),
        (torch.matmul, lambda x: x.matmul(x)),
        ("bmm", lambda x: torch.bmm(x[None], x[None])[0]),
        (torch.einsum, lambda x: torch.einsum("ij,jk->ik", [x, x])),
        ("F.linear", lambda x: F.linear(x, weight=x)),
        (torch.Tensor.pow, lambda x: x**3),
    ],
    ids=["operator", "function", "bmm", "einsum", "keywords", "method"],
)
def test_functions_that_levels_run_in_16_bits_run_in_fp32(session, level, op, call):
    torch.manual_seed(0)
    big = torch.randn(4, 4) * 200  # products leave the range of fp16
    model = Op(lambda x: call(x * 0 + big.to(x.dtype)) * 2.0**-16)
    session.initialize(model, opt_level=level, verbosity=0, ops_fp32=op)
    model(torch.randn(4, 4))
    inner = call(big.to(model.given.dtype).float())
    if level in LOW:
        # Rounded to 16 bits on the way out, where it may overflow.
        inner = inner.to(LOW[level])
    assert torch.equal(model.got, (inner * 2.0**-16).to(model.got.dtype))


def test_the_type_of_results(session):
    session.initialize(nn.Linear(1, 1), opt_level="O2", verbosity=0, ops_fp32={"softmax", "topk", "add", "layer_norm"})
    h, b, f = (torch.randn(4, 4).to(dtype) for dtype in (HALF, BF16, FLOAT))
    assert (h + h).dtype == (h + f).dtype == HALF
    assert (b + 1).dtype == BF16
    assert (h + b).dtype == FLOAT  # the widest of both
    assert (f + f).dtype == FLOAT
    values = torch.topk(h, 2)
    assert (values.values.dtype, values.indices.dtype) == (HALF, torch.int64)
    assert F.layer_norm(h, (4,), torch.ones(4), torch.zeros(4)).dtype == HALF
    # A type that the caller chose stands.
    assert F.softmax(h, -1, dtype=FLOAT).dtype == FLOAT
    assert h.softmax(-1, torch.float64).dtype == torch.float64
    out = torch.empty_like(h)
    assert torch.add(h, h, out=out) is out
    assert torch.equal(out, computed(h, lambda t: t + t))
    # Complex numbers and integers are left alone.
    assert (torch.arange(3) + 1).dtype == torch.int64
    assert (torch.ones(2, dtype=torch.complex64) + 1).dtype == torch.complex64


def test_it_ends_with_reset_and_with_the_session():
    places = [(torch, "softmax"), (F, "softmax"), (torch.Tensor, "softmax"), (torch.special, "softmax")]
    operators = [(torch.Tensor, "__matmul__"), (torch.Tensor, "matmul"), (torch, "matmul")]
    before = [getattr(*place) for place in places + operators]
    one, two = AmpSession(), AmpSession()
    one.initialize(nn.Linear(1, 1), opt_level="O2", verbosity=0, ops_fp32={"softmax", "matmul"})
    # The functions are known under their names while they are replaced.
    two.initialize(nn.Linear(1, 1), opt_level="O5", verbosity=0, ops_fp32={torch.softmax, before[1], before[2]})
    assert two.policy.ops_fp32 == ("softmax",)
    x = torch.randn(8, 8).half() * 4
    held = torch.softmax
    assert torch.equal(held(x, -1), computed(x, lambda t: t.softmax(-1)))
    one.reset()
    assert torch.equal(x.softmax(-1), computed(x, lambda t: t.softmax(-1)))
    del two
    assert [getattr(*place) for place in places + operators] == before
    assert torch.equal(held(x, -1), before[0](x, -1))


IN_PLACE = {
    "index_add_": lambda h: torch.zeros(2, 4).index_add_(0, torch.zeros(6, dtype=torch.long), h),
    "Tensor.cumsum_": lambda h: h.clone().cumsum_(0),
    "torch.sparse.mm": lambda h: torch.sparse.mm(torch.ones(6, 6).to_sparse(), h),
}


@pytest.mark.parametrize("op", IN_PLACE)
@every_level
def test_functions_in_place_and_of_sparse_tensors_compute_in_fp32(session, level, op):
    model = Op(lambda h: IN_PLACE[op](h).to(h.dtype))
    session.initialize(model, opt_level=level, verbosity=0, ops_fp32=torch.sparse.mm if "sparse" in op else op)
    model(batch(n=6)).sum().backward()
    assert torch.equal(model.got, computed(model.given.detach(), IN_PLACE[op]))
    assert model.first.weight.grad.count_nonzero() > 0


def test_a_function_in_place_gives_the_tensor_that_it_wrote(session):
    session.initialize(nn.Linear(1, 1), opt_level="O2", verbosity=0, ops_fp32=["add_", torch.Tensor.exp_])
    wide, narrow = torch.zeros(3), torch.full((3,), 0.3, dtype=HALF)
    assert wide.add_(narrow) is wide
    assert wide.dtype == FLOAT
    expected = computed(narrow.clone(), torch.exp)
    assert narrow.exp_() is narrow
    assert torch.equal(narrow, expected)


def test_nothing_is_replaced_when_nothing_is_asked_for(session):
    before = dict(vars(torch)), dict(vars(torch.Tensor))
    model = Network()
    session.initialize(model, opt_level="O2", verbosity=0)
    assert (dict(vars(torch)), dict(vars(torch.Tensor))) == before
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules() if m is not model)
    assert (session.policy.keep_fp32, session.policy.ops_fp32) == ((), ())


# --- torch.compile ----------------------------------------------------------------------------------------------------


@of_compiled_hooks
@goes_on_where_dynamo_ends
@pytest.mark.full(but=2)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_models_compute_the_same(session, level, when):
    torch.compiler.reset()
    is_whole = not TORCH_2_11 or level == "O2"  # a kept layer switches autocast off
    compile_model = functools.partial(torch.compile, backend="aot_eager", fullgraph=is_whole)
    x, results = batch(n=6), []
    for compiled in (False, True):
        model = Network()
        called = compile_model(model) if compiled and when == "before" else model
        session.initialize(called, opt_level=level, verbosity=0, keep_fp32=KEEP, ops_fp32={"softmax"})
        called = compile_model(model) if compiled and when == "after" else called
        result = called(x)
        result.float().square().mean().backward()
        results.append([result, *(p.grad for p in model.parameters())])
        assert torch.is_autocast_enabled("cpu") == (level == "O1")
        session.reset()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    # What dynamo learned meanwhile does not stay.
    assert torch.compile(lambda t: torch.softmax(t, -1), backend="eager", fullgraph=True)(x).dtype == FLOAT
    torch.compiler.reset()


# --- errors and what is printed ---------------------------------------------------------------------------------------


@every_level
@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"keep_fp32": "haed.*"}, AmpValueError, r"^keep_fp32: no module .* matches 'haed.\*'. Similar names: 'head"),
        (
            {"keep_fp32": ["norm", "head.weight"]},
            AmpValueError,
            r"matches 'head.weight'. Similar .*'head.*not those of",
        ),
        ({"keep_fp32": ""}, AmpValueError, r"matches ''. Patterns match"),
        ({"keep_fp32": nn.BatchNorm1d}, AmpValueError, r"is a BatchNorm1d. Their .* Network, Linear, LayerNorm, Seq"),
        ({"keep_fp32": [nn.Conv2d]}, AmpValueError, r"is a Conv2d. Their classes include Network, Linear"),
        ({"keep_fp32": nn.Linear(1, 1)}, AmpValueError, r"the Linear you passed is not a module of the models"),
        ({"keep_fp32": True}, AmpTypeError, r"keep_fp32 is True, expected a pattern of module names, a module class"),
        ({"keep_fp32": ["head", 3]}, AmpTypeError, r"keep_fp32 has 3 in it"),
        ({"keep_fp32": torch.Tensor}, AmpTypeError, r"keep_fp32 is <class 'torch.Tensor'>"),
        ({"ops_fp32": "sofmax"}, AmpValueError, r"^ops_fp32: 'sofmax' is no function .*Similar names: 'softmax'"),
        ({"ops_fp32": ["torch.linalg.softmax"]}, AmpValueError, r"'torch.linalg.softmax' is no function"),
        ({"ops_fp32": "no.such.softmax"}, AmpValueError, r"'no.such.softmax' is no function"),
        ({"ops_fp32": F.batch_norm}, AmpValueError, r"function 'batch_norm' may write .* keep_fp32"),
        ({"ops_fp32": "embedding"}, AmpValueError, r"'embedding' may write"),
        ({"ops_fp32": batch}, AmpValueError, r"function 'batch' is no function of torch.*amp.float_function"),
        ({"ops_fp32": "backward"}, AmpValueError, r"'backward' is no function"),
        ({"ops_fp32": nn.Softmax}, AmpTypeError, r"ops_fp32 is <class .*Softmax'>, expected the name of a torch func"),
        ({"ops_fp32": {"softmax", 2}}, AmpTypeError, r"ops_fp32 has 2 in it"),
        ({"ops_fp32": 1.0}, AmpTypeError, r"ops_fp32 is 1.0"),
    ],
)
def test_errors_are_the_same_at_every_level(session, level, kwargs, error, match):
    model = Network()
    with pytest.raises(error, match=match):
        session.initialize(model, opt_level=level, verbosity=0, **kwargs)
    assert session.policy is None
    assert {p.dtype for p in model.parameters()} == {FLOAT}


def test_what_is_kept_in_the_policy(session):
    model = Network()
    options = {"keep_fp32": ["head.*", nn.LayerNorm, model.body], "ops_fp32": [torch.bmm]}
    session.initialize(model, opt_level="O2", verbosity=0, **options)
    assert (session.policy.keep_fp32, session.policy.ops_fp32) == (("head.*", "LayerNorm", "body"), ("bmm",))
