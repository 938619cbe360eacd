"""Recurrent layers and cells under per-op casts: 16-bit results close to fp64, gradients in the input's type."""

import copy

import pytest
import torch
from apex import amp
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

STEPS, BATCH, INPUT, HIDDEN = 4, 3, 5, 6
BOUND = {torch.float16: 4e-3, torch.bfloat16: 4e-2}


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["O1", "O4"])
def low(request):
    """Casts are on, without an ``initialize``; the 16-bit type that they cast to."""
    handle = amp.init(patch_type=request.param)
    yield request.param
    handle._deactivate()
    assert not handle.is_active()


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 2


def with_reference(module, low):
    """The module with weights that 16 bits hold, and a copy of it in fp64."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(values(*p.shape, seed=i).to(low))
    return module, copy.deepcopy(module).double()


def flat(state):
    """Hidden and cell state, or the hidden state alone."""
    return list(state) if isinstance(state, tuple) else [state]


def check(outputs, expected, x, x64, module, low):
    for out, reference in zip(outputs, expected, strict=True):
        assert out.dtype == low
        torch.testing.assert_close(out.double(), reference, rtol=BOUND[low], atol=BOUND[low])
    sum(out.float().square().sum() for out in outputs).backward()
    sum(out.square().sum() for out in expected).backward()
    assert x.grad.dtype == x.dtype
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=8 * BOUND[low], atol=8 * BOUND[low])
    for p in module.parameters():
        assert p.grad.dtype == p.dtype == torch.float32
        assert p.grad.ne(0).any()


every_input = pytest.mark.parametrize("kind", ["fp32", "16-bit"])


def inputs(kind, low, *shape):
    x = values(*shape, seed=99).to(low)
    x64 = x.double().requires_grad_()
    return (x.float() if kind == "fp32" else x).requires_grad_(), x64


CELLS = {
    "RNN": lambda: nn.RNNCell(INPUT, HIDDEN),
    "RNN-relu": lambda: nn.RNNCell(INPUT, HIDDEN, nonlinearity="relu"),
    "GRU": lambda: nn.GRUCell(INPUT, HIDDEN),
    "LSTM": lambda: nn.LSTMCell(INPUT, HIDDEN),
    "LSTM-no-bias": lambda: nn.LSTMCell(INPUT, HIDDEN, bias=False),
}


@every_input
@pytest.mark.parametrize("name", CELLS)
def test_cells(low, kind, name):
    module, reference = with_reference(CELLS[name](), low)
    x, x64 = inputs(kind, low, STEPS, BATCH, INPUT)

    def run(cell, x):
        state, outputs = None, []
        for step in x:
            state = cell(step, state)
            outputs += flat(state)
        return outputs

    check(run(module, x), run(reference, x64), x, x64, module, low)


LAYERS = {
    "RNN": (nn.RNN, {}),
    "RNN-relu": (nn.RNN, {"nonlinearity": "relu"}),
    "GRU": (nn.GRU, {}),
    "LSTM": (nn.LSTM, {}),
}
SHAPES = {
    "1-layer": {"num_layers": 1},
    "2-layers": {"num_layers": 2},
    "bidirectional": {"num_layers": 1, "bidirectional": True},
    "2-layers-bidirectional-no-bias": {"num_layers": 2, "bidirectional": True, "bias": False},
}


@every_input
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("given", ["hidden-given", "hidden-zero"])
def test_layers(low, kind, shape, name, given):
    layer, options = LAYERS[name]
    module, reference = with_reference(layer(INPUT, HIDDEN, **options, **SHAPES[shape]), low)
    x, x64 = inputs(kind, low, STEPS, BATCH, INPUT)

    def hidden(dtype):
        if given == "hidden-zero":
            return None
        n = SHAPES[shape]["num_layers"] * (2 if "bidirectional" in shape else 1)
        h = values(n, BATCH, HIDDEN, seed=7).to(low).to(dtype)
        return (h, h) if layer is nn.LSTM else h

    out, state = module(x, hidden(x.dtype))
    expected, expected_state = reference(x64, hidden(torch.float64))
    check([out, *flat(state)], [expected, *flat(expected_state)], x, x64, module, low)


@every_input
@pytest.mark.parametrize("enforce_sorted", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("name", LAYERS)
def test_packed_sequences(low, kind, name, enforce_sorted):
    layer, options = LAYERS[name]
    module, reference = with_reference(layer(INPUT, HIDDEN, num_layers=2, **options), low)
    x, x64 = inputs(kind, low, STEPS, BATCH, INPUT)
    lengths = [4, 3, 1] if enforce_sorted else [1, 4, 3]

    def run(module, x):
        packed, state = module(pack_padded_sequence(x, lengths, enforce_sorted=enforce_sorted))
        out, back = pad_packed_sequence(packed)
        assert back.tolist() == lengths
        return [out, *flat(state)]

    check(run(module, x), run(reference, x64), x, x64, module, low)
