"""apex.amp._amp_state: apex's global state, as a view on the default session of ``ampctx.amp``.

``_amp_state``, the instance, takes the place of this module among the attributes of ``apex.amp``, as in apex.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence
from typing import Any

from ampctx import AmpError, AmpTypeError, spi
from ampctx.spi import LossScale, is_rank_zero, session

from .frontend import LiveOptions, Properties
from .handle import Handle
from .scaler import LossScaler, delegated


class _LossScalers(MutableSequence):
    """The session's ``loss_scales`` as ``LossScaler`` views. Optimizers share the list and use assigned scalers."""

    def _scales(self, scalers: Iterable[Any]) -> list[LossScale]:
        scales = [getattr(scaler, "_of", None) for scaler in scalers]
        if not all(isinstance(scale, LossScale) for scale in scales):
            raise AmpTypeError("loss_scalers takes apex.amp.scaler.LossScaler objects only")
        return scales  # type: ignore[return-value]

    def __getitem__(self, i: Any) -> Any:
        found = session.loss_scales[i]
        return [LossScaler.of(scale) for scale in found] if isinstance(i, slice) else LossScaler.of(found)

    def __setitem__(self, i: Any, value: Any) -> None:
        session.loss_scales[i] = self._scales(value) if isinstance(i, slice) else self._scales([value])[0]

    def __delitem__(self, i: Any) -> None:
        del session.loss_scales[i]

    def __len__(self) -> int:
        return len(session.loss_scales)

    def insert(self, i: int, value: LossScaler) -> None:
        session.loss_scales[i:i] = self._scales([value])

    def __repr__(self) -> str:
        return repr(list(self))


class AmpState:
    """apex's global state: the results of ``amp.initialize``, and settings that clients assign, with any others."""

    def __init__(self) -> None:
        self._properties: Properties | None = None
        self._handle: Handle | None = None

    _session = session
    verbosity = delegated("_session", "verbosity")
    allow_incoming_model_not_fp32 = delegated("_session", "allow_incoming_model_not_fp32")

    @property
    def _amp_state(self) -> AmpState:
        """Itself: ``import apex.amp._amp_state as m`` gives the instance, and code goes on with ``m._amp_state``."""
        return self

    @property
    def opt_properties(self) -> Properties:
        """The options in force. AttributeError before ``initialize``."""
        if session.policy is None:
            raise AttributeError("_amp_state has no opt_properties: amp is not initialized")
        if self._properties is None:
            self._properties = Properties(LiveOptions(session))
        return self._properties

    @property
    def loss_scalers(self) -> MutableSequence[LossScaler]:
        """One ``LossScaler`` per loss of the latest ``initialize``. AttributeError before it."""
        if not session.loss_scales:
            raise AttributeError("_amp_state has no loss_scalers: amp is not initialized")
        return _LossScalers()

    @loss_scalers.setter
    def loss_scalers(self, scalers: Iterable[LossScaler]) -> None:
        session.loss_scales[:] = _LossScalers()._scales(scalers)  # in place: optimizers share the list

    @property
    def handle(self) -> Handle:
        """The casts of ``amp.init`` or of O1 and O4, the latest that are on. AttributeError without any."""
        autocast = spi.active_casts()
        if autocast is None:
            self._handle = None
            raise AttributeError("_amp_state has no handle: neither amp.init nor opt_level O1 or O4 switched on casts")
        if self._handle is None or self._handle.autocast is not autocast:
            self._handle = Handle(autocast)
        return self._handle


_amp_state = AmpState()


def warn_or_err(msg: str) -> None:
    raise AmpError(msg)


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Prints if verbosity > 0; with ``rank0`` only on rank 0."""
    if session.verbosity > 0 and (is_rank_zero() or not rank0):
        print(msg)


__all__ = ["AmpState", "_amp_state", "maybe_print", "warn_or_err"]
