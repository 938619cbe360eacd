"""Casting a model as a whole: its weights, its inputs and outputs, and what its state dict shows.

Everything here is installed by a function that returns its undo. Hooks are objects of top-level classes and hold no
module, so that a deep copy or a pickle of the model carries working hooks over its own weights.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

# Their names have an underscore, but they are the classes that all of torch's batch norms share (SyncBatchNorm and lazy
# ones included), and these with instance norms. A list of the public ones would miss subclasses written by users. Tests
# guard them.
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from ampctx._errors import AmpError
from ampctx.casts.arguments import LOW_PRECISION, ModelHook, Undo, map_floating
from ampctx.kernels.sharding import is_fully_sharded, is_sharded

# --- checks -----------------------------------------------------------------------------------------------------------


def _wrapper_name(model: nn.Module) -> str | None:
    """The public name of the parallel wrapper that ``model`` is, None if it is not one."""
    # An instance can exist only where its module was imported already; importing it here would be slow for everybody.
    for module, names in (
        ("torch.nn.parallel", ("DistributedDataParallel", "DataParallel")),
        ("torch.distributed.fsdp", ("FullyShardedDataParallel",)),
    ):
        for name in names:
            kind = getattr(sys.modules.get(module), name, None)
            if kind is not None and isinstance(model, kind):
                return f"{module}.{name}"
    return None


def check_models(models: Sequence[nn.Module], allow_16bit: bool) -> None:
    """Refuses models that ``initialize`` cannot take. CPU and CUDA tensors are fine. No host sync.

    Raises:
        AmpError: a model is a parallel wrapper, or (unless ``allow_16bit``) holds fp16 or bf16 parameters or buffers.
    """
    for model in models:
        wrapper = _wrapper_name(model)
        if wrapper is not None:
            raise AmpError(
                f"Incoming model is an instance of {wrapper}. Parallel wrappers should only be applied to "
                "what amp.initialize returns, since they record the parameters' dtypes: give it the model inside."
            )
        if allow_16bit:
            continue
        for kind, tensors in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, t in tensors:
                if t.dtype in LOW_PRECISION:
                    type_name = str(t.dtype) if is_lazy(t) else t.type()
                    raise AmpError(
                        f"Found {kind} {name} with type {type_name}, expected fp32. amp.initialize casts the model "
                        "itself: remove .half() or .bfloat16(), or call model.float() first. A session whose "
                        "allow_incoming_model_not_fp32 is True takes it as it is."
                    )


# --- weights ----------------------------------------------------------------------------------------------------------


def _stays_fp32(module: nn.Module) -> bool:
    """Affine batch norms, as in apex, and affine instance norms with statistics: kernels take both in one type."""
    if not isinstance(module, _NormBase) or module.affine is not True:
        return False
    return isinstance(module, _BatchNorm) or module.running_mean is not None


def _is_statistic(module: nn.Module, t: Tensor) -> bool:
    """Running statistics, which in 16 bits hardly move."""
    return isinstance(module, _NormBase) and (t is module.running_mean or t is module.running_var)


def set_dtype(t: Tensor, dtype: torch.dtype) -> None:
    """Casts in place through ``.data``: the object, its ties and the optimizers that hold it stay valid."""
    if t.dtype != dtype:
        t.data = t.data.to(dtype)
    if isinstance(t, nn.Parameter) and t.grad is not None and t.grad.dtype != dtype:
        t.grad.data = t.grad.data.to(dtype)


def _refuse_sharded(t: Tensor, dtype: torch.dtype) -> None:
    """A DTensor whose ``.data`` is assigned says one dtype, and what lies on the ranks has another."""
    if is_sharded(t):
        raise AmpError(
            f"the model holds a DTensor of {t.dtype}, shape {tuple(t.shape)}, which cannot be cast to {dtype} in "
            "place. Under fully_shard leave the parameters in fp32, which makes them the masters, have it cast them "
            "with MixedPrecisionPolicy(param_dtype=torch.float16), or bfloat16, and take opt_level='O0' with "
            "loss_scale='dynamic'. With tensor parallelism alone take O1 or O4."
        )


def _set_former(ref: weakref.ref[Tensor], dtype: torch.dtype) -> None:
    if (t := ref()) is not None:
        set_dtype(t, dtype)


def _flatten_rnns(ref: weakref.ref[nn.Module]) -> None:
    for module in () if (model := ref()) is None else model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


@torch.no_grad()
def cast_model(
    model: nn.Module,
    dtype: torch.dtype,
    keep_batchnorm_fp32: bool,
    kept: Collection[nn.Module] = (),
    keep_statistics_fp32: bool = True,
) -> tuple[Undo, dict[Tensor, Tensor]]:
    """Casts every floating parameter and buffer, and the gradients that are there, in place. No host sync.

    Args:
        model: any module. Complex, integer and bool tensors stay as they are; lazy parameters take the dtype when they
            materialize.
        dtype: the floating type to cast to.
        keep_batchnorm_fp32: running statistics, and parameters that go with them, are in fp32: those of batch norms,
            and of instance norms that keep statistics. All other norms are cast.
        keep_statistics_fp32: False: of affine batch norms alone, as in apex.
        kept: ``keep_fp32`` modules, whose own parameters and buffers are in fp32.

    What ``torch.nn.utils.parametrize`` makes a weight from stays in fp32, and the weight is cast on its way out:
    matrix exponentials and power iterations are not to be had in 16 bits.

    Returns:
        What casts current values back to the original types, and the original data of each parameter that was cast.

    Raises:
        AmpError: a DTensor that would be cast. Nothing has been cast then.
    """
    originals: dict[Tensor, Tensor] = {}
    parametrizations = [m for m in model.modules() if isinstance(m, ParametrizationList) and m not in kept]
    in_fp32 = {id(m) for parametrization in parametrizations for m in parametrization.modules()}
    # Weak, so that the undo does not keep a model alive that nobody uses any more.
    model_ref = weakref.ref(model)
    with ExitStack() as stack:
        stack.callback(_flatten_rnns, model_ref)
        for module in model.modules():
            # What stays fp32 is made so: an incoming model may be fp64, or 16-bit where that is allowed.
            is_norm = keep_batchnorm_fp32 and (keep_statistics_fp32 or isinstance(module, _BatchNorm))
            stays_fp32 = module in kept or id(module) in in_fp32 or (is_norm and _stays_fp32(module))
            for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                stays = stays_fp32 or (is_norm and keep_statistics_fp32 and _is_statistic(module, t))
                to = torch.float32 if stays else dtype
                if not t.is_floating_point() or t.dtype == to:
                    continue
                _refuse_sharded(t, to)
                stack.callback(_set_former, weakref.ref(t), t.dtype)
                if isinstance(t, nn.Parameter) and not is_lazy(t):
                    originals[t] = t.data
                set_dtype(t, to)
        for parametrization in parametrizations:
            stack.callback(parametrization.register_forward_hook(_CastOutputs(dtype)).remove)
        _flatten_rnns(model_ref)
        return stack.pop_all().close, originals


# --- inputs and outputs -----------------------------------------------------------------------------------------------


class _CastInputs(ModelHook):
    """A forward pre-hook."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return map_floating(args, self.dtype), map_floating(kwargs, self.dtype)


class _CastOutputs(ModelHook):
    """A forward hook."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        return map_floating(output, self.dtype)


def install_io_casts(model: nn.Module, input_dtype: torch.dtype | None, output_dtype: torch.dtype | None) -> Undo:
    """Casts what goes into ``model(...)`` and what comes out of it; None leaves that side alone. No host sync.

    Hooks on the module itself, not on what is in it. Hooks that the user registered earlier see inputs before the cast
    and outputs after it. Those of fully_shard have the last word, with its own MixedPrecisionPolicy.
    """
    with ExitStack() as stack:
        if input_dtype is not None:
            cast, prepend = _CastInputs(input_dtype), is_fully_sharded(model)
            stack.callback(model.register_forward_pre_hook(cast, prepend=prepend, with_kwargs=True).remove)
        if output_dtype is not None:
            stack.callback(model.register_forward_hook(_CastOutputs(output_dtype), prepend=True).remove)
        return stack.pop_all().close


# --- state dict -------------------------------------------------------------------------------------------------------


class UpcastEntries(ModelHook):
    """A state dict post-hook: the module's own 16-bit entries become fp32 copies. Children have a hook of their own."""

    def shown(self, value: Tensor, t: Tensor) -> Tensor:
        """What becomes of the entry of a 16-bit parameter or buffer: a new tensor."""
        return value.to(torch.float32)

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for named in (module.named_parameters, module.named_buffers):
            for name, t in named(recurse=False, remove_duplicate=False):
                key = prefix + name
                value = state_dict.get(key)
                if isinstance(value, Tensor) and value.dtype in LOW_PRECISION:
                    state_dict[key] = self.shown(value, t)


# The name in pickles of models.
_UpcastEntries = UpcastEntries


def install_state_dict_upcast(model: nn.Module, kind: type[UpcastEntries] = UpcastEntries) -> Undo:
    """Has ``state_dict()`` of the model and of any module in it show fp32 where weights are fp16 or bf16. No host sync.

    The fp32 entries are copies; entries that were not 16-bit still alias the model. Loading such a state dict works as
    ever. A module that has such a hook does not get a second one. The user's hooks run after it, on what it shows.
    """
    with ExitStack() as stack:
        for module in model.modules():
            # Module offers no public way to look for a hook, nor to run one first, hence its private _state_dict_hooks.
            # Tests guard it.
            if not any(isinstance(hook, kind) for hook in module._state_dict_hooks.values()):
                handle = module.register_state_dict_post_hook(kind())
                stack.callback(handle.remove)
                hooks = module._state_dict_hooks
                for former in [key for key in hooks if key != handle.id]:
                    hooks[former] = hooks.pop(former)
        return stack.pop_all().close
