"""Mistakes with parameters and gradients that ruin a run in silence. Each is said once a run, with what to do.

Gradients are scaled in a ``scale_loss`` block, and after it those of 16-bit parameters lie in their masters. Who clips
or reads the wrong ones walks over parameters, and the code that walks tells what for. A walk over weights is fine.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

from ampctx.amp.param_uses import Use, use_of
from ampctx.casts.arguments import Undo
from ampctx.casts.functions import replace_function, shared
from ampctx.masters.gradients import Phase
from ampctx.masters.lazy_grads import has_grad

if TYPE_CHECKING:
    from ampctx.amp.binding import OptimizerBinding
    from ampctx.amp.skip_log import SkipLog
    from ampctx.casts.model_watch import ParameterNames


class ParamMistakes:
    """Looks out for the optimizers of one session.

    Args:
        bindings: those under amp, by optimizer.
        log: where it is said.
    """

    def __init__(self, bindings: Mapping[Any, OptimizerBinding], log: SkipLog) -> None:
        self._bindings = bindings
        self._log = log

    def watch(self, bound: Mapping[Any, OptimizerBinding], names: ParameterNames) -> Undo:
        """Has walks over models' parameters and the first step of each optimizer looked at. The undo ends it."""
        for binding in bound.values():
            binding.at_first_step.append(functools.partial(self._look_for_untrained, names))
        _watching.add(self)
        if not any(b.masters.master_weights or _scales(b) for b in bound.values()):
            return lambda: None  # a gradient is where a plain backward leaves it, at any time
        # Private by name: what all walks over parameters, of any module, come to, and what dynamo has no rule about.
        walks = functools.partial(replace_function, nn.Module, "_named_members", _looked_at)
        return shared.acquire((nn.Module, "_named_members"), walks)

    # --- gradients that are not where they are looked for -------------------------------------------------------------

    def masters_read(self, binding: OptimizerBinding, frame: FrameType) -> None:
        """``frame`` asks for what ``binding`` steps. Fine before backward, and for the weights."""
        if self._log.has_said("scaled") or binding.gradients.is_idle or not (grads := _scaled_grads(binding)):
            return
        is_clipping = (use := use_of(frame)) in (Use.CLIPS, Use.CLIPS_BY_OURS)
        in_block = binding.gradients.phase is Phase.OPEN and use is not Use.OTHER
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
            + " them after the block that unscales.",
        )

    def walked(self, module: nn.Module, frame: FrameType) -> None:
        """``frame`` goes over the parameters of ``module``."""
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
                "Gradients are multiplied by the loss scale there, and unscaling after the clipping leaves next to "
                "nothing of them. Clip amp.master_params(optimizer) after the block that unscales.",
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
                + ("masters, so that clipping changes nothing. Clip" if use is Use.CLIPS else "masters. Read")
                + " those of amp.master_params(optimizer), between the block and optimizer.step().",
            )

    # --- parameters that nobody steps ---------------------------------------------------------------------------------

    def _look_for_untrained(self, names: ParameterNames, binding: OptimizerBinding) -> None:
        """Says which parameters of the models have gradients and are in no optimizer: replaced ones, say.

        Models of which no parameter is in any optimizer, such as a teacher, are none to train. No host sync.
        """
        if self._log.has_said("untrained") or self._log.verbosity <= 0:
            return
        models = names.by_model()
        stepped = {id(p) for b in self._bindings.values() for p in b.model_params()}
        if not any(map(has_grad, (p for model in models for p in model.values() if id(p) not in stepped))):
            return
        # Unusual, and worth a look at every optimizer that there is.
        stepped |= _in_any_optimizer()
        of_models = {id(p) for model in models for p in model.values()}
        groups = binding.optimizer.param_groups
        own = zip(binding.model_params(), (p for g in groups for p in g["params"]), strict=True)
        left = [p for p, q in own if id(p) not in of_models and p.requires_grad and not has_grad(q)]
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
                "parameters, or set requires_grad_(False) for those that are not to train.",
            )


def listed(names: list[str], quote: str = '"') -> str:
    """The first three, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"{quote}{name}{quote}" for name in names[:3]) + more


def _scales(binding: OptimizerBinding) -> bool:
    return not all(scale.is_identity for scale in binding.loss_scales)


def _scaled_grads(binding: OptimizerBinding) -> set[int]:
    """Ids of parameters that a backward of an open block, or of a delayed one, has given gradients, where the optimizer
    does not step them as they are."""
    masters = binding.masters
    in_16_bits = [p for p, _ in masters.pairs]
    leaves = (*in_16_bits, *masters.params_without_master) if _scales(binding) else in_16_bits
    return {id(p) for p in leaves if has_grad(p)}


def _grads_in_masters(binding: OptimizerBinding) -> set[int]:
    """Ids of 16-bit parameters without gradient whose master has one, or had it until the latest step."""
    without = [(p, master) for p, master in binding.masters.pairs if not has_grad(p)]
    if without and not binding.gradients.stepped:
        return {id(p) for p, master in without if has_grad(master)}
    return {id(p) for p, _ in without}


def _in_any_optimizer() -> set[int]:
    """Ids of parameters of every optimizer that is alive, under amp or not."""
    alive = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
    ids = {id(p) for o in alive for group in getattr(o, "param_groups", ()) for p in group["params"]}
    return ids.union(*({id(p) for p in b.model_params()} for m in list(_watching) for b in m._bindings.values()))


# Sessions whose models' walks are looked at.
_watching: WeakSet[ParamMistakes] = WeakSet()


def _looked_at(original: Any) -> Any:
    """``original``, which goes over the parameters or buffers of a module."""

    @functools.wraps(original)
    def named_members(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[Any]:
        # A generator, as the original: its frame's caller is who takes the first item.
        if not torch.compiler.is_compiling():
            for mistakes in list(_watching):
                mistakes.walked(module, sys._getframe(1))
        yield from original(module, *args, **kwargs)

    return named_members
