"""``initialize``: its checks and its changes of models. If one part fails, it undoes them all; so does ``reset``."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

from ampctx._collectives import check_process_group, is_distributed, is_rank_zero
from ampctx._decorators import names_arguments
from ampctx._errors import AmpError, AmpTypeError, AmpValueError, listed, warn
from ampctx.amp import fully_sharded, misuse, ranks
from ampctx.amp.fully_sharded import Sharded
from ampctx.amp.hints import Hints
from ampctx.amp.methods import finalizer, weak_method
from ampctx.amp.options import OVERRIDES, Options, OptLevel, PrecisionPolicy, resolve, summary
from ampctx.amp.step import OptimizerBinding
from ampctx.casts import casting
from ampctx.casts.arguments import LOW_PRECISION, Undo
from ampctx.casts.autocast import Autocast
from ampctx.casts.fp32_ops import install_fp32_ops, op_names
from ampctx.casts.kept_modules import KeptModules, find_kept, install_without_casts, with_tables
from ampctx.casts.model_watch import ParameterNames, refuse_replaced
from ampctx.kernels.sharding import reshard_units, steps_a_partition
from ampctx.optimizers._guard import Guarded
from ampctx.optimizers._options import param_name
from ampctx.scaling.any_optimizer import with_wrapped
from ampctx.scaling.loss_scale import LossScale, check_count
from ampctx.scaling.outcome import DEFAULT_LENGTH
from ampctx.scaling.step_record import StepRecord
from ampctx.weights.masters import MasterParams
from ampctx.weights.state_dicts import ShowMasters, watch_forward, watch_loading

M = TypeVar("M", bound=nn.Module)
Opt = TypeVar("Opt")  # an optimizer, or what wraps one


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
                "fp32 masters and a loss scale of its own. Pass the optimizer inside it to amp.initialize, and step it."
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
                "initialize it again. See `ampctx explain only-be-passed-through`."
            )
        if "__reduce_ex__" in vars(optimizer):  # a replaced method, see ``OptimizerBinding``
            raise AmpError(
                f"optimizers[{i}] ({type(optimizer).__name__}) is under amp in another AmpSession. Call its reset()."
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
                    f"would train nothing. Pass the optimizers inside {kind} to amp.initialize and to scale_loss, or "
                    "let both share the groups: self.param_groups = inner.param_groups. O1 and O4 take it as it is. "
                    "See `ampctx explain has-changed-no-fp32-master-weight`."
                )


def _refuse_other_tensors(models: list[nn.Module], optimizers: list[Any]) -> None:
    """Raises AmpError for a parameter that is none of the models' and lies in their memory, such as one flat buffer."""

    def memory_of(p: Tensor) -> tuple[int, int, int]:
        """(storage address, first byte, end), to find tensors that share memory."""
        if type(p) is not nn.Parameter or not (at := p.data_ptr()):
            return 0, 0, 0
        return p.untyped_storage().data_ptr(), at, at + p.nbytes

    of_models = {p: name for model in models for name, p in model.named_parameters()}
    places = defaultdict[int, list](list)
    for p, name in of_models.items():
        storage, *ends = memory_of(p)
        places[storage].append((*ends, name))
    places.pop(0, None)
    for i, optimizer in enumerate(optimizers):
        groups = optimizer.param_groups
        members = [(p, g, j) for g, group in enumerate(groups) for j, p in enumerate(group["params"])]
        for p, g, j in (member for member in members if member[0] not in of_models):
            storage, begin, end = memory_of(p)
            if shared := [name for first, last, name in places.get(storage, ()) if max(begin, first) < min(end, last)]:
                raise AmpError(
                    f"optimizers[{i}] ({type(optimizer).__name__}): {param_name(groups, g, j)} is no parameter of the "
                    f'model, and lies in the memory of "{shared[0]}". No backward makes its gradient, so amp '
                    "cannot unscale it. Make the optimizer of model.parameters(): ampctx's step them together, too."
                )


def _refuse_forward(wrapper: nn.Module, args: Any) -> None:
    if torch.is_grad_enabled():  # an evaluation needs no gradients of other ranks
        raise AmpError(
            f"{type(wrapper).__name__}: the model was wrapped before amp.initialize or amp.reset cast its weights, so "
            "ranks would not average gradients. Wrap it again. See `ampctx explain incoming-model-is-an-instance`."
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
            "its module. Register a table (positions, frequencies, a schedule) in a module without parameters, which "
            "computes in fp32, or pass its module to keep_fp32. See `ampctx explain buffers-lose-digits`."
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


# --- initialize ------------------------------------------------------------------------------------------------------


@overload
def initialize(session: Any, models: M, optimizers: None = None, **options: Unpack[Options]) -> M: ...
@overload
def initialize(session: Any, models: list[M], optimizers: None = None, **options: Unpack[Options]) -> list[M]: ...
@overload
def initialize(session: Any, models: M, optimizers: list[Opt], **options: Unpack[Options]) -> tuple[M, list[Opt]]: ...
@overload
def initialize(session: Any, models: M, optimizers: Opt, **options: Unpack[Options]) -> tuple[M, Opt]: ...
@overload
def initialize(
    session: Any, models: list[M], optimizers: list[Opt], **options: Unpack[Options]
) -> tuple[list[M], list[Opt]]: ...
@overload
def initialize(session: Any, models: list[M], optimizers: Opt, **options: Unpack[Options]) -> tuple[list[M], Opt]: ...


@names_arguments
def initialize(
    session: Any,
    models: nn.Module | list[Any],
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: OptLevel | str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | str | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
    *,
    patch_torch_functions_type: torch.dtype | None = None,
    max_consecutive_skips: int | None = None,
    process_group: Any = None,
    keep_fp32: Any = None,
    ops_fp32: Any = None,
    history: int = DEFAULT_LENGTH,
    skip_nonfinite: bool = False,
    init_scale: float | None = None,
    growth_interval: int | None = None,
) -> Any:
    """Prepares models and optimizers for mixed precision, in place. Host sync only with process_group or DTensors.

    Example::

        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")

    Args:
        models: a module or a list of modules, fp32, on any device. Frozen parameters may be bf16, or of the level's
            16-bit type. Wrap models in DistributedDataParallel afterwards. Apply ``fully_shard`` (any level but O3)
            or tensor parallelism (alone: O0, O1, O4) before. At O2 and O5 fp32 shards are the masters, and
            units need a ``MixedPrecisionPolicy``, as ``ampctx.distributed.fully_shard`` gives them.
        optimizers: an optimizer, a list of optimizers (may be empty), or None.
        enabled: False returns the arguments unchanged and turns every other call into a no-op.
        opt_level: "O0" fp32, "O1" fp16 autocast (default), "O2" fp16 model with fp32 masters, "O3" fp16; "O4" and
            "O5" are O1 and O2 in bf16. The level sets the options below. An argument that is not None overrides it.
        cast_model_type: dtype of the model's weights and inputs. False casts nothing.
        patch_torch_functions: cast each op through torch's autocast (O1 and O4 only).
        keep_batchnorm_fp32: keep BatchNorm with its statistics in fp32. A bool, or "True" or "False".
        master_weights: step fp32 copies of the 16-bit weights. False for an optimizer that keeps them in its state, by
            its own ``master_weights``, or keeps the bits that they lack: ``SplitMasters``.
        loss_scale: "dynamic" or a number, also as a string.
        cast_model_outputs: floating dtype of the model's outputs.
        num_losses: the number of loss scales. ``scale_loss(..., loss_id=i)`` picks one.
        verbosity: 1: rank 0 prints a line (level, dtype, masters, loss scale), logs skipped steps and warns of
            mistakes. 2 is 1 without the line. 0 is silent.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale. None: no bound; it still never reaches 0 or inf.
        patch_torch_functions_type: float16 (O1) or bfloat16 (O4).
        max_consecutive_skips: the number of steps of an optimizer that may be skipped in a row, at least 1. One
            more raises AmpStallError in ``optimizer.step()``; a few steps later if the device skips, for which the
            host does not wait. None: any number.
        process_group: a ``torch.distributed.ProcessGroup`` whose ranks skip steps and change dynamic scales
            together. Needed if ranks hold different gradients: tensor, pipeline, expert or sharded parallelism.
            Each end of a ``scale_loss`` block, each step on gradients that no block has checked, and this call,
            which compares levels and scales, is an all_reduce: every rank must take part, with the same
            ``opt_level`` and ``num_losses``. If one is missing, the others raise AmpRankError after the group's
            timeout and refuse to step; over NCCL, torch ends the process. None: each rank decides alone, enough
            with DistributedDataParallel. Ranks of a DTensor mesh always agree, and compare options in this call.
        keep_fp32: modules that stay and compute in fp32 at every level, with everything in them. One entry or a
            list: a module, a module class, or a pattern (``fnmatch``) of names in ``named_modules()``; ``"head.*"``
            includes ``head``. Other modules may call them with 16-bit inputs. At O2, O3 and O5 their outputs are
            rounded to the model's 16-bit type, unless the module itself is in ``models``.
        ops_fp32: torch functions that compute in fp32 at every level, until ``reset``: names (``"softmax"``,
            ``"torch.linalg.norm"``) or functions, one or several in a list or set. Applies to calls from Python. At
            O1 and O4 the result stays fp32; elsewhere it returns to the widest 16-bit type among the arguments.
        history: the number of latest steps that ``amp.history`` keeps for each optimizer. 0: none.
        skip_nonfinite: with a static scale, too, check gradients and skip steps on inf and nan. The scale stays.
            False, as in apex: such a step writes inf and nan into the weights. A dynamic scale always skips.
        init_scale, growth_interval: of a dynamic scale, as in ``GradScaler``: where it starts, and after how many
            clean backwards in a row it doubles. None: 65536, moved into the bounds, and 2000.

    Returns:
        ``models`` if ``optimizers`` is None, else ``(models, optimizers)``: the same objects in the same shapes.

    Raises:
        AmpTypeError, AmpValueError, AmpError: an invalid argument; a model that is wrapped, holds 16-bit weights or
            DTensors that the level cannot cast; an optimizer that is under amp already;
            a ``keep_fp32`` that matches no module or splits a tied weight; an unknown function in ``ops_fp32``.
        AmpRankError: ranks differ in levels or loss scales; those of a mesh also in other options, these of param
            groups included, and shapes. After any of these errors nothing has changed.
    """
    options = locals()
    if isinstance(enabled, str):
        raise AmpTypeError(f"enabled must be True or False, got {enabled!r}. Did you mean opt_level={enabled!r}?")
    if not enabled:
        policy = resolve("O0", enabled=False, cast_model_type=False)
        check_process_group(process_group)
        facts = [*ranks.of_scales([]), ranks.of_level(policy)]
        ranks.check_initialize(models, optimizers, facts, policy, process_group)  # as other ranks do
        session.policy, session.verbosity = policy, verbosity
        return models if optimizers is None else misuse.Initialized((models, optimizers))
    policy = resolve(opt_level, **{name: options[name] for name in OVERRIDES})
    refuse_fp16_optimizer(optimizers)
    optimizer_list = [] if optimizers is None else as_list(optimizers, "optimizer", is_optimizer)
    model_list = as_list(models, "model", lambda m: isinstance(m, nn.Module))
    check_process_group(process_group)
    session._thread.check("initialize", session._casts.enabled)
    if not session.allow_incoming_model_not_fp32:
        misuse.refuse_models_under_amp(model_list, session)
    for model in model_list:
        reshard_units(model)
    casting.check_models(model_list, session.allow_incoming_model_not_fp32, policy.input_dtype)
    check(model_list, optimizer_list, session._bindings, policy)
    kept = find_kept(model_list, policy.keep_fp32)
    if policy.input_dtype in LOW_PRECISION:
        kept = with_tables(kept, model_list)
    found = [(model, fully_sharded.checked(model, policy, kept)) for model in model_list]
    sharded = {model: units for model, units in found if units is not None}
    policy = replace(policy, keep_fp32=kept.described, ops_fp32=op_names(policy.ops_fp32))
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise AmpValueError(f"num_losses is {num_losses!r}, expected an integer of at least 1")
    if not isinstance(skip_nonfinite, bool):
        raise AmpTypeError(f"skip_nonfinite must be True or False, got {type(skip_nonfinite).__name__}")
    rule: Any = policy.loss_scale, min_loss_scale, max_loss_scale, skip_nonfinite, init_scale, growth_interval
    scales = [LossScale.from_option(*rule) for _ in range(num_losses)]
    for scale in scales:
        scale.process_group = process_group
    limit = None if (n := max_consecutive_skips) is None else check_count("max_consecutive_skips", n, 1)
    length = check_count("history", history, 0)
    facts = [*ranks.of_scales(scales), ranks.of_level(policy)]
    ranks.check_initialize(model_list, optimizer_list, facts, policy, process_group)
    if verbosity == 1 and is_rank_zero():
        print(f"ampctx: {summary(policy, scales)}")
    # Makes all changes, and undoes them all if one fails.
    bound: dict[Any, OptimizerBinding] = {}
    names = ParameterNames(model_list)
    originals: dict[Tensor, Tensor] = {}
    with ExitStack() as undo:
        # Last: the undo of a cast gives the dtype back, and not what rounding has taken.
        undo.callback(put_back, originals)
        undo.callback(misuse.note_models(model_list, session))
        originals.update(cast_models(undo, policy, model_list, kept, sharded))
        if verbosity > 0 and is_rank_zero() and policy.input_dtype in LOW_PRECISION:
            warn_of_rounded(model_list, originals)
        if policy.ops_fp32:
            # Runs at the latest when the session is garbage-collected.
            undo.callback(finalizer(session, install_fp32_ops(policy.ops_fp32)))
        for optimizer in optimizer_list:
            allows_16bit = session.allow_incoming_model_not_fp32
            masters = MasterParams(optimizer, policy.keeps_masters, originals, names, session._masters, allows_16bit)
            messages, hooks = (session._hints, session._log), (session._step_hooks, session._skip_hooks)
            steps = StepRecord(limit, length, num_losses, session._log.report, hooks)
            bound[optimizer] = OptimizerBinding(optimizer, masters, scales, session._casts, steps, names, *messages)
            undo.callback(weak_method(bound[optimizer].release))
        watch_models(undo, model_list, [b.masters for b in bound.values()], policy.keeps_masters)
        if verbosity > 0:
            undo.callback(Hints(session._hints, list(bound.values()), names, scales, session._log.say).leave)
        if policy.autocast_dtype is not None:
            is_safe = "binary_cross_entropy" in policy.ops_fp32  # else autocast refuses it in 16 bits
            autocast = Autocast(model_list, policy.autocast_dtype, allow_banned=is_safe)
            for module in kept.entries if session.allow_incoming_model_not_fp32 else ():
                undo.callback(casting.cast_model(module, torch.float32, False, kept.modules)[0])
            # First, so that the hooks of cast_ops run around these.
            undo.callback(install_without_casts(kept.entries, autocast))
            undo.callback(session.cast_ops(autocast))
        for observe in session.observers:
            undo.callback(observe(bound))
        originals.clear()  # from here on, the undo keeps what training has made
        session._undo.enter_context(undo.pop_all())
    session._bindings.update(bound)
    session.policy, session.loss_scales, session.verbosity = policy, scales, verbosity
    return models if optimizers is None else misuse.Initialized((models, optimizers))


def reset(session: Any) -> None:
    """Undoes ``initialize``: weights return to fp32 (from the masters), and amp leaves optimizers and models.

    Optimizer state stays; hooks of ``on_step`` and ``on_skip`` are removed. The session can be initialized again.
    Call it in the thread of ``initialize``, to which torch's autocast belongs. AmpError inside a scale_loss block.
    No host sync.
    """
    for binding in session._bindings.values():
        binding.refuse_to_restore("amp.reset()")
    session._thread.check("reset", session._casts.enabled)
    with ExitStack() as stack:
        # If an undo raises, the others still run, and the session is empty again.
        hooks = session._step_hooks, session._skip_hooks
        bound = session._bindings, session._masters, session._deferred
        for forget in (session._casts.undo, *hooks, *bound, session._log.said):
            stack.callback(forget.clear)
        stack.callback(vars(session).update, loss_scales=[], policy=None)
        stack.callback(session._undo.close)
        for undo in session._casts.undo.values():
            stack.callback(undo)


def cast_ops(session: Any, autocast: Autocast) -> Undo:
    """Switches on the casts per op, including those of registered functions. Returns the undo, which may be called
    more than once; ``reset`` calls it, too."""
    with ExitStack() as stack:
        stack.callback(autocast.enable())
        # After enable(), so that the casts of a registered function run first.
        stack.callback(session.cast_registered())
        # Runs at the latest when the session is garbage-collected.
        undo = finalizer(session, stack.pop_all().close)
    session._thread.of_casts = threading.current_thread()
    session._casts.add(autocast, undo)
    return undo
