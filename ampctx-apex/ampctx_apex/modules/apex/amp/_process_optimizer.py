"""apex.amp._process_optimizer: functions that call the methods ``views.stash`` adds to an optimizer."""

from __future__ import annotations

from typing import Any

from ampctx_apex.install import refused
from ampctx_apex.views.stash import AmpOptimizerState

from ._amp_state import _amp_state, maybe_print


def _master_params_to_model_params(self: Any) -> None:
    self._master_params_to_model_params()


def _amp_lazy_init(self: Any) -> None:
    self._amp_lazy_init()


def _lazy_init(self: Any) -> None:
    self._lazy_init_maybe_master_weights()


def _prepare(self: Any) -> None:
    self._prepare_amp_backward()


def _post(self: Any, scaler: Any) -> None:
    self._post_amp_backward(scaler)


lazy_init_with_master_weights = lazy_init_no_master_weights = _lazy_init
prepare_backward_with_master_weights = prepare_backward_no_master_weights = _prepare
prepare_backward_with_master_weights_FusedSGD = prepare_backward_no_master_weights_FusedSGD = _prepare
post_backward_with_master_weights = post_backward_no_master_weights = _post
post_backward_with_master_weights_FusedSGD = post_backward_no_master_weights_FusedSGD = _post
post_backward_models_are_masters = refused("apex.amp._process_optimizer.post_backward_models_are_masters")
_process_optimizer = refused("apex.amp._process_optimizer._process_optimizer")

__all__ = [
    "AmpOptimizerState",
    "_amp_lazy_init",
    "_amp_state",
    "_master_params_to_model_params",
    "_process_optimizer",
    "lazy_init_no_master_weights",
    "lazy_init_with_master_weights",
    "maybe_print",
    "post_backward_models_are_masters",
    "post_backward_no_master_weights",
    "post_backward_no_master_weights_FusedSGD",
    "post_backward_with_master_weights",
    "post_backward_with_master_weights_FusedSGD",
    "prepare_backward_no_master_weights",
    "prepare_backward_no_master_weights_FusedSGD",
    "prepare_backward_with_master_weights",
    "prepare_backward_with_master_weights_FusedSGD",
]
