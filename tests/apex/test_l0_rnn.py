"""Recurrent layers and cells under per-op casts: 16-bit results close to fp64, gradients in the input's type."""

import copy
from functools import partial

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


def inputs(kind, low):
    x = values(STEPS, BATCH, INPUT, seed=99).to(low)
    x64 = x.double().requires_grad_()
    return (x.float() if kind == "fp32" else x).requires_grad_(), x64


# --- ways to run a module: each gives all outputs ---------------------------------------------------------------------


def flat(state):
    """Hidden and cell state, or the hidden state alone."""
    return list(state) if isinstance(state, tuple) else [state]


def by_steps(cell, x):
    state, outputs = None, []
    for step in x:
        state = cell(step, state)
        outputs += flat(state)
    return outputs


def hidden_zero(module, x, hidden=None):
    out, state = module(x, hidden)
    return [out, *flat(state)]


def hidden_given(module, x):
    n = module.num_layers * (2 if module.bidirectional else 1)
    h = values(n, BATCH, HIDDEN, seed=7).bfloat16().to(x.dtype)  # numbers that fp16 holds, too
    return hidden_zero(module, x, (h, h) if isinstance(module, nn.LSTM) else h)


def packed(module, x, lengths=(1, 4, 3)):
    of_steps, state = module(pack_padded_sequence(x, list(lengths), enforce_sorted=False))
    out, back = pad_packed_sequence(of_steps)
    assert back.tolist() == list(lengths)
    return [out, *flat(state)]


CELLS, LAYERS = (nn.RNNCell, nn.GRUCell, nn.LSTMCell), (nn.RNN, nn.GRU, nn.LSTM)
DEEP = {"num_layers": 2, "bidirectional": True, "bias": False}
CASES = {
    **{cell.__name__: (partial(cell, INPUT, HIDDEN), by_steps) for cell in CELLS},
    **{layer.__name__: (partial(layer, INPUT, HIDDEN), hidden_given) for layer in LAYERS},
    **{f"deep {layer.__name__}": (partial(layer, INPUT, HIDDEN, **DEEP), hidden_zero) for layer in LAYERS},
    **{f"packed {layer.__name__}": (partial(layer, INPUT, HIDDEN, num_layers=2), packed) for layer in LAYERS},
}


@pytest.mark.parametrize("kind", ["fp32", "16-bit"])
@pytest.mark.parametrize(("make", "run"), CASES.values(), ids=CASES)
def test_outputs_and_gradients(low, kind, make, run):
    module, reference = with_reference(make(), low)
    x, x64 = inputs(kind, low)
    outputs, expected = run(module, x), run(reference, x64)
    for out, wanted in zip(outputs, expected, strict=True):
        assert out.dtype == low
        torch.testing.assert_close(out.double(), wanted, rtol=BOUND[low], atol=BOUND[low])
    sum(out.float().square().sum() for out in outputs).backward()
    sum(out.square().sum() for out in expected).backward()
    assert x.grad.dtype == x.dtype
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=8 * BOUND[low], atol=8 * BOUND[low])
    for p in module.parameters():
        assert p.grad.dtype == p.dtype == torch.float32
        assert p.grad.ne(0).any()
