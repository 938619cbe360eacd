"""The checks of ``initialize``, and its changes of models. If one part fails, ``initialize`` undoes them all."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ampctx._collectives import is_distributed
from ampctx._errors import AmpError, AmpTypeError, AmpValueError, listed, warn
from ampctx.amp.fully_sharded import Sharded
from ampctx.amp.options import PrecisionPolicy
from ampctx.amp.step import OptimizerBinding
from ampctx.casts import casting
from ampctx.casts.kept_modules import KeptModules
from ampctx.casts.model_watch import refuse_replaced
from ampctx.kernels.reference_steps import split
from ampctx.kernels.sharding import is_sharded, steps_a_partition
from ampctx.optimizers._base import FusedOptimizer
from ampctx.optimizers._guard import Guarded
from ampctx.optimizers._options import param_name
from ampctx.optimizers.split_masters import SplitMasters
from ampctx.scaling.any_optimizer import with_wrapped
from ampctx.weights.masters import MasterParams
from ampctx.weights.state_dicts import ShowMasters, watch_forward, watch_loading
from ampctx.weights.store import EXTRAS, joined


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


def check(models: list[nn.Module], optimizers: list[Any], bound: Container[Any], policy: PrecisionPolicy) -> None:
    """Raises AmpError for an optimizer that is under amp already, steps the model by other tensors, or holds one that
    would miss the masters; and for CUDA without cuDNN."""
    if policy.loss_scale != 1.0 or policy.input_dtype not in (None, torch.float32):
        _refuse_other_tensors(models, optimizers)
    if not torch.backends.cudnn.enabled and any(p.is_cuda for m in models for p in m.parameters()):
        raise AmpError("Amp requires torch.backends.cudnn.enabled = True")
    for i, optimizer in enumerate(optimizers):
        if any(isinstance(one, Guarded) and one._guard is not None for one in with_wrapped(optimizer)):
            raise AmpError(
                f"optimizers[{i}] ({type(optimizer).__name__}) has skip_nonfinite or skip_norm_above, which are for "
                "loops without amp. Leave them out, and pass amp.initialize(skip_nonfinite=True)."
            )
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
        own, inner = [group["params"] for group in optimizer.param_groups], with_wrapped(optimizer)[1:]
        known = {id(p) for params in own for p in params}
        for one in inner if policy.keeps_masters and not steps_a_partition(optimizer) else ():
            lists = [group["params"] for group in one.param_groups]
            if any(id(p) in known for params in lists if all(params is not o for o in own) for p in params):
                kind = type(optimizer).__name__
                raise AmpError(
                    f"optimizers[{i}] ({kind}) holds a {type(one).__name__} with param groups of its own over the same "
                    "parameters. fp32 masters would replace only those in the groups outside: steps of the one inside "
                    "would train nothing. "
                    f"Pass the optimizers inside {kind} to amp.initialize and to scale_loss, or let both share the "
                    "groups: self.param_groups = inner.param_groups. O1 and O4 take it as it is. "
                    "See docs/errors.md#has-changed-no-fp32-master-weight."
                )


def _refuse_other_tensors(models: list[nn.Module], optimizers: list[Any]) -> None:
    """Raises AmpError for a parameter that is none of the models' and lies in their memory, such as one flat buffer."""

    def place(p: Tensor) -> tuple[int, int, int]:
        """Of its storage, its begin and its end."""
        if type(p) is not nn.Parameter or not (at := p.data_ptr()):
            return 0, 0, 0
        return p.untyped_storage().data_ptr(), at, at + p.nbytes

    of_models = {p: name for model in models for name, p in model.named_parameters()}
    places = defaultdict[int, list](list)
    for p, name in of_models.items():
        storage, *ends = place(p)
        places[storage].append((*ends, name))
    places.pop(0, None)
    for i, optimizer in enumerate(optimizers):
        groups = optimizer.param_groups
        members = [(p, g, j) for g, group in enumerate(groups) for j, p in enumerate(group["params"])]
        for p, g, j in (member for member in members if member[0] not in of_models):
            storage, begin, end = place(p)
            if shared := [name for first, last, name in places.get(storage, ()) if max(begin, first) < min(end, last)]:
                raise AmpError(
                    f"optimizers[{i}] ({type(optimizer).__name__}): {param_name(groups, g, j)} is no parameter of the "
                    f'model, and lies in the memory of "{shared[0]}". No backward makes its gradient, so amp '
                    "cannot unscale it. Make the optimizer of model.parameters(): ampctx's step them together, too. "
                    "See docs/optimizers.md."
                )


def _refuse_forward(wrapper: nn.Module, args: Any) -> None:
    if torch.is_grad_enabled():  # an evaluation needs no gradients of other ranks
        raise AmpError(
            f"{type(wrapper).__name__}: the model was wrapped before amp.initialize or amp.reset cast its weights, so "
            "ranks would not average gradients. Wrap the model again. "
            "See docs/errors.md#incoming-model-is-an-instance-of-torchnnparallel."
        )


def refuse_wrappers(cast: Container[int]) -> None:
    """Has each DistributedDataParallel of parameters with these ids raise at its next forward. It has hooks on nodes of
    autograd that a cast replaces, and no parameter, node or module names it."""
    objects = gc.get_objects() if is_distributed() else []  # without a process group there is none
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, DistributedDataParallel)}
    for wrapper in [o for o in objects if type(o) in kinds]:
        if any(id(p) in cast and p.requires_grad for p in wrapper.parameters()):
            wrapper.register_forward_pre_hook(_refuse_forward)


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
            for module in sharded[model].kept:
                undo.callback(casting.install_io_casts(module, None, policy.input_dtype))
        elif policy.input_dtype is not None:
            keep_bn = bool(policy.keep_batchnorm_fp32)
            restore, data = casting.cast_model(model, policy.input_dtype, keep_bn, kept.modules)
            undo.callback(restore)
            originals.update(data)
            cast = frozenset(map(id, data))
            undo.callback(refuse_wrappers, cast)
            refuse_wrappers(cast)
            undo.callback(casting.install_state_dict_upcast(model, ShowMasters))
        takes = torch.float32 if policy.input_dtype is not None and model in kept.modules else policy.input_dtype
        outputs_last = model in sharded and sharded[model].casts_outputs
        undo.callback(casting.install_io_casts(model, takes, policy.output_dtype, outputs_last))
    if policy.input_dtype not in (None, torch.float32):
        for module in kept.entries:
            if module not in models:
                undo.callback(casting.install_io_casts(module, torch.float32, policy.input_dtype))
    return originals


def warn_of_rounded(models: Sequence[nn.Module], originals: Mapping[Tensor, Tensor]) -> None:
    """Warns, once, of buffers that the cast has rounded. Host sync where it has cast some."""
    if names := [name for model in models for name in casting.rounded_buffers(model, originals)]:
        warn(
            f"amp.initialize: buffers lose digits in 16 bits: {listed(names)}. A buffer is cast with the parameters of "
            "its module. If it is a table (positions, frequencies, a schedule), register it in a module without "
            "parameters, which computes in fp32 and is called as a function, or pass its module to keep_fp32. "
            "See docs/levels.md#buffers-at-o2-o3-and-o5."
        )


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


# --- master_weights="split": optimizers keep the 16 bits that bf16 weights lack of fp32 -------------------------------

_REMAINDER = EXTRAS["split"]


def check_split(optimizers: Sequence[Any], bindings: Mapping[Any, OptimizerBinding]) -> None:
    """Raises AmpError if one of these optimizers cannot keep split masters. ``bindings``: those under amp already."""
    call, stepped = 'master_weights="split"', {id(p) for _, b in bindings.items() for p in b.model_params()}
    for i, optimizer in enumerate(optimizers):
        kind = type(optimizer)
        which = f"{call}: optimizers[{i}] ({kind.__name__})"
        if isinstance(optimizer, FusedOptimizer) and "master_weights" not in optimizer._refused:
            if optimizer.master_weights is True or optimizer.write_back != "nearest":
                option = "master_weights" if optimizer.master_weights is True else "write_back"
                raise AmpValueError(
                    f"{which} has {option}={getattr(optimizer, option)!r}, which keeps or rounds weights in another "
                    "way. Leave that out, or pass master_weights=False to amp.initialize."
                )
        elif not isinstance(optimizer, SplitMasters):
            fix = "Pass an optimizer of ampctx that takes master_weights, SplitMasters with a class of torch.optim"
            if getattr(torch.optim, kind.__name__, None) is kind:
                fix = f"Pass ampctx.optimizers.SplitMasters(torch.optim.{kind.__name__}, params, ...)"
            raise AmpTypeError(
                f"{which} keeps no split masters. {fix}, or leave master_weights at None: amp then keeps fp32 masters. "
                "See docs/levels.md."
            )
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if any(map(is_lazy, trained)):
            raise AmpError(
                f"{which} has a parameter of a lazy module, which has no values yet. Run one forward before "
                "amp.initialize."
            )
        if twice := [p for p in trained if id(p) in stepped]:
            raise AmpError(
                f"{call}: a parameter of shape {tuple(twice[0].shape)} is in two optimizers, and only one of them can "
                "keep the bits that its bf16 weight lacks. Pass each parameter to one optimizer, or use O4."
            )
        stepped.update(map(id, trained))


@torch.no_grad()
def begin_split(undo: ExitStack, optimizer: Any, originals: Mapping[Tensor, Tensor]) -> None:
    """Splits the weights before the cast into bf16 weights and state of the optimizer. Host sync with ``offload``."""
    fused = isinstance(optimizer, FusedOptimizer)
    undo.callback(_end_split, weakref.ref(optimizer), optimizer.master_weights if fused else None)
    if fused:
        optimizer.master_weights = "split"
    on_host = fused and optimizer.offload is not None
    for p in [p for p in _bf16_params(optimizer) if p in originals]:
        optimizer.state.get(p, {}).pop(_REMAINDER, None)  # of an earlier cast
        if is_distributed():
            continue  # as other masters: a broadcast makes only the models of the ranks equal
        high, low = split(originals[p].float())
        rest = torch.empty_like(p, dtype=torch.int16, device="cpu" if on_host else None, requires_grad=False)
        optimizer.state[p][_REMAINDER] = rest.copy_(low)
        p.copy_(high)  # differs from the cast half way between two bf16 numbers


@torch.no_grad()
def _end_split(reference: weakref.ref[Any], former: Any) -> None:
    """Makes the weights fp32 again, with every bit."""
    if (optimizer := reference()) is None:
        return
    optimizer.masters_follow_model()
    for p in _bf16_params(optimizer):
        state = optimizer.state.get(p, {})
        if (exact := joined(p, state)) is not None:
            p.data = exact.to(p.device)
        casting.set_dtype(p, torch.float32)
        if state.pop(_REMAINDER, None) is not None and not state:
            del optimizer.state[p]
    if isinstance(optimizer, FusedOptimizer):
        optimizer.master_weights = former


def _bf16_params(optimizer: Any) -> list[Tensor]:
    """bf16 parameters that train, except DTensors, which amp cannot cast."""
    members = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
    return [p for p in members if p.dtype == torch.bfloat16 and p.requires_grad and not is_sharded(p)]
