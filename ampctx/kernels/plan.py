"""Plans: op calls that plain code has just made, made again in C with new gradients and numbers (csrc/plan.h).

A plan compares all that the calls came from, and reads everything before it writes anything. Where something is not as
it was it does nothing, and plain code runs. ``AMPCTX_PLAN=0`` switches plans off.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from ampctx._plan import PLANS
from ampctx.kernels.ops import extension, is_watched, raise_out_of_memory
from ampctx.kernels.reference import Tensors
from ampctx.kernels.sharding import dtensor
from ampctx.kernels.tensor_loops import all_none, grad_of, is_fake, same_items, version_of

# A list of an op call comes from a list of tensors; from the gradients of parameters (parameters, gradients); from
# dicts (dicts, key, entries); or None: each run is given it.
Column = list[Tensor] | tuple[list[Tensor], list[Tensor]] | tuple[list[dict[str, Any]], str, list[Tensor]] | None


# A dict, and the keys and values that it must keep, in order: each the very object, one of a type, or any ``object``.
Entries = tuple[dict[Any, Any], list[Any], list[Any]]


class PlannedCall(NamedTuple):
    """An op call: its name, where its lists come from, and which of them it writes, by their places."""

    op: str
    columns: list[Column]
    written: tuple[int, ...]


class Plan:
    """The calls of one step, or of the end of a block. It does not keep gradients, nor entries of dicts."""

    def __init__(self, made: Any, kept: tuple[Any, ...]) -> None:
        self._made, self._kept = made, kept  # C has bare pointers to what is kept

    def run(
        self,
        groups: Any,
        arguments: list[tuple[Any, ...]],
        grads: list[Any] | None = None,
        may_share: bool = True,
        takes: bool = False,
    ) -> list[list[Tensor]] | None:
        """Makes the calls, and bumps the versions of what they wrote. Returns the gradients of each column of these, or
        None where the plan does not fit: nothing has changed then. Not for calls that ``ops.is_watched``.

        arguments: of each call, the lists for columns of None, and the arguments after the lists.
        grads: for each column of gradients, a list in place of those in ``.grad``, or None.
        may_share: whether two parameters may share a gradient.
        takes: set ``.grad`` of gradients that no call writes to None.
        """
        try:
            return _run(self._made, groups, arguments, grads, may_share, takes)
        except RuntimeError as error:
            raise_out_of_memory(error)
            raise


def make_plan(
    groups: Sequence[Mapping[str, Any]], calls: list[PlannedCall], mappings: Sequence[Entries] = (), idle: Tensors = ()
) -> Plan | None:
    """Makes a plan of calls that were just made with these lists. None where it cannot read a tensor, has no kernel, or
    is switched off.

    groups: whose members must stay. idle: parameters that must have no gradient.
    """
    columns = [column for call in calls for column in call.columns]
    if not _are_served(columns):
        return None
    # C knows a column by its owners, so that the lists of a call which are one list are read once.
    owners = [part for column in columns if column for part in ([column] if type(column) is list else column[:-1])]
    kept = list(groups), [list(group["params"]) for group in groups], list(mappings), list(idle)
    made = extension.reader.make_plan(*kept, [tuple(call) for call in calls])
    return None if made is None else Plan(made, (*kept, owners))


def run_once(calls: list[PlannedCall], arguments: list[tuple[Any, ...]]) -> bool:
    """Makes calls of lists and gradients, no two of which may lie at one place, without a plan for the next time. False
    where a plan could not, and nothing has changed then. ``arguments``: see ``Plan.run``."""
    if not _are_served([column for call in calls for column in call.columns]):
        return False
    try:
        return bool(extension.reader.run_once([tuple(call) for call in calls], arguments))
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise


def _are_served(columns: list[Column]) -> bool:
    """Whether C can make the calls with these lists. It knows DTensors then."""
    first = next((t for column in columns if column for t in (column if type(column) is list else column[-1])), None)
    is_read = isinstance(first, Tensor) and extension.serves(first.device.type)
    if not PLANS or not is_read or extension.reader is None or is_watched():
        return False
    if kind := dtensor():
        # Private: the descriptors of attributes that sharding.py reads, too. tests/optimizers/test_plans_on_meshes.py
        # guards them.
        extension.reader.use_dtensor(kind, kind._local_tensor, kind._spec)
    return True


# --- questions about many tensors: in C, and in a loop of Python's for what is no plain tensor -----------------------


def _in_c(name: str, otherwise: Callable[..., Any] = lambda *given: None) -> Callable[..., Any]:
    return getattr(extension.reader, name, otherwise)


_have_no_grads, _marks, _run = map(_in_c, ("have_no_grads", "marks", "run"))


def have_no_grads(params: list[Tensor]) -> bool:
    """Whether ``grad`` of each is None. No host sync."""
    found: bool | None = _have_no_grads(params)
    return all_none(map(grad_of, params)) if found is None else found


def marks(tensors: list[Tensor]) -> bytes:
    """Version and address of each tensor, to see later what somebody has written or moved. No host sync."""
    found: bytes | None = _marks(tensors)
    if found is None:
        pairs = ((version_of(t), 0 if is_fake(t) else t.data_ptr()) for t in tensors)
        return array("q", chain.from_iterable(pairs)).tobytes()
    return found


def _as_before(groups: Any, members: list[list[Tensor]], params: list[Tensor], former: bytes | None) -> bool | None:
    """Whether each param group holds these parameters, in order, and ``params`` have no gradient and, if given, these
    marks. None where C does not know one of ``params``. No host sync."""
    is_same = len(groups) == len(members) and all(map(same_items, (group["params"] for group in groups), members))
    return is_same and have_no_grads(params) and (former is None or marks(params) == former)


def _advanced(former: bytes) -> bytes:
    """The marks of tensors that one write each has changed since."""
    numbers = array("q", former)
    numbers[::2] = array("q", [version + 1 for version in numbers[::2]])
    return numbers.tobytes()


as_before: Callable[..., bool | None] = _in_c("as_before", _as_before)
# (groups, entries): whether the param groups are these dicts, with these entries. There is a plan.
same_groups: Callable[[Any, list[Entries]], bool] = _in_c("same_groups")
advanced: Callable[[bytes], bytes] = _in_c("advanced", _advanced)


def changed(tensors: list[Tensor], former: bytes, now: bytes) -> set[int]:
    """The ids of those whose marks differ."""
    if former == now:
        return set()
    return {id(t) for i, t in enumerate(tensors) if former[16 * i : 16 * i + 16] != now[16 * i : 16 * i + 16]}
