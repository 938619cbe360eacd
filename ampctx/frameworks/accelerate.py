"""Hugging Face accelerate: ``AmpAccelerator`` takes the place of ``Accelerator``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from ampctx import AmpValueError, amp, clip_grad_norm_


def refuse_other_casts(accelerator: Accelerator, opt_level: str) -> None:
    if accelerator.mixed_precision != "no":
        raise AmpValueError(
            f"mixed_precision={accelerator.mixed_precision!r}: opt_level={opt_level!r} casts the model already. Leave "
            "mixed_precision out (in TrainingArguments fp16 and bf16), and unset ACCELERATE_MIXED_PRECISION."
        )


class AmpAccelerator(Accelerator):
    """``Accelerator`` with an ``opt_level``. The loop is that of accelerate; ``save_state`` saves ``amp``, too.

    ``opt_level``, ``amp_options``: of ``amp.initialize``. Pass models and optimizers to ``prepare`` together.
    """

    def __init__(self, *args: Any, opt_level: str = "O1", amp_options: Mapping[str, Any] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        refuse_other_casts(self, opt_level)
        self.opt_level, self.amp_options = opt_level, amp_options or {}
        self._amp_optimizers: list[Optimizer] = []
        # By the id of the model's parameter: at O2 and O5 the master has the gradient.
        self._amp_masters: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self.register_for_checkpointing(amp)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        optimizers = [one for one in args if isinstance(one, Optimizer)]
        models = [one for one in args if isinstance(one, nn.Module)]
        if optimizers and not models:
            raise AmpValueError("AmpAccelerator.prepare: pass models and optimizers together, so that amp casts both")
        if optimizers:
            if self.device_placement:  # before amp makes masters of the weights
                for model in models:
                    model.to(self.device)
            params = [p for optimizer in optimizers for p in amp.master_params(optimizer)]
            amp.initialize(models, optimizers, opt_level=self.opt_level, **self.amp_options)
            masters = [p for optimizer in optimizers for p in amp.master_params(optimizer)]
            self._amp_masters.update(zip(map(id, params), masters, strict=True))
            self._amp_optimizers += optimizers
        return super().prepare(*args, **kwargs)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        # Of micro-batches the last one alone is reduced over the ranks, and unscaled.
        with amp.scale_loss(loss, self._amp_optimizers, delay_unscale=not self.sync_gradients) as scaled_loss:
            super().backward(scaled_loss, **kwargs)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clips without a host sync. ``parameters``: of the model as it was prepared, or ``amp.master_params``."""
        return clip_grad_norm_([self._amp_masters.get(id(p), p) for p in parameters], max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        super().clip_grad_value_([self._amp_masters.get(id(p), p) for p in parameters], clip_value)

    def free_memory(self, *objects: Any) -> Any:
        """``Accelerator``'s. Ends with ``amp.reset()``: weights are fp32 again."""
        self._amp_optimizers.clear()
        amp.reset()
        return super().free_memory(*objects)
