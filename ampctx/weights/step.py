"""What an optimizer says about its step."""

from __future__ import annotations

from typing import Any


def declares(optimizer: Any, name: str) -> bool:
    """Whether the optimizer's own class or attributes set the flag ``name`` to true.

    A wrapper that forwards unknown names would report the flag of the optimizer inside, which attributes set on the
    wrapper do not reach.
    """
    is_own = name in getattr(optimizer, "__dict__", ()) or hasattr(type(optimizer), name)
    return is_own and bool(getattr(optimizer, name))


def takes_step(optimizer: Any) -> bool:
    return declares(optimizer, "_step_supports_model_params")


def keeps_fp32_state(optimizer: Any) -> bool:
    return declares(optimizer, "_state_is_fp32")


def steps_on_host(optimizer: Any) -> bool:
    return declares(optimizer, "_steps_on_host")
