"""What a state by names consists of: names, layouts, weights, moments and facts. ``named_state`` puts it together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampctx._errors import AmpKeyError, AmpTypeError, AmpValueError
from ampctx._version import __version__
from ampctx.amp.binding import OptimizerBinding
from ampctx.amp.run_state import State, entry, typed
from ampctx.amp.skip_log import is_rank_zero
from ampctx.casts.arguments import LOW_PRECISION
from ampctx.kernels.sharding import is_sharded
from ampctx.masters.store import EXTRAS
from ampctx.optimizers._base import FusedOptimizer
from ampctx.optimizers._checkpoint import without_amp
from ampctx.optimizers._state_types import unpacked
from ampctx.optimizers.split_masters import SplitMasters
from ampctx.scaling.formats import KEY, plain
from ampctx.scaling.loss_scale import LossScale

# The layouts of a parameter: "fp32" (no 16-bit one), "masters" (of ``initialize``), or what its optimizer writes.
FULL = {"fp32", "masters", "copy", "split"}
ROUNDED = {"nearest", "stochastic", "kahan"}


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
        return self.optimizer.layout_of(p) if isinstance(self.optimizer, FusedOptimizer | SplitMasters) else "nearest"


class Described:
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


def own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def moments_of(state: State) -> State:
    """The state of a parameter without what ``joined`` adds to the parameter. In fp32, whatever the ``state_dtype``."""
    return unpacked({key: value for key, value in state.items() if key not in EXTRAS.values()})


def facts_of(each: Stepped, without_state: list[str], of_amp: State) -> State:
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


def amp_entries(amp: State) -> State:
    entries: State = {
        "opt_level": amp["opt_level"],
        "torch": str(torch.__version__),
        "ampctx": __version__,
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


def checked(value: Any, shape: torch.Size, where: str) -> Tensor:
    typed(value, Tensor, where)
    if value.shape != shape or value.is_meta:
        has = "on the meta device, without values" if value.is_meta else f"of shape {tuple(value.shape)}"
        raise AmpValueError(f"{where} is {has}, expected a tensor of shape {tuple(shape)} as in the run here")
    result: Tensor = value
    return result


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


def first_state_of(optimizer: Any, group: Mapping[str, Any], member: Tensor) -> State:
    """The keys, shapes and dtypes of the state that a first step makes.

    Of torch's optimizers a twin takes a step of zeros, so that weights and state of the run stay as they are.

    Raises:
        Exception: the twin cannot step: it needs a closure, say.
    """
    if isinstance(optimizer, FusedOptimizer):
        return optimizer.first_state(member, dict(group))
    if isinstance(optimizer, SplitMasters) and optimizer.inner is not None:
        weight = member.detach()
        wide = weight.float() if weight.dtype == torch.bfloat16 else weight
        rest = {"remainder": torch.zeros_like(weight, dtype=torch.int16)} if wide is not weight else {}
        return {**first_state_of(optimizer.inner, group, wide), **rest}
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
