"""The recipes of docs/frameworks.md, run as they stand there on the CPU: they do what the loop does."""

import re
from pathlib import Path

import accelerate
import lightning.pytorch as pl
import pytest
import timm
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.pytorch.plugins import MixedPrecision
from timm.optim import create_optimizer_v2
from torch import nn
from training import FIRST_SCALE, assert_same_weights, batches, by_hand, loss_of, mlp, on_levels, scale, weights
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, TrainingArguments

import ampctx
from ampctx import amp
from ampctx.optimizers import FusedAdam

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"
LR = 0.1
# What changes the loop, and how the loop of training.py says it.
OPTIONS = {"plain": {}, "clipping": {"max_norm": 0.05}, "accumulation": {"accumulate": 3}}


def recipe(name):
    """What the block of a framework defines."""
    found = re.findall(rf"```python {name}\n(.*?)```", PAGE.read_text(), flags=re.S)
    assert len(found) == 1
    names = {"__name__": name}
    exec(compile(found[0], f"{PAGE.name}: {name}", "exec"), names)
    return names


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def expected(level, data, **options):
    model = mlp()
    return by_hand(model, sgd(model), data, level, **options)[1]


def assert_trained(actual, after, exact=True):
    """``exact`` unless norms are taken otherwise, or the sum of micro-batches is unscaled in place of each of them."""
    assert list(actual) == list(after)
    for name, tensor in after.items():
        if exact:
            assert torch.equal(actual[name], tensor), name
        else:
            torch.testing.assert_close(actual[name], tensor, rtol=1e-3, atol=1e-3)


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    """accelerate keeps its state from one Accelerator to the next."""
    yield
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


# --- Lightning --------------------------------------------------------------------------------------------------------


class Module(pl.LightningModule):
    """``mlp``; notes weights at the end, before amp is reset, and the scale after each batch."""

    def __init__(self, manual=False):
        super().__init__()
        self.net = mlp()
        self.automatic_optimization = not manual
        self.scales, self.after = [], None

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = loss_of(self(x), y)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.scales.append(self.trainer.precision_plugin.state_dict())

    def on_train_end(self):
        self.after = weights(self.net)

    def configure_optimizers(self):
        return sgd(self)


def fit(model, data, plugin, path=None, **options):
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[plugin],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )
    # Many workers are recommended otherwise, and a warning is an error here.
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    trainer.fit(model, loader, ckpt_path=path)
    return trainer


IN_LIGHTNING = {
    "plain": {},
    "clipping": {"gradient_clip_val": 0.05},
    "accumulation": {"accumulate_grad_batches": 3},
}


@pytest.mark.filterwarnings("ignore:.*num_workers:UserWarning", "ignore:.*GPU available:UserWarning")
@pytest.mark.filterwarnings("ignore:.*weights_only:UserWarning")
class TestLightning:
    @on_levels
    @pytest.mark.parametrize("options", OPTIONS)
    def test_fit_does_what_the_loop_does(self, level, options):
        data = batches(12)
        model = Module()
        fit(model, data, recipe("lightning")["AmpPrecision"](level, verbosity=0), **IN_LIGHTNING[options])
        after = expected(level, data, **OPTIONS[options])
        assert_trained(model.after, after, exact=options != "accumulation")
        # The masters themselves, in fp32.
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert amp.state_dict() == {}

    @on_levels
    def test_manual_optimization(self, level):
        data = batches(6)
        model = Module(manual=True)
        fit(model, data, recipe("lightning")["AmpPrecision"](level, verbosity=0))
        assert_trained(model.after, expected(level, data))

    @on_levels
    def test_an_overflow_skips_the_step_and_a_run_resumes(self, tmp_path, level):
        plugin = recipe("lightning")["AmpPrecision"]
        data = batches(4, overflow_at=1)
        whole = Module()
        fit(whole, data, plugin(level, verbosity=0), max_epochs=2)
        scales = [s["loss_scaler0"]["loss_scale"] for s in whole.scales]
        assert scales == [FIRST_SCALE / 2**i for i in (0, 1, 1, 1, 1, 2, 2, 2)]
        half = Module()

        class Save(pl.Callback):
            def on_train_epoch_end(self, trainer, module):
                trainer.save_checkpoint(tmp_path / "half.ckpt")

        fit(half, data, plugin(level, verbosity=0), callbacks=[Save()])
        resumed = Module()
        fit(resumed, data, plugin(level, verbosity=0), path=tmp_path / "half.ckpt", max_epochs=2)
        assert_trained(resumed.after, whole.after)

    def test_our_scaler_in_its_own_mixed_precision(self):
        scaler = ampctx.GradScaler("cpu", init_scale=2.0**10)
        model = Module()
        start = weights(model.net)
        data = batches(4, overflow_at=1)
        fit(model, data, MixedPrecision("16-mixed", device="cpu", scaler=scaler), gradient_clip_val=0.05)
        assert [s["scale"] for s in model.scales] == [2.0**10, 2.0**9, 2.0**9, 2.0**9]
        assert all(not torch.equal(model.after[name], start[name]) for name in ("0.weight", "3.weight"))
        assert all(w.isfinite().all() for w in model.after.values())


@on_levels
def test_fabric_does_what_the_loop_does(level):
    data = batches(6, overflow_at=2)
    model = mlp().train()
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    recipe("fabric")["train"](
        fabric, model, sgd(model), data, lambda model, batch: loss_of(model(batch[0]), batch[1]), level, max_norm=0.05
    )
    assert scale() == FIRST_SCALE / 2
    amp.reset()  # the masters, and not what they round to
    assert_trained(weights(model), expected(level, data, max_norm=0.05), exact=False)


# --- accelerate -------------------------------------------------------------------------------------------------------


@on_levels
@pytest.mark.parametrize("options", OPTIONS)
def test_accelerate_does_what_the_loop_does(level, options):
    data = batches(12)
    model = mlp().train()
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    given = {"max_norm": 1e9, **OPTIONS[options]}
    trained = recipe("accelerate")["train"](
        model, sgd(model), loader, lambda model, batch: loss_of(model(batch[0]), batch[1]), level, **given
    )
    assert_trained(weights(trained), expected(level, data, **given), exact=options == "plain")


@pytest.mark.parametrize(("make", "told"), [(sgd, True), (lambda m: FusedAdam(m.parameters(), lr=LR), False)])
def test_accelerate_with_our_scaler(make, told):
    """The CPU has no fp16 autocast in accelerate, but its scaler can be set as well."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = ampctx.GradScaler("cpu", init_scale=2.0**10)
    model = mlp()
    optimizer = make(model)
    model, wrapped = accelerator.prepare(model, optimizer)
    seen = []
    for x, y in batches(3, overflow_at=1):
        accelerator.backward(loss_of(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        before = weights(model)["0.weight"]
        wrapped.step()
        wrapped.zero_grad()
        moved = not torch.equal(weights(model)["0.weight"], before)
        assert moved == accelerator.scaler.outcome(optimizer).stepped
        seen.append((moved, wrapped.step_was_skipped))
    assert [moved for moved, _ in seen] == [True, False, True]
    assert [skipped for _, skipped in seen] == [False, told, False]
    assert accelerator.scaler.get_scale() == 2.0**9


# --- Hugging Face Trainer ---------------------------------------------------------------------------------------------


def bert():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def sentences(count=24):
    words = torch.randint(0, 50, (count, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": (row[0] >= 25).long()} for row in words]


class Notes(TrainerCallback):
    def __init__(self):
        self.scales, self.skipped = [], []

    def on_step_end(self, args, state, control, optimizer, **kwargs):
        self.scales.append(scale())
        self.skipped.append(amp.outcome(optimizer.optimizer).skipped)


def trainer_of(folder, level, optimizer_of, **options):
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=8,
        num_train_epochs=2,
        learning_rate=1e-3,
        max_grad_norm=0.1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    kind = recipe("transformers")["AmpTrainer"]

    class Recording(kind):
        seen = ()

        def training_step(self, model, inputs, *args, **kwargs):
            self.seen = (*self.seen, inputs)
            return super().training_step(model, inputs, *args, **kwargs)

    model, notes = bert(), Notes()
    given = (optimizer_of(model), None) if optimizer_of is not None else (None, None)
    data = sentences()
    return Recording(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data,
        callbacks=[notes],
        optimizers=given,
        opt_level=level,
    ), notes


@on_levels
@pytest.mark.parametrize(
    "optimizer_of", [None, lambda model: FusedAdam(model.parameters(), lr=1e-3)], ids=["AdamW", "FusedAdam"]
)
def test_the_trainer_does_what_the_loop_does(tmp_path, level, optimizer_of):
    trainer, notes = trainer_of(tmp_path, level, optimizer_of)
    trainer.train()
    assert len(notes.scales) == 6
    trained = weights(trainer.model)
    assert all(w.isfinite().all() for w in trained.values())
    amp.reset()

    twin, _ = trainer_of(tmp_path, level, optimizer_of)
    # The schedule goes with the optimizer; the recipe initializes both.
    twin.create_optimizer_and_scheduler(num_training_steps=6)
    model, optimizer = twin.model, twin.optimizer
    model.train()
    for inputs in trainer.seen:
        with amp.scale_loss(model(**inputs).loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        ampctx.clip_grad_norm_(amp.master_params(optimizer), 0.1)
        optimizer.step()
        twin.lr_scheduler.step()
        model.zero_grad()
    assert_same_weights(model, trained)


def test_the_trainer_accumulates_evaluates_and_saves(tmp_path):
    trainer, notes = trainer_of(tmp_path, "O2", None, gradient_accumulation_steps=3)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert len(notes.scales) == 2
    assert trainer.evaluate()["eval_loss"] < before
    trainer.save_model(str(tmp_path / "model"))
    loaded = BertForSequenceClassification.from_pretrained(tmp_path / "model")
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


# --- timm -------------------------------------------------------------------------------------------------------------


def vision_model():
    torch.manual_seed(0)
    return timm.create_model("test_vit", num_classes=3, img_size=32)


def images(count, overflow_at=None):
    generator = torch.Generator().manual_seed(0)
    found = [
        (torch.randn(8, 3, 32, 32, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(count)
    ]
    if overflow_at is not None:
        found[overflow_at][0][0] = torch.inf
    return found


def run_timm(model, optimizer, scaler, data, accumulate=1):
    for i, (x, y) in enumerate(data, 1):
        loss = nn.functional.cross_entropy(model(x).float(), y) / accumulate
        need_update = i % accumulate == 0
        scaler(loss, optimizer, clip_grad=0.5, parameters=model.parameters(), need_update=need_update)
        if need_update:
            optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("accumulate", [1, 2])
@on_levels
def test_timm_with_the_levels(level, accumulate):
    model = vision_model()
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.01, weight_decay=0.01)
    start = weights(model)
    plain = vision_model()
    after = run_timm(
        plain, create_optimizer_v2(plain, opt="sgd", lr=0.01, weight_decay=0.01), Unscaled(), images(4), accumulate
    )
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1024.0)
    scaler = recipe("timm")["LevelScaler"]()
    run_timm(model, optimizer, scaler, images(4), accumulate)
    assert scaler.state_dict()["loss_scaler0"]["unskipped"] == 4 / accumulate
    amp.reset()  # the masters, and not what they round to
    trained = weights(model)
    way = torch.cat([(after[n] - start[n]).flatten() for n in after]).norm()
    assert torch.cat([(trained[n] - after[n]).flatten() for n in after]).norm() / way < 0.05


class Unscaled:
    """timm's calls in fp32."""

    def __call__(self, loss, optimizer, clip_grad, parameters, need_update):
        loss.backward()
        if need_update:
            nn.utils.clip_grad_norm_(parameters, clip_grad)
            optimizer.step()


def test_timm_with_our_scaler():
    scaler = recipe("timm")["AmpctxScaler"]("cpu")
    model = vision_model()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=0.01)
    run_timm(model, optimizer, scaler, images(1))
    before = weights(model)
    after = run_timm(model, optimizer, scaler, images(1, overflow_at=0))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert scaler.state_dict()["scale"] == FIRST_SCALE / 2
