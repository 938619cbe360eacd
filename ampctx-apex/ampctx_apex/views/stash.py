"""The private methods and the stash that apex adds to an optimizer.

They are views on its ``OptimizerBinding``, which holds the optimizer weakly. Copies and pickles of the optimizer drop
them.

Loops that re-implement ``scale_loss`` use the same code: prepare opens an accumulation window (``compat.doors``), post
closes it, and its ``found_inf`` flag waits for ``scaler.update_scale()``, as with ``delay_overflow_check``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ampctx import AmpError, AmpTypeError, spi
from ampctx.foreach import Factor
from ampctx.multi_tensor_apply import multi_tensor_l2norm, multi_tensor_scale
from ampctx.spi import LOW_PRECISION, LossScale, OptimizerBinding, Undo
from ampctx_apex.install import at_uninstall
from ampctx_apex.views.groups import (
    Groups,
    ModelOf,
    flat,
    fp16_groups,
    fp32_from_fp16_groups,
    fp32_from_fp32_groups,
)
from ampctx_apex.views.scaler import LossScaler

_Params = Callable[["AmpOptimizerState"], Any]


def _by_group(lists: Callable[[Groups, ModelOf], Groups]) -> _Params:
    return lambda stash: lists(stash._groups(), stash._binding.masters.model_of)


def _flat(by_group: _Params) -> _Params:
    return lambda stash: flat(by_group(stash))


def _of_dtype(low: bool) -> _Params:
    return lambda stash: [p for p in flat(stash._groups()) if (p.dtype in LOW_PRECISION) == low]


def _stashed(params: _Params) -> _Params:
    return lambda stash: [spi.stashed_grads(stash._binding).get(p) for p in params(stash)]


_Lists = dict[str, _Params]
_fp16_groups, _fp32_from_fp16_groups, _fp32_from_fp32_groups = map(
    _by_group, (fp16_groups, fp32_from_fp16_groups, fp32_from_fp32_groups)
)

_WITH_MASTERS: _Lists = {
    "fp16_groups": _fp16_groups,
    "fp32_from_fp16_groups": _fp32_from_fp16_groups,
    "fp32_from_fp32_groups": _fp32_from_fp32_groups,
    "all_fp16_params": _flat(_fp16_groups),
    "all_fp32_from_fp16_params": _flat(_fp32_from_fp16_groups),
    "all_fp32_from_fp32_params": _flat(_fp32_from_fp32_groups),
    "all_fp16_grad_stash": _stashed(_flat(_fp16_groups)),
    "all_fp32_from_fp32_grad_stash": _stashed(_flat(_fp32_from_fp32_groups)),
}
_WITHOUT: _Lists = {
    "all_fp16_params": _of_dtype(True),
    "all_fp32_params": _of_dtype(False),
    "all_fp16_grad_stash": _stashed(_of_dtype(True)),
    "all_fp32_grad_stash": _stashed(_of_dtype(False)),
}


class AmpOptimizerState:
    """``optimizer._amp_stash``: apex's parameter lists, computed from the optimizer's groups on each read.

    Each read gives a new list of the same parameters; bfloat16 counts as fp16. ``_WITH_MASTERS`` or ``_WITHOUT`` names
    the lists; assigning one raises. Other names can be set freely.

    ``lazy_init_called``: True, because ``initialize`` creates masters.
    ``params_have_scaled_gradients``: whether delayed blocks left scaled gradients. A loop that delays by itself assigns
    True after its backward.
    ``already_patched``: whether the next step will be skipped, by the checks so far. A host sync. An assigned value is
    read back, but does not change the step.
    ``multi_tensor_scale``, ``multi_tensor_l2norm``, ``dummy_overflow_buf``: for ``multi_tensor_applier``.
    """

    __module__ = "apex.amp._process_optimizer"

    multi_tensor_scale = staticmethod(multi_tensor_scale)
    multi_tensor_l2norm = staticmethod(multi_tensor_l2norm)

    def __init__(self, binding: OptimizerBinding | None = None) -> None:
        self._of = binding
        self._patched = False
        # The accumulation window that prepare opened.
        self._prepared: weakref.ref[Any] | None = None
        self.lazy_init_called = binding is not None

    @property
    def _binding(self) -> OptimizerBinding:
        if self._of is None:
            raise AttributeError("this _amp_stash belongs to no optimizer")
        return self._of

    def _groups(self) -> Groups:
        optimizer = self._binding.optimizer
        return [] if optimizer is None else [group["params"] for group in optimizer.param_groups]

    def _lists(self) -> _Lists:
        if vars(self).get("_of") is None:
            return {}
        return _WITH_MASTERS if self._binding.masters.master_weights else _WITHOUT

    def __getattr__(self, name: str) -> Any:
        lists = self._lists()
        if name in lists:
            return lists[name](self)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._lists():
            raise AttributeError(f"{name} is computed from optimizer.param_groups and cannot be assigned")
        super().__setattr__(name, value)

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *self._lists()]

    def __reduce__(self) -> Any:
        return AmpOptimizerState, ()

    def _device(self) -> torch.device:
        return next((p.device for group in self._groups() for p in group), torch.device("cpu"))

    @property
    def dummy_overflow_buf(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int32, device=self._device())

    @property
    def already_patched(self) -> bool:
        return self._patched or spi.will_skip(self._binding)

    @already_patched.setter
    def already_patched(self, value: bool) -> None:
        self._patched = bool(value)

    @property
    def params_have_scaled_gradients(self) -> bool:
        return spi.window(self._binding) is not None and not self._is_prepared()

    @params_have_scaled_gradients.setter
    def params_have_scaled_gradients(self, value: bool) -> None:
        if spi.in_block(self._binding):
            raise AmpError(
                "params_have_scaled_gradients was assigned inside a scale_loss block. Assign it after the block."
            )
        if value:
            spi.declare_scaled(self._binding, self._assumed_inv_scale())
        elif spi.window(self._binding) is not None:
            spi.close_window(self._binding, 1.0)
        self._prepared = None

    def _is_prepared(self) -> bool:
        """Between prepare and post."""
        return self._prepared is not None and self._prepared() is spi.window(self._binding) is not None

    # --- the methods on the optimizer ---------------------------------------------------------------------------------

    def _assumed_inv_scale(self) -> Factor:
        """1 / scale of the first loss: the default divisor of a step."""
        return self._inv_scale(self._binding.loss_scales[0])

    def _inv_scale(self, scale: LossScale) -> Factor:
        if scale.is_identity:
            return 1.0
        scale.scale_on(self._device())
        return scale.inv_scale()

    def _refuse_in_block(self, name: str) -> None:
        if spi.in_block(self._binding):
            raise AmpError(f"optimizer.{name}() was called inside a scale_loss block, which calls it already")

    def _lazy_init(self) -> None:
        spi.refresh(self._binding)

    def _prepare(self) -> None:
        self._refuse_in_block("_prepare_amp_backward")
        if self._is_prepared():
            spi.drop_window(self._binding)  # an exception interrupted the window
        if spi.window(self._binding) is None:
            self._prepared = weakref.ref(spi.open_window(self._binding, self._assumed_inv_scale()))

    def _post(self, scaler: Any) -> None:
        self._refuse_in_block("_post_amp_backward")
        scale = getattr(scaler, "_of", None)
        if not isinstance(scale, LossScale):
            raise AmpTypeError(
                "_post_amp_backward takes an apex.amp.scaler.LossScaler, such as amp._amp_state.loss_scalers[0], got "
                f"{type(scaler).__name__}"
            )
        found_inf = spi.close_window(self._binding, self._inv_scale(scale))
        self._prepared = None
        device = next(iter(found_inf.per_device), self._device())
        spi.conclude(self._binding, scale, found_inf.joined(device))


# The attributes that apex sets on optimizers; the last one only with master weights.
_STAMPS = (
    "_amp_stash",
    "_lazy_init_maybe_master_weights",
    "_amp_lazy_init",
    "_prepare_amp_backward",
    "_post_amp_backward",
    "_master_params_to_model_params",
)


def _stamp(optimizer: Any, binding: OptimizerBinding) -> None:
    # None of these may refer to the optimizer: a reference cycle would keep it alive.
    stash = AmpOptimizerState(binding)
    for scale in binding.loss_scales:
        LossScaler.of(scale)  # there from the first check on

    def _lazy_init_maybe_master_weights() -> None:
        stash._lazy_init()

    def _amp_lazy_init() -> None:
        stash._lazy_init()

    def _prepare_amp_backward() -> None:
        stash._prepare()

    def _post_amp_backward(scaler: Any) -> None:
        stash._post(scaler)

    def _master_params_to_model_params() -> None:
        binding.masters.copy_to_model()

    values: list[Any] = [
        stash,
        _lazy_init_maybe_master_weights,
        _amp_lazy_init,
        _prepare_amp_backward,
        _post_amp_backward,
        *([_master_params_to_model_params] if binding.masters.master_weights else []),
    ]
    for name, value in zip(_STAMPS, values):  # noqa: B905 - the last needs master weights
        value.of_amp = True
        setattr(optimizer, name, value)


def _unstamp(optimizers: Iterable[Any]) -> None:
    for optimizer in optimizers:
        attributes = {} if optimizer is None else vars(optimizer)
        if isinstance(attributes.get("_amp_stash"), AmpOptimizerState):
            for name in _STAMPS:
                attributes.pop(name, None)


def stamp(bound: Mapping[Any, OptimizerBinding]) -> Undo:
    """Sets apex's attributes on optimizers. The undo removes them and may run more than once."""
    for optimizer, binding in bound.items():
        _stamp(optimizer, binding)
    references = [weakref.ref(optimizer) for optimizer in bound]

    def undo() -> None:
        _unstamp([reference() for reference in references])

    return undo


def watch_default_session() -> None:
    """Stamps the optimizers of the default session, now and at every ``initialize``, until ``uninstall_apex``."""
    if spi.watch_optimizers(stamp):
        at_uninstall(lambda: _unstamp(spi.unwatch_optimizers(stamp)))
