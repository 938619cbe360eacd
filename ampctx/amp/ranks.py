"""Compares the state of amp between the ranks of a process group."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx._collectives import check_process_group, is_distributed, maximum_over_ranks, ranks_of
from ampctx._errors import AmpError, AmpRankError, listed
from ampctx.amp.options import PrecisionPolicy
from ampctx.amp.step import OptimizerBinding
from ampctx.kernels.sharding import grids_of, is_sharded
from ampctx.scaling.loss_scale import LossScale

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fact(NamedTuple):
    """Something that ranks have in common. ``what``: its name, a plural. ``value``: compared by its repr."""

    what: str
    value: Any
    shown: str

    def digest(self) -> int:
        """63 bits, so that it has a negative in int64."""
        return int.from_bytes(hashlib.blake2b(repr(self.value).encode(), digest_size=8).digest(), "big") >> 1


def check_ranks(session: Any, group: Any = None, *, same_parameters: bool = True) -> None:
    """Checks that all ranks of a group have the same loss scales, levels, parameters and masters. Host sync.

    Call it on every rank, between steps: after loading a checkpoint, or now and then. It is one all_reduce of 144
    bytes, and reads every parameter once. Without torch.distributed it does nothing.

    Args:
        group: a ``torch.distributed.ProcessGroup``. None: the default group.
        same_parameters: compare options, optimizers with those of their param groups, and names, shapes, dtypes and
            values of parameters, too. False where ranks hold different parts of a model. Values of DTensors are never
            compared.

    Raises:
        AmpRankError: on every rank, by what differs and what this rank has; or another rank has left the call out.
        AmpTypeError, AmpValueError: ``group`` is no group, or does not contain this rank.
        AmpError: before ``initialize``.
    """
    check_process_group(group, "group")
    if session.policy is None:
        raise AmpError("amp.check_ranks was called before amp.initialize. Call amp.initialize first, on every rank.")
    if group is None and not is_distributed():
        return
    if len(session._bindings) > 1:
        gc.collect()  # each rank collects a former optimizer at another time
    bindings = list(session._bindings.values())
    # An optimizer keeps the scales of its own initialize call.
    scales = dict.fromkeys([*session.loss_scales, *(scale for b in bindings for scale in b.loss_scales)])
    facts = [*of_scales(list(scales)), of_level(session.policy)]
    facts += of_replicas(bindings, session.policy) if same_parameters else []
    check(facts, [torch.distributed.group.WORLD if group is None else group], "amp.check_ranks")


def check_initialize(models: Any, optimizers: Any, facts: Sequence[Fact], policy: PrecisionPolicy, group: Any) -> None:
    """Compares what the ranks of ``group``, and of each mesh of the models' DTensors, pass to ``amp.initialize``. Each
    group is one all_reduce, in which every rank must take part. Host sync."""
    if group is not None:
        check(facts, [group], "amp.initialize")
    modules, stepped = (some if isinstance(some, list) else [some] for some in (models, optimizers))
    grids = grids_of(p for m in modules if isinstance(m, torch.nn.Module) for p in m.parameters())
    for grid in dict.fromkeys(grids.values()):
        meshes = {mesh for mesh, of_one in grids.items() if of_one is grid}
        check([*facts, of_options(policy), *of_optimizers(stepped, meshes)], grid.groups, "amp.initialize")


def check_scales(session: Any, group: Any, call: str) -> None:
    if group is not None:
        check(of_scales(session.loss_scales), [group], call)


def of_scales(loss_scales: Sequence[LossScale]) -> list[Fact]:
    """Facts that all ranks that skip together have in common: of the scales. Host sync."""
    states = [(scale.state_dict(), scale) for scale in loss_scales]
    scales = [(state.pop("loss_scale"), scale.dynamic) for state, scale in states]
    shown = [str(value) if dynamic else f"{value} (static)" for value, dynamic in scales]
    counts = [state for state, scale in states if scale.moves]  # nothing depends on that of a scale that stays
    return [
        Fact("loss scales", scales, _listed(shown)),
        Fact("counts of clean steps", counts, _listed(count["unskipped"] for count in counts)),
    ]


def of_level(policy: PrecisionPolicy) -> Fact:
    level = policy.opt_level if policy.enabled else "enabled=False"
    return Fact("opt levels", level, level)


def of_options(policy: PrecisionPolicy) -> Fact:
    options = {field.name: getattr(policy, field.name) for field in fields(policy)}
    options["ops_fp32"] = sorted(policy.ops_fp32)  # may come from a set, whose order differs between processes
    return Fact("options of amp.initialize", sorted(options.items()), _listed(f"{k}={v}" for k, v in options.items()))


def of_optimizers(optimizers: Iterable[Any], meshes: Collection[Any] | None = None) -> list[Fact]:
    """Facts that ranks compare: names, shapes and options of all parameters, or of the DTensors on ``meshes``."""
    found, shapes = list[str](), list[str]()
    for optimizer in optimizers:
        for group in getattr(optimizer, "param_groups", ()):
            members = [p for p in group["params"] if meshes is None or getattr(p, "device_mesh", None) in meshes]
            shapes += [f"{tuple(p.shape)}{'' if p.requires_grad else ' frozen'}" for p in members]
            keys = [key for key in getattr(optimizer, "defaults", group) if key in group and key != "params"]
            shown = ", ".join(f"{key}={_plain(group[key])!r}" for key in keys)
            if members:
                found.append(f"{type(optimizer).__name__}({shown}) of {len(members)} parameters")
    return [
        Fact("optimizers and their options", found, _listed(found)),
        Fact("shapes of parameters", shapes, _listed(shapes)),
    ]


def _plain(value: Any) -> Any:
    """An option as it is on every rank: without devices and addresses."""
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() == 1 else tuple(value.shape)
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return value if isinstance(value, (bool, int, float, str, torch.dtype, NoneType)) else type(value).__name__


def of_replicas(bindings: Sequence[OptimizerBinding], policy: PrecisionPolicy) -> list[Fact]:
    """Facts that ranks with the same parameters have in common besides. Host sync. Resyncs masters from the model."""
    for binding in bindings:
        if binding.gradients.is_idle:
            binding.refresh()
    names = [name for binding in bindings for name in binding.names()]
    params = [p for binding in bindings for p in binding.model_params()]
    stepped = [p for binding in bindings for p in binding.params()]
    kinds = [str(p.dtype) for p in params]
    values = Fact("values of parameters", _checksums(stepped), "")
    return [
        of_options(policy),
        *of_optimizers(binding.optimizer for binding in bindings),
        Fact("names of parameters", names, f"{len(names)}: {_listed(names)}"),
        Fact("dtypes of parameters", kinds, _listed(f"{kinds.count(kind)} of {kind}" for kind in sorted({*kinds}))),
        values._replace(shown=f"the checksum {values.digest():016x}"),
    ]


def _listed(items: Iterable[Any]) -> str:
    return listed(items, most=12) or "none"


@torch.no_grad()
def _checksums(params: Iterable[Tensor]) -> list[int]:
    """A sum of the bits of each parameter, exact in any order. One host sync for each device."""
    sums: dict[torch.device, list[Tensor]] = {}
    for p in params:
        if p.layout == torch.strided and not p.is_meta and not is_sharded(p):  # of these each rank has its own part
            real = torch.view_as_real(p.detach()) if p.is_complex() else p.detach()
            bits = real.view(_BITS[real.element_size()])
            sums.setdefault(p.device, []).append(bits.sum(dtype=torch.int64))
    return [number for of_device in sums.values() for number in torch.stack(of_device).tolist()]


def check(facts: Sequence[Fact], groups: Sequence[Any], call: str) -> None:
    """Compares facts over groups in one all_reduce each. Every rank must take part, with as many facts. Host sync.
    Raises AmpRankError on every rank, by what differs; or where another rank has left the call out."""
    groups = [group for group in groups if group.size() > 1]
    digests = torch.tensor([fact.digest() for fact in facts], dtype=torch.int64, device="cpu")
    if not groups or type(digests) is not Tensor:  # FakeTensorMode has no numbers
        return
    has = f"{facts[0].what}: {facts[0].shown}"
    highest, lowest = maximum_over_ranks(torch.stack((digests, -digests)), groups, call, has).tolist()
    if differ := [fact for fact, high, low in zip(facts, highest, lowest, strict=True) if high != -low]:
        what = " and ".join(fact.what for fact in differ)
        has = "; ".join(f"{fact.what}: {fact.shown}" for fact in differ)
        raise AmpRankError(
            f"{call}: {what} differ between ranks. This is {' and '.join(map(ranks_of, groups))}, and has {has}. "
            "Initialize every rank alike, and load the same checkpoint on every rank after DistributedDataParallel has "
            "wrapped the model. See `ampctx explain differ-between-ranks`."
        )
