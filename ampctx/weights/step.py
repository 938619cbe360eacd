"""The value that amp gives one step of an optimizer of ampctx: ``optimizer.step(given=Step(...))``.

For others that declare ``_step_supports_amp_scaling``, amp sets torch's attribute ``found_inf`` around a step. A
GradScaler sets ``found_inf`` and ``grad_scale``, also of the optimizers of ampctx.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ampctx.kernels.foreach import Factor, PerDevice
from ampctx.weights.pending import Pending


class Step(NamedTuple):
    """The input of one step, from amp or from torch's attributes ``found_inf`` and ``grad_scale``.

    found_inf: one element. If it is not 0, the step changes nothing. None: no check ran.
    models: fp32 master -> the 16-bit weight that the step writes with it.
    pending: 16-bit gradients in place of those of the masters, with their own factor.
    counts: the numbers in which an op call counts the step: four of ``count_skip``, and the scale. The first call on
        their device takes them out of the list.
    wrote: to call once each weight of ``models`` has been written with its master.
    inv_scale: the factor for the gradients in ``.grad``.
    unscales: write the unscaled gradients back to ``.grad``, as torch's fused optimizers do with a ``grad_scale``.
    """

    found_inf: PerDevice | None = None
    models: Mapping[Tensor, Tensor] = {}
    pending: Pending | None = None
    counts: list[Tensor] | None = None
    wrote: Callable[[], None] | None = None
    inv_scale: Factor = 1.0
    unscales: bool = False


# A function for steps that evaluate the model, which ask after it.
Given = Step | Callable[[], Step] | None


def takes_step(optimizer: Any) -> bool:
    """Whether the optimizer's own ``step`` has a parameter ``given``. Ask before amp replaces the method.

    An override in a subclass may have none, and a program may have put a function in place of the method.
    """
    step = getattr(optimizer, "__dict__", {}).get("step")
    if step is not None:
        return has_parameter.__wrapped__(step, "given")
    return has_parameter(getattr(type(optimizer), "step", None), "given")


def declares(optimizer: Any, name: str) -> bool:
    """Whether the optimizer's own class or attributes set the flag ``name`` to true.

    A wrapper that forwards unknown names would report the flag of the optimizer inside, which attributes set on the
    wrapper do not reach.
    """
    is_own = name in getattr(optimizer, "__dict__", ()) or hasattr(type(optimizer), name)
    return is_own and bool(getattr(optimizer, name))


@functools.cache
def has_parameter(step: Callable | None, name: str) -> bool:
    """Whether the ``step`` of a class takes it. Not for bound methods: the cache would keep their object alive."""
    return step is not None and name in inspect.signature(step).parameters
