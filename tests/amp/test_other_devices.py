"""Devices without compiled kernels (MPS, XPU): whole iterations in plain torch, on the device that has no storage.

Not all of them have fp64: the first fp64 tensor on the device fails a test. Numbers are those of the same code on the
CPU, which test_update_scale and test_optimizer_steps compare with the kernels.
"""

import pytest
import torch
from kit import OPTIMIZERS, backward
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ampctx import clip_grad_norm_, optimizers
from ampctx.amp import AmpSession, GradScaler
from ampctx.kernels import definitions
from ampctx.kernels import reference as _reference
from ampctx.kernels.reference_steps import NO_NUMBERS, NO_ROWS

DEVICE = torch.device("meta")

KINDS = {
    "FusedAdam": {"weight_decay": 0.1},
    "FusedAdam-amsgrad": {"lr": torch.tensor(0.1), "amsgrad": True},
    "FusedSGD": {"nesterov": True},
    "FusedAdagrad": {},
    "FusedLAMB": {},
    "FusedNovoGrad": {},
    "LARC": {"weight_decay": 0.1},
}


def made(kind, params):
    return OPTIMIZERS[kind.partition("-")[0]](params, **{"lr": 0.1, **KINDS[kind]})


class PlainTorch(TorchDispatchMode):
    """Runs what serves where no kernel is compiled, in the place of shapes alone, and refuses fp64."""

    def __init__(self):
        super().__init__()
        self.ops = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "ampctx":
            name = func._schema.name.split("::")[1]
            self.ops.add(name)
            with self:
                return definitions.FALLBACKS[name](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.device == DEVICE:
                assert made.dtype != torch.float64, f"{func} made an fp64 tensor"
        return result


@pytest.fixture
def plain_torch():
    with PlainTorch() as mode:
        yield mode


def test_the_mode_sees_fp64(plain_torch):
    torch.ones(2, device=DEVICE).float()
    torch.ones(2).double()
    with pytest.raises(AssertionError, match="made an fp64 tensor"):
        torch.ones(2, device=DEVICE).double()


def loss_of(model):
    return model(torch.empty(4, 3, device=DEVICE)).float().square().mean()


@pytest.mark.parametrize(
    ("kind", "unscale"), [("FusedAdam", False), *((kind, True) for kind in KINDS if kind != "FusedAdam-amsgrad")]
)
def test_grad_scaler(plain_torch, kind, unscale):
    model = nn.Linear(3, 2, device=DEVICE)
    optimizer = made(kind, model.parameters())
    scaler = GradScaler("mps", hysteresis=2)
    for _ in range(2):
        scaler.scale(loss_of(model)).backward()
        if unscale:
            scaler.unscale_(optimizer)
            assert clip_grad_norm_(model.parameters(), 1.0).device == DEVICE
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert {"update_scale", "multi_tensor_" + ("scale" if unscale else "unscale_l2norm")} <= plain_torch.ops
    assert scaler._scale.device == DEVICE


@pytest.mark.parametrize(
    ("level", "kind"),
    [(level, "FusedAdam") for level in ("O0", "O1", "O2", "O3", "O4", "O5")]
    + [("O2", kind) for kind in KINDS if kind not in ("FusedAdam", "LARC")],
)
def test_amp(plain_torch, level, kind):
    model = nn.Linear(3, 2, device=DEVICE)
    optimizer = made(kind, model.parameters())
    session = AmpSession()
    # A dynamic scale is moved by the ops of test_grad_scaler, and word of skips is read on the host.
    session.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    for _ in range(2):
        for delayed in (True, False):
            backward(session, loss_of(model), optimizer, delay_unscale=delayed)
        clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    session.reset()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert plain_torch.ops


@pytest.mark.parametrize(
    "options", [{"master_weights": "split"}, {"write_back": "kahan"}, {"write_back": "stochastic"}]
)
def test_16_bit_parameters(plain_torch, options):
    model = nn.Linear(3, 2, device=DEVICE, dtype=torch.bfloat16)
    optimizer = optimizers.FusedAdam(model.parameters(), lr=0.1, **options)
    for _ in range(2):
        model(torch.empty(4, 3, device=DEVICE, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert plain_torch.ops == {"multi_tensor_adam"}


# --- numbers without fp64 ---------------------------------------------------------------------------------------------


@pytest.fixture
def without_fp64(monkeypatch):
    monkeypatch.setattr(_reference, "widest", lambda device: torch.float32)


def stepped(beta2):
    """A few steps of the reference optimizers, from the first, with a beta near 1."""
    generator = torch.Generator().manual_seed(0)
    p, m, v, step = torch.randn(50, generator=generator), torch.zeros(50), torch.zeros(50), torch.zeros(())
    for _ in range(4):
        g = torch.randn(50, generator=generator)
        definitions.FALLBACKS["multi_tensor_adam"](
            [g], [p], [m], [v], [], [], [step], [], [], [], torch.zeros(()), torch.ones(()), torch.tensor(0.1),
            torch.zeros(()), NO_NUMBERS, *NO_ROWS, 0.9, beta2, 1e-8, 0.1, True, True, False, 0, 0, -1.0, False,
        )  # fmt: skip
    return p


# 1 - 0.9999 ** step in fp32 would be off by one part in a thousand.
@pytest.mark.parametrize("beta2", [0.0, 0.99, 0.9999])
def test_bias_corrections(beta2, request):
    expected = stepped(beta2)
    request.getfixturevalue("without_fp64")
    torch.testing.assert_close(stepped(beta2), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.usefixtures("without_fp64")
def test_the_scale_moves():
    scale, growth, hysteresis = torch.tensor(2.0**16), torch.zeros((), dtype=torch.int32), torch.ones(()).int()
    for flag, expected in ((1.0, 2.0**15), (0.0, 2.0**15), (0.0, 2.0**16), (0.0, 2.0**16), (0.0, 2.0**17)):
        _reference.update_scale(scale, growth, hysteresis, torch.tensor(flag), 2.0, 0.5, 2, 1, 0.0, 2.0**20)
        assert scale.item() == expected
