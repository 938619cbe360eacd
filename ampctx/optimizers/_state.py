"""The entries of ``optimizer.state``: creates them at a parameter's first step, and resyncs masters from the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ampctx.kernels.reference import compute_dtype
from ampctx.kernels.reference_steps import join, spacing, split
from ampctx.optimizers._state_types import CODED, SCALES_OF, zero_scales

State = dict[str, Any]
# The state key of the extra precision of 16-bit parameters, by destination.
EXTRAS = {"copy": "master_param", "split": "remainder", "kahan": "compensation"}


def make_state(
    p: Tensor, state: State, needed: Mapping[str, torch.dtype | None], one_element: Collection[str], step: int
) -> None:
    """Creates missing entries.

    Args:
        needed: key -> dtype; None for that of arithmetic.
        step: the step count of a new parameter.
    """
    dtypes = {"remainder": torch.int16, "compensation": p.dtype, "master_param": torch.float32}
    for key, dtype in needed.items():
        if key in state:
            continue
        if key in one_element:
            state[key] = torch.full((), float(step if key == "step" else 0), dtype=torch.float32, device=p.device)
        elif key in SCALES_OF:
            state[key] = zero_scales(state[CODED[SCALES_OF[key]].codes_key])
        else:
            dtype = dtype or dtypes.get(key, compute_dtype(p))
            state[key] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
        if key == "master_param":
            state[key].copy_(p)


def follow(p: Tensor, state: State, seen: dict[Tensor, int]) -> None:
    """Resyncs from a weight that was changed: where it is not the rounded master, the master takes its value, and the
    compensation is dropped. ``seen``: the versions of weights that agree."""
    # _version is private; nothing public shows a write to a tensor without reading it.
    if seen.get(p) == p._version:
        return
    seen[p] = p._version
    if "remainder" in state:
        # Any 16 bits fit the weight, except those that turn a zero or an infinity into nan.
        made_nan = torch.isnan(join(p, state["remainder"])) & ~torch.isnan(p)
        state["remainder"].masked_fill_(made_nan, 0)
    if "compensation" in state:
        # Rounding to nearest leaves at most half a unit in the last place.
        left = state["compensation"]
        left.masked_fill_(~(2 * left.float().abs() <= spacing(p.detach())), 0)
    if "master_param" in state:
        master = state["master_param"]
        master.copy_(torch.where(master.to(p.dtype) == p, master, p.to(master.dtype)))


def joined(p: Tensor, state: State) -> Tensor | None:
    """The fp32 weight that a 16-bit parameter and its entry of ``EXTRAS`` stand for. None without an entry."""
    if "remainder" in state:
        return join(_beside(p, state["remainder"]), state["remainder"])
    if "compensation" in state:
        return _beside(p, state["compensation"]).float() + state["compensation"].float()
    return state.get("master_param")


def _beside(p: Tensor, entry: Tensor) -> Tensor:
    """The parameter on the device of its entry, which ``offload`` keeps on the CPU."""
    return p.detach().to(entry.device)


def divided(
    destination: str, weight: Tensor, dtype: torch.dtype, compensation: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The 16-bit parameter and its entry of ``EXTRAS`` for an fp32 weight: undoes ``joined``.

    ``compensation``: that of the sum ``weight``. None for another weight, which is rounded to the bits that both hold.
    """
    if destination == "split":
        return split(weight)
    if destination == "copy":
        return weight.to(dtype), weight
    if compensation is not None:
        # The sum is off by less than a bit of fp32, so the difference rounds to the parameter itself.
        return (weight - compensation.float()).to(dtype), compensation
    rounded = weight.to(dtype)
    rest = weight - rounded.float()
    return rounded, torch.where(torch.isfinite(rest), rest, 0).to(dtype)
