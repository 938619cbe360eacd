"""Hugging Face transformers: ``AmpTrainer`` takes the place of ``Trainer``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from transformers import Trainer

from ampctx import amp, clip_grad_norm_
from ampctx.frameworks.accelerate import adapt


class AmpTrainer(Trainer):
    """``Trainer`` with an ``opt_level``. For a Trainer of another class: ``class Mine(AmpTrainer, Seq2SeqTrainer)``.

    ``opt_level``, ``amp_options``: of ``amp.initialize``. After ``train`` the model is fp32. Checkpoints have the loss
    scale. For one process, or DistributedDataParallel. A callback sees no backward, so this is a Trainer.
    """

    def __init__(self, *args: Any, opt_level: str = "O1", amp_options: Mapping[str, Any] | None = None, **kwargs: Any):
        self.opt_level, self.amp_options = opt_level, amp_options or {}
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        accelerator, backward = self.accelerator, self.accelerator.backward
        adapt(accelerator, self.opt_level)

        def scaled_backward(loss: Tensor, **kwargs: Any) -> None:
            with amp.scale_loss(loss, self.optimizer, delay_unscale=not accelerator.sync_gradients) as scaled_loss:
                backward(scaled_loss, **kwargs)

        def clip(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
            return clip_grad_norm_(amp.master_params(self.optimizer), max_norm, norm_type)

        # The Trainer has no methods of its own for these two.
        accelerator.backward, accelerator.clip_grad_norm_ = scaled_backward, clip

    def create_optimizer(self, *args: Any) -> Any:  # transformers 5 may pass a model
        prepared = optimizer = super().create_optimizer(*args)
        while isinstance(optimizer, AcceleratedOptimizer):  # of an earlier run
            optimizer = optimizer.optimizer
        amp.reset()  # auto_find_batch_size begins again
        amp.initialize(self.model, optimizer, opt_level=self.opt_level, **self.amp_options)
        return prepared

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        finally:
            amp.reset()

    # Private in transformers, where nothing public is called with the folder of a checkpoint before a resumed step.
    def _save_scaler(self, output_dir: str) -> None:
        super()._save_scaler(output_dir)
        if self.args.should_save:
            torch.save(amp.state_dict(), Path(output_dir, "amp.pt"))

    def _load_scaler(self, checkpoint: str | None) -> None:
        super()._load_scaler(checkpoint)
        if checkpoint is not None and (file := Path(checkpoint, "amp.pt")).exists():
            amp.load_state_dict(torch.load(file, weights_only=True))
