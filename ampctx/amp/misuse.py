"""Errors for calls that would train on wrong numbers: return values taken for something else, a model under amp twice,
scaled gradients that a block has left in another optimizer, blocks in several threads, which would mix them up."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable

# Private in contextlib: the class that ``contextmanager`` returns. The decorator cannot be given a subclass of it.
from contextlib import _GeneratorContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ampctx._decorators import host_may_read
from ampctx._errors import AmpAttributeError, AmpError, AmpTypeError, listed
from ampctx.casts.arguments import LOW_PRECISION, Undo
from ampctx.kernels.sharding import is_sharded, values_of
from ampctx.kernels.tensor_loops import all_none, grad_of, version_of

# --- return values used in the wrong way ------------------------------------------------------------------------------


class LossBlock(_GeneratorContextManager):
    """The return value of ``scale_loss``, for one ``with``. Using it as a loss raises an error that names the fix."""

    def _refuse(self, error: type[Exception], use: str) -> NoReturn:
        raise error(
            "amp.scale_loss is a context manager: write `with amp.scale_loss(loss, optimizer) as scaled_loss:` and "
            f"call scaled_loss.backward() in it. {use}. See `ampctx explain amp.scale_loss-is-a-context-manager`."
        )

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(AmpAttributeError, f"A block has no {name!r}")

    def _no_number(self, *_: Any) -> NoReturn:
        self._refuse(AmpTypeError, "A block is no number")

    __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __sub__ = __float__ = _no_number


class Initialized(tuple):
    """The tuple ``(models, optimizers)``. Using it as the model raises an error that names the fix."""

    __slots__ = ()

    def _refuse(self, error: type[Exception], use: str) -> NoReturn:
        raise error(
            f"amp.initialize returned a pair, the model and the optimizer, and {use}. Write `model, optimizer = "
            "amp.initialize(model, optimizer, ...)`. See `ampctx explain amp.initialize-returned-a-pair`."
        )

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(AmpAttributeError, f"it has no {name!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse(AmpTypeError, "it was called")

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)


# --- a second initialize ----------------------------------------------------------------------------------------------

# The modules of all sessions, until reset.
_under_amp: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def note_models(models: Iterable[nn.Module], session: Any) -> Undo:
    modules = weakref.WeakSet(module for model in models for module in model.modules())
    _under_amp.update((module, weakref.ref(session)) for module in modules)

    def undo() -> None:
        for module in modules:
            _under_amp.pop(module, None)

    return undo


def refuse_models_under_amp(models: Iterable[nn.Module], session: Any) -> None:
    """Raises AmpError if a model holds 16-bit tensors because a session has cast them."""
    for prefix, module in (named for model in models for named in model.named_modules() if named[1] in _under_amp):
        is_here = _under_amp[module]() is session
        where, whose = ("this session", "amp.reset()") if is_here else ("another AmpSession", "reset() of that one")
        tensors = {f"param {n}": p for n, p in module.named_parameters(prefix, False)}
        tensors |= {f"buffer {n}": b for n, b in module.named_buffers(prefix, False)}
        if low := next((name for name, t in tensors.items() if t.dtype in LOW_PRECISION), None):
            raise AmpError(
                f"Found {low} with type {tensors[low].type()}, expected fp32: the model is under amp already, in "
                f"{where}, which cast its weights to 16 bits. Call {whose} first. Pass all models and optimizers that "
                "train together to one amp.initialize, and add later parameters with optimizer.add_param_group(). See "
                "`ampctx explain found-param-with-type`."
            )


# --- a model that was sharded too late --------------------------------------------------------------------------------


def steps_one_of(binding: Any, names: Any) -> bool:
    """Whether an optimizer steps a parameter of the models that ``names`` knows."""
    of_models = {id(p) for params in names.by_model() for p in params.values()}
    return not of_models.isdisjoint(map(id, binding.model_params()))


def refuse_sharded_since(binding: Any, names: Any) -> None:
    """Raises AmpError if sharding has given the models other parameters than an optimizer steps."""
    if not binding.params() or steps_one_of(binding, names):
        return
    if any(is_sharded(p) for params in names.by_model() for p in params.values()):
        raise AmpError(
            f"{type(binding.optimizer).__name__}.step(): the model was sharded after amp.initialize, which gave it new "
            "parameters, and this optimizer steps the former ones. Shard the model first, then make the optimizer, "
            "then call amp.initialize. See `ampctx explain sharded`."
        )


# --- blocks over the wrong optimizer ----------------------------------------------------------------------------------

# So many gradients show that a block has reached an optimizer. Marking all would cost as much as unscaling them.
MARKS = 16


class LeftGrads:
    """Scaled gradients that blocks over other optimizers have left in one optimizer's parameters without masters.

    Known by identity and version, and held weakly. Reading one is a host sync: only on the way to an error, or where a
    loop zeroes gradients through ``.data``, which versions do not count.
    """

    def __init__(self) -> None:
        self.marks: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by id of the parameter
        # Those that were there when a block of this optimizer began, which will add its own to them.
        self.joined: list[tuple[Tensor, Tensor]] = []
        # All blocks of the optimizer itself.
        self.blocks = 0

    def zeroed(self) -> None:
        self.marks, self.joined = {}, []

    def watch(self, params: list[Tensor], has_masters: bool) -> Callable[[set[int]], None]:
        """Call when a block over other optimizers begins; call the result when it ends, with the ids of the parameters
        that it unscales. Marks the gradients that the block has left in ``params``, or drops them with masters, as of
        16-bit weights."""
        formers, blocks = list(map(grad_of, params)), self.blocks
        versions = formers if all_none(formers) else list(map(_version, formers))

        def note(unscaled: set[int]) -> None:
            grads = list(map(grad_of, params))
            # A block of this optimizer inside the other one has its own gradients.
            if all_none(grads) or blocks != self.blocks:
                return
            marked = 0
            for p, g, former, version in zip(params, grads, formers, versions, strict=True):
                if id(p) in unscaled or (now := _version(g)) is None or (g is former and now == version):
                    continue
                if former is None and has_masters:
                    p.grad = None
                elif marked < MARKS:
                    self.marks[id(p)], marked = (weakref.ref(g), now), marked + 1

        return note

    def block_begins(self, params: list[Tensor]) -> None:
        """Call when the first of nested blocks of the optimizer begins, if there are ``marks`` or ``joined``."""
        self.joined = self._untouched(params)

    def block_ends(self, binding: Any) -> None:
        """Raises AmpError if the block would add its gradients to scaled ones. It may call ``zero_grad()`` first."""
        found, self.joined = self.joined, []
        self._refuse(found, binding, "and this block would add its own to them")

    def step_begins(self, binding: Any) -> None:
        found = self._untouched(binding.masters.params_without_master)
        self._refuse(found, binding, "and this step would use them as unscaled ones")

    def _untouched(self, params: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """(parameter, gradient) of the marks whose gradient is there unchanged. Forgets the others. No host sync."""
        marked = [(p, p.grad, *self.marks[id(p)]) for p in params if id(p) in self.marks and p.grad is not None]
        found = [(p, g) for p, g, marked_grad, version in marked if marked_grad() is g and version_of(g) == version]
        self.marks = {id(p): self.marks[id(p)] for p, _ in found}
        return found

    def _refuse(self, found: list[tuple[Tensor, Tensor]], binding: Any, why: str) -> None:
        if not found or not host_may_read():
            return
        if not any(torch.count_nonzero(values_of(g).to_dense()).item() for _, g in found):
            return self.zeroed()
        names = binding.names_by_id()
        raise AmpError(
            f"{type(binding.optimizer).__name__}.step(): a scale_loss block over other optimizers has left scaled "
            f"gradients in {listed(names[id(p)] for p, _ in found)}, {why}. Name every optimizer that the backward "
            "reaches: amp.scale_loss(loss, [optimizer, ...]). Or call zero_grad() of this optimizer before its own "
            "backward. See `ampctx explain has-left-scaled-gradients-in`."
        )


def _version(grad: Tensor | None) -> int | None:
    """None without a gradient, and for an inference tensor, which counts no versions."""
    return None if grad is None or grad.is_inference() else version_of(grad)


# --- a session in several threads -------------------------------------------------------------------------------------


class OwnThread:
    """The thread that casts per op, and those of the open ``scale_loss`` blocks, of one session."""

    def __init__(self) -> None:
        self.of_casts: threading.Thread | None = None
        self._of_blocks: list[threading.Thread] = []

    def check(self, name: str, casts_on: bool) -> None:
        """Raises AmpError if active casts or an open block belong to another thread that is alive."""
        here = threading.current_thread()
        self._of_blocks[:] = [thread for thread in self._of_blocks if thread.is_alive()]
        blocks, casts = next(iter(self._of_blocks), here), self.of_casts or here
        why = ""
        if casts_on and casts is not here and casts.is_alive():
            why = (
                f"amp.initialize switched on the casts of O1/O4 in thread {casts.name!r}. torch's autocast belongs to "
                "a thread. Call initialize, scale_loss and reset in the thread that trains. Forwards may run in any."
            )
        elif blocks is not here:
            why = (
                f"a scale_loss block of the same session is open in thread {blocks.name!r}. ampctx cannot tell their "
                "gradients apart. Leave that block first, or give each thread its own AmpSession."
            )
        if why:
            raise AmpError(f"amp.{name} was called in thread {here.name!r}, but {why}")

    def enter_block(self, casts_on: bool) -> None:
        """Notes that a block begins in this thread. Raises like ``check``; call ``leave_block`` in any case."""
        # No lock: an interrupt could leave it locked. If two threads come at once, the first one recorded stays.
        here = threading.current_thread()
        self._of_blocks.append(here)
        if self._of_blocks[0] is not here or (casts_on and self.of_casts is not here):
            self.check("scale_loss", casts_on)

    def leave_block(self) -> None:
        here = threading.current_thread()
        if here in self._of_blocks:  # not if an interrupt came before ``enter_block`` noted it
            self._of_blocks.remove(here)
