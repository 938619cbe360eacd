"""The loops over lists of tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampctx.kernels import tensor_loops

COUNT = 100


def params(count=COUNT):
    return [nn.Parameter(torch.full((3,), float(i))) for i in range(count)]


class OwnGrad(nn.Parameter):
    @property
    def grad(self):
        return torch.ones(3)

    @grad.setter
    def grad(self, value):
        self.was_set = value


@pytest.mark.parametrize(
    "other",
    [torch._neg_view(torch.ones(3)), torch.ones(3, dtype=torch.complex64).conj(), torch._efficientzerotensor(3)],
    ids=["negated", "conjugated", "zero"],
)
def test_values_that_are_not_those_in_memory_are_seen(other):
    tensors = [*params(), torch.ones(2, dtype=torch.complex64), nn.Parameter(torch.ones(3)), torch.ones(())]
    assert tensor_loops.all_resolved(tensors)
    assert not tensor_loops.all_resolved([*tensors, other])
    assert not tensor_loops.all_resolved([nn.Parameter(other), *tensors])
    # The library does not know the type.
    assert tensor_loops.all_resolved([*tensors, OwnGrad(torch.ones(3))])
    assert not tensor_loops.all_resolved([*tensors, OwnGrad(other)])


def test_gradients_are_looked_for_and_cleared():
    tensors = [*params(), nn.Parameter(torch.ones(3)), OwnGrad(torch.ones(3))]
    assert tensor_loops.have_no_grad(tensors, True)
    assert not tensor_loops.have_no_grad(tensors, False)  # that of OwnGrad
    assert tensor_loops.have_no_grad(tensors[:-1], False)
    for tensor in (tensors[0], tensors[COUNT - 1], tensors[COUNT]):
        tensor.grad = torch.ones(3)
        assert not tensor_loops.have_no_grad(tensors[:-1], True)
        assert not tensor_loops.have_no_grad(tensors[:-1], False)
        tensor_loops.clear_grads(tensors)
        assert tensor.grad is None
    assert tensors[-1].was_set is None
    tensors[COUNT].grad, tensors[-1].was_set = torch.ones(3), 1
    tensor_loops.clear_grads(tensors)
    assert tensors[COUNT].grad is None
    assert tensors[-1].was_set is None
    assert tensor_loops.have_no_grad([], False)


@pytest.mark.parametrize("stored", [True, False])
def test_what_is_no_tensor_has_no_gradient_to_look_for(stored):
    with pytest.raises((AttributeError, TypeError)):
        tensor_loops.have_no_grad([*params(), None], stored)
    with pytest.raises(AttributeError):
        tensor_loops.clear_grads([*params(), None])


@pytest.mark.parametrize("count", [0, 1, 512, 1300])
def test_each_version_is_bumped_once(count):
    tensors = [torch.ones(1) for _ in range(count)]
    tensor_loops.bump_versions(tuple(tensors))
    assert [t._version for t in tensors] == [1] * count


def test_versions_of_all_kinds_of_tensors_are_bumped():
    class Mine(torch.Tensor):
        pass

    whole = torch.ones(4)
    tensors = [
        *params(3),
        nn.Parameter(torch.ones(3)),
        torch.ones(3).as_subclass(Mine),
        whole[1:],
        OwnGrad(torch.ones(3)),
    ]
    former = [t._version for t in tensors]
    tensor_loops.bump_versions(tensors)
    assert [t._version for t in tensors] == [version + 1 for version in former]
    assert whole._version == former[5] + 1
    weight = tensors[0]
    loss = (weight * weight).sum()
    tensor_loops.bump_versions([weight])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_of_inference_mode_has_no_version():
    with torch.inference_mode():
        tensor = torch.ones(3)
    other = torch.ones(3)
    tensor_loops.bump_versions([other, tensor])
    assert other._version == 1


def test_gradients_of_a_backward_are_seen_and_gone():
    tensors = params(3)
    assert tensor_loops.have_no_grad(tensors, False)
    sum(p.sum() for p in tensors[1:]).backward()
    assert not tensor_loops.have_no_grad(tensors, False)
    assert tensor_loops.have_no_grad(tensors[:1], False)
    for p in tensors:
        p.grad = None
    assert tensor_loops.have_no_grad(tensors, False)
    with torch.no_grad():
        assert tensor_loops.have_no_grad([torch.ones(3), tensors[0][1:]], False)
