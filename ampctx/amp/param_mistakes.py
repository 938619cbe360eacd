"""Warns, once a run, about uses of parameters and gradients that silently ruin training.

Gradients are scaled inside a ``scale_loss`` block. After it those of 16-bit parameters are in their masters. Code that
clips or reads the wrong ones iterates over parameters, so the frames of such iterations are checked. Iterating over
weights is fine.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from ampctx.amp.step import OptimizerBinding
from ampctx.amp.param_uses import Use, use_of
from ampctx.amp.skip_log import SkipLog
from ampctx.casts.arguments import Undo
from ampctx.casts.functions import replace_function, shared
from ampctx.casts.model_watch import ParameterNames
from ampctx.weights.pending import has_grad


class ParamMistakes:
    """The checks for the optimizers of one session.

    Args:
        bindings: the optimizers under amp.
        log: takes the warnings.
    """

    def __init__(self, bindings: Mapping[Any, OptimizerBinding], log: SkipLog) -> None:
        self._bindings = bindings
        self._log = log

    def watch(self, bound: Mapping[Any, OptimizerBinding], names: ParameterNames) -> Undo:
        """Starts to check iterations over models' parameters and the first step of each optimizer. Returns the undo."""
        for binding in bound.values():
            binding.at_first_step.append(functools.partial(self._look_for_untrained, names))
        _watching.add(self)
        if not any(b.masters.master_weights or _scales(b) for b in bound.values()):
            return lambda: None  # gradients are always in ``.grad`` of the parameters, unscaled
        # Private in torch: every iteration over parameters of any module calls it, and dynamo has no rule about it.
        walks = functools.partial(replace_function, nn.Module, "_named_members", _looked_at)
        return shared.acquire((nn.Module, "_named_members"), walks)

    # --- gradients read or clipped in the wrong place -----------------------------------------------------------------

    def masters_read(self, binding: OptimizerBinding, frame: FrameType) -> None:
        """Checks a ``frame`` that iterates over ``amp.master_params``. Fine before backward, and for the weights."""
        if self._log.has_said("scaled") or binding.gradients.is_idle or not (grads := _scaled_grads(binding)):
            return
        is_clipping = (use := use_of(frame)) in (Use.CLIPS, Use.CLIPS_BY_OURS)
        in_block = binding.gradients.depth > 0 and use is not Use.OTHER
        if not (is_clipping or in_block):
            return
        without = not grads.isdisjoint(id(p) for p, _ in binding.masters.pairs)
        self._log.warn_once(
            "scaled",
            "amp.master_params(optimizer): gradients were "
            + ("clipped " if is_clipping else "read ")
            + ("inside a scale_loss block. " if in_block else "between blocks with delay_unscale=True. ")
            + (
                "The fp32 masters get theirs at the end of the block. "
                if without
                else "They are multiplied by the loss scale there. "
            )
            + ("Clip" if is_clipping else "Read and clip")
            + " them after the block that unscales. "
            "See docs/errors.md#modelparameters-were-clipped-inside-a-scale_loss-block.",
        )

    def walked(self, module: nn.Module, frame: FrameType) -> None:
        """Checks a ``frame`` that iterates over the parameters of ``module``."""
        if not self._bindings or (use := use_of(frame)) is Use.OTHER:
            return
        for binding in self._bindings.values():
            if binding.gradients.is_idle and use is not Use.CLIPS_BY_OURS:
                self._look_for_none(binding, module, use)
            elif not binding.gradients.is_idle and use is not Use.READS:
                self._look_for_scaled(binding, module)

    def _look_for_scaled(self, binding: OptimizerBinding, module: nn.Module) -> None:
        if self._log.has_said("scaled") or not _scales(binding):
            return
        if not _scaled_grads(binding).isdisjoint(map(id, module.parameters())):
            self._log.warn_once(
                "scaled",
                "model.parameters() were clipped inside a scale_loss block, or between blocks with delay_unscale=True. "
                "Gradients are multiplied by the loss scale there. Unscaling after clipping makes them almost 0. Clip "
                "amp.master_params(optimizer) after the block that unscales. "
                "See docs/errors.md#modelparameters-were-clipped-inside-a-scale_loss-block.",
            )

    def _look_for_none(self, binding: OptimizerBinding, module: nn.Module, use: Use) -> None:
        if self._log.has_said("none") or not (elsewhere := _grads_in_masters(binding)):
            return
        names = [name for name, p in module.named_parameters() if id(p) in elsewhere]
        if names:
            self._log.warn_once(
                "none",
                f"model.parameters(): {listed(names)} had grad None when gradients were "
                + ("clipped" if use is Use.CLIPS else "read")
                + " after a scale_loss block. The block moves gradients of 16-bit parameters, unscaled, to their fp32 "
                + ("masters, so clipping here changes nothing. Clip" if use is Use.CLIPS else "masters. Read")
                + " those of amp.master_params(optimizer), between the block and optimizer.step(). See "
                "docs/errors.md#had-grad-none-when-gradients-were-clipped-after-a-scale_loss-block.",
            )

    # --- parameters in no optimizer -----------------------------------------------------------------------------------

    def _look_for_untrained(self, names: ParameterNames, binding: OptimizerBinding) -> None:
        """Warns about model parameters that have gradients and are in no optimizer, such as replaced ones.

        A model without any parameter in an optimizer, such as a teacher, is not checked. No host sync.
        """
        if self._log.has_said("untrained") or self._log.verbosity <= 0:
            return
        models = names.by_model()
        stepped = {id(p) for b in self._bindings.values() for p in b.model_params()}
        if not any(map(has_grad, (p for model in models for p in model.values() if id(p) not in stepped))):
            return
        # Rare, so looking at every live optimizer is cheap enough.
        stepped |= _in_any_optimizer()
        of_models = {id(p) for model in models for p in model.values()}
        groups = binding.optimizer.param_groups
        both = zip(binding.model_params(), (p for g in groups for p in g["params"]), strict=True)
        left = [p for p, q in both if id(p) not in of_models and p.requires_grad and not has_grad(q)]
        untrained = [
            name
            for model in models
            if left or not stepped.isdisjoint(map(id, model.values()))
            for name, p in model.items()
            if id(p) not in stepped and p.requires_grad and has_grad(p)
        ]
        if untrained:
            kind = type(binding.optimizer).__name__
            shapes = listed([str(tuple(p.shape)) for p in left], quote="")
            self._log.warn_once(
                "untrained",
                f"{kind}.step(): {listed(untrained)} got gradients and are in no optimizer, so that this step does "
                "not train them. "
                + (
                    f"{kind} has {len(left)} that no model has and that got none, of shape {shapes}: parameters were "
                    "replaced after the optimizer was made. "
                    if left
                    else ""
                )
                + "Make the optimizer after the last change of the model, call optimizer.add_param_group(...) for new "
                "parameters, or set requires_grad_(False) on parameters that should not train. "
                "See docs/errors.md#got-gradients-and-are-in-no-optimizer.",
            )


def listed(names: list[str], quote: str = '"') -> str:
    """The first three names, and the number of others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"{quote}{name}{quote}" for name in names[:3]) + more


def _scales(binding: OptimizerBinding) -> bool:
    return not all(scale.is_identity for scale in binding.loss_scales)


def _scaled_grads(binding: OptimizerBinding) -> set[int]:
    """Ids of parameters with gradients of an open or a delayed block, if these are scaled or still in 16 bits."""
    masters = binding.masters
    in_16_bits = [p for p, _ in masters.pairs]
    leaves = (*in_16_bits, *masters.params_without_master) if _scales(binding) else in_16_bits
    return {id(p) for p in leaves if has_grad(p)}


def _grads_in_masters(binding: OptimizerBinding) -> set[int]:
    """Ids of 16-bit parameters without gradient whose master has one, or had one until the latest step."""
    without = [(p, master) for p, master in binding.masters.pairs if not has_grad(p)]
    if without and not binding.gradients.stepped:
        return {id(p) for p, master in without if has_grad(master)}
    return {id(p) for p, _ in without}


def _in_any_optimizer() -> set[int]:
    """Ids of the parameters of every live optimizer, under amp or not."""
    alive = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
    ids = {id(p) for o in alive for group in getattr(o, "param_groups", ()) for p in group["params"]}
    return ids.union(*({id(p) for p in b.model_params()} for m in list(_watching) for b in m._bindings.values()))


# Sessions that check iterations over parameters.
_watching: WeakSet[ParamMistakes] = WeakSet()


def _looked_at(original: Any) -> Any:
    """Wraps ``Module._named_members``, which iterates over the parameters or buffers of a module."""

    @functools.wraps(original)
    def named_members(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[Any]:
        # A generator like the original: the caller of its frame is the code that takes the first item.
        if not torch.compiler.is_compiling():
            for mistakes in list(_watching):
                mistakes.walked(module, sys._getframe(1))
        yield from original(module, *args, **kwargs)

    return named_members
