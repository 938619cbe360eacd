"""Casting a model as a whole: its weights, its inputs and outputs, and what its state dict shows.

Everything here is installed by a function that returns its undo. Hooks are objects of top-level classes and hold no
module, so that a deep copy or a pickle of the model carries working hooks over its own weights.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Their names have an underscore, but they are the classes that all of torch's batch norms share (SyncBatchNorm and lazy
# ones included), and these with instance norms. A list of the public ones would miss subclasses written by users. Tests
# guard them.
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from ampctx._errors import AmpError, AmpTypeError
from ampctx.casts.arguments import LOW_PRECISION, ModelHook, Undo
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


def _flatten_rnns(model: nn.Module) -> None:
    for module in model.modules():
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
        kept: modules whose own parameters and buffers are in fp32.

    What ``torch.nn.utils.parametrize`` makes a weight from stays in fp32, and the weight is cast on its way out:
    matrix exponentials and power iterations are not to be had in 16 bits.

    Returns:
        What casts current values back to the original types, and the original data of each parameter that was cast.

    Raises:
        AmpError: a DTensor that would be cast. Nothing has been cast then.
    """
    originals: dict[Tensor, Tensor] = {}
    # Weak, so that the undo does not keep a model alive that nobody uses any more.
    changed: list[tuple[weakref.ref[Tensor], torch.dtype]] = []
    model_ref = weakref.ref(model)
    parametrizations = [m for m in model.modules() if isinstance(m, ParametrizationList) and m not in kept]
    in_fp32 = {id(m) for parametrization in parametrizations for m in parametrization.modules()}
    handles: list[RemovableHandle] = []

    @torch.no_grad()
    def undo() -> None:
        for handle in handles:
            handle.remove()
        for ref, former in changed:
            if (t := ref()) is not None:
                set_dtype(t, former)
        if (alive := model_ref()) is not None:
            _flatten_rnns(alive)

    try:
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
                changed.append((weakref.ref(t), t.dtype))
                if isinstance(t, nn.Parameter) and not is_lazy(t):
                    originals[t] = t.data
                set_dtype(t, to)
        handles += [m.register_forward_hook(_CastOutputs(dtype)) for m in parametrizations]
        _flatten_rnns(model)
    except BaseException:
        undo()
        raise
    return undo, originals


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
    handles = []
    if input_dtype is not None:
        cast = _CastInputs(input_dtype)
        handles.append(model.register_forward_pre_hook(cast, prepend=is_fully_sharded(model), with_kwargs=True))
    if output_dtype is not None:
        handles.append(model.register_forward_hook(_CastOutputs(output_dtype), prepend=True))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


# --- state dict -------------------------------------------------------------------------------------------------------


class _UpcastEntries(ModelHook):
    """A state dict post-hook: the module's own 16-bit entries become fp32 copies. Children have a hook of their own."""

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for named in (module.named_parameters, module.named_buffers):
            for name, _ in named(recurse=False, remove_duplicate=False):
                key = prefix + name
                value = state_dict.get(key)
                if isinstance(value, Tensor) and value.dtype in LOW_PRECISION:
                    state_dict[key] = value.to(torch.float32)


def install_state_dict_upcast(model: nn.Module) -> Undo:
    """Has ``state_dict()`` of the model and of any module in it show fp32 where weights are fp16 or bf16. No host sync.

    The fp32 entries are copies; entries that were not 16-bit still alias the model. Loading such a state dict works as
    ever. A module that has the hook does not get a second one.
    """
    # Module offers no public way to look for a hook, hence its private _state_dict_hooks. A test guards it.
    handles = [
        module.register_state_dict_post_hook(_UpcastEntries())
        for module in model.modules()
        if not any(isinstance(hook, _UpcastEntries) for hook in module._state_dict_hooks.values())
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


# --- containers -------------------------------------------------------------------------------------------------------


def map_floating(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating tensor in it cast to ``dtype``; the very same object where nothing needs a cast.

    Goes through mappings, dataclasses, tuples (named ones too), lists, deques and sets of any subclass, and keeps the
    types. Other objects with a ``to`` method are asked for ``value.to(dtype)``. All else passes through, modules and
    iterators among it.

    Raises:
        AmpTypeError: a container that can be neither copied nor rebuilt from its elements.
    """
    return map_leaves(value, functools.partial(_cast_leaf, dtype))


def _cast_leaf(dtype: torch.dtype, leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(dtype) if leaf.is_floating_point() and leaf.dtype != dtype else leaf
    if isinstance(leaf, nn.utils.rnn.PackedSequence) and not leaf.data.is_floating_point():
        return leaf
    return leaf.to(dtype)


def map_leaves(value: Any, fn: Callable[[Any], Any]) -> Any:
    """What ``map_floating`` does, with ``fn`` of the tensors and of the objects with a ``to`` method."""
    return _mapped(value, fn)[0]


def _mapped(value: Any, fn: Callable[[Any], Any]) -> tuple[Any, bool]:
    """``map_leaves``, and whether that is another object: dynamo cannot tell by ``is`` of tuples."""
    if isinstance(value, Tensor):
        mapped = fn(value)
        return mapped, mapped is not value
    if value is None or isinstance(value, (str, bytes, int, float, type, nn.Module)):
        return value, False
    if callable(getattr(value, "to", None)):
        mapped = fn(value)
        return mapped, mapped is not value
    if isinstance(value, Mapping):
        return _map_parts(value, dict(value), fn, _mapping_with)
    if is_dataclass(value):
        parts = {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
        return _map_parts(value, parts, fn, _dataclass_with)
    if isinstance(value, (tuple, list, deque, set, frozenset)):
        return _map_parts(value, dict(enumerate(value)), fn, _collection_with)
    return value, False


def _map_parts(
    value: Any, parts: dict[Any, Any], fn: Callable[[Any], Any], build: Callable[[Any, dict, dict], Any]
) -> tuple[Any, bool]:
    """Maps the named parts of a container; builds a new one only if some changed."""
    changed = {}
    for name, part in parts.items():
        mapped, is_new = _mapped(part, fn)
        if is_new:
            changed[name] = mapped
    if not changed:
        return value, False
    try:
        return build(value, parts, changed), True
    except Exception as error:
        kind = type(value)
        raise AmpTypeError(
            f"cannot rebuild a {kind.__module__}.{kind.__qualname__} with tensors of another type ({error}). Give the "
            "class a method to(dtype) that returns the cast object, or make it work with copy.copy."
        ) from error


def _mapping_with(value: Mapping, parts: dict, changed: dict) -> Any:
    if type(value) is dict or not isinstance(value, MutableMapping):
        return type(value)({**parts, **changed})  # type: ignore[call-arg]
    # A copy and single assignments keep attributes, default factories and what a subclass does on assignment.
    result = copy.copy(value)
    # Dynamo (2.13) copies mappings without what is in them.
    for key, part in ({**parts, **changed} if torch.compiler.is_compiling() else changed).items():
        result[key] = part
    return result


def _dataclass_with(value: Any, parts: dict, changed: dict) -> Any:
    result = copy.copy(value)
    for name, part in changed.items():
        object.__setattr__(result, name, part)  # frozen ones too
    return result


def _collection_with(value: Any, parts: dict, changed: dict) -> Any:
    elements = list({**parts, **changed}.values())
    if isinstance(value, tuple):
        return value._make(elements) if hasattr(value, "_make") else type(value)(elements)
    if isinstance(value, frozenset) or type(value) in (list, set):
        return type(value)(elements)
    result = copy.copy(value)  # keeps attributes, and maxlen of a deque
    result.clear()
    if isinstance(result, set):
        result.update(elements)
    else:
        result.extend(elements)
    return result
