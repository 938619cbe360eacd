"""Hugging Face accelerate: ``AmpAccelerator`` takes the place of ``Accelerator``."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from ampctx import AmpValueError, amp, clip_grad_norm_


@functools.cache
def _log_once(kind: str) -> None:
    logging.getLogger("ampctx").warning(
        f"{kind} skips steps on the GPU, and schedulers of accelerate go on there. Take an optimizer of torch without "
        "fused=True, or step schedulers yourself if amp.outcome(optimizer).stepped, which waits for the GPU."
    )


class _TellsOfSkips(AcceleratedOptimizer):
    """Knows which steps amp has skipped. Schedulers of accelerate and transformers ask after each step."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether amp has skipped the latest step. False, and a line in the log, if only a GPU knows: no host sync."""
        outcome = amp.outcome(self.optimizer)
        flags = [flag for (name, _), flag in outcome.numbers.items() if name in ("overflowed", "found_inf")]
        if any(isinstance(flag, Tensor) and flag.device.type != "cpu" for flag in flags):
            _log_once(type(self.optimizer).__name__)
            return False
        return outcome.skipped


def adapt(accelerator: Accelerator, opt_level: str) -> None:
    """Refuses casts of the accelerator itself. Optimizers that it prepares know which steps amp has skipped."""
    if accelerator.mixed_precision != "no":
        raise AmpValueError(
            f"mixed_precision={accelerator.mixed_precision!r}: opt_level={opt_level!r} casts the model already. Leave "
            "mixed_precision out (in TrainingArguments fp16 and bf16), and unset ACCELERATE_MIXED_PRECISION."
        )
    prepare = accelerator.prepare_optimizer

    def prepare_optimizer(*args: Any, **kwargs: Any) -> Any:
        optimizer = prepare(*args, **kwargs)
        if type(optimizer) is AcceleratedOptimizer:
            optimizer.__class__ = _TellsOfSkips
        return optimizer

    accelerator.prepare_optimizer = prepare_optimizer


class AmpAccelerator(Accelerator):
    """``Accelerator`` with an ``opt_level``. The loop is that of accelerate; ``save_state`` saves ``amp``, too.

    ``opt_level``, ``amp_options``: of ``amp.initialize``. Pass models and optimizers to ``prepare`` together.
    """

    def __init__(self, *args: Any, opt_level: str = "O1", amp_options: Mapping[str, Any] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        adapt(self, opt_level)
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
