"""The state of a session, and the methods that read it: masters, outcomes, histories, checkpoints."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ampctx._errors import AmpError, AmpTypeError
from ampctx.amp import export, named_state, ranks, state
from ampctx.amp.events import Events
from ampctx.amp.options import PrecisionPolicy
from ampctx.amp.setup import is_optimizer
from ampctx.amp.skip_log import SkipLog
from ampctx.amp.step import OptimizerBinding
from ampctx.scaling.history import History, StepHistory
from ampctx.scaling.loss_scale import LossScale
from ampctx.scaling.outcome import StepOutcome

logger = logging.getLogger("ampctx")


class SessionState:
    """The state of an ``AmpSession``, and the methods that read it, save it and load it."""

    def __init__(self) -> None:
        self.policy: PrecisionPolicy | None = None
        self.loss_scales: list[LossScale] = []
        self._bindings: MutableMapping[Any, OptimizerBinding] = weakref.WeakKeyDictionary()
        # Flags of blocks that left the update of their scale to a later block.
        self._deferred: MutableMapping[LossScale, Tensor] = weakref.WeakKeyDictionary()
        self._events = Events()
        self._log = SkipLog(self._deferred, self._events)
        # Whether the latest loaded state had no masters, and a warning about that may be due. None: it has come.
        self._lacks_masters: bool | None = False
        self._step_hooks: OrderedDict[int, Callable[[Any, StepOutcome], None]] = OrderedDict()
        self._skip_hooks: OrderedDict[int, Callable[[Any, StepOutcome], None]] = OrderedDict()

    @property
    def verbosity(self) -> int:
        """0 is silent. From 1, rank 0 logs skipped steps."""
        return self._log.verbosity

    @verbosity.setter
    def verbosity(self, value: int) -> None:
        self._log.verbosity = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AmpError(
            "an AmpSession cannot be copied or pickled, because it belongs to models and optimizers of this process. "
            "Make a new AmpSession for the copies, call its initialize(), and load state_dict(masters=True) of this "
            "one into it."
        )

    def _binding_of(self, optimizer: Any) -> OptimizerBinding | None:
        known = isinstance(optimizer, torch.optim.Optimizer) or is_optimizer(optimizer)
        return self._bindings.get(optimizer) if known else None

    # --- reading -----------------------------------------------------------------------------------------------------

    def master_params(self, optimizer: Any) -> Iterator[Tensor]:
        """Yields the parameters that ``optimizer`` steps, in the order of its param groups. No host sync.

        With master weights these are the fp32 masters, else the model's own parameters. Clip or read their gradients
        after the ``scale_loss`` block. Inside it, gradients are scaled and masters have none.

        Example::

            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)

        Args:
            optimizer: any object with ``param_groups``.
        """
        binding = self._binding_of(optimizer)
        if binding is not None and binding.gradients.is_idle:
            binding.refresh()
        for group in optimizer.param_groups:
            yield from group["params"]

    def skipped_steps(self, optimizer: Any) -> int:
        """Counts the steps of ``optimizer`` that were skipped because gradients overflowed.

        Host sync if the optimizer skips on the device: those of ``ampctx.optimizers``, and torch's with ``fused=True``.
        """
        binding = self._binding_of(optimizer)
        return 0 if binding is None else binding.steps.skipped_steps()

    def outcome(self, optimizer: Any) -> StepOutcome | None:
        """Returns the outcome of the latest ``optimizer.step()``: whether it ran or was skipped. None before the first.

        With ``enabled=False`` every step counts as stepped. No host sync, but reading an attribute may be one, see
        ``StepOutcome``.

        Example::

            if amp.outcome(optimizer).stepped:
                scheduler.step()

        Raises:
            AmpError: the optimizer did not go through ``amp.initialize``.
        """
        if self.policy is not None and not self.policy.enabled:
            return StepOutcome()
        return self._watched(optimizer, "outcome").steps.outcome

    def history(self, optimizer: Any = None, last: int | None = None) -> History:
        """Returns the latest steps as plain lists: loss scales, skips and gradient norms, for plots and logs.

        The history starts with ``initialize``, ends with ``reset``, and is not part of ``state_dict``. It does not
        include replays of a CUDA graph. One host sync here; steps leave their numbers on the device.

        Args:
            optimizer: optional if only one went through ``amp.initialize``.
            last: the largest number of steps to return. None: all that ``initialize(history=...)`` keeps.

        Returns:
            A ``History``. Its lists ``step``, ``skipped`` and ``grad_norm`` have one element a step; ``scale`` and
            ``overflowed`` hold such a list for each loss id. Empty lists if amp is not initialized or not enabled.

        Raises:
            AmpError: the optimizer did not go through ``amp.initialize``, or several did and none is given.
            AmpTypeError, AmpValueError: ``last`` is not an int >= 0.
        """
        if self.policy is None or not self.policy.enabled:
            return StepHistory(0).lists(last)
        if optimizer is None:
            if len(self._bindings) > 1:
                raise AmpError(
                    f"amp.history: {len(self._bindings)} optimizers went through amp.initialize. Pass one of them: "
                    "amp.history(optimizer)."
                )
            optimizer = next(iter(self._bindings), None)
            if optimizer is None:
                return StepHistory(0, len(self.loss_scales)).lists(last)
        return self._watched(optimizer, "history").steps.history.lists(last)

    def _watched(self, optimizer: Any, name: str) -> OptimizerBinding:
        binding = self._binding_of(optimizer)
        if binding is None:
            raise AmpError(
                f"amp.{name}: this {type(optimizer).__name__} did not go through amp.initialize, so amp does not see "
                "its steps. Pass it there together with its model. See docs/errors.md#did-not-go-through-ampinitialize."
            )
        return binding

    def on_step(self, fn: Callable[[Any, StepOutcome], None]) -> RemovableHandle:
        """Calls ``fn(optimizer, outcome)`` at the end of every step that ran, for every optimizer.

        The call comes before ``optimizer.step()`` returns, in the same thread. If ``fn`` raises, the step is complete.
        Host sync at each step of an optimizer that skips on the device. CUDA graph capture and replay call no hooks,
        nor does ``enabled=False``.

        Returns:
            A handle. Its ``remove()``, or ``reset``, removes the hook.

        Raises:
            AmpTypeError: ``fn`` is not callable.
        """
        return self._add_hook(self._step_hooks, fn)

    def on_skip(self, fn: Callable[[Any, StepOutcome], None]) -> RemovableHandle:
        """Calls ``fn(optimizer, outcome)`` at the end of every skipped step, like ``on_step``.

        ``outcome.culprits``, the parameters with non-finite gradients, is known in the hook with every optimizer.

        Returns:
            A handle. Its ``remove()``, or ``reset``, removes the hook.

        Raises:
            AmpTypeError: ``fn`` is not callable.
        """
        return self._add_hook(self._skip_hooks, fn)

    def _add_hook(self, hooks: OrderedDict, fn: Any) -> RemovableHandle:
        if not callable(fn):
            raise AmpTypeError(f"a hook must be callable with (optimizer, outcome), got {type(fn).__name__}.")
        handle = RemovableHandle(hooks)
        hooks[handle.id] = fn
        return handle

    def master_state_dict(self, model: nn.Module, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """Exports ``model.state_dict()`` with fp32 masters in place of 16-bit weights, for plain torch. No host sync.

        Keys, order and hooks are those of ``model.state_dict()``. All tensors are copies; keys that share a tensor
        share its copy. Includes masters in the optimizer's state (``FusedAdam(master_weights=True)``) if it went
        through ``initialize``. A weight without master is exported itself.

        Args:
            model: a model that went through ``initialize``, a wrapper around it or a part of it.
            dtype: of the floating entries, buffers included; float32 by default. With float32, float64 entries stay.

        Returns:
            The state dict.

        Raises:
            AmpTypeError: ``model`` is no module, or ``dtype`` is not float16, bfloat16, float32 or float64.
        """
        return export.master_state_dict(model, list(self._bindings.values()), dtype)

    def master_model(self, model: nn.Module) -> nn.Module:
        """Copies the modules of ``model`` over the live fp32 masters, to average weights or evaluate in fp32.

        The copy has no casts of amp. It shares the masters, the model's buffers, and weights without master. Pass it
        to ``torch.optim.swa_utils.AveragedModel`` and to ``update_parameters`` after each step. Do not train it. Make
        it again after ``add_param_group``, unfreezing or ``reset``. Loading into the model updates it at the next
        block, step or call of this. No host sync.

        Args:
            model: a model that went through ``initialize``, or a part of it.

        Returns:
            The copy, an ``nn.Module`` of the same class.

        Raises:
            AmpTypeError: ``model`` is no module.
            AmpError: a master is in the optimizer's own state (its option ``master_weights``).
        """
        return export.master_model(model, list(self._bindings.values()))

    # --- ranks -------------------------------------------------------------------------------------------------------

    def check_ranks(self, group: Any = None, *, same_parameters: bool = True) -> None:
        """Checks that all ranks of a group have the same loss scales, levels, parameters and masters. Host sync.

        Call it on every rank, between steps: after loading a checkpoint, or now and then. It is one all_reduce of 144
        bytes, and reads every parameter once. Without torch.distributed it does nothing.

        Args:
            group: a ``torch.distributed.ProcessGroup``. None, the default: the default group.
            same_parameters: compare options, optimizers, and names, shapes, dtypes and values of parameters, too. False
                where ranks hold different parts of a model. Values of DTensors are never compared.

        Raises:
            AmpRankError: on every rank, by what differs and what this rank has; or another rank has left the call out.
            AmpTypeError, AmpValueError: ``group`` is no group, or does not contain this rank.
            AmpError: before ``initialize``.
        """
        ranks.check_ranks(self, group, same_parameters)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self, destination: dict[str, Any] | None = None, *, masters: bool = False) -> dict[str, Any]:
        """Returns the loss scales in apex's format, on request with masters. Host sync.

        ``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}``; empty if amp is not initialized or not
        enabled. After ``optimizer.step()``, this and the states of model and optimizers resume a run bit for bit.
        Tensors are shared with the run, as in any ``state_dict()``: save or copy them before the next step.

        Args:
            destination: a dict to fill and return. None, the default: a new one.
            masters: add the fp32 masters, and overflows that will skip a later step. apex cannot load these entries.
                ``model.state_dict()`` holds the masters, too. With DTensors, between a block and its step, call this on
                every rank.

        Raises:
            AmpError: ``masters`` inside a scale_loss block, or between SAM's ``first_step`` and ``second_step``.
        """
        return state.state_dict(self, destination, masters)

    def load_state_dict(self, state_dict: dict[str, Any], *, process_group: Any = None) -> None:
        """Loads a ``state_dict()`` of ampctx or apex. An invalid one raises and changes nothing. May be a host sync.

        A state with masters sets the masters, and the model's weights to the rounded masters. It drops gradients.
        Load model, optimizers and amp in any order. Without masters in the state, they come from
        ``model.load_state_dict``; if that loaded only 16-bit values, ampctx warns once.

        A number of entries other than ``num_losses`` gives a warning; scales without an entry stay. A static scale
        takes the loaded value and keeps it, as in apex, with a warning. A no-op with ``enabled=False``.

        With one loss scale, the state of a GradScaler (torch's or ours) loads, too: its scale and its count of clean
        steps. apex's format has no growth factors and intervals; a warning names those that differ.

        Args:
            state_dict: a dict of ``amp.state_dict()``, or of one GradScaler.
            process_group: the ranks that must have the same loss scales after the load; ``dist.group.WORLD`` for all.
                Each of them must make this call. Host sync. None, the default: no check, see ``check_ranks``.

        Raises:
            AmpKeyError: a key that is not ``loss_scaler<number>``, or a missing one.
            AmpTypeError, AmpValueError: an entry that is not a dict, or a value out of range; the state of a GradScaler
                for several scales; in a state with masters, an entry that does not fit the run.
            AmpError: before ``initialize``; a state with masters inside a scale_loss block.
            AmpRankError: the loss scales that were loaded differ between the ranks of ``process_group``.
        """
        state.load_state_dict(self, state_dict, process_group)

    # --- checkpoints by names ----------------------------------------------------------------------------------------

    def get_state_dict(
        self, model: nn.Module, optimizers: Any, *, full_state_dict: bool = False, cpu_offload: bool = False
    ) -> dict[str, Any]:
        """Returns the whole state of a run by names of parameters, for torch.distributed.checkpoint. Host sync.

        The result has the same keys and values for masters of ``initialize``, ``master_weights=True``, "split" and
        fp32 shards, on any number of ranks. Tensors are shared with the run, where it has them: save or copy them
        before the next step. Call it on every rank.

        ``{"model": ..., "optim": ..., "optimizers": ..., "amp": ...}``: "model" has weights in fp32 wherever there is
        an fp32 master. "optim" has step and moments by name, for parameters without state those that a first step
        makes. "optimizers" has options, "amp" the loss scales. write_back="kahan" adds "compensation".

        Args:
            model: the model, or the wrapper that trains. It holds all parameters of the optimizers.
            optimizers: one optimizer or a list.
            full_state_dict: whole tensors on every rank, in place of DTensors. A collective call.
            cpu_offload: copies on the CPU. With ``full_state_dict``, on rank 0 alone; other ranks get {}.

        Raises:
            AmpTypeError, AmpError: a wrong argument; before ``initialize``; an optimizer that did not go through
                ``initialize``; a parameter that the model does not hold; inside a scale_loss block, or between SAM's
                ``first_step`` and ``second_step``; an optimizer that needs a closure and has not stepped.
        """
        return named_state.get_state_dict(self, model, optimizers, full_state_dict, cpu_offload)

    def set_state_dict(
        self,
        model: nn.Module,
        optimizers: Any,
        state_dict: dict[str, Any],
        *,
        allow_level_change: bool = False,
        process_group: Any = None,
    ) -> None:
        """Loads the result of ``get_state_dict``, of any layout, engine and number of ranks. May be a host sync.

        An invalid one raises, and nothing has changed. Exact between masters of ``initialize``,
        ``master_weights=True``, "split" and fp32 shards, and from the others into these. Into 16-bit parameters
        without a master (``write_back``) weights are rounded, with a warning. Pending gradients are dropped. No
        ``on_step`` hook is called.

        Args:
            model, optimizers: as in ``get_state_dict``, after ``initialize``.
            state_dict: the dict, with DTensors or whole tensors.
            allow_level_change: accept the state of another ``opt_level``. Loss scales load where both are dynamic.
            process_group: as in ``load_state_dict``.

        Raises:
            AmpKeyError, AmpTypeError, AmpValueError: an entry that is missing, unknown or does not fit, by its key;
                another level.
            AmpError: as ``get_state_dict``. AmpRankError: as ``load_state_dict``.
        """
        named_state.set_state_dict(self, model, optimizers, state_dict, allow_level_change, process_group)

    def stateful(self, model: nn.Module, optimizers: Any, **options: Any) -> named_state.Stateful:
        """Returns an object for torch.distributed.checkpoint: ``dcp.save({"app": amp.Stateful(model, optimizers)})``.

        ``dcp.load`` of the same dict loads the run, on as many ranks as there are then. It reads into copies, so that a
        load that fails changes nothing; they take the memory of the state once more. ``amp.Stateful`` is this method of
        the default session.

        Args:
            model, optimizers: as in ``get_state_dict``.
            options: keyword arguments of ``set_state_dict``.

        Returns:
            An object with ``state_dict()`` and ``load_state_dict(state)``, which are ``get_state_dict`` and
            ``set_state_dict`` of these. Except in ``dcp.save``, ``state_dict()`` returns copies.
        """
        return named_state.Stateful(self, model, optimizers, options)
