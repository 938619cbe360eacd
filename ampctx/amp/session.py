"""AmpSession: one configuration of mixed-precision training. ``ampctx.amp`` binds the methods of a default session.

What it makes true of a training loop::

    initialize(model, optimizer)        the model's weights in 16 bits; fp32 masters in their places in the optimizer
    with scale_loss(loss, optimizer):   stashes .grad, and yields loss * scale
        scaled_loss.backward()
                                        grad / scale, checked for inf and nan; plus the stash; the scale moves
    clip_grad_norm_(master_params(optimizer), 1.0)
    optimizer.step()                    skipped if a gradient was not finite; else weights = masters, rounded
    optimizer.zero_grad()
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ampctx._decorators import outside_of_graphs, without_grad
from ampctx._errors import AmpError, AmpIndexError, AmpTypeError
from ampctx.amp import export, misuse, named_state, op_counts, ranks, setup, state
from ampctx.amp.hints import Hints, tell
from ampctx.amp.log import SkipLog
from ampctx.amp.options import PrecisionPolicy, summary
from ampctx.amp.setup import is_optimizer
from ampctx.amp.step import OptimizerBinding
from ampctx.casts.arguments import Undo
from ampctx.casts.forward_errors import note_casts_off
from ampctx.casts.functions import FunctionCasts
from ampctx.casts.switch import AS_IT_IS, CastSwitch
from ampctx.kernels.foreach import Factor, FoundInf, PerDevice, Unread
from ampctx.kernels.tensor_loops import clear_grads
from ampctx.scaling.any_optimizer import with_wrapped
from ampctx.scaling.loss_scale import LossScale, check_loss_id
from ampctx.scaling.outcome import History, StepHistory, StepOutcome
from ampctx.weights.masters import LOADED, MasterParams

_round_again = outside_of_graphs(MasterParams.round_again)
_FRAMES, _GROUPS = attrgetter("gradients.frames"), attrgetter("masters.groups")


@dataclass(eq=False)
class Block:
    """A ``scale_loss`` block.

    ``factor``, ``inv_scale``, ``found_inf``: of its loss and its gradients. ``others``: optimizers with masters that it
    does not name, and that its backward may reach. ``notes``: mark gradients that it has left in other optimizers.
    ``opened``: with the number of blocks open before this one, for an exception. ``ending``: it is at its end.
    """

    bindings: list[OptimizerBinding]
    loss_id: int
    scale: LossScale
    device: torch.device
    delay_unscale: bool
    delay_overflow_check: bool
    factor: Factor = 1.0
    inv_scale: Factor = 1.0
    found_inf: FoundInf = field(init=False)
    others: list[OptimizerBinding] = field(default_factory=list)
    notes: list[Callable[[set[int]], None]] = field(default_factory=list)
    opened: list[tuple[OptimizerBinding, int]] = field(default_factory=list)
    ending: bool = False

    def abandon(self) -> None:
        # In reverse: of optimizers that share a parameter, the first one has stashed its gradient.
        for binding, depth in reversed(self.opened):
            binding.abandon(depth, self.ending)


def _no_such_loss(call: str, loss_id: int, scales: list[LossScale]) -> AmpIndexError:
    given = f"loss_id is {loss_id}, and num_losses={len(scales)} was given to amp.initialize"
    return AmpIndexError(f"{call}: {given}. Pass the number of losses there.")


class AmpSession(FunctionCasts):
    """Mixed-precision training with apex.amp's API. Several sessions can exist side by side.

    Attributes:
        allow_incoming_model_not_fp32: set it to True to accept models that hold fp16 or bf16 weights already.
    """

    def __init__(self) -> None:
        self.policy: PrecisionPolicy | None = None
        self.loss_scales: list[LossScale] = []
        self.allow_incoming_model_not_fp32 = False
        # ``initialize`` calls these last, with the optimizers that it bound. They return an undo, the first to run.
        self.observers: list[Callable[[Mapping[Any, OptimizerBinding]], Undo]] = []
        self._bindings: MutableMapping[Any, OptimizerBinding] = weakref.WeakKeyDictionary()
        self._masters = weakref.WeakSet[MasterParams]()
        # Flags of blocks that left the update of their scale to a later block.
        self._deferred: MutableMapping[LossScale, Tensor] = weakref.WeakKeyDictionary()
        self._hints: list[Hints] = []
        self._log = SkipLog(self._deferred)
        # Whether the latest loaded state had no masters, and a warning about that may be due. None: it has come.
        self._lacks_masters: bool | None = False
        self._step_hooks: OrderedDict[int, Callable[[Any, StepOutcome], None]] = OrderedDict()
        self._skip_hooks: OrderedDict[int, Callable[[Any, StepOutcome], None]] = OrderedDict()
        self._casts, self._undo, self._thread = CastSwitch(), ExitStack(), misuse.OwnThread()
        super().__init__(self._casts.active_dtype)

    @property
    def verbosity(self) -> int:
        """0 is silent. From 1, rank 0 logs skipped steps and warns of mistakes."""
        return self._log.verbosity

    @verbosity.setter
    def verbosity(self, value: int) -> None:
        self._log.verbosity = value

    def __repr__(self) -> str:
        if self.policy is None:
            return "AmpSession(not initialized)"
        return f"AmpSession({summary(self.policy, self.loss_scales)}; optimizers: {len(self._bindings)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AmpError(
            "an AmpSession cannot be copied or pickled, it belongs to models and optimizers of this process. "
            "Make a new AmpSession for the copies, call its initialize(), and load state_dict(masters=True) of this "
            "one into it."
        )

    # --- of other modules, which show the session as their first argument ---------------------------------------------

    initialize, reset, cast_ops = setup.initialize, setup.reset, setup.cast_ops
    master_state_dict, master_model = export.master_state_dict, export.master_model
    check_ranks = ranks.check_ranks
    state_dict, load_state_dict = state.state_dict, state.load_state_dict
    get_state_dict, set_state_dict = named_state.get_state_dict, named_state.set_state_dict
    Stateful = named_state.stateful
    count_ops = staticmethod(op_counts.count_ops)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def scale_loss(
        self,
        loss: Tensor,
        optimizers: Any,
        loss_id: int = 0,
        model: Any = None,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> AbstractContextManager[Tensor]:
        """Scales a loss for backward. The end of the block unscales the gradients and checks them for inf and nan.

        Example::

            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()

        After the block ``amp.master_params(optimizer)`` hold unscaled gradients, added to those of earlier blocks. If
        one is inf or nan, a dynamic scale falls, and the next ``optimizer.step()`` is skipped unless ``zero_grad()``
        comes before it. Call that after a skipped step as well: gradients that are still inf or nan skip the next one.

        An exception in the block restores the gradients from before it, and undoes SAM's ``first_step``. If it comes
        while the block adds gradients up, steps and blocks raise until ``optimizer.zero_grad()``. Use the blocks of a
        session in one thread: at O1 and O4 in that of ``initialize``.

        Args:
            loss: a tensor of any shape, of a floating dtype. The block yields it as fp32 (fp64 stays), times the scale.
            optimizers: every optimizer whose parameters this backward reaches: one, a list or a tuple.
            loss_id: which of the ``num_losses`` scales to use, an int, 0 by default.
            model: unused, for apex's signature.
            delay_unscale: set it on all but the last of several backward passes for one step. Gradients stay scaled
                until the last block, which unscales, checks and updates the scale once. With DistributedDataParallel
                put the delayed blocks into ``no_sync``.
            delay_overflow_check: leave the scale update to a later block. Steps on non-finite gradients are skipped.

        Raises:
            AmpRankError: at the end, the loss scales of a ``process_group`` or a mesh differ, or a rank is missing.
            AmpError, AmpTypeError, AmpIndexError: ``initialize`` was not called; the loss is no real tensor; an
                optimizer did not go through ``initialize``, or several went through calls of it with scales that are
                not one static scale; ``num_losses`` does not cover the loss id. At the end: another block has left
                scaled gradients in an optimizer.

        No host sync. With a ``process_group`` or a mesh over gloo, the end of the block waits for the other ranks. Over
        NCCL ranks read whether their scales are equal at the first and every 1,000th block.
        """
        args = loss, optimizers, loss_id, delay_unscale, delay_overflow_check
        return misuse.LossBlock(self._scaled_loss, args, {})

    def _scaled_loss(
        self, loss: Tensor, optimizers: Any, loss_id: int, delay_unscale: bool, delay_overflow_check: bool
    ) -> Generator[Tensor, None, None]:
        if self.policy is None:
            raise AmpError(
                "Invoked 'with amp.scale_loss', but internal Amp state has not been initialized. Call model, optimizer "
                "= amp.initialize(model, optimizer, opt_level=...) first. See `ampctx explain internal-amp-state`."
            )
        if not self.policy.enabled:
            yield loss
            return
        if not isinstance(loss, Tensor):
            raise AmpTypeError(f"scale_loss: loss must be a tensor, got {type(loss).__name__}")
        if loss.is_complex():
            raise AmpTypeError(f"scale_loss: loss is {loss.dtype}, expected a floating type: backward needs a real one")
        loss_id = loss_id if type(loss_id) is int else check_loss_id(loss_id)
        bindings = self._bindings_of(optimizers)
        scales = bindings[0].loss_scales if len(bindings) == 1 else self._shared_scales(bindings)
        if not -len(scales) <= loss_id < len(scales):
            raise _no_such_loss("scale_loss", loss_id, scales)
        block = Block(bindings, loss_id, scales[loss_id], loss.device, delay_unscale, delay_overflow_check)
        if self._lacks_masters:
            state.tell_of_lost_masters(self, may_wait=False)
        try:
            self._enter(block)
            with self._casts.suspended() if self._casts.undo else AS_IT_IS:
                wide = loss if loss.dtype == torch.float64 else loss.float()
                try:
                    # A call, so that a pending interrupt is raised here. After the yield the ``with`` statement has
                    # not begun yet, and would not clean up.
                    if isinstance(block.factor, PerDevice):
                        wide = torch.mul(wide, block.factor.on(loss.device))
                        if self._hints and (block.scale.moves or block.scale.init_scale != 1.0):
                            tell(self._hints, "entered", block, wide)
                    yield wide
                finally:
                    # As in apex, optimizers that the block does not name get nothing of its backward.
                    for binding in block.others:
                        if not binding.gradients.frames:  # else a block in this one has delayed its own
                            clear_grads(binding.masters.params_with_master)
                    for note in block.notes:
                        note({id(p) for binding in block.bindings for p in binding.masters.params_without_master})
            for binding in block.bindings:
                if binding.left_grads.joined:
                    binding.left_grads.block_ends(binding)
            if self._hints:
                tell(self._hints, "left", block)
            self._leave(block)
        except BaseException as error:
            block.abandon()
            if self._casts.enabled:
                note_casts_off(error)
            raise
        finally:
            try:
                self._thread.leave_block()
            except BaseException:
                block.abandon()
                raise

    def _shared_scales(self, bindings: list[OptimizerBinding]) -> list[LossScale]:
        # An optimizer keeps those of its own initialize.
        scales = bindings[0].loss_scales if bindings else self.loss_scales
        others = [scale for b in bindings if b.loss_scales is not scales for scale in b.loss_scales]
        fixed = {None if scale.dynamic else scale.init_scale for scale in (*scales, *others)}
        if others and (None in fixed or len(fixed) > 1):
            raise AmpError(
                "amp.scale_loss: these optimizers went through several amp.initialize calls, each with a loss scale of "
                "its own, of which only one would move. Pass all that share a loss to one call, as lists."
            )
        return scales

    @outside_of_graphs
    @without_grad
    def _enter(self, block: Block) -> None:
        """Prepares the backward of a block in this thread."""
        self._thread.enter_block(bool(self._casts.undo) and self._casts.enabled)
        # Both now: a nested block may change the scale before this one ends.
        fresh = not any(map(_FRAMES, block.bindings))
        block.factor, block.inv_scale, block.found_inf = block.scale.factors(block.device, fresh)
        idle: list[OptimizerBinding] = []
        if len(self._bindings) > len(block.bindings):
            idle = [b for b in self._bindings.values() if b not in block.bindings and not b.gradients.frames]
            block.others = [b for b in idle if b.masters.pairs]
        for other in block.others:
            other.refresh()  # else they would treat the block's scaled gradients as plain ones
        for binding in block.bindings:
            block.opened.append((binding, binding.gradients.depth))
            binding.enter(block.factor, block.inv_scale)
        if len(LOADED):
            LOADED.clear()
        for b in idle:
            if not block.scale.is_identity:
                block.notes.append(b.left_grads.watch(b.masters.params_without_master, bool(b.masters.pairs)))

    @outside_of_graphs
    @without_grad
    def _leave(self, block: Block) -> None:
        """Unscales and checks the gradients of the block's backward, or leaves them to a later block."""
        bindings, scale, found_inf = block.bindings, block.scale, block.found_inf
        for binding in bindings:
            binding.flags.scales_used[block.loss_id % len(binding.loss_scales)] = block.factor
            if not binding.masters.is_current():
                binding.follow_groups()  # parameters that joined or were unfrozen in the block got gradients in it
        nested = max(map(len, map(_FRAMES, bindings)), default=0) > 1
        block.ending = True
        if block.delay_unscale and not nested and not self._share_parameters(bindings):
            for binding in reversed(bindings):
                loss = block.loss_id % len(binding.loss_scales), scale
                binding.gradients.delay(block.inv_scale, loss)
            return
        delay = block.delay_unscale or block.delay_overflow_check
        # Its flag alone decides about the scale, and nobody else sees or changes it.
        is_alone = len(bindings) == 1 and not bindings[0].masters.groups and scale not in self._deferred
        is_alone = is_alone and scale.dynamic and scale.observer is None and scale.process_group is None
        if is_alone and not (delay or nested):
            found_inf.update = scale.update_with_check(block.device)
        done = set[int]() if len(bindings) > 1 else None
        for binding in bindings:
            binding.gradients.leave(found_inf, done, binding.is_unchecked)
        if isinstance(found_inf, Unread):
            if not delay:
                scale.count_clean(block.device)
            return
        flag = found_inf.joined(block.device)
        if found_inf.is_updated:  # with the check, as its scale is this optimizer's alone
            bindings[0].flags.add(block.loss_id % len(bindings[0].loss_scales), scale, flag)
        else:
            self._conclude(bindings, scale, block.loss_id, flag, delay)

    def _conclude(
        self, bindings: list[OptimizerBinding], scale: LossScale, loss_id: int, found_inf: Tensor, delay: bool
    ) -> None:
        """Sets ``found_inf`` for the next steps. Updates the scale, or leaves that to a later block."""
        if not scale.dynamic:
            scale.tell(found_inf)
            if not delay:
                scale.count_clean(found_inf.device)
            return
        groups = list(chain.from_iterable(map(_GROUPS, bindings)))
        if groups or scale.process_group is not None:
            found_inf = scale.agreed(found_inf, groups, "the end of an amp.scale_loss block")
        for binding in bindings:
            binding.flags.add(loss_id % len(binding.loss_scales), scale, found_inf, final=not delay)
        if scale in self._deferred:
            found_inf = torch.maximum(self._deferred[scale].to(found_inf.device), found_inf)
        if scale.observer is not None:
            scale.tell(found_inf)
        if delay:
            self._deferred[scale] = found_inf
        else:
            self._deferred.pop(scale, None)
            scale.update(found_inf)

    def _share_parameters(self, bindings: list[OptimizerBinding]) -> bool:
        """Whether another optimizer has a parameter of these, too: its gradient cannot stay scaled for one of them."""
        if len(self._bindings) < 2:
            return False
        owners = Counter(id(p) for b in self._bindings.values() for p in b.masters.params_without_master)
        return any(owners[id(p)] > 1 for binding in bindings for p in binding.masters.params_without_master)

    def _bindings_of(self, optimizers: Any) -> list[OptimizerBinding]:
        if isinstance(optimizers, torch.optim.Optimizer) and (binding := self._bindings.get(optimizers)) is not None:
            return [binding]
        given = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        found = [self._binding_of(optimizer) for optimizer in given]
        bindings = list(dict.fromkeys(binding for binding in found if binding is not None))
        # Like apex, accept any optimizer if gradients are neither scaled nor copied.
        assert self.policy is not None
        scales = [scale for binding in bindings for scale in binding.loss_scales] or self.loss_scales
        if None in found and (self.policy.master_weights or not all(scale.is_identity for scale in scales)):
            i = found.index(None)
            raise AmpError(
                f"scale_loss: optimizers[{i}] ({type(given[i]).__name__}) did not go through amp.initialize. Pass it "
                "there together with its model. See `ampctx explain did-not-go-through`."
            )
        return bindings

    def _binding_of(self, optimizer: Any) -> OptimizerBinding | None:
        """The binding of the optimizer, or of the one inside it that a framework has wrapped since."""
        binding = self._bindings.get(optimizer) if is_optimizer(optimizer) else None
        if binding is None and isinstance(optimizer, torch.optim.Optimizer):
            inside = dict.fromkeys(b for one in with_wrapped(optimizer) if (b := self._bindings.get(one)) is not None)
            return next(iter(inside)) if len(inside) == 1 else None
        return binding

    # --- reading -----------------------------------------------------------------------------------------------------

    def master_params(self, optimizer: Any) -> Iterator[Tensor]:
        """Returns an iterator over the parameters that ``optimizer`` steps, in the order of its groups. No host sync.

        With master weights these are the fp32 masters, else the model's own parameters. Clip or read their gradients
        after the ``scale_loss`` block: inside it, gradients are scaled and masters have none. ``optimizer`` may be any
        object with ``param_groups``.

        Example::

            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        """
        binding = self._binding_of(optimizer)
        if binding is not None and not binding.gradients.depth:
            binding.refresh()
        params = [p for group in optimizer.param_groups for p in group["params"]]

        def each() -> Iterator[Tensor]:
            yield from params
            if binding is not None and not binding.gradients.depth:
                _round_again(binding.masters)  # a loop may have written them

        return each()

    def skipped_steps(self, optimizer: Any) -> int:
        """Counts the steps of ``optimizer`` that were skipped because gradients overflowed. Host sync if it skips on
        the device: those of ``ampctx.optimizers``, and torch's with ``fused=True``."""
        binding = self._binding_of(optimizer)
        return 0 if binding is None else binding.steps.skipped_steps()

    def outcome(self, optimizer: Any) -> StepOutcome:
        """Returns the outcome of the latest ``optimizer.step()``. No host sync.

        With ``enabled=False`` every step counts as stepped. Reading an attribute may be a host sync.

        Example::

            if amp.outcome(optimizer).stepped:
                scheduler.step()

        Raises:
            AmpError: the optimizer did not go through ``amp.initialize``.
        """
        if self.policy is not None and not self.policy.enabled:
            return StepOutcome()
        return self._watched(optimizer, "outcome").steps.outcome

    def loss_scale(self, optimizer: Any = None, loss_id: int = 0) -> float:
        """Returns the scale that the next block uses. Host sync if it is on an accelerator and moves.

        ``outcome`` and ``history`` have the scales of steps. ``optimizer``: needed after several calls of
        ``initialize``, each of which has scales of its own. 1.0 with ``enabled=False``. AmpError before ``initialize``,
        or for an optimizer that did not go through it; AmpIndexError for a loss id that ``num_losses`` does not cover.
        """
        if self.policy is None:
            raise AmpError("amp.loss_scale was called before amp.initialize. Call amp.initialize first.")
        if not self.policy.enabled:
            return 1.0
        scales = self.loss_scales if optimizer is None else self._watched(optimizer, "loss_scale").loss_scales
        if not -len(scales) <= check_loss_id(loss_id) < len(scales):
            raise _no_such_loss("amp.loss_scale", loss_id, scales)
        return scales[loss_id].value()

    def history(self, optimizer: Any = None, last: int | None = None) -> History:
        """Returns the latest steps as plain lists: loss scales, skips and gradient norms, for plots and logs.

        The history starts with ``initialize``, ends with ``reset``, and is not part of ``state_dict``. It does not
        include replays of a CUDA graph. One host sync here; steps leave their numbers on the device. Its lists are
        empty if amp is not initialized or not enabled.

        Args:
            optimizer: optional if only one went through ``amp.initialize``.
            last: the largest number of steps to return. None: all that ``initialize(history=...)`` keeps.

        Raises:
            AmpError: the optimizer did not go through ``amp.initialize``, or several did and none is given.
            AmpTypeError, AmpValueError: ``last`` is not an int >= 0.
        """
        is_on = self.policy is not None and self.policy.enabled
        if not is_on or (optimizer is None and not self._bindings):
            return StepHistory(0, len(self.loss_scales) if is_on else 1).lists(last)
        if optimizer is None:
            optimizer, *others = self._bindings
            if others:
                raise AmpError(
                    f"amp.history: {len(self._bindings)} optimizers are under amp. Pass one: amp.history(optimizer)."
                )
        return self._watched(optimizer, "history").steps.history.lists(last)

    def _watched(self, optimizer: Any, name: str) -> OptimizerBinding:
        binding = self._binding_of(optimizer)
        if binding is None:
            raise AmpError(
                f"amp.{name}: this {type(optimizer).__name__} did not go through amp.initialize, so amp does not see "
                "its steps. Pass it there together with its model. See `ampctx explain did-not-go-through`."
            )
        return binding

    def on_step(self, fn: Callable[[Any, StepOutcome], None]) -> RemovableHandle:
        """Calls ``fn(optimizer, outcome)`` at the end of every step that ran, for every optimizer.

        The call comes before ``optimizer.step()`` returns, in the same thread. If ``fn`` raises, the step is complete.
        Host sync at each step of an optimizer that skips on the device. CUDA graph capture and replay call no hooks,
        nor does ``enabled=False``. Returns a handle: its ``remove()``, or ``reset``, removes the hook. Raises
        AmpTypeError if ``fn`` is not callable.
        """
        return self._add_hook(self._step_hooks, fn)

    def on_skip(self, fn: Callable[[Any, StepOutcome], None]) -> RemovableHandle:
        """Calls ``fn`` at the end of every skipped step, where ``outcome.culprits`` are known with any optimizer. See
        ``on_step``."""
        return self._add_hook(self._skip_hooks, fn)

    @staticmethod
    def _add_hook(hooks: OrderedDict, fn: Any) -> RemovableHandle:
        if not callable(fn):
            raise AmpTypeError(f"a hook must be callable with (optimizer, outcome), got {type(fn).__name__}.")
        handle = RemovableHandle(hooks)
        hooks[handle.id] = fn
        return handle

    # --- casts; ``FunctionCasts`` has those of named functions --------------------------------------------------------

    def disable_casts(self) -> AbstractContextManager:
        """Switches off the casts of O1 and O4 inside a ``with`` block. May nest; a no-op at other levels."""
        return self._casts.suspended()
