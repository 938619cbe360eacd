"""Errors for calls that would train on wrong numbers: return values taken for something else, a model under amp twice,
a GradScaler over masters, scaled gradients that a block has left in another optimizer."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping

# Private in contextlib: the class that ``contextmanager`` returns. The decorator cannot be given a subclass of it.
from contextlib import _GeneratorContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ampctx._errors import AmpAttributeError, AmpError, AmpTypeError
from ampctx.casts.arguments import LOW_PRECISION, Undo
from ampctx.kernels.sharding import values_of
from ampctx.kernels.tensor_loops import all_none, grad_of, version_of
from ampctx.scaling.step_record import is_capturing

# --- return values used in the wrong way ------------------------------------------------------------------------------

_NO_WITH = (
    "amp.scale_loss is a context manager: write `with amp.scale_loss(loss, optimizer) as scaled_loss:` and call "
    "scaled_loss.backward() in it"
)
_SEE_WITH = "See docs/errors.md#ampscale_loss-is-a-context-manager."


class LossBlock(_GeneratorContextManager):
    """What ``scale_loss`` returns, for one ``with``. Using it as a loss raises an error that names the fix."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AmpAttributeError(f"{_NO_WITH}. A block has no {name!r}. {_SEE_WITH}")

    def _no_number(self, *_: Any) -> NoReturn:
        raise AmpTypeError(f"{_NO_WITH}. A block is no number. {_SEE_WITH}")

    __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __sub__ = __float__ = _no_number


class Initialized(tuple):
    """The tuple ``(models, optimizers)``. Using it as the model raises an error that names the fix."""

    __slots__ = ()

    def _refusal(self, use: str) -> str:
        return (
            f"amp.initialize returned a pair, the model and the optimizer, and {use}. Write "
            "`model, optimizer = amp.initialize(model, optimizer, ...)`. "
            "See docs/errors.md#ampinitialize-returned-a-pair-the-model-and-the-optimizer."
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise AmpAttributeError(self._refusal(f"it has no {name!r}"))

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AmpTypeError(self._refusal("it was called"))

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)


# --- a second initialize ----------------------------------------------------------------------------------------------

# The modules of all sessions, until reset.
_under_amp: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def note_models(models: Iterable[nn.Module], session: Any) -> Undo:
    """Marks models as under amp, until the undo."""
    modules = weakref.WeakSet(module for model in models for module in model.modules())
    _under_amp.update((module, weakref.ref(session)) for module in modules)

    def undo() -> None:
        for module in modules:
            _under_amp.pop(module, None)

    return undo


def refuse_models_under_amp(models: Iterable[nn.Module], session: Any) -> None:
    """Raises AmpError if a model holds 16-bit tensors because a session has cast them."""
    for prefix, module in (named for model in models for named in model.named_modules() if named[1] in _under_amp):
        for kind, tensors in (("param", module.named_parameters), ("buffer", module.named_buffers)):
            low = [(n, t) for n, t in tensors(prefix, recurse=False) if t.dtype in LOW_PRECISION]
            for name, t in low[:1]:
                is_here = _under_amp[module]() is session
                where = "this session" if is_here else "another AmpSession"
                whose = "amp.reset()" if is_here else "reset() of that one"
                raise AmpError(
                    f"Found {kind} {name} with type {t.type()}, expected fp32: the model is under amp already, in "
                    f"{where}, which cast its weights to 16 bits. Call {whose} first. Pass all models and optimizers "
                    "that train together to one amp.initialize, and add later parameters with "
                    "optimizer.add_param_group(). See "
                    "docs/errors.md#found-param-with-type-torchhalftensor-expected-fp32."
                )


# --- a GradScaler over masters ----------------------------------------------------------------------------------------


def grad_scaler_calls() -> bool:
    """Whether an enabled scaler of torch is among the callers. It marks only fused optimizers, by attributes; of others
    its frame is the one sign. A test guards the names in that frame."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            scaler = frame.f_locals.get("self")
            if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
                return True
        frame = frame.f_back
    return False


# --- blocks over the wrong optimizer ----------------------------------------------------------------------------------

# This many gradients show that a block has reached an optimizer. Marking all would cost as much as unscaling them.
MARKS = 16


class LeftGrads:
    """The scaled gradients that blocks over other optimizers have left in one optimizer's parameters without masters.

    Gradients are known by identity and version, and held weakly. Reading one is a host sync: only on the way to an
    error, or where a loop zeroes gradients through ``.data``, which versions do not count.
    """

    def __init__(self) -> None:
        # By id of the gradient.
        self.marks: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        # Those that were there when a block of this optimizer began, which will add its own to them.
        self.joined: list[tuple[Tensor, Tensor]] = []
        # Counts blocks of this optimizer.
        self._blocks = 0

    def zeroed(self) -> None:
        self.marks, self.joined = {}, []

    def watch(self, params: list[Tensor], has_masters: bool) -> Callable[[set[int]], None]:
        """Looks at the gradients when a block of others begins. The function that it returns marks, when the block
        ends, those that the block has written. With masters they are dropped instead, like those of 16-bit weights.

        That function takes the ids of parameters that the block itself unscales.
        """
        formers, blocks = list(map(grad_of, params)), self._blocks
        versions = formers if all_none(formers) else [None if g is None else _version(g) for g in formers]

        def note(unscaled: set[int]) -> None:
            grads = list(map(grad_of, params))
            # A block of this optimizer inside the other one has its own gradients.
            if all_none(grads) or blocks != self._blocks:
                return
            marks = {}
            for p, g, former, version in zip(params, grads, formers, versions, strict=True):
                if g is None or id(p) in unscaled or _version(g) is None:
                    continue
                if former is None and has_masters:
                    p.grad = None
                elif g is not former or _version(g) != version:
                    marks[id(g)] = weakref.ref(g), version_of(g)
                elif id(g) in self.marks:
                    marks[id(g)] = self.marks[id(g)]
                if len(marks) == MARKS and not has_masters:
                    break
            self.marks = marks

        return note

    def block_begins(self, params: list[Tensor], is_first: bool) -> None:
        """A block of this optimizer begins. ``is_first``: no other block is open."""
        self._blocks += 1
        if is_first:
            self.joined = self._untouched(params) if self.marks else []

    def block_ends(self, optimizer: Any, names: Callable[[], Mapping[int, str]]) -> None:
        """Raises AmpError if the block would add its gradients to scaled ones. Not when it begins: ``zero_grad()``
        inside the block is right."""
        found, self.joined = self.joined, []
        self._refuse(found, optimizer, names, "and this block would add its own to them")

    def step_begins(self, params: list[Tensor], optimizer: Any, names: Callable[[], Mapping[int, str]]) -> None:
        """Raises AmpError if the step would use scaled gradients."""
        self._refuse(self._untouched(params), optimizer, names, "and this step would use them as unscaled ones")

    def _untouched(self, params: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """(parameter, gradient) of the marks whose gradient is there unchanged. No host sync."""
        found = []
        for p in params:
            g = p.grad
            if g is not None and id(g) in self.marks:
                reference, version = self.marks[id(g)]
                if reference() is g and version_of(g) == version:
                    found.append((p, g))
        if not found:
            self.marks = {}
        return found

    def _refuse(self, found: list, optimizer: Any, names: Callable[[], Mapping[int, str]], why: str) -> None:
        if not found or is_capturing():
            return
        if not any(torch.count_nonzero(values_of(g).to_dense()).item() for _, g in found):
            return self.zeroed()
        by_id = names()
        listed = [by_id[id(p)] for p, _ in found]
        raise AmpError(
            f"{type(optimizer).__name__}.step(): a scale_loss block over other optimizers has left scaled gradients in "
            f"{', '.join(listed[:3])}{' and others' * (len(listed) > 3)}, {why}. Name every optimizer that the "
            "backward reaches: amp.scale_loss(loss, [optimizer, ...]). Or call zero_grad() of this optimizer before "
            "its own backward. See docs/errors.md#has-left-scaled-gradients-in."
        )


def _version(grad: Tensor) -> int | None:
    """None for an inference tensor, which counts none."""
    return None if grad.is_inference() else version_of(grad)
