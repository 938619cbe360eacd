"""O1 and O4: casts op by op, through torch's own autocast.

``Autocast.enable`` switches autocast on for the calling thread, so that a loss computed outside the model is cast too.
It adds three things to torch's autocast:

- Hooks on the model switch the cache of cast weights on for a forward only, and clear it before and after. Inside
  ``torch.no_grad()``, where programs write weights, it is off, and its end clears it. The cache cannot outlive a change
  of a weight, nor hold memory. The hooks also switch casts on in other threads, because autocast's state belongs to a
  thread.
- Ops that torch's CPU autocast leaves alone get kernels, so one cast table holds on every device. Dispatcher kernels
  also reach ops inside ops (the log_softmax in cross_entropy) and work under torch.compile. While an ``Autocast`` is
  enabled they serve every autocast region on the CPU, because activation checkpointing must recompute the same values.
- ``binary_cross_entropy`` refuses 16-bit input and takes fp32 on every device.

A deep copy of the model keeps its casts until the undo. A pickle loads as a plain model.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampctx._errors import AmpError, AmpNotImplementedError
from ampctx.casts.arguments import LOW_PRECISION, ModelHook, Undo, autocast_off_on, map_leaves, tensors_in, widen
from ampctx.casts.cpu import install_kernels
from ampctx.casts.forward_errors import note_dtypes
from ampctx.casts.functions import call_cast, cast_function, replace_function, shared

logger = logging.getLogger("ampctx")

# By device type, whether torch's autocast is on in this thread, and its dtype.
States = dict[str, tuple[bool, torch.dtype]]

# The enabled objects, the latest last. Global, because the guarded torch function is global.
_enabled: list[Autocast] = []


def _latest_active() -> Autocast | None:
    return next((autocast for autocast in reversed(_enabled) if autocast.active), None)


def _call_bce(fn: Callable, args: tuple, kwargs: dict[str, Any], autocast: Autocast) -> Tensor:
    dtypes = {t.dtype for t in tensors_in(args, kwargs)}
    if not autocast.allow_banned and not dtypes.isdisjoint(LOW_PRECISION):
        raise AmpNotImplementedError(
            "binary_cross_entropy got a 16-bit argument while casts are active. A sigmoid in 16 bits rounds to "
            "0 or 1, where the gradient of the loss does not fit 16 bits. Use nn.BCEWithLogitsLoss or "
            "binary_cross_entropy_with_logits on the input of the sigmoid, or compute the sigmoid in fp32: call "
            "amp.register_float_function(torch, 'sigmoid') before amp.initialize. "
            "See `ampctx explain are-unsafe-to-autocast`."
        )
    # torch's CUDA autocast refuses fp32 arguments too, without need.
    return call_cast("float", fn, args, kwargs)


# Private: torch has no public name for it. -1 outside of a backward.
_backward_id = torch._C._current_graph_task_id


def _watched_enter(enter: Callable) -> Callable:
    """Wraps ``__enter__`` of a region. Without grad, no weight that is cast inside it is cached. A backward that enters
    one with grad runs a part of a forward again: with the casts of the forward, unless custom_bwd chooses them."""

    @functools.wraps(enter)
    def wrapper(region: Any) -> None:
        enter(region)
        if torch.is_grad_enabled():
            if _enabled and _backward_id() != -1 and _nesting() == _ambient.suspended:
                decides = next((autocast for autocast in _enabled if autocast._thread.suspensions), _enabled[-1])
                region.states_before = decides.states_of_forward()
        # Activation checkpointing enters a region for each tensor that it keeps, and writes no weight.
        elif torch.is_autocast_cache_enabled() and sys._getframe(1).f_globals is not vars(torch.utils.checkpoint):
            region.had_cast_cache = True
            torch.set_autocast_cache_enabled(False)

    return wrapper


def _watched_exit(leave: Callable) -> Callable:
    """Wraps ``__exit__``: casts from before a region without grad are forgotten."""

    @functools.wraps(leave)
    def wrapper(region: Any, *error: Any) -> None:
        if vars(region).pop("had_cast_cache", False):
            torch.clear_autocast_cache()
            torch.set_autocast_cache_enabled(True)
        _set_states(vars(region).pop("states_before", {}))
        leave(region, *error)

    return wrapper


def _without_casts(run: Callable) -> Callable:
    """Wraps a function that runs a backward. One inside another would cast what is kept in fp32."""

    @functools.wraps(run)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not _enabled or torch.compiler.is_compiling() or _backward_id() == -1:  # as usual
            return run(*args, **kwargs)
        with autocast_off_on(_enabled[-1].device_types):
            return run(*args, **kwargs)

    return wrapper


def _change_torch() -> Undo:
    with ExitStack() as stack:
        guarded = functools.partial(cast_function, active=_latest_active, call=_call_bce)
        stack.callback(replace_function(F, "binary_cross_entropy", guarded))
        # Where programs write weights, other writes need ``.data``, and where a backward computes as a forward does.
        for region in (torch.no_grad, torch.inference_mode, torch.set_grad_enabled, torch.enable_grad):
            stack.callback(replace_function(region, "__enter__", _watched_enter))
            stack.callback(replace_function(region, "__exit__", _watched_exit))
        for name in ("backward", "grad"):
            stack.callback(replace_function(torch.autograd, name, _without_casts))
        return stack.pop_all().close


# --- the state of a thread --------------------------------------------------------------------------------------------


class _Ambient(threading.local):
    """This thread's autocast state outside any block, as the latest enabled ``Autocast`` sets it."""

    def __init__(self) -> None:
        self.entries: list[Autocast] = []
        # Inside a ``suspended()`` block of any entry.
        self.suspended = False
        self._before: States = {}
        self._cache_before = True

    def add(self, autocast: Autocast) -> Undo:
        if not self.entries:
            self._cache_before = torch.is_autocast_cache_enabled()
        for d in autocast.device_types:
            self._before.setdefault(d, (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)))
        self.entries.append(autocast)
        self._apply()
        return functools.partial(self.remove, autocast)

    def remove(self, autocast: Autocast) -> None:
        if autocast not in self.entries:
            logger.warning(
                "O1/O4 casts are being undone in another thread than the one that switched them on. In that thread "
                "torch's autocast stays on. Call amp.reset() in the thread that called amp.initialize."
            )
            return
        self.entries.remove(autocast)
        self._apply()
        if not self.entries:
            self._before.clear()

    def _apply(self) -> None:
        for d, (enabled, dtype) in self._before.items():
            owner = next((a for a in reversed(self.entries) if d in a.device_types), None)
            torch.set_autocast_enabled(d, enabled if owner is None else not owner._paused)
            torch.set_autocast_dtype(d, dtype if owner is None else owner.dtype)
        torch.set_autocast_cache_enabled(False if self.entries else self._cache_before)
        torch.clear_autocast_cache()


# Global, like torch's autocast state. Sessions may start and end in any order.
_ambient = _Ambient()


def _nesting() -> int:
    """How many ``torch.autocast`` blocks this thread is in. A ``suspended()`` block counts as one."""
    up, down = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
    # One expression, because an interrupt between two lines would leave the count wrong for good.
    _, depth = map(type(up).__call__, (up, down))
    return depth + _ambient.suspended


def _set_states(states: States) -> None:
    for d, (on, dtype) in states.items():
        torch.set_autocast_enabled(d, on)
        torch.set_autocast_dtype(d, dtype)


class _ThreadState(threading.local):
    """The state of one ``Autocast`` in a thread."""

    def __init__(self) -> None:
        self.home = False  # enable() was called here
        # State to restore: one entry per forward, and one per suspended() block.
        self.forwards: list[tuple[States, bool]] = []
        self.suspensions: tuple[States, ...] = ()
        # One entry per forward of a module that runs without casts.
        self.uncast: list[tuple[weakref.ref[nn.Module], list[bool]]] = []


def _is_running(module: nn.Module | None) -> bool:
    """Whether a method of ``module`` is on this thread's stack."""
    frame = sys._getframe()
    while module is not None and frame is not None:
        if frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class ForwardHook(ModelHook):
    """Calls ``act(autocast, module, *hook arguments)`` before or after a module's forward.

    Holds the ``Autocast`` weakly. Copies of the model share the hook; a pickle carries an empty one.
    """

    def __init__(self, autocast: Autocast | None, act: Callable[..., Any] | None) -> None:
        self._autocast = None if autocast is None else weakref.ref(autocast)
        self._act = act

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        autocast = None if self._autocast is None else self._autocast()
        if autocast is None or self._act is None or not autocast.enabled:
            return None
        return self._act(autocast, module, *args)

    def __deepcopy__(self, memo: Any) -> ForwardHook:
        return self

    def __reduce__(self) -> tuple:
        return ForwardHook, (None, None)


# --- Autocast ---------------------------------------------------------------------------------------------------------


class Autocast:
    """Casts of O1 and O4 for some models and the code around them.

    Args:
        models: their forwards use the cache of cast weights. Held weakly. Casts apply to the device types of their
            parameters and buffers ("cpu" if there are none).
        dtype: float16 or bfloat16.
        device_types: more device types.
        allow_banned: compute binary_cross_entropy of 16-bit arguments in fp32 instead of refusing it.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        dtype: torch.dtype,
        *,
        device_types: Sequence[str] = (),
        allow_banned: bool = False,
    ) -> None:
        self.dtype, self.allow_banned = dtype, allow_banned
        found = {t.device.type for m in models for t in (*m.parameters(), *m.buffers())} | set(device_types)
        self.device_types = sorted(d for d in found if torch.amp.is_autocast_available(d)) or ["cpu"]
        self._models = [weakref.ref(model) for model in models]
        self._thread = _ThreadState()
        self.enabled = False  # whether ``enable`` was called and not undone
        self._paused = False

    @property
    def active(self) -> bool:
        """Whether ops on the models' devices are cast in this thread right now. No host sync.

        While enabled you can set it: False switches casts off in this thread and for forwards in others, True switches
        them on again. For a block of code use ``suspended``.
        """
        return self.enabled and any(torch.is_autocast_enabled(d) for d in self.device_types)

    @active.setter
    def active(self, on: bool) -> None:
        if not self.enabled:
            return
        self._paused = not on
        for d in self.device_types:
            torch.set_autocast_enabled(d, bool(on))
            if on:
                torch.set_autocast_dtype(d, self.dtype)
        torch.clear_autocast_cache()

    def enable(self) -> Undo:
        """Switches casts on in this thread. The undo restores the previous state and must run in the same thread.

        Raises:
            AmpError: it is already enabled.
        """
        if self.enabled:
            raise AmpError("Autocast.enable: this Autocast is enabled already. Call the first undo before.")
        with ExitStack() as stack:
            stack.callback(self._disabled)
            _enabled.append(self)
            stack.callback(_enabled.remove, self)
            for install in (_change_torch, *([install_kernels] if "cpu" in self.device_types else [])):
                stack.callback(shared.acquire(install, install))
            for model in [m for m in (ref() for ref in self._models) if m is not None]:
                # begin runs first and end always, so that they come in pairs.
                begin, end = ForwardHook(self, Autocast._begin_forward), ForwardHook(self, Autocast._end_forward)
                stack.callback(model.register_forward_pre_hook(begin, prepend=True).remove)
                stack.callback(model.register_forward_hook(end, always_call=True).remove)
            stack.callback(_ambient.add(self))
            self._thread.home = self.enabled = True
            return stack.pop_all().close

    def _disabled(self) -> None:
        self.enabled = self._paused = self._thread.home = False

    def _wanted(self, device_type: str) -> tuple[bool, torch.dtype]:
        """The autocast state for a forward that starts now. It is on if only the other thread had it off."""
        on, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        if on and dtype == self.dtype:  # as usual
            return on, dtype
        nesting, home, own = _nesting(), self._thread.home, device_type in self.device_types
        starts = own and self.enabled and not self._paused and not home and nesting == 0
        # The user's own torch.autocast block may have chosen another dtype.
        keeps_dtype = not own or (home and nesting > 0)
        return on or starts, dtype if keeps_dtype else self.dtype

    def _states(self, device_types: Iterable[str]) -> tuple[States, States]:
        """The autocast states now, and those for a forward that starts now."""
        now = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types}
        return now, {d: self._wanted(d) for d in now}

    def states_of_forward(self) -> States:
        """Sets the states that this thread's forwards have outside of ``suspended`` blocks. Returns those before."""
        now, wanted = self._states(self.device_types)
        _set_states(self._thread.suspensions[-1] if self._thread.suspensions else wanted)
        return now

    def begin_uncast(self, module: nn.Module, *args: Any) -> tuple:
        """Switches casts off in this thread until ``end_uncast``, and returns the forward's arguments in fp32."""
        if not torch.compiler.is_compiling():
            self._end_interrupted()
        before = [torch.is_autocast_enabled(d) for d in self.device_types]
        self._thread.uncast.append((weakref.ref(module), before))
        # Exiting torch.autocast would clear the cache of cast weights.
        for d in self.device_types:
            torch.set_autocast_enabled(d, False)
        return tuple(map_leaves(values, widen) for values in args)

    def end_uncast(self, *_: Any) -> None:
        if self._thread.uncast:
            for d, on in zip(self.device_types, self._thread.uncast.pop()[1], strict=False):
                torch.set_autocast_enabled(d, on)

    def _end_interrupted(self) -> None:
        # torch calls no hooks if KeyboardInterrupt ends a forward.
        while self._thread.uncast and not _is_running(self._thread.uncast[-1][0]()):
            self.end_uncast()

    def _begin_forward(self, *_: Any) -> None:
        # Compiled code has no cache of cast weights, and dynamo follows the thread's autocast state by itself.
        if torch.compiler.is_compiling():
            return
        self._end_interrupted()
        before, wanted = self._states(self.device_types)
        self._thread.forwards.append((before, torch.is_autocast_cache_enabled()))
        _set_states(wanted)
        # In the user's own torch.autocast block the user decides about the cache too. Without grad there is none.
        users = self._thread.home and not self._thread.suspensions and _nesting() > 0
        torch.set_autocast_cache_enabled(torch.is_grad_enabled() and (not users or torch.is_autocast_cache_enabled()))
        # An interrupt may have left an earlier forward without its end, so clear here too.
        torch.clear_autocast_cache()

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if output is None:
            note_dtypes(module, self.dtype, False)
        if torch.compiler.is_compiling() or not self._thread.forwards:
            return
        before, cache = self._thread.forwards.pop()
        _set_states(before)
        torch.set_autocast_cache_enabled(cache)
        torch.clear_autocast_cache()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A context without casts in this thread. May nest. Always restores the previous state. No host sync."""
        if not self.enabled or torch.compiler.is_compiling():  # no weight is stepped in compiled code, no closure runs
            with autocast_off_on(self.device_types if self.enabled else ()):
                yield
            return
        thread, outer, suspended = self._thread, self._thread.suspensions, _ambient.suspended
        before, wanted = self._states({d for autocast in (self, *_ambient.entries) for d in autocast.device_types})
        # torch.autocast costs more, twice per iteration, and an interrupt during its entry or exit leaves the wrong
        # state. Here an interrupt in one of the two restores still reaches the other.
        try:
            try:
                thread.suspensions, _ambient.suspended = (*outer, wanted), True
                for d in before:
                    torch.set_autocast_enabled(d, False)
                yield
            finally:
                self._restore(before, outer, suspended)
        except BaseException:
            self._restore(before, outer, suspended)
            raise

    def _restore(self, before: States, suspensions: tuple[States, ...], suspended: bool) -> None:
        self._thread.suspensions, _ambient.suspended = suspensions, suspended
        _set_states(before)
        torch.clear_autocast_cache()  # weights may have been stepped inside

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """A context with the state from before the innermost ``suspended`` block. Outside of one it does nothing."""
        thread = self._thread
        outer = thread.suspensions
        thread.suspensions = outer[:-1]
        try:
            with ExitStack() as stack:
                for d, (on, dtype) in outer[-1].items() if outer else ():
                    stack.enter_context(torch.autocast(d, dtype=dtype, enabled=on, cache_enabled=False))
                yield
        finally:
            thread.suspensions = outer
