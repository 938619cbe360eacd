"""The cast table of O1 and O4: the CPU casts each op as torch's CUDA autocast does."""

import pytest
import torch
import torch.nn.functional as F

from ampctx.casts.autocast import Autocast
from ampctx.casts.cpu import missing_on_cpu
from ampctx.casts.table import NAMES, TABLE

HALF, BF16, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
# Some of the ops are on torch's way out: chain_matmul, nuclear_norm, frobenius_norm.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")
LOW = pytest.mark.parametrize("low", [HALF, BF16], ids=["fp16", "bf16"])


@pytest.fixture
def casts():
    """Switches casts on for a type, on the CPU; off again after the test."""
    undo = []

    def on(dtype):
        autocast = Autocast([], dtype)
        undo.append(autocast.enable())
        return autocast

    yield on
    for action in undo:
        action()


def t(*shape, seed=0):
    """Values between 0.1 and 0.9: inside the domain of every op here."""
    return torch.rand(shape or (3, 4), generator=torch.Generator().manual_seed(seed)) * 0.8 + 0.1


def rnn(gates, kind):
    weights = [t(gates * 5, 4), t(gates * 5, 5), t(gates * 5), t(gates * 5)]
    hx = [t(1, 2, 5), t(1, 2, 5)] if gates == 4 else t(1, 2, 5)
    if kind == "input":
        return (t(3, 2, 4), hx, weights, True, 1, 0.0, False, False, False)
    return (t(6, 4), torch.tensor([2, 2, 2]), hx, weights, True, 1, 0.0, False, False)


def cell(gates):
    hx = [t(2, 5), t(2, 5)] if gates == 4 else t(2, 5)
    return (t(2, 4), hx, t(gates * 5, 4), t(gates * 5, 5), t(gates * 5), t(gates * 5))


def pictures(n):
    return t(*(1, 2, 4, 4, 4)[: n + 2])


# fp32 arguments for each overload that is cast here.
LOW_CASES = {
    "addmv": (t(3), t(3, 4), t(4)),
    "addr": (t(3, 4), t(3), t(4)),
    "chain_matmul": ([t(3, 4), t(4, 2), t(2, 3)],),
    "convolution": (t(1, 2, 5, 5), t(3, 2, 3, 3), t(3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "einsum": ("i,i->i", [t(3), t(3)]),
    "gru_cell": cell(3),
    "linalg_multi_dot": ([t(3, 4), t(4, 2), t(2, 3)],),
    "lstm_cell": cell(4),
    "mv": (t(3, 4), t(4)),
    "rnn_relu_cell": cell(1),
    "rnn_tanh_cell": cell(1),
    **{
        f"{name}.{kind}": rnn(gates, kind)
        for name, gates in {"gru": 3, "lstm": 4, "rnn_relu": 1, "rnn_tanh": 1}.items()
        for kind in ("data", "input")
    },
}
ONE_ARGUMENT = (
    "acos asin cosh erfinv exp expm1 log log10 log1p log2 nuclear_norm pdist reciprocal rsqrt sinh softplus sum tan"
)
TWO = t(), t(seed=1)
FP32_CASES = {
    **{name: (t(),) for name in ONE_ARGUMENT.split()},
    **dict.fromkeys(("cosine_similarity", "dist", "pow.Tensor_Tensor"), TWO),
    "cumprod": (t(), 0),
    "cumsum": (t(), 0),
    "frobenius_norm.dim": (t(), [0]),
    "group_norm": (t(2, 4), 2),
    "layer_norm": (t(), [4]),
    "linalg_matrix_norm": (t(), 1),
    "linalg_matrix_norm.str_ord": (t(), "fro"),
    "linalg_vector_norm": (t(), 2),
    "log_softmax.int": (t(), 1),
    "logsumexp": (t(), [1]),
    "native_layer_norm": (t(), [4], None, None, 1e-5),
    "norm.Scalar": (t(), 2),
    "norm.ScalarOpt_dim": (t(), 2, [1]),
    "nuclear_norm.dim": (t(), [0, 1]),
    "pow.Scalar": (2, t()),
    "pow.Tensor_Scalar": (t(), 3),
    "renorm": (t(), 2, 0, 1.0),
    "rms_norm": (t(), [4]),
    "softmax.int": (t(), 1),
    "sum.dim_IntList": (t(), [1]),
    "_upsample_bicubic2d_aa": (pictures(2), [6, 6], False),
    "_upsample_bilinear2d_aa": (pictures(2), [6, 6], False),
    "_upsample_nearest_exact1d": (pictures(1), [6]),
    "_upsample_nearest_exact2d": (pictures(2), [6, 6]),
    "_upsample_nearest_exact3d": (pictures(3), [6, 6, 6]),
    "upsample_bicubic2d": (pictures(2), [6, 6], False),
    "upsample_bilinear2d": (pictures(2), [6, 6], False),
    "upsample_linear1d": (pictures(1), [6], False),
    "upsample_nearest1d": (pictures(1), [6]),
    "upsample_nearest2d": (pictures(2), [6, 6]),
    "upsample_nearest3d": (pictures(3), [6, 6, 6]),
    "upsample_trilinear3d": (pictures(3), [6, 6, 6], False),
}
# The first tensor becomes 16-bit, the others stay fp32.
PROMOTE_CASES = {
    "atan2": TWO,
    "addcdiv": (t(), t(seed=1), t(seed=2)),
    "addcmul": (t(), t(seed=1), t(seed=2)),
    "bilinear": (t(3, 4), t(3, 5), t(2, 4, 5), t(2)),
    "cross": (t(4, 3), t(4, 3, seed=1), 1),
    "dot": (t(4), t(4, seed=1)),
    "index_put": (t(4), [torch.tensor([0, 2])], t(2)),
    "scatter_add": (t(4), 0, torch.tensor([0, 2]), t(2)),
    "tensordot": (t(3, 4), t(4, 2), [1], [0]),
    "vdot": (t(4), t(4, seed=1)),
}
CASES = {**LOW_CASES, **FP32_CASES, **PROMOTE_CASES}


def overload(name):
    packet, _, kind = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), kind or "default")


def moved(value, change):
    if isinstance(value, torch.Tensor):
        return change(value)
    return type(value)(moved(v, change) for v in value) if isinstance(value, (list, tuple)) else value


def as_type(args, dtype):
    return moved(args, lambda x: x.to(dtype) if x.is_floating_point() else x)


def first_as_type(args, dtype):
    return (args[0].to(dtype), *args[1:])


def outputs(result):
    return list(result) if isinstance(result, (tuple, list)) else [result]


def assert_same(result, expected):
    for a, b in zip(outputs(result), outputs(expected), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def name_of(op):
    name = op.name().removeprefix("aten::")
    return name.removesuffix(".default")


def test_every_op_that_is_cast_here_has_a_case():
    """The others are cast by torch's CPU autocast itself."""
    assert {name_of(op) for op, _ in missing_on_cpu()} == set(CASES) <= TABLE.keys()


def test_fp32_ops_take_their_tensors_one_by_one():
    """The cast of these looks at each positional argument, and not into lists."""
    for op in (op for op, rule in missing_on_cpu() if rule == "float"):
        for argument in op._schema.arguments:
            of_tensors = "Tensor" in str(argument.type)
            assert not of_tensors or (str(argument.type) in ("Tensor", "Optional[Tensor]") and not argument.kwarg_only)


def test_the_lists_name_real_ops_once_and_in_order():
    names = " ".join(NAMES.values()).split()
    assert len(names) == len(set(names))
    for name in names:
        assert callable(overload(name))


@LOW
@pytest.mark.parametrize("name", [n for n in CASES if TABLE.get(n) == "half"])
def test_low_precision_ops(casts, name, low):
    expected = overload(name)(*as_type(CASES[name], low))
    casts(low)
    result = overload(name)(*CASES[name])
    assert {r.dtype for r in outputs(result)} == {low}
    assert_same(result, expected)
    if isinstance(CASES[name][0], torch.Tensor):
        assert_same(overload(name)(*first_as_type(CASES[name], low)), expected)


@LOW
@pytest.mark.parametrize("name", [n for n in CASES if TABLE.get(n) == "float"])
def test_fp32_ops(casts, name, low):
    args = as_type(CASES[name], low)
    expected = overload(name)(*as_type(args, FLOAT))
    casts(low)
    result = overload(name)(*args)
    assert {r.dtype for r in outputs(result)} == {FLOAT}
    assert_same(result, expected)


@LOW
@pytest.mark.parametrize("name", [n for n in CASES if TABLE.get(n) == "promote"])
def test_promote_ops(casts, name, low):
    mixed, same = first_as_type(CASES[name], low), as_type(CASES[name], low)
    expected, native = overload(name)(*as_type(mixed, FLOAT)), overload(name)(*same)
    casts(low)
    result = overload(name)(*mixed)
    assert result.dtype == FLOAT
    assert_same(result, expected)
    assert_same(overload(name)(*same), native)


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("lstm.data", "lstm.input")])
def test_fp64_is_left_alone(casts, name):
    args = as_type(CASES[name], DOUBLE)
    expected = overload(name)(*args)
    casts(HALF)
    assert_same(overload(name)(*args), expected)


@LOW
@pytest.mark.parametrize("name", ["softmax.int", "sum", "pow.Tensor_Scalar", "layer_norm", "cosine_similarity", "exp"])
def test_gradients_have_the_type_of_the_input(casts, name, low):
    def leaves():
        return moved(as_type(FP32_CASES[name], low), lambda x: x.clone().requires_grad_())

    wide = leaves()
    overload(name)(*as_type(wide, FLOAT)).square().sum().backward()
    autocast = casts(low)
    args = leaves()
    loss = overload(name)(*args).square().sum()
    with autocast.suspended():
        loss.backward()
    assert args[0].grad.dtype == low
    assert torch.equal(args[0].grad, wide[0].grad)


def test_a_dtype_of_the_callers_integers_and_in_place_ops_are_left_alone(casts):
    x = t().half()
    casts(HALF)
    assert x.softmax(1, dtype=HALF).dtype == HALF
    assert F.log_softmax(x, 1, dtype=DOUBLE).dtype == DOUBLE
    assert x.sum(dtype=HALF).dtype == x.sum(1, dtype=HALF).dtype == HALF
    assert x.cumsum(0, dtype=DOUBLE).dtype == DOUBLE
    assert torch.linalg.vector_norm(x, dtype=HALF).dtype == HALF
    assert torch.arange(3).sum() == 3
    assert torch.tensor([True, True]).cumsum(0).tolist() == [1, 2]
    assert torch.arange(3).pow(2).dtype == torch.int64
    assert x.exp_().dtype == x.pow_(2).dtype == HALF  # in place


# What a user writes beside the ops above: operators, C++ composites, ops that are left alone. 16-bit input, the type
# of the result.
CALLS = {
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2])), FLOAT),
    "Tensor.softmax": (lambda x: x.softmax(-1), FLOAT),
    "softmin": (lambda x: F.softmin(x, dim=-1), FLOAT),
    "power": (lambda x: x**2, FLOAT),
    "rpow": (lambda x: 2**x, FLOAT),
    "torch.norm": (torch.norm, FLOAT),
    "F.normalize": (F.normalize, FLOAT),
    "interpolate": (lambda x: F.interpolate(x[None], scale_factor=2), FLOAT),
    "einsum": (lambda x: torch.einsum("ij,kj->ik", x.float(), x), None),
    "bmm": (lambda x: torch.bmm(x[None].float(), x.T[None]), None),
    "relu": (F.relu, None),
    "add": (lambda x: x + x, None),
    "add-mixed": (lambda x: x + x.float(), FLOAT),
    "cat-mixed": (lambda x: torch.cat([x, x.float()]), FLOAT),
    "mean": (torch.mean, None),
    "dropout": (lambda x: F.dropout(x, 0.5), None),
}


@LOW
@pytest.mark.parametrize("name", CALLS)
def test_calls_as_users_write_them(casts, name, low):
    call, expected = CALLS[name]
    casts(low)
    assert call(t().to(low)).dtype == (expected or low)


NOT_OF_CUDA = {n for n in LOW_CASES if n.startswith(("gru.", "lstm.", "rnn_"))}
if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA"):
    NOT_OF_CUDA.add("rms_norm")  # torch 2.11


@pytest.mark.cuda
@LOW
@pytest.mark.parametrize("name", sorted({*CASES} - NOT_OF_CUDA))
def test_cuda_casts_alike(casts, name, low):
    args = first_as_type(CASES[name], low) if name in PROMOTE_CASES else CASES[name]
    args = as_type(args, low) if name in FP32_CASES else args
    with torch.autocast("cuda", dtype=low):
        on_cuda = overload(name)(*moved(args, lambda x: x.cuda()))
    casts(low)
    assert [r.dtype for r in outputs(on_cuda)] == [r.dtype for r in outputs(overload(name)(*args))]
