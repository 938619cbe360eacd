"""AmpSession: one configuration of mixed-precision training. ``ampctx.amp`` is the bound methods of a default one."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ampctx._compiling import outside_of_graphs
from ampctx._errors import AmpError, AmpIndexError, AmpTypeError, AmpValueError
from ampctx.amp import run_state
from ampctx.amp import weights as master_weights
from ampctx.amp.binding import Casts, OptimizerBinding, Reports
from ampctx.amp.methods import is_bound, weak_method
from ampctx.amp.opt_level import PrecisionPolicy, banner, resolve
from ampctx.amp.threads import OwnThread
from ampctx.casts import casting
from ampctx.casts.arguments import Undo
from ampctx.casts.autocast import Autocast
from ampctx.casts.fp32_ops import install_fp32_ops, op_names
from ampctx.casts.functions import FunctionCasts
from ampctx.casts.kept_modules import KeptModules, find_kept, install_without_casts
from ampctx.casts.model_watch import ParameterNames, refuse_replaced
from ampctx.distributed import check_process_group
from ampctx.kernels.foreach import Factor, FoundInf, PerDevice
from ampctx.masters.params import MasterParams, watch_loading
from ampctx.scaling import formats
from ampctx.scaling.guarded_step import OUTSIDE_OF_BLOCKS, Listeners
from ampctx.scaling.history import DEFAULT_LENGTH, History, StepHistory, check_length
from ampctx.scaling.loss_scale import LossScale
from ampctx.scaling.outcome import Culprits, StepOutcome, listed
from ampctx.scaling.stall import check_limit

logger = logging.getLogger("ampctx")


def _is_rank_zero() -> bool:
    dist = torch.distributed
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _as_list(value: Any, kind: str, accepts: Callable[[Any], bool]) -> list[Any]:
    items = value if isinstance(value, list) else [value]
    for item in items:
        if not accepts(item):
            raise AmpTypeError(
                f"{kind}s must be either a single {kind} or a list of {kind}s. Got {type(item).__name__}"
                + (" inside the list." if items is value else ".")
            )
    return items


def _refuse_fp16_optimizer(optimizers: Any) -> None:
    """Says why a wrapper of apex's name, apex's own or a copy of it, cannot be initialized."""
    for item in optimizers if isinstance(optimizers, list) else [optimizers]:
        if any(base.__name__ == "FP16_Optimizer" for base in type(item).__mro__):
            raise AmpTypeError(
                f"An incoming optimizer is an instance of {type(item).__module__}.{type(item).__qualname__}. It keeps "
                "fp32 masters and a loss scale of its own: give amp.initialize the optimizer inside, and step that."
            )


def _is_optimizer(value: Any) -> bool:
    """A torch optimizer, or a wrapper that offers what one offers (LARC)."""
    return isinstance(value, torch.optim.Optimizer) or all(
        hasattr(value, name) for name in ("param_groups", "state", "step", "zero_grad", "add_param_group")
    )


@dataclass(eq=False)
class _Block:
    """A ``scale_loss`` block."""

    bindings: list[OptimizerBinding]
    loss_id: int
    device: torch.device
    delay_unscale: bool
    delay_overflow_check: bool
    scale: Factor = 1.0
    inv_scale: Factor = 1.0
    # Those that the block does not name, and whose models it may reach.
    others: list[OptimizerBinding] = field(default_factory=list)
    # With how many blocks were open before: an exception is for them as if this one had never begun.
    opened: list[tuple[OptimizerBinding, int]] = field(default_factory=list)
    committing: bool = False


class AmpSession:
    """Mixed-precision training in apex.amp's words. Several sessions can live side by side.

    ``allow_incoming_model_not_fp32``: set it to take models that hold fp16 or bf16 weights already.
    """

    def __init__(self) -> None:
        self.policy: PrecisionPolicy | None = None
        self.verbosity = 1
        self.loss_scales: list[LossScale] = []
        self.allow_incoming_model_not_fp32 = False
        self._bindings: MutableMapping[Any, OptimizerBinding] = weakref.WeakKeyDictionary()
        # Overflow flags of exits that left the scale update to a later one.
        self._deferred: MutableMapping[LossScale, Tensor] = weakref.WeakKeyDictionary()
        # Casts op by op that were switched on since the last reset, and what switches each off. The latest counts.
        self._casting: dict[Autocast, Undo] = {}
        # Weak, so that a session goes with its last reference.
        self._function_casts = FunctionCasts(weak_method(self._active_dtype))
        self._undo: list[Undo] = []
        # Called at the end of a successful ``initialize`` with the optimizers that it bound. Each returns an undo, for
        # ``reset`` to run before anything else of that call is undone.
        self.observers: list[Callable[[Mapping[Any, OptimizerBinding]], Undo]] = []
        self._explained_skips = self._explained_masters = False
        self._step_hooks: OrderedDict[int, Callable[[Any, StepOutcome], None]] = OrderedDict()
        self._skip_hooks: OrderedDict[int, Callable[[Any, StepOutcome], None]] = OrderedDict()
        self._thread = OwnThread()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AmpError(
            "an AmpSession cannot be copied or pickled: it belongs to models and optimizers of this process. Make one "
            "for the copies, initialize it, and load state_dict(masters=True) of this one into it"
        )

    # --- initialize and reset ----------------------------------------------------------------------------------------

    def initialize(
        self,
        models: nn.Module | list[nn.Module],
        optimizers: Any = None,
        enabled: bool = True,
        opt_level: str = "O1",
        cast_model_type: torch.dtype | bool | None = None,
        patch_torch_functions: bool | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | None = None,
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
    ) -> Any:
        """Makes models and optimizers ready for mixed-precision training, in place.

        Args:
            models: a module or a list of modules, fp32, on any device. Wrap in DistributedDataParallel afterwards;
                apply ``fully_shard`` and tensor parallelism before, for O0, O1 and O4.
            optimizers: an optimizer, a list of optimizers (may be empty), or None.
            enabled: False returns the arguments untouched, and every other call becomes a no-op.
            opt_level: "O0" fp32, "O1" fp16 autocast, "O2" fp16 model with fp32 masters, "O3" fp16; "O4" and "O5" are O1
                and O2 in bf16. The level sets what follows; an argument that is not None overrides it.
            cast_model_type: dtype of the model's weights and inputs; False casts nothing.
            patch_torch_functions: cast per op through torch's autocast (O1 and O4 only).
            keep_batchnorm_fp32: keep BatchNorm and running statistics in fp32 when the model is cast. Also "True" or
                "False".
            master_weights: step fp32 copies of 16-bit weights.
            loss_scale: "dynamic" or a number, also as a string.
            cast_model_outputs: floating dtype of the model's outputs.
            num_losses: how many loss scales to keep; ``scale_loss(..., loss_id=i)`` picks one.
            verbosity: 0 is silent; from 1 the options are printed and skipped steps logged, on rank 0.
            min_loss_scale, max_loss_scale: bounds of a dynamic scale. None: no bound (it reaches neither 0 nor inf).
            patch_torch_functions_type: float16 (O1) or bfloat16 (O4).
            max_consecutive_skips: how many steps of an optimizer may be skipped in a row, at least 1; None: any number.
                ``optimizer.step()`` raises AmpStallError when one more is. An optimizer that skips on the device raises
                later, by as many steps as the host is ahead of the device: word of a skip is never waited for.
            process_group: a ``torch.distributed.ProcessGroup`` whose ranks skip steps and move dynamic scales together:
                those of tensor, pipeline, expert or sharded parallelism, which hold different gradients. Each exit of
                a ``scale_loss`` block, and each step on gradients that no block has judged, is an all_reduce of one
                number in which every rank has to take part: without one of them the others raise when the group's
                timeout has passed, and refuse to step. None: each rank for itself, which is enough where
                DistributedDataParallel makes gradients equal. The ranks of the mesh of DTensor parameters agree in the
                same way, with a group or without.
            keep_fp32: modules that stay in fp32 with all that is in them and compute in fp32, at every level: patterns
                (``fnmatch``) of their names in ``named_modules()``, ``"head.*"`` meaning ``head`` too; module classes;
                modules. One, or several in a list. Called by modules that are not kept, they take 16-bit inputs as fp32
                and, at O2, O3 and O5, return the model's 16-bit type; one that is itself in ``models`` returns what
                models return.
            ops_fp32: functions of torch that compute in fp32 at every level, until ``reset``, wherever Python code
                calls them as functions, methods or operators: names (``"softmax"``, ``"torch.linalg.norm"``) or the
                functions. One, or several in a list or set. 16-bit arguments become fp32. Where autocast is on (O1,
                O4) the result stays fp32, elsewhere it goes back to the widest 16-bit type among the arguments.
            history: how many steps of each optimizer ``amp.history`` keeps, the latest ones. 0: none.

        Returns:
            ``models`` if ``optimizers`` is None, else ``(models, optimizers)``: the same objects in the shapes given.

        Raises:
            AmpTypeError, AmpValueError, AmpError: a bad argument, a model that is wrapped or holds 16-bit weights, or
                DTensors that would be cast, an optimizer that was initialized before, a ``keep_fp32`` that no module
                answers to or that divides a tied weight, an unknown function in ``ops_fp32``. Nothing has been changed
                then.

        No host sync.
        """
        if isinstance(enabled, str):
            raise AmpTypeError(f"enabled must be True or False, got {enabled!r}. Did you mean opt_level={enabled!r}?")
        if not enabled:
            self.policy, self.verbosity = resolve("O0", enabled=False, cast_model_type=False), verbosity
            return models if optimizers is None else (models, optimizers)
        policy = resolve(
            opt_level,
            cast_model_type=cast_model_type,
            patch_torch_functions=patch_torch_functions,
            patch_torch_functions_type=patch_torch_functions_type,
            keep_batchnorm_fp32=keep_batchnorm_fp32,
            master_weights=master_weights,
            loss_scale=loss_scale,
            cast_model_outputs=cast_model_outputs,
            keep_fp32=keep_fp32,
            ops_fp32=ops_fp32,
        )
        _refuse_fp16_optimizer(optimizers)
        optimizer_list = [] if optimizers is None else _as_list(optimizers, "optimizer", _is_optimizer)
        model_list = _as_list(models, "model", lambda m: isinstance(m, nn.Module))
        check_process_group(process_group)
        self._thread.check("initialize", self._casts_enabled)
        self._check(model_list, optimizer_list)
        kept = find_kept(model_list, policy.keep_fp32)
        policy = replace(policy, keep_fp32=kept.described, ops_fp32=op_names(policy.ops_fp32))
        if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
            raise AmpValueError(f"num_losses is {num_losses!r}, expected an integer of at least 1")
        scales = [LossScale.from_option(policy.loss_scale, min_loss_scale, max_loss_scale) for _ in range(num_losses)]
        for scale in scales:
            scale.process_group = process_group
        limit, length = check_limit(max_consecutive_skips), check_length(history)
        listeners = Listeners(self._report_skip, self._report_step, self._has_hooks)
        reports = Reports(listeners, ParameterNames(model_list), limit, length)

        if verbosity > 0 and _is_rank_zero():
            # On stdout, where apex's banner went: log scrapers read it there.
            print("\n".join(banner(opt_level, policy)))
        self._apply(policy, model_list, kept, optimizer_list, scales, reports)
        self.policy, self.loss_scales, self.verbosity = policy, scales, verbosity
        return models if optimizers is None else (models, optimizers)

    def _check(self, models: list[nn.Module], optimizers: list[Any]) -> None:
        casting.check_models(models, self.allow_incoming_model_not_fp32)
        for i, optimizer in enumerate(optimizers):
            if optimizer in self._bindings or optimizer in optimizers[:i]:
                raise AmpError(
                    "A given optimizer should only be passed through amp.initialize once. Call amp.reset() first to "
                    "initialize it anew."
                )
            if is_bound(optimizer):
                raise AmpError(
                    f"optimizers[{i}] ({type(optimizer).__name__}) is under amp in another AmpSession: call reset() of "
                    "that one first"
                )
        on_cuda = any(p.is_cuda for m in models for p in m.parameters())
        if on_cuda and not torch.backends.cudnn.enabled:
            raise AmpError("Amp requires torch.backends.cudnn.enabled = True")

    def _apply(
        self,
        policy: PrecisionPolicy,
        models: list[nn.Module],
        kept: KeptModules,
        optimizers: list[Any],
        scales: list[LossScale],
        reports: Reports,
    ) -> None:
        """Everything that changes an object; undone as a whole when a part of it fails."""
        undo: list[Undo] = []
        bound: dict[Any, OptimizerBinding] = {}
        names = ParameterNames(models)
        try:
            originals: dict[Tensor, Tensor] = {}
            for model in models:
                if policy.input_dtype is not None:
                    keep_bn = bool(policy.keep_batchnorm_fp32)
                    restore, data = casting.cast_model(model, policy.input_dtype, keep_bn, kept.modules)
                    undo.append(restore)
                    originals.update(data)
                    undo.append(casting.install_state_dict_upcast(model))
                takes = torch.float32 if policy.casts_model and model in kept.modules else policy.input_dtype
                undo.append(casting.install_io_casts(model, takes, policy.output_dtype))
            if policy.input_dtype not in (None, torch.float32):
                inner = [module for module in kept.entries if module not in models]
                undo += [casting.install_io_casts(m, torch.float32, policy.input_dtype) for m in inner]
            if policy.ops_fp32:
                # Run at the latest when nobody has the session any more.
                undo.append(_finalizer(self, install_fp32_ops(policy.ops_fp32)))
            for optimizer in optimizers:
                bound[optimizer] = self._bind(optimizer, policy, scales, originals, bound, reports, names)
                undo.append(weak_method(bound[optimizer].release))
            if policy.master_weights:
                undo += [watch_loading(m, [b.masters for b in bound.values()]) for m in models]
            if bound:
                undo += [refuse_replaced(m, _stepped([b.masters for b in bound.values()])) for m in models]
            if policy.autocast_dtype is not None:
                # What is refused in 16 bits may be asked for in fp32.
                allow_banned = "binary_cross_entropy" in policy.ops_fp32
                autocast = Autocast(models, policy.autocast_dtype, allow_banned=allow_banned)
                for module in kept.entries if self.allow_incoming_model_not_fp32 else ():
                    undo.append(casting.cast_model(module, torch.float32, False, kept.modules)[0])
                # First, so that what cast_ops does around a model's forward is around this.
                undo.append(install_without_casts(kept.entries, autocast))
                undo.append(self.cast_ops(autocast))
            for observe in self.observers:
                undo.append(observe(bound))
        except BaseException:
            for action in reversed(undo):
                action()
            raise
        self._bindings.update(bound)
        self._undo += undo

    def _bind(
        self,
        optimizer: Any,
        policy: PrecisionPolicy,
        scales: list[LossScale],
        originals: dict[Tensor, Tensor],
        bound: dict[Any, OptimizerBinding],
        reports: Reports,
        name_of: ParameterNames,
    ) -> OptimizerBinding:
        taken = self._with_masters() | {id(p) for b in bound.values() for p, _ in b.masters.pairs}
        masters = MasterParams(optimizer, bool(policy.master_weights), originals, taken, name_of)
        casts = Casts(self.disable_casts, self._casts_on)
        return OptimizerBinding(optimizer, masters, scales, casts, reports, self._with_masters, self._warn)

    def _warn(self, message: str) -> None:
        if self.verbosity > 0 and _is_rank_zero():
            logger.warning(message)

    def _with_masters(self) -> set[int]:
        """Ids of the model parameters that have a master."""
        bound = self._bindings.items()
        return {id(p) for optimizer, binding in bound for p in binding.masters.model_params_with_master(optimizer)}

    def reset(self) -> None:
        """Undoes ``initialize``: weights back to fp32 (from the masters), optimizers, hooks and torch functions as they
        were.

        Optimizer state is kept, hooks of ``on_step`` and ``on_skip`` are gone. The session can be initialized again
        afterwards. Call it in the thread that called ``initialize``, where torch's autocast was switched on.

        Raises:
            AmpError: called inside a scale_loss block.
        """
        for binding in self._bindings.values():
            binding.refuse("reset", "amp.reset()")
        self._thread.check("reset", self._casts_enabled)
        undo, self._undo = [*self._undo, *self._casting.values()], []
        for action in reversed(undo):
            action()
        self.policy, self.loss_scales = None, []
        self._casting.clear()
        self._step_hooks.clear()
        self._skip_hooks.clear()
        self._bindings.clear()
        self._deferred.clear()

    # --- the loop ----------------------------------------------------------------------------------------------------

    @contextmanager
    def scale_loss(
        self,
        loss: Tensor,
        optimizers: Any,
        loss_id: int = 0,
        model: Any = None,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> Iterator[Tensor]:
        """Yields ``loss.float() * scale``; on exit the gradients of ``optimizers`` are unscaled and checked.

        Call ``backward()`` on what is yielded. After the block ``amp.master_params(optimizer)`` hold true gradients,
        added to those of earlier blocks; if one was inf or nan, the next ``optimizer.step()`` is skipped and the scale
        reduced. Zero gradients after a skipped step, too: where they are inf or nan still, the next one is skipped as
        well. An exception in the block leaves gradients as they were before it, those of blocks that ended inside it
        added, and takes back a ``first_step`` of SAM. Where it comes while they are added up at the end,
        ``optimizer.step()`` raises until ``optimizer.zero_grad()``.

        Blocks of one session are open in one thread at a time; at O1 and O4 in that of ``initialize``.

        Args:
            loss: a tensor of any shape, of a floating dtype.
            optimizers: every optimizer whose parameters get gradients from this backward, alone or in a list or tuple.
            loss_id: which of the ``num_losses`` scales to use.
            model: unused, there for apex's signature.
            delay_unscale: set it on all but the last of several backward passes that make up one step. Gradients stay
                scaled until the last, which unscales, checks and updates the scale once. Under
                DistributedDataParallel put these blocks into ``no_sync``.
            delay_overflow_check: leave the scale update to a later block; a step on non-finite gradients is skipped
                still.

        No host sync; with a ``process_group`` over gloo, the end of the block waits for the other ranks.
        """
        if self.policy is None:
            raise AmpError(
                "Invoked 'with amp.scale_loss', but internal Amp state has not been initialized. Call "
                "model, optimizer = amp.initialize(model, optimizer, opt_level=...) first."
            )
        if not self.policy.enabled:
            yield loss
            return
        if not isinstance(loss, Tensor):
            raise AmpTypeError(f"loss must be a tensor, got {type(loss).__name__}")
        if loss.is_complex():
            raise AmpTypeError(f"loss is {loss.dtype}, expected a floating type: backward needs a real loss")
        block = _Block(self._bindings_of(optimizers), loss_id, loss.device, delay_unscale, delay_overflow_check)
        loss_scale = self._loss_scale(block.bindings, loss_id)
        try:
            self._thread.enter_block(bool(self._casting) and self._casts_enabled)
            scale = self._begin(block, loss_scale)
            with self.disable_casts():
                wide = loss if loss.dtype == torch.float64 else loss.float()
                try:
                    # By a call: an interrupt that came meanwhile is raised at its end, and not after the yield, where
                    # no ``with`` has begun yet that would clean up.
                    yield torch.mul(wide, scale.on(loss.device)) if isinstance(scale, PerDevice) else wide
                finally:
                    for other in block.others:
                        other.gradients.drop_model_grads()
            self._end(block, loss_scale)
        except BaseException:
            # The last first: of optimizers that share a parameter, the first has stashed its gradient.
            for binding, depth in reversed(block.opened):
                binding.abandon(depth, block.committing)
            raise
        finally:
            self._thread.leave_block()

    @outside_of_graphs
    @torch.no_grad()
    def _begin(self, block: _Block, loss_scale: LossScale) -> Factor:
        """Makes ready for the backward of a block. Returns the scale."""
        bindings = block.bindings
        fresh = all(binding.gradients.is_idle for binding in bindings)
        # Both are taken now: a nested block may move the scale before this one ends.
        block.scale, block.inv_scale = loss_scale.factors(block.device, fresh)
        if len(self._bindings) > len(bindings):
            block.others = self._take_over_elsewhere(bindings)
        for binding in bindings:
            block.opened.append((binding, binding.gradients.depth))
            binding.begin(block.scale, block.inv_scale)
        return block.scale

    @outside_of_graphs
    @torch.no_grad()
    def _end(self, block: _Block, loss_scale: LossScale) -> None:
        """Unscales and checks what the block's backward has left, or leaves that to a later block."""
        bindings, nested = block.bindings, False
        for binding in bindings:
            binding.flags.scales_used[block.loss_id % len(binding.loss_scales)] = block.scale
            binding.follow_groups()  # what joined or was unfrozen in the block has its gradients from here
            nested |= binding.gradients.depth > 1
        if block.delay_unscale and not nested and not self._share_parameters(bindings):
            block.committing = True
            for binding in reversed(bindings):
                loss = block.loss_id % len(binding.loss_scales), loss_scale
                binding.gradients.delay(block.inv_scale, loss)
            return
        found_inf, done = FoundInf(), set[int]() if len(bindings) > 1 else None
        for binding in bindings:
            binding.gradients.prepare(block.inv_scale, found_inf, done, binding.is_unchecked)
        block.committing = True
        for binding in bindings:
            binding.gradients.commit(found_inf)
        delay = block.delay_unscale or block.delay_overflow_check
        self._conclude(bindings, loss_scale, block.loss_id, found_inf.joined(block.device), delay)

    def _take_over_elsewhere(self, bindings: list[OptimizerBinding]) -> list[OptimizerBinding]:
        """Bindings that a block does not name, and that must not take its scaled gradients for a plain backward's.

        What a plain backward gave them before is taken over now; what the block sends them is dropped, as in apex.
        """
        others = [b for b in self._bindings.values() if b not in bindings and b.masters.pairs and b.gradients.is_idle]
        for other in others:
            other.refresh()
        return others

    def _share_parameters(self, bindings: list[OptimizerBinding]) -> bool:
        """Whether a parameter of these bindings is another optimizer's too: it cannot wait for one of them alone."""
        if len(self._bindings) < 2:
            return False
        owners: dict[int, int] = {}
        for binding in self._bindings.values():
            for p in binding.masters.params_without_master:
                owners[id(p)] = owners.get(id(p), 0) + 1
        return any(owners[id(p)] > 1 for binding in bindings for p in binding.masters.params_without_master)

    def _bindings_of(self, optimizers: Any) -> list[OptimizerBinding]:
        if isinstance(optimizers, torch.optim.Optimizer) and (binding := self._bindings.get(optimizers)) is not None:
            return [binding]
        given = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        found = [self._binding_of(optimizer) for optimizer in given]
        bindings = list(dict.fromkeys(binding for binding in found if binding is not None))
        # Where gradients are neither scaled nor copied, apex let anything pass.
        assert self.policy is not None
        scales = [scale for binding in bindings for scale in binding.loss_scales] or self.loss_scales
        if None in found and (self.policy.master_weights or not all(scale.is_identity for scale in scales)):
            i = found.index(None)
            raise AmpError(
                f"scale_loss: optimizers[{i}] ({type(given[i]).__name__}) did not go through amp.initialize: pass it "
                "there together with its model."
            )
        return bindings

    def _binding_of(self, optimizer: Any) -> OptimizerBinding | None:
        known = isinstance(optimizer, torch.optim.Optimizer) or _is_optimizer(optimizer)
        return self._bindings.get(optimizer) if known else None

    def _loss_scale(self, bindings: list[OptimizerBinding], loss_id: int) -> LossScale:
        # An optimizer keeps the scales of the initialize call that it came from.
        scales = bindings[0].loss_scales if bindings else self.loss_scales
        if not -len(scales) <= loss_id < len(scales):
            raise AmpIndexError(f"loss_id is {loss_id}, and num_losses={len(scales)} was given to amp.initialize")
        return scales[loss_id]

    def _conclude(
        self, bindings: list[OptimizerBinding], scale: LossScale, loss_id: int, found_inf: Tensor, delay: bool
    ) -> None:
        """Sets ``found_inf`` for the coming steps and updates the scale, or leaves that to a later block."""
        if not scale.dynamic:
            scale.tell(found_inf)
            if not delay:
                scale.update(torch.zeros_like(found_inf))
            return
        groups = [group for binding in bindings for group in binding.masters.groups]
        if groups or scale.process_group is not None:
            found_inf = scale.agreed(found_inf, groups)
        for binding in bindings:
            binding.flags.add(loss_id % len(binding.loss_scales), scale, found_inf, final=not delay)
        if scale in self._deferred:
            found_inf = torch.maximum(self._deferred[scale].to(found_inf.device), found_inf)
        scale.tell(found_inf)
        if delay:
            self._deferred[scale] = found_inf
        else:
            self._deferred.pop(scale, None)
            scale.update(found_inf)

    def _take_deferred(self, scale: LossScale) -> Tensor | None:
        """The flag that blocks with ``delay_overflow_check`` have left for ``scale``, None if there is none.

        Whoever takes it updates the scale and decides about the next steps: they are not skipped for it any more.
        No host sync.
        """
        found_inf = self._deferred.pop(scale, None)
        if found_inf is not None:
            for binding in self._bindings.values():
                binding.flags.drop_provisional(scale)
        return found_inf

    def _report_skip(
        self, before: int, skipped: int, overflowed: list[tuple[int, LossScale, float]], culprits: Culprits = ()
    ) -> None:
        if self.verbosity <= 0 or not _is_rank_zero():
            return
        # Every skip while they are few, then at powers of two: a run that overflows for ever does not fill the log.
        if skipped > 8 and skipped.bit_length() == before.bit_length():
            return
        for loss_id, scale, value in overflowed:
            if loss_id == OUTSIDE_OF_BLOCKS or scale in self._deferred:
                logger.warning("Gradient overflow.  Skipping step, the loss scale stays at %s for now", value)
                continue
            logger.warning(
                "Gradient overflow.  Skipping step, loss scaler %d reducing loss scale to %s", loss_id, value
            )
        if culprits and (skipped > 8 or not self._explained_skips):
            logger.warning("inf or nan in the gradient of %s", listed(culprits))
        if not self._explained_skips:
            self._explained_skips = True
            logger.warning(
                "A few skipped steps are normal: the loss scale starts high and falls until gradients fit. "
                "Skips that go on for long point to inf or nan in the model or its input."
            )
        elif skipped > 8:
            logger.warning("%d steps have been skipped so far", skipped)

    # --- what users read ---------------------------------------------------------------------------------------------

    def master_params(self, optimizer: Any) -> Iterator[Tensor]:
        """Yields the parameters that ``optimizer`` steps, in the order of its param groups.

        Under master weights these are the fp32 masters, else the model's own parameters. Clip their gradients after the
        scale_loss block. Works on any object with ``param_groups``. No host sync.
        """
        binding = self._binding_of(optimizer)
        if binding is not None and binding.gradients.is_idle:
            binding.refresh()
        for group in optimizer.param_groups:
            yield from group["params"]

    def skipped_steps(self, optimizer: Any) -> int:
        """How many steps of ``optimizer`` were skipped because gradients overflowed.

        A host sync for an optimizer that skips on the device (those of ``ampctx.optimizers``, torch's fused ones).
        """
        binding = self._binding_of(optimizer)
        return 0 if binding is None else binding.steps.skipped_steps()

    def outcome(self, optimizer: Any) -> StepOutcome | None:
        """What became of the latest ``optimizer.step()``; None before the first.

        ``outcome.stepped`` gates what goes with a step: an LR scheduler, an EMA, a counter. Nothing is skipped when amp
        is not enabled: stepped then, always. No host sync; reading an attribute may be one, see ``StepOutcome``.

        Raises:
            AmpError: the optimizer did not go through ``amp.initialize``.
        """
        if self.policy is not None and not self.policy.enabled:
            return StepOutcome()
        return self._watched(optimizer, "outcome").steps.outcome

    def history(self, optimizer: Any = None, last: int | None = None) -> History:
        """The latest steps as plain lists: loss scales, skips and gradient norms, for plots and logs.

        Args:
            optimizer: may be left out where only one went through ``amp.initialize``.
            last: how many steps at most. None: all that are kept, ``history`` of ``amp.initialize``.

        Returns:
            A ``History``: ``step``, ``skipped`` and ``grad_norm`` are lists with an element for each step, ``scale``
            and ``overflowed`` such lists by loss id. Lists of no elements when amp is not initialized or not enabled.

        It begins anew with ``initialize``, ends with ``reset``, and is not part of ``state_dict``. Replays of a CUDA
        graph are not seen. A host sync, the only one: steps leave their numbers on the device.

        Raises:
            AmpError: the optimizer did not go through ``amp.initialize``, or several did and none is given.
            AmpTypeError, AmpValueError: ``last`` is no int of at least 0.
        """
        if self.policy is None or not self.policy.enabled:
            return StepHistory(0).lists(last)
        if optimizer is None:
            if len(self._bindings) > 1:
                raise AmpError(
                    f"amp.history: {len(self._bindings)} optimizers went through amp.initialize: give the one that is "
                    "meant"
                )
            optimizer = next(iter(self._bindings), None)
            if optimizer is None:
                return StepHistory(0, len(self.loss_scales)).lists(last)
        return self._watched(optimizer, "history").steps.history.lists(last)

    def _watched(self, optimizer: Any, name: str) -> OptimizerBinding:
        binding = self._binding_of(optimizer)
        if binding is None:
            raise AmpError(
                f"amp.{name}: this {type(optimizer).__name__} did not go through amp.initialize, which watches its "
                "steps"
            )
        return binding

    def on_step(self, fn: Callable[[Any, StepOutcome], None]) -> RemovableHandle:
        """Calls ``fn(optimizer, outcome)`` at the end of every step of every optimizer that was taken.

        In the order of the steps, before ``optimizer.step()`` returns, on the thread that called it. Hooks make the
        step of an optimizer that skips on the device wait for it; one that raises does so out of a step that is
        complete. They are not called while a CUDA graph is captured or replayed, nor when amp is not enabled.

        Returns:
            A handle whose ``remove()`` ends it. ``reset`` does so, too.
        """
        return self._add_hook(self._step_hooks, fn)

    def on_skip(self, fn: Callable[[Any, StepOutcome], None]) -> RemovableHandle:
        """As ``on_step``, for the steps that are skipped. ``outcome.culprits`` is known there, with every optimizer."""
        return self._add_hook(self._skip_hooks, fn)

    def _add_hook(self, hooks: OrderedDict, fn: Any) -> RemovableHandle:
        if not callable(fn):
            raise AmpTypeError(f"a hook must be callable with (optimizer, outcome), got {type(fn).__name__}")
        handle = RemovableHandle(hooks)
        hooks[handle.id] = fn
        return handle

    def _has_hooks(self) -> bool:
        return bool(self._step_hooks or self._skip_hooks)

    def _report_step(self, optimizer: Any, outcome: StepOutcome) -> None:
        for fn in list((self._step_hooks if outcome.stepped else self._skip_hooks).values()):
            fn(optimizer, outcome)

    def master_state_dict(self, model: nn.Module, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """``model.state_dict()`` with the fp32 masters in the places of 16-bit weights: to export, in plain torch.

        Keys, order and hooks are those of ``model.state_dict()``, of a model in DistributedDataParallel too. Tensors
        are copies; what several keys share there they share here. Masters that an optimizer keeps by itself
        (``FusedAdam(master_weights=True)``) count as well, if it went through ``initialize``. Where there is no master,
        the weight itself.

        Args:
            model: what was given to ``initialize``, something around it or a part of it.
            dtype: of the floating entries, buffers included. With float32, float64 entries stay.

        Raises:
            AmpTypeError: no module, or another dtype than float16, bfloat16, float32, float64.

        No host sync.
        """
        return master_weights.master_state_dict(model, list(self._bindings.values()), dtype)

    def master_model(self, model: nn.Module) -> nn.Module:
        """The model with the fp32 masters for weights: to feed a moving average, or to evaluate in fp32.

        A copy of the modules that holds the live masters themselves (and the model's own weights where there is no
        master, and its buffers), without amp's casts. ``torch.optim.swa_utils.AveragedModel`` of it is in fp32; give it
        to ``update_parameters`` after each step. Do not train it. It holds until the next ``add_param_group``,
        unfreezing or ``reset``. After ``model.load_state_dict`` masters follow at the next block, step or call of this.

        Raises:
            AmpTypeError: no module.
            AmpError: an optimizer keeps masters by itself.

        No host sync.
        """
        return master_weights.master_model(model, list(self._bindings.values()))

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(
        self, destination: dict[str, Any] | None = None, *, masters: bool = False, grads: bool = False
    ) -> dict[str, Any]:
        """The loss scales of the latest ``initialize``, in apex's format; or all that amp knows of the run.

        ``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}``. Empty when amp is not initialized or not
        enabled. Host sync: reads the scales.

        Args:
            destination: is filled and returned if given.
            masters: add the fp32 masters and the overflows that are not dealt with yet. With the states of the model
                and the optimizers a run resumes from it bit for bit, after ``optimizer.step()``. apex does not load it.
            grads: add gradients, too: to resume between blocks whose gradients add up to one step. Implies ``masters``.

        Tensors are shared with the run, as in any ``state_dict()``: save, or copy, before the next step.

        Raises:
            AmpError: ``masters`` or ``grads`` inside a scale_loss block.
        """
        result = OrderedDict() if destination is None else destination
        enabled = self.policy is not None and self.policy.enabled
        for i, scale in enumerate(self.loss_scales if enabled else []):
            result[f"{formats.KEY}{i}"] = scale.state_dict()
        if enabled and (masters or grads):
            result.update(self._run_state(grads))
        return result

    def _run_state(self, grads: bool) -> dict[str, Any]:
        assert self.policy is not None
        bindings = list(self._bindings.values())
        state = run_state.saved(bindings, self.loss_scales, self._deferred, self.policy.opt_level, grads)
        if not grads and any(map(run_state.drops_gradients, bindings)):
            logger.warning(
                "amp.state_dict(masters=True): there are gradients that no step has used, and they are not part of it. "
                "Save after optimizer.step(), or with grads=True."
            )
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` gave, here or in apex. A bad checkpoint raises and changes nothing.

        One with masters sets the masters, and the model's weights to the rounded masters; gradients that are there are
        dropped, or replaced by its own. Model, optimizers and amp may be loaded in any order. Without masters, they
        follow the model's rounded weights, and a warning says so once.

        Entries go to the scale of their number. More or fewer entries than ``num_losses`` are reported as a warning:
        scales without an entry stay as they are. A no-op when amp is not enabled.

        With one loss scale, the state of a GradScaler (torch's or ours) is taken as well: its scale and its count of
        clean steps. Its growth factors and interval are not, as they are not part of apex's format: a warning names
        those that differ. The {} of a disabled GradScaler holds nothing and is reported like a state without entries.

        A static scale takes the value, too, and stays there, as in apex; a warning says so. May wait for the device.

        Raises:
            AmpKeyError: a key that is not ``loss_scaler<number>``, or a missing one.
            AmpTypeError, AmpValueError: an entry that is not a dict, or a value out of range; the state of a GradScaler
                for several scales; of a state with masters an entry that does not fit the run.
            AmpError: before ``initialize``; a state with masters inside a scale_loss block.
        """
        if self.policy is None:
            raise AmpError(
                "amp.load_state_dict was called before amp.initialize: the scales to load into do not exist yet"
            )
        if not self.policy.enabled:
            return
        if formats.is_grad_scaler_state(state_dict) and not formats.is_amp_state(state_dict):
            entries = self._entries_of_grad_scaler(state_dict)
        else:
            entries = formats.read_amp_entries(state_dict)
        load_run = self._run_loader(state_dict)
        if len(entries) != len(self.loss_scales):
            logger.warning(
                "state_dict contains %d entries, while %d loss_scalers are used", len(entries), len(self.loss_scales)
            )
        for i, scale in enumerate(self.loss_scales):
            if i not in entries:
                continue
            if not scale.dynamic and entries[i]["loss_scale"] != scale.value():
                logger.warning(
                    "loss scaler %d is static: it goes from %s to the checkpoint's %s, and stays there",
                    *(i, scale.value(), entries[i]["loss_scale"]),
                )
            scale.load_state_dict(entries[i])
        load_run()

    def _run_loader(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """What loads the part of a state that is not about loss scales, which is checked now."""
        bindings = list(self._bindings.values())
        if not state.keys().isdisjoint(formats.RUN_KEYS):
            assert self.policy is not None
            return run_state.loader(state, bindings, self.loss_scales, self._deferred, self.policy.opt_level)
        if any(binding.masters.pairs for binding in bindings) and not self._explained_masters:
            self._explained_masters = True
            logger.warning(
                "The checkpoint of amp has no fp32 master weights: unless they are loaded otherwise, they start from "
                "the model's 16-bit weights, without what was rounded off. amp.state_dict(masters=True) saves them."
            )
        return lambda: None

    def _entries_of_grad_scaler(self, state: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        if (n := len(self.loss_scales)) != 1:
            raise AmpValueError(
                f"the state of a GradScaler holds one loss scale, and num_losses={n} was given to amp.initialize. To "
                f"start all of them from it: ampctx.compat.checkpoints.to_amp_state(state, num_losses={n})"
            )
        saved = formats.read_grad_scaler_state(state)
        ours = self.loss_scales[0]
        left_out = [
            f"{name}={there} (here {here})"
            for name in ("growth_factor", "backoff_factor", "growth_interval")
            if (there := getattr(saved, name)) != (here := getattr(ours, name))
        ]
        if left_out and ours.dynamic:
            logger.warning("not taken over from the state of a GradScaler: %s", ", ".join(left_out))
        return formats.read_amp_entries(formats.to_amp_state(state))

    # --- casts -------------------------------------------------------------------------------------------------------

    @property
    def _autocast(self) -> Autocast | None:
        """The casts that count: the latest that are on, or else the latest."""
        if not self._casting:
            return None
        autocasts = list(self._casting)
        return next((a for a in reversed(autocasts) if a.enabled), autocasts[-1])

    @property
    def _casts_enabled(self) -> bool:
        return any(autocast.enabled for autocast in self._casting)

    def cast_ops(self, autocast: Autocast) -> Undo:
        """Switches casts op by op on, those of functions that the user registered among them.

        The undo may be called more than once; ``reset`` calls it, too.
        """
        with ExitStack() as stack:
            stack.callback(autocast.enable())
            # After what enable() puts in place, so that a function registered by the user gets its casts first.
            stack.callback(self._function_casts.install())
            # Run at the latest when nobody has the session any more.
            undo = _finalizer(self, stack.pop_all().close)
        self._thread.claim_casts()
        self._casting = {a: u for a, u in self._casting.items() if a.enabled} | {autocast: undo}
        return undo

    def _active_dtype(self) -> torch.dtype | None:
        """The 16-bit type that ops are cast to right now, None when they are not."""
        autocast = self._autocast
        return autocast.dtype if autocast is not None and autocast.active else None

    def disable_casts(self) -> AbstractContextManager:
        """A context in which O1's and O4's casts are off. May nest; a no-op at other levels."""
        if not self._casting:
            return nullcontext()
        return nullcontext() if (autocast := self._autocast) is None else autocast.suspended()

    def _casts_on(self) -> AbstractContextManager:
        autocast = self._autocast
        return nullcontext() if autocast is None else autocast.resumed()

    def half_function(self, fn: Callable) -> Callable:
        """Decorator: under O1/O4 ``fn`` gets its floating arguments in the level's 16-bit type."""
        return self._function_casts.decorate("half", fn)

    def bfloat16_function(self, fn: Callable) -> Callable:
        """The same as ``half_function``: the level decides which 16-bit type is meant."""
        return self._function_casts.decorate("half", fn)

    def float_function(self, fn: Callable) -> Callable:
        """Decorator: under O1/O4 ``fn`` gets its 16-bit arguments in fp32, autocast off inside."""
        return self._function_casts.decorate("float", fn)

    def promote_function(self, fn: Callable) -> Callable:
        """Decorator: under O1/O4 ``fn`` gets its floating arguments in the widest type among them."""
        return self._function_casts.decorate("promote", fn)

    def register_half_function(self, module: Any, name: str) -> None:
        """``module.name`` becomes a half function at the next O1/O4 ``initialize``, until ``reset``."""
        self._function_casts.register("half", module, name)

    def register_bfloat16_function(self, module: Any, name: str) -> None:
        """The same as ``register_half_function``."""
        self._function_casts.register("half", module, name)

    def register_float_function(self, module: Any, name: str) -> None:
        """``module.name`` becomes a float function at the next O1/O4 ``initialize``, until ``reset``."""
        self._function_casts.register("float", module, name)

    def register_promote_function(self, module: Any, name: str) -> None:
        """``module.name`` becomes a promote function at the next O1/O4 ``initialize``, until ``reset``."""
        self._function_casts.register("promote", module, name)


def _stepped(masters: list[MasterParams]) -> Callable[[], list[Tensor]]:
    """The model's parameters that optimizers step, of those of them that are still alive."""
    alive = weakref.WeakSet(masters)
    return lambda: [p for m in alive for p in (*m.params_without_master, *m.model_of.values())]


def _finalizer(owner: Any, action: Callable[[], None]) -> Callable[[], None]:
    """``action``, once: when it is called, or else when ``owner`` is gone, in the thread that lets go of it."""
    finalizer = weakref.finalize(owner, action)
    finalizer.atexit = False
    return finalizer
