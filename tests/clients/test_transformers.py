"""transformers 4, the last major version whose ``Trainer`` has ``half_precision_backend="apex"``, on the CPU."""

import pytest
import torch
from apex.normalization import FusedRMSNorm
from apex.optimizers import FusedAdam
from training import assert_same_weights, on_levels, scale, weights
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import is_apex_available

from ampctx import amp


def bert():
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**sizes, **rates, num_hidden_layers=1, num_attention_heads=2, num_labels=2)
    return BertForSequenceClassification(config)


def t5():
    """Takes its normalization from apex where that can be imported."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32}
    config = T5Config(**sizes, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    assert isinstance(model.encoder.final_layer_norm, FusedRMSNorm)
    return model


def sentences(count=24):
    """Labelled by whether the first word is in the upper half of the vocabulary."""
    words = torch.randint(0, 50, (count, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": (row[0] >= 25).long()} for row in words]


def sentences_to_repeat(count=24):
    return [{"input_ids": sentence["input_ids"], "labels": sentence["input_ids"]} for sentence in sentences(count)]


class Recording:
    """A trainer notes what it trains on: the order is random."""

    seen = ()

    def training_step(self, model, inputs, *args, **kwargs):
        self.seen = (*self.seen, inputs)
        return super().training_step(model, inputs, *args, **kwargs)


class RecordingTrainer(Recording, Trainer):
    pass


class Notes(TrainerCallback):
    def __init__(self):
        self.scales = []

    def on_step_end(self, args, state, control, **kwargs):
        self.scales.append(scale())


ARGUMENTS = {
    "use_cpu": True,
    "per_device_train_batch_size": 8,
    "num_train_epochs": 2,
    "learning_rate": 1e-3,
    "max_grad_norm": 0.1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


def trainer_of(folder, level, model, data, **options):
    of_apex = {"fp16": True, "half_precision_backend": "apex", "fp16_opt_level": level}
    arguments = TrainingArguments(str(folder), **ARGUMENTS, **of_apex, **options)
    return RecordingTrainer(model, arguments, train_dataset=data, eval_dataset=data)


def train_by_hand(model, optimizer, scheduler, data, clip=torch.nn.utils.clip_grad_norm_, schedules_skips=True):
    model.train()
    for inputs in data:
        with amp.scale_loss(model(**inputs).loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        clip(amp.master_params(optimizer), 0.1)
        optimizer.step()
        if schedules_skips or amp.outcome(optimizer).stepped:
            scheduler.step()
        model.zero_grad()


def test_transformers_finds_apex():
    assert is_apex_available()


@on_levels
@pytest.mark.parametrize(
    ("make", "data", "optim"),
    [
        (bert, sentences, "adamw_torch"),
        (bert, sentences, "adamw_torch_fused"),
        (bert, sentences, "adamw_apex_fused"),
        (t5, sentences_to_repeat, "adamw_torch"),
    ],
    ids=["bert-torch", "bert-torch-fused", "bert-FusedAdam", "t5-FusedRMSNorm"],
)
def test_the_trainer_does_what_the_loop_does(tmp_path, level, make, data, optim):
    trainer = trainer_of(tmp_path, level, make(), data(), optim=optim)
    trainer.train()
    assert isinstance(trainer.optimizer, FusedAdam) == (optim == "adamw_apex_fused")
    trained = weights(trainer.model)
    assert all(w.isfinite().all() for w in trained.values())
    amp.reset()

    # Another trainer makes the optimizer and the schedule; the loop is ours.
    twin = trainer_of(tmp_path, level, make(), data(), optim=optim)
    twin.create_optimizer_and_scheduler(num_training_steps=len(trainer.seen))
    model, optimizer = amp.initialize(twin.model, twin.optimizer, opt_level=level, verbosity=0)
    train_by_hand(model, optimizer, twin.lr_scheduler, trainer.seen)
    assert_same_weights(model, trained)
