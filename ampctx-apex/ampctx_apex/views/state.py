"""apex's ``_amp_state`` as a view on the default session of ``ampctx.amp``."""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence
from typing import Any

from ampctx import AmpTypeError, spi
from ampctx.spi import LossScale, session
from ampctx_apex.views import messages
from ampctx_apex.views.handle import AmpHandle
from ampctx_apex.views.options import LiveOptions, Properties
from ampctx_apex.views.scaler import LossScaler


class _LossScalers(MutableSequence):
    """The session's ``loss_scales`` as ``LossScaler`` views. Optimizers share the list and use assigned scalers."""

    def _scales(self, scalers: Iterable[Any]) -> list[LossScale]:
        scales = [getattr(scaler, "_of", None) for scaler in scalers]
        if not all(isinstance(scale, LossScale) for scale in scales):
            raise AmpTypeError("loss_scalers takes apex.amp.scaler.LossScaler objects only")
        return scales  # type: ignore[return-value]

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [LossScaler.of(scale) for scale in session.loss_scales[i]]
        return LossScaler.of(session.loss_scales[i])

    def __setitem__(self, i: Any, value: Any) -> None:
        if isinstance(i, slice):
            session.loss_scales[i] = self._scales(value)
        else:
            (session.loss_scales[i],) = self._scales([value])

    def __delitem__(self, i: Any) -> None:
        del session.loss_scales[i]

    def __len__(self) -> int:
        return len(session.loss_scales)

    def insert(self, i: int, value: LossScaler) -> None:
        session.loss_scales[i:i] = self._scales([value])

    def __repr__(self) -> str:
        return repr(list(self))


def _bound(name: str) -> property:
    """A bound of the loss scales, or None."""
    absent = f"_amp_state has no {name}: amp is not initialized"

    def get(self: AmpState) -> float | None:
        if not session.loss_scales:
            raise AttributeError(absent)
        return getattr(self.loss_scalers[0], f"_{name}")

    def put(self: AmpState, value: float | None) -> None:
        if not session.loss_scales:
            raise AttributeError(absent)
        for scaler in self.loss_scalers:
            setattr(scaler, f"_{name}", value)

    return property(get, put)


class AmpState:
    """apex's global state: the results of ``amp.initialize``, and settings that clients assign.

    ``hard_override``: whether ``warn_or_err`` and assignments to ``opt_properties`` print instead of raising.
    Attributes of other names can be set freely.
    """

    __module__ = "apex.amp._amp_state"

    def __init__(self) -> None:
        self._properties: Properties | None = None
        self._handle: AmpHandle | None = None

    @property
    def _amp_state(self) -> AmpState:
        """Itself: ``import apex.amp._amp_state as m`` gives the instance, and code goes on with ``m._amp_state``."""
        return self

    @property
    def hard_override(self) -> bool:
        return messages.hard_override

    @hard_override.setter
    def hard_override(self, value: bool) -> None:
        messages.hard_override = value

    @property
    def verbosity(self) -> int:
        return session.verbosity

    @verbosity.setter
    def verbosity(self, value: int) -> None:
        session.verbosity = value

    @property
    def allow_incoming_model_not_fp32(self) -> bool:
        return session.allow_incoming_model_not_fp32

    @allow_incoming_model_not_fp32.setter
    def allow_incoming_model_not_fp32(self, value: bool) -> None:
        session.allow_incoming_model_not_fp32 = value

    @property
    def opt_properties(self) -> Properties:
        """The options in force. AttributeError before ``initialize``."""
        if session.policy is None:
            raise AttributeError("_amp_state has no opt_properties: amp is not initialized")
        if self._properties is None:
            self._properties = Properties()
            self._properties.options = LiveOptions(session)
        return self._properties

    @property
    def loss_scalers(self) -> MutableSequence[LossScaler]:
        """One ``LossScaler`` per loss of the latest ``initialize``. AttributeError before it."""
        if not session.loss_scales:
            raise AttributeError("_amp_state has no loss_scalers: amp is not initialized")
        return _LossScalers()

    @loss_scalers.setter
    def loss_scalers(self, scalers: Iterable[LossScaler]) -> None:
        scales = _LossScalers()._scales(scalers)
        session.loss_scales[:] = scales  # in place: optimizers share the list

    min_loss_scale = _bound("min_loss_scale")
    max_loss_scale = _bound("max_loss_scale")

    @property
    def handle(self) -> AmpHandle:
        """The casts of ``amp.init`` or of O1 and O4, the latest that are on. AttributeError without any."""
        autocast = spi.active_casts()
        if autocast is None:
            self._handle = None
            raise AttributeError(
                "_amp_state has no handle: neither amp.init nor an opt_level O1 or O4 switched on casts"
            )
        if self._handle is None or not self._handle.is_over(autocast):
            self._handle = AmpHandle._over(autocast)
        return self._handle


_amp_state = AmpState()
