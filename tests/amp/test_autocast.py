import contextlib
import copy
import functools
import logging

import pytest
import torch
import torch.nn.functional as F
from kit import half_dtypes, in_thread
from torch import nn

from ampctx import AmpNotImplementedError
from ampctx.casts.autocast import Autocast
from ampctx.casts.cpu import missing_on_cpu

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
BCE = F.binary_cross_entropy


def torch_state():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        F.binary_cross_entropy,
        torch.no_grad.__enter__,
        torch.inference_mode.__exit__,
        [op for op, _ in missing_on_cpu()],
    )


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was():
    before = torch_state()
    yield
    assert torch_state() == before


@pytest.fixture
def enabled():
    """Enables casts for models; undone after the test, the latest first."""
    undos = []

    def enable(*models, dtype=HALF):
        autocast = Autocast(models, dtype)
        undos.append(autocast.enable())
        return autocast

    yield enable
    for undo in reversed(undos):
        undo()


class Layer(nn.Module):
    """Uses one weight twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(self.fc(x))


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def matmul_dtype():
    return torch.mm(torch.eye(2), torch.eye(2)).dtype


# --- on and off -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["first-out-last", "first-out-first"])
def test_two_at_once_come_and_go_in_any_order(order):
    low, brain = Layer(), Layer()
    undos = [Autocast([low], HALF).enable(), Autocast([brain], BF16).enable()]
    assert matmul_dtype() == BF16
    # Each model runs in the type it was initialized with.
    assert (low(X).dtype, brain(X).dtype, matmul_dtype()) == (HALF, BF16, BF16)
    if order == "first-out-first":
        undos.reverse()
    undos.pop()()
    assert matmul_dtype() == (BF16 if order == "first-out-first" else HALF)
    undos.pop()()
    assert matmul_dtype() == FLOAT


def test_device_types_come_from_the_models():
    assert Autocast([], HALF).device_types == ["cpu"]
    assert Autocast([nn.ReLU()], HALF).device_types == ["cpu"]
    assert Autocast([Layer()], HALF).device_types == ["cpu"]
    with torch.device("meta"):
        assert Autocast([nn.Linear(2, 2)], HALF).device_types == ["cpu"]
    assert Autocast([], HALF, device_types=["cuda", "cpu"]).device_types == ["cpu", "cuda"]
    assert Autocast([nn.Linear(1, 1)], HALF, device_types=["cuda"]).device_types == ["cpu", "cuda"]


def test_undo_in_another_thread_says_what_it_cannot_do(caplog):
    undo = in_thread(Autocast([], HALF).enable)
    with caplog.at_level(logging.WARNING, "ampctx"):
        undo()
    assert "undone in another thread" in caplog.text
    assert "amp.reset() in the thread that called amp.initialize" in caplog.text


# --- suspended and resumed --------------------------------------------------------------------------------------------


def test_suspended_is_a_decorator_and_ends_with_its_object(enabled):
    autocast = enabled(Layer())

    @autocast.suspended()
    def nested(times):
        return [matmul_dtype()] + (nested(times - 1) if times else [])

    assert nested(2) == [FLOAT] * 3
    assert matmul_dtype() == HALF
    interrupted = autocast.suspended()
    interrupted.__enter__()
    assert matmul_dtype() == FLOAT
    del interrupted  # as where an interrupt comes before __exit__
    assert matmul_dtype() == HALF


# --- the cache of cast weights ----------------------------------------------------------------------------------------


def edit(model):
    with torch.no_grad():
        model.fc.weight.add_(1.0)


class CountsCasts(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts casts of a weight of 4 x 4 to fp16."""

    def __init__(self):
        super().__init__()
        self.casts = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].shape == (4, 4):
            self.casts += 1
        return func(*args, **(kwargs or {}))


def test_a_weight_is_cast_once_per_forward(enabled):
    """Not outside of it, nor where the user has switched torch's cache off."""
    model = Layer()
    enabled(model)
    for cached in (None, None, True, False):
        block = contextlib.nullcontext() if cached is None else torch.autocast("cpu", dtype=HALF, cache_enabled=cached)
        with block, CountsCasts() as counter:
            model(X)
            assert cached is None or torch.is_autocast_cache_enabled() is cached
        assert counter.casts == (2 if cached is False else 1)
    with CountsCasts() as counter:
        F.linear(F.linear(X, model.fc.weight), model.fc.weight)
    assert counter.casts == 2


@pytest.mark.parametrize("in_a_block", [False, True], ids=["", "in-a-block-of-the-user"])
def test_a_weight_used_outside_the_forward_is_never_stale(enabled, in_a_block):
    model = Layer()
    autocast = enabled(model)
    with torch.autocast("cpu", dtype=HALF, cache_enabled=True) if in_a_block else contextlib.nullcontext():
        for _ in range(3):
            expected = F.linear(X.half(), model.fc.weight.half())
            assert torch.equal(F.linear(X, model.fc.weight), expected)
            with autocast.suspended():
                edit(model)
    assert not torch.is_autocast_cache_enabled()


def test_an_interrupted_forward_leaves_no_stale_weight(enabled):
    model = Layer()
    autocast = enabled(model)

    def interrupt(module, args):
        model.fc(args[0])
        raise KeyboardInterrupt

    handle = model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    handle.remove()
    edit(model)
    result = model(X)
    with autocast.suspended():
        half = copy.deepcopy(model).half()
        assert torch.equal(result, half(X.half()))


def test_a_no_grad_pass_inside_a_forward_does_not_cut_the_gradient(enabled):
    class Twice(Layer):
        def forward(self, x):
            exec("with torch.no_grad(): fc(x)", {"torch": torch, "fc": self.fc, "x": x})  # has no __name__
            return self.fc(x)

    model = Twice()
    enabled(model)
    model(X).float().sum().backward()
    assert model.fc.weight.grad is not None
    assert model.fc.weight.grad.abs().sum() > 0


WRITES = [lambda p, value: p.data.copy_(value), lambda p, value: setattr(p, "data", value.clone())]
REGIONS = [torch.no_grad, torch.inference_mode, functools.partial(torch.set_grad_enabled, False)]


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("write", WRITES)
def test_weights_that_are_swapped_inside_a_forward_are_never_stale(enabled, write, region):
    """The weights of a reference, for one pass without gradients and back, before and after a pass that trains."""

    class Policy(Layer):
        def swapped(self, x):
            with region():
                before = self.fc(x)
                write(self.fc.weight, other)
                result = self.fc(x)
                write(self.fc.weight, own)
            return before, result

        def forward(self, x):
            return *self.swapped(x), self.fc(x), *self.swapped(x)

    model = Policy()
    other, own = torch.randn(4, 4), model.fc.weight.detach().clone()
    enabled(model)
    for grad in (True, False, True):
        with torch.set_grad_enabled(grad):
            results = model(X)
        for result, weight in zip(results, (own, other, own, own, other), strict=True):
            assert torch.equal(result, F.linear(X.half(), weight.half(), model.fc.bias.half()))
    results[2].float().sum().backward()
    assert model.fc.weight.grad.count_nonzero() > 0


def test_the_thread_that_enabled_may_end(enabled):
    model = Layer()

    def enable():
        undo = Autocast([model], BF16).enable()
        return undo, model(X).dtype

    undo, dtype = in_thread(enable)
    assert dtype == BF16
    assert (model(X).dtype, in_thread(lambda: model(X).dtype)) == (BF16, BF16)
    undo()
    assert (model(X).dtype, in_thread(lambda: model(X).dtype)) == (FLOAT, FLOAT)


# --- copies, checkpointing, compile -----------------------------------------------------------------------------------


def test_the_hooks_leave_no_trace_in_compiled_graphs(enabled):
    graphs = []

    def backend(graph_module, example_inputs):
        graphs.append(graph_module.graph)
        return graph_module.forward

    model = nn.Linear(4, 4)
    enabled(model)
    assert torch.compile(model, backend=backend, fullgraph=True)(X).dtype == HALF
    calls = [node.target for node in graphs[0].nodes if node.op.startswith("call")]
    assert [getattr(target, "__name__", "") for target in calls] == ["linear"]


# --- binary_cross_entropy ---------------------------------------------------------------------------------------------


@half_dtypes
def test_bce_with_16_bit_input_is_refused(enabled, dtype):
    autocast = enabled(Layer(), dtype=dtype)
    p, target = torch.full((2,), 0.5), torch.ones(2)
    for args in ((p.to(dtype), target), (p, target.to(dtype)), (p, target, p.to(dtype))):
        with pytest.raises(
            AmpNotImplementedError, match=r"BCEWithLogitsLoss.*register_float_function\(torch, 'sigmoid'"
        ):
            F.binary_cross_entropy(*args)
    with pytest.raises(RuntimeError, match="BCEWithLogitsLoss"):
        nn.BCELoss()(p.to(dtype), target)
    with autocast.suspended():
        assert F.binary_cross_entropy(p.to(dtype), target.to(dtype)).dtype == dtype
    expected = BCE(p, target, reduction="sum")
    assert torch.equal(F.binary_cross_entropy(p, target, reduction="sum"), expected)
    assert torch.equal(nn.BCELoss(reduction="sum")(p, target), expected)


@half_dtypes
def test_binary_cross_entropy_where_it_is_allowed(enabled, dtype):
    undo = Autocast([], dtype, allow_banned=True).enable()
    assert F.binary_cross_entropy.__wrapped__ is BCE
    p = torch.full((2,), 0.5, dtype=dtype, requires_grad=True)
    loss = F.binary_cross_entropy(p, target=torch.ones(2, dtype=dtype))
    loss.backward()
    undo()
    assert (loss.dtype, p.grad.tolist()) == (FLOAT, [-1.0, -1.0])
    # The latest one that is active decides.
    undo = Autocast([], dtype, allow_banned=True).enable()
    enabled(nn.Linear(2, 2), dtype=dtype)
    assert F.binary_cross_entropy.__wrapped__ is BCE  # wrapped once
    with pytest.raises(AmpNotImplementedError, match="binary_cross_entropy got a 16-bit argument"):
        F.binary_cross_entropy(p, p)
    undo()
