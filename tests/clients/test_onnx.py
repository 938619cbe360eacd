"""ONNX export of models under amp, run by onnxruntime on the CPU."""

import io

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampctx import amp, optimizers

X = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(1))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(64, 3)

    def forward(self, x):
        return F.softmax(self.head(F.relu(self.norm(self.conv(x))).flatten(1)), -1)


def trained(level):
    model = Classifier()
    optimizer = optimizers.FusedSGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    for _ in range(2):
        with amp.scale_loss(model(X).float().square().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), optimizer  # which holds the masters


def run(program, x):
    file = io.BytesIO()
    program.save(file)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return result


def exported(model):
    # Its optimizer folds an fp32 batch norm into the 16-bit convolution before, and leaves a bias of another type.
    return torch.onnx.export(
        model, (X,), dynamo=True, optimize=False, verbose=False, dynamic_shapes=({0: torch.export.Dim("batch", min=2)},)
    )


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_onnxruntime_computes_what_the_model_does(level):
    model, _optimizer = trained(level)
    program = exported(model)
    with torch.no_grad():
        for x in (X, X[:2]):
            expected, got = model(x), run(program, x)
            assert got.dtype == {torch.float16: np.float16, torch.float32: np.float32}[expected.dtype]
            tolerance = 1e-6 if level == "O0" else 1e-3  # onnxruntime computes some 16-bit ops in fp32 on the CPU
            np.testing.assert_allclose(got.astype(np.float32), expected.float().numpy(), atol=tolerance)
    types = {i.data_type for i in program.model_proto.graph.initializer if len(i.dims) > 1}
    assert types == ({1} if level in ("O0", "O1") else {10})  # FLOAT, FLOAT16


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_masters_in_fp32(level):
    model, _optimizer = trained(level)
    program = exported(amp.master_model(model))
    amp.reset()
    with torch.no_grad():
        np.testing.assert_allclose(run(program, X), model(X).numpy(), atol=1e-6)
