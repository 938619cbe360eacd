"""The private methods and the stash that apex adds to an optimizer.

They are views on its ``OptimizerBinding``, which holds the optimizer weakly. Copies and pickles of the optimizer drop
them.

Loops that re-implement ``scale_loss`` use the same code: prepare opens an accumulation window (``ampctx.spi``), post
closes it, and its ``found_inf`` flag waits for ``scaler.update_scale()``, as with ``delay_overflow_check``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from ampctx_apex.install import at_uninstall
from torch import Tensor

from ampctx import AmpError, AmpTypeError, spi
from ampctx.foreach import Factor
from ampctx.spi import LOW_PRECISION, LossScale, OptimizerBinding, Undo

from .scaler import LossScaler

Groups = list[list[Tensor]]
# From a master to its parameter in the model.
ModelOf = Mapping[Tensor, Tensor]


def _by_group(chosen: Callable[[Tensor, ModelOf], Tensor | None]) -> Callable[[Groups, ModelOf], Groups]:
    return lambda groups, model_of: [[t for p in g if (t := chosen(p, model_of)) is not None] for g in groups]


def _flat(chosen: Callable[[Tensor, ModelOf], Tensor | None]) -> Callable[[Groups, ModelOf], list[Tensor]]:
    return lambda groups, model_of: [t for group in _by_group(chosen)(groups, model_of) for t in group]


# apex's lists of an optimizer's parameters: those with a master, their masters in the same order, and the trainable
# rest; by param group and in a row. bfloat16 counts as fp16.
_CHOSEN: Mapping[str, Callable[[Tensor, ModelOf], Tensor | None]] = {
    "fp16": lambda p, model_of: model_of.get(p),
    "fp32_from_fp16": lambda p, model_of: p if p in model_of else None,
    "fp32_from_fp32": lambda p, model_of: p if p not in model_of and p.requires_grad else None,
}
WITH_MASTERS: Mapping[str, Callable[[Groups, ModelOf], Any]] = {
    **{f"{name}_groups": _by_group(chosen) for name, chosen in _CHOSEN.items()},
    **{f"all_{name}_params": _flat(chosen) for name, chosen in _CHOSEN.items()},
}
_WITHOUT = {
    "all_fp16_params": _flat(lambda p, _: p if p.dtype in LOW_PRECISION else None),
    "all_fp32_params": _flat(lambda p, _: None if p.dtype in LOW_PRECISION else p),
}


class AmpOptimizerState:
    """``optimizer._amp_stash``: apex's parameter lists, computed from the optimizer's groups on each read.

    They cannot be assigned; other names can.

    ``lazy_init_called``: True, because ``initialize`` creates masters.
    ``params_have_scaled_gradients``: whether delayed blocks left scaled gradients. A loop that delays by itself assigns
    True after its backward.
    ``already_patched``: whether the next step will be skipped, by the checks so far. A host sync. An assigned value is
    read back, but does not change the step.
    """

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

    def _lists(self) -> Mapping[str, Callable[[Groups, ModelOf], Any]]:
        if vars(self).get("_of") is None:
            return {}
        return WITH_MASTERS if self._binding.masters.master_weights else _WITHOUT

    def __getattr__(self, name: str) -> Any:
        lists = self._lists()
        if name in lists:
            return lists[name](self._groups(), self._binding.masters.model_of)
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
        return self._binding.loss_scales[0].factors(self._device(), fresh=False)[1]

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
        found_inf = spi.close_window(self._binding, scale.factors(self._device(), fresh=False)[1])
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
    methods: list[Callable[..., None]] = [stash._lazy_init, stash._lazy_init, stash._prepare, stash._post]
    if binding.masters.master_weights:
        methods.append(binding.masters.copy_to_model)
    optimizer._amp_stash = stash
    for name, method in zip(_STAMPS[1:], methods):  # noqa: B905 - the last needs master weights
        setattr(optimizer, name, _plain(method))
    stash.of_amp = True


def _plain(method: Callable[..., None]) -> Callable[..., None]:
    """``method`` as a function with the mark by which copies of the optimizer leave it behind."""

    def call(*args: Any) -> None:
        method(*args)

    call.of_amp = True  # type: ignore[attr-defined]
    return call


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
