"""The loops over lists of tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampctx.kernels import tensor_loops


class Mine(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "other",
    [torch._neg_view(torch.ones(3)), torch.ones(3, dtype=torch.complex64).conj(), torch._efficientzerotensor(3)],
    ids=["negated", "conjugated", "zero"],
)
def test_values_that_are_not_those_in_memory_are_seen(other):
    tensors = [nn.Parameter(torch.ones(3)), torch.ones(2, dtype=torch.complex64), torch.ones(()).as_subclass(Mine)]
    assert tensor_loops.all_resolved(tensors)
    assert not tensor_loops.all_resolved([*tensors, other])
    assert not tensor_loops.all_resolved([nn.Parameter(other), *tensors])


def test_versions_of_all_kinds_of_tensors_are_bumped_once():
    whole = torch.ones(4)
    weight = nn.Parameter(torch.ones(3))
    tensors = (weight, torch.ones(3).as_subclass(Mine), whole[1:])
    loss = (weight * weight).sum()
    former = [t._version for t in tensors]
    tensor_loops.bump_versions(tensors)
    assert [t._version for t in (*tensors, whole)] == [version + 1 for version in (*former, former[-1])]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_of_inference_mode_has_no_version():
    with torch.inference_mode():
        tensor = torch.ones(3)
    other = torch.ones(3)
    tensor_loops.bump_versions([other, tensor])
    assert other._version == 1
