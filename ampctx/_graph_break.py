"""Imported where code is being compiled, and no earlier: it takes all of torch's compiler along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _call(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


call = torch.compiler.disable(_call, reason="amp keeps gradients apart and decides about steps on the host")
