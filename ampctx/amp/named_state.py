"""The state of a whole run, keyed by names of parameters: for any layout of masters, any engine, any number of ranks.

    {"model": {name: tensor},            fp32 wherever the run has an fp32 weight, in whatever layout
     "optim": {name: {"step": ..., "exp_avg": ...}},
     "compensation": {name: tensor},     only with write_back="kahan"
     "optimizers": {name of its first parameter: (facts,)},
     "amp": {"opt_level": ..., "torch": ..., "ampctx": ..., "deferred": ((loss id, overflowed), ...),
             "loss_scaler0": {"loss_scale": fp64, "unskipped": int64, "dynamic": bool}, ...}}

Masters of ``initialize``, ``master_weights=True``, "split" and fp32 shards are four layouts of the same bits, so each
has the same keys: torch.distributed.checkpoint loads one into another. Names are those of
``torch.distributed.checkpoint.state_dict``. ``run_state`` saves and loads what amp itself keeps.

``facts`` are plain: {"type", "groups": options and names, "layout": {name: layout}, "without_state": names,
"overflows", "scales"}. They are in a tuple, which torch.distributed.checkpoint takes for one value: a dict would have
to have the same keys in a checkpoint and in the run that loads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ampctx._errors import AmpError, AmpKeyError, AmpTypeError
from ampctx.amp.binding import OptimizerBinding
from ampctx.amp.named_entries import (
    FULL,
    ROUNDED,
    Described,
    Stepped,
    amp_entries,
    checked,
    facts_of,
    first_state_of,
    moments_of,
    names_of,
    own,
)
from ampctx.amp.run_state import State, entry, typed
from ampctx.kernels.sharding import grids_of, is_sharded, laid_out_as, reshard_units, steps_a_partition
from ampctx.masters.store import EXTRAS, STORES, joined
from ampctx.optimizers._base import FusedOptimizer
from ampctx.optimizers.larc import LARC
from ampctx.scaling.formats import KEY

logger = logging.getLogger("ampctx")


class NamedModel:
    """A model and its optimizers, by name. ``call``: the public function, for messages.

    Raises:
        AmpTypeError: no module. AmpError: a parameter that the model does not hold, or that two optimizers step; an
            optimizer whose state other ranks have.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        bindings: Sequence[OptimizerBinding | None],
        call: str,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise AmpTypeError(
                f"{call}: model must be a torch.nn.Module, got {type(model).__name__}. Put several models into one "
                "nn.ModuleDict."
            )
        reshard_units(model)
        self.model, self.call = model, call
        self.bindings = [binding for binding in bindings if binding is not None]
        for binding in self.bindings:
            binding.masters.add_unfrozen(binding.optimizer)
        self._params = names_of(model)
        # Several of a tied parameter; the state of its optimizer goes by the first.
        self._names_of: dict[int, list[str]] = {}
        for name, p in self._params.items():
            self._names_of.setdefault(id(p), []).append(name)
        self.optimizers = [self._stepped(*each) for each in zip(optimizers, bindings, strict=True)]
        owner: dict[str, int] = {}
        for number, each in enumerate(self.optimizers):
            if twice := [name for name in each.names if owner.setdefault(name, number) != number]:
                raise AmpError(f"{call}: two optimizers step {twice[0]}. Pass each parameter to one optimizer.")

    def _stepped(self, optimizer: Any, binding: OptimizerBinding | None) -> Stepped:
        if steps_a_partition(optimizer):
            raise AmpError(
                f"{self.call}: each rank of a ZeroRedundancyOptimizer has a part of the state. Use fully_shard, or "
                "optimizer.consolidate_state_dict() and optimizer.state_dict()."
            )
        members = [p for group in optimizer.param_groups for p in group["params"]]
        params = members if binding is None else binding.model_params()
        names = []
        for i, p in enumerate(params):
            if id(p) not in self._names_of:
                raise AmpError(
                    f"{self.call}: the model has no parameter {i} of {type(optimizer).__name__}, of shape "
                    f"{tuple(p.shape)}. Pass the module that holds all parameters; several models in one nn.ModuleDict."
                )
            names.append(self._names_of[id(p)][0])
        inner = optimizer.optim if isinstance(optimizer, LARC) else optimizer
        ids = [key for group in inner.state_dict()["param_groups"] for key in group["params"]]
        return Stepped(inner, binding, ids, names, members, params)

    def _model_state(self) -> State:
        # Imported here, because the import is slow.
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        state: State = get_model_state_dict(self.model)
        for each in self.optimizers:
            if lost := [name for name in each.names if name not in state]:
                raise AmpError(
                    f"{self.call}: the model's state dict has no {lost[0]}, which {type(each.optimizer).__name__} "
                    "steps. Names of the state dict must be those of named_parameters(). For FSDP1 use fully_shard."
                )
        return state

    # --- saving -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def saved(self, amp: State | None) -> State:
        """The tree, with tensors of the run. ``amp``: the result of ``run_state.saved`` and the loss scales, None if
        amp is off."""
        for each in self.optimizers:
            if any(each.layout(i) in EXTRAS for i in range(len(each.names))):
                each.optimizer.masters_follow_model()
        model, optim, compensation, described = self._model_state(), {}, {}, {}
        for number, each in enumerate(self.optimizers):
            without_state = []
            for i, state, is_made_up in self._states(each):
                name, p = each.names[i], each.params[i]
                if moments := moments_of(state):
                    optim[name] = moments
                if is_made_up:
                    without_state.append(name)
                if each.layout(i) not in EXTRAS:
                    continue
                exact = joined(p, state)
                model.update(dict.fromkeys(self._names_of[id(p)], p.detach().float() if exact is None else exact))
                if "compensation" in state:
                    compensation[name] = state["compensation"]
            if each.names:
                of_amp = {} if amp is None else amp["optimizers"][number]
                described[each.names[0]] = (facts_of(each, self._without_state(each, without_state), of_amp),)
        tree: State = {"model": model, "optim": optim, "optimizers": described}
        if compensation:
            tree["compensation"] = compensation
        if amp is not None:
            tree["amp"] = amp_entries(amp)
        return tree

    def _without_state(self, each: Stepped, here: list[str]) -> list[str]:
        """The parameters that no rank has a state of. ``here``: those that this rank has none of, which may differ
        where ranks have parts of a parameter. One all_reduce for them."""
        found = dict.fromkeys(here)
        grids = grids_of(each.members)
        for grid in dict.fromkeys(grids.values()):
            parts = [
                name
                for name, member in zip(each.names, each.members, strict=True)
                if is_sharded(member) and grids.get(member.device_mesh) is grid  # type: ignore[attr-defined]
            ]
            some = torch.tensor([name not in found for name in parts], dtype=torch.float32)
            grid.reduce(some, torch.distributed.ReduceOp.MAX, self.call, f"the state of {len(parts)} parameters")
            for name, has_state in zip(parts, some.tolist(), strict=True):
                if has_state:
                    found.pop(name, None)
        return list(found)

    def _states(self, each: Stepped) -> Iterator[tuple[int, State, bool]]:
        """Place, state, and whether it is made up, which it is where a trainable parameter has none.

        The keys of a tree must not depend on the steps that were taken: torch.distributed.checkpoint loads into a tree
        of the run that resumes, which has taken none.
        """
        found = each.optimizer.state_dict()["state"]
        if unknown := found.keys() - set(each.ids):
            raise AmpError(
                f"{self.call}: {type(each.optimizer).__name__} keeps state[{min(unknown, key=str)!r}], which belongs "
                "to no parameter and has no name here. Save optimizer.state_dict() instead."
            )
        groups = [group for group in each.optimizer.param_groups for _ in group["params"]]
        for i, (key, member, group) in enumerate(zip(each.ids, each.members, groups, strict=True)):
            state = found.get(key, {})
            is_made_up = member.requires_grad and not moments_of(state)
            if is_made_up:
                try:
                    state = {**first_state_of(each.optimizer, group, member), **state}
                except Exception as error:
                    # LBFGS keeps the state of all parameters with the first one.
                    if not found:
                        raise AmpError(
                            f"{self.call}: {type(each.optimizer).__name__} does not show which state it keeps: a step "
                            f"of zeros on a copy of it raised {type(error).__name__}: {error}. Take a step first, or "
                            "save and load optimizer.state_dict()."
                        ) from error
            yield i, state, is_made_up

    # --- loading ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def loader(self, tree: Any, amp_loader: Callable[[State], Callable[[], None]] | None) -> Callable[[], None]:
        """Checks a tree against the run. Returns the function that loads it.

        ``amp_loader`` checks what ``saved`` had from amp, with masters; None if amp is off.

        Raises:
            AmpKeyError, AmpTypeError, AmpValueError: an entry that does not fit, by its key. Nothing has changed then.
        """
        typed(tree, Mapping, "state_dict")
        if not tree:
            raise AmpKeyError(
                "state_dict is empty on this rank. full_state_dict=True with cpu_offload=True gives rank 0 alone the "
                "tensors. Broadcast them, or load the saved file on every rank."
            )
        for key in ("model", "optim", "optimizers", *(["amp"] if amp_loader else [])):
            if key not in tree:
                raise AmpKeyError(
                    f'state_dict has no "{key}", only {", ".join(map(str, tree)) or "nothing"}. Pass what '
                    "amp.get_state_dict() returned, or use amp.Stateful in the dict of dcp.load."
                )
            typed(tree[key], Mapping, f'state_dict["{key}"]')
        weights = self._checked_model(tree["model"])
        saved = Described(tree["optimizers"])
        unknown = tree["optim"].keys() - {name for each in self.optimizers for name in each.names}
        if unknown:
            raise AmpKeyError(
                f'state_dict["optim"] has "{min(unknown)}", and no optimizer here steps that parameter. Pass the '
                "optimizers of the run that was saved."
            )
        values = dict(weights)
        checkpoints = [self._checkpoint(each, tree, saved, weights, values) for each in self.optimizers]
        masters = {
            name: weights[name].float()
            for each in self.optimizers
            for i, name in enumerate(each.names)
            if each.layout(i) == "masters"
        }
        load_amp = None if amp_loader is None else amp_loader(self._amp_state(tree["amp"], saved, masters))
        self._warn_of_rounding(saved)
        return lambda: self._load(values, checkpoints, load_amp)

    def _checked_model(self, given: Mapping[str, Any]) -> State:
        """The entries of the model, laid out as in the run."""
        here = self._model_state()
        if missing := [name for name in here if name not in given]:
            raise AmpKeyError(
                f'state_dict["model"] has no "{missing[0]}", which the model has here. Build the model of the run that '
                "was saved, or load the rest by model.load_state_dict(strict=False)."
            )
        if unknown := [name for name in given if name not in here]:
            raise AmpKeyError(
                f'state_dict["model"] has "{unknown[0]}", and the model here has not. Build the model of the run that '
                "was saved, or remove that entry."
            )
        placed: State = {}
        for name, like in here.items():
            where = f'state_dict["model"]["{name}"]'
            placed[name] = given[name]
            if isinstance(like, Tensor):
                placed[name] = laid_out_as(checked(given[name], like.shape, where), self._params.get(name, like))
        return placed

    def _checkpoint(
        self, each: Stepped, tree: Mapping[str, Any], saved: Described, weights: State, values: State
    ) -> State:
        """The state dict for an optimizer. Puts the 16-bit part of weights whose rest is there into ``values``."""
        fused = isinstance(each.optimizer, FusedOptimizer)
        states: State = {}
        for i, expected, _ in self._states(each):
            key, name, p = each.ids[i], each.names[i], each.params[i]
            saved.check_stepped(name)
            state: State = {}
            if name not in saved.without_state:
                state = self._checked_state(name, tree["optim"], moments_of(expected), each.members[i])
            if (layout := each.layout(i)) in EXTRAS:
                compensation = tree.get("compensation", {}).get(name) if saved.layout.get(name) == "kahan" else None
                if compensation is not None:
                    where = f'state_dict["compensation"]["{name}"]'
                    compensation = laid_out_as(checked(compensation, p.shape, where), p)
                weight, state[EXTRAS[layout]] = STORES[layout].divided(weights[name].float(), p.dtype, compensation)
                values.update(dict.fromkeys(self._names_of[id(p)], weight))
            if state:
                # The fused optimizers copy what they load; torch's would share it with the tree.
                states[key] = state if fused else {k: own(v) for k, v in state.items()}
        here = each.optimizer.state_dict()
        names = iter(each.names)
        groups = [
            {**group, **saved.options([next(names) for _ in group["params"]], actual)}
            for group, actual in zip(here["param_groups"], each.optimizer.param_groups, strict=True)
        ]
        return {**here, "state": states, "param_groups": groups}

    def _checked_state(self, name: str, optim: Mapping[str, Any], expected: State, member: Tensor) -> State:
        """The moments of a parameter, laid out as those here. A frozen one may have any."""
        where = f'state_dict["optim"]["{name}"]'
        if expected and name not in optim:
            raise AmpKeyError(
                f'state_dict["optim"] has no "{name}", which is stepped here. It was frozen in the run that was saved: '
                "load first, and unfreeze it then."
            )
        given: Mapping[str, Any] = entry(optim, name, Mapping, 'state_dict["optim"]') if name in optim else {}
        if expected and (differ := given.keys() ^ expected.keys()):
            key = min(differ)
            has = "has" if key in given else "has no"
            raise AmpKeyError(
                f'{where} {has} "{key}", and the optimizer here keeps {", ".join(expected) or "nothing"}. Use the '
                "optimizer of the run that was saved, with its options."
            )
        state: State = {}
        for key, value in given.items():
            like = expected.get(key)
            if isinstance(value, Tensor) and isinstance(like, Tensor):
                if value.numel() != 1 or like.numel() != 1:
                    checked(value, like.shape, f'{where}["{key}"]')
                value = laid_out_as(value, like)
            elif isinstance(value, Tensor) and value.shape == member.shape:
                value = laid_out_as(value, member)
            state[key] = value
        return state

    def _amp_state(self, given: Mapping[str, Any], saved: Described, masters: Mapping[str, Tensor]) -> State:
        """amp's part in the form of ``run_state``."""
        state: State = {key: value for key, value in given.items() if key.startswith(KEY)}
        state["opt_level"] = entry(given, "opt_level", str, 'state_dict["amp"]')
        state["deferred"] = dict(entry(given, "deferred", (tuple, list), 'state_dict["amp"]'))
        state["optimizers"] = [
            {
                **saved.of_amp(each.names),
                "params": len(each.members),
                "masters": {i: masters[name] for i, name in enumerate(each.names) if each.layout(i) == "masters"},
            }
            for each in self.optimizers
            if each.binding is not None
        ]
        return state

    def _warn_of_rounding(self, saved: Described) -> None:
        for each in self.optimizers:
            for i, name in enumerate(each.names):
                there, here = saved.layout.get(name), each.layout(i)
                if here in ROUNDED and there != here and there in (*FULL, "kahan"):
                    logger.warning(
                        "%s: %s and others had more bits in the run that was saved (%s) than here (%s). They are "
                        "rounded.",
                        *(self.call, name, there, here),
                    )
                    return

    def _load(self, values: State, checkpoints: list[State], load_amp: Callable[[], None] | None) -> None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        with ExitStack() as undo:
            for each, checkpoint in zip(self.optimizers, checkpoints, strict=True):
                # Loading puts new objects in the places of these. It may refuse values, and then an optimizer that has
                # loaded takes them back.
                former = {"state": each.optimizer.state, "param_groups": each.optimizer.param_groups}
                each.optimizer.load_state_dict(checkpoint)
                undo.callback(getattr(each.optimizer, "__setstate__", vars(each.optimizer).update), former)
            undo.pop_all()
        set_model_state_dict(self.model, values)
        if load_amp is not None:
            load_amp()


class Stateful:
    """What ``AmpSession.stateful`` returns: torch.distributed.checkpoint's protocol of that name."""

    def __init__(self, session: Any, model: nn.Module, optimizers: Any, options: Mapping[str, Any]) -> None:
        self._session, self._of, self._options = session, (model, optimizers), dict(options)

    def state_dict(self) -> State:
        state: State = self._session.get_state_dict(*self._of)
        return state

    def load_state_dict(self, state_dict: State) -> None:
        self._session.set_state_dict(*self._of, state_dict, **self._options)
