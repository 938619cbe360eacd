"""The units of ``fully_shard``: their parameters, meshes and mixed-precision policies.

torch takes a policy in ``fully_shard`` alone, and has no public way to read one later. This module is the only one that
reads torch's private attributes for that. They are the same in torch 2.11 to 2.15, apart from one: a state has one
group of parameters (2.11), or a list of groups. Whatever is missing raises ``UnknownTorchError``.
``tests/reliability/test_fsdp_levels.py`` guards these names.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ampctx.kernels.sharding import is_fully_sharded

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

# The policy and the mesh of calls by ampctx itself, for a torch that keeps them elsewhere.
BY_US: weakref.WeakKeyDictionary[nn.Module, tuple[MixedPrecisionPolicy, Any]] = weakref.WeakKeyDictionary()


class UnknownTorchError(Exception):
    """This torch keeps policies elsewhere than the versions that ampctx supports."""


@dataclass(frozen=True, eq=False)
class Unit:
    """The modules and parameters that one call of ``fully_shard`` covers.

    Attributes:
        name: of its first module in the model, without the "_orig_mod" of torch.compile; "" for the model itself.
        modules: those that were passed to ``fully_shard``.
        params: its own parameters by name in the model, without those of units inside.
    """

    name: str
    modules: list[nn.Module]
    params: dict[str, Tensor]

    def __str__(self) -> str:
        return f'the unit "{self.name}"' if self.name else "the unit of the model itself"

    def settings(self) -> tuple[MixedPrecisionPolicy, dict[str, torch.dtype | None], list[Any]]:
        """Reads the arguments of ``fully_shard``. Raises UnknownTorchError.

        Returns:
            The policy; the dtype that it casts each parameter to, or None; the ranks of each data-parallel mesh, which
            are several where ``shard_placement_fn`` has named several, and none without parameters.
        """
        meshes: list[Any] = []
        try:
            state = _state_of(self.modules[0])
            policy = _read(state, "_mp_policy")
            several = hasattr(state, "_fsdp_param_groups")
            found = state._fsdp_param_groups if several else [_read(state, "_fsdp_param_group")]
            groups = [group for group in found if group is not None]
            for ranks in (_read(group, "mesh_info").mesh.mesh.tolist() for group in groups):
                meshes += [] if ranks in meshes else [ranks]
            sharded = [p for group in groups for p in _read(group, "fsdp_params")]
            # From torch 2.15 on, a policy may have exceptions.
            own = {id(_read(p, "sharded_param")): _read(p, "mp_policy").param_dtype for p in sharded}
        except UnknownTorchError:
            if self.modules[0] not in BY_US:
                raise
            (policy, mesh), own = BY_US[self.modules[0]], {}
            meshes = [] if mesh is None else [mesh.mesh.tolist()]
        dtypes = {name: own.get(id(p), policy.param_dtype) for name, p in self.params.items()}
        return policy, dtypes, meshes


def _state_of(module: nn.Module) -> Any:
    from torch.distributed.fsdp import fully_shard

    if (state := _read(fully_shard, "state")(module)) is None:
        raise UnknownTorchError
    return state


def _read(holder: Any, name: str) -> Any:
    if not hasattr(holder, name):
        raise UnknownTorchError
    return getattr(holder, name)


def units_of(model: nn.Module) -> tuple[list[Unit], dict[str, Tensor]]:
    """The units of a model, and its parameters by name that are in none. No host sync."""
    units: dict[Any, Unit] = {}
    outside: dict[str, Tensor] = {}
    seen: set[nn.Module] = set()
    # No recursive inner function: it would be a cycle that keeps the model alive.
    left: list[tuple[nn.Module, str, Unit | None]] = [(model, "", None)]
    while left:
        module, name, unit = left.pop()
        if module in seen:
            continue
        seen.add(module)
        if is_fully_sharded(module):
            try:
                key: Any = id(_state_of(module))
            except UnknownTorchError:
                key = module
            unit = units.setdefault(key, Unit(name, [module], {}))
            if module not in unit.modules:
                unit.modules.append(module)
        params = outside if unit is None else unit.params
        params.update((f"{name}.{n}" if name else n, p) for n, p in module.named_parameters(recurse=False))
        children = [(c, name if n == "_orig_mod" else f"{name}.{n}" if name else n) for n, c in module.named_children()]
        left += [(child, path, unit) for child, path in reversed(children)]
    inside = {id(p) for unit in units.values() for p in unit.params.values()}
    return list(units.values()), {name: p for name, p in outside.items() if id(p) not in inside}
