"""Saves, checks and loads the state of amp that a bit-for-bit resume needs besides model and optimizers.

    {"loss_scaler0": ..., "opt_level": "O2", "deferred": {loss id: overflowed}, "optimizers": [one, ...]}

    {"params": how many, "names": [one for each], "masters": {i: fp32 tensor}, "overflows": {loss id: overflowed},
     "scales": {loss id: the factor of the loss},
     "loss_scales": [...]}      only for an optimizer of an earlier initialize

``i`` is the index of a parameter in the optimizer, as in its own state dict. Tensors are those of the run. The rest is
numbers and plain dicts, so that ``torch.load(weights_only=True)`` reads it.

Counts of skipped steps are not saved: no result depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ampctx._errors import AmpKeyError, AmpTypeError, AmpValueError
from ampctx.amp.step import OptimizerBinding
from ampctx.casts.model_watch import PLACE
from ampctx.kernels.foreach import Factor, PerDevice
from ampctx.kernels.tensor_loops import stored_grad
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
    call: str,
) -> State:
    """The entries besides those of the loss scales. Changes nothing, except that it resyncs masters from the model.

    Raises:
        AmpError: inside a scale_loss block, or between ``first_step`` and ``second_step``.

    Host sync: reads flags.
    """
    for binding in bindings:
        binding.refuse_state(call, perturbed=True)
    return {
        "opt_level": opt_level,
        "deferred": _deferred_of(loss_scales, deferred),
        "optimizers": [_saved_optimizer(binding, loss_scales, deferred) for binding in bindings],
    }


def drops_gradients(binding: OptimizerBinding) -> bool:
    """Whether there seem to be gradients that the next step uses."""
    gradients = binding.gradients
    if gradients.window is not None or binding.masters.place.pending is not None:
        return True
    if any(stored_grad(master) is not None for master in binding.masters.masters):
        return True
    return bool(binding.flags.by_loss) and any(p.grad is not None for p in binding.masters.leaves)


def _params(binding: OptimizerBinding) -> list[Tensor]:
    """The parameters that the optimizer steps, in order."""
    return [p for group in binding.optimizer.param_groups for p in group["params"]]


def _deferred_of(scales: list[LossScale], deferred: Deferred) -> dict[int, bool]:
    return {i: _is_set(deferred[scale]) for i, scale in enumerate(scales) if scale in deferred}


def _is_set(flag: Tensor) -> bool:
    return flag.item() != 0


def _saved_optimizer(binding: OptimizerBinding, loss_scales: list[LossScale], deferred: Deferred) -> State:
    binding.follow_groups()
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
    return state


def _value(factor: Factor) -> float:
    return factor.value.item() if isinstance(factor, PerDevice) else factor


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

    Loading sets the model's weights to the rounded masters, and drops gradients.

    Raises:
        AmpError: inside a scale_loss block. AmpKeyError, AmpTypeError, AmpValueError: an entry that does not fit, by
            its key. Nothing has changed then.
    """
    for binding in bindings:
        binding.refuse_state(call)
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
        _RunLoader(entry, binding, f'state_dict["optimizers"][{i}]', binding.loss_scales is not loss_scales)
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


_ENTRIES = frozenset({"params", "names", "masters", "overflows", "scales", "loss_scales"})


class _RunLoader:
    """The state of one optimizer: the constructor checks it, ``load`` loads it."""

    def __init__(self, state: Any, binding: OptimizerBinding, where: str, own_scales: bool) -> None:
        self._binding = binding
        typed(state, Mapping, where)
        if unknown := [key for key in state if key not in _ENTRIES]:
            raise AmpKeyError(f'{where} has "{unknown[0]}", which this version of ampctx does not load')
        # No resync from the model: ``load`` sets the masters, and they must not change if a check fails.
        binding.follow_groups()
        self._params = params = _params(binding)
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
        saved = self._tensors(entry(state, "masters", Mapping, where), self._params, where_masters)
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

    def _tensors(self, state: Any, like: list[Tensor], where: str) -> dict[int, Tensor]:
        """Checks tensors by index against the shapes and dtypes of ``like``. Refuses sparse ones."""
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
            if value.is_meta or value.layout is not torch.strided:
                kind = "on the meta device, without values" if value.is_meta else f"of layout {value.layout}"
                raise AmpValueError(f"{where}[{i}] is {kind}, expected a dense tensor")
        return dict(state)

    # --- effects ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, deferred: Deferred) -> None:
        binding = self._binding
        scales = binding.loss_scales
        for i, entry in self._scales.items():
            scales[i].load_state_dict(entry)
        if self._scales:
            _defer(scales, self._deferred, deferred)
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
        binding.restore(flags, dict(self._scales_used))


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
