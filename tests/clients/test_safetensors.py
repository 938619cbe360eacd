"""safetensors: files of a model's state dict hold the masters, and bring them back."""

import pytest
import torch
from apex import amp
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

WAYS = {
    "states": (
        lambda model, path: save_file(model.state_dict(), path),
        lambda model, path: model.load_state_dict(load_file(path)),
    ),
    "models": (save_model, load_model),
}


@pytest.mark.parametrize(("save", "load"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_go_through_a_file(level, save, load, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def train():
        for _ in range(3):
            with amp.scale_loss(model(torch.randn(16, 4)).float().square().mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()

    train()
    masters = [p.detach().clone() for p in amp.master_params(optimizer)]
    save(model, tmp_path / "model.safetensors")
    train()
    load(model, tmp_path / "model.safetensors")
    assert all(torch.equal(p, m) for p, m in zip(amp.master_params(optimizer), masters, strict=True))
    assert any(not torch.equal(p, m) for p, m in zip(model.parameters(), masters, strict=True))
