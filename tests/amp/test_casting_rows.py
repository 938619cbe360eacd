"""Casting of whole models at every opt level: norms, containers, the cache, checkpointing, recurrent layers, functions.

What casts of single ops, of containers and of the cache do by themselves is in test_cast_table, test_casting,
test_map_floating, test_autocast and test_function_casts.
"""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from kit import LEVELS, LOW, backward, start
from test_map_floating import SAMPLES, leaves
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ampctx import amp
from ampctx.casts.table import TABLE

HALF, BF16, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
CAST_LEVELS = LEVELS[1:]
PER_OP = {"O1": HALF, "O4": BF16}
LOW_OF = {**LOW, **PER_OP}
every_level = pytest.mark.parametrize("level", CAST_LEVELS)
per_op = pytest.mark.parametrize("level", PER_OP)


def initialized(session, model, level):
    """The model and an SGD under amp, with a scale that no gradient here overflows."""
    make = functools.partial(torch.optim.SGD, lr=0.125)
    return start(session, level, lambda ps: make(p for p in ps if p.requires_grad), model, loss_scale=8.0)


# --- norms ------------------------------------------------------------------------------------------------------------


class FrozenBatchNorm2d(nn.Module):
    """Of the sort that detection models bring: all constants, all of them buffers."""

    def __init__(self, n):
        super().__init__()
        for name, value in {"weight": 1.5, "bias": 0.5, "running_mean": 0.25, "running_var": 2.0}.items():
            self.register_buffer(name, torch.full((n,), value))

    def forward(self, x):
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


class CustomBatchNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


CONV = {2: nn.Conv2d, 3: nn.Conv3d}
TRACKING = {"affine": True, "track_running_stats": True}
NORMS = {
    "BatchNorm2d": (2, lambda: nn.BatchNorm2d(4)),
    "BatchNorm2d-plain": (2, lambda: nn.BatchNorm2d(4, affine=False)),
    "BatchNorm2d-no-statistics": (2, lambda: nn.BatchNorm2d(4, track_running_stats=False)),
    "SyncBatchNorm": (2, lambda: nn.SyncBatchNorm(4)),
    "CustomBatchNorm": (2, lambda: CustomBatchNorm(4)),
    "FrozenBatchNorm2d": (2, lambda: FrozenBatchNorm2d(4)),
    "InstanceNorm2d": (2, lambda: nn.InstanceNorm2d(4)),
    "InstanceNorm3d-affine-statistics": (3, lambda: nn.InstanceNorm3d(4, **TRACKING)),
    "GroupNorm": (2, lambda: nn.GroupNorm(2, 4)),
    "LayerNorm": (2, lambda: nn.LayerNorm([4, 5, 5])),
    "RMSNorm": (2, lambda: nn.RMSNorm(5)),
}


def norm_net(name, mode):
    torch.manual_seed(0)
    dims, make = NORMS[name]
    model = nn.Sequential(CONV[dims](2, 4, 1), make(), CONV[dims](4, 2, 1)).train(mode != "eval")
    if mode == "frozen":
        model[1].requires_grad_(False).eval()
    return model, torch.randn(4, 2, *[5] * dims)


@pytest.mark.full(but=80)
@pytest.mark.parametrize("mode", ["train", "eval", "frozen"])
@pytest.mark.parametrize("level", CAST_LEVELS)
@pytest.mark.parametrize("name", NORMS)
def test_norms(session, name, level, mode):
    model, x = norm_net(name, mode)
    reference = copy.deepcopy(model)
    expected = reference(x)
    expected.square().mean().backward()
    kept = level != "O3" and ("BatchNorm" in name or "statistics" in name)
    buffers = [b.clone() for b in model.buffers()]
    model, optimizer = initialized(session, model, level)
    assert {p.dtype for p in model[1].parameters()} <= {FLOAT if kept or level in PER_OP else LOW[level]}
    out = model(x)
    assert out.dtype == PER_OP.get(level, FLOAT)
    bound = 2e-2 if LOW_OF[level] == HALF else 1e-1
    torch.testing.assert_close(out.float(), expected, rtol=bound, atol=bound)
    backward(session, out.float().square().mean(), optimizer)
    for p, q in zip(
        amp.master_params(optimizer), filter(lambda q: q.requires_grad, reference.parameters()), strict=True
    ):
        assert p.grad.dtype == p.dtype
        torch.testing.assert_close(p.grad.float(), q.grad, rtol=bound, atol=bound)
    optimizer.step()
    for b, before, followed in zip(model.buffers(), buffers, reference.buffers(), strict=True):
        if not b.is_floating_point():
            continue
        if (kept and name != "FrozenBatchNorm2d") or level in PER_OP:
            assert b.dtype == FLOAT
        if mode == "train" and not isinstance(model[1], FrozenBatchNorm2d):
            assert not torch.equal(b, before)
            torch.testing.assert_close(b.float(), followed, rtol=bound, atol=bound)
        else:
            assert torch.equal(b, before.to(b.dtype))


# --- inputs and outputs -----------------------------------------------------------------------------------------------


class Echo(nn.Module):
    """Gives back what it is given, and remembers it."""

    def forward(self, value, *, word=None):
        self.seen = value, word
        return value if word is None else (value, word)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("level", LEVELS)
def test_containers_go_through_a_model(session, level, name):
    value, ints = SAMPLES[name], torch.arange(2)
    model = session.initialize(Echo(), opt_level=level, verbosity=0)
    out, (word, n, nothing) = model(value, word=(ints, 3, None))
    assert word is ints
    assert (n, nothing) == (3, None)
    seen, _ = model.seen
    assert type(out) is type(seen) is type(value)
    assert {t.dtype for t in leaves(seen) if t.is_floating_point()} == {LOW.get(level, FLOAT)}
    assert {t.dtype for t in leaves(out) if t.is_floating_point()} == {FLOAT}
    assert {t.dtype for t in leaves(value) if t.is_floating_point()} == {FLOAT}  # the original
    if level not in LOW and name != "Movable":
        assert out is seen is value  # nothing to cast: the very same object


@pytest.mark.parametrize("outputs_as", [HALF, BF16, FLOAT, DOUBLE], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_cast_model_outputs(session, level, outputs_as):
    """``Echo`` gives back what it computes in; words and integers stay."""
    model = session.initialize(Echo(), opt_level=level, cast_model_outputs=outputs_as, verbosity=0)
    out, count = model({"out": [torch.ones(3)], "name": "a", "none": None}, word=torch.tensor(3))
    assert model.seen[0]["out"][0].dtype == LOW.get(level, FLOAT)
    assert (out["out"][0].dtype, out["name"], out["none"], count.dtype) == (outputs_as, "a", None, torch.int64)


# --- activation checkpointing -----------------------------------------------------------------------------------------


def selective():
    ops = torch.ops.aten

    def policy(context, op, *args, **kwargs):
        products = op in (ops.addmm.default, ops.mm.default, ops._to_copy.default)
        return CheckpointPolicy.MUST_SAVE if products else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


HOW = {
    "plain": lambda part, x: part(x),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "non-reentrant": functools.partial(checkpoint, use_reentrant=False),
    "selective": functools.partial(checkpoint, use_reentrant=False, context_fn=selective),
}


class Blocks(nn.Module):
    """Two checkpointed parts, of two blocks or twice of one."""

    def __init__(self, how, shared):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.25), nn.Linear(8, 8))
        self.second = self.first if shared else copy.deepcopy(self.first)
        self.head = nn.Linear(8, 8)
        self.call = HOW[how]

    def forward(self, x):
        x = self.call(self.second, self.call(self.first, x))
        return self.head(F.scaled_dot_product_attention(x, x, x))


def gradients(level, how, shared, cache=True):
    session = amp.AmpSession()
    model, optimizer = initialized(session, Blocks(how, shared), level)
    torch.manual_seed(1)
    x = torch.randn(2, 6, 8, requires_grad=True)
    if cache:
        out = model(x)
    else:
        with torch.autocast("cpu", dtype=PER_OP[level], cache_enabled=False):
            out = model(x)
    backward(session, out.float().square().mean(), optimizer)
    result = [out, x.grad, *(p.grad for p in amp.master_params(optimizer))]
    session.reset()
    return result


@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("how", [h for h in HOW if h != "plain"])
@every_level
def test_checkpointed_blocks_have_the_gradients_of_plain_ones(level, how, shared):
    """Selective checkpointing counts ops, casts too: of shared weights there are as many in the second forward without
    a cache."""
    cache = not shared or level not in PER_OP
    for a, b in zip(gradients(level, how, shared, cache), gradients(level, "plain", shared, cache), strict=True):
        assert torch.equal(a, b)


# --- nested blocks ----------------------------------------------------------------------------------------------------


@per_op
def test_blocks_inside_the_forward(session, level):
    low, other = PER_OP[level], BF16 if level == "O1" else HALF

    class Nested(nn.Linear):
        def forward(self, x):
            def dtype():
                # Not of the weight: one that torch's cache holds in one 16-bit type is not cast to another.
                return torch.mm(x, x.t()).dtype

            self.dtypes = [dtype()]
            with torch.autocast("cpu", enabled=False):
                self.dtypes.append(dtype())
                with torch.autocast("cpu", dtype=other):
                    self.dtypes.append(dtype())
                self.dtypes.append(dtype())
            with session.disable_casts():
                self.dtypes.append(dtype())
                with torch.autocast("cpu", dtype=other):
                    self.dtypes.append(dtype())
            with torch.autocast("cpu", dtype=other):
                self.dtypes.append(dtype())
                with session.disable_casts():
                    self.dtypes.append(dtype())
                self.dtypes.append(dtype())
            self.dtypes.append(dtype())
            return super().forward(x)

    model, optimizer = initialized(session, Nested(4, 4), level)
    out = model(torch.ones(2, 4))
    assert model.dtypes == [low, FLOAT, other, FLOAT, FLOAT, other, other, FLOAT, other, low]
    backward(session, out.float().sum(), optimizer)
    assert torch.equal(model.weight.grad, torch.full((4, 4), 2.0))


@pytest.mark.parametrize("level", LEVELS)
def test_forward_and_loss_are_cast_and_backward_and_step_are_not(session, level):
    seen = {}

    def note(where):
        seen.setdefault(where, set()).add(torch.mm(torch.eye(2), torch.eye(2)).dtype)

    class Linear(nn.Linear):
        def forward(self, x):
            note("forward")
            (out := super().forward(x)).register_hook(lambda grad: note("backward"))
            return out

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            note("step")
            return super().step(closure)

    model = Linear(4, 4)
    optimizer = Optimizer(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    for _ in range(2):
        out = model(torch.ones(2, 4))
        note("loss")
        loss = F.mse_loss(out, torch.zeros(2, 4, dtype=out.dtype))
        assert loss.dtype == FLOAT
        with session.scale_loss(loss, optimizer) as scaled:
            note("block")
            scaled.backward()
        note("between")
        optimizer.step()
        optimizer.zero_grad()
    cast, uncast = {PER_OP.get(level, FLOAT)}, {FLOAT}
    assert seen == {
        **dict.fromkeys(("forward", "loss", "between"), cast),
        **dict.fromkeys(("block", "backward", "step"), uncast),
    }


# --- recurrent layers -------------------------------------------------------------------------------------------------


RECURRENT = {
    **{f"{kind.__name__}-{n}": (kind, n) for kind in (nn.RNN, nn.GRU, nn.LSTM) for n in (1, 2)},
    **{kind.__name__: (kind, None) for kind in (nn.RNNCell, nn.GRUCell, nn.LSTMCell)},
}


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("level", LOW_OF)
def test_recurrent_layers(session, level, name):
    """Op by op, results are 16-bit; those of a cast model are fp32."""
    (kind, layers), dtype = RECURRENT[name], PER_OP.get(level, FLOAT)
    torch.manual_seed(0)
    model = kind(5, 6) if layers is None else kind(5, 6, num_layers=layers, bidirectional=layers == 2)
    reference, x = copy.deepcopy(model), torch.randn(3, 5) if layers is None else torch.randn(4, 3, 5)

    def first(out):
        return out if isinstance(out, torch.Tensor) else out[0]

    expected = first(reference(x))
    expected.square().mean().backward()
    model, optimizer = initialized(session, model, level)
    for _ in range(2):  # the second with a state, as truncated backpropagation has one
        result = model(x)
        out = first(result)
        assert out.dtype == dtype
        bound = 1e-2 if LOW_OF[level] == HALF else 5e-2
        torch.testing.assert_close(out.float(), expected, rtol=bound, atol=bound)
        backward(session, out.float().square().mean(), optimizer)
        for p, q in zip(amp.master_params(optimizer), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.float(), q.grad, rtol=bound, atol=bound)
        optimizer.zero_grad()
    state = result if layers is None else result[1]
    assert first(model(x, state)).dtype == dtype
    optimizer.step()
    session.reset()
    assert first(model(x)).dtype == FLOAT


# --- every op of torch's lists ----------------------------------------------------------------------------------------

# In torch's list for CUDA, and no business of the CPU: inner ops of convolutions and cells, and cuDNN's.
OF_CUDA_ALONE = {
    "_convolution",
    "_convolution.deprecated",
    "_scaled_dot_product_flash_attention",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
}
# CUDA has one op for all of them, which casts its weights as a whole.
OF_RECURRENT_LAYERS = {
    f"{kind}.{form}" for kind in ("gru", "lstm", "rnn_relu", "rnn_tanh") for form in ("data", "input")
}


def test_the_table_is_torchs_list_for_cuda():
    # Private, and no public call tells which ops torch's autocast casts.
    names = torch._C._dispatch_get_all_op_names()
    of_cuda = {n for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(n, "AutocastCUDA")}
    of_torch = {n.removeprefix("aten::") for n in of_cuda if n.startswith("aten::")}
    # Overloads by names of dimensions, which torch 2.11 has.
    of_torch = {n for n in of_torch if "imname" not in n and n != "norm.names_ScalarOpt_dim"}
    # Of torch with CUDA alone; and since 2.15, where torch's CPU autocast casts it as well.
    of_torch -= {"_cudnn_rnn", "linalg_matrix_sqrth"}
    table = set(TABLE)
    assert of_torch - table == {*OF_CUDA_ALONE, "binary_cross_entropy"}  # refused: test_autocast.py
    assert table - of_torch - {"rms_norm"} == OF_RECURRENT_LAYERS  # torch 2.11 does not list rms_norm
