"""Casts a whole model: weights, inputs and outputs, and the entries of its state dict.

Each function that installs something returns its undo. Hooks are objects of top-level classes and hold no module, so
the hooks of a deep copy or a pickle work on its own weights.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

# Private names: the base class of all batch norms (SyncBatchNorm and lazy ones too), and that of batch and instance
# norms. A list of public classes would miss users' subclasses. Tests guard them.
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from ampctx._errors import AmpError
from ampctx.casts.arguments import LOW_PRECISION, ModelHook, Undo, map_floating
from ampctx.casts.forward_errors import note_dtypes
from ampctx.kernels.sharding import is_fully_sharded, is_sharded
from ampctx.kernels.tensor_loops import has_values

# --- checks -----------------------------------------------------------------------------------------------------------


def _wrapper_name(model: nn.Module) -> str | None:
    """The public name of the parallel wrapper if ``model`` is one, or None."""
    for name in (
        "nn.parallel.DistributedDataParallel",
        "nn.parallel.DataParallel",
        "distributed.fsdp.FullyShardedDataParallel",
    ):
        # Importing these modules is slow. If the program did not, no instance can exist.
        module, _, kind = f"torch.{name}".rpartition(".")
        if isinstance(model, getattr(sys.modules.get(module), kind, ())):
            return f"{module}.{kind}"
    return None


def check_models(models: Sequence[nn.Module], allow_16bit: bool, dtype: torch.dtype | None = None) -> None:
    """Refuses models that ``initialize`` cannot take. No host sync.

    ``dtype``: the model is to be cast to it. Frozen parameters may be 16 bits wide where that rounds none.

    Raises:
        AmpError: a model is a parallel wrapper. Without ``allow_16bit``: it holds other fp16 or bf16 parameters, or
            such buffers and no frozen parameters in 16 bits.
    """
    for model in models:
        if wrapper := _wrapper_name(model):
            raise AmpError(
                f"Incoming model is an instance of {wrapper}. Parallel wrappers should only be applied to "
                "the model that amp.initialize returns, because they record the dtypes of its parameters. Call "
                "amp.initialize on the inner model, then wrap it. See `ampctx explain incoming-model-is-an-instance`."
            )
        if allow_16bit:
            continue
        low = {p for p in model.parameters() if p.dtype in LOW_PRECISION and not p.requires_grad}
        frozen = {p for p in low if dtype in (None, torch.float32, torch.float16, p.dtype)}  # fp16 rounds no bf16
        for kind, tensors in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, t in tensors:
                if t.dtype in LOW_PRECISION and (t not in frozen if kind == "param" else not frozen):
                    type_name = str(t.dtype) if is_lazy(t) else t.type()
                    raise AmpError(
                        f"Found {kind} {name} with type {type_name}, expected fp32. amp.initialize casts the model "
                        "itself. Remove .half() or .bfloat16(), or call model.float() first. Frozen parameters may "
                        "have the 16-bit type of the level, or be bf16. To train 16-bit weights, make session = "
                        "amp.AmpSession(), set session.allow_incoming_model_not_fp32 = True and call "
                        "session.initialize. See `ampctx explain found-param-with-type`."
                    )


# --- weights ----------------------------------------------------------------------------------------------------------


def _stays_fp32(module: nn.Module) -> bool:
    """Affine batch norms, as in apex, and affine instance norms with statistics: their kernels need one dtype."""
    is_affine = isinstance(module, _NormBase) and module.affine is True
    return is_affine and (isinstance(module, _BatchNorm) or module.running_mean is not None)


def modules_in_fp32(
    model: nn.Module, keep_batchnorm_fp32: bool, keep_fp32: Collection[nn.Module] = (), keep_statistics: bool = True
) -> set[nn.Module]:
    """The modules whose own parameters stay in fp32 when the model is cast. ``keep_statistics``: see ``cast_model``.

    Parametrizations (``torch.nn.utils.parametrize``) compute in fp32, because matrix exponentials and power iterations
    need it.
    """
    kept = set(keep_fp32)
    for module in model.modules():
        if isinstance(module, ParametrizationList):
            kept.update(module.modules())
        elif keep_batchnorm_fp32 and (keep_statistics or isinstance(module, _BatchNorm)) and _stays_fp32(module):
            kept.add(module)
    return kept


def is_statistic(module: nn.Module, t: Tensor) -> bool:
    """Running statistics, whose small updates would vanish in 16 bits."""
    return isinstance(module, _NormBase) and (t is module.running_mean or t is module.running_var)


def set_dtype(t: Tensor, dtype: torch.dtype) -> None:
    """Casts in place through ``.data``, so that tied weights and optimizers keep the same object."""
    if t.dtype != dtype:
        t.data = t.data.to(dtype)
    if isinstance(t, nn.Parameter) and t.grad is not None:
        wanted = t.grad_dtype or dtype  # that of the parameter, unless the program has set another
        if t.grad.dtype != wanted:
            t.grad.data = t.grad.data.to(wanted)


def _refuse_sharded(t: Tensor, dtype: torch.dtype) -> None:
    """Refuses DTensors: after an assignment to ``.data`` their dtype would differ from that of their parts."""
    if is_sharded(t):
        raise AmpError(
            f"the model holds a DTensor of {t.dtype}, shape {tuple(t.shape)}, which cannot be cast to {dtype} in "
            "place. Under fully_shard use O2 or O5: the fp32 shards are the masters. With tensor parallelism alone use "
            "O1 or O4. See `ampctx explain sharded`."
        )


def _set_formers(ref: weakref.ref[nn.Module], formers: dict[int, torch.dtype]) -> None:
    for t in () if (m := ref()) is None else (*m.parameters(), *m.buffers()):
        set_dtype(t, formers.get(id(t), t.dtype))


def _flatten_rnns(ref: weakref.ref[nn.Module]) -> None:
    for module in () if (model := ref()) is None else model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


@torch.no_grad()
def cast_model(
    model: nn.Module,
    dtype: torch.dtype,
    keep_batchnorm_fp32: bool,
    keep_fp32: Collection[nn.Module] = (),
    keep_statistics_fp32: bool = True,
) -> tuple[Undo, dict[Tensor, Tensor]]:
    """Casts every floating parameter, buffer and gradient of a model in place. No host sync.

    Parametrizations compute in fp32. Their result is cast. Buffers in fp64 stay, unless parameters are in fp64 too.

    Args:
        model: any module. Complex, integer and bool tensors do not change. Lazy parameters take the dtype when they
            materialize.
        dtype: the floating dtype to cast to.
        keep_batchnorm_fp32: batch norms, and instance norms with statistics, stay in fp32. Other norms are cast.
        keep_fp32: modules whose parameters and buffers stay in fp32.
        keep_statistics_fp32: False keeps only affine batch norms in fp32 and casts fp64 buffers, as apex does.

    Returns:
        The undo, which casts current values back to the original dtypes, and the original data of each parameter and
        buffer that was cast.

    Raises:
        AmpError: the cast would need a DTensor in another dtype. Nothing has been cast then.
    """
    originals: dict[Tensor, Tensor] = {}
    parametrizations = [m for m in model.modules() if isinstance(m, ParametrizationList) and m not in keep_fp32]
    in_fp32 = modules_in_fp32(model, keep_batchnorm_fp32, keep_fp32, keep_statistics_fp32)
    keeps_fp64 = keep_statistics_fp32 and all(p.dtype != torch.float64 for p in model.parameters())
    # Weak, so that the undo does not keep the model alive. By id: torch swaps no tensor that has a weak reference.
    model_ref, formers = weakref.ref(model), dict[int, torch.dtype]()
    with ExitStack() as stack:
        stack.callback(_flatten_rnns, model_ref)
        stack.callback(_set_formers, model_ref, formers)
        for module in model.modules():
            # Layers that stay in fp32 are cast too: the incoming model may be fp64, or 16-bit if that is allowed.
            keeps_statistics = keep_batchnorm_fp32 and keep_statistics_fp32
            for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                stays = module in in_fp32 or (keeps_statistics and is_statistic(module, t))
                to = torch.float32 if stays else dtype
                if not t.is_floating_point() or t.dtype == to or (keeps_fp64 and t.dtype == torch.float64):
                    continue
                _refuse_sharded(t, to)
                formers[id(t)] = t.dtype
                if not is_lazy(t):
                    originals[t] = t.data
                set_dtype(t, to)
        for parametrization in parametrizations:
            stack.callback(parametrization.register_forward_hook(_CastOutputs(dtype)).remove)
        _flatten_rnns(model_ref)
        return stack.pop_all().close, originals


@torch.no_grad()
def rounded_buffers(model: nn.Module, originals: Mapping[Tensor, Tensor]) -> list[str]:
    """The names of buffers that ``cast_model`` has moved by more than 1e-4 of their largest value. Host sync.

    fp16 moves a number by up to 5e-4 of itself, and bf16 by 4e-3: masks and counts stay what they are, tables do not.
    """
    found = []
    for path, module in model.named_modules():
        for name, t in module.named_buffers(path, recurse=False):
            exact = originals.get(t)
            if exact is None or is_statistic(module, t) or not has_values(t) or not t.numel():
                continue
            size = exact.abs()
            bound = 1e-4 * size.where(size.isfinite(), 0).amax()
            if ((t.to(exact.dtype) - exact).abs() > bound).any():
                found.append(name)
    return found


# --- inputs and outputs -----------------------------------------------------------------------------------------------


class _CastInputs(ModelHook):
    """A forward pre-hook."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return map_floating(args, self.dtype), map_floating(kwargs, self.dtype)


class _CastOutputs(ModelHook):
    """A forward hook. ``low``: the 16-bit type in which a model computes, for a note on an error that leaves it."""

    def __init__(self, dtype: torch.dtype, low: torch.dtype | None = None) -> None:
        self.dtype, self.low = dtype, low

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if output is None and self.low is not None:
            note_dtypes(module, self.low, True)
        return map_floating(output, self.dtype)


def install_io_casts(
    model: nn.Module, input_dtype: torch.dtype | None, output_dtype: torch.dtype | None, outputs_last: bool = False
) -> Undo:
    """Casts inputs and outputs of ``model(...)``; None leaves that side alone. No host sync.

    The hooks are on ``model`` only, not on its children. Hooks that the user registered earlier see inputs before the
    cast and outputs after it. fully_shard's hooks run last and apply its MixedPrecisionPolicy. ``outputs_last``: cast
    outputs after all these hooks.
    """
    with ExitStack() as stack:
        if input_dtype is not None:
            cast, prepend = _CastInputs(input_dtype), is_fully_sharded(model)
            stack.callback(model.register_forward_pre_hook(cast, prepend=prepend, with_kwargs=True).remove)
        if output_dtype is not None:
            low = input_dtype if input_dtype in LOW_PRECISION else None
            hook, first = _CastOutputs(output_dtype, low), not outputs_last
            stack.callback(model.register_forward_hook(hook, prepend=first, always_call=low is not None).remove)
        return stack.pop_all().close


# --- state dict -------------------------------------------------------------------------------------------------------


class UpcastEntries(ModelHook):
    """A state dict post-hook: fp32 copies for the module's own 16-bit entries. Children have their own hook."""

    def shown(self, value: Tensor, t: Tensor) -> Tensor:
        """The entry to show for a 16-bit parameter or buffer ``t``: a new tensor."""
        return value.to(torch.float32)

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for named in (module.named_parameters, module.named_buffers):
            for name, t in named(recurse=False, remove_duplicate=False):
                key = prefix + name
                value = state_dict.get(key)
                if isinstance(value, Tensor) and value.dtype in LOW_PRECISION:
                    state_dict[key] = self.shown(value, t)


def install_state_dict_upcast(model: nn.Module, kind: type[UpcastEntries] = UpcastEntries) -> Undo:
    """Makes ``state_dict()`` of the model and its modules show fp16 and bf16 weights in fp32. No host sync.

    The fp32 entries are copies; other entries alias the model. Such a state dict loads as usual. A module gets one hook
    at most, and the user's hooks run after it.
    """
    with ExitStack() as stack:
        for module in model.modules():
            # Private _state_dict_hooks: torch has no public way to find a hook or to run one first. Tests guard it.
            if not any(isinstance(hook, kind) for hook in module._state_dict_hooks.values()):
                handle = module.register_state_dict_post_hook(kind())
                stack.callback(handle.remove)
                hooks = module._state_dict_hooks
                for former in [key for key in hooks if key != handle.id]:
                    hooks[former] = hooks.pop(former)
        return stack.pop_all().close
