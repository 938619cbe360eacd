"""AmpSession: one configuration of mixed-precision training. ``ampctx.amp`` is the bound methods of a default one."""

from __future__ import annotations

import logging
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ampctx._errors import AmpError, AmpIndexError, AmpKeyError, AmpTypeError, AmpValueError
from ampctx.amp import casting
from ampctx.amp.autocast import Autocast
from ampctx.amp.function_casts import FunctionCasts
from ampctx.amp.loss_scale import LossScale
from ampctx.amp.master_params import MasterParams, watch_loading
from ampctx.amp.opt_level import PrecisionPolicy, banner, resolve
from ampctx.amp.step_hook import OUTSIDE_OF_BLOCKS, Casts, OptimizerBinding
from ampctx.foreach import FoundInf, PerDevice

logger = logging.getLogger("ampctx")

_KEY = "loss_scaler"


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


def _is_optimizer(value: Any) -> bool:
    """A torch optimizer, or a wrapper that offers what one offers (LARC)."""
    return isinstance(value, torch.optim.Optimizer) or all(
        hasattr(value, name) for name in ("param_groups", "state", "step", "zero_grad", "add_param_group")
    )


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
        self._autocast: Autocast | None = None
        self._function_casts = FunctionCasts(self._active_dtype)
        self._undo: list[Callable[[], None]] = []
        self._explained_skips = False

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
    ) -> Any:
        """Makes models and optimizers ready for mixed-precision training, in place.

        Args:
            models: a module or a list of modules, fp32, on any device. Wrap in DistributedDataParallel afterwards.
            optimizers: an optimizer, a list of optimizers (may be empty), or None.
            enabled: False returns the arguments untouched, and every other call becomes a no-op.
            opt_level: "O0" fp32, "O1" fp16 autocast, "O2" fp16 model with fp32 masters, "O3" fp16; "O4" and "O5" are O1
                and O2 in bf16. The level sets what follows; an argument that is not None overrides it.
            cast_model_type: dtype of the model's weights and inputs; False casts nothing.
            patch_torch_functions: cast per op through torch's autocast (O1 and O4 only).
            keep_batchnorm_fp32: keep affine BatchNorm in fp32 when the model is cast. Also "True" or "False".
            master_weights: step fp32 copies of 16-bit weights.
            loss_scale: "dynamic" or a number, also as a string.
            cast_model_outputs: floating dtype of the model's outputs.
            num_losses: how many loss scales to keep; ``scale_loss(..., loss_id=i)`` picks one.
            verbosity: 0 is silent; from 1 the options are printed and skipped steps logged, on rank 0.
            min_loss_scale, max_loss_scale: bounds of a dynamic scale. None: no bound (it reaches neither 0 nor inf).
            patch_torch_functions_type: float16 (O1) or bfloat16 (O4).

        Returns:
            ``models`` if ``optimizers`` is None, else ``(models, optimizers)``: the same objects in the shapes given.

        Raises:
            AmpTypeError, AmpValueError, AmpError: a bad argument, a model that is wrapped or holds 16-bit weights, an
                optimizer that was initialized before. Nothing has been changed then.

        No host sync.
        """
        if isinstance(enabled, str):
            raise AmpTypeError(f"enabled must be True or False, got {enabled!r}. Did you mean opt_level={enabled!r}?")
        if not enabled:
            self.policy, self.verbosity = resolve("O0", enabled=False), verbosity
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
        )
        optimizer_list = [] if optimizers is None else _as_list(optimizers, "optimizer", _is_optimizer)
        model_list = _as_list(models, "model", lambda m: isinstance(m, nn.Module))
        self._check(model_list, optimizer_list)
        if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
            raise AmpValueError(f"num_losses is {num_losses!r}, expected an integer of at least 1")
        scales = [LossScale.from_option(policy.loss_scale, min_loss_scale, max_loss_scale) for _ in range(num_losses)]

        if verbosity > 0 and _is_rank_zero():
            # On stdout, where apex's banner went: log scrapers read it there.
            print("\n".join(banner(opt_level, policy)))
        self._apply(policy, model_list, optimizer_list, scales)
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
        on_cuda = any(p.is_cuda for m in models for p in m.parameters())
        if on_cuda and not torch.backends.cudnn.enabled:
            raise AmpError("Amp requires torch.backends.cudnn.enabled = True")

    def _apply(
        self, policy: PrecisionPolicy, models: list[nn.Module], optimizers: list[Any], scales: list[LossScale]
    ) -> None:
        """Everything that changes an object; undone as a whole when a part of it fails."""
        undo: list[Callable[[], None]] = []
        bound: dict[Any, OptimizerBinding] = {}
        autocast = None
        try:
            originals: dict[Tensor, Tensor] = {}
            for model in models:
                if policy.input_dtype is not None:
                    restore, data = casting.cast_model(model, policy.input_dtype, bool(policy.keep_batchnorm_fp32))
                    undo.append(restore)
                    originals.update(data)
                    undo.append(casting.install_state_dict_upcast(model))
                undo.append(casting.install_io_casts(model, policy.input_dtype, policy.output_dtype))
            for optimizer in optimizers:
                bound[optimizer] = self._bind(optimizer, policy, scales, originals, bound)
                undo.append(_weakly(bound[optimizer].release))
            if policy.master_weights:
                undo += [watch_loading(m, [b.masters for b in bound.values()]) for m in models]
            if policy.autocast_dtype is not None:
                autocast = Autocast(models, policy.autocast_dtype)
                undo.append(autocast.enable())
                # After what enable() puts in place, so that a function registered by the user gets its casts first.
                undo.append(self._function_casts.install())
        except BaseException:
            for action in reversed(undo):
                action()
            raise
        self._autocast = autocast or self._autocast
        self._bindings.update(bound)
        self._undo += undo

    def _bind(
        self,
        optimizer: Any,
        policy: PrecisionPolicy,
        scales: list[LossScale],
        originals: dict[Tensor, Tensor],
        bound: dict[Any, OptimizerBinding],
    ) -> OptimizerBinding:
        taken = self._with_masters() | {id(p) for b in bound.values() for p, _ in b.masters.pairs}
        masters = MasterParams(optimizer, bool(policy.master_weights), originals, taken)
        casts = Casts(self.disable_casts, self._casts_on)
        return OptimizerBinding(optimizer, masters, scales, casts, self._report_skip, self._with_masters)

    def _with_masters(self) -> set[int]:
        """Ids of the model parameters that have a master."""
        return {id(p) for binding in self._bindings.values() for p, _ in binding.masters.pairs}

    def reset(self) -> None:
        """Undoes ``initialize``: weights back to fp32 (from the masters), optimizers, hooks and torch functions as they
        were.

        Optimizer state is kept. The session can be initialized again afterwards. Call it in the thread that called
        ``initialize``, where torch's autocast was switched on.

        Raises:
            AmpError: called inside a scale_loss block.
        """
        if any(binding.gradients.in_block for binding in self._bindings.values()):
            raise AmpError("amp.reset() was called inside a scale_loss block: leave the block first")
        undo, self._undo = self._undo, []
        for action in reversed(undo):
            action()
        self.policy, self.loss_scales, self._autocast = None, [], None
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
        reduced. An exception in the block leaves gradients as they were before it.

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

        No host sync.
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
        bindings = self._bindings_of(optimizers)
        loss_scale = self._loss_scale(bindings, loss_id)
        if not any(b.gradients.in_block or b.gradients.has_window for b in bindings):
            loss_scale.forget_copies()
        # Both are taken now: a nested block may move the scale before this one ends.
        scale = 1.0 if loss_scale.is_identity else PerDevice(loss_scale.scale_on(loss.device))
        inv_scale = 1.0 if loss_scale.is_identity else loss_scale.inv_scale()
        # Bindings whose block is open: an exception is for them as if it had never begun.
        opened: list[OptimizerBinding] = []
        found_inf = FoundInf()
        others = self._take_over_elsewhere(bindings)
        try:
            for binding in bindings:
                binding.begin(scale, inv_scale)
                opened.append(binding)
            with self.disable_casts():
                wide = loss if loss.dtype == torch.float64 else loss.float()
                try:
                    yield wide * scale.on(loss.device) if isinstance(scale, PerDevice) else wide
                finally:
                    for other in others:
                        other.gradients.drop_model_grads()
            nested = any(b.gradients.in_enclosing_block for b in bindings)
            if delay_unscale and not nested and not self._share_parameters(bindings):
                while opened:
                    binding = opened.pop()
                    binding.delay(loss_id % len(binding.loss_scales), loss_scale, inv_scale)
                return
            done: set[int] = set()
            for binding in bindings:
                binding.gradients.finish(inv_scale, found_inf, done)
                opened.remove(binding)
        except BaseException:
            # The last first: of optimizers that share a parameter, the first has set its gradient aside.
            for binding in reversed(opened):
                binding.gradients.abandon()
            if loss_scale.dynamic and found_inf.per_device:
                for binding in bindings:
                    binding.latch(loss_id % len(binding.loss_scales), loss_scale, found_inf.joined(loss.device))
            raise
        self._conclude(
            bindings, loss_scale, loss_id, found_inf.joined(loss.device), delay_unscale or delay_overflow_check
        )

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
            for p in binding.masters.own:
                owners[id(p)] = owners.get(id(p), 0) + 1
        return any(owners[id(p)] > 1 for binding in bindings for p in binding.masters.own)

    def _bindings_of(self, optimizers: Any) -> list[OptimizerBinding]:
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
        return self._bindings.get(optimizer) if _is_optimizer(optimizer) else None

    def _loss_scale(self, bindings: list[OptimizerBinding], loss_id: int) -> LossScale:
        # An optimizer keeps the scales of the initialize call that it came from.
        scales = bindings[0].loss_scales if bindings else self.loss_scales
        if not -len(scales) <= loss_id < len(scales):
            raise AmpIndexError(f"loss_id is {loss_id}, and num_losses={len(scales)} was given to amp.initialize")
        return scales[loss_id]

    def _conclude(
        self, bindings: list[OptimizerBinding], scale: LossScale, loss_id: int, found_inf: Tensor, delay: bool
    ) -> None:
        """Latches the verdict for the coming steps and updates the scale, or leaves that to a later block."""
        if not scale.dynamic:
            if not delay:
                scale.update(torch.zeros_like(found_inf))
            return
        for binding in bindings:
            binding.latch(loss_id % len(binding.loss_scales), scale, found_inf)
        if scale in self._deferred:
            found_inf = torch.maximum(self._deferred.pop(scale).to(found_inf.device), found_inf)
        if delay:
            self._deferred[scale] = found_inf
        else:
            scale.update(found_inf)

    def _report_skip(self, before: int, skipped: int, overflowed: list[tuple[int, LossScale, float]]) -> None:
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
        return 0 if binding is None else binding.skipped_steps()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        """The loss scales of the latest ``initialize``, in apex's format.

        ``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}``. ``destination`` is filled and returned if
        given. Empty when amp is not initialized or not enabled. Host sync: reads the scales.
        """
        result = OrderedDict() if destination is None else destination
        enabled = self.policy is not None and self.policy.enabled
        for i, scale in enumerate(self.loss_scales if enabled else []):
            result[f"{_KEY}{i}"] = scale.state_dict()
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` gave, here or in apex. A bad checkpoint raises and changes nothing.

        Entries go to the scale of their number. More or fewer entries than ``num_losses`` are reported as a warning:
        scales without an entry stay as they are. A no-op when amp is not enabled.

        Raises:
            AmpKeyError: a key that is not ``loss_scaler<number>``, or an entry without "loss_scale" or "unskipped".
            AmpTypeError, AmpValueError: an entry that is not a dict, or a value out of range.
        """
        if self.policy is None:
            raise AmpError(
                "amp.load_state_dict was called before amp.initialize: the scales to load into do not exist yet"
            )
        if not self.policy.enabled:
            return
        if not isinstance(state_dict, Mapping):
            raise AmpTypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        matches = {k: re.fullmatch(_KEY + r"(0|[1-9]\d*)", str(k), re.ASCII) for k in state_dict}
        if unexpected := [k for k, match in matches.items() if match is None]:
            keys = ", ".join(f'"{k}"' for k in unexpected)
            raise AmpKeyError(f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {keys}.")
        entries = {int(match[1]): state_dict[k] for k, match in matches.items() if match is not None}
        fresh = [LossScale.from_option("dynamic", None, None) for _ in entries]
        for trial, (i, entry) in zip(fresh, entries.items(), strict=True):
            try:
                trial.load_state_dict(entry)
            except AmpError as error:
                raise type(error)(f'state_dict["{_KEY}{i}"]: {error}') from None
        if len(entries) != len(self.loss_scales):
            logger.warning(
                "state_dict contains %d entries, while %d loss_scalers are used", len(entries), len(self.loss_scales)
            )
        for i, entry in entries.items():
            if i < len(self.loss_scales):
                self.loss_scales[i].load_state_dict(entry)

    # --- casts -------------------------------------------------------------------------------------------------------

    def _active_dtype(self) -> torch.dtype | None:
        """The 16-bit type that ops are cast to right now, None when they are not."""
        return self._autocast.dtype if self._autocast is not None and self._autocast.active else None

    def disable_casts(self) -> AbstractContextManager:
        """A context in which O1's and O4's casts are off. May nest; a no-op at other levels."""
        return nullcontext() if self._autocast is None else self._autocast.suspended()

    def _casts_on(self) -> AbstractContextManager:
        return nullcontext() if self._autocast is None else self._autocast.resumed()

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


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """``method``, for as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    return call
