"""The ops that check gradients and then update the loss scale: to the last bit what the two ops do apart."""

from functools import partial

import pytest
import torch
from backends import NON_FINITE, SIZES

RULE = {"growth_interval": 2, "growth_factor": 1.9, "backoff_factor": 0.4}
LISTS = {name: sizes for name, sizes in SIZES.items() if name not in ("20k-tiny", "one-large")}


def state_of(backend, scale=1024.0, growth=1, left=1):
    trackers = (torch.full((), n, dtype=torch.int32, device=backend.device) for n in (growth, left))
    return [torch.full((), scale, device=backend.device), *trackers]


def scale_both(backend, tensors, flag, state, updates):
    out = [torch.zeros_like(t) for t in tensors]
    if updates:
        backend.scale_and_update(tensors, out, flag, 0.5, state, **RULE)
    else:
        backend.scale(tensors, out, flag, 0.5)
    return out


def without_second_norm(found):
    norm, each, again = found
    assert torch.equal(norm.view(1).view(torch.uint8), again.view(1).view(torch.uint8))
    assert norm.data_ptr() != again.data_ptr()
    return [norm, each]


def norms(backend, tensors, flag, state, updates, per_tensor=True):
    if updates:
        return without_second_norm(backend.l2norm_and_update(tensors, flag, 0.5, state, per_tensor, **RULE))
    return list(backend.l2norm(tensors, flag, 0.5, per_tensor))


every_check = pytest.mark.parametrize(
    "check", [scale_both, norms, partial(norms, per_tensor=False)], ids=["scale", "norms", "norm"]
)


def compare(backend, check, tensors, flag):
    """Runs both, and returns the flag after."""
    apart, together = state_of(backend), state_of(backend)
    flags = flag.clone(), flag.clone()
    expected = check(backend, tensors, flags[0], None, updates=False)
    backend.update_scale(*apart, flags[0], **RULE)
    found = check(backend, tensors, flags[1], together, updates=True)
    for a, b in zip([*expected, *apart, flags[0]], [*found, *together, flags[1]], strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.nan_to_num(nan=-1), b.nan_to_num(nan=-1))
    assert together[0].item() != 1024, "the scale grows or falls"
    return flags[1].item()


@every_check
@pytest.mark.parametrize("sizes", LISTS.values(), ids=LISTS.keys())
def test_clean_gradients(backend, check, sizes):
    assert compare(backend, check, backend.randn(sizes), backend.flag()) == 0


@every_check
@pytest.mark.parametrize("bad", NON_FINITE.values(), ids=NON_FINITE.keys())
@pytest.mark.parametrize("place", [0, 4000, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_overflow(backend, check, bad, place, dtype):
    (whole,) = backend.randn([7053], torch.float16)
    whole[place] = bad
    tensors = list(whole.split([2049, 3, 5000, 1]))
    assert compare(backend, check, tensors, backend.flag(dtype=dtype)) == 1


@every_check
@pytest.mark.parametrize("sizes", [[], [0], [5, 3000]])
def test_a_flag_that_is_set_before(backend, check, sizes):
    """By an earlier check of the same gradients."""
    assert compare(backend, check, backend.randn(sizes), backend.flag(1)) == 1


@every_check
def test_repeated_calls(backend, check):
    """What blocks count by is as it was after each call."""
    tensors, state = backend.randn([7000, 1, 9000]), state_of(backend, growth=0)
    first = check(backend, tensors, backend.flag(), state, updates=True)
    for i in range(2, 8):
        again = check(backend, tensors, backend.flag(), state, updates=True)
        assert all(map(torch.equal, first, again))
        assert state[1].item() == i % 2
