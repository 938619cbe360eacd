"""Lazy gradients: fp32 gradients of masters that are created only when code reads them.

After a backward the gradients are in 16 bits beside the model's weights, scaled. ``ModelGrads`` keeps them there. One
read checks them and computes their norm, clipping multiplies one number, and an optimizer that knows the class reads
them directly. For all other code ``MasterParam.grad`` turns them into fp32.

amp gives them to a step as ``ampctx.masters.step.Step.pending``.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ampctx.kernels import foreach, handles, tensor_loops
from ampctx.kernels.foreach import Clipped, Factor, FoundInf, PerDevice, Unread, product
from ampctx.kernels.tensor_loops import stored_grad


def declares(optimizer: Any, name: str) -> bool:
    """Whether the optimizer's own class or attributes set the flag ``name`` to true.

    A wrapper that forwards unknown names would report the flag of the optimizer inside, which attributes set on the
    wrapper do not reach.
    """
    is_own = name in getattr(optimizer, "__dict__", ()) or hasattr(type(optimizer), name)
    return is_own and bool(getattr(optimizer, name))


# torch's attribute, below the property of the same name; ``stored_grad`` reads it.
_GRAD: Any = torch.Tensor.grad
_PLACE: Any = operator.attrgetter("_place")


class _GradPlace:
    """Shared by the masters whose lazy gradients belong together."""

    lazy: weakref.ref[ModelGrads] | None = None
    # Whether a master may have a gradient. Autograd can write one past the property; ``is_alone`` looks for it.
    has_grads = False


class MasterParam(nn.Parameter):
    """An fp32 master weight. Reading ``grad`` materializes the lazy gradients of its whole group. No host sync.

    Otherwise a parameter. A copy has no gradient, like that of any parameter; a pickle is a plain parameter.

    Args:
        like: a master of the same group of lazy gradients.
    """

    _place: _GradPlace

    def __new__(cls, data: Tensor, requires_grad: bool = True, like: MasterParam | None = None) -> MasterParam:
        master = super().__new__(cls, data, requires_grad)
        master._place = _GradPlace() if like is None else like._place
        return master

    @property
    def model_grads(self) -> ModelGrads | None:
        """The lazy gradients that include this master's. None if its gradient is a tensor or missing."""
        place = self.__dict__.get("_place")
        lazy = None if place is None or place.lazy is None else place.lazy()
        return lazy if lazy is not None and id(self) in lazy.masters.id_set else None

    @property
    def grad(self) -> Tensor | None:
        if (lazy := self.model_grads) is not None:
            lazy.materialize()
        return stored_grad(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if (lazy := self.model_grads) is not None:
            lazy.materialize()
        if value is not None and (place := self.__dict__.get("_place")) is not None:
            place.has_grads = True
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        if (lazy := self.model_grads) is not None:
            lazy.materialize()
        plain = nn.Parameter(self.data, self.requires_grad)
        plain.__dict__.update({name: value for name, value in vars(self).items() if name != "_place"})
        return plain.__reduce_ex__(protocol)


handles.extension.use_types([MasterParam])


def has_grad(p: Tensor) -> bool:
    """Whether ``p.grad`` would give a tensor. Lazy gradients stay lazy."""
    return stored_grad(p) is not None or (isinstance(p, MasterParam) and p.model_grads is not None)


class Masters(list):
    """A list of masters. What is derived from it is kept: it must not change."""

    @cached_property
    def ids(self) -> list[int]:
        return list(map(id, self))

    @cached_property
    def id_set(self) -> frozenset[int]:
        return frozenset(self.ids)

    @cached_property
    def places(self) -> set[_GradPlace]:
        return set(map(_PLACE, self))

    @property
    def have_grads(self) -> bool:
        """Whether a master may have a gradient that is not lazy. False at most if autograd itself has written one."""
        return any(place.has_grads for place in self.places)

    def forget_grads(self) -> None:
        """Notes that no master has a gradient any more."""
        for place in self.places:
            place.has_grads = False


class ModelGrads:
    """Lazy gradients: the 16-bit gradients of one backward, in place of the fp32 gradients of the masters.

    Args:
        masters: ``MasterParam``s.
        values: the gradient of each, not changed; strided, on any mix of devices.
        inv_scale: the factor that unscales the gradients.
        found_inf: set if a gradient holds inf or nan.
        norm: of the unscaled gradients, from a checkpoint. ``found_inf`` then stays as it is.
        last: no later call raises ``found_inf``.

    Reads the gradients once. No host sync.
    """

    def __init__(
        self,
        masters: Sequence[Tensor],
        values: Sequence[Tensor],
        inv_scale: Factor,
        found_inf: FoundInf,
        norm: Tensor | None = None,
        last: bool = False,
    ) -> None:
        self.masters = masters = masters if isinstance(masters, Masters) else Masters(masters)
        self.values: Sequence[Tensor] = values
        self._grads: dict[Tensor, Tensor] | None = None
        self.inv_scale = inv_scale
        self._lock = threading.Lock()
        # The norm before clipping.
        self.clipped_from: Tensor | None = None
        # The same read gives the norm of each gradient, to name the non-finite ones later.
        self._ids = masters.ids
        flags = found_inf if norm is None else Unread()
        total, self._norms = foreach.unscale_l2norms_of(values, flags, inv_scale, last)
        self._norm = total if norm is None else norm
        # The same number for the step, which clips by it: code may change a norm that ``norm()`` has returned.
        self._norm_again, flags.norm_again = flags.norm_again, None
        if norm is not None:
            self._norm_again = None
        # Of clips that ``_norm`` does not include: few programs ask for the norm after a clip.
        self._coefficients: list[Callable[[], Tensor]] = []
        self._places = masters.places
        for place in self._places:
            place.lazy = weakref.ref(self)

    @property
    def grads(self) -> dict[Tensor, Tensor]:
        """The gradients by master."""
        if self._grads is None:
            self._grads = dict(zip(self.masters, self.values, strict=True))
        return self._grads

    def norm(self) -> Tensor:
        """The L2 norm of the unscaled gradients, 0-d fp32 on the device of the first. No host sync."""
        while self._coefficients:
            norm = self._norm if self._norm_again is None else self._norm_again
            self._norm, self._norm_again = norm * foreach.move(self._coefficients.pop(0)(), norm.device), None
        return self._norm

    def not_finite(self) -> set[int]:
        """The ids of the masters whose gradients had a non-finite norm when they arrived. Host sync."""
        return {
            self._ids[place]
            for places, norms in self._norms
            for place, fine in zip(places, norms.isfinite().tolist(), strict=True)
            if not fine
        }

    def multiply(self, coefficient: Tensor) -> None:
        """Multiplies the factor of the gradients by a one-element tensor. No host sync."""
        coefficient = coefficient.reshape(()).float()
        self.inv_scale = product(self.inv_scale, PerDevice(coefficient))
        self._coefficients.append(lambda: coefficient)

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Multiplies the factor of the gradients by ``min(max_norm / (norm + 1e-6), 1)`` for an fp32 norm of one
        element, as it is now. The step forms the factor. No host sync."""
        again = self._norm_again if norm is self._norm else None
        own = norm.clone() if again is None else again
        if norm is self._norm:
            self._norm_again = own
        self.inv_scale = Clipped(self.inv_scale, own, max_norm)
        self._coefficients.append(lambda: Clipped(1.0, own, max_norm).value)

    @torch.no_grad()
    def materialize(self) -> None:
        """Creates the unscaled fp32 ``master.grad`` of every master. No host sync.

        Adds a gradient that autograd has meanwhile written into a master, which bypasses the property.
        """
        with self._lock:
            masters, grads = self.masters, self.values
            # In the layout of the gradient, so that the kernels can read both in memory order.
            wide = [
                torch.empty_like(g, dtype=m.dtype, requires_grad=False) for m, g in zip(masters, grads, strict=True)
            ]
            foreach.scale(grads, wide, Unread(), self.inv_scale)
            self.drop()
            if self.clipped_from is not None:
                for grad in wide:
                    grad.norm_before_clipping = self.clipped_from  # type: ignore[attr-defined]
            for place in self._places:
                place.has_grads = True
            for master, grad in zip(masters, wide, strict=True):
                there = stored_grad(master)
                _GRAD.__set__(master, grad if there is None else grad + there)

    def is_alone(self) -> bool:
        """Whether no master has another gradient."""
        return tensor_loops.have_no_grad(self.masters, True)

    def drop(self) -> None:
        """Forgets the gradients."""
        for place in self._places:
            if place.lazy is not None and place.lazy() is self:
                place.lazy = None
        self.masters, self.values, self._grads = Masters(), [], {}


def all_of(params: Iterable[Tensor]) -> list[ModelGrads]:
    """The lazy gradients whose masters are all in ``params`` and have no other gradients. Materializes the rest."""
    if torch.compiler.is_compiling():
        return []
    complete = []
    for lazy, is_whole in _lazy_of(list(params)).items():
        if is_whole and lazy.is_alone():
            complete.append(lazy)
        else:
            lazy.materialize()
    return complete


def clear_grads(params: list[Tensor]) -> None:
    """``grad = None`` for each. Lazy gradients of these parameters alone are dropped. No host sync."""
    for lazy, is_whole in _lazy_of(params).items():
        if is_whole:
            lazy.drop()
        else:
            lazy.materialize()
    tensor_loops.clear_grads(params, True)


def _lazy_of(params: list[Tensor]) -> dict[ModelGrads, bool]:
    """The lazy gradients of these parameters, and whether all their masters are here."""
    if MasterParam not in (types := set(map(type, params))):
        return {}
    masters: list[Any] = params if len(types) == 1 else [p for p in params if type(p) is MasterParam]
    if (first := _lazy_in(masters[0]._place)) is not None and tensor_loops.same_items(masters, first.masters):
        return {first: True}  # as usual: all masters of one optimizer
    given = set(map(id, masters))
    lazies = filter(None, map(_lazy_in, dict.fromkeys(map(_PLACE, masters))))
    return {lazy: lazy.masters.id_set <= given for lazy in lazies if not given.isdisjoint(lazy.masters.id_set)}


def _lazy_in(place: _GradPlace) -> ModelGrads | None:
    return None if place.lazy is None else place.lazy()
