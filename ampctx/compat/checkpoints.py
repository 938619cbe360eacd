"""Whole training checkpoints, as scripts around apex and torch.amp lay them out: read into a run, and written.

    {"model": ..., "optimizer": ..., "amp": amp.state_dict(), "master params": [...], "epoch": ...}

Which entry is which part is told by its name and by what it looks like; ``keys`` says it where that does not do.
The formats of the loss scales alone: ``to_amp_state``, ``to_grad_scaler_state``.
"""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampctx import AmpError, AmpSession, AmpTypeError, AmpValueError, amp
from ampctx.compat import doors
from ampctx.compat import fp16_optimizer_state as fp16
from ampctx.compat.checkpoint_layout import Parts, is_tensors, read
from ampctx.compat.doors import (
    FusedOptimizer,
    MasterParams,
    is_grad_scaler_state,
    read_amp_entries,
    read_grad_scaler_state,
    to_amp_state,
    to_grad_scaler_state,
)
from ampctx.compat.optimizer_checks import check_container, check_contents


class Loaded(NamedTuple):
    """What ``load_checkpoint`` did.

    ``found``: for each part that was loaded ("model", "optimizer", "loss_scale", "masters") the key it came from.
    ``unused``: the other entries of the checkpoint: epochs, LR schedulers, random states.
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
    """Loads a training checkpoint of apex, torch.amp or ampctx into a running session: after ``amp.initialize``.

    First the model (fp32 masters follow its weights), then the optimizer, whose state stays in fp32, then the loss
    scales; then fp32 masters, where the checkpoint has any, replace those that followed, and model weights are these
    masters rounded. When something does not fit, an error says what, and everything is as it was (but for the extra
    state of a module that has ``set_extra_state``).

    Args:
        checkpoint: a dict, or the path of a file, which is read with ``weights_only=True`` to the CPU (scaler objects
            of apex's FP16_Optimizer are understood without apex). A state dict of a model alone will do too.
        model: the model or a list of models. Every key has to fit; "module." (DistributedDataParallel) and "_orig_mod."
            (torch.compile) in front of all names may be there or not, on either side.
        optimizer: the optimizer or a list of them, of ``ampctx.optimizers``, torch or others. A checkpoint of apex's
            optimizer of the same name loads into ours; steps that apex counted by group go to the parameters for
            torch's. What ``FP16_Optimizer.state_dict()`` of apex gave, in any version, is taken apart.
        scaler: what takes the loss scales: ``ampctx.amp``, an ``AmpSession``, or a GradScaler of torch or of ours. They
            go with the optimizer: without one, or with None here, they are among what was not used.
        keys: the entries to use for "model", "optimizer", "loss_scale" or "masters", where their names are unusual or
            several could be meant: a key, one within an entry ("meta.scale"), or for a list of models a list of keys.

    Returns:
        ``Loaded(found, unused)``. A checkpoint need not have loss scales or masters: ``found`` tells.

    Raises:
        AmpKeyError: the checkpoint has no model or no optimizer, and one was given.
        AmpValueError: several entries could be meant; lists, masters or parameter groups of another number or shape.
        AmpTypeError: an entry is something else than ``keys``, or a name that one part alone has ("amp", "master
            params"), says. None, and for loss scales an option such as ``True``, is no entry; an empty loss scale, as
            one that is disabled saves, is logged and left.
        AmpKeyError, AmpTypeError, AmpValueError: an optimizer's state that is not made as torch makes them, or lacks an
            option or one of two moments; an option, count or tensor in it that cannot be used: by name.
        AmpError: torch's reason why the model's state does not fit; a file that needs other classes; and whatever the
            optimizer's and the scaler's ``load_state_dict`` raise.

    Waits for the device.
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
        model, optimizer: one, or a list of them, whose states become a list. None is left out.
        scaler: where the loss scales come from: ``ampctx.amp``, an ``AmpSession``, or a GradScaler of torch or of ours.
            None, or one that is disabled: none are written.
        scaler_format: "apex" writes ``amp.state_dict()`` to "amp"; "torch", for one loss scale, a GradScaler's state to
            "scaler".

    Returns:
        ``{"model", "optimizer", "amp" or "scaler", "master params"}``: the model's weights in fp32 (at O2 and O5 the
        masters), and where amp keeps fp32 masters for the optimizer, these: a run resumes from it bit for bit.
        Tensors are shared with the run, as in any ``state_dict()``: save, or copy, before the next step.

    Raises:
        AmpValueError: another ``scaler_format``; "torch" with several loss scales.

    Waits for the device.
    """
    if scaler_format not in ("apex", "torch"):
        raise AmpValueError(f'scaler_format is {scaler_format!r}, expected "apex" or "torch"')
    result: dict[str, Any] = {}
    optimizers = _as_list(optimizer)
    # Before the model's weights are read: it settles what was loaded into them.
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
    if any(doors.masters_in(session, o) for o in optimizers):
        result["master params"] = _alike(optimizer, masters)
    return result


# --- one or several ------------------------------------------------------------------------------------------------


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _entry(parts: Parts, part: str, several: Sequence[Any], i: int) -> str:
    """How messages call one of the states of a part."""
    return f"the checkpoint's {parts.found[part]!r}" + (f"[{i}]" if len(several) > 1 else "")


def _alike(given: Any, values: list[Any]) -> Any:
    return values if isinstance(given, (list, tuple)) else values[0]


# --- the model --------------------------------------------------------------------------------------------------------

_WRAPPERS = ("module.", "_orig_mod.")


def _wrapped_in(names: Iterable[str]) -> str:
    """The names of wrappers that all names begin with: "", "module.", "module._orig_mod." ..."""
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
        # The versions of modules, by which these read older formats: torch carries them on an attribute of the dict.
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
    """Copies every weight, master and buffer; returns what puts them back."""
    tensors = (*model.parameters(), *model.buffers(), *doors.masters_of(model))
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
    """Raises on groups of another number or size before anything is loaded; torch does so for the last of several."""
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
    """The state in the form that the optimizer's own ``load_state_dict`` takes."""
    if flat:
        state = fp16.unflattened(state, optimizer.param_groups)
    check_contents(optimizer, _inside(optimizer), state)
    if isinstance(_inside(optimizer), FusedOptimizer) or not any("step" in group for group in state["param_groups"]):
        return state
    result = {**state, "param_groups": [], "state": dict(state["state"])}
    for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        if not group.get("bias_correction", True) and "bias_correction" not in own:
            name = type(_inside(optimizer)).__name__
            raise AmpValueError(f"the checkpoint's optimizer had bias_correction=False, and {name} always corrects")
        result["param_groups"].append({k: v for k, v in group.items() if k != "step" or "step" in own})
        for key in group["params"]:
            if key in state["state"] and "step" in group:
                step = torch.tensor(float(group["step"]), dtype=torch.float32)
                result["state"][key] = {"step": step, **state["state"][key]}
    return result


def _restoring_optimizer(optimizer: Any) -> Callable[[], None]:
    # load_state_dict replaces state tensors, and changes at most those in the groups (an lr) in place.
    state = optimizer.state_dict()
    former = {**state, "param_groups": copy.deepcopy(state["param_groups"])}
    return lambda: optimizer.load_state_dict(former)


# --- loss scales ------------------------------------------------------------------------------------------------------


def _scales_of(parts: Parts, saved: list[fp16.Saved]) -> Any:
    """The state of the loss scales; None where there is none."""
    state = parts.get("loss_scale")
    entries = [s.scale for s in saved if s.scale is not None]
    if state is None and entries:
        parts.found["loss_scale"] = parts.found["optimizer"]
        # FP16_Optimizer keeps a scale for each optimizer, amp one for each loss.
        return {f"loss_scaler{i}": entry for i, entry in enumerate(entries)}
    return state


def _scale_loader(scaler: Any, state: Any) -> Callable[[], None]:
    """What loads the state, which is checked now as far as it can be without the scaler."""
    if is_grad_scaler_state(state):
        read_grad_scaler_state(state)
    else:
        read_amp_entries(state)
        if isinstance(scaler, torch.amp.GradScaler) and not isinstance(scaler, amp.GradScaler):
            state = to_grad_scaler_state(state)
    return lambda: scaler.load_state_dict(state)


# --- masters ----------------------------------------------------------------------------------------------------------


def _session(scaler: Any) -> AmpSession:
    return scaler if isinstance(scaler, AmpSession) else doors.session


def _masters_of(
    parts: Parts, saved: list[fp16.Saved], optimizers: list[Any], session: AmpSession
) -> list[list[tuple[Tensor, Tensor]]]:
    """For each optimizer the parameters that it steps with their values in the checkpoint; [] where it has none."""
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
        masters = doors.masters_in(session, optimizer)
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
    """The parameters of a group with what FP16_Optimizer saved of them: all, or those that were fp16."""
    if isinstance(values, Tensor):
        return _paired(params, fp16.split(values, params, "fp32_groups_flat"), "fp32_groups_flat")
    if len(values) == len(params):
        return _paired(params, values, "fp32_groups")
    with_master = [p for p in params if masters is not None and p in masters.model_of]
    if len(values) != len(with_master):
        raise AmpValueError(
            f"FP16_Optimizer saved {len(values)} masters, of the {len(params)} parameters of a group, and "
            f"{len(with_master)} have one here: resume at opt_level='O2', or take the masters out of the checkpoint, "
            "and the model's weights count"
        )
    return _paired(with_master, values, "fp32_from_fp16")


@torch.no_grad()
def _load_masters(session: AmpSession, optimizer: Any, pairs: list[tuple[Tensor, Tensor]]) -> None:
    if not pairs:
        return
    masters = doors.masters_in(session, optimizer)
    if masters is not None:
        masters.begin_writing()
    for p, value in pairs:
        p.copy_(value)
    # Where both agree, no master follows what was loaded into the model before.
    if masters is not None:
        masters.copy_to_model()
