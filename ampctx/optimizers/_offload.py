"""``offload="cpu"``: weights, state and step of an optimizer in host memory, for parameters on a GPU.

The step is that of a second optimizer of the same class and options over *twins*: host tensors laid out as the
parameters. So its bits are those of the optimizer without offload. One step:

    down   weights that changed, gradients, ``found_inf`` and the scale go to host memory
    step   the optimizer over the twins, once all of that has arrived: no weight changes before ``found_inf`` is known
    up     the weights of each op call go back

On a CUDA device the twins are pinned, and copies have a stream of their own. Elsewhere copies are made at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx._decorators import outside_of_graphs
from ampctx._errors import AmpError, AmpValueError
from ampctx.kernels import tensor_loops
from ampctx.kernels.foreach import PerDevice
from ampctx.kernels.host_memory import Lane, available_bytes, buffers
from ampctx.kernels.plan import marks
from ampctx.kernels.sharding import is_sharded
from ampctx.optimizers._options import param_name, with_grads
from ampctx.optimizers._work import unscale
from ampctx.weights.step import Step

# An op call steps about so many elements, so that their way up overlaps with the next call.
CALL_ELEMENTS = 2**24
CPU = torch.device("cpu")


class _Twin(NamedTuple):
    """The host side of a parameter: its weight, the memory of the gradient in a step, and what both were made for."""

    weight: Tensor
    grad: Tensor
    made_for: tuple[torch.dtype, torch.dtype, torch.device, torch.Size, tuple[int, ...]]


class Offload:
    """The host side of one optimizer, to which it does not refer."""

    def __init__(self) -> None:
        self._twins: dict[Tensor, _Twin] = {}
        # Version and address of each parameter when its twin had its value.
        self._seen: dict[Tensor, bytes] = {}
        self._lanes: dict[torch.device, Lane] = {}
        self._host: Any = None

    # --- membership ---------------------------------------------------------------------------------------------------

    def add(self, optimizer: Any, g: int) -> None:
        """Takes the host memory of a param group. Refuses a DTensor, and too little memory, with the bytes needed."""
        group = optimizer.param_groups[g]
        for i, p in enumerate(group["params"]):
            if is_sharded(p):
                raise AmpError(
                    f"{_of(optimizer)} does not support DTensors, and {param_name(optimizer.param_groups, g, i)} is "
                    "one. Leave out offload, and pass fully_shard(..., offload_policy=CPUOffloadPolicy()): the "
                    "optimizer then steps on the CPU."
                )
        memory = sum(p.numel() * (p.dtype.itemsize + _grad_dtype(p).itemsize) for p in group["params"])
        # That steps have yet to make.
        missing = [(p, g) for g in optimizer.param_groups for p in g["params"] if p not in optimizer.state]
        entries = (optimizer.first_state(p, g, torch.empty_like(p, device="meta")).values() for p, g in missing)
        state = sum(entry.nbytes for of_param in entries for entry in of_param)
        available = available_bytes()
        if available is not None and memory + state > available:
            raise AmpValueError(
                f"{_of(optimizer)} needs {memory + state:,} bytes of host memory for weights, gradients and state, "
                f"and {available:,} are available. Free memory, keep less state, or leave out offload."
            )
        self._fit(group["params"])

    def _fit(self, params: Iterable[Tensor]) -> None:
        """Makes twins of parameters that have none of their dtypes, device and layout."""
        kinds = {p: (p.dtype, _grad_dtype(p), p.device, p.shape, p.stride()) for p in params}
        new = [p for p, kind in kinds.items() if p not in self._twins or self._twins[p].made_for != kind]
        self._drop(new)  # frees their memory first
        grads = buffers(new, [kinds[p][1] for p in new])
        for p, weight, grad in zip(new, buffers(new, [p.dtype for p in new]), grads, strict=True):
            weight.grad_dtype = grad.dtype
            self._twins[p] = _Twin(weight, grad, kinds[p])

    def _drop(self, params: Iterable[Tensor]) -> None:
        for p in params:
            self._twins.pop(p, None)
            self._seen.pop(p, None)

    def _read(self, p: Tensor, lane: Lane) -> None:
        """Copies a weight down if the program has changed it."""
        if self._seen.get(p) != marks([p]):
            lane.copy(self._twins[p].weight, p.detach())
            self._seen[p] = marks([p])

    def masters_follow_model(self, optimizer: Any) -> None:
        """Reads all weights, and resyncs what the state keeps of them."""
        self.forget()
        params = list(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]))
        self._fit(params)
        lanes = self._lanes_of(params)
        for p in params:
            self._read(p, lanes[p.device])
        for lane in lanes.values():
            lane.finish()
        self._host_of(optimizer).masters_follow_model()

    def twin_of(self, p: Tensor) -> Tensor:
        """A host tensor of the dtype and layout of the parameter."""
        self._fit([p])
        return self._twins[p].weight

    def forget(self) -> None:
        """Makes the next step read all weights, and resync what the state keeps of them."""
        self._seen.clear()
        if self._host is not None:
            self._host._seen, self._host._plan = {}, None

    def _lanes_of(self, tensors: Iterable[Tensor]) -> dict[torch.device, Lane]:
        """The lanes of the devices of some tensors. Copies come after what the devices have been given so far."""
        devices = dict.fromkeys(t.device for t in tensors)
        self._lanes |= {device: Lane(device) for device in devices if device not in self._lanes}
        for device in devices:
            self._lanes[device].follow_current()
        return {device: self._lanes[device] for device in devices}

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
    @torch.no_grad()
    def step(self, optimizer: Any, step: Step) -> None:
        """The step of ``optimizer``, after its checks of options."""
        members = list(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]))
        self._drop(self._twins.keys() - set(members))
        for g, i, p, _ in with_grads(type(optimizer).__name__, optimizer.param_groups):
            optimizer._check_param(g, i, p)
        grads: dict[Tensor, Tensor] = {p: p.grad for p in members if p.grad is not None}
        self._fit(members)
        for p in grads:
            optimizer.state[p]  # a dict for the host to fill
        numbers = [each.value for each in (step.found_inf, step.inv_scale) if isinstance(each, PerDevice)]
        host, lanes = self._host_of(optimizer), self._lanes_of([*grads, *numbers])
        arrived = self._down(grads, lanes, step)
        for lane in lanes.values():
            lane.be_followed()  # before the device changes a gradient, or frees it
        if step.unscales:
            # Unless it is skipped: as the step of an optimizer without offload does.
            unique = {grad.data_ptr() if grad.numel() else id(grad): grad for grad in grads.values()}
            unscale(list(unique.values()), step.found_inf, step.inv_scale)
        to_send = {self._twins[p].weight: p for p in grads}

        def send(weights: Iterable[Tensor]) -> None:
            for weight in weights:
                if (p := to_send.pop(weight, None)) is not None:
                    lanes[p.device].copy(p.data, weight)

        for lane in lanes.values():
            lane.finish()
        flag = None if arrived.found_inf is None else arrived.found_inf.value
        is_skipped = flag is not None and not tensor_loops.is_fake(flag) and bool(flag != 0)
        stepped = [] if is_skipped else list(grads)
        if is_skipped:
            to_send.clear()
        try:
            host._apply(arrived, send)
        finally:
            # After an exception, too: a twin that has stepped is the parameter's value.
            send(list(to_send))
            for lane in lanes.values():
                lane.be_followed()
            tensor_loops.bump_versions(stepped)
            self._seen.update({p: marks([p]) for p in stepped})

    def _down(self, grads: dict[Tensor, Tensor], lanes: dict[torch.device, Lane], step: Step) -> Step:
        """Copies down what a step reads. Returns the scaling on the host, with values once the lanes have finished."""
        for p, twin in self._twins.items():
            twin.weight.grad = None
            if p in grads:
                self._read(p, lanes[p.device])
                lanes[p.device].copy(twin.grad, grads[p])
                twin.weight.grad = twin.grad

        def down(number: Any) -> Any:
            if not isinstance(number, PerDevice):
                return number
            value = number.value.detach()
            here = torch.empty_like(value, device=CPU, pin_memory=value.is_cuda)
            lanes[value.device].copy(here, value)
            return PerDevice(here)

        return Step(down(step.found_inf), inv_scale=down(step.inv_scale))


def _grad_dtype(p: Tensor) -> torch.dtype:
    return p.grad_dtype or (p.dtype if p.grad is None else p.grad.dtype)


def _of(optimizer: Any) -> str:
    return f"{type(optimizer).__name__}(offload='cpu')"
