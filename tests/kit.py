"""What tests of several rooms share: levels, optimizers by name, small models and data, a training loop, comparisons.

    model, optimizer = start(session, "O2", "FusedAdam", loss_scale="dynamic")
    losses = train(session, model, optimizer, steps=3, overflow_at=(1,))
    assert_same(snapshot(optimizer, model), before)

``session`` is an ``AmpSession`` or a module with its functions: ``ampctx.amp``, ``apex.amp``. tests/conftest.py has the
fixture of that name. ``train``, ``Net``, ``LEVELS`` and ``OPTIMIZERS`` are defined here alone.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle
import threading
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampctx import GradScaler, clip_grad_norm_, optimizers
from ampctx._plan import PLANS

INF, NAN = float("inf"), float("nan")
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
HALF = (torch.float16, torch.bfloat16)
# Types of the model's weights where they are 16 bits wide.
LOW = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}

every_level = pytest.mark.parametrize("level", LEVELS)


def levels_by_default(*levels: str, of: Iterable[str] = LEVELS) -> pytest.MarkDecorator:
    """All levels ``of``; these alone without --full."""
    marked = [pytest.param(level, marks=() if level in levels else pytest.mark.full) for level in of]
    return pytest.mark.parametrize("level", marked)


# For what only holds while steps keep calls and 16-bit gradients: launches, bytes, gradients that wait, norms for free.
with_plans = pytest.mark.skipif(not PLANS, reason="AMPCTX_PLAN=0: no 16-bit gradient waits")
# Its dynamo traces no switch of autocast, says so, and goes on; and no attribute that is set on an optimizer.
TORCH_2_11 = torch.__version__.startswith("2.11.")
traces_switches = pytest.mark.skipif(TORCH_2_11, reason="torch 2.11's dynamo ends a graph there")
goes_on_where_dynamo_ends = pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin `torch")
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value))}
each_copy = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
half_dtypes = pytest.mark.parametrize("dtype", HALF, ids=["fp16", "bf16"])


# --- optimizers -------------------------------------------------------------------------------------------------------


def muon(params: Any, **options: Any) -> optimizers.FusedMuon:
    """FusedMuon with parameters of any shape in their order: each run of matrices, or of others, is a group."""
    params, found = list(params), []
    groups = params if params and isinstance(params[0], dict) else [{"params": params}]
    for group in groups:
        runs = groupby(group["params"], lambda p: (p[1] if isinstance(p, tuple) else p).dim() in (2, 3))
        found += [{**group, "params": list(run), "use_muon": are_matrices} for are_matrices, run in runs]
    return optimizers.FusedMuon(found or groups, **{"lr": 0.01, "weight_decay": 0.1, **options})


def larc(params: Any, inner: Callable = torch.optim.SGD, **options: Any) -> optimizers.LARC:
    return optimizers.LARC(inner(params, **{"lr": 0.01, "momentum": 0.9, **options}))


# ``OPTIMIZERS[name](params, **options)``: the options replace these defaults. Names with a dash are torch's.
# ON_DEVICE, the optimizer skips a step by a flag that the host does not read. eps: torch's own is 0 in fp16.
ON_DEVICE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "FusedAdam": partial(optimizers.FusedAdam, lr=0.01),
    "FusedSGD": partial(optimizers.FusedSGD, lr=0.01, momentum=0.9),
    "FusedAdagrad": partial(optimizers.FusedAdagrad, lr=0.01),
    "FusedLAMB": partial(optimizers.FusedLAMB, lr=0.01),
    "FusedNovoGrad": partial(optimizers.FusedNovoGrad, lr=0.01),
    "FusedLion": partial(optimizers.FusedLion, lr=0.01),
    "FusedMuon": muon,
    "LARC": partial(larc, inner=optimizers.FusedSGD),
    "Adam-fused": partial(torch.optim.Adam, lr=0.01, eps=1e-3, fused=True),
    "AdamW-fused": partial(torch.optim.AdamW, lr=0.01, eps=1e-3, fused=True),
    "SGD-fused": partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
    "Adagrad-fused": partial(torch.optim.Adagrad, lr=0.01, eps=1e-3, fused=True),
}
ON_HOST: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam-plain": partial(torch.optim.Adam, lr=0.01, eps=1e-3, foreach=False),
    "Adam-foreach": partial(torch.optim.Adam, lr=0.01, eps=1e-3, foreach=True),
    "AdamW-foreach": partial(torch.optim.AdamW, lr=0.01, eps=1e-3, foreach=True),
    "SGD-plain": partial(torch.optim.SGD, lr=0.01, momentum=0.9, foreach=False),
    "SGD-foreach": partial(torch.optim.SGD, lr=0.01, momentum=0.9, foreach=True),
    "Adagrad-plain": partial(torch.optim.Adagrad, lr=0.01, eps=1e-3, foreach=False),
    "Adagrad-foreach": partial(torch.optim.Adagrad, lr=0.01, eps=1e-3, foreach=True),
}
OPTIMIZERS = {**ON_DEVICE, **ON_HOST}


class SAM(torch.optim.SGD):
    """The two steps of SAM over SGD: up by ``rho`` times the gradient, then back and down."""

    def __init__(self, params: Any, lr: float = 0.25, rho: float = 0.5):
        super().__init__(params, lr=lr)
        self.rho = rho

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        for p in params_of(self):
            self.state[p]["before"] = p.clone()
            if p.grad is not None:
                p.add_(p.grad, alpha=self.rho)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for p in params_of(self):
            if "before" in self.state[p]:
                p.copy_(self.state[p].pop("before"))
        self.step()
        if zero_grad:
            self.zero_grad()


def params_of(optimizer: Any) -> list:
    return [p for group in optimizer.param_groups for p in group["params"]]


# --- models and data --------------------------------------------------------------------------------------------------


def mlp(seed: int = 0, width: int = 8, inputs: int = 4, outputs: int = 2) -> nn.Sequential:
    """Linear, BatchNorm, ReLU, Linear: 16-bit and fp32 parameters at O2 and O5."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, outputs))


def uneven(hidden: int = 7) -> nn.Sequential:
    """Linear, ReLU, Linear: sizes that two ranks do not divide evenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, 3))


class Net(nn.Module):
    """Convolution, BatchNorm, LayerNorm, Linear, softmax: ops of each column of the cast table. Takes 4 x 4 images."""

    def __init__(self, outputs: int = 2):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)
        self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        x = torch.softmax(nn.functional.layer_norm(self.hidden(x), (8,)), -1)
        return self.head(x)


def batch(seed: int = 0, n: int = 16, width: int = 4) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int = 0, n: int = 16) -> Tensor:
    """The mean square of the outputs for ``batch(seed, n)``, as wide as the model's first weight."""
    return model(batch(seed, n, next(model.parameters()).shape[-1])).float().square().mean()


class Probe(nn.Module):
    """A weight and a BatchNorm whose gradients the test sets: those of ``loss(factor)`` are the factor everywhere."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))
        self.norm = nn.BatchNorm1d(2)

    def loss(self, factor: float) -> Tensor:
        return sum((p.float() * factor).sum() for p in self.parameters())


class Factors(nn.Module):
    """Weights that 16 bits do not hold, and a BatchNorm, fp32 at O2 and O5: their gradients are the loss's factors."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        super().__init__()
        for i, (name, shape) in enumerate(shapes.items()):
            value = torch.linspace(-1.1, 1.3, math.prod(shape)) + i / 3
            self.register_parameter(name, nn.Parameter(value.reshape(shape)))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        return sum(((self.get_parameter(n).float() * f.float()).sum() for n, f in factors.items()), torch.zeros(()))


START = 4096.0  # a gradient of 8 still fits into fp16 at this scale


def probe(session: Any, level: str = "O2", n_losses: int = 1, make: Any = None, **options: Any) -> tuple[Probe, Any]:
    """A ``Probe`` and plain SGD, whose step of a gradient of 1 is an eighth, under amp with a scale of ``START``."""
    options = {"max_loss_scale": START, "num_losses": n_losses, **options}
    return start(session, level, make or partial(torch.optim.SGD, lr=0.125), Probe(), **options)


def probes(session: Any, level: str = "O2", n: int = 2, make: Any = None, **options: Any) -> tuple[list, list]:
    """As ``probe``, of several models with an optimizer each."""
    models = [Probe() for _ in range(n)]
    optimizers = [(make or partial(torch.optim.SGD, lr=0.125))(model.parameters()) for model in models]
    session.initialize(models, optimizers, opt_level=level, **{"max_loss_scale": START, "verbosity": 0, **options})
    return models, optimizers


# --- training ---------------------------------------------------------------------------------------------------------


def start(
    session: Any, level: str = "O2", make: str | Callable = "FusedSGD", model: nn.Module | None = None, **options: Any
) -> tuple[Any, Any]:
    """A model, by default ``mlp()``, and its optimizer, initialized. ``make``: a name in OPTIMIZERS, or a function."""
    model = mlp() if model is None else model
    optimizer = (OPTIMIZERS[make] if isinstance(make, str) else make)(model.parameters())
    return session.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, **options})


def backward(session: Any, loss: Tensor, optimizer: Any, **options: Any) -> None:
    with session.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()


def train(
    session: Any,
    model: nn.Module,
    optimizer: Any,
    steps: int = 2,
    first: int = 0,
    loss: Callable[[nn.Module, int], Tensor] = loss_of,
    overflow_at: Container[int] = (),
    max_norm: float | None = None,
    in_block: Callable[[], Any] | None = None,
    before_step: Callable[[], Any] | None = None,
    after_step: Callable[[], Any] | None = None,
) -> list[float]:
    """Steps ``first``, ``first + 1``, ...: the losses. ``session`` None: without amp.

    The loss of the steps in ``overflow_at`` is inf. ``max_norm``: clips gradients. The last three are called there.
    """
    losses = []
    for step in range(first, first + steps):
        value = loss(model, step)
        value = value * INF if step in overflow_at else value
        with contextlib.nullcontext(value) if session is None else session.scale_loss(value, optimizer) as scaled:
            scaled.backward()
            if in_block:
                in_block()
        if max_norm is not None:
            if session is None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            else:
                clip_grad_norm_(session.master_params(optimizer), max_norm)
        if before_step:
            before_step()
        optimizer.step()
        if after_step:
            after_step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def parameter(grad: list[float], dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Ones with this gradient."""
    p = nn.Parameter(torch.ones(len(grad), dtype=dtype))
    p.grad = torch.tensor(grad, dtype=dtype)
    return p


def ready(*parameters: Any, scaler: Any = None, make: Callable = torch.optim.SGD, **options: Any) -> tuple[Any, Any]:
    """A GradScaler with a scale of 8 on the CPU, and an optimizer with a learning rate of 1."""
    scaler = scaler or GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    return scaler, make(parameters, lr=1.0, **options)


def scales(scaler: Any, flags: Iterable[int]) -> list[float]:
    """The scale of a GradScaler after each of these iterations, which overflow where the flag is set."""
    found, (_, optimizer) = [], ready(p := parameter([1.0]), scaler=scaler)
    for flag in flags:
        scaler.scale(torch.ones(()))
        p.grad = torch.tensor([INF if flag else 0.0])
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


def grads(session: Any, optimizer: Any) -> list[Tensor | None]:
    return [p.grad for p in session.master_params(optimizer)]


def scale_of(session: Any, loss_id: int = 0) -> float:
    return session.state_dict()[f"loss_scaler{loss_id}"]["loss_scale"]


# --- comparisons ------------------------------------------------------------------------------------------------------


def snapshot(optimizer: Any, model: nn.Module | None = None) -> list[Tensor]:
    """Copies of all that the optimizer steps and keeps for it, and of the model's weights and buffers."""
    tensors = [] if model is None else [*model.parameters(), *model.buffers()]
    for p in params_of(optimizer):
        tensors.append(p)
        tensors += [v for _, v in sorted(optimizer.state.get(p, {}).items()) if isinstance(v, Tensor)]
    return [t.detach().clone() for t in tensors]


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """The same types, keys and values, through dicts, lists and tuples; tensors (and parameters) by dtype and value."""
    assert type(found) is type(expected) or (isinstance(found, Tensor) and isinstance(expected, Tensor)), where
    if isinstance(found, Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    elif isinstance(found, dict):
        assert found.keys() == expected.keys(), where
        for key in found:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(found, (list, tuple)):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    else:
        assert found == expected, where


def same(found: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    """The same dtypes and values, in lists of tensors."""
    found, expected = list(found), list(expected)
    return len(found) == len(expected) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )


@contextlib.contextmanager
def no_host_sync() -> Iterator[None]:
    """An error at what makes the host wait for the GPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # torch calls it a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def in_thread(fn: Callable[[], Any], name: str = "other") -> Any:
    """The result of ``fn()`` in another thread, or its exception."""
    result: list = []

    def run() -> None:
        try:
            result.append(fn())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def through_a_file(content: Any) -> Any:
    """Saved and loaded, as safely as torch can."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
