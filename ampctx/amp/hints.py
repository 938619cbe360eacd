"""Warnings about likely mistakes in a training loop, each kind once a run. No host sync, no cost after first steps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from ampctx._data_writes import message
from ampctx._decorators import host_may_read
from ampctx._errors import listed
from ampctx.amp.events import BlockFacts, Events, RunFacts, StepFacts, logger
from ampctx.casts.arguments import LOW_PRECISION
from ampctx.kernels.ops import is_watched
from ampctx.kernels.plan import marks
from ampctx.kernels.reference import widest
from ampctx.weights.state_dicts import COPIES

FIRST_STEPS = 2
# After so many steps a loop has used each of its losses.
ENOUGH_STEPS = 100


class Hints:
    """Listens to all events of the optimizers of one ``initialize``: to blocks and steps until each has made its first
    steps. ``leave`` is the undo."""

    def __init__(self, events: Events, run: RunFacts) -> None:
        self.names, self.moves, self.log = run.names, run.moves, run.say
        self.steps = weakref.WeakKeyDictionary[Any, int](dict.fromkeys(run.optimizers, 0))
        self.is_start, self.until = True, FIRST_STEPS if len(run.moves) == 1 else ENOUGH_STEPS
        # The first optimizer of a block and its loss id, once a backward went through the scaled loss.
        self.proved: set[tuple[int, int]] = set()
        self.in_blocks = weakref.WeakSet[Any]()
        # Optimizers of which no step has changed a master yet, with what to compare at their next step.
        self.still = weakref.WeakKeyDictionary[Any, tuple](dict.fromkeys(run.optimizers, ()))
        self.aside: dict[str, bytes] = {}
        self.unused = {i for i, moves in enumerate(run.moves) if moves}
        self.heard = [(name, heard, getattr(self, name)) for name, heard in vars(events).items()]
        for _, heard, listener in self.heard:
            heard.append(listener)

    def say(self, kind: str, message: str) -> None:
        """Once for each ``initialize``: a later one may make a mistake of its own."""
        self.log((kind, id(self)), message)

    def leave(self, *names: str) -> None:
        for name, heard, listener in self.heard:
            if listener in heard and (name in names or not names):
                heard.remove(listener)

    def entered(self, block: BlockFacts) -> None:
        if not any(optimizer in self.steps for optimizer in block.optimizers):
            return
        self.unused.discard(block.loss_id)
        self.in_blocks.update(block.optimizers)
        if not self.is_start:
            return
        proved, loss = self.proved, _loss_of(block)
        if block.scaled.requires_grad and loss not in proved:
            block.scaled.register_hook(lambda grad: proved.add(loss))
        hooked = {id(p) for p in block.leaves if _has_hooks(p)}
        if names := [f'"{n}"' for model in self.names.by_model() for n, p in model.items() if id(p) in hooked]:
            self.say(
                "hooks",
                f"amp.scale_loss: hooks on {listed(names)} see gradients multiplied by the loss scale. A hook may "
                "mask or average them there. Clip, compare and log gradients after the block, with "
                "amp.master_params(optimizer). See docs/errors.md#see-gradients-multiplied-by-the-loss-scale.",
            )

    def left(self, block: BlockFacts) -> None:
        is_ours = any(optimizer in self.steps for optimizer in block.optimizers)
        is_new = is_ours and block.scaled.requires_grad and _loss_of(block) not in self.proved
        if is_new and block.is_fresh and any(p.grad is not None for p in block.leaves):
            self.say(
                "plain backward",
                "amp.scale_loss: gradients have arrived in the block, and no backward went through the scaled loss. "
                "The end of the block divides them by the loss scale, which makes them far too small. Call "
                "scaled_loss.backward(), not loss.backward(). "
                "See docs/errors.md#no-backward-went-through-the-scaled-loss.",
            )

    def stepping(self, step: StepFacts) -> None:
        if step.optimizer not in self.steps:
            return
        self.steps[step.optimizer] += 1
        if self.is_start:
            self._look_at_gradients(step)
            self._look_at_models(step)
        if step.optimizer in self.still:
            self._look_at_masters(step)
        steps = min(self.steps.values())
        if steps >= FIRST_STEPS:
            if self.is_start and COPIES:
                self._look_at_averages()
            self.is_start = False
            self.leave("left")
        if steps >= self.until:
            self._look_at_losses()
            self.leave("entered")
            if not self.still or steps >= ENOUGH_STEPS:
                self.leave("stepping")

    def _look_at_gradients(self, step: StepFacts) -> None:
        call = f"{type(step.optimizer).__name__}.step()"
        if not step.has_grads:
            self.say(
                f"no gradients of {id(step.optimizer)}",
                f"{call} changes nothing: none of its parameters has a gradient. The loss does not reach them, or "
                "zero_grad() ran after backward(). See docs/errors.md#no-inf-checks-were-recorded-for-this-optimizer.",
            )
        elif any(self.moves) and step.optimizer not in self.in_blocks and not step.by_scaler:
            self.say(
                "no block",
                f"{call}: no scale_loss block has named this optimizer, and its loss scale is dynamic. Without "
                "scaling, small gradients become 0 in 16 bits. Write "
                "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`. "
                "See docs/errors.md#no-scale_loss-block-has-named-this-optimizer.",
            )
        found = {
            name: p
            for model in self.names.by_model()
            # Not a model without any parameter in the optimizer, such as a teacher.
            if not step.stepped.isdisjoint(map(id, model.values()))
            for name, p in model.items()
            if id(p) not in step.stepped and p.requires_grad and p.grad is not None
        }
        # Rare, so that looking at every live optimizer is cheap enough.
        alive = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)] if found else []
        elsewhere = {id(p) for o in alive for group in getattr(o, "param_groups", ()) for p in group["params"]}
        if names := [f'"{name}"' for name, p in found.items() if id(p) not in elsewhere]:
            self.say(
                "untrained",
                f"{call}: {listed(names)} got gradients and are in no optimizer, so that this step does not train "
                "them. Make the optimizer after the last change of the model, call optimizer.add_param_group(...) for "
                "new parameters, or set requires_grad_(False) on parameters that should not train. "
                "See docs/errors.md#got-gradients-and-are-in-no-optimizer.",
            )

    def _look_at_models(self, step: StepFacts) -> None:
        """At models in 16 bits without an optimizer, which may hold an average."""
        stepped = step.stepped.union(id(p) for o in self.steps for group in o.param_groups for p in group["params"])
        idle = [model for model in self.names.by_model() if stepped.isdisjoint(map(id, model.values()))]
        params = {name: p for model in idle for name, p in model.items() if p.dtype in LOW_PRECISION}
        former, self.aside = self.aside, {name: marks([p]) for name, p in params.items()}
        if names := [f'"{name}"' for name, now in self.aside.items() if former.get(name, now) != now]:
            self.say(
                "averages",
                f"amp: {listed(names)} changed between two steps, are in no optimizer of amp.initialize and have no "
                "fp32 master. An average in 16 bits loses small changes. If this is one, keep that model in fp32, out "
                "of amp.initialize, and average amp.master_params(optimizer). "
                "See docs/guide/schedulers.md#schedulers-swa-and-ema.",
            )

    def _look_at_averages(self) -> None:
        """At copies of a 16-bit model that torch averages. It looks at every live object."""
        shapes = [[p.shape for p in model.values()] for model in self.names.by_model()]
        averages = [list(o.parameters()) for o in gc.get_objects() if issubclass(type(o), AveragedModel)]
        ours = [params for params in averages if [p.shape for p in params] in shapes]
        if any(p.dtype in LOW_PRECISION for params in ours for p in params):
            self.say(
                "averages",
                "amp: an AveragedModel was made of a 16-bit model. An average in 16 bits loses small changes. Make it "
                "of amp.master_model(model), which has the fp32 master weights, and pass that to update_parameters. "
                "See docs/guide/schedulers.md#schedulers-swa-and-ema.",
            )

    def _look_at_masters(self, step: StepFacts) -> None:
        """At whether a step that ran on gradients has changed a master."""
        before, former = self.still[step.optimizer], step.former
        if (before and before[0] is former) or not host_may_read() or is_watched():
            return  # in one step, which evaluates the model again; or nobody may read the device
        # Sums, too, because optimizers that write through ``.data`` change no version.
        here = [master.detach() for master in step.masters if master.device == step.masters[0].device]
        now = marks(step.masters), [master.sum(dtype=widest(master.device)) for master in here]
        is_same = bool(here and before) and before[1] == now[0]
        if is_same and not former.skipped:
            is_same = torch.equal(torch.stack(before[2]), torch.stack(now[1]))
        if here and (not before or (is_same and former.skipped)):
            self.still[step.optimizer] = (former, *now) if step.has_grads else ()
            return
        del self.still[step.optimizer]
        if is_same:
            self.say(
                f"still {id(step.optimizer)}",
                f"{type(step.optimizer).__name__}.step() has changed no fp32 master weight, so the model does not "
                "train. It steps other tensors: those of an optimizer inside it, or parameters that it has kept. Step "
                "the tensors of its param_groups, or pass the optimizers inside it to amp.initialize. "
                "See docs/errors.md#has-changed-no-fp32-master-weight.",
            )

    def _look_at_losses(self) -> None:
        if 0 < len(self.unused) < len(self.moves):
            unused = ", ".join(map(str, sorted(self.unused)))
            self.say(
                "losses",
                f"amp.initialize(num_losses={len(self.moves)}): after {self.until} steps of each optimizer no "
                f"scale_loss block has used loss_id={unused}. Losses then share a loss scale, and an overflow of one "
                "lowers it for all. Pass amp.scale_loss(..., loss_id=i) for each loss, or lower num_losses. "
                "See docs/errors.md#no-scale_loss-block-has-used-loss_id.",
            )

    def skipped(self, scale: float, min_scale: float, skipped: int, steps: int) -> None:
        # Some bad batches. Where most steps are skipped, the log of skips says what to look for.
        if scale < 1.0 and not min_scale and 2 * skipped < steps:
            self.log(
                "small scale",
                f"ampctx: the loss scale fell to {scale}, after {skipped} skips in {steps} steps. Below 1 it turns "
                "small gradients into 0. Pass amp.initialize(min_loss_scale=1.0), and find the bad batches with "
                "amp.outcome(optimizer).culprits. See docs/errors.md#the-loss-scale-goes-to-0-or-the-loss-is-nan.",
                logger.warning,  # which never raises, as a filter of warnings may: the step is not recorded yet
            )

    def written(self, optimizer: Any, names: list[str]) -> None:
        if optimizer in self.steps:
            self.say("data", f"amp: {message(names)}")

    def dropped(self, optimizer: Any, names: list[str]) -> None:
        if optimizer in self.steps:
            self.say(
                f"dropped {names}",
                f"{type(optimizer).__name__}.step(): {listed(names)} joined the optimizer with a gradient "
                "from before, of an unknown loss scale. ampctx dropped it. Add parameters before their backward.",
            )


def _loss_of(block: BlockFacts) -> tuple[int, int]:
    return id(block.optimizers[0]), block.loss_id


def _has_hooks(p: Tensor) -> bool:
    """Whether the program has registered hooks on a parameter. torch registers some of its own."""
    # Private in torch: a tensor lists its hooks nowhere else.
    hooks = [*(p._backward_hooks or {}).values(), *(p._post_accumulate_grad_hooks or {}).values()]
    functions = [getattr(hook, "func", hook) for hook in hooks]  # of partial ones, as FSDP's
    return any(not str(getattr(function, "__module__", "")).startswith("torch.") for function in functions)
