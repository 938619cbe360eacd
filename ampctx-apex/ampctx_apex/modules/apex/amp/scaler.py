"""apex.amp.scaler: ``LossScaler``, over the loss scale of a session or one of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx import AmpTypeError, foreach, spi
from ampctx.foreach import Factor, FoundInf
from ampctx.spi import DYNAMIC, LossScale, check_bounds


def _present(*lists: Iterable[Tensor | None]) -> list[list[Any]]:
    """The lists without positions where one of them has None."""
    rows = [row for row in zip(*lists, strict=True) if all(t is not None for t in row)]
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in lists]


def delegated(to: str, name: str) -> Any:
    """An attribute that is ``name`` of the object in the attribute ``to``."""
    return property(
        lambda self: getattr(getattr(self, to), name), lambda self, value: setattr(getattr(self, to), name, value)
    )


class LossScaler:
    """A loss scale with apex's interface: one of the session's (``_amp_state.loss_scalers``), or a scale of its own.

    Reading ``_loss_scale``, ``_unskipped`` and ``_has_overflow`` is a host sync if the scale is on an accelerator;
    writing is not. A written value counts from the next ``scale_loss`` on and is not clamped to the bounds.

    ``_overflow_buf``, int32 of shape [1], holds the latest ``found_inf`` flag for ``update_scale``. An assigned
    tensor replaces it and receives later flags.

    Args:
        loss_scale: "dynamic", or a number for a static scale.
        init_scale: initial value of a dynamic scale, clamped to its bounds.
        scale_factor: divides the scale after an overflow and multiplies it on growth. (apex ignored it.)
        scale_window: clean steps before growth (torch's ``growth_interval``).
        min_loss_scale, max_loss_scale: bounds of a dynamic scale; None for no bound.

    Raises:
        AmpTypeError, AmpValueError: an argument is invalid.
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
    ) -> None:
        dynamic = loss_scale == DYNAMIC
        low, high = check_bounds(
            0.0 if min_loss_scale is None else min_loss_scale,
            math.inf if max_loss_scale is None else max_loss_scale,
            "loss_scale",
        )
        self._view(
            LossScale(
                max(low, min(high, init_scale)) if dynamic else loss_scale,  # type: ignore[arg-type]
                dynamic=dynamic,
                growth_factor=scale_factor,
                backoff_factor=1.0 / scale_factor,
                growth_interval=scale_window,
                min_scale=low,
                max_scale=high,
            )
        )

    @classmethod
    def of(cls, loss_scale: LossScale) -> LossScaler:
        """The one view of ``loss_scale``."""
        # After uninstall_apex and a new import the view is of the class of before.
        if not isinstance(spi.view_of(loss_scale), cls):
            cls.__new__(cls)._view(loss_scale)
        return spi.view_of(loss_scale)

    def _view(self, loss_scale: LossScale) -> None:
        self._of = loss_scale
        # The latest found_inf flag, until _overflow_buf is first read or assigned and takes over.
        self._flag: Tensor | None = None
        self._buf: Tensor | None = None
        # None: the latest check decides.
        self._sticky: Any = False
        spi.set_view(loss_scale, self)

    # --- apex's attributes --------------------------------------------------------------------------------------------

    @property
    def dynamic(self) -> bool:
        return self._of.dynamic

    @dynamic.setter
    def dynamic(self, value: bool) -> None:
        current = self._of.value()
        self._of.dynamic = bool(value)
        self._of.set(current)

    def loss_scale(self) -> float:
        """The scale. A host sync when a dynamic scale lives on an accelerator."""
        return self._of.value()

    _loss_scale = property(loss_scale, lambda self, value: self._of.set(value))
    _unskipped = property(lambda self: self._of.unskipped(), lambda self, value: self._of.set_unskipped(value))

    _scale_seq_len = delegated("_of", "growth_interval")

    @property
    def _min_loss_scale(self) -> float | None:
        return self._of.min_scale or None

    @_min_loss_scale.setter
    def _min_loss_scale(self, value: float | None) -> None:
        self._of.min_scale, _ = check_bounds(value or 0.0, self._of.max_scale, "loss_scale")

    @property
    def _max_loss_scale(self) -> float | None:
        return None if self._of.max_scale == math.inf else self._of.max_scale

    @_max_loss_scale.setter
    def _max_loss_scale(self, value: float | None) -> None:
        _, self._of.max_scale = check_bounds(self._of.min_scale, math.inf if value is None else value, "loss_scale")

    @property
    def _overflow_buf(self) -> Tensor:
        if self._buf is None:
            self._buf = torch.zeros(1, dtype=torch.int32, device=self._device())
            if self._flag is not None:
                self._buf.copy_(self._flag.detach() != 0)
            self._flag = None
        return self._buf

    @_overflow_buf.setter
    def _overflow_buf(self, value: Tensor) -> None:
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise AmpTypeError("_overflow_buf must be a one-element tensor; the kernels need int32")
        self._buf, self._flag = value, None

    @property
    def _has_overflow(self) -> Any:
        if self._sticky is not None:
            return self._sticky
        return self.dynamic and not spi.is_deferred(self._of) and self._is_raised()

    @_has_overflow.setter
    def _has_overflow(self, value: Any) -> None:
        self._sticky = value

    # --- the flag -----------------------------------------------------------------------------------------------------

    def _device(self) -> torch.device:
        for known in (self._flag, self._of.scale):
            if known is not None:
                return known.device
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if accelerator is None else accelerator

    def _is_raised(self) -> bool:
        """A host sync."""
        flag = self._flag if self._buf is None else self._buf
        return flag is not None and flag.item() != 0

    def checked(self, found_inf: Tensor) -> None:
        """Receives the session's ``found_inf`` flag. No host sync."""
        self._sticky = None
        if self._buf is None:
            self._flag = found_inf
        else:
            self._buf.copy_((found_inf.detach() != 0).reshape(self._buf.shape), non_blocking=True)

    def _raise(self, found_inf: FoundInf) -> None:
        """ORs a ``found_inf`` flag into the current one. No host sync."""
        flag = found_inf.joined(next(iter(found_inf.per_device), self._device()))
        if self._buf is not None:
            self._buf.logical_or_(flag.reshape(self._buf.shape).to(self._buf.device))
        else:
            self._flag = flag if self._flag is None else torch.maximum(self._flag, flag.to(self._flag.device))

    def clear_overflow_state(self) -> None:
        """Clears the flag. No host sync."""
        self._sticky = False
        if self._buf is None:
            self._flag = None
        else:
            self._buf.zero_()

    def update_scale(self) -> bool:
        """Updates the scale by the flag in ``_overflow_buf`` and returns whether it was an overflow. A host sync.

        After a ``delay_overflow_check`` block, the caller decides about the skip: the next ``optimizer.step()`` runs.
        A static scale never reports an overflow.
        """
        left = spi.take_deferred(self._of)
        if self._buf is None and left is not None:
            self._flag = left
        overflow = self.dynamic and (bool(self._sticky) or self._is_raised())
        self._of.update(torch.full((), float(overflow), dtype=torch.float32, device=self._device()))
        self._sticky = overflow
        return overflow

    # --- unscaling ----------------------------------------------------------------------------------------------------

    def _inv_scale(self, tensors: Sequence[Tensor]) -> Factor:
        return self._of.factors(tensors[0].device, fresh=False)[1] if tensors else 1.0

    def unscale(
        self,
        model_grads: Iterable[Tensor],
        master_grads: Iterable[Tensor],
        unused_scale: Any,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """``master = model / scale``, or / ``scale_override``; sets the flag on inf and nan. Skips pairs with None.

        Does nothing after an overflow, or if the static scale is 1 and the lists are the same.
        """
        identity = self._of.is_identity if scale_override is None else not self.dynamic and scale_override == 1.0
        if self._has_overflow or (identity and models_are_masters):
            return
        model, master = _present(model_grads, master_grads)
        found_inf = FoundInf()
        factor = self._inv_scale(model) if scale_override is None else 1.0 / scale_override
        with torch.no_grad():
            foreach.scale(model, master, found_inf, factor)
        self._raise(found_inf)

    def unscale_with_stashed(
        self,
        model_grads: Iterable[Tensor],
        stashed_master_grads: Iterable[Tensor],
        master_grads: Iterable[Tensor],
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:
        """``master = model / scale + stashed``; ``scale_override`` has the scales of model, stashed and master."""
        if self._has_overflow:
            return
        model, stashed, master = _present(model_grads, stashed_master_grads, master_grads)
        a, b = self._inv_scale(model), 1.0
        if scale_override is not None:
            model_scale, stashed_scale, out_scale = scale_override
            a, b = out_scale / model_scale, out_scale / stashed_scale
        found_inf = FoundInf()
        with torch.no_grad():
            foreach.axpby(model, stashed, master, found_inf, a, b, arg_to_check=0)
        self._raise(found_inf)

    # --- copies -------------------------------------------------------------------------------------------------------

    _SAVED = ("dynamic", "_loss_scale", "_min_loss_scale", "_max_loss_scale", "_scale_seq_len", "_unskipped")

    def __getstate__(self) -> dict[str, Any]:
        """apex's attributes as numbers. A host sync."""
        own = {k: v for k, v in vars(self).items() if k not in ("_of", "_flag", "_buf", "_sticky")}
        saved = {name: getattr(self, name) for name in self._SAVED}
        return {**own, **saved, "_has_overflow": bool(self._has_overflow), "_scale_factor": self._of.growth_factor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also reads apex's pickles, early ones included. The copy has its own scale."""
        state = {k: v for k, v in state.items() if k != "_overflow_buf"}
        LossScaler.__init__(
            self,
            DYNAMIC if state.pop("dynamic") else state["_loss_scale"],
            scale_factor=state.pop("_scale_factor", 2.0),
            scale_window=state.pop("_scale_seq_len", 2000),
            min_loss_scale=state.pop("_min_loss_scale", None),
            max_loss_scale=state.pop("_max_loss_scale", 2.0**24),
        )
        self._loss_scale = state.pop("_loss_scale")
        for name, value in state.items():
            setattr(self, name, value)


__all__ = ["LossScaler"]
