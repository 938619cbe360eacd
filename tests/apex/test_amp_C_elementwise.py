"""amp_C's norms and update_scale_hysteresis, with the cases of apex's own suites at smaller sizes.

Four of its functions are ampctx's (test_names.py): tests/test_multi_tensor_apply.py and tests/ops have what they do.
"""

import math

import amp_C
import pytest
import torch
from kernel_cases import DEVICES, FLOATS, SIZES, assert_same, copies, flag, randn

PLACES = {"first": (0, 0), "last": (-1, -1), "middle": (5, 100)}
NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=["int32", "float32"])
def buf(request, device):
    return flag(dtype=getattr(torch, request.param), device=device)


# --- norms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_tensor", [True, False, None])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", FLOATS)
def test_norms(buf, device, kind, sizes, per_tensor):
    tensors = randn(SIZES[sizes], FLOATS[kind], device=device)
    before = copies([tensors])
    total, each = amp_C.multi_tensor_l2norm_mp(65536, buf, [tensors], per_tensor)
    norms = torch.stack([t.double().norm() for t in tensors])
    torch.testing.assert_close(total, norms.norm().reshape(1).float())
    torch.testing.assert_close(each, norms.float() if per_tensor else torch.zeros(0, device=device))
    assert_same([tensors], before)
    assert buf.item() == 0


@pytest.mark.parametrize("preset", [0, 1])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bad", NON_FINITE)
def test_norms_raise_the_flag_and_never_lower_it(bad, place, preset):
    tensors = [torch.ones(n, dtype=torch.float16) for n in (777, 555) * 3]
    buf = flag(preset)
    amp_C.multi_tensor_l2norm_mp(65536, buf, [tensors], True)
    assert buf.tolist() == [preset]
    tensor, element = PLACES[place]
    tensors[tensor][element] = NON_FINITE[bad]
    total, each = amp_C.multi_tensor_l2norm_mp(65536, buf, [tensors], True)
    assert buf.tolist() == [1]
    assert not total.isfinite().any()
    assert each.isfinite().sum() == 5


# --- update_scale_hysteresis ------------------------------------------------------------------------------------------


class Reference:
    """Section by section as the rule is told, in Python numbers; numbers below the normal ones are 0."""

    def __init__(self, scale, growth, backoff, interval, hysteresis):
        self.scale, self.clean, self.left = scale, 0, hysteresis
        self.growth, self.backoff, self.interval, self.hysteresis = growth, backoff, interval, hysteresis

    def update(self, found_inf):
        if found_inf > 0:
            self.left -= 1
            if self.left > 0:
                self.clean = 0
                return
        if found_inf:
            self.scale *= self.backoff
            if self.scale < torch.finfo(torch.float32).tiny:
                self.scale = 0.0
            self.clean = 0
        else:
            self.clean += 1
            if self.clean == self.interval:
                if self.scale * self.growth <= torch.finfo(torch.float32).max:
                    self.scale *= self.growth
                self.clean = 0
        if found_inf <= 0:
            self.left = self.hysteresis


@pytest.mark.parametrize("hysteresis", [1, 2, 10])
@pytest.mark.parametrize("interval", [1, 10])
@pytest.mark.parametrize("backoff", [0.5, 0.25])
@pytest.mark.parametrize("growth", [1.0, 2.0, 4.0])
def test_hysteresis(device, growth, backoff, interval, hysteresis):
    for init in (1.0, 1024.0, 65536.0):
        rule = (growth, backoff, interval, hysteresis)
        want = Reference(init, *rule)
        scale = torch.tensor([init], device=device)
        clean = torch.zeros(1, dtype=torch.int32, device=device)
        left = torch.full((1,), hysteresis, dtype=torch.int32, device=device)
        generator = torch.Generator().manual_seed(int(init))
        overflows = [1] * 12 + [0] * 25 + torch.randint(0, 2, (30,), generator=generator).tolist()
        # To 0 at a backoff of 0.25, and what is 0 stays 0; a run of clean steps grows to the largest scale.
        overflows += [1] * 80 if init == 1024 else [0] * 80
        for found_inf in overflows:
            given = torch.tensor([float(found_inf)], device=device)
            assert amp_C.update_scale_hysteresis(scale, clean, left, given, *rule) is scale
            want.update(found_inf)
            assert (scale.item(), clean.item(), left.item()) == (want.scale, want.clean, want.left)


@pytest.mark.parametrize(("found_inf", "want"), [(-1.0, (4.0, 0, 3)), (math.nan, (4.0, 0, 2))], ids=["negative", "nan"])
def test_hysteresis_of_odd_flags(found_inf, want):
    """Neither above 0 nor 0: the scale backs off at once; only what is not above 0 refills the tracker."""
    state = [torch.tensor([8.0]), torch.tensor([5], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)]
    amp_C.update_scale_hysteresis(*state, torch.tensor([found_inf]), 2.0, 0.5, 10, 3)
    assert tuple(t.item() for t in state) == want


def test_scale_does_not_grow_to_inf():
    state = [torch.tensor([3e38]), torch.tensor([9], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)]
    amp_C.update_scale_hysteresis(*state, torch.zeros(1), 2.0, 0.5, 10, 1)
    assert state[0].item() == torch.tensor(3e38).item()
    assert state[1].item() == 0


GOOD = [torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), torch.zeros(1)]


@pytest.mark.parametrize(
    ("i", "wrong", "message"),
    [
        (0, 1.0, "current_scale must be a tensor, got float"),
        (0, torch.ones(1).half(), "current_scale has dtype torch.float16, expected float32"),
        (1, torch.zeros(1), "growth_tracker has dtype torch.float32, expected int32"),
        (2, torch.zeros(2, dtype=torch.int32), "hysteresis_tracker has 2 elements, expected 1"),
        (3, torch.zeros(1, device="meta"), "found_inf is on meta, and current_scale is on cpu"),
        (3, torch.zeros(1).bool(), "found_inf has dtype torch.bool, expected float32 or int32"),
    ],
    ids=["number", "scale-type", "tracker-type", "elements", "device", "flag-type"],
)
def test_hysteresis_errors(i, wrong, message):
    with pytest.raises(RuntimeError, match=f"update_scale_hysteresis: {message}"):
        amp_C.update_scale_hysteresis(*GOOD[:i], wrong, *GOOD[i + 1 :], 2.0, 0.5, 10, 1)
