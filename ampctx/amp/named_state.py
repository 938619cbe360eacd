"""The state of a whole run, keyed by names of parameters: for any layout of masters, any engine, any number of ranks.

    {"model": {name: tensor},            fp32 wherever the run has an fp32 weight, in whatever layout
     "optim": {name: {"step": ..., "exp_avg": ...}},
     "compensation": {name: tensor},     only with write_back="kahan"
     "optimizers": {name of its first parameter: (facts,)},
     "amp": {"opt_level": ..., "torch": ..., "ampctx": ...,
             "loss_scaler0": {"loss_scale": fp64, "unskipped": int64, "dynamic": bool}, ...}}

Masters of ``initialize``, ``master_weights=True``, "split" and fp32 shards are four layouts of the same bits, so each
has the same keys: torch.distributed.checkpoint (DCP) loads one into another. Names are DCP's. ``facts`` are plain:
{"format", "groups": options and names, "layout": {name: layout}, "without_state": names}. DCP
takes a tuple for one value; the keys of a dict must be those of the run that loads.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ampctx._collectives import check_process_group, is_rank_zero
from ampctx._errors import AmpError, AmpKeyError, AmpTypeError, AmpValueError
from ampctx._saved import FORMAT, check_format, check_known, entry, plain, typed
from ampctx._version import __version__
from ampctx.amp import ranks
from ampctx.amp import state as amp_state
from ampctx.amp.methods import CHECKPOINT_SAVER, called_by
from ampctx.amp.setup import as_list, is_optimizer
from ampctx.amp.state import Loader, State, checked
from ampctx.amp.step import OptimizerBinding
from ampctx.casts.arguments import LOW_PRECISION, autocast_off, map_leaves
from ampctx.kernels.sharding import grids_of, is_sharded, laid_out_as, reshard_units, whole
from ampctx.optimizers._checkpoint import first_state_of
from ampctx.optimizers._state_types import unpacked
from ampctx.optimizers.larc import LARC
from ampctx.scaling.loss_scale import KEY, read_amp_entries
from ampctx.weights.store import EXTRAS, STORES, joined

logger = logging.getLogger("ampctx")

# The layouts of a parameter: "fp32" (no 16-bit one), "masters" (of ``initialize``), or what its optimizer writes.
_FULL = {"fp32", "masters", "copy", "split"}
_ROUNDED = {"nearest", "stochastic", "kahan"}
_LATER = "Load it with the version that saved it, or a later one."
# "type" is in files of before.
_FACTS = ("format", "type", "groups", "layout", "without_state", "loss_scales")


@torch.no_grad()
def get_state_dict(
    session: Any, model: nn.Module, optimizers: Any, *, full_state_dict: bool = False, cpu_offload: bool = False
) -> dict[str, Any]:
    """Returns the whole state of a run by names of parameters, for torch.distributed.checkpoint. Host sync.

    The result has the same keys and values for masters of ``initialize``, ``master_weights=True``, "split" and fp32
    shards, on any number of ranks. Tensors are shared with the run, where it has them: save or copy them before the
    next step. Call it on every rank.

    ``{"model": ..., "optim": ..., "optimizers": ..., "amp": ...}``: "model" has weights in fp32 wherever there is an
    fp32 master. "optim" has step and moments by name, for parameters without state those that a first step makes.
    "optimizers" has options, "amp" the loss scales. write_back="kahan" adds "compensation".

    Args:
        model: the model, or the wrapper that trains. It holds all parameters of the optimizers.
        optimizers: one optimizer or a list.
        full_state_dict: whole tensors on every rank, in place of DTensors. A collective call.
        cpu_offload: copies on the CPU. With ``full_state_dict``, on rank 0 alone; other ranks get {}.

    Raises:
        AmpTypeError, AmpError: a wrong argument; before ``initialize``; an optimizer that did not go through it; a
            parameter that the model does not hold; between SAM's ``first_step`` and ``second_step``; an optimizer that
            needs a closure and has not stepped.
    """
    tree = _NamedRun(session, model, optimizers, "amp.get_state_dict").saved()
    keep = is_rank_zero() or not (full_state_dict and cpu_offload)

    def shown(t: Any) -> Tensor | None:
        t = whole(t) if full_state_dict else t  # every rank takes part
        return (t.cpu() if cpu_offload else t) if keep else None

    result = map_leaves(tree, shown, False)
    return result if keep else {}


@autocast_off()
@torch.no_grad()
def set_state_dict(
    session: Any,
    model: nn.Module,
    optimizers: Any,
    state_dict: dict[str, Any],
    *,
    allow_level_change: bool = False,
    process_group: Any = None,
) -> None:
    """Loads the result of ``get_state_dict``, of any layout, engine and number of ranks. May be a host sync.

    An invalid one raises, and nothing has changed. Exact between masters of ``initialize``, ``master_weights=True``,
    "split" and fp32 shards, and from the others into these. Into 16-bit parameters without a master (``write_back``)
    weights are rounded, with a warning. Gradients that wait for a step are dropped. No ``on_step`` hook is called.

    Args:
        model, optimizers: as in ``get_state_dict``, after ``initialize``.
        state_dict: the dict, with DTensors or whole tensors.
        allow_level_change: accept the state of another ``opt_level``. Loss scales load where both are dynamic.
        process_group: as in ``load_state_dict``.

    Raises:
        AmpKeyError, AmpTypeError, AmpValueError: an entry that is missing, unknown or does not fit; another level.
        AmpError: as ``get_state_dict``, and inside a scale_loss block. AmpRankError: as ``load_state_dict``.
    """
    check_process_group(process_group)
    run = _NamedRun(session, model, optimizers, "amp.set_state_dict")
    for load in run.loaders(state_dict, allow_level_change):
        load()
    ranks.check_scales(session, process_group, run.call)


class Stateful:
    """The return value of ``AmpSession.Stateful``: torch.distributed.checkpoint's protocol of that name."""

    def __init__(self, session: Any, model: nn.Module, optimizers: Any, options: Mapping[str, Any]) -> None:
        self._session, self._of, self._options = session, (model, optimizers), dict(options)

    def state_dict(self) -> State:
        """The tensors of the run for ``dcp.save``, else copies: ``dcp.load`` writes into them before it may fail."""
        tree: State = self._session.get_state_dict(*self._of)
        return tree if called_by(CHECKPOINT_SAVER) else map_leaves(tree, Tensor.clone, False)

    def load_state_dict(self, state_dict: State) -> None:
        self._session.set_state_dict(*self._of, state_dict, **self._options)


def stateful(session: Any, model: nn.Module, optimizers: Any, **options: Any) -> Stateful:
    """Returns an object for torch.distributed.checkpoint: ``dcp.save({"app": amp.Stateful(model, optimizers)})``.

    ``dcp.load`` of the same dict loads the run, on as many ranks as there are then. It reads into copies, so that one
    that fails changes nothing; they take the memory of the state once more. Its ``state_dict()`` and
    ``load_state_dict(state)`` are ``get_state_dict`` and ``set_state_dict`` of these; but for ``dcp.save`` the first
    returns copies.

    Args:
        model, optimizers: as in ``get_state_dict``.
        options: keyword arguments of ``set_state_dict``.
    """
    return Stateful(session, model, optimizers, options)


class _Member(NamedTuple):
    """A parameter that an optimizer steps. ``key``: in its state dict. ``names``: in the model's; the state of a tied
    one goes by the first. ``member``: in its group, where a master may have its place."""

    key: Any
    names: list[str]
    member: Tensor
    p: Tensor
    group: Mapping[str, Any]
    layout: str

    @property
    def name(self) -> str:
        return self.names[0]


class _NamedRun:
    """A model and its optimizers, by name. ``call``: the public function, for messages."""

    def __init__(self, session: Any, model: nn.Module, optimizers: Any, call: str) -> None:
        self.session, self.model, self.call = session, model, call
        self.on = amp_state.policy_of(session, call).enabled
        if not isinstance(model, nn.Module):
            given = type(model).__name__
            raise AmpTypeError(f"{call}: model must be a torch.nn.Module, got {given}: several in one nn.ModuleDict.")
        reshard_units(model)
        names = defaultdict[int, list[str]](list)
        for name, p in _names_of(model).items():
            names[id(p)].append(name)
        self.bindings: list[OptimizerBinding] = []
        self.optimizers = [self._stepped(each, names) for each in as_list(optimizers, "optimizer", is_optimizer)]
        owner: dict[str, Any] = {}
        for optimizer, members in self.optimizers:
            for m in members:
                if owner.setdefault(m.name, optimizer) is not optimizer:
                    raise AmpError(f"{call}: two optimizers step {m.name}. Pass each parameter to one optimizer.")

    def _stepped(self, optimizer: Any, names: Mapping[int, list[str]]) -> tuple[Any, list[_Member]]:
        binding = self.session._watched(optimizer, self.call.removeprefix("amp.")) if self.on else None
        if binding is not None:
            binding.follow_groups()
            self.bindings.append(binding)
        inner = optimizer.optim if isinstance(optimizer, LARC) else optimizer
        in_groups = [(group, p) for group in optimizer.param_groups for p in group["params"]]
        params = [p for _, p in in_groups] if binding is None else binding.model_params()
        keys = [key for group in inner.state_dict()["param_groups"] for key in group["params"]]
        members: list[_Member] = []
        for key, p, (group, member) in zip(keys, params, in_groups, strict=True):
            if id(p) not in names:
                raise AmpError(
                    f"{self.call}: the model has no parameter {len(members)} of {type(optimizer).__name__}, of shape "
                    f"{tuple(p.shape)}. Pass the module that holds all parameters; several models in one nn.ModuleDict."
                )
            layout = "masters" if member is not p else "fp32"
            if member is p and p.dtype in LOW_PRECISION:
                layout = inner.layout_of(p) if hasattr(type(inner), "layout_of") else "nearest"
            members.append(_Member(key, names[id(p)], member, p, group, layout))
        return inner, members

    def _model_state(self) -> State:
        # Imported here, because the import is slow.
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        state: State = get_model_state_dict(self.model)
        for optimizer, members in self.optimizers:
            if lost := [m.name for m in members if m.name not in state]:
                raise AmpError(
                    f"{self.call}: the model's state dict has no {lost[0]}, which {type(optimizer).__name__} "
                    "steps. Names of the state dict must be those of named_parameters(). For FSDP1 use fully_shard."
                )
        return state

    # --- saving -------------------------------------------------------------------------------------------------------

    def saved(self) -> State:
        amp = amp_state.saved(self.session, self.bindings, self.call) if self.on else {}
        model, optim, compensation, described = self._model_state(), {}, {}, {}
        for number, (optimizer, members) in enumerate(self.optimizers):
            without_state = []
            if any(m.layout in EXTRAS for m in members):
                optimizer.masters_follow_model()
            for m, state, is_made_up in self._states(optimizer, members):
                if moments := _moments_of(state):
                    optim[m.name] = moments
                if is_made_up:
                    without_state.append(m.name)
                if m.layout in EXTRAS:
                    exact = joined(m.p, state)
                    model.update(dict.fromkeys(m.names, m.p.detach().float() if exact is None else exact))
                if "compensation" in state:
                    compensation[m.name] = state["compensation"]
            if members:
                own = {"loss_scales"} & amp["optimizers"][number].keys() if amp else ()
                names, groups = iter(members), []
                for group in optimizer.state_dict()["param_groups"]:  # with its count of skips
                    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                    params = [next(names).name for _ in group["params"]]
                    groups.append(map_leaves(options, plain, False) | {"params": params})
                facts = {
                    "format": FORMAT,
                    "groups": groups,
                    "layout": {m.name: m.layout for m in members},
                    "without_state": self._without_state(members, without_state),
                    **{key: amp["optimizers"][number][key] for key in own},
                }
                described[members[0].name] = (facts,)
        tree: State = {"model": model, "optim": optim, "optimizers": described}
        if compensation:
            tree["compensation"] = compensation
        if amp:
            tree["amp"] = {"opt_level": amp["opt_level"], "torch": str(torch.__version__), "ampctx": __version__}
            for i, scale in enumerate(self.session.loss_scales):
                wide = {float: torch.float64, int: torch.int64}  # a static scale may be any number
                numbers = scale.state_dict().items()
                entries = {key: torch.tensor(n, dtype=wide[type(n)], device="cpu") for key, n in numbers}
                tree["amp"][f"{KEY}{i}"] = {**entries, "dynamic": scale.moves}
        return tree

    def _without_state(self, members: list[_Member], here: list[str]) -> list[str]:
        """The parameters that no rank has a state of. ``here``: those that this rank has none of, which may differ
        where ranks have parts of a parameter. One all_reduce for them."""
        found, grids = set(here), grids_of(m.member for m in members)
        for grid in dict.fromkeys(grids.values()):
            sharded: list[Any] = [(m.name, m.member) for m in members if is_sharded(m.member)]
            parts = [name for name, member in sharded if grids.get(member.device_mesh) is grid]
            some = torch.tensor([name not in found for name in parts], dtype=torch.float32, device="cpu")
            grid.reduce(some, torch.distributed.ReduceOp.MAX, self.call, f"the state of {len(parts)} parameters")
            found.difference_update(name for name, has_state in zip(parts, some.tolist(), strict=True) if has_state)
        return [name for name in here if name in found]

    def _states(self, optimizer: Any, members: list[_Member]) -> Iterator[tuple[_Member, State, bool]]:
        """The state of each parameter, and whether it is made up, which it is where a trainable one has none: keys must
        not depend on the steps that were taken, because torch loads into a tree of the run that resumes."""
        found = optimizer.state_dict()["state"]
        if unknown := found.keys() - {m.key for m in members}:
            raise AmpError(
                f"{self.call}: {type(optimizer).__name__} keeps state[{min(unknown, key=str)!r}], which belongs "
                "to no parameter and has no name here. Save optimizer.state_dict() instead."
            )
        for m in members:
            state = found.get(m.key, {})
            is_made_up = m.member.requires_grad and not _moments_of(state)
            if is_made_up:
                try:
                    state = {**first_state_of(optimizer, m.member, m.group), **state}
                except Exception as error:
                    if not found:  # LBFGS keeps the state of all parameters with the first one
                        raise AmpError(
                            f"{self.call}: {type(optimizer).__name__} does not show which state it keeps: a step "
                            f"of zeros on a copy of it raised {type(error).__name__}: {error}. Take a step first."
                        ) from error
            yield m, state, is_made_up

    # --- loading ------------------------------------------------------------------------------------------------------

    def loaders(self, tree: Any, other_level: bool) -> list[Loader]:
        typed(tree, dict, "state_dict")
        for key in ("model", "optim", "optimizers", *(["amp"] if self.on else [])):
            if key not in tree:
                raise AmpKeyError(
                    f'state_dict has no "{key}", only {", ".join(map(str, tree)) or "nothing"}. Pass what '
                    "amp.get_state_dict() returned, or use amp.Stateful in the dict of dcp.load. With full_state_dict "
                    "and cpu_offload rank 0 alone has the tensors: load its file on every rank."
                )
            typed(tree[key], dict, f'state_dict["{key}"]')
        check_known(tree, "state_dict", ("model", "optim", "compensation", "optimizers", "amp"))
        saved = _read_facts(tree["optimizers"])
        tree = {**tree, "model": self._checked_model(tree["model"])}
        members = [m for _, of_one in self.optimizers for m in of_one]
        if unknown := tree["optim"].keys() - {m.name for m in members}:
            raise AmpKeyError(
                f'state_dict["optim"] has "{min(unknown)}", and no optimizer here steps it. Pass those that were saved.'
            )
        if new := [m.name for m in members if m.name not in saved]:
            raise AmpKeyError(
                f'state_dict["optimizers"] has no "{new[0]}": no optimizer of the run that was saved stepped it, and '
                "one steps it here. Pass optimizers the same parameters; add others after loading."
            )
        values = dict(tree["model"])
        checkpoints = [self._checkpoint(*each, tree, saved, values) for each in self.optimizers]
        found: list[Loader] = [lambda: self._load(values, checkpoints)]
        if self.on:
            found += self._amp_loaders(tree["amp"], saved, tree["model"], other_level)
        for m in members:
            if m.layout in _ROUNDED and (there := saved[m.name].layout) != m.layout and there in (*_FULL, "kahan"):
                logger.warning(
                    "%s: %s and others had more bits in the run that was saved (%s) than here (%s). They are rounded.",
                    *(self.call, m.name, there, m.layout),
                )
                break
        return found

    def _checked_model(self, given: Mapping[str, Any]) -> State:
        """The entries of the model, laid out as in the run."""
        here = self._model_state()
        if differ := [name for name in (*here, *given) if name not in given or name not in here]:
            no, why = ("no ", "which the model has here") if differ[0] in here else ("", "and the model here has not")
            raise AmpKeyError(
                f'state_dict["model"] has {no}"{differ[0]}", {why}. Build the model of the run that was saved, or edit '
                "the dict."
            )
        placed = dict(given)
        for name, like in here.items():
            if isinstance(like, Tensor):
                checked(given[name], like.shape, f'state_dict["model"]["{name}"]')
                placed[name] = laid_out_as(given[name], like)
        return placed

    def _checkpoint(self, optimizer: Any, members: list[_Member], tree: State, saved: _Facts, values: State) -> State:
        """The state dict for an optimizer. Puts the 16-bit part of weights whose rest is there into ``values``."""
        states: State = {}
        for m, expected, _ in self._states(optimizer, members):
            moments = _moments_of(expected)
            state = self._checked_state(m, tree["optim"], moments) if saved[m.name].has_state else {}
            if m.layout in EXTRAS:
                rest = tree.get("compensation", {}).get(m.name) if saved[m.name].layout == "kahan" else None
                if rest is not None:
                    checked(rest, m.p.shape, f'state_dict["compensation"]["{m.name}"]')
                    rest = laid_out_as(rest, m.p)
                exact = tree["model"][m.name].float()
                weight, state[EXTRAS[m.layout]] = STORES[m.layout].divided(exact, m.p.dtype, rest)
                values.update(dict.fromkeys(m.names, weight))
            if state:  # those of ampctx copy what they load; torch's would share it with the tree
                is_copied = hasattr(type(optimizer), "layout_of")
                states[m.key] = state if is_copied else map_leaves(state, Tensor.clone, False)
        here, names, groups = optimizer.state_dict(), iter(members), []
        for group, actual in zip(here["param_groups"], optimizer.param_groups, strict=True):
            groups.append({**group, **_options([next(names).name for _ in group["params"]], saved, actual)})
        return {**here, "state": states, "param_groups": groups}

    def _checked_state(self, m: _Member, optim: Mapping[str, Any], expected: State) -> State:
        """The moments of a parameter, laid out as those here. A frozen one may have any."""
        where = f'state_dict["optim"]["{m.name}"]'
        if expected and m.name not in optim:
            raise AmpKeyError(
                f'state_dict["optim"] has no "{m.name}", which is stepped here. It was frozen in the run that was '
                "saved: load first, and unfreeze it then."
            )
        state: State = dict(entry(optim, m.name, dict, 'state_dict["optim"]')) if m.name in optim else {}
        if expected and (differ := state.keys() ^ expected.keys()):
            key = min(differ)
            raise AmpKeyError(
                f'{where} has {"" if key in state else "no "}"{key}", and the optimizer here keeps '
                f"{', '.join(expected) or 'nothing'}. Use the optimizer of the run that was saved, with its options."
            )
        for key, value in state.items():
            like = expected.get(key)
            if isinstance(value, Tensor) and isinstance(like, Tensor):
                if value.numel() != 1 or like.numel() != 1:
                    checked(value, like.shape, f'{where}["{key}"]')
                state[key] = laid_out_as(value, like)
            elif isinstance(value, Tensor) and value.shape == m.member.shape:
                state[key] = laid_out_as(value, m.member)
        return state

    def _amp_loaders(self, given: State, saved: _Facts, weights: State, other_level: bool) -> list[Loader]:
        """Brings amp's part into the form of ``state``. At another level, scales that are static there or here stay."""
        level, there = self.session.policy.opt_level, entry(given, "opt_level", str, 'state_dict["amp"]')
        if there != level and not other_level:
            raise AmpValueError(
                f'state_dict["amp"]["opt_level"] is {there!r}, and amp.initialize was given opt_level={level!r}. To '
                f"continue at another level, pass {self.call}(..., allow_level_change=True)."
            )
        scales: State = {key: value for key, value in given.items() if key.startswith(KEY)}
        check_known(given, 'state_dict["amp"]', ("opt_level", "torch", "ampctx", *scales))
        by, here = (re.findall(r"\d+", version)[:2] for version in (str(given.get("ampctx", __version__)), __version__))
        if not by or list(map(int, by)) > list(map(int, here)):
            raise AmpValueError(
                f'state_dict["amp"]["ampctx"] is {given["ampctx"]!r}, and this is ampctx {__version__}. {_LATER}'
            )
        if there != level:
            read_amp_entries(scales)
            kept = {f"{KEY}{i}": scale for i, scale in enumerate(self.session.loss_scales)}
            move = [key for key, scale in kept.items() if scale.moves and key in scales and scales[key].get("dynamic")]
            scales = {key: scales[key] if key in move else scale.state_dict() for key, scale in kept.items()}
        optimizers = []
        for _, members in self.optimizers:
            masters = {i: weights[m.name].float() for i, m in enumerate(members) if m.layout == "masters"}
            own = saved[members[0].name].of_amp if members else {}
            optimizers.append({**own, "params": len(members), "masters": masters})
        of_run = {**scales, "opt_level": level, "optimizers": optimizers}
        return amp_state.loaders(self.session, of_run, self.bindings, self.call)

    def _load(self, values: State, checkpoints: list[State]) -> None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        with ExitStack() as undo:
            for (optimizer, _), checkpoint in zip(self.optimizers, checkpoints, strict=True):
                # Loading replaces these. Where a later one refuses values, an optimizer takes them back.
                former = {"state": optimizer.state, "param_groups": optimizer.param_groups}
                optimizer.load_state_dict(checkpoint)
                undo.callback(getattr(optimizer, "__setstate__", vars(optimizer).update), former)
            undo.pop_all()
        set_model_state_dict(self.model, values)


class _Was(NamedTuple):
    """A parameter in the run that was saved. ``options``: of its group. ``of_amp``: what amp had for its optimizer."""

    layout: str
    has_state: bool
    options: State
    of_amp: State


_Facts = Mapping[str, _Was]


def _read_facts(optimizers: Mapping[str, Any]) -> _Facts:
    found = {}
    for first, value in optimizers.items():
        where = f'state_dict["optimizers"]["{first}"]'
        if not isinstance(value, tuple | list) or len(value) != 1:
            raise AmpTypeError(f"{where} must be a tuple of one dict, got {type(value).__name__}")
        (facts,) = value
        typed(facts, dict, f"{where}[0]")
        check_format(facts, f"{where}[0]", _FACTS)
        layout, without_state = entry(facts, "layout", dict, where), set(entry(facts, "without_state", list, where))
        of_amp = {key: facts[key] for key in ("loss_scales",) if key in facts}
        for group in entry(facts, "groups", list, where):
            options = {key: option for key, option in group.items() if key != "params"}
            for name in entry(group, "params", list, where):
                if (kind := entry(layout, name, str, f'{where}[0]["layout"]')) not in (*_FULL, *_ROUNDED):
                    is_new = f'{where}[0]["layout"]["{name}"] is {kind!r}, which this version of ampctx does not know.'
                    raise AmpValueError(f"{is_new} {_LATER}")
                found[name] = _Was(kind, name not in without_state, options, of_amp)
    return found


def _options(names: list[str], saved: _Facts, here: Mapping[str, Any]) -> State:
    """The options of a group with these parameters, as tensors where ``here`` has them."""
    options = dict(saved[names[0]].options) if names else {}
    for name in names[1:]:
        for key, value in saved[name].options.items():
            if repr(value) != repr(options.get(key, value)):  # nan is not equal to itself
                raise AmpValueError(
                    f'state_dict["optimizers"]: {names[0]} and {name} are in one param group here, and had '
                    f"{key}={options[key]!r} and {value!r}. Make the param groups of the run that was saved."
                )
    for key, value in options.items():
        if isinstance(like := here.get(key), Tensor) and isinstance(value, int | float):
            options[key] = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    return options


def _names_of(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Parameters by the names that torch.distributed.checkpoint.state_dict gives them: without those of wrappers."""
    found: dict[str, Tensor] = dict(module.named_parameters(prefix.removesuffix("."), False, False))
    for name, child in module._modules.items():
        is_wrapper = isinstance(module, DistributedDataParallel) or name in ("_orig_mod", "_checkpoint_wrapped_module")
        found |= {} if child is None else _names_of(child, prefix if is_wrapper else f"{prefix}{name}.")
    return found


def _moments_of(state: State) -> State:
    """The state of a parameter without what ``joined`` adds to the parameter. In fp32, whatever the ``state_dtype``."""
    return unpacked({key: value for key, value in state.items() if key not in EXTRAS.values()})
