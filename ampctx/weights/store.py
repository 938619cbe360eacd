"""The part of an fp32 weight that the state of its 16-bit parameter keeps, beyond the 16 bits of the parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx.kernels.plan import marks
from ampctx.kernels.reference_steps import join, spacing, split


class Store(NamedTuple):
    """One way to keep it.

    mode: as the ops and ``layout_of`` name it. key: in the state. dtype: what is kept, None for that of the parameter.
    fp32: the weight of (parameter, kept): ``kept`` itself, or a new tensor.
    resync: (parameter, kept) after a write to the parameter: where it is not the rounded weight, it is the weight.
    divided: (fp32 weight, dtype, what the weight was made with, if anything) as (parameter, kept).
    """

    mode: str
    key: str
    dtype: torch.dtype | None
    fp32: Callable[[Tensor, Tensor], Tensor]
    resync: Callable[[Tensor, Tensor], object]
    divided: Callable[[Tensor, torch.dtype, Tensor | None], tuple[Tensor, Tensor]]


@torch.no_grad()
def resynced(p: Tensor, master: Tensor) -> Tensor:
    """The master where the model weight is the rounded master, elsewhere the model weight. On the model's device."""
    master = master.to(p.device)
    return torch.where(master.to(p.dtype) == p, master, p.to(master.dtype))


def _resync_remainder(p: Tensor, kept: Tensor) -> None:
    # Any 16 bits fit the weight, except those that turn a zero or an infinity into nan.
    kept.masked_fill_(torch.isnan(join(p, kept)) & ~torch.isnan(p), 0)


def _resync_compensation(p: Tensor, kept: Tensor) -> None:
    # Rounding to nearest leaves at most half a unit in the last place.
    kept.masked_fill_(~(2 * kept.float().abs() <= spacing(p.detach())), 0)


def _compensated(weight: Tensor, dtype: torch.dtype, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    if kept is not None:
        # The sum is off by less than a bit of fp32, so the difference rounds to the parameter itself.
        return (weight - kept.float()).to(dtype), kept
    rounded = weight.to(dtype)
    rest = weight - rounded.float()
    return rounded, torch.where(torch.isfinite(rest), rest, 0).to(dtype)


# The fp32 weight; the 16 bits that a bf16 weight lacks of fp32; the rounding error, in 16 bits.
COPY = Store(
    "copy",
    "master_param",
    torch.float32,
    fp32=lambda p, kept: kept,
    resync=lambda p, kept: kept.copy_(resynced(p, kept)),
    divided=lambda weight, dtype, kept: (weight.to(dtype), weight),
)
SPLIT = Store("split", "remainder", torch.int16, join, _resync_remainder, lambda weight, dtype, kept: split(weight))
KAHAN = Store(
    "kahan", "compensation", None, lambda p, kept: p.float() + kept.float(), _resync_compensation, _compensated
)
STORES = {store.mode: store for store in (COPY, SPLIT, KAHAN)}
# mode -> key
EXTRAS = {mode: store.key for mode, store in STORES.items()}


def joined(p: Tensor, state: Mapping[str, Any]) -> Tensor | None:
    """The fp32 weight of a parameter by its state, on the state's device. None if the state keeps nothing of it."""
    for store in STORES.values():
        if store.key in state:
            return store.fp32(p.detach().to(state[store.key].device), state[store.key])
    return None


def follow(p: Tensor, state: Mapping[str, Any], seen: MutableMapping[Tensor, bytes]) -> None:
    """Resyncs a state from a weight that was changed. ``seen``: the marks of weights that agree."""
    if seen.get(p) != (now := marks([p])):
        seen[p] = now
        for store in STORES.values():
            if store.key in state:
                store.resync(p, state[store.key])
