"""Pending gradients: the 16-bit gradients of a block, kept for the step in place of fp32 gradients of the masters.

One read checks them and computes their norm, clipping multiplies one number, and an optimizer of ampctx reads them in
its step. For all other code ``MasterParam.grad`` turns them into fp32, all masters of an optimizer at once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ampctx.kernels import foreach, tensor_loops
from ampctx.kernels.extension import PLAIN_TYPES
from ampctx.kernels.foreach import Clipped, Factor, PerDevice, Unread, product
from ampctx.kernels.plan import have_no_grads
from ampctx.kernels.tensor_loops import stored_grad

# torch's attribute, below the property of the same name; ``stored_grad`` reads it.
_GRAD: Any = torch.Tensor.grad
# Makes the fp32 gradient of a master, in the layout of the given one, so that kernels can read both in memory order.
new_grad = partial(torch.empty_like, dtype=torch.float32, requires_grad=False)


class Place:
    """The holder of the pending gradients of one optimizer's masters, or of None.

    ``checked``: the latest ones, even if they have been materialized since. ``has_grads``: a master may have a gradient
    of its own. Then none is pending.
    """

    def __init__(self) -> None:
        self.pending: Pending | None = None
        self.checked: Pending | None = None
        self.has_grads = True
        self._lock = threading.Lock()

    def materialize(self) -> None:
        """Turns pending gradients into fp32 ones. No host sync."""
        if self.pending is not None:
            with self._lock:
                if (pending := self.pending) is not None:
                    pending.write()
                    pending.drop()


class MasterParam(nn.Parameter):
    """An fp32 master weight. Reading a pending ``grad`` turns all of its optimizer's into fp32. No host sync.

    Otherwise a parameter. A copy or pickle is a plain parameter.
    """

    place: Place

    def __new__(cls, data: Tensor, requires_grad: bool = True, place: Place | None = None) -> MasterParam:
        master = super().__new__(cls, data, requires_grad)
        master.place = place = Place() if place is None else place

        # Autograd writes past the property.
        def arrived(_: Tensor) -> None:
            place.has_grads = True
            place.materialize()

        master.register_post_accumulate_grad_hook(arrived)
        return master

    @property
    def grad(self) -> Tensor | None:
        place = self.__dict__.get("place")
        if place is not None and (pending := place.pending) is not None and id(self) in pending.members:
            place.materialize()
        return stored_grad(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if (place := self.__dict__.get("place")) is not None:
            place.materialize()
            place.has_grads |= value is not None
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self.data, self.requires_grad)
        plain.__dict__.update({name: value for name, value in vars(self).items() if name != "place"})
        return plain.__reduce_ex__(protocol)


PLAIN_TYPES.append(MasterParam)


class Pending:
    """The 16-bit gradients of one backward, for ``masters`` of one optimizer.

    Args:
        masters: those whose weights have a gradient, and ``place``: theirs.
        values: the gradient of each, not changed; strided, on any mix of devices.
        inv_scale: the factor that unscales them.
        norm: that of the unscaled gradients, 0-d. norms: of each, to name the non-finite ones later; groups of places
            and norms. norm_again: the first in memory of its own, because code may change a norm that a clip has
            returned.
    """

    def __init__(
        self,
        masters: Sequence[Tensor],
        place: Place,
        values: Sequence[Tensor],
        inv_scale: Factor,
        norm: Tensor,
        norms: list[tuple[Sequence[int], Tensor]],
        norm_again: Tensor | None = None,
    ) -> None:
        self.masters, self.place, self.values, self.inv_scale = masters, place, values, inv_scale
        self.ids = list(map(id, masters))
        # The norm before clipping, once they are clipped.
        self.clipped_from: Tensor | None = None
        self._clip: PerDevice | None = None
        self._norm, self._norms, self._norm_again = norm, norms, norm_again

    @cached_property
    def grads(self) -> dict[Tensor, Tensor]:
        """The gradients by master."""
        return dict(zip(self.masters, self.values, strict=True))

    @cached_property
    def members(self) -> frozenset[int]:
        return frozenset(self.ids)

    def not_finite(self) -> set[int]:
        """The ids of the masters whose gradients had a non-finite norm when they arrived. Host sync."""
        found = (zip(places, norms.isfinite().tolist(), strict=True) for places, norms in self._norms)
        return {self.ids[place] for place, is_fine in chain.from_iterable(found) if not is_fine}

    def clip(self, norm: Tensor, max_norm: float | Tensor) -> None:
        """Multiplies the factor of the gradients by ``min(max_norm / (norm + 1e-6), 1)`` for a norm of one element, as
        it is now. For a number and an fp32 norm the step forms the factor. No host sync."""
        again = self._norm_again if norm is self._norm else None
        again = norm.clone() if again is None else again
        if norm is self._norm:  # else that of other gradients, too
            self._norm = again
        self.clipped_from, self._norm_again = norm, again
        if isinstance(max_norm, Tensor):
            coefficient = torch.clamp(foreach.move(max_norm, norm.device) / (norm + 1e-6), max=1.0)
            self._clip = PerDevice(coefficient.reshape(()).float())
            self.inv_scale = product(self.inv_scale, self._clip)
        else:
            self._clip = Clipped(1.0, self._norm_again, max_norm)
            self.inv_scale = Clipped(self.inv_scale, self._norm_again, max_norm)

    def norm(self) -> Tensor:
        """The L2 norm of the unscaled gradients as they are now, 0-d fp32 on the device of the first. No host sync."""
        return self._norm if self._clip is None else self._norm * foreach.move(self._clip.value, self._norm.device)

    def norm_before_step(self, others: Sequence[Tensor]) -> Tensor | None:
        """The norm before clipping. None if nobody has computed it, because ``others`` have gradients, too."""
        if self.clipped_from is not None:
            return self.clipped_from
        for p in others:
            if stored_grad(p) is not None:
                return None
        return self._norm

    @torch.no_grad()
    def write(self) -> None:
        """Writes the unscaled fp32 gradient of each master. Adds one that autograd has meanwhile written there."""
        wide = list(map(new_grad, self.values))
        foreach.scale(self.values, wide, Unread(), self.inv_scale)
        self.place.has_grads = True
        if self.clipped_from is not None:
            tensor_loops.set_each(wide, "norm_before_clipping", self.clipped_from)
        there = map(stored_grad, self.masters)
        tensor_loops.store_grads(self.masters, (g if t is None else g + t for g, t in zip(wide, there, strict=True)))

    def drop(self) -> None:
        """Forgets the gradients. The norms stay, to name the non-finite ones."""
        self.place.pending = None
        self.masters, self.values = [], []
        self.__dict__.pop("grads", None)


def fills_its_storage(t: Tensor) -> bool:
    return t.layout == torch.strided and t.untyped_storage().nbytes() == t.nbytes


def has_grad(p: Tensor) -> bool:
    """Whether ``p.grad`` would give a tensor. Pending gradients stay pending."""
    if stored_grad(p) is not None:
        return True
    pending = p.place.pending if type(p) is MasterParam else None
    return pending is not None and id(p) in pending.members


def pending_in(params: list[Tensor]) -> list[Pending]:
    """The pending gradients whose masters are all in ``params``, not clipped yet, and without other gradients. Turns
    others of these parameters into fp32. No host sync."""
    if torch.compiler.is_compiling():
        return []
    complete = []
    for pending, is_whole in _pending_of(params):
        if is_whole and pending.clipped_from is None:
            complete.append(pending)
        else:
            pending.place.materialize()
    return complete


def clear_grads(params: list[Tensor]) -> None:
    """``grad = None`` for each. Pending gradients of these parameters alone are dropped. No host sync."""
    for pending, is_whole in _pending_of(params):
        if is_whole:
            pending.drop()
        else:
            pending.place.materialize()
    if not have_no_grads(params):
        tensor_loops.clear_grads(params)


def _pending_of(params: list[Tensor]) -> list[tuple[Pending, bool]]:
    """The pending gradients of these parameters, and whether all their masters are here."""
    kinds = set(map(type, params))
    if MasterParam not in kinds:
        return []
    masters = params if len(kinds) == 1 else [p for p in params if type(p) is MasterParam]
    found = [place.pending for place in set(map(attrgetter("place"), masters)) if place.pending is not None]
    if len(found) == 1 and tensor_loops.same_items(params, found[0].masters):
        return [(found[0], True)]  # as usual: all masters of one optimizer
    given = set(map(id, params)) if found else set()
    return [(pending, given.issuperset(pending.ids)) for pending in found]
