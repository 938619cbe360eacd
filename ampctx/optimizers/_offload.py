"""``offload="cpu"``: weights, state and step of an optimizer in host memory, for parameters on a GPU.

The step is that of a second optimizer of the same class and options over *twins*: host tensors laid out as the
parameters. So its bits are those of the optimizer without offload. One step:

    down   weights that changed, gradients, ``found_inf`` and the scale go to host memory
    step   the optimizer over the twins, once all of that has arrived: no weight changes before ``found_inf`` is known
    up     the weights of each op call go back

On a CUDA device the twins are pinned, and copies have a stream of their own. Elsewhere copies are made at once.

With ``overlap="forward"`` a thread makes the step and the way up while the program goes on. A weight *lands* when its
module's forward begins, or at ``wait``. Until it is there it is nan, so that no code uses the old value unseen.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ampctx._compiling import outside_of_graphs
from ampctx._errors import AmpError, AmpValueError
from ampctx.kernels import foreach, tensor_loops
from ampctx.kernels.foreach import Factor, PerDevice, Unread
from ampctx.kernels.host_memory import Lane, available_bytes, buffers
from ampctx.kernels.sharding import is_sharded
from ampctx.masters.host_grads import HostGrads
from ampctx.optimizers._options import Group, param_name, refuse_sparse
from ampctx.optimizers._state import State
from ampctx.optimizers._work import Scaling

# An op call steps about so many elements, so that their way up overlaps with the next call.
CALL_ELEMENTS = 2**24
CPU = torch.device("cpu")


class _Twin:
    """The host side of one parameter: ``weight``, whose ``grad`` is set for a step, and the memory of that gradient."""

    def __init__(self, p: Tensor, weight: Tensor, grad: Tensor) -> None:
        self.weight, self.grad = weight, grad
        self._kind = self._kind_of(p)
        # Version and address of the parameter when the weight had its value.
        self._seen: tuple[int, int] | None = None

    @staticmethod
    def _kind_of(p: Tensor) -> tuple[Any, ...]:
        return p.dtype, p.device, p.shape, p.stride()

    def fits(self, p: Tensor) -> bool:
        return self._kind == self._kind_of(p)

    def read(self, p: Tensor, lane: Lane) -> None:
        """Copies the weight down if the program has changed it."""
        if self._seen != (p._version, p.data_ptr()):
            lane.copy(self.weight, p.detach())
            self.agrees(p)

    def agrees(self, p: Tensor) -> None:
        self._seen = p._version, p.data_ptr()

    def forget(self) -> None:
        self._seen = None


class _Flight:
    """The step of the twins, and the weights on their way up."""

    def __init__(self, twins: dict[Tensor, _Twin], lanes: dict[torch.device, Lane], sends_all: bool) -> None:
        self._sends_all = sends_all  # a skipped step, too
        # Of the parameters that have not landed.
        self.twins = twins
        self._lanes = lanes
        self._to_send = {twin.weight: p for p, twin in twins.items()}
        # The mark on its lane of each parameter that was sent.
        self._sent: dict[Tensor, Any] = {}
        self.is_over = False
        self.was_met = False  # by a forward
        self._error: BaseException | None = None
        self._news = threading.Condition()

    # Of the thread that steps.

    @torch.no_grad()
    def run(self, host: Any, scaling: Scaling) -> None:
        try:
            for lane in self._lanes.values():
                lane.finish()
            is_skipped = scaling.found_inf is not None and bool(scaling.found_inf.value != 0)
            if is_skipped and not self._sends_all:
                self._to_send.clear()
            host._apply(scaling, self._send)
        except BaseException as error:
            self._error = error
        finally:
            # After an exception, too: a twin that has stepped is the parameter's value.
            self._send(list(self._to_send))
            with self._news:
                self.is_over = True
                self._news.notify_all()

    def _send(self, weights: Iterable[Tensor]) -> None:
        found = [(self._to_send.pop(weight), weight) for weight in weights if weight in self._to_send]
        for p, weight in found:
            # Not through ``p``: its version changes when it lands.
            self._lanes[p.device].copy(p.data, weight)
        marks = {device: self._lanes[device].mark() for device in {p.device for p, _ in found}}
        with self._news:
            self._sent.update((p, marks[p.device]) for p, _ in found)
            self._news.notify_all()

    # Of the program.

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def land(self, params: Iterable[Tensor]) -> None:
        """Waits for these weights: the host until they are sent, the current streams until they are there."""
        params = [p for p in params if p in self.twins]
        with self._news:
            self._news.wait_for(lambda: self.is_over or all(p in self._sent for p in params))
        for device, mark in {(p.device, self._sent.get(p)) for p in params}:
            self._lanes[device].be_followed(mark)
        tensor_loops.bump_versions(params)
        for p in params:
            self.twins.pop(p).agrees(p)

    def end(self) -> None:
        """Waits for all. Raises the exception of the step."""
        self.land(list(self.twins))
        with self._news:
            self._news.wait_for(lambda: self.is_over)
        if self._error is not None:
            error, self._error = self._error, None
            raise error


class _BeforeStateDict:
    """A hook of modules: all weights land before a state dict is made or loaded. In a copy of a module it is empty."""

    def __init__(self, of: weakref.ref[Offload] | None = None) -> None:
        self._of = of

    def __call__(self, *_: Any) -> None:
        if self._of is not None and (offload := self._of()) is not None:
            offload.wait()

    def __reduce__(self) -> tuple:
        return _BeforeStateDict, ()


class Offload:
    """The host side of one optimizer, to which it does not refer.

    ``overlaps``: a thread of its own steps, while the program goes on. ``gradients``: they leave the device when they
    arrive.
    """

    def __init__(self, overlaps: bool, gradients: bool) -> None:
        self.grads = HostGrads(self) if gradients else None
        self._twins: dict[Tensor, _Twin] = {}
        self._lanes: dict[torch.device, Lane] = {}
        self._host: Any = None
        # The step that has not ended, in a list for the finalizer.
        self._flights: list[_Flight] = []
        self._thread = ThreadPoolExecutor(1, "ampctx-offload") if overlaps else None
        # Modules that have had a forward, and their parameters. The others land before any forward: a module may read
        # them of a module that it never calls, as nn.MultiheadAttention does.
        self._called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._known: set[Tensor] = set()
        if overlaps:
            self._watch_modules()

    def _watch_modules(self) -> None:
        reference = weakref.ref(self)

        @outside_of_graphs
        def before_forward(module: nn.Module, _: Any) -> None:
            if (alive := reference()) is not None:
                alive._before_forward(module)

        hook = register_module_forward_pre_hook(before_forward)
        flights = self._flights

        def end() -> None:
            hook.remove()
            for flight in flights:
                flight.end()

        weakref.finalize(self, end)

    def _before_forward(self, module: nn.Module) -> None:
        is_known = module in self._called
        if is_known and not self._flights:
            return
        own = [p for p in module.parameters(recurse=False) if p in self._twins]
        if not is_known:
            self._called.add(module)
            self._known.update(own)
            if any(p in self._twins for p in module.parameters()):
                hook = _BeforeStateDict(weakref.ref(self))
                module.register_state_dict_pre_hook(hook)
                module.register_load_state_dict_pre_hook(hook)
        for flight in self._flights:
            if not torch.is_grad_enabled():
                # There are modules that read weights of others only then, as nn.TransformerEncoderLayer does.
                return self.wait()
            if not flight.was_met:
                flight.was_met = True
                flight.land(flight.twins.keys() - self._known)
            flight.land(own)
            if flight.has_failed or not flight.twins:
                self.wait()

    def wait(self) -> None:
        """Waits for the step that has not ended. Raises its exception."""
        for flight in list(self._flights):
            try:
                flight.end()
            finally:
                if flight.is_over:  # else an interrupt has ended the wait
                    self._flights.remove(flight)

    # --- membership ---------------------------------------------------------------------------------------------------

    def add(self, optimizer: Any, g: int) -> None:
        """Takes the host memory of a param group.

        Raises:
            AmpError: a DTensor.
            AmpValueError: too little host memory, with the bytes that are needed.
        """
        group = optimizer.param_groups[g]
        for i, p in enumerate(group["params"]):
            if is_sharded(p):
                raise AmpError(
                    f"{_of(optimizer)} does not support DTensors, and {param_name(optimizer.param_groups, g, i)} is "
                    "one. Leave out offload, and pass fully_shard(..., offload_policy=CPUOffloadPolicy()): the "
                    "optimizer then steps on the CPU."
                )
        # With ``grads``, a second gradient of each for micro-batches.
        memory = sum((2 if self.grads is None else 3) * p.nbytes for p in group["params"])
        state = sum(_state_bytes(optimizer, each) for each in optimizer.param_groups)
        available = available_bytes()
        if available is not None and memory + state > available:
            raise AmpValueError(
                f"{_of(optimizer)} needs {memory + state:,} bytes of host memory for weights, gradients and state, "
                f"and {available:,} are available. Free memory, keep less state, or leave out offload."
            )
        self._fit(group["params"])
        self._called.clear()  # some may have parameters of the group
        self._known.clear()

    def _fit(self, params: Iterable[Tensor]) -> None:
        """Makes twins of parameters that have none of their dtype, device and layout."""
        new = [p for p in dict.fromkeys(params) if p not in self._twins or not self._twins[p].fits(p)]
        for p in new:
            self._twins.pop(p, None)  # frees its memory first
        for p, weight, grad in zip(new, buffers(new), buffers(new), strict=True):
            self._twins[p] = _Twin(p, weight, grad)
            if self.grads is not None:
                self.grads.add(p, weight.detach(), grad)
        if self.grads is not None:
            self.grads.watch()

    def masters_follow_model(self, optimizer: Any) -> None:
        """Reads all weights, and resyncs what the state keeps of them."""
        self.forget()
        params = list(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]))
        self._fit(params)
        lanes = {p.device: self.lane(p.device) for p in params}
        for lane in lanes.values():
            lane.follow_current()
        for p in params:
            self._twins[p].read(p, lanes[p.device])
        for lane in lanes.values():
            lane.finish()
        self._host_of(optimizer).masters_follow_model()

    def twin_of(self, p: Tensor) -> Tensor:
        """A host tensor of the dtype and layout of the parameter."""
        self._fit([p])
        return self._twins[p].weight

    def forget(self) -> None:
        """Makes the next step read all weights, and resync what the state keeps of them."""
        for twin in self._twins.values():
            twin.forget()
        if self._host is not None:
            self._host._seen, self._host._plan = {}, None

    def lane(self, device: torch.device) -> Lane:
        if device not in self._lanes:
            self._lanes[device] = Lane(device)
        return self._lanes[device]

    def _host_of(self, optimizer: Any) -> Any:
        """The optimizer over the twins, with the options and the state that ``optimizer`` has now."""
        # Attributes that a program may set between steps, such as adam_w_mode.
        attributes = {**optimizer.__getstate__(), "offload": None}
        groups, state = attributes.pop("param_groups"), attributes.pop("state")
        if self._host is None:
            self._host = object.__new__(type(optimizer))
            self._host.__setstate__({**attributes, "param_groups": [], "state": {}})
            self._host._call_elements = CALL_ELEMENTS
        host = self._host
        vars(host).update(attributes)
        host.param_groups[len(groups) :] = [{"params": []} for _ in groups[len(host.param_groups) :]]
        for group, here in zip(groups, host.param_groups, strict=True):
            here.update({name: value for name, value in group.items() if name != "params"})
            if isinstance(lr := group["lr"], Tensor):
                # As the ops on a device take it.
                here["lr"] = lr.detach().to(CPU, lr.dtype if lr.device == CPU else torch.float32, copy=True)
            twins = [self._twins[p].weight for p in group["params"]]
            if not tensor_loops.same_items(here["params"], twins):
                here["params"] = twins
        host.state = {twin.weight: state[p] for p, twin in self._twins.items() if p in state}
        return host

    # --- the step -----------------------------------------------------------------------------------------------------

    @outside_of_graphs
    def step(self, optimizer: Any, scaling: Scaling) -> None:
        """The step of ``optimizer``, after its checks of options."""
        self.wait()
        if self.grads is not None and "grad_scale" in vars(optimizer):
            raise AmpError(
                f"{_of(optimizer)} with offload_gradients=True has gradients on the host, where a GradScaler neither "
                "unscales nor checks them. Pass offload_gradients=False."
            )
        members = list(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]))
        for p in self._twins.keys() - set(members):
            del self._twins[p]
            self._known.discard(p)
            if self.grads is not None:
                self.grads.remove(p)
        grads = self._gradients(optimizer, members)
        self._fit(members)
        stepped = list(grads)
        lanes = {device: self.lane(device) for device in {p.device for p in stepped}}
        for p in stepped:
            optimizer.state[p]  # a dict for the host to fill
        host, arrived = self._host_of(optimizer), self._down(grads, lanes, scaling)
        for lane in lanes.values():
            # Before the device changes a gradient, or frees it.
            lane.be_followed(lane.mark())
        if scaling.unscales:
            _unscale(list(grads.values()), scaling)
        if self.grads is not None:
            self.grads.stepped()
        flight = _Flight({p: self._twins[p] for p in stepped}, lanes, sends_all=self._thread is not None)
        if self._thread is None:
            flight.run(host, arrived)
            flight.end()
        else:
            self._flights.append(flight)
            for p in stepped:
                p.data.fill_(torch.nan)
            for lane in lanes.values():
                lane.follow_current()
            self._thread.submit(flight.run, host, arrived)

    def _gradients(self, optimizer: Any, members: list[Tensor]) -> dict[Tensor, Tensor]:
        """The gradient of each parameter that has one, after its checks."""
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    if p.grad.layout is not torch.strided:
                        refuse_sparse(type(optimizer).__name__, param_name(optimizer.param_groups, g, i))
                    optimizer._check_param(g, i, p)
        holders = members if self.grads is None else self.grads.collect(members)
        return {p: grad for p, holder in zip(members, holders, strict=True) if (grad := holder.grad) is not None}

    def _down(self, grads: dict[Tensor, Tensor], lanes: dict[torch.device, Lane], scaling: Scaling) -> Scaling:
        """Copies down what a step reads. Returns the scaling on the host, with values once the lanes have finished."""
        for lane in lanes.values():
            lane.follow_current()
        for p, twin in self._twins.items():
            twin.weight.grad = None
            if p in grads:
                twin.read(p, lanes[p.device])
                if self.grads is None:
                    lanes[p.device].copy(twin.grad, grads[p])
                twin.weight.grad = twin.grad if self.grads is None else grads[p]
        found_inf, inv_scale = scaling.found_inf, scaling.inv_scale
        return Scaling(
            None if found_inf is None else self._number_down(found_inf, lanes),
            self._number_down(inv_scale, lanes) if isinstance(inv_scale, PerDevice) else inv_scale,
        )

    def _number_down(self, number: PerDevice, lanes: dict[torch.device, Lane]) -> PerDevice:
        value = number.value.detach()
        here = torch.empty_like(value, device=CPU, pin_memory=value.is_cuda)
        lane = lanes.setdefault(value.device, self.lane(value.device))
        lane.follow_current()
        lane.copy(here, value)
        return PerDevice(here)


def _of(optimizer: Any) -> str:
    return f"{type(optimizer).__name__}(offload='cpu')"


def _state_bytes(optimizer: Any, group: Group) -> int:
    """The bytes of the state that steps have yet to make."""
    total = 0
    for p in group["params"]:
        if p not in optimizer.state:
            made: State = {}
            needed = optimizer._needed(optimizer._forms(p, group), optimizer.layout_of(p))
            optimizer._make_state(torch.empty_like(p, device="meta"), made, needed)
            total += sum(value.nbytes for value in made.values())
    return total


def _unscale(grads: Sequence[Any], scaling: Scaling) -> None:
    """Unscales gradients in place, as the step of an optimizer without offload does, unless it is skipped."""
    each = list({grad.data_ptr() if grad.numel() else id(grad): grad for grad in grads}.values())
    factor: Factor = scaling.inv_scale
    if scaling.found_inf is not None:
        flag = scaling.found_inf.value
        inv_scale = factor.on(flag.device) if isinstance(factor, PerDevice) else factor
        factor = PerDevice(torch.where(flag.reshape(()) != 0, 1.0, inv_scale).float())
    foreach.scale(each, each, Unread(), factor)
