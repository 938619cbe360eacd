"""ampctx.frameworks and the programs of docs/frameworks.md, on the CPU: they do what the loop does."""

import re
from pathlib import Path

import accelerate
import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import MixedPrecision
from test_timm import distance_from_fp32, images, train_as_timm, vision_model
from test_transformers import ARGUMENTS, Notes, Recording, bert, sentences, train_by_hand
from timm.optim import create_optimizer_v2
from torch.utils.data import DataLoader
from training import FIRST_SCALE, assert_same_weights, batches, by_hand, loss_of, mlp, on_levels, scale, sgd, weights
from transformers import TrainingArguments

import ampctx
from ampctx import AmpError, AmpValueError, amp
from ampctx.frameworks.accelerate import AmpAccelerator
from ampctx.frameworks.lightning import AmpFabric, AmpPrecision
from ampctx.frameworks.timm import AmpScaler, AutocastScaler
from ampctx.frameworks.transformers import AmpTrainer
from ampctx.optimizers import FusedAdam

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"
# What changes the loop, and how the loop of training.py says it.
OPTIONS = {"plain": {}, "clipping": {"max_norm": 0.05}, "accumulation": {"accumulate": 3}}
QUIET = {"verbosity": 0}


def run_program(name, **given):
    """Runs the page's program for a framework. Returns its variables, to which ``given`` belong."""
    found = re.findall(rf"```python {name}\n(.*?)```", PAGE.read_text(), flags=re.S)
    assert len(found) == 1
    names = {"__name__": name, **given}
    exec(compile(found[0], f"{PAGE.name}: {name}", "exec"), names)
    return names


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
def _fresh_accelerate(monkeypatch):
    """accelerate keeps its state from one Accelerator to the next, and TrainingArguments write into the environment."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    yield
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


# --- optimizers that frameworks have wrapped --------------------------------------------------------------------------

WRAPPERS = {
    "accelerate": lambda model, optimizer: Accelerator(cpu=True).prepare(optimizer),
    "Fabric": lambda model, optimizer: Fabric(accelerator="cpu", devices=1).setup(model, optimizer)[1],
    "Lightning": lambda model, optimizer: LightningOptimizer(optimizer),
}


@on_levels
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("make", [sgd, lambda m: FusedAdam(m.parameters(), lr=0.1)], ids=["SGD", "FusedAdam"])
def test_amp_takes_the_wrapper_for_the_optimizer(level, wrap, make):
    model = mlp()
    optimizer = make(model)
    amp.initialize(model, optimizer, opt_level=level, **QUIET)
    wrapped = wrap(model, optimizer)
    for x, y in batches(2, overflow_at=1):
        with amp.scale_loss(loss_of(model(x), y), wrapped) as scaled_loss:
            scaled_loss.backward()
        assert list(map(id, amp.master_params(wrapped))) == list(map(id, amp.master_params(optimizer)))
        ampctx.clip_grad_norm_(amp.master_params(wrapped), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert amp.outcome(wrapped).skipped
    assert amp.outcome(wrapped) is amp.outcome(optimizer)
    assert amp.skipped_steps(wrapped) == 1
    assert amp.history(wrapped).skipped == [False, True]


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
    trainer.fit(model, DataLoader(data, batch_size=None), ckpt_path=path)
    return trainer


IN_LIGHTNING = {"plain": {}, "clipping": {"gradient_clip_val": 0.05}, "accumulation": {"accumulate_grad_batches": 3}}


@pytest.mark.filterwarnings("ignore:.*num_workers:UserWarning", "ignore:.*GPU available:UserWarning")
@pytest.mark.filterwarnings("ignore:.*weights_only:UserWarning")
class TestLightning:
    @on_levels
    @pytest.mark.parametrize(("options", "manual"), [*((name, False) for name in OPTIONS), ("plain", True)])
    def test_fit_does_what_the_loop_does(self, level, options, manual):
        data, model = batches(12), Module(manual)
        fit(model, data, AmpPrecision(level, verbosity=0), **IN_LIGHTNING[options])
        after = expected(level, data, **OPTIONS[options])
        assert_trained(model.after, after, exact=options != "accumulation")
        # The masters themselves, in fp32.
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert amp.state_dict() == {}

    @on_levels
    def test_an_overflow_skips_the_step_and_a_run_resumes(self, tmp_path, level):
        data = batches(4, overflow_at=1)
        whole = Module()
        fit(whole, data, AmpPrecision(level, verbosity=0), max_epochs=2)
        scales = [s["loss_scaler0"]["loss_scale"] for s in whole.scales]
        assert scales == [FIRST_SCALE / 2**i for i in (0, 1, 1, 1, 1, 2, 2, 2)]
        half = Module()

        class Save(pl.Callback):
            def on_train_epoch_end(self, trainer, module):
                trainer.save_checkpoint(tmp_path / "half.ckpt")

        trainer = fit(half, data, AmpPrecision(level, verbosity=0), callbacks=[Save()])
        trainer.save_checkpoint(tmp_path / "after_fit.ckpt")
        for path in (tmp_path / "half.ckpt", tmp_path / "after_fit.ckpt"):
            resumed = Module()
            fit(resumed, data, AmpPrecision(level, verbosity=0), path=path, max_epochs=2)
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


# --- Fabric -----------------------------------------------------------------------------------------------------------


def prepared_fabric(level, count=1):
    """A Fabric, and pairs of a model and an optimizer that it has set up."""
    fabric = AmpFabric(accelerator="cpu", devices=1, opt_level=level, amp_options=QUIET)
    fabric.launch()
    models = [mlp().train() for _ in range(count)]
    return fabric, [fabric.setup(model, sgd(model)) for model in models]


def train_in_fabric(fabric, model, optimizer, data, max_norm=None, accumulate=1):
    for i, (x, y) in enumerate(data, 1):
        ends = i % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not ends):
            fabric.backward(loss_of(model(x), y) / accumulate)
        if ends:
            if max_norm is not None:
                fabric.clip_gradients(model, optimizer, max_norm=max_norm)
            optimizer.step()
            optimizer.zero_grad()


@on_levels
@pytest.mark.parametrize("options", OPTIONS)
def test_fabric_does_what_the_loop_does(level, options):
    data = batches(12, overflow_at=2)
    fabric, [(model, optimizer)] = prepared_fabric(level)
    train_in_fabric(fabric, model, optimizer, data, **OPTIONS[options])
    assert scale() == FIRST_SCALE / 2
    trained = weights(model.module)
    amp.reset()
    assert_trained(trained, expected(level, data, **OPTIONS[options]), exact=options != "accumulation")


@on_levels
def test_a_run_in_fabric_resumes(level, tmp_path):
    data = batches(8, overflow_at=1)
    fabric, [(model, optimizer)] = prepared_fabric(level)
    train_in_fabric(fabric, model, optimizer, data[:4])
    fabric.save(tmp_path / "half.ckpt", {"model": model, "optimizer": optimizer, "amp": amp})
    train_in_fabric(fabric, model, optimizer, data[4:])
    amp.reset()
    after = weights(model.module)
    fabric, [(model, optimizer)] = prepared_fabric(level)
    fabric.load(tmp_path / "half.ckpt", {"model": model, "optimizer": optimizer, "amp": amp})
    assert scale() == FIRST_SCALE / 2
    train_in_fabric(fabric, model, optimizer, data[4:])
    amp.reset()
    assert_trained(weights(model.module), after)


def test_each_model_of_a_fabric_has_its_own_backward():
    """As the generator and the discriminator of a GAN."""
    fabric, pairs = prepared_fabric("O2", count=2)
    assert not isinstance(fabric.setup(mlp()), tuple)  # a model without optimizer, which amp does not see
    for x, y in batches(2):
        for model, optimizer in pairs:
            fabric.backward(loss_of(model(x), y), model=model)
            optimizer.step()
            optimizer.zero_grad()
    trained = [weights(model.module) for model, _ in pairs]
    amp.reset()
    after = expected("O2", batches(2))
    for one in trained:
        assert_trained(one, after)


def test_what_fabric_cannot_scale_is_refused():
    fabric, [(_, optimizer)] = prepared_fabric("O2")
    with pytest.raises(AmpError, match="pass the optimizers to fabric.setup"):
        fabric.setup_optimizers(optimizer)
    with pytest.raises(AmpValueError, match="none that fabric.setup has returned"):
        fabric.backward(torch.ones((), requires_grad=True), model=mlp())


# --- accelerate -------------------------------------------------------------------------------------------------------


def test_an_optimizer_without_its_model_is_refused():
    accelerator = AmpAccelerator(cpu=True, opt_level="O2", amp_options=QUIET)
    with pytest.raises(AmpValueError, match="pass models and optimizers together"):
        accelerator.prepare(sgd(mlp()))


def prepared_accelerator(level, accumulate=1, **options):
    model = mlp().train()
    accelerator = AmpAccelerator(
        cpu=True, gradient_accumulation_steps=accumulate, opt_level=level, amp_options=QUIET, **options
    )
    return accelerator, *accelerator.prepare(model, sgd(model))


def train_in_accelerate(accelerator, model, optimizer, data, max_norm=None):
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model(x), y))
            if accelerator.sync_gradients and max_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()


@on_levels
@pytest.mark.parametrize("options", OPTIONS)
def test_accelerate_does_what_the_loop_does(level, options):
    data = batches(12, overflow_at=2)
    given = OPTIONS[options]
    accelerator, model, optimizer = prepared_accelerator(level, given.get("accumulate", 1))
    train_in_accelerate(accelerator, model, optimizer, data, given.get("max_norm"))
    assert scale() == FIRST_SCALE / 2
    trained = weights(model)
    accelerator.free_memory()  # ends with amp.reset
    assert amp.state_dict() == {}
    assert_trained(trained, expected(level, data, **given), exact=options == "plain")


@on_levels
def test_accelerate_clips_values_of_masters(level):
    accelerator, model, optimizer = prepared_accelerator(level)
    x, y = batches(1)[0]
    accelerator.backward(loss_of(model(x), y))
    accelerator.clip_grad_value_(model.parameters(), 1e-4)
    grads = [p.grad for p in amp.master_params(optimizer)]
    assert max(grad.abs().max() for grad in grads) == pytest.approx(1e-4)


@on_levels
def test_a_run_in_accelerate_resumes(level, tmp_path):
    data = batches(8, overflow_at=1)
    accelerator, model, optimizer = prepared_accelerator(level)
    train_in_accelerate(accelerator, model, optimizer, data[:4])
    accelerator.save_state(tmp_path)
    train_in_accelerate(accelerator, model, optimizer, data[4:])
    accelerator.free_memory()
    after = weights(model)
    accelerator, model, optimizer = prepared_accelerator(level)
    accelerator.load_state(tmp_path)
    assert scale() == FIRST_SCALE / 2
    train_in_accelerate(accelerator, model, optimizer, data[4:])
    accelerator.free_memory()
    assert_trained(weights(model), after)


@pytest.mark.parametrize("make", [sgd, lambda m: FusedAdam(m.parameters(), lr=0.1)], ids=["SGD", "FusedAdam"])
def test_schedulers_of_accelerate_stay_at_skipped_steps(make, caplog):
    accelerator, model = AmpAccelerator(cpu=True, opt_level="O2", amp_options=QUIET), mlp()
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rates = []
    for x, y in batches(3, overflow_at=1):
        accelerator.backward(loss_of(model(x), y))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates += schedule.get_last_lr()
    assert rates == [0.05, 0.05, 0.025]
    # A flag that cannot be read, in the place of one on a GPU.
    amp.outcome(optimizer).numbers = {("overflowed", 0): torch.ones((), device="meta")}
    schedule.step()
    schedule.step()
    (told,) = (record.getMessage() for record in caplog.records if record.name == "ampctx")
    assert told.startswith(f"{type(optimizer.optimizer).__name__} skips steps on the GPU")


def test_accelerates_own_mixed_precision_is_refused():
    with pytest.raises(AmpValueError, match="mixed_precision='bf16': opt_level='O1' casts the model already"):
        AmpAccelerator(cpu=True, mixed_precision="bf16")


@pytest.mark.parametrize(("make", "told"), [(sgd, True), (lambda m: FusedAdam(m.parameters(), lr=0.1), False)])
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


class RecordingAmpTrainer(Recording, AmpTrainer):
    pass


def trainer_of(folder, level, kind=RecordingAmpTrainer, optimizer_cls_and_kwargs=None, **options):
    model, notes, data = bert(), Notes(), sentences()
    trainer = kind(
        model,
        TrainingArguments(str(folder), **{**ARGUMENTS, **options}),
        train_dataset=data,
        eval_dataset=data,
        callbacks=[notes],
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        opt_level=level,
        amp_options=QUIET,
    )
    return trainer, notes


OPTIMIZERS_OF_TRAINER = {
    "AdamW": ({}, torch.optim.AdamW),
    "FusedAdam": ({"optimizer_cls_and_kwargs": (FusedAdam, {"lr": 1e-3})}, FusedAdam),
}


@on_levels
@pytest.mark.parametrize(("options", "kind"), OPTIMIZERS_OF_TRAINER.values(), ids=OPTIMIZERS_OF_TRAINER)
def test_the_trainer_does_what_the_loop_does(tmp_path, level, options, kind):
    trainer, notes = trainer_of(tmp_path, level, **options)
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, kind)
    assert len(notes.scales) == 6
    assert amp.state_dict() == {}
    trained = weights(trainer.model)

    twin, _ = trainer_of(tmp_path, level, **options)
    # The schedule goes with the optimizer, and AmpTrainer initializes both.
    twin.create_optimizer_and_scheduler(num_training_steps=6)
    train_by_hand(twin.model, twin.optimizer, twin.lr_scheduler, trainer.seen, ampctx.clip_grad_norm_, False)
    assert (level == "O2") == (amp.skipped_steps(twin.optimizer) > 0)  # the warm-up of the scale is in it
    amp.reset()
    assert_same_weights(twin.model, trained)


@on_levels
def test_a_run_of_the_trainer_resumes(tmp_path, level):
    """Two epochs, and two again from the checkpoint after the first of them."""
    whole, _ = trainer_of(tmp_path, level, save_strategy="epoch")
    whole.train()
    after = weights(whole.model)
    resumed, notes = trainer_of(tmp_path, level, save_strategy="epoch")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert len(notes.scales) == 3
    assert_same_weights(resumed.model, after)


def test_the_trainers_own_mixed_precision_is_refused(tmp_path):
    with pytest.raises(AmpValueError, match="mixed_precision='bf16': opt_level='O1' casts the model already"):
        trainer_of(tmp_path, "O1", bf16=True)


# --- timm -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
@on_levels
def test_timm_with_the_levels(level, accumulate):
    scaler = AmpScaler()
    distance = distance_from_fp32("test_vit", level, steps=4, clip_grad=0.5, accumulate=accumulate, scaler=scaler)
    assert distance < 0.05
    assert scaler.state_dict()["loss_scaler0"]["unskipped"] == 4 / accumulate


def test_timm_with_our_scaler():
    scaler = AutocastScaler("cpu")
    model = vision_model("test_vit")
    optimizer = create_optimizer_v2(model, opt="adamw", lr=0.01)
    train_as_timm(model, optimizer, images(1), scaler, clip_grad=0.5)
    before = weights(model)
    train_as_timm(model, optimizer, images(1, overflow_at=0), scaler, clip_grad=0.5)
    assert_same_weights(model, before)
    assert scaler.state_dict()["scale"] == FIRST_SCALE / 2


# --- the programs of the page -----------------------------------------------------------------------------------------


def a_loop():
    model = mlp()
    return {"model": model, "optimizer": sgd(model), "batches": batches(4), "loss_of": loss_of}


# What a program is given, and the number of steps that amp sees in it, where its end does not reset amp.
PROGRAMS = {
    "lightning": (lambda: {"model": Module(), "loader": DataLoader(batches(4), batch_size=None)}, 0),
    "fabric": (a_loop, 4),
    "accelerate": (a_loop, 2),
    "transformers": (lambda: {"model": bert(), "sentences": sentences()}, 0),
    "timm": (a_loop, 4),
}


@pytest.mark.filterwarnings("ignore:.*(num_workers|ensor[bB]oard|pin_memory|log_every_n_steps):UserWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_page_trains(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, steps = PROGRAMS[name]
    given = make()
    model, before = given["model"], weights(given["model"])
    run_program(name, **given)
    assert len(amp.history().step) == steps
    amp.reset()
    assert any(not torch.equal(now, before[name]) for name, now in weights(model).items())
