import apex_C
import pytest
import torch
from kernel_cases import DEVICES, FLOATS, randn

from ampctx._errors import AmpTypeError, AmpValueError

META = torch.ones(2, device="meta")
SHAPES = [(2, 3), (), (0, 4), (5,), (2, 3, 4, 4)]


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("device", DEVICES)
def test_there_and_back(device, kind):
    tensors = randn(SHAPES, FLOATS[kind], device=device)
    flat = apex_C.flatten(tensors)
    assert flat.tolist() == [x for t in tensors for x in t.reshape(-1).tolist()]
    assert flat.dtype == FLOATS[kind]
    back = apex_C.unflatten(flat, tensors)
    assert isinstance(back, list)
    assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))


def test_parts_are_views():
    flat = torch.zeros(8)
    first, second = apex_C.unflatten(flat, [torch.ones(2, 2), torch.ones(3, dtype=torch.float16)])
    first.fill_(1)
    second.fill_(2)
    assert flat.tolist() == [1, 1, 1, 1, 2, 2, 2, 0]
    assert apex_C.unflatten(flat, []) == []


def test_a_single_tensor_shares_its_memory_if_it_is_in_row_major_order():
    (t,) = randn([(2, 3, 4, 4)])
    assert torch.equal(apex_C.flatten([t.to(memory_format=torch.channels_last)]), t.reshape(-1))
    apex_C.flatten([t]).fill_(1)
    assert t.sum() == 96


def test_gradients_go_through():
    tensors = [torch.ones(2, 2, requires_grad=True), torch.ones(3, requires_grad=True)]
    (apex_C.flatten(tensors) * torch.arange(7.0)).sum().backward()
    assert tensors[1].grad.tolist() == [4, 5, 6]


@pytest.mark.parametrize(
    ("name", "args", "kind", "message"),
    [
        ("flatten", ([],), AmpValueError, "tensors is empty, expected one tensor or more"),
        ("flatten", (torch.ones(2),), AmpTypeError, "tensors must be a list of tensors, got a tensor"),
        ("flatten", ([torch.ones(2), None],), AmpTypeError, r"tensors\[1\] must be a tensor, got NoneType"),
        ("flatten", ([torch.ones(2), META],), AmpValueError, r"tensors\[1\] is on meta, and tensors\[0\] is on cpu"),
        ("unflatten", (torch.ones(2, 2), []), AmpValueError, "flat has 2 dimensions, expected 1"),
        ("unflatten", (torch.ones(2), [torch.ones(3)]), AmpValueError, "flat has 2 elements, tensors have 3"),
    ],
)
def test_errors(name, args, kind, message):
    with pytest.raises(kind, match=f"^{name}: {message}"):
        getattr(apex_C, name)(*args)
