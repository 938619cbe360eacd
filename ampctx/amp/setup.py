"""The checks of ``initialize``, and its changes of models. If one part fails, ``initialize`` undoes them all."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ampctx._errors import AmpError, AmpTypeError
from ampctx.amp.fully_sharded import Sharded
from ampctx.amp.options import PrecisionPolicy
from ampctx.casts import casting
from ampctx.casts.kept_modules import KeptModules
from ampctx.casts.model_watch import refuse_replaced
from ampctx.weights.masters import MasterParams
from ampctx.weights.state_dicts import ShowMasters, watch_forward, watch_loading


def as_list(value: Any, kind: str, accepts: Callable[[Any], bool]) -> list[Any]:
    items = value if isinstance(value, list) else [value]
    for item in items:
        if not accepts(item):
            raise AmpTypeError(
                f"{kind}s must be either a single {kind} or a list of {kind}s. Got {type(item).__name__}"
                + (" inside the list." if items is value else ".")
            )
    return items


def refuse_fp16_optimizer(optimizers: Any) -> None:
    """Raises AmpTypeError for apex's FP16_Optimizer, or a copy of that class."""
    for item in optimizers if isinstance(optimizers, list) else [optimizers]:
        if any(base.__name__ == "FP16_Optimizer" for base in type(item).__mro__):
            raise AmpTypeError(
                f"An incoming optimizer is an instance of {type(item).__module__}.{type(item).__qualname__}. It keeps "
                "fp32 masters and a loss scale of its own. Pass the optimizer inside it to amp.initialize, and step "
                "that one."
            )


def is_optimizer(value: Any) -> bool:
    """Whether ``value`` is a torch optimizer, or a wrapper with the methods of one (LARC)."""
    return isinstance(value, torch.optim.Optimizer) or all(
        hasattr(value, name) for name in ("param_groups", "state", "step", "zero_grad", "add_param_group")
    )


def check(models: list[nn.Module], optimizers: list[Any], bound: Container[Any]) -> None:
    """Raises AmpError for an optimizer that is under amp already, and for CUDA without cuDNN."""
    if not torch.backends.cudnn.enabled and any(p.is_cuda for m in models for p in m.parameters()):
        raise AmpError("Amp requires torch.backends.cudnn.enabled = True")
    for i, optimizer in enumerate(optimizers):
        if optimizer in bound or optimizer in optimizers[:i]:
            raise AmpError(
                "A given optimizer should only be passed through amp.initialize once. Call amp.reset() first to "
                "initialize it again. "
                "See docs/errors.md#a-given-optimizer-should-only-be-passed-through-ampinitialize-once."
            )
        if "__reduce_ex__" in vars(optimizer):  # a replaced method, see ``OptimizerBinding``
            raise AmpError(
                f"optimizers[{i}] ({type(optimizer).__name__}) is under amp in another AmpSession. Call reset() of "
                "that session first."
            )


@torch.no_grad()
def put_back(data: Mapping[Tensor, Tensor]) -> None:
    """Gives tensors the data that ``cast_models`` has returned. No host sync."""
    for t, former in data.items():
        t.data = former


def cast_models(
    undo: ExitStack,
    policy: PrecisionPolicy,
    models: list[nn.Module],
    kept: KeptModules,
    sharded: Mapping[nn.Module, Sharded],
) -> dict[Tensor, Tensor]:
    """Casts weights, inputs and outputs as the level says; ``fully_shard`` casts the weights of ``sharded`` models.
    Returns the former data of parameters and buffers."""
    originals: dict[Tensor, Tensor] = {}
    for model in models:
        if model in sharded:
            sharded[model].apply(undo)
        elif policy.input_dtype is not None:
            keep_bn = bool(policy.keep_batchnorm_fp32)
            restore, data = casting.cast_model(model, policy.input_dtype, keep_bn, kept.modules)
            undo.callback(restore)
            originals.update(data)
            undo.callback(casting.install_state_dict_upcast(model, ShowMasters))
        takes = torch.float32 if policy.input_dtype is not None and model in kept.modules else policy.input_dtype
        outputs_last = model in sharded and sharded[model].casts_outputs
        undo.callback(casting.install_io_casts(model, takes, policy.output_dtype, outputs_last))
    if policy.input_dtype not in (None, torch.float32):
        for module in kept.entries:
            if module not in models:
                undo.callback(casting.install_io_casts(module, torch.float32, policy.input_dtype))
    return originals


def watch_models(undo: ExitStack, models: list[nn.Module], masters: list[MasterParams], have_masters: bool) -> None:
    """Loads values into masters along with the model, and refuses to replace tensors that an optimizer steps."""
    alive = weakref.WeakSet(masters)
    for model in models if have_masters else ():
        undo.callback(watch_loading(model))
        undo.callback(watch_forward(model, masters))
    for model in models if masters else ():
        undo.callback(
            refuse_replaced(model, lambda: [p for m in alive for p in (*m.params_without_master, *m.model_of.values())])
        )


def finalizer(owner: Any, action: Callable[[], None]) -> Callable[[], None]:
    """Runs ``action`` once: when called, or when ``owner`` is gone, in the thread that drops the last reference."""
    once = weakref.finalize(owner, action)
    once.atexit = False
    return once
