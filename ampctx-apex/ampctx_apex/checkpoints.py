"""Reads and writes whole training checkpoints in the layouts of apex and torch.amp scripts.

    {"model": ..., "optimizer": ..., "amp": amp.state_dict(), "master params": [...], "epoch": ...}

Entries are recognized by name and form; ``keys`` names unusual ones. ``to_amp_state`` and ``to_grad_scaler_state``
convert loss scales alone.
"""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampctx import AmpError, AmpSession, AmpTypeError, AmpValueError, amp, spi
from ampctx.spi import (
    FusedOptimizer,
    MasterParams,
    is_grad_scaler_state,
    read_amp_entries,
    read_grad_scaler_state,
    to_amp_state,
    to_grad_scaler_state,
)
from ampctx_apex import fp16_optimizer_state as fp16
from ampctx_apex.checkpoint_layout import Parts, is_tensors, read
from ampctx_apex.optimizer_checks import check_container, check_contents


class Loaded(NamedTuple):
    """The result of ``load_checkpoint``.

    ``found``: the key of each loaded part ("model", "optimizer", "loss_scale", "masters").
    ``unused``: the checkpoint's other entries, such as epochs, LR schedulers and random states.
    """

    found: dict[str, str]
    unused: dict[str, Any]


# --- public -----------------------------------------------------------------------------------------------------------


def load_checkpoint(
    checkpoint: Mapping[str, Any] | str | os.PathLike[str],
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Any = None,
    *,
    scaler: Any = amp,
    keys: Mapping[str, str | Sequence[str]] | None = None,
) -> Loaded:
    """Loads a training checkpoint of apex, torch.amp or ampctx. Call it after ``amp.initialize``.

    Loads the model, the optimizer (its state stays fp32), the loss scales and the fp32 masters, which override the
    model's rounded weights. On an error nothing has changed, except the state of modules with ``set_extra_state``.

    Args:
        checkpoint: a dict, a model's state dict, or a path, which is read to the CPU with ``weights_only=True``.
        model: a model or a list of them. A "module." or "_orig_mod." prefix of all names may differ.
        optimizer: an optimizer or a list of them, of ampctx, torch or others. Reads apex's optimizer of the same name,
            and ``FP16_Optimizer.state_dict()`` of any version.
        scaler: receives the loss scales: ``ampctx.amp`` (default), an ``AmpSession``, or a GradScaler. With None, or
            without an optimizer, they stay in ``unused``.
        keys: the entries for "model", "optimizer", "loss_scale" or "masters", if names are unusual or ambiguous: a key,
            a dotted key ("meta.scale"), or a list of keys for several models.

    Returns:
        ``Loaded(found, unused)``. Loss scales and masters are optional: see ``found``.

    Raises:
        AmpKeyError: the checkpoint lacks the given model or optimizer, or an optimizer state lacks an option or moment.
        AmpValueError: ambiguous entries; a number, size or shape that differs; an invalid value in an optimizer state.
        AmpTypeError: an entry of the wrong form. (None and options such as ``amp=True`` are skipped; an empty loss
            scale is logged and skipped.)
        AmpError: the model state does not fit; the file needs other classes; or ``load_state_dict`` raised it.

    Host sync: yes.

    Example::

        loaded = load_checkpoint("checkpoint.pt", model, optimizer)
        epoch = loaded.unused["epoch"]
    """
    parts = Parts(read(checkpoint), keys or {})
    models, optimizers = _as_list(model), _as_list(optimizer)
    states = parts.states("model", models)
    for i, state in enumerate(states):
        _check_names(state, _entry(parts, "model", states, i))
    saved = [fp16.taken_apart(state) for state in parts.states("optimizer", optimizers)]
    for i, s in enumerate(saved):
        check_container(s.state, _entry(parts, "optimizer", saved, i))
    session = _session(scaler)
    masters = _masters_of(parts, saved, optimizers, session)
    scales = _scales_of(parts, saved) if optimizers and scaler is not None else None
    _check_groups(saved, optimizers)
    adapted = [_adapted(o, s.state, s.flat) for o, s in zip(optimizers, saved, strict=True)]
    load_scales = None if scales is None else _scale_loader(scaler, scales)

    undo: list[Callable[[], None]] = []
    try:
        for m, state in zip(models, states, strict=True):
            undo.append(_restoring_weights(m))
            _load_model(m, state, parts.found["model"])
        for o, state in zip(optimizers, adapted, strict=True):
            undo.append(_restoring_optimizer(o))
            o.load_state_dict(state)
        if load_scales is not None:
            load_scales()
    except BaseException:
        for action in reversed(undo):
            action()
        raise
    for o, pairs in zip(optimizers, masters, strict=True):
        _load_masters(session, o, pairs)
    return Loaded(parts.found, parts.unused())


def checkpoint(model: Any = None, optimizer: Any = None, *, scaler: Any = amp, scaler_format: str = "apex") -> dict:
    """A training checkpoint that ``load_checkpoint``, apex's scripts and plain torch read (``weights_only=True``).

    Args:
        model, optimizer: one, or a list of them, which becomes a list of states. None is left out.
        scaler: the source of the loss scales: ``ampctx.amp`` (default), an ``AmpSession``, or a GradScaler. None or a
            disabled one writes none.
        scaler_format: "apex" writes ``amp.state_dict()`` as "amp"; "torch" writes a GradScaler state as "scaler" and
            needs a single loss scale.

    Returns:
        ``{"model", "optimizer", "amp" or "scaler", "master params"}``. Model weights are fp32 (at O2 and O5 the
        masters); "master params" is there if amp keeps masters. A run resumes from it bit for bit. Tensors are shared
        with the run: save or copy them before the next step.

    Raises:
        AmpValueError: an unknown ``scaler_format``, or "torch" with several loss scales.

    Host sync: yes.
    """
    if scaler_format not in ("apex", "torch"):
        raise AmpValueError(f'scaler_format is {scaler_format!r}, expected "apex" or "torch"')
    result: dict[str, Any] = {}
    optimizers = _as_list(optimizer)
    # Before reading the model's weights: this syncs masters with weights that were loaded into it.
    session = _session(scaler)
    masters = [[p.detach() for p in session.master_params(o)] for o in optimizers]
    if model is not None:
        result["model"] = _alike(model, [m.state_dict() for m in _as_list(model)])
    if optimizer is not None:
        result["optimizer"] = _alike(optimizer, [o.state_dict() for o in optimizers])
    scales = scaler.state_dict() if scaler is not None else {}
    if scales and scaler_format == "apex":
        result["amp"] = to_amp_state(scales) if is_grad_scaler_state(scales) else dict(scales)
    elif scales:
        result["scaler"] = scales if is_grad_scaler_state(scales) else to_grad_scaler_state(scales)
    if any(spi.masters_in(session, o) for o in optimizers):
        result["master params"] = _alike(optimizer, masters)
    return result


# --- one or several ------------------------------------------------------------------------------------------------


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _entry(parts: Parts, part: str, several: Sequence[Any], i: int) -> str:
    """The name of a state in messages."""
    return f"the checkpoint's {parts.found[part]!r}" + (f"[{i}]" if len(several) > 1 else "")


def _alike(given: Any, values: list[Any]) -> Any:
    return values if isinstance(given, (list, tuple)) else values[0]


# --- the model --------------------------------------------------------------------------------------------------------

_WRAPPERS = ("module.", "_orig_mod.")


def _wrapped_in(names: Iterable[str]) -> str:
    """The wrapper prefix of all names: "", "module.", "module._orig_mod." ..."""
    names, prefix = list(names), ""
    while names and (step := next((w for w in _WRAPPERS if all(n.startswith(prefix + w) for n in names)), None)):
        prefix += step
    return prefix


def _check_names(state: Mapping[Any, Any], where: str) -> None:
    for name in state:
        if not isinstance(name, str):
            raise AmpTypeError(f"{where} has the key {name!r}, expected names of parameters and buffers")


def _load_model(model: nn.Module, state: Mapping[str, Any], key: str) -> None:
    own = _wrapped_in(name for named in (model.named_parameters(), model.named_buffers()) for name, _ in named)
    theirs = _wrapped_in(state)
    if own != theirs:
        renamed = OrderedDict((own + name[len(theirs) :], value) for name, value in state.items())
        # torch keeps the modules' format versions in this attribute of the dict.
        metadata = getattr(state, "_metadata", None)
        if metadata is not None:
            cut = len(theirs)
            renamed._metadata = OrderedDict(  # type: ignore[attr-defined]
                ((own + (k + ".")[cut:]).rstrip("."), v) for k, v in metadata.items() if (k + ".").startswith(theirs)
            )
        state = renamed
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise AmpError(f"the checkpoint's {key!r} does not fit the model. {error}") from error


def _restoring_weights(model: nn.Module) -> Callable[[], None]:
    """Copies every weight, master and buffer; returns a function that restores them."""
    tensors = (*model.parameters(), *model.buffers(), *spi.masters_of(model))
    former = [(t, t.detach().clone()) for t in tensors]

    @torch.no_grad()
    def restore() -> None:
        for tensor, value in former:
            tensor.copy_(value)

    return restore


# --- the optimizer ----------------------------------------------------------------------------------------------------


def _inside(optimizer: Any) -> Any:
    return getattr(optimizer, "optim", optimizer)  # what LARC wraps


def _check_groups(saved: list[fp16.Saved], optimizers: list[Any]) -> None:
    """Checks the groups of all optimizers before loading any; torch checks each as it loads."""
    for i, (s, optimizer) in enumerate(zip(saved, optimizers, strict=True)):
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        theirs = [len(group["params"]) for group in s.state["param_groups"]]
        if s.flat:
            theirs = sizes if theirs == [1] * len(sizes) else theirs
        if sizes != theirs:
            raise AmpValueError(
                f"optimizers[{i}] ({type(optimizer).__name__}) has {sizes} parameters in its groups, and the "
                f"checkpoint {theirs}"
            )


def _adapted(optimizer: Any, state: Mapping[str, Any], flat: bool) -> Mapping[str, Any]:
    """The state in the form of the optimizer's ``load_state_dict``."""
    if flat:
        state = fp16.unflattened(state, optimizer.param_groups)
    check_contents(optimizer, _inside(optimizer), state)
    if isinstance(_inside(optimizer), FusedOptimizer) or not any("step" in group for group in state["param_groups"]):
        return state
    result = {**state, "param_groups": [], "state": dict(state["state"])}
    for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        if not group.get("bias_correction", True) and "bias_correction" not in own:
            name = type(_inside(optimizer)).__name__
            raise AmpValueError(f"the checkpoint's optimizer had bias_correction=False, which {name} does not support")
        result["param_groups"].append({k: v for k, v in group.items() if k != "step" or "step" in own})
        for key in group["params"]:
            if key in state["state"] and "step" in group:
                step = torch.tensor(float(group["step"]), dtype=torch.float32)
                result["state"][key] = {"step": step, **state["state"][key]}
    return result


def _restoring_optimizer(optimizer: Any) -> Callable[[], None]:
    # load_state_dict replaces state tensors; only tensors in groups, such as lr, may change in place.
    state = optimizer.state_dict()
    former = {**state, "param_groups": copy.deepcopy(state["param_groups"])}
    return lambda: optimizer.load_state_dict(former)


# --- loss scales ------------------------------------------------------------------------------------------------------


def _scales_of(parts: Parts, saved: list[fp16.Saved]) -> Any:
    """The state of the loss scales, or None."""
    state = parts.get("loss_scale")
    entries = [s.scale for s in saved if s.scale is not None]
    if state is None and entries:
        parts.found["loss_scale"] = parts.found["optimizer"]
        # FP16_Optimizer keeps a scale per optimizer, amp one per loss.
        return {f"loss_scaler{i}": entry for i, entry in enumerate(entries)}
    return state


def _scale_loader(scaler: Any, state: Any) -> Callable[[], None]:
    """A function that loads the state, which is checked now."""
    if is_grad_scaler_state(state):
        read_grad_scaler_state(state)
    else:
        read_amp_entries(state)
        if isinstance(scaler, torch.amp.GradScaler) and not isinstance(scaler, amp.GradScaler):
            state = to_grad_scaler_state(state)
    return lambda: scaler.load_state_dict(state)


# --- masters ----------------------------------------------------------------------------------------------------------


def _session(scaler: Any) -> AmpSession:
    return scaler if isinstance(scaler, AmpSession) else spi.session


def _masters_of(
    parts: Parts, saved: list[fp16.Saved], optimizers: list[Any], session: AmpSession
) -> list[list[tuple[Tensor, Tensor]]]:
    """For each optimizer, its parameters paired with the checkpoint's masters; [] without any."""
    if not optimizers:
        return []
    if (entry := parts.get("masters")) is not None:
        per_optimizer = [entry] if len(optimizers) == 1 and all(isinstance(v, Tensor) for v in entry) else entry
        if len(per_optimizer) != len(optimizers) or not all(map(is_tensors, per_optimizer)):
            raise AmpValueError(
                f"the checkpoint's {parts.found['masters']!r} has {len(per_optimizer)} items, expected a list of "
                f"tensors for each of the {len(optimizers)} optimizers"
            )
        targets = [[p for group in o.param_groups for p in group["params"]] for o in optimizers]
        return [_paired(*both, parts.found["masters"]) for both in zip(targets, per_optimizer, strict=True)]
    result: list[list[tuple[Tensor, Tensor]]] = []
    for s, optimizer in zip(saved, optimizers, strict=True):
        if s.masters is None:
            result.append([])
            continue
        parts.found["masters"] = parts.found["optimizer"]
        if len(s.masters) != len(optimizer.param_groups):
            raise AmpValueError(
                f"FP16_Optimizer saved masters of {len(s.masters)} groups, and the optimizer has "
                f"{len(optimizer.param_groups)}"
            )
        masters = spi.masters_in(session, optimizer)
        both = zip(optimizer.param_groups, s.masters, strict=True)
        result.append([pair for g, values in both for pair in _paired_in_group(g["params"], values, masters)])
    return result


def _paired(params: list[Tensor], values: Sequence[Tensor], where: str) -> list[tuple[Tensor, Tensor]]:
    if len(params) != len(values):
        raise AmpValueError(f"the checkpoint's {where!r} holds {len(values)} tensors for {len(params)} parameters")
    for i, (p, value) in enumerate(zip(params, values, strict=True)):
        if p.shape != value.shape:
            raise AmpValueError(
                f"the checkpoint's {where!r}[{i}] has shape {tuple(value.shape)}, the parameter has {tuple(p.shape)}"
            )
        if not value.is_floating_point():
            raise AmpTypeError(f"the checkpoint's {where!r}[{i}] is {value.dtype}, expected a floating type")
    return list(zip(params, values, strict=True))


def _paired_in_group(params: list[Tensor], values: Any, masters: MasterParams | None) -> list[tuple[Tensor, Tensor]]:
    """A group's parameters paired with FP16_Optimizer's masters: of all, or of the fp16 ones."""
    if isinstance(values, Tensor):
        return _paired(params, fp16.split(values, params, "fp32_groups_flat"), "fp32_groups_flat")
    if len(values) == len(params):
        return _paired(params, values, "fp32_groups")
    with_master = [p for p in params if masters is not None and p in masters.model_of]
    if len(values) != len(with_master):
        raise AmpValueError(
            f"FP16_Optimizer saved {len(values)} masters, of the {len(params)} parameters of a group, and "
            f"{len(with_master)} have one here. Resume at opt_level='O2', or delete the masters from the checkpoint "
            "to use the model's weights."
        )
    return _paired(with_master, values, "fp32_from_fp16")


@torch.no_grad()
def _load_masters(session: AmpSession, optimizer: Any, pairs: list[tuple[Tensor, Tensor]]) -> None:
    if not pairs:
        return
    masters = spi.masters_in(session, optimizer)
    if masters is not None:
        masters.begin_writing()
    for p, value in pairs:
        p.copy_(value)
    # Now both agree, so no master syncs with the weights loaded before.
    if masters is not None:
        masters.copy_to_model()
