"""amp_C's scale, axpby, norms and update_scale_hysteresis, with the cases of apex's own suites at smaller sizes."""

import itertools
import math

import amp_C
import pytest
import torch
from apex.multi_tensor_apply import MultiTensorApply
from kernel_cases import DEVICES, FLOATS, SIZES, assert_lists, assert_same, copies, flag, randn

PAIRS = [(777, 555), (555, 2049), (2049, 555), (555, 2048), (3333, 33), (1, 1)]
APPLIERS = [MultiTensorApply(chunk) for chunk in (2048 * 32, 333, 33333)]
PLACES = {"first": (0, 0), "last": (-1, -1), "middle": (5, 100)}
NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def many(pair, repeat, value, dtype, device="cpu"):
    """``repeat`` tensors of each of two sizes, all of one value."""
    return [torch.full((n,), value, dtype=dtype, device=device) for _ in range(repeat) for n in pair]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=["int32", "float32"])
def buf(request, device):
    return flag(dtype=getattr(torch, request.param), device=device)


# --- scale ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True], ids=["out", "in-place"])
@pytest.mark.parametrize("dst", FLOATS)
@pytest.mark.parametrize("src", FLOATS)
def test_downscale(device, buf, src, dst, in_place):
    if in_place and src != dst:
        src = dst
    for pair, repeat, applier in itertools.product(PAIRS, (1, 6), APPLIERS):
        given = many(pair, repeat, 4.0, FLOATS[src], device)
        out = given if in_place else many(pair, repeat, 0.0, FLOATS[dst], device)
        assert applier(amp_C.multi_tensor_scale, buf, [given, out], 1.0 / 4.0) is None
        assert all(bool((t == 1).all()) for t in out)
    assert buf.item() == 0


@pytest.mark.parametrize("bad", NON_FINITE)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", FLOATS)
def test_scale_flags_what_is_not_finite_and_hands_it_on(buf, device, kind, place, bad):
    tensor, element = PLACES[place]
    for repeat in (3, 6):
        given = many((777, 555), repeat, 4.0, FLOATS[kind], device)
        out = many((777, 555), repeat, 0.0, torch.float32, device)
        given[tensor][element] = NON_FINITE[bad]
        buf.zero_()
        amp_C.multi_tensor_scale(65536, buf, [given, out], 0.25)
        assert buf.tolist() == [1]
        assert_lists([t.nan_to_num() for t in out], [(t.double() * 0.25).float().nan_to_num() for t in given])


def test_scale_watches_the_input_alone(buf, device):
    """A finite number that becomes inf on the way to fp16 is not told of, as in apex."""
    out = torch.zeros(3, dtype=torch.float16, device=device)
    amp_C.multi_tensor_scale(65536, buf, [[torch.full((3,), 60000.0, device=device)], [out]], 2.0)
    assert out.isinf().all()
    assert buf.item() == 0


# --- axpby ------------------------------------------------------------------------------------------------------------

IN_PLACE = ["out", "into-x", "into-y"]
FORMATS = {"last": torch.channels_last, "contiguous": torch.contiguous_format}


@pytest.mark.parametrize("where", IN_PLACE)
@pytest.mark.parametrize("kinds", list(itertools.product(FLOATS, repeat=3)), ids="-".join)
def test_axpby(kinds, where):
    buf = flag()
    x_type, y_type, out_type = (FLOATS[kind] for kind in kinds)
    for pair, applier in itertools.product(PAIRS[:3], APPLIERS[:2]):
        x, y = many(pair, 3, 4.0, x_type), many(pair, 3, 16.0, y_type)
        out = {"into-x": x, "into-y": y, "out": many(pair, 3, 9.0, out_type)}[where]
        applier(amp_C.multi_tensor_axpby, buf, [x, y, out], 2.0, 8.0, -1)
        assert all(bool((t == 136).all()) for t in out)
    assert buf.item() == 0


@pytest.mark.parametrize("formats", list(itertools.product(FORMATS, repeat=3)), ids="-".join)
def test_axpby_goes_by_index_whatever_the_memory_formats(formats):
    shapes = [(2, 16, 4, 4), (1, 3, 5, 7), (4, 1, 1, 1)]
    x, y, out = (
        [t.to(memory_format=kind) for t in randn(shapes, seed=i)] for i, kind in enumerate(map(FORMATS.get, formats))
    )
    strides = [t.stride() for t in out]
    amp_C.multi_tensor_axpby(65536, flag(), [x, y, out], 2.0, -0.5, -1)
    assert_lists(out, [2 * a.double() - 0.5 * b.double() for a, b in zip(x, y, strict=True)])
    assert [t.stride() for t in out] == strides


@pytest.mark.parametrize(("arg_to_check", "watched"), [(-1, "xy"), (0, "x"), (1, "y")])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bad", NON_FINITE)
@pytest.mark.parametrize("which", ["x", "y"])
def test_axpby_flags_the_argument_it_watches(buf, device, which, bad, place, arg_to_check, watched):
    lists = {name: many((777, 555), 3, 1.0, torch.float16, device) for name in ("x", "y", "out")}
    tensor, element = PLACES[place]
    lists[which][tensor][element] = NON_FINITE[bad]
    amp_C.multi_tensor_axpby(65536, buf, list(lists.values()), 2.0, 1.0, arg_to_check)
    assert buf.tolist() == [int(which in watched)]


# --- norms ------------------------------------------------------------------------------------------------------------


def norm_calls(tensors, scale):
    """Every norm function on clones of the tensors, and what its norm is multiplied with."""
    inv_scale = torch.tensor([scale], device=tensors[0].device)
    out = [torch.empty_like(t) for t in tensors]
    return {
        "l2norm": (amp_C.multi_tensor_l2norm, [tensors], (), 1.0),
        "l2norm_mp": (amp_C.multi_tensor_l2norm_mp, [tensors], (), 1.0),
        "l2norm_scale": (amp_C.multi_tensor_l2norm_scale, [tensors, out], (scale,), 1.0),
        "unscale_l2norm": (amp_C.multi_tensor_unscale_l2norm, [tensors], (inv_scale,), scale),
    }


NORMS = list(norm_calls([torch.ones(1)], 1.0))


@pytest.mark.parametrize("per_tensor", [True, False, None])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("name", NORMS)
def test_norms(buf, device, name, kind, sizes, per_tensor):
    tensors = randn(SIZES[sizes], FLOATS[kind], device=device)
    before = copies([tensors])
    op, lists, args, factor = norm_calls(tensors, 0.25)[name]
    total, each = op(65536, buf, lists, *args, per_tensor)
    norms = torch.stack([t.double().norm() for t in tensors]) * factor
    torch.testing.assert_close(total, norms.norm().reshape(1).float())
    torch.testing.assert_close(each, norms.float() if per_tensor else torch.zeros(0, device=device))
    assert_same([tensors], before)
    if name == "l2norm_scale":
        assert_lists(lists[1], [t.double() * 0.25 for t in tensors])
    assert buf.item() == 0


@pytest.mark.parametrize("preset", [0, 1])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bad", NON_FINITE)
@pytest.mark.parametrize("name", NORMS)
def test_norms_raise_the_flag_and_never_lower_it(name, bad, place, preset):
    tensors = many((777, 555), 3, 1.0, torch.float16)
    buf = flag(preset)
    op, lists, args, _ = norm_calls(tensors, 0.5)[name]
    op(65536, buf, lists, *args, True)
    assert buf.tolist() == [preset]
    tensor, element = PLACES[place]
    tensors[tensor][element] = NON_FINITE[bad]
    total, each = op(65536, buf, lists, *args, True)
    assert buf.tolist() == [1]
    assert not total.isfinite().any()
    assert each.isfinite().sum() == 5


def test_norm_beyond_fp32_is_infinite_and_no_overflow_of_a_gradient():
    buf = flag()
    assert amp_C.multi_tensor_l2norm(65536, buf, [[torch.full((4,), 2e38)]], False)[0].isinf().all()
    assert buf.item() == 0


def test_norms_of_mixed_types_and_layouts_are_in_the_order_of_the_list():
    """apex reads all of a list as the type of its first tensor."""
    last = randn([(2, 3, 4, 4)], seed=3)[0].to(memory_format=torch.channels_last)
    tensors = [t for kind in FLOATS.values() for t in randn([5, 0, 300], kind)] + [last, last[:, :, ::2]]
    tensors = tensors[::2] + tensors[1::2]
    total, each = amp_C.multi_tensor_l2norm(65536, flag(), [tensors], True)
    norms = torch.stack([t.double().norm() for t in tensors])
    torch.testing.assert_close(each, norms.float())
    torch.testing.assert_close(total, norms.norm().reshape(1).float())
    torch.testing.assert_close(amp_C.multi_tensor_l2norm(65536, flag(), [tensors], False)[0], total)


def test_l2norm_scale_in_place_takes_the_norm_of_before():
    tensors = randn([7, 33])
    (before,) = copies([tensors])
    total, _ = amp_C.multi_tensor_l2norm_scale(65536, flag(), [tensors, tensors], 2.0, False)
    torch.testing.assert_close(total, torch.cat(before).double().norm().reshape(1).float())
    assert_lists(tensors, [t.double() * 2 for t in before])


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
