"""The state of amp in checkpoints: loss scales in apex's format, and what a bit-for-bit resume needs besides.

    {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, "loss_scaler1": ...}

    with masters also {"format": 1, "opt_level": "O2", "optimizers": [one, ...]}

    one: {"params": how many, "names": [one for each], "masters": {i: fp32 tensor}, "loss_scales": those of an earlier
          initialize}

``i`` is the index of a parameter in the optimizer, as in its own state dict. Tensors are those of the run. The rest is
numbers and plain dicts, so that ``torch.load(weights_only=True)`` reads it. It has nothing of gradients that no step
has used, nor of their overflows: a run that resumes repeats their blocks.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ampctx._collectives import check_process_group
from ampctx._errors import AmpError, AmpKeyError, AmpValueError, warn
from ampctx._saved import FORMAT, check_format, check_known, entry, typed
from ampctx.amp import ranks
from ampctx.amp.step import OptimizerBinding
from ampctx.casts.arguments import autocast_off
from ampctx.casts.model_watch import PLACE
from ampctx.kernels.tensor_loops import stored_grad
from ampctx.scaling import loss_scale
from ampctx.scaling.loss_scale import FACTORS, KEY, RUN_KEYS, LossScale, read_amp_entries

logger = logging.getLogger("ampctx")

State = dict[str, Any]
Loader = Callable[[], None]
_OF_OPTIMIZERS = ("params", "names", "masters", "loss_scales")


def policy_of(session: Any, call: str) -> Any:
    if session.policy is None:
        raise AmpError(
            f"{call} was called before amp.initialize. Call amp.initialize first, with the options of the run that was "
            "saved. See `ampctx explain internal-amp-state`."
        )
    return session.policy


# --- saving -----------------------------------------------------------------------------------------------------------


def state_dict(session: Any, destination: dict[str, Any] | None = None, *, masters: bool = False) -> dict[str, Any]:
    """Returns the loss scales in apex's format, on request with masters. Host sync.

    ``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}``; empty if amp is not initialized or not enabled.
    After ``optimizer.step()``, this and the states of model and optimizers resume a run bit for bit. Tensors are shared
    with the run, as in any ``state_dict()``: save or copy them before the next step.

    Args:
        destination: a dict to fill and return. None: a new one.
        masters: add the fp32 masters, which ``model.state_dict()`` holds, too. apex cannot load these.

    Raises:
        AmpError: ``masters`` between SAM's ``first_step`` and ``second_step``.
    """
    result = OrderedDict() if destination is None else destination
    if session.policy is None or not session.policy.enabled:
        return result
    run = saved(session, list(session._bindings.values()), "amp.state_dict(masters=True)") if masters else {}
    result.update({f"{KEY}{i}": scale.state_dict() for i, scale in enumerate(session.loss_scales)})
    result.update(run)
    return result


def saved(session: Any, bindings: list[OptimizerBinding], call: str) -> State:
    """The entries besides those of the loss scales, inside a scale_loss block, too. Host sync for scales of an earlier
    ``initialize``. AmpError between ``first_step`` and ``second_step``."""
    for binding in bindings:
        binding.refuse_to_save(call)
    scales = session.loss_scales
    optimizers, are_lost = list[State](), False
    for binding in bindings:
        binding.follow_groups()
        masters, params, of = binding.masters, binding.params(), binding.masters.model_of
        values = masters.values()
        # Gradients that the next step uses, as it seems.
        are_lost |= not binding.gradients.is_idle or masters.place.pending is not None
        are_lost |= any(stored_grad(m) is not None for m in masters.masters)
        are_lost |= bool(binding.flags.by_loss) and any(p.grad is not None for p in masters.leaves)
        exact = {i: values[of[p]] for i, p in enumerate(params) if p in of}
        optimizers.append({"params": len(params), "names": binding.names(), "masters": exact})
        if (own := binding.loss_scales) is not scales:
            optimizers[-1]["loss_scales"] = {f"{KEY}{i}": scale.state_dict() for i, scale in enumerate(own)}
    if are_lost:
        warn(f"{call}: gradients that no step has used are not in the state. Save after optimizer.step().")
    level = session.policy.opt_level
    return {"format": FORMAT, "opt_level": level, "optimizers": optimizers}


# --- loading ----------------------------------------------------------------------------------------------------------


@autocast_off()
def load_state_dict(session: Any, state_dict: dict[str, Any], *, process_group: Any = None) -> None:
    """Loads a ``state_dict()`` of ampctx or apex. An invalid one raises and changes nothing. May be a host sync.

    A state with masters sets the masters, and the model's weights to the rounded masters. It drops gradients. Load
    model, optimizers and amp in any order. Without masters in the state, they come from ``model.load_state_dict``; if
    that loaded only 16-bit values, ampctx warns once.

    A number of entries other than ``num_losses`` gives a warning; scales without an entry stay. A static scale takes
    the loaded value and keeps it, as in apex, with a warning. A no-op with ``enabled=False``.

    With one loss scale, the state of a GradScaler (torch's or ours) loads, too: its scale and its count of clean steps.
    apex's format has no growth factors and intervals; a warning names those that differ.

    Args:
        state_dict: a dict of ``amp.state_dict()``, or of one GradScaler.
        process_group: the ranks that must have the same loss scales after the load; ``dist.group.WORLD`` for all. Each
            of them must make this call. Host sync. None: no check, see ``check_ranks``.

    Raises:
        AmpKeyError, AmpTypeError, AmpValueError: an entry that is missing, unknown, out of range or does not fit the
            run; the state of a GradScaler for several scales.
        AmpError: before ``initialize``; a state with masters inside a scale_loss block.
        AmpRankError: the loss scales that were loaded differ between the ranks of ``process_group``.
    """
    check_process_group(process_group)
    call = "amp.load_state_dict"
    if policy_of(session, call).enabled:
        for load in loaders(session, state_dict, list(session._bindings.values()), call):
            load()
        ranks.check_scales(session, process_group, call)


def loaders(session: Any, state: Any, bindings: list[OptimizerBinding], call: str) -> list[Loader]:
    """Checks a state against the run. Returns functions that load it, in order."""
    scales: list[LossScale] = session.loss_scales
    if isinstance(state, Mapping) and not loss_scale.is_grad_scaler_state(state):
        check_format(state, "state_dict", [*RUN_KEYS, *(key for key in state if str(key).startswith(KEY))])
    if loss_scale.is_grad_scaler_state(state) and not loss_scale.is_amp_state(state):
        state = _of_grad_scaler(scales, state)
    entries = read_amp_entries(state)
    if state.keys().isdisjoint(RUN_KEYS):
        return [_scales_loader(session, scales, entries, call), partial(tell_of_lost_masters, session)]
    for binding in bindings:
        binding.refuse_to_restore(call)
    if (theirs := entry(state, "opt_level", str, "state_dict")) != (level := session.policy.opt_level):
        raise AmpValueError(
            f'state_dict["opt_level"] is {theirs!r}, and amp.initialize was given opt_level={level!r}. To continue '
            'at another level, load only the model, the optimizer and the loss scales (the "loss_scaler..." entries).'
        )
    found = [_scales_loader(session, scales, entries, call, state, "state_dict")]
    optimizers = entry(state, "optimizers", list, "state_dict")
    if len(optimizers) != len(bindings):
        raise AmpValueError(
            f'state_dict["optimizers"] has {len(optimizers)} entries, and {len(bindings)} optimizers are under amp. '
            "Pass the optimizers of the run that was saved to amp.initialize."
        )
    for i, (each, binding) in enumerate(zip(optimizers, bindings, strict=True)):
        where = f'state_dict["optimizers"][{i}]'
        typed(each, dict, where)
        if binding.loss_scales is not scales:
            own, inside = entry(each, "loss_scales", dict, where), f'{where}["loss_scales"]'
            found.append(_scales_loader(session, binding.loss_scales, read_amp_entries(own), call, own, inside))
        found.append(_optimizer_loader(each, binding, where))
    return found


def _of_grad_scaler(scales: Sequence[LossScale], state: Any) -> State:
    if (n := len(scales)) != 1:
        raise AmpValueError(
            f"amp.load_state_dict: the state of a GradScaler holds one loss scale, and num_losses={n} was given to "
            f"amp.initialize. To start all from it, load ampctx_apex.checkpoints.to_amp_state(state, num_losses={n})."
        )
    there, here = loss_scale.read_grad_scaler_state(state), scales[0]
    pairs = [(name, there[name], getattr(here, name)) for name in (*FACTORS, "growth_interval")]
    left_out = [f"{name}={saved} (here {now})" for name, saved, now in pairs if saved != now]
    if left_out and here.dynamic:
        logger.warning("amp.load_state_dict: not loaded from the state of a GradScaler: %s.", ", ".join(left_out))
    return {f"{KEY}0": {"loss_scale": there["scale"], "unskipped": there["_growth_tracker"]}}


def _scales_loader(
    session: Any, scales: list[LossScale], entries: dict[int, State], call: str, run: Any = None, where: str = ""
) -> Loader:
    """``run``: the dict of the entries, if it is of a run. It has as many."""
    if run is not None and len(entries) != len(scales):
        raise AmpValueError(f"{where} has {len(entries)} loss scales, and num_losses={len(scales)} was given.")

    def load() -> None:
        if len(entries) != len(scales):
            logger.warning("state_dict contains %d entries, while %d loss_scalers are used", len(entries), len(scales))
        for i, scale in enumerate(scales):
            if run is not None:
                session._deferred.pop(scale, None)
            if i in entries:
                if not scale.moves and (new := entries[i]["loss_scale"]) != (now := scale.value()):
                    text = "%s: loss scaler %d is static. It goes from %s to the checkpoint's %s and stays."
                    logger.warning(text, call, i, now, new)
                scale.load_state_dict(entries[i])

    return load


def tell_of_lost_masters(session: Any, may_wait: bool = True) -> None:
    """Warns once if neither amp's checkpoint nor the model's had fp32 masters. The model may be loaded later, so the
    next block checks again, without a host sync."""
    if session._lacks_masters is None:  # has been told
        return
    session._lacks_masters = may_wait
    found = [binding.masters for binding in session._bindings.values() if binding.masters.pairs]
    if any(m.are_rounded() for m in found if may_wait or all(master.is_cpu for _, master in m.pairs)):
        session._lacks_masters = None
        warn(
            "amp.load_state_dict: the checkpoint has no fp32 master weights, neither in the model's state nor in "
            "amp's. They start from the rounded 16-bit weights. Save model.state_dict() of the model that went "
            "through amp.initialize: it contains the masters."
        )


def _optimizer_loader(state: State, binding: OptimizerBinding, where: str) -> Loader:
    check_known(state, where, _OF_OPTIMIZERS)
    # No resync from the model: loading sets the masters, and they must not change if a check fails.
    binding.follow_groups()
    params = binding.params()
    if (n := entry(state, "params", int, where)) != len(params):
        raise AmpValueError(f'{where}["params"] is {n}, and the optimizer has {len(params)} parameters')
    # Masters are saved by index, and shapes alone do not show a changed order.
    names = entry(state, "names", list, where) if "names" in state else []
    for i, (name, saved) in enumerate(zip(binding.names(), names, strict=False)):
        if name != saved and not any(str(n).startswith(PLACE) for n in (name, saved)):
            raise AmpValueError(
                f'{where}["names"][{i}] is {saved!r}, and that parameter is {name!r} here. Pass models and optimizers '
                "to amp.initialize in the order of the run that was saved. If parameters were only renamed, delete "
                f'{where}["names"].'
            )
    masters, inside = entry(state, "masters", dict, where), f'{where}["masters"]'
    if unknown := [i for i in masters if not isinstance(i, int) or isinstance(i, bool) or i not in range(len(params))]:
        raise AmpKeyError(f"{inside} has {unknown[0]!r}, expected ids from 0 to {len(params) - 1}")
    for i, p in enumerate(params):
        if (i in masters) != (p in binding.masters.model_of):
            has, here = ("", "none") if i in masters else (" no", "one")
            raise AmpKeyError(
                f"{inside} has{has} {i}, and that parameter of shape {tuple(p.shape)} has {here} here. Pass "
                "amp.initialize the same keep_fp32 as in the run that was saved, and load with the same ones frozen."
            )
        if i in masters:
            checked(masters[i], p.shape, f"{inside}[{i}]", p.dtype)

    @torch.no_grad()
    def load() -> None:
        binding.masters.begin()
        for i, value in masters.items():
            params[i].copy_(value)
        # Makes both agree, so that no resync uses the model's former values.
        binding.masters.copy_to_model()
        binding.masters.unsure = binding.masters.were_restored = True
        binding.restore()

    return load


def checked(value: Any, shape: torch.Size, where: str, dtype: torch.dtype | None = None) -> None:
    """Checks for a tensor of that shape. With ``dtype``: of it, and dense."""
    typed(value, Tensor, where)
    if value.shape != shape or dtype not in (None, value.dtype):
        has, needs = f"{tuple(value.shape)} and {value.dtype}", f"{tuple(shape)} and {dtype or 'any dtype'}"
        raise AmpValueError(f"{where} is of shape {has}, expected {needs}")
    if value.is_meta or (dtype is not None and value.layout is not torch.strided):
        raise AmpValueError(f"{where} is {value.layout} on {value.device}, expected a dense tensor with values")
