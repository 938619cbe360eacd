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
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampctx._errors import AmpError, AmpKeyError, AmpTypeError, AmpValueError
from ampctx.amp.binding import OptimizerBinding
from ampctx.amp.run_state import State, entry, typed
from ampctx.amp.skip_log import is_rank_zero
from ampctx.casts.arguments import LOW_PRECISION
from ampctx.kernels.sharding import grids_of, is_sharded, reshard_units, steps_a_partition
from ampctx.optimizers._base import FusedOptimizer
from ampctx.optimizers._checkpoint import without_amp
from ampctx.optimizers._state import EXTRAS, divided, joined
from ampctx.optimizers.larc import LARC
from ampctx.scaling.formats import KEY, plain
from ampctx.scaling.loss_scale import LossScale

logger = logging.getLogger("ampctx")

# The layouts of a parameter: "fp32" (no 16-bit one), "masters" (of ``initialize``), or what its optimizer writes.
_FULL = {"fp32", "masters", "copy", "split"}
_ROUNDED = {"nearest", "stochastic", "kahan"}


class Stepped(NamedTuple):
    """An optimizer and the parameters that it steps, in order."""

    optimizer: Any
    binding: OptimizerBinding | None
    # The keys in its state dict.
    ids: list[Any]
    names: list[str]
    # As in its groups, with masters in the places of parameters.
    members: list[Tensor]
    params: list[Tensor]

    def layout(self, i: int) -> str:
        member, p = self.members[i], self.params[i]
        if member is not p:
            return "masters"
        if p.dtype not in LOW_PRECISION:
            return "fp32"
        return self.optimizer.layout_of(p) if isinstance(self.optimizer, FusedOptimizer) else "nearest"


class Run:
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
                if moments := _moments(state):
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
                described[each.names[0]] = (_facts(each, self._without_state(each, without_state), of_amp),)
        tree: State = {"model": model, "optim": optim, "optimizers": described}
        if compensation:
            tree["compensation"] = compensation
        if amp is not None:
            tree["amp"] = _amp_entries(amp)
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
            is_made_up = member.requires_grad and not _moments(state)
            if is_made_up:
                try:
                    state = {**_first_state(each.optimizer, group, member), **state}
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
        saved = _Described(tree["optimizers"])
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
                placed[name] = _placed(_checked(given[name], like.shape, where), self._params.get(name, like))
        return placed

    def _checkpoint(
        self, each: Stepped, tree: Mapping[str, Any], saved: _Described, weights: State, values: State
    ) -> State:
        """The state dict for an optimizer. Puts the 16-bit part of weights whose rest is there into ``values``."""
        fused = isinstance(each.optimizer, FusedOptimizer)
        states: State = {}
        for i, expected, _ in self._states(each):
            key, name, p = each.ids[i], each.names[i], each.params[i]
            saved.check_stepped(name)
            state: State = {}
            if name not in saved.without_state:
                state = self._checked_state(name, tree["optim"], _moments(expected), each.members[i])
            if (layout := each.layout(i)) in EXTRAS:
                compensation = tree.get("compensation", {}).get(name) if saved.layout.get(name) == "kahan" else None
                if compensation is not None:
                    where = f'state_dict["compensation"]["{name}"]'
                    compensation = _placed(_checked(compensation, p.shape, where), p)
                weight, state[EXTRAS[layout]] = divided(layout, weights[name].float(), p.dtype, compensation)
                values.update(dict.fromkeys(self._names_of[id(p)], weight))
            if state:
                # The fused optimizers copy what they load; torch's would share it with the tree.
                states[key] = state if fused else {k: _own(v) for k, v in state.items()}
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
                    _checked(value, like.shape, f'{where}["{key}"]')
                value = _placed(value, like)
            elif isinstance(value, Tensor) and value.shape == member.shape:
                value = _placed(value, member)
            state[key] = value
        return state

    def _amp_state(self, given: Mapping[str, Any], saved: _Described, masters: Mapping[str, Tensor]) -> State:
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

    def _warn_of_rounding(self, saved: _Described) -> None:
        for each in self.optimizers:
            for i, name in enumerate(each.names):
                there, here = saved.layout.get(name), each.layout(i)
                if here in _ROUNDED and there != here and there in (*_FULL, "kahan"):
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


class _Described:
    """The entries of "optimizers", by the names of parameters."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.layout: dict[str, str] = {}
        self.without_state: set[str] = set()
        self._facts: dict[str, Mapping[str, Any]] = {}
        self._options: dict[str, State] = {}
        for first, value in entries.items():
            where = f'state_dict["optimizers"]["{first}"]'
            if not isinstance(value, (tuple, list)) or len(value) != 1:
                raise AmpTypeError(f"{where} must be a tuple of one dict, got {type(value).__name__}")
            facts = value[0]
            typed(facts, Mapping, f"{where}[0]")
            self.layout.update(entry(facts, "layout", Mapping, where))
            self.without_state.update(entry(facts, "without_state", list, where))
            for group in entry(facts, "groups", list, where):
                options = {key: option for key, option in group.items() if key != "params"}
                for name in entry(group, "params", list, where):
                    self._facts[name], self._options[name] = facts, options

    def check_stepped(self, name: str) -> None:
        if name not in self._facts:
            raise AmpKeyError(
                f'state_dict["optimizers"] has no "{name}": no optimizer of the run that was saved stepped it, and one '
                "steps it here. Pass optimizers the same parameters; add others after loading."
            )

    def options(self, names: list[str], here: Mapping[str, Any]) -> State:
        """The options of a group with these parameters. Tensors where ``here`` has them."""
        saved = [self._options[name] for name in names]
        for name, options in zip(names[1:], saved[1:], strict=True):
            for key, value in options.items():
                if repr(value) != repr(saved[0].get(key, value)):  # nan is not equal to itself
                    raise AmpValueError(
                        f'state_dict["optimizers"]: {names[0]} and {name} are in one param group here, and had '
                        f"{key}={saved[0][key]!r} and {value!r}. Make the param groups of the run that was saved."
                    )
        return {
            key: torch.as_tensor(value, dtype=like.dtype, device=like.device)
            if isinstance(like := here.get(key), Tensor) and isinstance(value, (int, float))
            else value
            for key, value in (saved[0] if saved else {}).items()
        }

    def of_amp(self, names: list[str]) -> State:
        """What ``run_state`` had for the optimizer with these parameters."""
        facts = self._facts[names[0]] if names else {}
        return {key: facts[key] for key in ("overflows", "scales", "loss_scales") if key in facts}


class Stateful:
    """What ``AmpSession.stateful`` returns: torch.distributed.checkpoint's protocol of that name."""

    def __init__(self, session: Any, model: nn.Module, optimizers: Any, options: Mapping[str, Any]) -> None:
        self._session, self._of, self._options = session, (model, optimizers), dict(options)

    def state_dict(self) -> State:
        state: State = self._session.get_state_dict(*self._of)
        return state

    def load_state_dict(self, state_dict: State) -> None:
        self._session.set_state_dict(*self._of, state_dict, **self._options)


# --- names and leaves -------------------------------------------------------------------------------------------------


def names_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by the names that torch.distributed.checkpoint.state_dict gives them: without those of wrappers."""
    wrapped = [name + "." if name else "" for name, m in model.named_modules() if _is_ddp(m)]

    def canonical(name: str) -> str:
        for prefix in sorted(wrapped, key=len, reverse=True):
            if name.startswith(f"{prefix}module."):
                name = prefix + name.removeprefix(f"{prefix}module.")
        return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")

    return {canonical(name): p for name, p in model.named_parameters(remove_duplicate=False)}


def _is_ddp(module: nn.Module) -> bool:
    return isinstance(module, nn.parallel.DistributedDataParallel)


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _moments(state: State) -> State:
    """The state of a parameter without what ``joined`` adds to the parameter."""
    return {key: value for key, value in state.items() if key not in EXTRAS.values()}


def _facts(each: Stepped, without_state: list[str], of_amp: State) -> State:
    groups, names = [], iter(each.names)
    for group in each.optimizer.param_groups:
        options = {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"params": [next(names) for _ in group["params"]], **options})
    return {
        "type": type(each.optimizer).__name__,
        "groups": groups,
        "layout": {name: each.layout(i) for i, name in enumerate(each.names)},
        "without_state": without_state,
        **{key: of_amp[key] for key in ("overflows", "scales", "loss_scales") if key in of_amp},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value)) if type(value) in (tuple, list) else value
    return plain(value) if isinstance(value, Tensor) else value


def _amp_entries(amp: State) -> State:
    entries: State = {
        "opt_level": amp["opt_level"],
        "torch": str(torch.__version__),
        # The package imports this module.
        "ampctx": sys.modules["ampctx"].__version__,
        "deferred": tuple(amp["deferred"].items()),
    }
    for key, value in amp.items():
        if key.startswith(KEY):
            entries[key] = {
                # A static scale may be any number.
                "loss_scale": torch.tensor(value["loss_scale"], dtype=torch.float64),
                "unskipped": torch.tensor(value["unskipped"], dtype=torch.int64),
                "dynamic": value["dynamic"],
            }
    return entries


def _checked(value: Any, shape: torch.Size, where: str) -> Tensor:
    typed(value, Tensor, where)
    if value.shape != shape or value.is_meta:
        has = "on the meta device, without values" if value.is_meta else f"of shape {tuple(value.shape)}"
        raise AmpValueError(f"{where} is {has}, expected a tensor of shape {tuple(shape)} as in the run here")
    result: Tensor = value
    return result


def _placed(value: Tensor, like: Tensor) -> Tensor:
    """``value`` as a DTensor laid out as ``like``, or as a plain tensor. A collective if it is a DTensor laid out
    otherwise."""
    if is_sharded(value):
        there: Any = value
        here: Any = like
        if is_sharded(like) and (there.device_mesh, there.placements) == (here.device_mesh, here.placements):
            return value
        value = there.full_tensor()
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    like_: Any = like
    # None: each rank takes its part of its own tensor.
    return distribute_tensor(value.to(like.device), like_.device_mesh, like_.placements, src_data_rank=None)


@torch.no_grad()
def gathered(tree: State, full: bool, to_cpu: bool) -> State:
    """The tree with whole tensors instead of DTensors, or with tensors on the CPU. With both, {} except on rank 0.

    Every rank must take part in ``full``.
    """
    keep = is_rank_zero() or not (full and to_cpu)

    def leaf(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: leaf(each) for key, each in value.items()}
        if not isinstance(value, Tensor):
            return value
        whole: Any = value
        if full and is_sharded(value):
            whole = whole.full_tensor()
        if not keep:
            return None
        return whole.cpu() if to_cpu else whole

    result: State = leaf(tree)
    return result if keep else {}


# --- the state of a parameter that was not stepped --------------------------------------------------------------------


def _first_state(optimizer: Any, group: Mapping[str, Any], member: Tensor) -> State:
    """The keys, shapes and dtypes of the state that a first step makes.

    Of torch's optimizers a twin takes a step of zeros, so that weights and state of the run stay as they are.

    Raises:
        Exception: the twin cannot step: it needs a closure, say.
    """
    if isinstance(optimizer, FusedOptimizer):
        return optimizer.first_state(member, dict(group))
    # Without hooks (private in torch), which ``__setstate__`` makes anew.
    attributes = {name: value for name, value in without_amp(optimizer).items() if not name.endswith("_hooks")}
    stand_in = torch.zeros_like(member.detach()).requires_grad_()
    attributes |= {"state": defaultdict(dict), "param_groups": [{**group, "params": [stand_in]}]}
    twin = object.__new__(type(optimizer))
    twin.__setstate__({**attributes, "defaults": dict(optimizer.defaults)})
    zeros = torch.zeros_like(member.detach())
    stand_in.grad = zeros.to_sparse(1) if isinstance(optimizer, torch.optim.SparseAdam) else zeros
    type(optimizer).step(twin)
    state: State = twin.state[stand_in]
    return state


def entries_for_level(given: State, loss_scales: Sequence[LossScale], level: str, allowed: bool, call: str) -> State:
    """amp's part for a run at another level: a scale that is static, there or here, stays as it is here.

    Raises:
        AmpValueError: another level, and it is not ``allowed``.
    """
    there = given["opt_level"]
    if there == level:
        return given
    if not allowed:
        raise AmpValueError(
            f'state_dict["amp"]["opt_level"] is {there!r}, and amp.initialize was given opt_level={level!r}. To '
            f"continue at another level, pass {call}(..., allow_level_change=True)."
        )
    result = {key: value for key, value in given.items() if not key.startswith(KEY)}
    result["opt_level"] = level
    for i, scale in enumerate(loss_scales):
        saved = given.get(f"{KEY}{i}")
        move = isinstance(saved, Mapping) and saved.get("dynamic") and scale.moves
        result[f"{KEY}{i}"] = saved if move else scale.state_dict()
    return result
