"""What a session holds and what its users read of it: masters, outcomes, histories, checkpoints."""

from __future__ import annotations

import logging
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ampctx._errors import AmpError, AmpTypeError, AmpValueError
from ampctx.amp import run_state
from ampctx.amp import weights as master_weights
from ampctx.amp.binding import OptimizerBinding
from ampctx.amp.blocks import Blocks
from ampctx.amp.opt_level import PrecisionPolicy
from ampctx.amp.param_mistakes import ParamMistakes
from ampctx.amp.setup import is_optimizer
from ampctx.amp.skip_log import SkipLog
from ampctx.scaling import formats
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
        self._blocks = Blocks(self._bindings)
        self._log = SkipLog(self._blocks.deferred)
        # Whether the latest state that was loaded had no masters, until it has been told whether that matters.
        self._lacks_masters = False
        self._param_mistakes = ParamMistakes(self._bindings, self._log)
        self._explained_masters = False
        self._step_hooks: OrderedDict[int, Callable[[Any, StepOutcome], None]] = OrderedDict()
        self._skip_hooks: OrderedDict[int, Callable[[Any, StepOutcome], None]] = OrderedDict()

    @property
    def verbosity(self) -> int:
        """0 is silent; from 1 skipped steps are logged, on rank 0."""
        return self._log.verbosity

    @verbosity.setter
    def verbosity(self, value: int) -> None:
        self._log.verbosity = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AmpError(
            "an AmpSession cannot be copied or pickled: it belongs to models and optimizers of this process. Make one "
            "for the copies, initialize it, and load state_dict(masters=True) of this one into it"
        )

    def _binding_of(self, optimizer: Any) -> OptimizerBinding | None:
        known = isinstance(optimizer, torch.optim.Optimizer) or is_optimizer(optimizer)
        return self._bindings.get(optimizer) if known else None

    # --- what users read ---------------------------------------------------------------------------------------------

    def master_params(self, optimizer: Any) -> Iterator[Tensor]:
        """Yields the parameters that ``optimizer`` steps, in the order of its param groups.

        Under master weights these are the fp32 masters, else the model's own parameters. Clip their gradients after the
        scale_loss block: inside, gradients are scaled and masters have none, and who reads or clips them gets one
        warning. Works on any object with ``param_groups``. No host sync.
        """
        binding = self._binding_of(optimizer)
        if binding is not None and binding.gradients.is_idle:
            binding.refresh()
        elif binding is not None and not torch.compiler.is_compiling():
            self._param_mistakes.masters_read(binding, sys._getframe(1))
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

    def _report_step(self, optimizer: Any, outcome: StepOutcome) -> None:
        for fn in list((self._step_hooks if outcome.stepped else self._skip_hooks).values()):
            fn(optimizer, outcome)

    def master_state_dict(self, model: nn.Module, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """``model.state_dict()`` with the fp32 masters in the places of 16-bit weights: to export, in plain torch.

        Keys, order and hooks are those of ``model.state_dict()``, of a model in DistributedDataParallel too. Here all
        tensors are copies, and what several keys share in the model they share. Masters that an optimizer keeps by
        itself (``FusedAdam(master_weights=True)``) count as well, if it went through ``initialize``. Where there is no
        master, the weight itself.

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
            masters: add the fp32 masters, which ``model.state_dict()`` shows as well, and the overflows that are not
                dealt with yet: to resume where they have a coming step skipped. apex does not load it.
            grads: add gradients, too: to resume between blocks whose gradients add up to one step. Implies ``masters``.

        After ``optimizer.step()`` a run resumes bit for bit from this and the states of the model and the optimizers.

        Tensors are shared with the run, as in any ``state_dict()``: save, or copy, before the next step.

        Raises:
            AmpError: ``masters`` or ``grads`` inside a scale_loss block, or between SAM's ``first_step`` and
                ``second_step``; ``grads`` after an exception has left sums half made.
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
        state = run_state.saved(bindings, self.loss_scales, self._blocks.deferred, self.policy.opt_level, grads)
        if not grads and any(map(run_state.drops_gradients, bindings)):
            logger.warning(
                "amp.state_dict(masters=True): there are gradients that no step has used, and they are not part of it. "
                "Save after optimizer.step(), or with grads=True."
            )
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` gave, here or in apex. A bad checkpoint raises and changes nothing.

        One with masters sets the masters, and the model's weights to the rounded masters; gradients that are there are
        dropped, or replaced by its own. Model, optimizers and amp may be loaded in any order. Without masters, they are
        those of ``model.load_state_dict``; where that got 16-bit values alone, a warning says so once.

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
            return run_state.loader(state, bindings, self.loss_scales, self._blocks.deferred, self.policy.opt_level)
        return self._tell_of_lost_masters

    def _tell_of_lost_masters(self, may_wait: bool = True) -> None:
        """Says so where neither the checkpoint of amp nor that of the model had fp32 masters. The model may be loaded
        later: then the next block asks again, but does not wait for an accelerator."""
        found = [binding.masters for binding in self._bindings.values() if binding.masters.pairs]
        if not may_wait:
            found = [masters for masters in found if all(master.is_cpu for _, master in masters.pairs)]
        self._lacks_masters = may_wait and not self._explained_masters
        if not self._explained_masters and any(masters.are_rounded() for masters in found):
            self._lacks_masters, self._explained_masters = False, True
            logger.warning(
                "The checkpoint has no fp32 master weights, neither in the model's state nor in that of amp: they "
                "start from the model's 16-bit weights, without what was rounded off. Save model.state_dict() of the "
                "model that went through amp.initialize, which shows them."
            )

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
