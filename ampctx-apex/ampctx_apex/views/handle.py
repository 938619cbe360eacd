"""apex.amp.handle: handles on autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ampctx import AmpError, spi
from ampctx.spi import Autocast
from ampctx_apex.views.scaler import LossScaler
from ampctx_apex.views.wrapped import OptimWrapper


class AmpHandle:
    """A handle on the casts of ``amp.init``, or of ``initialize`` at O1 or O4.

    A handle built directly controls no casts. torch's autocast caches cast weights, so ``cache`` is empty and
    ``enable_caching`` has no effect.

    Args:
        loss_scale: for the ``LossScaler`` in ``_default_scaler``.
        enable_caching: the value of ``has_cache``.
        verbose: the value of ``verbose``; casts are not printed.
    """

    __module__ = "apex.amp.handle"

    def __init__(self, loss_scale: float | str = "dynamic", enable_caching: bool = True, verbose: bool = False) -> None:
        self._enable_caching = enable_caching
        self._verbose = verbose
        self._cache: dict[Tensor, Tensor] = {}
        self._default_scaler: LossScaler | None = LossScaler(loss_scale)
        self._all_wrappers: list[tuple[Any, str, Any]] = []
        self._autocast: Autocast | None = None

    @classmethod
    def _over(cls, autocast: Autocast, **options: Any) -> AmpHandle:
        """A handle on an ``Autocast`` of the session."""
        handle = cls(**options)
        handle._autocast = autocast
        return handle

    def is_over(self, autocast: Autocast) -> bool:
        return self._autocast is autocast

    def is_active(self) -> bool:
        """Whether ops are cast now. No host sync."""
        return self._autocast is not None and self._autocast.active

    @property
    def _is_active(self) -> bool:
        return self.is_active()

    @_is_active.setter
    def _is_active(self, value: bool) -> None:
        if self._autocast is not None:
            self._autocast.active = value

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        """A context without casts. May nest, and restores after an exception."""
        with nullcontext() if self._autocast is None else self._autocast.suspended():
            yield

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Wraps the optimizer in apex's interface from before ``amp.initialize``."""
        self._default_scaler = None
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: Tensor, optimizer: Any) -> AbstractContextManager:
        """Raises AmpError: apex had already removed this form."""
        raise AmpError(
            "The old Amp API is no longer supported.  Call model, optimizer = amp.initialize(model, optimizer, "
            'opt_level="O1") and use "with amp.scale_loss(loss, optimizer) as scaled_loss:".'
        )

    def _clear_cache(self) -> None:
        self._cache.clear()
        torch.clear_autocast_cache()

    def _save_func(self, mod: Any, fn: str, func: Callable) -> None:
        """Records ``func``, which ``_deactivate`` restores as ``mod.fn``."""
        self._all_wrappers.append((mod, fn, func))

    def _deactivate(self) -> None:
        """Ends the casts and restores recorded functions, latest first."""
        while self._all_wrappers:
            setattr(*self._all_wrappers.pop())
        if self._autocast is not None:
            spi.end_casts(self._autocast)

    @property
    def has_cache(self) -> bool:
        return self._enable_caching

    @property
    def cache(self) -> dict[Tensor, Tensor]:
        return self._cache

    def remove_cache(self, param: Tensor) -> None:
        self._cache.pop(param, None)

    @property
    def verbose(self) -> bool:
        return self._verbose


class NoOpHandle:
    """The handle of ``amp.init(enabled=False)``."""

    __module__ = "apex.amp.handle"

    has_cache = False
    verbose = False

    def is_active(self) -> bool:
        return False

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        return OptimWrapper(optimizer, self, num_loss)

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        yield loss

    def _clear_cache(self) -> None:
        pass

    def _deactivate(self) -> None:
        pass
