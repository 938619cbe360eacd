"""The units of ``fully_shard``: their parameters, meshes and mixed-precision policies.

torch takes a policy in ``fully_shard`` alone, and has no public way to read one later. This module is the only one that
reads torch's private attributes for that. They are the same in torch 2.11 to 2.15, apart from one: a state has one
group of parameters (2.11), or a list of groups. Whatever is missing raises ``UnknownTorchError``.
``tests/reliability/test_fsdp_levels.py`` guards these names.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ampctx.kernels.sharding import is_fully_sharded, is_sharded

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

T = TypeVar("T")

# A parameter has this attribute from its first gather on.
_GATHERED = "_unsharded_param"

# The policy and the mesh that ampctx itself has given, for a torch that keeps them elsewhere.
_given: weakref.WeakKeyDictionary[nn.Module, tuple[MixedPrecisionPolicy, Any]] = weakref.WeakKeyDictionary()


class UnknownTorchError(Exception):
    """This torch keeps policies elsewhere than the versions that ampctx supports."""


def note_given(module: nn.Module, policy: MixedPrecisionPolicy, mesh: Any) -> None:
    """Remembers what ``fully_shard`` was given for a module."""
    _given[module] = policy, mesh


@dataclass(frozen=True, eq=False)
class Unit:
    """What one call of ``fully_shard`` covers.

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

    @property
    def _state(self) -> Any:
        from torch.distributed.fsdp import fully_shard

        state = _read(fully_shard, "state")(self.modules[0])
        if state is None:
            raise UnknownTorchError
        return state

    def _groups(self) -> list[Any]:
        state = self._state
        if hasattr(state, "_fsdp_param_groups"):
            return list(state._fsdp_param_groups)
        group = _read(state, "_fsdp_param_group")
        return [] if group is None else [group]

    def _sharded(self) -> list[Any]:
        """What torch keeps of each parameter."""
        return [p for group in self._groups() for p in _read(group, "fsdp_params")]

    def policy(self) -> MixedPrecisionPolicy:
        """Raises UnknownTorchError."""
        return self._known(lambda: _read(self._state, "_mp_policy"), lambda policy, mesh: policy)

    def param_dtypes(self) -> dict[str, torch.dtype | None]:
        """The dtype that the policy casts each parameter to. None: it keeps its own. Raises UnknownTorchError."""
        common = self.policy().param_dtype

        def read() -> dict[int, torch.dtype | None]:
            return {id(_read(p, "sharded_param")): _read(p, "mp_policy").param_dtype for p in self._sharded()}

        # From torch 2.15 on, a policy may have exceptions.
        own = self._known(read, lambda policy, mesh: {})
        return {name: own.get(id(p), common) for name, p in self.params.items()}

    def left_out(self) -> list[str]:
        """The parameters that ``fully_shard`` was told to ignore. Raises UnknownTorchError."""

        def read() -> list[str]:
            known = {id(getattr(p, name, None)) for p in self._sharded() for name in ("sharded_param", _GATHERED)}
            return [name for name, p in self.params.items() if id(p) not in known]

        return self._known(read, lambda policy, mesh: [name for name, p in self.params.items() if not is_sharded(p)])

    def meshes(self) -> list[Any]:
        """Lists of ranks, nested as the data-parallel mesh. Several if ``shard_placement_fn`` has named several, none
        without parameters. Raises UnknownTorchError."""

        def read() -> list[Any]:
            found: list[Any] = []
            for group in self._groups():
                ranks = _read(group, "mesh_info").mesh.mesh.tolist()
                found += [] if ranks in found else [ranks]
            return found

        return self._known(read, lambda policy, mesh: [] if mesh is None else [mesh.mesh.tolist()])

    def _known(self, read: Callable[[], T], from_given: Callable[[MixedPrecisionPolicy, Any], T]) -> T:
        """What torch's attributes say, or else what ampctx itself has given."""
        try:
            return read()
        except UnknownTorchError:
            if self.modules[0] not in _given:
                raise
            return from_given(*_given[self.modules[0]])


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
            one = Unit(name, [module], {})
            try:
                unit = units.setdefault(id(one._state), one)
            except UnknownTorchError:
                unit = units.setdefault(module, one)
            if module not in unit.modules:
                unit.modules.append(module)
        params = outside if unit is None else unit.params
        params.update((f"{name}.{n}" if name else n, p) for n, p in module.named_parameters(recurse=False))
        children = [(c, name if n == "_orig_mod" else f"{name}.{n}" if name else n) for n, c in module.named_children()]
        left += [(child, path, unit) for child, path in reversed(children)]
    inside = {id(p) for unit in units.values() for p in unit.params.values()}
    return list(units.values()), {name: p for name, p in outside.items() if id(p) not in inside}
