"""Checks of what an optimizer is told: numbers by name, as torch.optim words them, and parameters by place."""

from __future__ import annotations

from numbers import Real
from typing import Any

from torch import Tensor

from ampctx._errors import AmpError, AmpTypeError, AmpValueError

Group = dict[str, Any]

_TITLES = {"lr": "learning rate", "eps": "epsilon value"}


def check_lr(lr: Any) -> float | Tensor:
    """A number >= 0, or a one-element tensor holding one: reading it is a host sync."""
    if isinstance(lr, Tensor):
        check_one_element("lr", lr)
        check_number("lr", lr.item())
        return lr
    return check_number("lr", lr)


def check_one_element(name: str, value: Tensor) -> None:
    if value.numel() != 1:
        raise AmpValueError(f"Tensor {name} must be 1-element: {name} has {value.numel()} elements")


def check_number(name: str, value: Any, below: float | None = None, title: str | None = None) -> float:
    """A number >= 0, and less than ``below`` if that is given. A one-element tensor is read, which is a host sync."""
    if isinstance(value, Tensor):
        check_one_element(name, value)
        value = value.item()
    if not isinstance(value, Real):
        raise AmpTypeError(f"{name} must be a number, got {type(value).__name__}")
    value = value if isinstance(value, int) else float(value)
    expected = "a number >= 0" + ("" if below is None else f" and < {below:g}")
    if not (value >= 0.0 and (below is None or value < below)):
        raise AmpValueError(
            f"Invalid {title or _TITLES.get(name, f'{name} value')}: {value} ({name}), expected {expected}"
        )
    return value


def check_betas(betas: Any) -> tuple[float, float]:
    """A pair of numbers from 0 to below 1."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise AmpTypeError(f"betas must be a pair of numbers, got {betas!r}")
    first, second = (
        check_number(f"betas[{i}]", beta, below=1.0, title=f"beta parameter at index {i}")
        for i, beta in enumerate(betas)
    )
    return first, second


def check_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise AmpTypeError(f"seed must be an int, got {type(seed).__name__}")
    if not 0 <= seed < 2**62:
        raise AmpValueError(f"seed is {seed}, expected 0 to 2**62 - 1")
    return seed


def check_choice(name: str, value: Any, choices: tuple) -> Any:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise AmpValueError(f"{name} is {value!r}, expected {' or '.join(map(repr, choices))}")
    return value


def param_name(groups: list[Group], g: int, i: int) -> str:
    """How errors call a parameter."""
    names = groups[g].get("param_names")
    return f"param_groups[{g}]['params'][{i}]" + (f" ({names[i]})" if names else "")


def refuse_sparse(of: str, name: str) -> None:
    raise AmpError(
        f"{of} does not support sparse gradients, and {name} has one: build its layer with sparse=False, or give the "
        "parameter to torch.optim.SparseAdam or torch.optim.SGD"
    )


def refuse_complex(of: str, name: str) -> None:
    raise AmpValueError(
        f"{of} does not support complex parameters, and {name} is one: give torch.view_as_real of it to the optimizer"
    )


def refuse_amsgrad(optimizer: str, amsgrad: bool) -> None:
    if amsgrad:
        raise AmpError(f"{optimizer} does not support the AMSGrad variant. FusedAdam does.")
