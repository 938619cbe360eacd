"""apex's lists of an optimizer's parameters, by param group. bfloat16 counts as fp16."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Groups = list[list[Tensor]]
# From a master to its parameter in the model.
ModelOf = Mapping[Tensor, Tensor]


def fp16_groups(groups: Groups, model_of: ModelOf) -> Groups:
    """The 16-bit parameters of the model that have masters."""
    return [[model_of[p] for p in group if p in model_of] for group in groups]


def fp32_from_fp16_groups(groups: Groups, model_of: ModelOf) -> Groups:
    """Their masters, in the same order."""
    return [[p for p in group if p in model_of] for group in groups]


def fp32_from_fp32_groups(groups: Groups, model_of: ModelOf) -> Groups:
    """The trainable parameters without a master."""
    return [[p for p in group if p not in model_of and p.requires_grad] for group in groups]


def flat(groups: Groups) -> list[Tensor]:
    return [p for group in groups for p in group]
