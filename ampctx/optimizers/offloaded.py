"""Weights, state and step of an optimizer in host memory, for parameters on a GPU.

``inner`` is an ordinary optimizer over *twins*: host tensors laid out as the parameters, and for DTensors DTensors
around a part on the host. So its bits are those of that optimizer over the parameters. One step:

    down   weights that changed, gradients, ``found_inf`` and the scale go to host memory
    step   a chunk of the twins after the other, once all of that has arrived: no weight changes before ``found_inf``
           is known
    up     the weights of each chunk go back, while the next is stepped

On a CUDA device twins are pinned, and copies have a stream of their own. Elsewhere copies are made at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx._decorators import outside_of_graphs
from ampctx._errors import AmpError, AmpTypeError, AmpValueError
from ampctx.casts.arguments import autocast_off
from ampctx.kernels.foreach import PerDevice
from ampctx.kernels.grouping import stacks
from ampctx.kernels.host_memory import Lane, available_bytes, buffers
from ampctx.kernels.plan import changed, marks
from ampctx.kernels.reference_steps import LOW_PRECISION
from ampctx.kernels.sharding import around, is_sharded, local, place_grads, wrote
from ampctx.kernels.tensor_loops import (
    device_of,
    dtype_of,
    grad_of,
    is_fake,
    layout_of,
    same_items,
    set_each,
    version_of,
)
from ampctx.optimizers._checkpoint import SKIPPED, leftover, load_between, refuse_strays, saved, without_amp
from ampctx.optimizers._guard import Guarded, guard_of
from ampctx.optimizers._options import Group, evaluated, param_name, with_grads
from ampctx.optimizers._state_types import State
from ampctx.optimizers._work import given_to, on_device, unscale
from ampctx.optimizers.fused_adagrad import FusedAdagrad
from ampctx.optimizers.fused_adam import FusedAdam
from ampctx.optimizers.fused_lion import FusedLion
from ampctx.optimizers.fused_sgd import FusedSGD
from ampctx.weights.step import Given, Step, has_parameter

# ``inner`` steps about so many elements at a time, so that their way up overlaps with the next.
CHUNK_ELEMENTS = 2**24
CPU = torch.device("cpu")
_KINDS = (FusedAdam, FusedSGD, FusedLion, FusedAdagrad)


class _Twin(NamedTuple):
    """The host side of a parameter: its weight, the memory of the gradient in a step, and what both were made for."""

    weight: Tensor
    grad: Tensor
    made_for: tuple[Any, ...]


class _Host:
    """The twins of ``members``, in order; a copy makes them anew.

    seen: the marks of the members when the twins had their values.
    given: the places of those whose twin has a gradient. None: not known.
    """

    def __init__(self) -> None:
        self.twins: dict[Tensor, _Twin] = {}
        self.members: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.seen: tuple[bytes, list[int]] = b"", []
        self.given: list[int] | None = None
        self.with_state: list[Any] = []  # the keys of the state that ``inner`` has
        self.is_checked = False  # whether ``inner`` steps such parameters with these options
        self.lanes: dict[torch.device, Lane] = {}


class Offloaded(Guarded, torch.optim.Optimizer):
    """Keeps masters and state of a fused optimizer in host memory, and steps there, with its bits.

    Use it where a model with its optimizer does not fit on the GPU. With ``fully_shard`` each rank has its part of
    everything on the host; state is DTensors of CPU parts. ``state[p]`` is the inner optimizer's. ``step`` waits for
    the device.

    Example::

        optimizer = Offloaded(FusedAdam, model.parameters(), lr=1e-4, master_weights=True, skip_nonfinite=True)

    Args:
        kind: FusedAdam, FusedSGD, FusedLion or FusedAdagrad. Others need norms or matrices of whole parameters.
        params: parameters or groups, as for the class; plain tensors or DTensors, on any mix of devices.
        skip_nonfinite, skip_norm_above, process_group: as of ``FusedOptimizer``; the device finds the norm.
        options: of the class, but ``capturable``. Under amp keep the masters here: ``master_weights=False`` to
            ``amp.initialize``.

    Attributes:
        inner: the optimizer over host tensors. Groups and state are given to it at each step; set other attributes of
            the class, such as ``adam_w_mode``, there.

    Raises:
        AmpTypeError, AmpValueError: an invalid argument or parameter, by name; too little host memory.
    """

    inner: Any
    _step_supports_amp_scaling = True
    offloads = True  # amp keeps no masters beside
    found_inf: Tensor  # a caller sets it, and grad_scale, for a step
    grad_scale: Tensor | None

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        params: Any,
        *,
        skip_nonfinite: bool = False,
        skip_norm_above: float | None = None,
        process_group: Any = None,
        **options: Any,
    ) -> None:
        _check_kind(kind, options)
        self._guard = guard_of("Offloaded", skip_nonfinite, skip_norm_above, process_group)
        self._host, self.inner = _Host(), None
        super().__init__(params, {})
        self.inner = inner = kind(list(map(_without_memory, self.param_groups)), **options)
        self.defaults = inner.defaults
        self._take_options()
        self._check_memory()
        self._follow()

    # --- groups -------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        """Adds a param group, as in torch. Invalid options or parameters, and too little host memory, raise, and
        nothing is added."""
        super().add_param_group(param_group)
        if self.inner is None:
            return
        with ExitStack() as undo:
            g = len(self.param_groups) - 1
            undo.callback(self.param_groups.pop, g)
            self._follow(g)
            self.inner.add_param_group(_without_memory(self.param_groups[g]))
            undo.callback(self.inner.param_groups.pop, g)
            self._take_options()
            self._check_memory()
            self._follow()
            undo.pop_all()

    def _take_options(self) -> None:
        """Takes the options over that the inner optimizer has checked."""
        for group, inside in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({name: value for name, value in inside.items() if name != "params"})

    def _check_memory(self) -> None:
        """Whether twins and state that are not there yet fit into host memory."""
        needed = 0
        for group, inside in zip(self.param_groups, self.inner.param_groups, strict=True):
            for p, like in zip(group["params"], inside["params"], strict=True):
                part = torch.empty_like(local([like])[0], device="meta")
                if p not in self._host.twins:
                    needed += part.numel() * (p.dtype.itemsize + _grad_dtype(p).itemsize)
                if p not in self.state:
                    needed += sum(entry.nbytes for entry in self.inner.first_state(part, group).values())
        available, ranks = available_bytes(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if available is not None and needed > available:
            of_all = f" on this rank, {needed * ranks:,} on all {ranks} ranks of this machine" if ranks > 1 else ""
            raise AmpValueError(
                f"Offloaded({type(self.inner).__name__}) needs {needed:,} bytes of host memory{of_all} for weights, "
                f"gradients and state, and {available:,} are available. Free memory, keep less state, or use "
                f"{type(self.inner).__name__} alone."
            )

    def _follow(self, count: int | None = None) -> None:
        """Gives the inner optimizer the first ``count`` groups, and the state, as they are now."""
        inner, host, groups = self.inner, self._host, self.param_groups[:count]
        inner.param_groups[len(groups) :] = [{"params": []} for _ in groups[len(inner.param_groups) :]]
        members = list({id(p): p for group in groups for p in group["params"]}.values())
        if not same_items(members, host.members) or _marks(members) != host.seen:
            self._fit(members)
        for group, here in zip(groups, inner.param_groups, strict=True):
            for name, value in {**group, "lr": on_device(group["lr"], CPU)}.items():
                if here.get(name, host) is not value and name not in ("params", SKIPPED):
                    here[name], host.is_checked = value, False
            twins = [host.twins[p].weight for p in group["params"]]
            if not same_items(here["params"], twins):
                here["params"], host.is_checked = twins, False
        for g, here in enumerate(() if host.is_checked else inner.param_groups):
            for i, twin in enumerate(here["params"]):
                inner._check_param(g, i, twin)
                if is_sharded(twin) and twin.device_mesh.get_coordinate() is None:
                    raise AmpValueError(
                        f"Offloaded: this rank is not in the mesh of {param_name(groups, g, i)}, and has no part of "
                        "it. Build the optimizer on the ranks of the mesh."
                    )
        host.is_checked = True
        is_same = same_items(list(self.state), host.with_state)
        if not is_same or not same_items(list(self.state.values()), list(inner.state.values())):
            inner.state.clear()
            inner.state.update((host.twins[p].weight, s) for p, s in self.state.items() if p in host.twins)
            host.with_state = list(self.state)

    def _fit(self, members: list[Tensor]) -> None:
        """Makes twins for members that have none of their types and layout, and lets others go."""
        host = self._host
        kinds = {p: self._kind_of(p, part) for p, part in zip(members, local(members), strict=True)}
        kept = {p: host.twins[p] for p in members if p in host.twins and host.twins[p].made_for == kinds[p]}
        new = [p for p in members if p not in kept]
        if not new and same_items(members, host.members):
            return
        # First, as it frees memory. Then all weights go down again.
        host.twins, host.weights, host.grads, host.given, host.seen = kept, [], [], None, (b"", [])
        self.inner.state.clear()
        host.with_state = []
        parts = local(new)
        both = (buffers(parts, [kinds[p][i] for p in new]) for i in (0, 1))
        for p, weight, grad in zip(new, *both, strict=True):
            weight, grad = around(weight, p), around(grad, p)
            weight.grad_dtype = grad.dtype
            host.twins[p] = _Twin(weight, grad, kinds[p])
        host.members = members
        host.weights, host.grads = [host.twins[p].weight for p in members], [host.twins[p].grad for p in members]
        set_each(host.weights, "grad", None)

    def _kind_of(self, p: Tensor, part: Tensor) -> tuple[Any, ...]:
        former = self._host.twins.get(p)
        dtype = _grad_dtype(p) if former is None or p.grad is not None else former.grad.dtype
        kind = p.dtype, dtype, part.stride(), p.device, part.shape
        if former is not None and former.made_for[3:] != kind[3:]:
            g, i = next((g, i) for g, of in enumerate(self.param_groups) for i, q in enumerate(of["params"]) if q is p)
            now, was = (f"of shape {tuple(shape)} on {device}" for device, shape in (kind[3:], former.made_for[3:]))
            raise AmpError(
                f"Offloaded: {param_name(self.param_groups, g, i)} is {now}, and was {was} when its host memory was "
                "taken. Build the optimizer once the model is where it trains, and load this one's state_dict() there."
            )
        return kind

    # --- the step -----------------------------------------------------------------------------------------------------

    @outside_of_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, given: Given = None) -> Any:
        """Steps as ``kind`` does: see ``FusedOptimizer.step`` for the arguments, the result and ``grad_scale``. The
        host waits for the device.

        Raises:
            AmpError: a parameter that has moved or was resized, by name; and what ``kind`` raises. Nothing has changed
                then.
        """
        loss = evaluated(closure)
        step = given() if callable(given) else given
        if step is None or getattr(self, "grad_scale", None) is not None:
            step = given_to(self, step)
        self._follow()
        place_grads(self._host.members)
        if self._guard is not None:
            flag = None if step.found_inf is None else step.found_inf.value
            step = step._replace(found_inf=PerDevice(self._guard.check(self, flag)))
        self._step(step)
        if self._guard is not None:
            self._guard.concluded(self)
        return loss

    def _step(self, step: Step) -> None:
        host, inner = self._host, self.inner
        found = list(map(grad_of, host.members))
        places = [i for i, grad in enumerate(found) if grad is not None]
        grads = [found[i] for i in places]
        if not set(map(layout_of, grads)) <= {torch.strided}:
            list(with_grads("Offloaded", self.param_groups))  # which refuses sparse ones by name
        if list(map(dtype_of, grads)) != [host.grads[i].dtype for i in places]:
            self._fit(host.members)
            self._follow()
        parts = local(host.members)
        numbers = [each.value for each in (step.found_inf, step.inv_scale) if isinstance(each, PerDevice)]
        lanes = self._lanes_of([*host.members, *numbers])
        self._weights_down(parts)
        _copy(lanes, local([host.grads[i] for i in places]), local(grads))

        def down(number: Any) -> Any:
            if not isinstance(number, PerDevice):
                return number
            value = number.value.detach()
            here = torch.empty_like(value, device=CPU, pin_memory=value.is_cuda)
            _copy(lanes, [here], [value])
            return PerDevice(here)

        arrived = Step(down(step.found_inf), inv_scale=down(step.inv_scale))
        for lane in lanes.values():
            lane.finish()
        flag = None if arrived.found_inf is None else arrived.found_inf.value
        is_skipped = flag is not None and not is_fake(flag) and bool(flag != 0)
        weights = local(host.weights)
        for i in places if len(inner.state) < len(host.members) else ():
            inner.state[host.weights[i]] = self.state[host.members[i]]  # a dict for both
        sizes = [weights[i].numel() for i in places]
        is_one = sum(sizes) <= CHUNK_ELEMENTS  # the usual case of many small ones
        chunks = [range(len(places))] if is_one else stacks(zip(repeat(None), sizes), CHUNK_ELEMENTS)

        def up(chunk: list[int]) -> None:
            to, sources = ([parts[i] for i in chunk], [weights[i] for i in chunk]) if not is_skipped else ([], [])
            _copy(lanes, to, sources)

        stepping: list[int] = []
        try:
            for chunk in chunks:
                stepping = [places[i] for i in chunk]
                self._give(stepping)
                inner.step(given=arrived)
                up(stepping)
                stepping = []
        finally:
            up(stepping)  # after an exception, too: a twin that has stepped is the parameter's value
            for lane in lanes.values():
                lane.be_followed()
            if not is_skipped:
                wrote([host.members[i] for i in places])
            host.seen = _marks(host.members)
        if step.unscales:
            # Unless it is skipped, as the step of an optimizer on the device does.
            unique = {grad.data_ptr() if grad.numel() else id(grad): grad for grad in local(grads)}
            unscale(list(unique.values()), step.found_inf, step.inv_scale)
            wrote(grads)

    def _give(self, places: list[int]) -> None:
        """Lets the twins at these places have a gradient, and no others."""
        host = self._host
        if places != host.given:
            host.given = None  # until all are set
            set_each(host.weights, "grad", None)
            for i in places:
                host.weights[i].grad = host.grads[i]
            host.given = places

    def _lanes_of(self, tensors: Sequence[Tensor]) -> dict[torch.device, Lane]:
        """The lanes of the devices of some tensors. Copies come after what the devices have been given so far."""
        lanes, devices = self._host.lanes, dict.fromkeys(map(device_of, tensors))
        lanes |= {device: Lane(device) for device in devices if device not in lanes}
        for device in devices:
            lanes[device].follow_current()
        return {device: lanes[device] for device in devices}

    def _weights_down(self, parts: Sequence[Tensor]) -> None:
        """Copies down the weights that the program has changed."""
        host, now = self._host, _marks(self._host.members)
        if now == host.seen:
            return
        ids = changed(list(parts), host.seen[0], now[0])
        before, versions = host.seen[1], now[1]
        stale = [i for i, t in enumerate(parts) if id(t) in ids or before[i : i + 1] != versions[i : i + 1]]
        twins = [host.weights[i] for i in stale]
        _copy(host.lanes, local(twins), [parts[i] for i in stale])
        wrote(twins)
        host.seen = now

    # --- masters ------------------------------------------------------------------------------------------------------

    @property
    def param_groups_master(self) -> list[dict[str, list[Tensor | None]]]:
        """The fp32 weights, as of the inner optimizer, on the host. A parameter that is not in 16 bits itself. Waits
        for the device."""

        def of_group(group: Group, inside: Group) -> list[Tensor | None]:
            pairs = zip(group["params"], inside["params"], strict=True)
            return [master if p.dtype in LOW_PRECISION or master is None else p for p, master in pairs]

        self._read()
        shown = self.inner.param_groups_master
        return [{"params": of_group(*each)} for each in zip(self.param_groups, shown, strict=True)]

    @torch.no_grad()
    def masters_follow_model(self) -> None:
        """Reads all weights, and resyncs what the state keeps of them. ``step`` does this after changes that bump the
        version counter; call it after a change through ``p.data`` or by another library. Waits for the device."""
        self._host.seen = b"", []
        self._read()
        self.inner.masters_follow_model()

    @torch.no_grad()
    def _read(self) -> None:
        """Gives the twins the weights of now."""
        self._follow()
        lanes = self._lanes_of(self._host.members)
        self._weights_down(local(self._host.members))
        for lane in lanes.values():
            lane.finish()

    def layout_of(self, p: Tensor) -> Any:
        """``FusedOptimizer``'s."""
        return self.inner.layout_of(p)

    def first_state(self, p: Tensor, group: Group) -> Any:
        """``FusedOptimizer``'s, on the host."""
        (part,) = local([p.detach()])
        return self.inner.first_state(around(part.to(CPU), p), group)

    @property
    def _has_repeats(self) -> bool:
        return self.inner is not None and self.inner._has_repeats

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Sets gradients to None or 0, by default as ``set_grad_none`` of ``kind`` says. No host sync."""
        super().zero_grad(self.inner.set_grad_none if set_to_none is None else set_to_none)

    # --- checkpoints and copies ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State and options, as of ``kind``: either loads the other's. Tensors are the optimizer's, on the CPU. Host
        sync with ``skip_nonfinite`` or ``skip_norm_above`` alone, for the count."""
        refuse_strays(self)
        return saved(self, super().state_dict())

    @autocast_off()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint as ``kind`` does, into host memory; see ``FusedOptimizer.load_state_dict``. All errors
        name group, parameter and key. Nothing has changed then."""
        inner, kept = self.inner, dict[Tensor, State]()

        def before(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            self._follow()
            inner.load_state_dict(given)
            twins = zip(self._host.members, self._host.weights, strict=True)
            kept.update({p: inner.state[twin] for p, twin in twins if twin in inner.state})
            return {**given, "state": leftover(given)}

        def after(_: Any) -> None:
            self.state.update(kept)
            self._restore()
            self._take_options()

        load_between(self, super().load_state_dict, state_dict, before, after)

    def __getstate__(self) -> dict[str, Any]:
        attributes = self.inner.__getstate__()
        own = {name: value for name, value in attributes.items() if name not in ("state", "param_groups")}
        return {**without_amp(self, "_host", "inner", "found_inf", "grad_scale"), "_inner": (type(self.inner), own)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kind, attributes = state.pop("_inner", (None, None))
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)
        if kind is not None:
            self._host, self.inner = _Host(), object.__new__(kind)
            self.inner.__setstate__({**attributes, "state": {}, "param_groups": []})


def _check_kind(kind: Any, options: Group) -> None:
    if not (isinstance(kind, type) and issubclass(kind, _KINDS) and has_parameter(kind.step, "given")):
        names = ", ".join(each.__name__ for each in _KINDS)
        raise AmpTypeError(
            f"Offloaded: kind must be one of {names}, whose steps go in chunks, got {getattr(kind, '__name__', kind)}. "
            "Or use torch's fully_shard with offload_policy=CPUOffloadPolicy()."
        )
    if options.get("capturable"):
        raise AmpValueError("Offloaded steps on the CPU, which no CUDA graph captures: pass capturable=False.")


def _without_memory(group: Group) -> Group:
    """A group of the inner optimizer before there is host memory."""
    pairs = zip(group["params"], local(group["params"]), strict=True)
    made = {p: torch.empty_like(part, device="meta", requires_grad=False) for p, part in pairs}
    given = {name: value for name, value in group.items() if name not in ("params", "param_names", SKIPPED)}
    return {**given, "params": [made[p] for p in group["params"]]}


def _marks(tensors: list[Tensor]) -> tuple[bytes, list[int]]:
    """To see later what was written. A write to a DTensor bumps its own version, and not that of its part."""
    parts = local(tensors)
    return marks(list(parts)), [] if parts is tensors else list(map(version_of, tensors))


def _grad_dtype(p: Any) -> Any:
    return (p.grad_dtype or p.dtype) if p.grad is None else p.grad.dtype


def _copy(lanes: dict[torch.device, Lane], to: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies between devices and the host, each on the lane of its device. Of plain tensors."""
    pairs = list(zip(to, sources, strict=True))
    for device, lane in lanes.items():
        own = pairs if len(lanes) == 1 else [(t, s) for t, s in pairs if (s if t.device == CPU else t).device == device]
        if own:
            lane.copy(*zip(*own, strict=True))
