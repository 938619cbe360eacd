"""fp32 masters of bf16 parameters for the classes of ``torch.optim``, in 16 bits beside each weight."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ampctx._errors import AmpError, AmpTypeError, AmpValueError, unexpected
from ampctx.casts.arguments import autocast_off, map_leaves
from ampctx.kernels.grouping import stacks
from ampctx.kernels.plan import marks
from ampctx.kernels.reference_steps import LOW_PRECISION, split
from ampctx.kernels.sharding import is_sharded
from ampctx.kernels.tensor_loops import increment_version
from ampctx.optimizers._checkpoint import first_state_of, load_between, matched, refuse_strays, without_amp
from ampctx.optimizers._guard import Guarded, guard_of
from ampctx.optimizers._options import Group, evaluated, param_name, with_grads
from ampctx.optimizers._state_types import State, check_tensor
from ampctx.weights.store import follow, joined

_KEY = "remainder"


class SplitMasters(Guarded, torch.optim.Optimizer):
    """Steps bf16 parameters by a class of torch.optim, with the bits of that class on fp32 weights.

    ``state[p]`` has the class's fp32 state, and ``remainder``: the 16 bits (int16) that the bf16 weight lacks of fp32.
    For a step, parameters become fp32 in chunks, and so do their gradients. fp32 and fp64 parameters are stepped as
    they are. Under amp use O5 with ``master_weights=False``. amp and GradScalers skip steps on the host, by one sync.

    Example::

        optimizer = SplitMasters(torch.optim.NAdam, model.parameters(), lr=2e-3)

    Args:
        kind: a class of torch.optim, except LBFGS and SparseAdam.
        params: parameters or groups, as for the class; plain tensors.
        chunk_bytes: the fp32 weights of a chunk, 2**28 by default. Their gradients take as much. A larger parameter is
            a chunk of its own.
        skip_nonfinite, skip_norm_above, process_group: as of ``FusedOptimizer``, with one host sync a step.
        options: of the class. Not ``differentiable=True``.

    Raises:
        AmpTypeError, AmpValueError, AmpError: an invalid argument or parameter, by name. Nothing has changed then.
    """

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        params: Any,
        chunk_bytes: int = 2**28,
        *,
        skip_nonfinite: bool = False,
        skip_norm_above: float | None = None,
        process_group: Any = None,
        **options: Any,
    ) -> None:
        _check_kind(kind, options)
        if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int):
            raise AmpTypeError(f"chunk_bytes must be an int, got {type(chunk_bytes).__name__}")
        if chunk_bytes <= 0:
            raise AmpValueError(f"chunk_bytes is {chunk_bytes}, expected a number above 0")
        self.chunk_bytes = chunk_bytes
        self._guard = guard_of("SplitMasters", skip_nonfinite, skip_norm_above, process_group)
        # Steps proxies: fp32 tensors. They have memory and state only within a step.
        self.inner: Any = None
        self._proxies: dict[Tensor, nn.Parameter] = {}
        # The marks of each weight when it agreed with its remainder.
        self._seen: dict[Tensor, bytes] = {}
        super().__init__(params, {})
        self.inner = kind([self._of_proxies(group) for group in self.param_groups], **options)
        self.defaults = self.inner.defaults
        self._take_over(self.inner)

    # --- groups -------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        """Adds a param group, as in torch. Invalid options or parameters raise, and nothing is added."""
        if self.inner is not None:
            self._follow_groups()
        super().add_param_group(param_group)
        g = len(self.param_groups) - 1
        group = self.param_groups[g]
        try:
            for i, p in enumerate(group["params"]):
                self._check(p, g, i)
            if self.inner is not None:
                self.inner.add_param_group(self._of_proxies(group))
                self._take_over(self.inner)
        except BaseException:
            del self.param_groups[g]
            raise

    def _check(self, p: Tensor, g: int, i: int) -> None:
        name = param_name(self.param_groups, g, i)
        if is_sharded(p):
            raise AmpError(f"SplitMasters does not support DTensors, and {name} is one. Use FusedAdam, which does.")
        if p.dtype not in (torch.bfloat16, torch.float32, torch.float64):
            raise AmpValueError(
                f"SplitMasters keeps the 16 bits that bfloat16 lacks of float32, and {name} is {p.dtype}. Use bfloat16."
            )

    def _of_proxies(self, group: Group) -> Group:
        for p in group["params"]:
            if p not in self._proxies:
                dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
                self._proxies[p] = nn.Parameter(_without_memory(p, dtype))
        given = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        return {**given, "params": [self._proxies[p] for p in group["params"]]}

    def _follow_groups(self) -> None:
        """Gives the inner optimizer the groups as they are now: amp puts masters there, and programs edit them."""
        members = {p for group in self.param_groups for p in group["params"]}
        self._seen = {p: mark for p, mark in self._seen.items() if p in members}
        self._proxies = {p: proxy for p, proxy in self._proxies.items() if p in members}
        self.inner.param_groups[:] = map(self._of_proxies, self.param_groups)

    def _take_over(self, inner: torch.optim.Optimizer) -> None:
        """Takes options and state that the inner optimizer has made."""
        for group, inside in zip(self.param_groups, inner.param_groups, strict=True):
            group.update({name: value for name, value in inside.items() if name != "params"})
        for p, proxy in self._proxies.items():
            if proxy in inner.state:
                self.state[p] = inner.state.pop(proxy)

    # --- the step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps every parameter with a gradient. No host sync of its own without a guard.

        Args:
            closure: evaluates the model once, with gradients enabled. None by default.

        Returns:
            The result of the closure, else None.

        Raises:
            AmpError, AmpValueError: a sparse gradient, or a parameter that has become fp16. Nothing has changed then.
        """
        loss = evaluated(closure)
        stepped: dict[Tensor, None] = {}
        for g, i, p, _ in with_grads("SplitMasters", self.param_groups):
            self._check(p, g, i)
            stepped[p] = None
        self._follow_groups()
        params = list(stepped)
        if self._guard is None or not self._guard.check(self).item():
            for places in stacks(((None, 4 * p.numel()) for p in params), self.chunk_bytes):
                self._step_chunk([params[i] for i in places])
        if self._guard is not None:
            self._guard.concluded(self)
        return loss

    def _step_chunk(self, chunk: list[Tensor]) -> None:
        inner = self.inner
        try:
            for p in chunk:
                proxy, state = self._proxies[p], self.state.get(p, {})
                if p.dtype != torch.bfloat16:  # any more
                    state.pop(_KEY, None)
                follow(p, state, self._seen)
                proxy.data = weight = _wide(p, state)
                proxy.grad = None if p.grad is None else p.grad.to(weight.dtype)
                # The class takes a state that is not empty for one that it has made.
                if own := {key: _of_type(value, weight) for key, value in state.items() if key != _KEY}:
                    inner.state[proxy] = own
            inner.step()
            for p in chunk:
                if p.dtype == torch.bfloat16:
                    high, low = split(self._proxies[p].data)
                    p.copy_(high)
                    state = self.state[p]
                    state[_KEY] = state[_KEY].copy_(low) if _KEY in state else low
                    self._seen[p] = marks([p])
            increment_version([p for p in chunk if p.dtype != torch.bfloat16])
        finally:
            for p in chunk:
                proxy = self._proxies[p]
                if proxy in inner.state:
                    self.state[p].update(inner.state.pop(proxy))
                proxy.grad, proxy.data = None, _without_memory(p, proxy.dtype)

    # --- masters ------------------------------------------------------------------------------------------------------

    @property
    def param_groups_master(self) -> list[dict[str, list[Tensor]]]:
        """The fp32 weights, as ``{"params": [...]}`` for each group: copies for bf16 parameters, others themselves."""

        def master_of(p: Tensor) -> Tensor:
            return p if p.dtype not in LOW_PRECISION else _wide(p.detach(), self.state.get(p, {}))

        return [{"params": list(map(master_of, group["params"]))} for group in self.param_groups]

    @torch.no_grad()
    def masters_follow_model(self) -> None:
        """Makes remainders fit weights that were changed. ``step`` does this, too. No host sync."""
        for p, state in self.state.items():
            if isinstance(p, Tensor):
                follow(p, state, {})

    def layout_of(self, p: Tensor) -> str:
        """``FusedOptimizer``'s, for states by names."""
        return "split" if p.dtype == torch.bfloat16 else "nearest"

    def first_state(self, p: Tensor, group: Group) -> State:
        """``FusedOptimizer``'s."""
        if p.dtype != torch.bfloat16:
            return first_state_of(self.inner, p, group)
        rest = torch.zeros_like(p, dtype=torch.int16, requires_grad=False)
        return {**first_state_of(self.inner, p.detach().float(), group), _KEY: rest}

    # --- checkpoints and copies ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State and options, as in torch, with tensors of the optimizer. Host sync with ``skip_nonfinite`` or
        ``skip_norm_above`` alone, for the count."""
        refuse_strays(self)
        return self._saved(super().state_dict(), is_own=True)

    @autocast_off()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of this class, or of the class of torch.optim.

        Raises:
            ValueError: torch's, for a checkpoint of other groups.
            AmpValueError: a remainder of another dtype or shape, by name. Nothing has changed then.
        """
        inner, kept = self.inner, dict[Any, Any]()

        def before(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            self._follow_groups()
            groups = [{k: v for k, v in group.items() if k != "param_names"} for group in given["param_groups"]]
            rests: dict[Tensor, Tensor] = {}
            for found in matched(given, self.param_groups) or ():
                for p, name, state in found.states:
                    if p.dtype == torch.bfloat16 and _KEY in state:
                        check_tensor(f"the state 'remainder' of {name}", state[_KEY], p.shape, torch.int16)
                        rests[p] = state[_KEY]
            states = {
                key: {k: v for k, v in state.items() if k != _KEY} if isinstance(state, dict) else state
                for key, state in given["state"].items()
            }
            # Copies: torch keeps tensors of a checkpoint that fit, and they may be another optimizer's.
            states = map_leaves(states, Tensor.clone, objects=False)
            inner.load_state_dict({"state": states, "param_groups": groups})
            kept.update({p: inner.state.pop(proxy) for p, proxy in self._proxies.items() if proxy in inner.state})
            for p, rest in rests.items():
                kept.setdefault(p, {})[_KEY] = rest.to(p.device, copy=True)
            return {**given, "state": {}}

        load_between(self, super().load_state_dict, state_dict, before, lambda _: self.state.update(kept))
        self._restore()

    def __getstate__(self) -> dict[str, Any]:
        return without_amp(self, "_seen")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._seen = {}


def _check_kind(kind: Any, options: Group) -> None:
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise AmpTypeError(f"SplitMasters: kind must be a class of torch.optim, such as NAdam, got {kind!r}")
    for other, takes in ((torch.optim.LBFGS, "all of them as one"), (torch.optim.SparseAdam, "sparse gradients")):
        if issubclass(kind, other):
            raise AmpValueError(f"SplitMasters steps in chunks, by dense gradients, and {other.__name__} {takes}.")
    known = {*inspect.signature(kind.__init__).parameters, *inspect.signature(SplitMasters).parameters}
    for name in options.keys() - known:
        raise unexpected(f"SplitMasters: {kind.__name__}", name, known)
    if getattr(torch.optim, kind.__name__, None) is not kind:
        raise AmpValueError(
            f"SplitMasters steps parameters in chunks, which {kind.__name__} may not allow: classes of torch.optim do. "
            "Keep fp32 masters, by amp.initialize."
        )
    if options.get("differentiable"):
        raise AmpValueError("SplitMasters steps without autograd: pass differentiable=False.")


def _without_memory(p: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the shape of ``p`` that shares one element."""
    return torch.zeros((), dtype=dtype, device=p.device).expand(p.shape)


def _of_type(value: Any, weight: Tensor) -> Any:
    """State that is as large as the weight in the type of the weight, which may have changed."""
    fits = not isinstance(value, Tensor) or value.dtype == weight.dtype or value.shape != weight.shape
    return value if fits or not value.is_floating_point() else value.to(weight.dtype)


def _wide(p: Tensor, state: State) -> Tensor:
    """The weight in fp32; an fp32 or fp64 parameter itself."""
    if p.dtype != torch.bfloat16:
        return p.detach()
    exact = joined(p, state)
    return p.detach().float() if exact is None else exact
