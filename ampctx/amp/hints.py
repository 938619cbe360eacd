"""Warnings about likely mistakes in a training loop, each kind once a run. No host sync, no cost after first steps."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim.swa_utils import AveragedModel

from ampctx._decorators import host_may_read, outside_of_graphs
from ampctx._errors import AmpError, listed
from ampctx.amp.methods import finalizer
from ampctx.casts.arguments import LOW_PRECISION, Undo
from ampctx.casts.functions import replace_function, shared
from ampctx.kernels.ops import is_watched
from ampctx.kernels.plan import marks
from ampctx.kernels.reference import widest
from ampctx.weights.state_dicts import COPIES

FIRST_STEPS = 2
# After so many steps a loop has used each of its losses.
ENOUGH_STEPS = 100
# Private in torch: its clip_grad_norm_ calls it by this name, however a program has imported that.
_CLIPS = "_clip_grads_with_norm_"
# Those whose optimizers make their first steps.
_watching = weakref.WeakSet["Hints"]()


def _watch_clipping() -> Undo:
    def watched(original: Any) -> Any:
        @functools.wraps(original)
        def clip(parameters: list[Tensor], *args: Any, **kwargs: Any) -> Any:
            for hints in () if is_watched() else list(_watching):
                hints.clipping(parameters)
            return original(parameters, *args, **kwargs)

        return clip

    return replace_function(clip_grad, _CLIPS, watched) if hasattr(clip_grad, _CLIPS) else lambda: None


@outside_of_graphs
def tell(listening: list[Hints], what: str, *facts: Any) -> None:
    """Calls the method ``what`` of each."""
    for hints in tuple(listening):  # one may take itself off
        getattr(hints, what)(*facts)


class Hints:
    """Looks at blocks and steps of the optimizers of one ``initialize``, until each has made its first steps.

    ``listening``: where it is until ``leave``, for ``tell``. ``say``: as ``SkipLog.say``.
    """

    def __init__(self, listening: list[Hints], bindings: list[Any], names: Any, scales: list[Any], say: Any) -> None:
        self.listening, self.names, self.log = listening, names, say
        self.moves = [scale.moves for scale in scales]
        self.unused = {i for i, moves in enumerate(self.moves) if moves}
        self.until = FIRST_STEPS if len(scales) == 1 else ENOUGH_STEPS
        self.steps = weakref.WeakKeyDictionary[Any, int](dict.fromkeys(bindings, 0))
        self.is_start, self.in_blocks = True, weakref.WeakSet[Any]()
        # Blocks without gradients when they began, as delayed ones leave, and without a backward through their loss.
        self.fresh = weakref.WeakSet[Any]()
        # Those of which no step has changed a master yet, with what to compare at their next step.
        self.still = weakref.WeakKeyDictionary[Any, tuple](dict.fromkeys(bindings, ()))
        self.aside: dict[str, bytes] = {}
        listening.append(self)
        _watching.add(self)
        self.unwatch = finalizer(self, shared.acquire(_CLIPS, _watch_clipping))

    def say(self, kind: str, message: str) -> None:
        """Once for each ``initialize``: a later one may make a mistake of its own."""
        self.log((kind, id(self)), message)

    def leave(self) -> None:
        if self in self.listening:
            self.listening.remove(self)
        _watching.discard(self)
        self.unwatch()

    def entered(self, block: Any, scaled: Tensor) -> None:
        """A block begins whose scale is not 1. ``scaled``: its loss times the scale."""
        if not any(binding in self.steps for binding in block.bindings):
            return
        self.unused.discard(block.loss_id % len(block.bindings[0].loss_scales))
        self.in_blocks.update(block.bindings)
        if not self.is_start:
            return
        leaves = _leaves_of(block)
        if scaled.requires_grad and all(p.grad is None for p in leaves):
            self.fresh.add(block)
            fresh, reference = self.fresh, weakref.ref(block)  # a program may keep the loss for long
            scaled.register_hook(outside_of_graphs(lambda _: fresh.difference_update(filter(None, [reference()]))))
        hooked = {id(p) for p in leaves if _has_hooks(p)}
        if names := [f'"{n}"' for model in self.names.by_model() for n, p in model.items() if id(p) in hooked]:
            self.say(
                "hooks",
                f"amp.scale_loss: hooks on {listed(names)} see gradients multiplied by the loss scale. A hook may "
                "mask or average them there. Clip, compare and log gradients after the block, with "
                "amp.master_params(optimizer). See `ampctx explain see-gradients-multiplied-by-the-loss-scale`.",
            )

    def left(self, block: Any) -> None:
        """A block is about to unscale its gradients."""
        if block in self.fresh and any(p.grad is not None for p in _leaves_of(block)):
            self.say(
                "plain backward",
                "amp.scale_loss: gradients have arrived in the block, and no backward went through the scaled loss. "
                "The end of the block divides them by the loss scale, which makes them far too small. Call "
                "scaled_loss.backward(), not loss.backward(). "
                "See `ampctx explain no-backward-went-through-the-scaled-loss`.",
            )

    def clipping(self, params: list[Tensor]) -> None:
        """torch clips the gradients of these."""
        for binding in self.steps if self.is_start else ():
            frames, masters = binding.gradients.frames, binding.masters
            try:
                if not frames:
                    masters.refuse_to_clip({id(p) for p in params if p.grad is None})
                elif masters.pairs or frames[-1].inv_scale != 1.0:
                    binding.gradients.refuse_to_clip(params)
            except AmpError as error:
                self.say("clip", f"torch.nn.utils.{error}")

    def stepping(self, binding: Any) -> None:
        """A step, or an evaluation of its closure, is about to use its gradients, which are unscaled."""
        if binding not in self.steps:
            return
        self.steps[binding] += 1
        has_grads = binding.has_grads()
        if self.is_start:
            # Ids of the parameters of models that some optimizer steps.
            beside = [masters.params_with_master for each in self.steps for masters in list(each.masters.beside)]
            stepped = {id(p) for params in (*beside, *(each.model_params() for each in self.steps)) for p in params}
            self._look_at_gradients(binding, has_grads, stepped)
            self._look_at_models(stepped)
        if binding in self.still:
            self._look_at_masters(binding, has_grads)
        steps = min(self.steps.values())
        if self.is_start and steps >= FIRST_STEPS:
            self.is_start = False
            if COPIES:
                self._look_at_averages()
        if steps >= self.until:
            self._look_at_losses()
            if not self.still or steps >= ENOUGH_STEPS:
                self.leave()

    def _look_at_gradients(self, binding: Any, has_grads: bool, stepped: set[int]) -> None:
        call = f"{type(binding.optimizer).__name__}.step()"
        if not has_grads:
            self.say(
                f"no gradients of {id(binding)}",
                f"{call} changes nothing: none of its parameters has a gradient. The loss does not reach them, or "
                "zero_grad() ran after backward(). See `ampctx explain no-inf-checks-were-recorded`.",
            )
        elif any(self.moves) and binding not in self.in_blocks and not binding.by_scaler:
            self.say(
                "no block",
                f"{call}: no scale_loss block has named this optimizer, and its loss scale is dynamic. Without "
                "scaling, small gradients become 0 in 16 bits. Write "
                "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`. "
                "See `ampctx explain no-scale_loss-block-has-named-this-optimizer`.",
            )
        found = {
            name: p
            for model in self.names.by_model()
            # Not a model without any parameter in an optimizer, such as a teacher.
            if not stepped.isdisjoint(map(id, model.values()))
            for name, p in model.items()
            if id(p) not in stepped and p.requires_grad and p.grad is not None
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
                "See `ampctx explain got-gradients-and-are-in-no-optimizer`.",
            )

    def _look_at_models(self, stepped: set[int]) -> None:
        """At models in 16 bits without an optimizer, which may hold an average."""
        idle = [model for model in self.names.by_model() if stepped.isdisjoint(map(id, model.values()))]
        params = {name: p for model in idle for name, p in model.items() if p.dtype in LOW_PRECISION}
        former, self.aside = self.aside, {name: marks([p]) for name, p in params.items()}
        if names := [f'"{name}"' for name, now in self.aside.items() if former.get(name, now) != now]:
            self.say(
                "averages",
                f"amp: {listed(names)} changed between two steps, are in no optimizer of amp.initialize and have no "
                "fp32 master. An average in 16 bits loses small changes. If this is one, keep that model in fp32, out "
                "of amp.initialize, and average amp.master_params(optimizer). "
                "See `ampctx explain an-average-in-16-bits`.",
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
                "See `ampctx explain an-average-in-16-bits`.",
            )

    def _look_at_masters(self, binding: Any, has_grads: bool) -> None:
        """At whether a step that ran on gradients has changed a master."""
        before, former = self.still[binding], binding.steps.outcome
        if (before and before[0] is former) or not host_may_read() or is_watched():
            return  # in one step, which evaluates the model again; or nobody may read the device
        # Sums, too, because optimizers that write through ``.data`` change no version.
        rates = [(group.get("lr", 1.0), group["params"]) for group in binding.optimizer.param_groups]
        moving = [p for lr, params in rates if isinstance(lr, Tensor) or lr for p in params]
        masters = [p for p in moving if p in binding.masters.model_of]
        here = [master.detach() for master in masters if master.device == masters[0].device]
        now = marks(masters), [master.sum(dtype=widest(master.device)) for master in here]
        is_same = bool(here and before) and before[1] == now[0]
        if is_same and not former.skipped:
            is_same = torch.equal(torch.stack(before[2]), torch.stack(now[1]))
        if here and (not before or (is_same and former.skipped)):
            self.still[binding] = (former, *now) if has_grads else ()
            return
        del self.still[binding]
        if is_same:
            self.say(
                f"still {id(binding)}",
                f"{type(binding.optimizer).__name__}.step() has changed no fp32 master weight, so the model does not "
                "train. It steps other tensors: those of an optimizer inside it, or parameters that it has kept. Step "
                "the tensors of its param_groups, or pass the optimizers inside it to amp.initialize. "
                "See `ampctx explain has-changed-no-fp32-master-weight`.",
            )

    def _look_at_losses(self) -> None:
        if 0 < len(self.unused) < len(self.moves):
            unused = ", ".join(map(str, sorted(self.unused)))
            self.say(
                "losses",
                f"amp.initialize(num_losses={len(self.moves)}): after {self.until} steps of each optimizer no "
                f"scale_loss block has used loss_id={unused}. Losses then share a loss scale, and an overflow of one "
                "lowers it for all. Pass amp.scale_loss(..., loss_id=i) for each loss, or lower num_losses. "
                "See `ampctx explain no-scale_loss-block-has-used-loss_id`.",
            )


def _leaves_of(block: Any) -> list[Tensor]:
    """The parameters that the block's backward writes to."""
    return [p for binding in block.bindings for p in binding.masters.leaves]


def _has_hooks(p: Tensor) -> bool:
    """Whether the program has registered hooks on a parameter. torch registers some of its own."""
    # Private in torch: a tensor lists its hooks nowhere else.
    hooks = [*(p._backward_hooks or {}).values(), *(p._post_accumulate_grad_hooks or {}).values()]
    functions = [getattr(hook, "func", hook) for hook in hooks]  # of partial ones, as FSDP's
    return any(not str(getattr(function, "__module__", "")).startswith("torch.") for function in functions)
