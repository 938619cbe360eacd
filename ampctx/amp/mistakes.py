"""Mistakes in the training loop, told by what they leave behind: an error where it cannot be meant, else one warning.

Nothing here waits for the device, but on the way to an error. What costs more than a look at an attribute is done in
the first steps and blocks alone, or where gradients were sent to an optimizer that the block does not name.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterable, Sequence

# Private by name: what ``contextlib.contextmanager`` returns, with all that it does for a generator. The decorator has
# no place for a class of one's own.
from contextlib import _GeneratorContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ampctx._errors import AmpAttributeError, AmpError, AmpTypeError
from ampctx.casts.arguments import LOW_PRECISION, Undo
from ampctx.kernels.each import all_none, grad_of, stored_grad, version_of
from ampctx.kernels.sharding import values_of
from ampctx.scaling.device_skips import is_capturing
from ampctx.scaling.loss_scale import LossScale

if TYPE_CHECKING:
    from ampctx.amp.binding import OptimizerBinding
    from ampctx.amp.blocks import Block
    from ampctx.amp.skip_log import SkipLog

# A GradScaler that is around an optimizer is there from its first step on.
FIRST_STEPS = 2
# By then a loop has used each of its losses.
ENOUGH_STEPS = 100
# So many gradients tell that a block has reached an optimizer; to mark all would take as long as to unscale them.
MARKS = 16


class Run:
    """The optimizers of one ``initialize``. ``log``: where mistakes are said."""

    def __init__(self, loss_scales: Sequence[LossScale], log: SkipLog) -> None:
        self._loss_scales = loss_scales
        self.log = log
        self._loops: weakref.WeakSet[Loop] = weakref.WeakSet()

    def loop(self) -> Loop:
        """For one optimizer more."""
        loop = Loop(self)
        self._loops.add(loop)
        return loop

    def look_for_unused_losses(self) -> None:
        """A dynamic scale is created by the first block that uses it."""
        if len(self._loss_scales) == 1 or any(loop.steps < ENOUGH_STEPS for loop in self._loops):
            return
        unused = [str(i) for i, scale in enumerate(self._loss_scales) if scale.dynamic and scale.scale is None]
        if 0 < len(unused) < len(self._loss_scales):
            self.log.warn_once(
                "unused losses",
                f"amp.initialize(num_losses={len(self._loss_scales)}): after {ENOUGH_STEPS} steps of each optimizer no "
                f"scale_loss block has used loss_id={', '.join(unused)}. The losses share the other loss scales, and "
                "an overflow of one lowers the scale of all. Give each loss its own "
                "amp.scale_loss(..., loss_id=i), or pass the number of losses that there are.",
            )


class Loop:
    """What the loop has done with one optimizer so far, as far as mistakes are told by it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.steps = 0
        # Blocks that have named it.
        self.blocks = 0
        # A GradScaler scales for it.
        self.has_scaler = False
        # Loss ids whose scaled loss a backward went through.
        self.proved: set[int] = set()
        # By id, the scaled gradients that blocks over other optimizers have left in its parameters, and their versions.
        self.left: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        # They were there when a block began, which adds to them unless they are zeroed in it.
        self.left_before_block = False
        # False where gradients are zeroed past their versions, through ``.data``: ``left`` could not tell.
        self.counts_versions = True

    def zeroed(self) -> None:
        self.left, self.left_before_block = {}, False


def _named(binding: OptimizerBinding) -> str:
    return f"{type(binding.optimizer).__name__}.step()"


# --- steps ------------------------------------------------------------------------------------------------------------


def before_step(binding: OptimizerBinding, has_closure: bool = False) -> None:
    """Before anything of a step of the user's. ``has_closure``: which may zero gradients first.

    Raises:
        AmpError: an enabled GradScaler steps an optimizer with masters; scaled gradients would be stepped.
    """
    loop = binding.loop
    loop.steps += 1
    if loop.left and not has_closure:
        binding.follow_groups()
        if names := _still_left(binding, _untouched(binding)):
            _refuse_left(binding, names, "and this step would take them for true ones")
    if loop.steps <= FIRST_STEPS:
        if binding.masters.pairs and _grad_scaler_calls():
            binding.refuse_grad_scaler()
    elif loop.steps == ENOUGH_STEPS:
        loop.run.look_for_unused_losses()


def _grad_scaler_calls() -> bool:
    """Whether an enabled scaler of torch is among the callers. It tells the optimizer nothing that could be asked for:
    the one sign is its frame, whose names a test guards."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            scaler = frame.f_locals.get("self")
            if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
                return True
        frame = frame.f_back
    return False


def tell_of_no_block(binding: OptimizerBinding) -> None:
    """Before a step, with gradients as it takes them: says so where a dynamic scale was never used for them."""
    loop, checked = binding.loop, binding.gradients.checked
    if loop.has_scaler or binding.flags.are_of_blocks or not any(scale.dynamic for scale in binding.loss_scales):
        return
    params = (p for group in binding.optimizer.param_groups for p in group["params"])
    if (checked is None or not checked.masters) and all(stored_grad(p) is None for p in params):
        return
    if _grad_scaler_calls():
        loop.has_scaler = True
        return
    loop.run.log.warn_once(
        "no block",
        f"{_named(binding)}: no scale_loss block has named this optimizer, and its loss scale is dynamic. Small "
        "gradients of a loss that is not scaled become 0 in 16 bits. Write "
        "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`.",
    )


def tell_of_edits(binding: OptimizerBinding) -> None:
    """Says so when a step is about to overwrite what the user wrote into the model."""
    log, key = binding.loop.run.log, ("edits", id(binding))
    if not log.has_said(key) and (names := binding.masters.overwritten()):
        log.warn_once(
            key,
            f"{_listed(names)} changed in place, and the step writes a weight anew from its fp32 master. Change "
            "amp.master_params(optimizer) instead, or load with model.load_state_dict, which the masters follow",
        )


def tell_of_dropped_grads(binding: OptimizerBinding) -> None:
    names, binding.masters.dropped_grads = binding.masters.dropped_grads, []
    if names:
        binding.loop.run.log.warn_once(
            ("dropped gradients", id(binding), *names),
            f"{_listed(names)} joined the optimizer with a gradient from before, of a loss scale that is not "
            "known: it was dropped",
        )


def tell_of_no_gradients(binding: OptimizerBinding) -> None:
    params = (p for group in binding.optimizer.param_groups for p in group["params"])
    if all(stored_grad(p) is None for p in params):
        binding.loop.run.log.warn_once(
            ("no gradients", id(binding)), f"{_named(binding)} changes nothing: none of its parameters has a gradient"
        )


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
        """At the end of the block: which gradients it has sent here. They are held weakly; next to masters they are
        dropped, as those of the 16-bit weights are."""
        loop = self._loop
        grads = list(map(grad_of, self._params))
        # A block of this optimizer inside of the other one has gradients of its own.
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


def others(
    bindings: Iterable[OptimizerBinding], named: Sequence[OptimizerBinding], scale: LossScale
) -> list[Elsewhere]:
    """The optimizers that a block must not send scaled gradients to, and how they are when it begins."""
    if scale.is_identity:
        return []
    return [
        Elsewhere(binding)
        for binding in bindings
        if binding not in named and binding.loop.counts_versions and binding.gradients.is_idle
    ]


def _untouched(binding: OptimizerBinding) -> list[tuple[Tensor, Tensor]]:
    """Parameters that hold such gradients as the block left them, with these. No host sync."""
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
    """Names of those that are not zero. A host sync where there are some."""
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
        f"{_listed(names)}, {why}. Name every optimizer whose parameters the backward reaches, "
        "amp.scale_loss(loss, [optimizer, ...]), or call zero_grad() of this one "
        "before its own backward."
    )


def block_begins(binding: OptimizerBinding, is_first: bool) -> None:
    """``is_first``: gradients are true ones, no other block is open around this one."""
    loop = binding.loop
    loop.blocks += 1
    if is_first:
        loop.left_before_block = bool(loop.left) and bool(_untouched(binding))


def block_ends(block: Block) -> None:
    """Before the gradients of a block are unscaled.

    Raises:
        AmpError: they would be added to scaled ones.
    """
    for binding in block.bindings:
        # Here and not at the beginning: zero_grad() in the block is right, and asks the device nothing.
        if binding.loop.left_before_block and binding.gradients.depth == 1:
            stash = binding.gradients.stash
            found = ((p, stash[p]) for p in binding.masters.params_without_master if p in stash)
            if names := _still_left(binding, found):
                _refuse_left(binding, names, "and this block would add its own to them")
    if block.watched:
        _tell_of_plain_backward(block)


# --- backward through the loss that is not scaled ---------------------------------------------------------------------


def watch_backward(block: Block, scaled: Tensor) -> Tensor:
    """The scaled loss; until a backward has gone through one of this loss once, it tells of that."""
    if not block.bindings or not scaled.requires_grad or torch.compiler.is_compiling():
        return scaled
    proved, loss_id = block.bindings[0].loop.proved, _loss_of(block)
    if loss_id not in proved:
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
        "amp.scale_loss: gradients have come in the block, and no backward went through the scaled loss that it gives. "
        "They are divided by the loss scale at its end, and far too small then. Call scaled_loss.backward(), not "
        "loss.backward().",
    )


# --- what is returned, and taken for something else -------------------------------------------------------------------

_NO_WITH = (
    "amp.scale_loss is a context manager: write `with amp.scale_loss(loss, optimizer) as scaled_loss:` and call "
    "scaled_loss.backward() in it"
)


class LossBlock(_GeneratorContextManager):
    """What ``scale_loss`` returns, for one ``with``. It is no loss, and says so when it is taken for one."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AmpAttributeError(f"{_NO_WITH}. What it returns has no {name!r}.")

    def _no_number(self, *_: Any) -> NoReturn:
        raise AmpTypeError(f"{_NO_WITH}. What it returns is no number.")

    __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __sub__ = __float__ = _no_number


class Initialized(tuple):
    """``(models, optimizers)``, a tuple to everybody; one that is taken for the model says so."""

    __slots__ = ()

    def _refusal(self, what: str) -> str:
        return (
            f"amp.initialize returned a pair, the model and the optimizer, and {what}. Write "
            "`model, optimizer = amp.initialize(model, optimizer, ...)`."
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise AmpAttributeError(self._refusal(f"it has no {name!r}"))

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AmpTypeError(self._refusal("it was called"))

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)


# --- a second initialize ----------------------------------------------------------------------------------------------

# The models that sessions have cast or watch, until reset.
_under_amp: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def note_models(models: Iterable[nn.Module], session: Any) -> Undo:
    """These are under amp, until the undo."""
    references = [weakref.ref(model) for model in models]
    _under_amp.update((model, weakref.ref(session)) for model in models)

    def undo() -> None:
        for reference in references:
            if (model := reference()) is not None:
                _under_amp.pop(model, None)

    return undo


def refuse_models_under_amp(models: Iterable[nn.Module], session: Any) -> None:
    """AmpError where a model holds 16-bit tensors because a session has cast them."""
    for model in models:
        for kind, tensors in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
            low = {id(t): name for name, t in tensors if t.dtype in LOW_PRECISION}
            for other, owner in list(_under_amp.items()) if low else ():
                held = other.parameters() if kind == "param" else other.buffers()
                if (t := next((t for t in held if id(t) in low), None)) is None:
                    continue
                where, whose = (
                    ("in this session", "amp.reset()")
                    if owner() is session
                    else ("in another AmpSession", "reset() of that one")
                )
                raise AmpError(
                    f"Found {kind} {low[id(t)]} with type {t.type()}, expected fp32: the model is under amp already, "
                    f"{where}, which made its weights 16-bit ones. Call {whose} first, and give all models and "
                    "optimizers that train together to one amp.initialize; a parameter that comes later joins by "
                    "optimizer.add_param_group."
                )
