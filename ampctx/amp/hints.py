"""Warnings about likely mistakes in a training loop, once a run. Each hint observes one kind of mistake.

A hint takes itself off when it has spoken, and most after the first steps, so that the loop pays nothing later. No host
sync.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ampctx.amp.events import BlockFacts, Events, RunFacts, SkipFacts, StepFacts
from ampctx.casts.arguments import Undo

FIRST_STEPS = 2
# After so many steps a loop has used each of its losses.
ENOUGH_STEPS = 100


def watch(events: Events, run: RunFacts) -> Undo:
    """Starts all hints for the optimizers of one ``initialize``. Returns the undo."""
    hints = [kind(events, run) for kind in KINDS]

    def undo() -> None:
        for hint in hints:
            hint.leave()

    return undo


class Hint:
    """Listens to the events that a subclass has methods for."""

    def __init__(self, events: Events, run: RunFacts) -> None:
        self.names, self.moves, self.warn = run.names, run.moves, run.warn
        self.steps = weakref.WeakKeyDictionary[Any, int](dict.fromkeys(run.optimizers, 0))
        self._heard = [(heard, getattr(self, name)) for name, heard in vars(events).items() if hasattr(self, name)]
        for heard, listener in self._heard:
            heard.append(listener)

    def leave(self) -> None:
        for heard, listener in self._heard:
            if listener in heard:
                heard.remove(listener)

    def say(self, text: str) -> None:
        self.warn(text)
        self.leave()

    def watches(self, optimizers: Iterable[Any]) -> bool:
        """Whether one of them is of this ``initialize``."""
        return any(optimizer in self.steps for optimizer in optimizers)


class OfFirstSteps(Hint):
    """Ends when each optimizer has made ``until`` steps."""

    until = FIRST_STEPS

    def stepping(self, step: StepFacts) -> None:
        if step.optimizer in self.steps:
            self.steps[step.optimizer] += 1
            self.look(step)
            if min(self.steps.values()) >= self.until:
                self.leave()

    def look(self, step: StepFacts) -> None:
        """Looks at a step of this ``initialize``."""


class PlainBackward(OfFirstSteps):
    """``loss.backward()`` in place of ``scaled_loss.backward()``."""

    def __init__(self, events: Events, run: RunFacts) -> None:
        super().__init__(events, run)
        # The first optimizer of a block and its loss id, once a backward went through the scaled loss.
        self.proved: set[tuple[int, int]] = set()

    def entered(self, block: BlockFacts) -> None:
        if self.watches(block.optimizers) and block.scaled.requires_grad and _loss_of(block) not in self.proved:
            proved, loss = self.proved, _loss_of(block)
            block.scaled.register_hook(lambda grad: proved.add(loss))

    def left(self, block: BlockFacts) -> None:
        is_new = self.watches(block.optimizers) and block.is_fresh and _loss_of(block) not in self.proved
        if is_new and block.scaled.requires_grad and any(p.grad is not None for p in block.leaves):
            self.say(
                "amp.scale_loss: gradients have arrived in the block, and no backward went through the scaled loss. "
                "The end of the block divides them by the loss scale, which makes them far too small. Call "
                "scaled_loss.backward(), not loss.backward(). "
                "See docs/errors.md#no-backward-went-through-the-scaled-loss."
            )


class ParameterHooks(OfFirstSteps):
    """Hooks on parameters, which see scaled gradients."""

    def entered(self, block: BlockFacts) -> None:
        hooked = {id(p) for p in block.leaves if _has_hooks(p)} if self.watches(block.optimizers) else set()
        if names := [name for model in self.names.by_model() for name, p in model.items() if id(p) in hooked]:
            self.say(
                f"amp.scale_loss: hooks on {_listed(names)} see gradients multiplied by the loss scale. A hook may "
                "mask or average them there. Clip, compare and log gradients after the block, with "
                "amp.master_params(optimizer). See docs/errors.md#see-gradients-multiplied-by-the-loss-scale."
            )


class NoBlock(OfFirstSteps):
    """A dynamic scale that no block uses."""

    def __init__(self, events: Events, run: RunFacts) -> None:
        super().__init__(events, run)
        self.in_blocks = weakref.WeakSet[Any]()

    def entered(self, block: BlockFacts) -> None:
        self.in_blocks.update(block.optimizers)

    def look(self, step: StepFacts) -> None:
        if any(self.moves) and step.has_grads and step.optimizer not in self.in_blocks and not step.by_scaler:
            self.say(
                f"{_step_of(step.optimizer)}: no scale_loss block has named this optimizer, and its loss scale is "
                "dynamic. Without scaling, small gradients become 0 in 16 bits. Write "
                "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`. "
                "See docs/errors.md#no-scale_loss-block-has-named-this-optimizer."
            )


class NoGradients(OfFirstSteps):
    """A step without any gradient."""

    def look(self, step: StepFacts) -> None:
        if not step.has_grads:
            self.warn(
                f"{_step_of(step.optimizer)} changes nothing: none of its parameters has a gradient. The loss does not "
                "reach them, or zero_grad() ran after backward(). "
                "See docs/errors.md#no-inf-checks-were-recorded-for-this-optimizer."
            )


class Untrained(OfFirstSteps):
    """Parameters with gradients that no optimizer steps, such as those of a layer that was replaced."""

    def look(self, step: StepFacts) -> None:
        models, stepped = self.names.by_model(), step.stepped
        # Not a model without any parameter in the optimizer, such as a teacher.
        found = {
            name: p
            for model in models
            if not stepped.isdisjoint(map(id, model.values()))
            for name, p in model.items()
            if id(p) not in stepped and p.requires_grad and p.grad is not None
        }
        if found:  # rare, so that looking at every live optimizer is cheap enough
            alive = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
            stepped |= {id(p) for o in alive for group in getattr(o, "param_groups", ()) for p in group["params"]}
        if names := [name for name, p in found.items() if id(p) not in stepped]:
            self.say(
                f"{_step_of(step.optimizer)}: {_listed(names)} got gradients and are in no optimizer, so that this "
                "step does not train them. Make the optimizer after the last change of the model, call "
                "optimizer.add_param_group(...) for new parameters, or set requires_grad_(False) on parameters that "
                "should not train. See docs/errors.md#got-gradients-and-are-in-no-optimizer."
            )


class UnusedLosses(OfFirstSteps):
    """Loss ids that no block uses."""

    until = ENOUGH_STEPS

    def __init__(self, events: Events, run: RunFacts) -> None:
        super().__init__(events, run)
        self.unused = {i for i, moves in enumerate(run.moves) if moves}
        if len(run.moves) == 1:
            self.leave()

    def entered(self, block: BlockFacts) -> None:
        if self.watches(block.optimizers):
            self.unused.discard(block.loss_id)

    def look(self, step: StepFacts) -> None:
        if min(self.steps.values()) >= self.until and 0 < len(self.unused) < len(self.moves):
            unused = ", ".join(map(str, sorted(self.unused)))
            self.say(
                f"amp.initialize(num_losses={len(self.moves)}): after {self.until} steps of each optimizer no "
                f"scale_loss block has used loss_id={unused}. Losses then share a loss scale, and an overflow of one "
                "lowers it for all. Pass amp.scale_loss(..., loss_id=i) for each loss, or lower num_losses. "
                "See docs/errors.md#no-scale_loss-block-has-used-loss_id."
            )


class SmallScale(Hint):
    """A dynamic scale that some bad batches have pushed below 1, where it makes gradients smaller. Where most steps are
    skipped, the log of skips says what to look for."""

    def skipped(self, skip: SkipFacts) -> None:
        if skip.scale < 1.0 and not skip.min_scale and 2 * skip.skipped < skip.steps:
            self.say(
                f"ampctx: the loss scale fell to {skip.scale}, after {skip.skipped} skips in {skip.steps} steps. Below "
                "1 it turns small gradients into 0. Pass amp.initialize(min_loss_scale=1.0), and find the bad batches "
                "with amp.outcome(optimizer).culprits. "
                "See docs/errors.md#the-loss-scale-goes-to-0-or-the-loss-is-nan."
            )


class DroppedGradients(Hint):
    """Gradients of parameters that joined an optimizer."""

    def dropped(self, optimizer: Any, names: list[str]) -> None:
        if self.watches([optimizer]):
            self.warn(
                f"{_step_of(optimizer)}: {_listed(names, quote='')} joined the optimizer with a gradient from before. "
                "Its loss scale is unknown, so ampctx dropped the gradient. Add parameters before their backward."
            )


KINDS = (PlainBackward, ParameterHooks, NoBlock, NoGradients, Untrained, UnusedLosses, SmallScale, DroppedGradients)


def _loss_of(block: BlockFacts) -> tuple[int, int]:
    return id(block.optimizers[0]), block.loss_id


def _has_hooks(p: Tensor) -> bool:
    """Whether the program has registered hooks on a parameter. torch registers some of its own."""
    # Private in torch: a tensor lists its hooks nowhere else.
    hooks = [*(p._backward_hooks or {}).values(), *(p._post_accumulate_grad_hooks or {}).values()]
    functions = [getattr(hook, "func", hook) for hook in hooks]  # of partial ones, as FSDP's
    return any(not str(getattr(function, "__module__", "")).startswith("torch.") for function in functions)


def _step_of(optimizer: Any) -> str:
    return f"{type(optimizer).__name__}.step()"


def _listed(names: list[str], quote: str = '"') -> str:
    """The first three names, and the number of others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"{quote}{name}{quote}" for name in names[:3]) + more
