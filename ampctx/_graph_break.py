"""The graph break of ``outside_of_graphs``. Imported only while code is compiled: it imports all of torch's
compiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


@partial(torch.compiler.disable, reason="amp keeps gradients apart and decides about steps on the host")
def call(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)
