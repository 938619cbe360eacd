"""What the state of a 16-bit parameter keeps of its fp32 weight, beyond the 16 bits of the parameter."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ampctx.kernels.reference_steps import join, spacing, split


@torch.no_grad()
def resynced(p: Tensor, master: Tensor) -> Tensor:
    """The master where the model weight is the rounded master, elsewhere the model weight. On the model's device."""
    master = master.to(p.device)
    return torch.where(master.to(p.dtype) == p, master, p.to(master.dtype))


class Store(Protocol):
    """One way to keep it: ``mode`` as the ops and ``layout_of`` name it, ``key`` in the state."""

    mode: str
    key: str

    def dtype(self, of_param: torch.dtype) -> torch.dtype: ...
    def fp32(self, p: Tensor, kept: Tensor) -> Tensor:
        """The weight: ``kept`` itself, or a new tensor."""

    def resync(self, p: Tensor, kept: Tensor) -> None:
        """Follows a write to the parameter: where it is not the rounded weight, it is the weight."""

    def divided(self, weight: Tensor, dtype: torch.dtype, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """The parameter and what is kept of an fp32 weight. ``kept``: what the weight was made with, if anything."""


class _CopyStore:
    """The fp32 weight."""

    mode, key = "copy", "master_param"

    def dtype(self, of_param: torch.dtype) -> torch.dtype:
        return torch.float32

    def fp32(self, p: Tensor, kept: Tensor) -> Tensor:
        return kept

    def resync(self, p: Tensor, kept: Tensor) -> None:
        kept.copy_(resynced(p, kept))

    def divided(self, weight: Tensor, dtype: torch.dtype, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        return weight.to(dtype), weight


class _SplitStore:
    """The 16 bits that a bf16 weight lacks of fp32."""

    mode, key = "split", "remainder"

    def dtype(self, of_param: torch.dtype) -> torch.dtype:
        return torch.int16

    def fp32(self, p: Tensor, kept: Tensor) -> Tensor:
        return join(p, kept)

    def resync(self, p: Tensor, kept: Tensor) -> None:
        # Any 16 bits fit the weight, except those that turn a zero or an infinity into nan.
        kept.masked_fill_(torch.isnan(join(p, kept)) & ~torch.isnan(p), 0)

    def divided(self, weight: Tensor, dtype: torch.dtype, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        return split(weight)


class _KahanStore:
    """The rounding error, in 16 bits."""

    mode, key = "kahan", "compensation"

    def dtype(self, of_param: torch.dtype) -> torch.dtype:
        return of_param

    def fp32(self, p: Tensor, kept: Tensor) -> Tensor:
        return p.float() + kept.float()

    def resync(self, p: Tensor, kept: Tensor) -> None:
        # Rounding to nearest leaves at most half a unit in the last place.
        kept.masked_fill_(~(2 * kept.float().abs() <= spacing(p.detach())), 0)

    def divided(self, weight: Tensor, dtype: torch.dtype, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        if kept is not None:
            # The sum is off by less than a bit of fp32, so the difference rounds to the parameter itself.
            return (weight - kept.float()).to(dtype), kept
        rounded = weight.to(dtype)
        rest = weight - rounded.float()
        return rounded, torch.where(torch.isfinite(rest), rest, 0).to(dtype)


STORES: dict[str, Store] = {store.mode: store for store in (_CopyStore(), _SplitStore(), _KahanStore())}
# mode -> key
EXTRAS = {mode: store.key for mode, store in STORES.items()}


def joined(p: Tensor, state: Mapping[str, Any]) -> Tensor | None:
    """The fp32 weight of a parameter by its state, on the state's device. None if the state keeps nothing of it."""
    for store in STORES.values():
        if store.key in state:
            return store.fp32(p.detach().to(state[store.key].device), state[store.key])
    return None


def follow(p: Tensor, state: Mapping[str, Any], seen: MutableMapping[Tensor, int]) -> None:
    """Resyncs a state from a weight that was changed. ``seen``: the versions of weights that agree."""
    # _version is private; nothing public shows a write to a tensor without reading it.
    if seen.get(p) != p._version:
        seen[p] = p._version
        for store in STORES.values():
            if store.key in state:
                store.resync(p, state[store.key])
