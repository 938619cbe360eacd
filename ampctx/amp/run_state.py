"""Saves, checks and loads the state of amp that a bit-for-bit resume needs besides model and optimizers.

    {"loss_scaler0": ..., "opt_level": "O2", "deferred": {loss id: overflowed}, "optimizers": [one, ...]}

    {"params": how many, "names": [one for each], "masters": {i: fp32 tensor}, "overflows": {loss id: overflowed},
     "scales": {loss id: the factor of the loss},
     "loss_scales": [...],      only for an optimizer of an earlier initialize
     "gradients": {...}}        only with grads=True

``i`` is the index of a parameter in the optimizer, as in its own state dict. Tensors are those of the run. The rest is
numbers and plain dicts, so that ``torch.load(weights_only=True)`` reads it.

Counts of skipped steps are not saved: no result depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ampctx._errors import AmpKeyError, AmpTypeError, AmpValueError
from ampctx.amp.binding import OptimizerBinding
from ampctx.casts.model_watch import PLACE
from ampctx.kernels.foreach import Factor, PerDevice
from ampctx.masters.gradients import NOTHING_PENDING, Grads, Lazy, Pending, Window
from ampctx.scaling.device_skips import Flags
from ampctx.scaling.formats import KEY, read_amp_entries
from ampctx.scaling.guarded_step import OUTSIDE_OF_BLOCKS
from ampctx.scaling.loss_scale import LossScale, check_scale

Deferred = MutableMapping[LossScale, Tensor]
State = dict[str, Any]


# --- saving -----------------------------------------------------------------------------------------------------------


def saved(
    bindings: list[OptimizerBinding],
    loss_scales: list[LossScale],
    deferred: Deferred,
    opt_level: str,
    grads: bool,
    call: str,
) -> State:
    """The entries besides those of the loss scales. Changes nothing, except that it resyncs masters from the model.

    Raises:
        AmpError: inside a scale_loss block, or between ``first_step`` and ``second_step``; with ``grads``, incomplete
            gradients after an exception.

    Host sync: reads flags.
    """
    for binding in bindings:
        binding.refuse("save gradients" if grads else "save", call)
    return {
        "opt_level": opt_level,
        "deferred": _deferred_of(loss_scales, deferred),
        "optimizers": [_saved_optimizer(binding, loss_scales, deferred, grads) for binding in bindings],
    }


def saved_optimizer(binding: OptimizerBinding, deferred: Deferred) -> State:
    """What ``saved`` has for one optimizer, with its loss scales and without gradients. Host sync."""
    binding.refuse("save", "saving the state")
    return _saved_optimizer(binding, [], deferred, False)


def load_optimizer(state: State, binding: OptimizerBinding, deferred: Deferred) -> None:
    """Loads the result of ``saved_optimizer``, of this process or another one."""
    binding.refuse("load", "loading the state")
    _Loader(state, binding, "state", True).load(deferred)


def drops_gradients(binding: OptimizerBinding) -> bool:
    """Whether there seem to be gradients that the next step uses."""
    pending = binding.gradients.pending()
    if pending.masters or pending.lazy is not None or pending.window is not None:
        return True
    return bool(pending.model and binding.flags.by_loss)


def _params(binding: OptimizerBinding) -> list[Tensor]:
    """The parameters that the optimizer steps, in order."""
    return [p for group in binding.optimizer.param_groups for p in group["params"]]


def _deferred_of(scales: list[LossScale], deferred: Deferred) -> dict[int, bool]:
    return {i: _is_set(deferred[scale]) for i, scale in enumerate(scales) if scale in deferred}


def _is_set(flag: Tensor) -> bool:
    return flag.item() != 0


def _saved_optimizer(binding: OptimizerBinding, loss_scales: list[LossScale], deferred: Deferred, grads: bool) -> State:
    binding.masters.add_unfrozen(binding.optimizer)
    binding.masters.resync()
    params = _params(binding)
    state: State = {
        "params": len(params),
        "names": binding.names(),
        "masters": {i: p.detach() for i, p in enumerate(params) if p in binding.masters.model_of},
        "overflows": {loss_id: _is_set(flag) for loss_id, (_, flag) in binding.flags.by_loss.items()},
        "scales": {loss_id: _value(factor) for loss_id, factor in binding.flags.scales_used.items()},
    }
    if binding.loss_scales is not loss_scales:
        state["loss_scales"] = {
            **{f"{KEY}{i}": scale.state_dict() for i, scale in enumerate(binding.loss_scales)},
            "deferred": _deferred_of(binding.loss_scales, deferred),
        }
    if grads:
        state["gradients"] = _saved_gradients(binding, params)
    return state


def _saved_gradients(binding: OptimizerBinding, params: list[Tensor]) -> State:
    model_of = binding.masters.model_of
    place = {p: i for i, p in enumerate(params)} | {model_of[p]: i for i, p in enumerate(params) if p in model_of}

    def placed(grads: Grads) -> dict[int, Tensor]:
        return {place[p]: grad.detach() for p, grad in grads.items() if p in place}

    pending = binding.gradients.pending()
    state: State = {
        "model": placed(pending.model),
        "masters": placed(pending.masters),
        "waiting": None,
        "window": None,
        "left": binding.gradients.stepped,
    }
    if pending.lazy is not None:
        grads, inv_scale, norm = pending.lazy
        state["waiting"] = {"grads": placed(grads), "inv_scale": _number(inv_scale), "norm": norm}
    if (window := pending.window) is not None:
        factor = window.inv_scale
        loss_id, scale = window.loss
        # None if this is the current scale: the next block of the window then does not rescale it.
        current = scale.is_identity or (scale.scale is not None and factor is scale.inv_scale())
        state["window"] = {
            "loss_id": loss_id,
            "inv_scale": None if current else _number(factor),
            "before": placed(window.stash),
            "scaled": [place[p] for p in window.scaled if p in place],
        }
    return state


def _value(factor: Factor) -> float:
    return factor.value.item() if isinstance(factor, PerDevice) else factor


def _number(factor: Factor) -> float | Tensor:
    return factor.value if isinstance(factor, PerDevice) else factor


# --- loading ----------------------------------------------------------------------------------------------------------


def loader(
    state: Mapping[str, Any],
    bindings: list[OptimizerBinding],
    loss_scales: list[LossScale],
    deferred: Deferred,
    opt_level: str,
    call: str,
) -> Callable[[], None]:
    """Checks the result of ``saved`` against the run. Returns the function that loads it, after the loss scales.

    Loading sets the model's weights to the rounded masters. It replaces gradients by those of the checkpoint, or drops
    them if it has none.

    Raises:
        AmpError: inside a scale_loss block. AmpKeyError, AmpTypeError, AmpValueError: an entry that does not fit, by
            its key. Nothing has changed then.
    """
    for binding in bindings:
        binding.refuse("load", call)
    if (theirs := entry(state, "opt_level", str, "state_dict")) != opt_level:
        raise AmpValueError(
            f'state_dict["opt_level"] is {theirs!r}, and amp.initialize was given opt_level={opt_level!r}. To continue '
            'at another level, load only the model, the optimizer and the loss scales (the "loss_scaler..." entries).'
        )
    if (n := len(read_amp_entries(state))) != len(loss_scales):
        raise AmpValueError(f"state_dict has {n} loss scales, and num_losses={len(loss_scales)} was given.")
    flags = _flags(state, "deferred", "state_dict", range(len(loss_scales)))
    optimizers = entry(state, "optimizers", list, "state_dict")
    if len(optimizers) != len(bindings):
        raise AmpValueError(
            f'state_dict["optimizers"] has {len(optimizers)} entries, and {len(bindings)} optimizers are under amp. '
            "Pass the optimizers of the run that was saved to amp.initialize."
        )
    loaders = [
        _Loader(entry, binding, f'state_dict["optimizers"][{i}]', binding.loss_scales is not loss_scales)
        for i, (entry, binding) in enumerate(zip(optimizers, bindings, strict=True))
    ]

    def load() -> None:
        _defer(loss_scales, flags, deferred)
        for each in loaders:
            each.load(deferred)

    return load


def _defer(scales: list[LossScale], flags: dict[int, bool], deferred: Deferred) -> None:
    for i, scale in enumerate(scales):
        deferred.pop(scale, None)
        if i in flags:
            deferred[scale] = _flag(flags[i], scale, torch.device("cpu"))


def _flag(value: bool, scale: LossScale, device: torch.device) -> Tensor:
    at = device if scale.scale is None else scale.scale.device
    return torch.full((), float(value), dtype=torch.float32, device=at)


class _Loader:
    """The state of one optimizer: the constructor checks it, ``load`` loads it."""

    def __init__(self, state: Any, binding: OptimizerBinding, where: str, own_scales: bool) -> None:
        self._binding = binding
        typed(state, Mapping, where)
        # No resync from the model: ``load`` sets the masters, and they must not change if a check fails.
        binding.masters.add_unfrozen(binding.optimizer)
        self._params = params = _params(binding)
        self._model = [binding.masters.model_of.get(p, p) for p in params]
        if (n := entry(state, "params", int, where)) != len(params):
            raise AmpValueError(f'{where}["params"] is {n}, and the optimizer has {len(params)} parameters')
        self._check_names(state, where)
        self._masters = self._checked_masters(state, where)
        scales = binding.loss_scales
        self._scales_used = self._checked_scales_used(state, where)
        self._overflows = _flags(state, "overflows", where, range(OUTSIDE_OF_BLOCKS, len(scales)))
        self._scales: dict[int, State] = {}
        self._deferred: dict[int, bool] = {}
        if own_scales:
            entries = entry(state, "loss_scales", Mapping, where)
            self._scales = read_amp_entries(entries)
            if self._scales.keys() != set(range(len(scales))):
                raise AmpValueError(
                    f'{where}["loss_scales"] has {len(self._scales)} loss scales, expected {len(scales)}'
                )
            self._deferred = _flags(entries, "deferred", f'{where}["loss_scales"]', range(len(scales)))
        gradients = state.get("gradients")
        self._gradients = None if gradients is None else self._checked_gradients(gradients, f'{where}["gradients"]')

    # --- checks -------------------------------------------------------------------------------------------------------

    def _check_names(self, state: Mapping[str, Any], where: str) -> None:
        """Compares names: masters are saved by index, and shapes alone do not show a changed order."""
        if "names" not in state:
            return
        here, there = self._binding.names(), entry(state, "names", list, where)
        for i, (name, saved) in enumerate(zip(here, there, strict=False)):
            if name != saved and not any(str(n).startswith(PLACE) for n in (name, saved)):
                raise AmpValueError(
                    f'{where}["names"][{i}] is {saved!r}, and that parameter is {name!r} here. Pass models and '
                    "optimizers to amp.initialize in the order of the run that was saved. If parameters were only "
                    f'renamed, delete {where}["names"].'
                )

    def _checked_scales_used(self, state: Mapping[str, Any], where: str) -> dict[int, float]:
        used = entry(state, "scales", Mapping, where)
        inside = f'{where}["scales"]'
        for loss_id, value in used.items():
            if not _is_place(loss_id, len(self._binding.loss_scales)):
                raise AmpKeyError(
                    f"{inside} has {loss_id!r}, expected loss ids from 0 to {len(self._binding.loss_scales) - 1}"
                )
            check_scale(f"{inside}[{loss_id}]", value)
        return dict(used)

    def _checked_masters(self, state: Mapping[str, Any], where: str) -> dict[int, Tensor]:
        where_masters = f'{where}["masters"]'
        saved = self._tensors(entry(state, "masters", Mapping, where), self._params, where_masters, dense=True)
        here = {i for i, p in enumerate(self._params) if p in self._binding.masters.model_of}
        if more := sorted(saved.keys() - here):
            raise AmpValueError(
                f"{where_masters}[{more[0]}] is a master weight, and that parameter has none here. It is frozen, or "
                "not in 16 bits. Pass amp.initialize the same keep_fp32 as in the run that was saved, and unfreeze the "
                "same parameters."
            )
        if missing := sorted(here - saved.keys()):
            raise AmpKeyError(
                f"{where_masters} has no {missing[0]}, the master weight of a parameter of shape "
                f"{tuple(self._params[missing[0]].shape)}. If it was frozen in the run that was saved, load first and "
                "unfreeze it then. Pass amp.initialize the same keep_fp32 as in that run."
            )
        return saved

    def _tensors(self, state: Any, like: list[Tensor], where: str, dense: bool = False) -> dict[int, Tensor]:
        """Checks tensors by index against the shapes and dtypes of ``like``. ``dense``: refuse sparse ones."""
        typed(state, Mapping, where)
        for i, value in state.items():
            if not _is_place(i, len(like)):
                raise AmpKeyError(f"{where} has {i!r}, and the optimizer has parameters 0 to {len(like) - 1}")
            typed(value, Tensor, f"{where}[{i}]")
            if value.shape != like[i].shape or value.dtype != like[i].dtype:
                raise AmpValueError(
                    f"{where}[{i}] is of shape {tuple(value.shape)} and {value.dtype}, expected "
                    f"{tuple(like[i].shape)} and {like[i].dtype}"
                )
            if value.is_meta or value.layout not in ((torch.strided,) if dense else (torch.strided, torch.sparse_coo)):
                kind = "on the meta device, without values" if value.is_meta else f"of layout {value.layout}"
                raise AmpValueError(f"{where}[{i}] is {kind}, expected a dense tensor")
        return dict(state)

    def _checked_gradients(self, state: Any, where: str) -> State:
        typed(state, Mapping, where)
        result = dict(state)
        for name, like in (("model", self._model), ("masters", self._params)):
            tensors = self._tensors(entry(state, name, Mapping, where), like, f'{where}["{name}"]')
            result[name] = tensors
        self._have_masters(result["masters"], f'{where}["masters"]')
        if (waiting := entry(state, "waiting", (Mapping, type(None)), where)) is not None:
            inside = f'{where}["waiting"]'
            grads = entry(waiting, "grads", Mapping, inside)
            grads = self._tensors(grads, self._model, f'{inside}["grads"]', dense=True)
            self._have_masters(grads, f'{inside}["grads"]')
            if not self._binding.masters.lazy:
                raise AmpValueError(
                    f"{inside}: {type(self._binding.optimizer).__name__} does not read 16-bit gradients"
                )
            inv_scale = _number_in(waiting, "inv_scale", (float, Tensor), inside)
            norm = _number_in(waiting, "norm", Tensor, inside)
            # Clipping multiplies both by one number, which is 0 or nan if the norm was not finite.
            if inv_scale < 0 or (not (inv_scale > 0 and inv_scale < math.inf) and math.isfinite(norm) and norm != 0):
                raise AmpValueError(f'{inside}["inv_scale"] is {inv_scale} for gradients with a norm of {norm}')
        entry(state, "left", bool, where)
        # Required: without it, scaled gradients would count as unscaled.
        if (window := entry(state, "window", (Mapping, type(None)), where)) is not None:
            self._check_window(window, f'{where}["window"]')
        return result

    def _check_window(self, window: Any, where: str) -> None:
        loss_id = entry(window, "loss_id", int, where)
        if not 0 <= loss_id < len(self._binding.loss_scales):
            raise AmpValueError(
                f'{where}["loss_id"] is {loss_id}, there are {len(self._binding.loss_scales)} loss scales'
            )
        if entry(window, "inv_scale", (float, Tensor, type(None)), where) is not None:
            inv_scale = _number_in(window, "inv_scale", (float, Tensor), where)
            if not 0 < inv_scale < math.inf:
                raise AmpValueError(f'{where}["inv_scale"] is {inv_scale}, expected a number > 0 and finite')
        self._tensors(entry(window, "before", Mapping, where), self._model, f'{where}["before"]')
        for i in entry(window, "scaled", list, where):
            if not _is_place(i, len(self._params)):
                raise AmpKeyError(f'{where}["scaled"] has {i!r}, and the optimizer has {len(self._params)} parameters')

    def _have_masters(self, grads: Mapping[int, Tensor], where: str) -> None:
        for i in grads:
            if self._params[i] not in self._binding.masters.model_of:
                raise AmpValueError(
                    f"{where}[{i}] is the gradient of a master weight, and that parameter has none here"
                )

    # --- effects ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, deferred: Deferred) -> None:
        binding = self._binding
        scales = binding.loss_scales
        for i, entry in self._scales.items():
            scales[i].load_state_dict(entry)
        if self._scales:
            _defer(scales, self._deferred, deferred)
        binding.masters.begin_writing()
        for i, value in self._masters.items():
            self._params[i].copy_(value)
        # Makes both agree, so that no resync uses the model's former values.
        binding.masters.copy_to_model()
        binding.masters.restored()
        device = self._params[0].device if self._params else torch.device("cpu")
        flags: Flags = {}
        for loss_id, overflowed in self._overflows.items():
            scale = scales[max(loss_id, 0)]  # OUTSIDE_OF_BLOCKS uses the first scale
            flags[loss_id] = (scale, _flag(overflowed, scale, device))
        stepped = self._gradients is not None and self._gradients["left"]
        binding.restore(self._pending(), flags, dict(self._scales_used), stepped)

    def _pending(self) -> Pending:
        state, params, model = self._gradients, self._params, self._model
        if state is None:
            return NOTHING_PENDING
        lazy = window = None
        if (w := state.get("waiting")) is not None:
            grads = _copies(w["grads"], model)
            device = model[next(iter(grads))].device if grads else torch.device("cpu")
            norm = w["norm"].to(device, copy=True)
            lazy = Lazy({params[i]: g for i, g in grads.items()}, _factor(w["inv_scale"], device), norm)
        if (w := state.get("window")) is not None:
            scaled = [model[i] for i in w["scaled"]]
            window = Window(
                {model[i]: g for i, g in _copies(w["before"], model).items()},
                self._inv_scale(w, scaled[0].device if scaled else torch.device("cpu")),
                scaled,
                (w["loss_id"], self._binding.loss_scales[w["loss_id"]]),
            )
        return Pending(
            {model[i]: g for i, g in _copies(state["model"], model).items()},
            {params[i]: g for i, g in _copies(state["masters"], params).items()},
            lazy,
            window,
        )

    def _inv_scale(self, window: Mapping[str, Any], device: torch.device) -> Factor:
        scale = self._binding.loss_scales[window["loss_id"]]
        if window["inv_scale"] is not None:
            return _factor(window["inv_scale"], device)
        if scale.is_identity:
            return 1.0
        scale.scale_on(device)
        return scale.inv_scale()


def _copies(grads: Mapping[int, Tensor], at: list[Tensor]) -> dict[int, Tensor]:
    return {i: grad.detach().to(at[i].device, copy=True) for i, grad in grads.items()}


def _factor(value: float | Tensor, device: torch.device) -> Factor:
    return PerDevice(value.to(device, copy=True)) if isinstance(value, Tensor) else value


# --- entries ----------------------------------------------------------------------------------------------------------


def typed(value: Any, kind: type | tuple[type, ...], where: str) -> None:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join("dict" if k is Mapping else "None" if k is type(None) else k.__name__ for k in kinds)
        raise AmpTypeError(f"{where} must be a {expected}, got {type(value).__name__}")


def entry(state: Mapping[str, Any], key: str, kind: type | tuple[type, ...], where: str) -> Any:
    if key not in state:
        raise AmpKeyError(f'{where} has no "{key}", only {", ".join(map(str, state)) or "nothing"}')
    typed(state[key], kind, f'{where}["{key}"]')
    return state[key]


def _flags(state: Mapping[str, Any], key: str, where: str, ids: range) -> dict[int, bool]:
    flags = entry(state, key, Mapping, where)
    for loss_id, value in flags.items():
        if not isinstance(loss_id, int) or loss_id not in ids:
            raise AmpKeyError(f'{where}["{key}"] has {loss_id!r}, expected loss ids from {ids[0]} to {ids[-1]}')
        typed(value, bool, f'{where}["{key}"][{loss_id}]')
    return dict(flags)


def _is_place(i: Any, n: int) -> bool:
    return isinstance(i, int) and not isinstance(i, bool) and 0 <= i < n


def _number_in(state: Mapping[str, Any], key: str, kind: type | tuple[type, ...], where: str) -> float:
    """The value of a float or a 0-d fp32 tensor. Host sync."""
    value = entry(state, key, kind, where)
    if isinstance(value, Tensor):
        fits = value.dim() == 0 and value.dtype == torch.float32 and value.layout == torch.strided
        if not fits or value.is_meta:
            raise AmpValueError(
                f'{where}["{key}"] is a tensor of shape {tuple(value.shape)} and {value.dtype} on {value.device}, '
                "expected a number or one of shape () and torch.float32"
            )
        return value.item()
    return float(value)
