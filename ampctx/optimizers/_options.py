"""Checks the options of an optimizer, with torch.optim's messages, and passes them to the ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from operator import index
from typing import Any

import torch
from torch import Tensor

from ampctx._errors import AmpError, AmpTypeError, AmpValueError
from ampctx._saved import plain
from ampctx.kernels.foreach import move
from ampctx.kernels.spec import OPTIMIZERS, OpSpec

Group = dict[str, Any]

# The ops compute in fp32.
_LARGEST = torch.finfo(torch.float32).max
_NO_PAIRS = (str, bytes, Mapping)
_TITLES = {"lr": "learning rate", "eps": "epsilon value"}


def device_of(group: Group) -> torch.device:
    """The device for a tensor lr of a group."""
    return group["params"][0].device if group["params"] else torch.device("cpu")


def is_lr_on_device(lr: Any, device: torch.device) -> bool:
    """Whether the ops, and a CUDA graph, can read this lr without a copy."""
    return isinstance(lr, Tensor) and (lr.dtype, lr.device, lr.numel()) == (torch.float32, device, 1)


def lr_tensor(group: Group) -> Tensor:
    """The lr of a group as a tensor for the ops: itself if possible. Host sync only to copy it to the CPU."""
    lr, device = group["lr"], device_of(group)
    if is_lr_on_device(lr, device):
        return lr
    if not isinstance(lr, Tensor):
        return torch.full((), float(check_number("lr", lr)), dtype=torch.float32, device=device)
    check_one_element("lr", lr)
    return move(lr.detach().float().reshape(()), device)


def lr_to_tensors(groups: Sequence[Group]) -> None:
    """Turns numbers assigned to a group's lr into tensors, with capturable. The former tensor keeps its value, as code
    that changes lr for one step puts that tensor back. An invalid lr changes nothing."""
    rates = [lr_tensor(group) for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


def fill_lr_tensors(optimizer: Any, rates: list[Any]) -> None:
    """Puts loaded rates into the tensors ``rates`` that groups had, with capturable: a CUDA graph may read these."""
    if not optimizer.capturable:
        return
    groups: Sequence[Group] = optimizer.param_groups
    lr_to_tensors(groups)
    for i, (group, rate) in enumerate(zip(groups, rates, strict=True)):
        loaded, is_shared = group["lr"], any(rate is other for other in rates[:i])
        if not is_shared and is_lr_on_device(rate, device_of(group)):
            with torch.no_grad():
                rate.copy_(loaded.reshape(rate.shape))
            group["lr"] = rate


def check_one_element(name: str, value: Tensor) -> None:
    if value.numel() != 1:
        raise AmpValueError(f"Tensor {name} must be 1-element: {name} has {value.numel()} elements")


def check_number(
    name: str, value: Any, below: float | None = None, title: str | None = None, *, finite: bool = True
) -> float:
    """A number >= 0, and less than ``below`` if given. Reads a one-element tensor: host sync."""
    value = _real(name, value)
    expected = "a number >= 0" + ("" if below is None else f" and < {below:g}")
    if finite and below is None and value > _LARGEST:
        expected += " and finite" if value == math.inf else f" and <= {_LARGEST:g}"
    elif value >= 0.0 and (below is None or value < below):
        return value
    raise AmpValueError(f"Invalid {title or _TITLES.get(name, f'{name} value')}: {value} ({name}), expected {expected}")


def _real(name: str, value: Any) -> float:
    if isinstance(value, Tensor):
        check_one_element(name, value)
        value = value.item()
    value = plain(value)
    if not isinstance(value, Real):
        raise AmpTypeError(f"{name} must be a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        raise AmpValueError(f"{name} is too large for a float") from None
    return value if isinstance(value, int) else number


def check_finite(name: str, value: Any) -> float:
    """A finite number of either sign. Reads a one-element tensor: host sync."""
    value = _real(name, value)
    if not math.isfinite(value):
        raise AmpValueError(f"Invalid {name} value: {value} ({name}), expected a finite number")
    return value


def check_flag(name: str, value: Any) -> bool:
    """True or False, also as 1 or 0 of any number type. No text: "False" would be true."""
    if value is True or value is False:
        return value
    number = plain(value)
    if isinstance(number, Real) and number in (0, 1):
        return bool(number)
    raise AmpTypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")


def check_betas(betas: Any) -> tuple[float, float]:
    """A pair of numbers >= 0 and < 1, in any sequence: a list of OmegaConf, an array, a tensor."""
    is_sequence = hasattr(betas, "__len__") and hasattr(betas, "__getitem__") and not isinstance(betas, _NO_PAIRS)
    if not is_sequence or getattr(betas, "shape", (2,)) != (2,) or len(betas) != 2:
        raise AmpTypeError(f"betas must be a pair of numbers, got {betas!r}")
    first, second = (check_number(f"betas[{i}]", betas[i], 1.0, f"beta parameter at index {i}") for i in range(2))
    return float(first), float(second)


def check_numbers(group: Group, spec: OpSpec, flags: Sequence[str]) -> None:
    """Checks lr, the numbers of an op, its flags and the seed. Tensors among them, except lr, become numbers."""
    rate = check_number("lr", group["lr"])
    group["lr"] = group["lr"] if isinstance(group["lr"], Tensor) else rate
    for number in spec.numbers:
        if number.type == "float" and not number.of:
            check = check_number if number.checked else check_finite
            group[number.name] = check(number.name, group[number.name])
        if number.name == "beta1":
            group["betas"] = check_betas(group["betas"])
    for name in flags:
        group[name] = check_flag(name, group[name])
    group["seed"] = check_seed(group["seed"])


def numbers_of(optimizer: Any, group: Group) -> dict[str, Any]:
    """The op's numbers for a group, except those of all optimizers."""
    spec = OPTIMIZERS[optimizer._op_of(group)]
    found = dict.fromkeys(spec.factors, 0.0)  # if no group needs the factor
    for number in spec.numbers:
        of = number.of
        if isinstance(of, tuple):
            value = group[of[0]][of[1]]
        elif callable(of):
            value = of(optimizer, group)
        else:
            value = getattr(optimizer, of) if of else group[number.name]
        found[number.name] = bool(value) if number.type == "bool" else value
    return found


def check_between_steps(group: Group, flags: Sequence[str]) -> None:
    """Checks options that user code may have changed since the last step, and that the ops would misread."""
    if isinstance(lr := group["lr"], Tensor):
        check_one_element("lr", lr)
    elif type(lr) is not float:
        group["lr"] = _real("lr", lr)
    for name in flags:
        if group[name] is not True and group[name] is not False:
            check_flag(name, group[name])
    if "betas" in group:
        betas = group["betas"]
        if betas.__class__ is tuple and len(betas) == 2:
            first, second = betas
            if first.__class__ is float is second.__class__ and 0.0 <= first < 1.0 and 0.0 <= second < 1.0:
                return
        group["betas"] = check_betas(betas)


def check_seed(seed: Any) -> int:
    try:
        number: int = index("" if isinstance(seed, (bool, Tensor)) else seed)  # type: ignore[arg-type]
    except TypeError:
        raise AmpTypeError(f"seed must be an int, got {type(seed).__name__}") from None
    if not 0 <= number < 2**62:
        raise AmpValueError(f"seed is {number}, expected 0 to 2**62 - 1")
    return number


def _flags_of(spec: OpSpec) -> tuple[str, ...]:
    numbers = [number.name for number in spec.numbers]
    flags = [number.name for number in spec.numbers if number.type == "bool" and not number.of]
    return "maximize", *flags, *(s.if_set for s in spec.states if s.if_set and s.if_set not in numbers)


# The bool options of a group that an op steps. No cache: torch.compile warns of them.
FLAGS = {name: _flags_of(spec) for name, spec in OPTIMIZERS.items()}


def check_choice(name: str, value: Any, choices: tuple) -> Any:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise AmpValueError(f"{name} is {value!r}, expected {' or '.join(map(repr, choices))}")
    return value


def param_name(groups: list[Group], g: int, i: int) -> str:
    """The name of a parameter in errors."""
    names = groups[g].get("param_names")
    return f"param_groups[{g}]['params'][{i}]" + (f" ({names[i]})" if names else "")


def refuse_sparse(of: str, name: str) -> None:
    raise AmpError(
        f"{of} does not support sparse gradients, and {name} has one. Build its layer with sparse=False, or pass the "
        "parameter to torch.optim.SparseAdam or torch.optim.SGD."
    )


def with_grads(of: str, groups: list[Group]) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """The places (g, i) of parameters with a gradient, these, and their gradients. Refuses sparse ones."""
    for g, group in enumerate(groups):
        for i, p in enumerate(group["params"]):
            if (grad := p.grad) is not None:
                if grad.layout is not torch.strided:
                    refuse_sparse(of, param_name(groups, g, i))
                yield g, i, p, grad


def refuse_dtype(of: str, name: str, dtype: torch.dtype) -> None:
    """Raises AmpValueError for a parameter whose dtype is not in ``KERNEL_DTYPES``."""
    if dtype.is_complex:
        raise AmpValueError(
            f"{of} does not support complex parameters, and {name} is one. Make the parameter "
            "nn.Parameter(torch.view_as_real(values)), and call torch.view_as_complex(parameter) in forward."
        )
    raise AmpValueError(
        f"{of} requires float32, float16, bfloat16 or float64 parameters, and {name} is {dtype}. Leave it out. If the "
        "model has frozen, quantized weights, pass [p for p in model.parameters() if p.requires_grad]."
    )


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """The result of the closure of a step, with gradients enabled. None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
