"""PyTorch Lightning 1.9, the last release that has ``ApexMixedPrecisionPlugin``, on the CPU."""

import pytest
import pytorch_lightning as pl
import torch
import training
from pytorch_lightning.plugins import ApexMixedPrecisionPlugin
from training import FIRST_SCALE, assert_same_weights, batches, by_hand, loss_of, mlp, on_levels, scale, sgd


class Module(pl.LightningModule):
    """``mlp`` as a LightningModule; notes weights and scale after each batch."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.losses, self.steps, self.scales = [], [], []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return loss_of(self(x), y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
        self.steps.append([p.detach().clone() for p in self.parameters()])
        self.scales.append(scale())

    def configure_optimizers(self):
        optimizer = sgd(self)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]


class ManualModule(Module):
    """The same, with the optimization in its own hands."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = loss_of(self(x), y)
        self.manual_backward(loss)
        optimizer.step()
        return loss


def fit(model, data, level, **options):
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        plugins=[ApexMixedPrecisionPlugin(level)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=None))
    return trainer


@on_levels
@pytest.mark.parametrize(
    ("kind", "options", "loop"),
    [
        (Module, {}, {}),
        (Module, {"gradient_clip_val": 0.05}, {"max_norm": 0.05}),
        (Module, {"accumulate_grad_batches": 3}, {"accumulate": 3}),
        (ManualModule, {}, {}),
    ],
    ids=["plain", "clipping", "accumulation", "manual"],
)
def test_fit_does_what_the_loop_does(level, kind, options, loop):
    expected, data, model = mlp(), batches(12), kind()
    losses, after = by_hand(expected, sgd(expected), data, level, **loop)
    fit(model, data, level, **options)
    assert_same_weights(model.net, after)
    # Lightning shows the loss of a micro-batch divided by their number.
    assert model.losses == pytest.approx([loss / loop.get("accumulate", 1) for loss in losses])


@on_levels
def test_an_overflow_skips_the_step_and_halves_the_scale(level):
    model = Module()
    fit(model, batches(4, overflow_at=1), level)
    training.assert_the_second_is_skipped(model.scales, model.steps)


def test_a_checkpoint_has_the_scale(tmp_path):
    trainer = fit(Module(), batches(4, overflow_at=1), "O2")
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert checkpoint["ApexMixedPrecisionPlugin"]["loss_scaler0"]["loss_scale"] == FIRST_SCALE / 2
