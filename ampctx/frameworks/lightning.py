"""Lightning 2: ``AmpPrecision`` is a plugin for ``Trainer``, ``AmpFabric`` takes the place of ``Fabric``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.fabric import Fabric
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ampctx import AmpError, AmpValueError, amp


class AmpPrecision(Precision):
    """``Trainer(plugins=[AmpPrecision("O1")])``, without the Trainer's ``precision``.

    ``options``: of ``amp.initialize``. After ``fit`` the model is fp32. Checkpoints have loss scale and masters.
    """

    def __init__(self, opt_level: str = "O1", **options: Any) -> None:
        self.opt_level, self.options, self._after_fit = opt_level, options, dict[str, Any]()
        self._initialized: tuple[nn.Module, torch.device] | None = None

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, Any, Any]:
        plain = model.module if isinstance(model, DistributedDataParallel) else model
        amp.initialize(plain, optimizers, opt_level=self.opt_level, **self.options)
        self._initialized = plain, next((p.device for p in plain.parameters()), torch.device("cpu"))
        return model, optimizers, lr_schedulers

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        trainer = model.trainer
        optimizers = trainer.strategy.optimizers if optimizer is None else [optimizer]
        # Of micro-batches the last one alone is reduced over the ranks, and unscaled. Private in Lightning, which tells
        # a plugin nowhere else which one is the last.
        delay = model.automatic_optimization and trainer.fit_loop._should_accumulate()
        with amp.scale_loss(tensor, optimizers, delay_unscale=delay) as scaled_loss:
            model.backward(scaled_loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        # Lightning passes the closure to the optimizer, and amp would copy the weights before each such step.
        loss = closure()
        # Private in Lightning, whose own plugins call it here: clips, and runs on_before_optimizer_step.
        self._after_closure(model, optimizer)
        optimizer.step(**kwargs)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return amp.state_dict(masters=True) if self._initialized else self._after_fit

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        amp.load_state_dict(state_dict)

    def teardown(self) -> None:
        if self._initialized is not None:
            (model, device), self._initialized = self._initialized, None
            self._after_fit = amp.state_dict()  # for save_checkpoint then, when masters are the model's weights
            model.to(device)  # where the masters are: Lightning has moved the model to the CPU by now
            amp.reset()
            model.cpu()


class AmpFabric(Fabric):
    """``Fabric`` with an ``opt_level``, and the same loop. Fabric shows a plugin no optimizers, so this is no plugin.

    ``opt_level``, ``amp_options``: of ``amp.initialize``. Save ``amp``, too: ``fabric.save(path, {"amp": amp, ...})``.
    """

    def __init__(self, *args: Any, opt_level: str = "O1", amp_options: Mapping[str, Any] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.opt_level, self.amp_options = opt_level, amp_options or {}
        self._amp_optimizers: WeakKeyDictionary[nn.Module, tuple[Any, ...]] = WeakKeyDictionary()
        self._amp_delay = False

    def setup(self, module: nn.Module, *optimizers: Any, move_to_device: bool = True, **kwargs: Any) -> Any:
        if not optimizers:
            return super().setup(module, move_to_device=move_to_device, **kwargs)
        if move_to_device:  # before amp makes masters of the weights
            module = self.to_device(module)
        amp.initialize(module, list(optimizers), opt_level=self.opt_level, **self.amp_options)
        found = super().setup(module, *optimizers, move_to_device=move_to_device, **kwargs)
        self._amp_optimizers[found[0]] = optimizers
        return found

    def setup_optimizers(self, *optimizers: Any) -> Any:
        """Refused: amp initializes an optimizer along with its model."""
        raise AmpError("AmpFabric.setup_optimizers: pass the optimizers to fabric.setup, together with their model")

    def backward(self, tensor: Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
        """``Fabric``'s. ``model``: where several were set up, the one whose optimizers this backward is for."""
        if model is not None and model not in self._amp_optimizers:
            raise AmpValueError("AmpFabric.backward: model is none that fabric.setup has returned with optimizers")
        chosen = self._amp_optimizers.values() if model is None else [self._amp_optimizers[model]]
        with amp.scale_loss(tensor, sum(chosen, ()), delay_unscale=self._amp_delay) as scaled_loss:
            super().backward(scaled_loss, *args, model=model, **kwargs)

    @contextmanager
    def no_backward_sync(self, module: Any, enabled: bool = True) -> Generator[None, None, None]:
        """``Fabric``'s; gradients of these micro-batches stay scaled until the last one."""
        former, self._amp_delay = self._amp_delay, enabled
        try:
            with super().no_backward_sync(module, enabled):
                yield
        finally:
            self._amp_delay = former

    def clip_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """``Fabric``'s, without an error by default: amp skips the step on inf and nan."""
        if len(args) < 6:  # error_if_nonfinite is the last
            kwargs.setdefault("error_if_nonfinite", False)
        return super().clip_gradients(*args, **kwargs)
