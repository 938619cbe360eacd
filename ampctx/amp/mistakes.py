"""Detects mistakes in the training loop: an error if the call cannot be meant, else one warning a run.

No host sync except on the way to an error. Checks that cost more than reading an attribute run in the first steps and
blocks only, or when a block has sent gradients to an optimizer that it does not name.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterable, Sequence

# Private in contextlib: the class that ``contextmanager`` returns. The decorator cannot be given a subclass of it.
from contextlib import _GeneratorContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ampctx._collectives import is_distributed
from ampctx._compiling import outside_of_graphs
from ampctx._errors import AmpAttributeError, AmpError, AmpTypeError
from ampctx.amp.step import OptimizerBinding
from ampctx.amp.blocks import Block
from ampctx.amp.skip_log import SkipLog
from ampctx.casts.arguments import LOW_PRECISION, Undo
from ampctx.kernels.sharding import values_of
from ampctx.kernels.tensor_loops import all_none, grad_of, stored_grad, version_of
from ampctx.scaling.device_skips import is_capturing
from ampctx.scaling.loss_scale import LossScale

# A loop that uses a GradScaler uses it from the first step.
FIRST_STEPS = 2
# After so many steps a loop has used each of its losses.
ENOUGH_STEPS = 100
# This many gradients show that a block has reached an optimizer. Marking all would cost as much as unscaling them.
MARKS = 16


class LoopGroup:
    """The optimizers of one ``initialize``. ``log`` takes the warnings."""

    def __init__(self, loss_scales: Sequence[LossScale], log: SkipLog) -> None:
        self._loss_scales = loss_scales
        self.log = log
        self._loops: weakref.WeakSet[Loop] = weakref.WeakSet()

    def loop(self) -> Loop:
        """A new ``Loop``, for one more optimizer."""
        loop = Loop(self)
        self._loops.add(loop)
        return loop

    def look_for_unused_losses(self) -> None:
        """Warns about loss ids without a scale: the first block that uses a dynamic scale creates it."""
        if len(self._loss_scales) == 1 or any(loop.steps < ENOUGH_STEPS for loop in self._loops):
            return
        unused = [str(i) for i, scale in enumerate(self._loss_scales) if scale.dynamic and scale.scale is None]
        if 0 < len(unused) < len(self._loss_scales):
            self.log.warn_once(
                "unused losses",
                f"amp.initialize(num_losses={len(self._loss_scales)}): after {ENOUGH_STEPS} steps of each optimizer no "
                f"scale_loss block has used loss_id={', '.join(unused)}. Losses then share a loss scale, and an "
                "overflow of one lowers it for all. Pass amp.scale_loss(..., loss_id=i) for each loss, or lower "
                "num_losses. See docs/errors.md#no-scale_loss-block-has-used-loss_id.",
            )


class Loop:
    """The state of one optimizer's training loop that mistakes show in."""

    def __init__(self, run: LoopGroup) -> None:
        self.run = run
        self.steps = 0
        # Blocks that have named the optimizer.
        self.blocks = 0
        # A GradScaler scales for the optimizer.
        self.has_scaler = False
        # Loss ids whose scaled loss a backward went through.
        self.proved: set[int] = set()
        # By id, the scaled gradients that blocks over other optimizers have left in its parameters, and their versions.
        self.left: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        # ``left`` was not empty when a block began. The block adds to these gradients unless the user zeroes them.
        self.left_before_block = False
        # False if the loop zeroes gradients through ``.data``: versions do not count that, and ``left`` would be wrong.
        self.counts_versions = True

    def zeroed(self) -> None:
        self.left, self.left_before_block = {}, False

    def block_begins(self, binding: OptimizerBinding, is_first: bool) -> None:
        """Notes that a block names the optimizer. ``is_first``: gradients are unscaled, and no other block is open."""
        self.blocks += 1
        if is_first:
            self.left_before_block = bool(self.left) and bool(_untouched(binding))

    def before_step(self, binding: OptimizerBinding, has_closure: bool = False) -> None:
        """Checks at the start of a step that the user calls. ``has_closure``: a closure may zero gradients first.

        Raises:
            AmpError: an enabled GradScaler steps an optimizer with masters, or scaled gradients of another block
                are left.
        """
        self.steps += 1
        if self.left and not has_closure:
            binding.follow_groups()
            if names := _still_left(binding, _untouched(binding)):
                _refuse_left(binding, names, "and this step would use them as unscaled ones")
        if self.steps <= FIRST_STEPS:
            if binding.masters.pairs and _grad_scaler_calls():
                binding.refuse_grad_scaler()
        elif self.steps == ENOUGH_STEPS:
            self.run.look_for_unused_losses()

    def tell_of_no_block(self, binding: OptimizerBinding) -> None:
        """Warns before a step with gradients if its dynamic loss scale was never used."""
        if self.has_scaler or binding.flags.are_of_blocks or not any(scale.moves for scale in binding.loss_scales):
            return
        params = (p for group in binding.optimizer.param_groups for p in group["params"])
        if binding.masters.place.pending is None and all(stored_grad(p) is None for p in params):
            return
        if _grad_scaler_calls():
            self.has_scaler = True
            return
        self.run.log.warn_once(
            "no block",
            f"{_named(binding)}: no scale_loss block has named this optimizer, and its loss scale is dynamic. Without "
            "scaling, small gradients become 0 in 16 bits. Write "
            "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`. "
            "See docs/errors.md#no-scale_loss-block-has-named-this-optimizer.",
        )

    def tell_of_dropped_grads(self, binding: OptimizerBinding) -> None:
        names, binding.masters.dropped_grads = binding.masters.dropped_grads, []
        if names:
            self.run.log.warn_once(
                ("dropped gradients", id(binding), *names),
                f"{_named(binding)}: {_listed(names)} joined the optimizer with a gradient from before. Its loss scale "
                "is unknown, so ampctx dropped the gradient. Add parameters before their backward.",
            )

    def tell_of_no_gradients(self, binding: OptimizerBinding) -> None:
        for group in binding.optimizer.param_groups:
            for p in group["params"]:
                if stored_grad(p) is not None:
                    return
        self.run.log.warn_once(
            ("no gradients", id(binding)),
            f"{_named(binding)} changes nothing: none of its parameters has a gradient. The loss does not reach them, "
            "or zero_grad() ran after backward(). See docs/errors.md#no-inf-checks-were-recorded-for-this-optimizer.",
        )


def _named(binding: OptimizerBinding) -> str:
    return f"{type(binding.optimizer).__name__}.step()"


# --- steps ------------------------------------------------------------------------------------------------------------


def _grad_scaler_calls() -> bool:
    """Whether an enabled scaler of torch is among the callers. It leaves no attribute on the optimizer, so its frame is
    the only sign. A test guards the names in that frame."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            scaler = frame.f_locals.get("self")
            if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
                return True
        frame = frame.f_back
    return False


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")


# --- blocks over the wrong optimizer ----------------------------------------------------------------------------------


class Elsewhere:
    """The parameters of an optimizer that a block does not name, and their gradients when it began."""

    def __init__(self, binding: OptimizerBinding) -> None:
        self._loop = binding.loop
        self._blocks = binding.loop.blocks
        self._drops = bool(binding.masters.pairs)
        self._params = binding.masters.params_without_master
        self._grads = list(map(grad_of, self._params))
        grads = [] if all_none(self._grads) else self._grads
        self._versions = [None if g is None or g.is_inference() else version_of(g) for g in grads] or self._grads

    def note(self, named: Iterable[OptimizerBinding]) -> None:
        """Records, at the end of the block, the gradients that it has sent here, by weak reference. If the optimizer
        has masters it drops them, as the block drops those of 16-bit weights."""
        loop = self._loop
        grads = list(map(grad_of, self._params))
        # A block of this optimizer inside the other one has its own gradients.
        if all_none(grads) or loop.blocks != self._blocks:
            return
        unscaled = {id(p) for binding in named for p in binding.masters.params_without_master}
        left = {}
        for p, g, former, version in zip(self._params, grads, self._grads, self._versions, strict=True):
            if g is None or g.is_inference() or id(p) in unscaled:
                continue
            if former is None and self._drops:
                p.grad = None
            elif g is not former or version_of(g) != version:
                left[id(g)] = weakref.ref(g), version_of(g)
            elif id(g) in loop.left:
                left[id(g)] = loop.left[id(g)]
            if len(left) == MARKS and not self._drops:
                break
        loop.left = left


@outside_of_graphs
def others(
    bindings: Iterable[OptimizerBinding], named: Sequence[OptimizerBinding], scale: LossScale
) -> list[Elsewhere]:
    """The optimizers that a block must not send scaled gradients to, with their gradients when it begins."""
    if scale.is_identity:
        return []
    return [
        Elsewhere(binding)
        for binding in bindings
        if binding not in named and binding.loop.counts_versions and binding.gradients.is_idle
    ]


def _untouched(binding: OptimizerBinding) -> list[tuple[Tensor, Tensor]]:
    """(parameter, gradient) of the scaled gradients that are unchanged since a block left them. No host sync."""
    loop, found = binding.loop, []
    for p in binding.masters.params_without_master:
        g = p.grad
        if g is not None and id(g) in loop.left:
            reference, version = loop.left[id(g)]
            if reference() is g and version_of(g) == version:
                found.append((p, g))
    if not found:
        loop.left = {}
    return found


def _still_left(binding: OptimizerBinding, found: Iterable[tuple[Tensor, Tensor]]) -> list[str]:
    """Names of the parameters whose gradients are not zero. A host sync if there are any gradients."""
    found = list(found)
    if not found or is_capturing():
        return []
    if not any(torch.count_nonzero(values_of(g).to_dense()).item() for _, g in found):
        binding.loop.counts_versions = False
        binding.loop.zeroed()
        return []
    names = binding.names_by_id()
    return [names[id(p)] for p, _ in found]


def _refuse_left(binding: OptimizerBinding, names: list[str], why: str) -> NoReturn:
    raise AmpError(
        f"{_named(binding)}: a scale_loss block over other optimizers has left scaled gradients in "
        f"{_listed(names)}, {why}. Name every optimizer that the backward reaches: amp.scale_loss(loss, [optimizer, "
        "...]). Or call zero_grad() of this optimizer before its own backward. "
        "See docs/errors.md#has-left-scaled-gradients-in."
    )


@outside_of_graphs
def block_ends(block: Block) -> None:
    """Checks before the end of a block unscales its gradients.

    Raises:
        AmpError: the block would add them to scaled gradients.
    """
    for binding in block.bindings:
        # Not at the beginning: zero_grad() inside the block is right, and needs no host sync.
        if binding.loop.left_before_block and binding.gradients.depth == 1:
            stash = binding.gradients.frames[-1].saved
            found = ((p, stash[p]) for p in binding.masters.params_without_master if p in stash)
            if names := _still_left(binding, found):
                _refuse_left(binding, names, "and this block would add its own to them")
    if block.watched:
        _tell_of_plain_backward(block)


# --- backward through the loss that is not scaled ---------------------------------------------------------------------


def watch_backward(block: Block, scaled: Tensor) -> Tensor:
    """The scaled loss. Until the first backward through this loss id, a hook notes that backward."""
    if not block.bindings or not scaled.requires_grad:
        return scaled
    proved, loss_id = block.bindings[0].loop.proved, _loss_of(block)
    if loss_id not in proved and not torch.compiler.is_compiling():
        scaled.register_hook(functools.partial(_went_through, proved, loss_id))
        block.watched = True
    return scaled


def _loss_of(block: Block) -> int:
    return block.loss_id % len(block.bindings[0].loss_scales)


def _went_through(proved: set[int], loss_id: int, grad: Tensor) -> None:
    proved.add(loss_id)


def _tell_of_plain_backward(block: Block) -> None:
    loop, loss_id = block.bindings[0].loop, _loss_of(block)
    if loss_id in loop.proved or not any(b.gradients.have_arrived() for b in block.bindings):
        return
    loop.proved.add(loss_id)  # nothing more to say
    loop.run.log.warn_once(
        "plain backward",
        "amp.scale_loss: gradients have arrived in the block, and no backward went through the scaled loss. The end "
        "of the block divides them by the loss scale, which makes them far too small. Call scaled_loss.backward(), "
        "not loss.backward(). See docs/errors.md#no-backward-went-through-the-scaled-loss.",
    )


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

# The models of all sessions, until reset.
_under_amp: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def note_models(models: Iterable[nn.Module], session: Any) -> Undo:
    """Marks models as under amp, until the undo."""
    references = [weakref.ref(model) for model in models]
    _under_amp.update((model, weakref.ref(session)) for model in models)

    def undo() -> None:
        for reference in references:
            if (model := reference()) is not None:
                _under_amp.pop(model, None)

    return undo


def refuse_models_under_amp(models: Iterable[nn.Module], session: Any) -> None:
    """Raises AmpError if a model holds 16-bit tensors because a session has cast them."""
    for model in models:
        for kind, tensors in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
            low = {id(t): name for name, t in tensors if t.dtype in LOW_PRECISION}
            for other, owner in list(_under_amp.items()) if low else ():
                found = other.parameters() if kind == "param" else other.buffers()
                if (t := next((t for t in found if id(t) in low), None)) is None:
                    continue
                where, whose = (
                    ("in this session", "amp.reset()")
                    if owner() is session
                    else ("in another AmpSession", "reset() of that one")
                )
                raise AmpError(
                    f"Found {kind} {low[id(t)]} with type {t.type()}, expected fp32: the model is under amp already, "
                    f"{where}, which cast its weights to 16 bits. Call {whose} first. Pass all models and optimizers "
                    "that train together to one amp.initialize, and add later parameters with "
                    "optimizer.add_param_group(). See "
                    "docs/errors.md#found-param-with-type-torchhalftensor-expected-fp32."
                )
