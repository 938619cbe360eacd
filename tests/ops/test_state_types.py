"""State in bf16 or in 8-bit codes: every backend does what the reference does, to the last bit; and what that is."""

import pytest
import torch
from backends import COMPILED, refused
from optimizer_calls import ADAGRAD, ADAM, AMSGRAD, CODED, LION, bits, encoded, make_call, on_kernels

from ampctx.kernels import codes

pytestmark = pytest.mark.usefixtures("reference")


@pytest.mark.full(but=1)
@on_kernels
def test_many_tensors(backend):
    """Several launches, and tensors that no thread has alone."""
    sizes = [i % 131 for i in range(700)] + [5000]
    numbers = torch.tensor([7 * i for i, n in enumerate(sizes) if n], device=backend.device)
    call = make_call(backend, ADAM, sizes, state="8bit", stochastic_state=True, numbers=numbers)
    expected = call.expected()
    call.run(backend).assert_same(expected)


@pytest.mark.parametrize("shape", [(3, 5, 4, 6), (2, 64, 3, 3)], ids=str)
@on_kernels
def test_blocks_follow_the_memory_of_other_layouts(backend, shape):
    plain = make_call(backend, ADAM, [shape], state=torch.float32)
    call = make_call(backend, ADAM, [shape], state="8bit", stochastic_state=True)
    for name in ("grads", "params", "exp_avgs", "exp_avg_sqs"):
        call.lists[name] = [t.to(memory_format=torch.channels_last) for t in plain[name]]
    for name in ("exp_avgs", "exp_avg_sqs"):
        call.lists[name], call.lists[CODED[name].scales] = encoded(call[name], CODED[name].code)
    expected = call.expected(times=2)
    call.run(backend, times=2).assert_same(expected)
    assert call[CODED["exp_avgs"].scales][0].numel() == codes.blocks_of(call["grads"][0].numel())


@on_kernels
def test_random_bits_belong_to_the_number_of_a_parameter(backend):
    what = {"state": "mixed", "stochastic_state": True, "param": torch.bfloat16, "write_back": "stochastic"}
    call = make_call(backend, ADAM, [100, 0, 200], numbers=torch.tensor([3, 9], device=backend.device), **what)
    alone = make_call(backend, ADAM, [200], numbers=torch.tensor([9], device=backend.device), **what)
    for name in call.lists:
        alone.lists[name] = [t.clone() for t in call[name][2:]]
    call.run(backend), alone.run(backend)
    for name, tensors in alone.lists.items():
        for a, b in zip(tensors, call[name][2:], strict=True):
            assert torch.equal(bits(a), bits(b)), name


# --- the codes themselves ---------------------------------------------------------------------------------------------


def kept(backend, dtype, of_blocks, scales):
    """What a step makes of codes that keep their values: Lion with beta2 = 1, Adam with both betas 1."""
    optimizer = LION if dtype == torch.int8 else ADAM
    sizes = [codes.BLOCK * len(scales)]
    call = make_call(backend, optimizer, sizes, state="8bit")
    call.options.update(beta1=1.0, beta2=1.0)
    if optimizer is ADAM:
        call.options["bias_correction"] = False
    name = "exp_avgs" if dtype == torch.int8 else "exp_avg_sqs"
    call[name][0].copy_(of_blocks)
    call[CODED[name].scales][0].copy_(scales)
    call.run(backend)
    return call[name][0], call[CODED[name].scales][0]


@pytest.mark.parametrize("dtype", codes.DTYPES.values(), ids=codes.DTYPES)
@on_kernels
def test_codes_and_scales_survive_being_read_and_stored(backend, dtype):
    """All codes, and scales from 2e-18 to 1.8e19."""
    generator = torch.Generator().manual_seed(0)
    low, high = (-127, 128) if dtype == torch.int8 else (0, 256)
    scales = torch.cat([torch.logspace(-17.6, 19.2, 500), torch.tensor([0.0])]).to(backend.device)
    drawn = torch.randint(low, high, (len(scales), codes.BLOCK), generator=generator).to(dtype)
    drawn[:, 0] = high - 1  # the largest element has the scale
    drawn[-1] = 0
    assert {*drawn.flatten().tolist()} == {*range(low, high)}
    drawn = drawn.flatten().to(backend.device)
    found, of_blocks = kept(backend, dtype, drawn, scales)
    assert torch.equal(found, drawn)
    assert torch.equal(of_blocks, scales)


@pytest.mark.parametrize("dtype", codes.DTYPES.values(), ids=codes.DTYPES)
def test_bounds_of_codes(dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(codes.BLOCK * 1000, generator=generator) ** 3
    values = values * 2 - 1 if dtype == torch.int8 else values
    read = codes.decode(*codes.encode(values, dtype))
    if dtype == torch.int8:
        assert (read - values).abs().max() <= 0.0081 * values.abs().max()
        return
    largest = values.sqrt().view(-1, codes.BLOCK).amax(1).repeat_interleave(codes.BLOCK)
    off, part = (read.sqrt() - values.sqrt()).abs() / values.sqrt(), values.sqrt() / largest
    assert off[part > 0.25].max() <= 0.009
    assert off[part > 0.01].max() <= 0.042
    assert (read > 0).all(), "no square is lost"


@on_kernels
def test_rounding_is_right_on_average(backend):
    """A million draws: an element and its block's largest; the mean is off by less than five standard errors."""
    n = 1 << 20
    call = make_call(backend, LION, [n], state="8bit", stochastic_state=True, seed=3)
    call.options.update(beta1=1.0, beta2=0.0)
    call["grads"][0].fill_(0.1234)
    call["grads"][0][:: codes.BLOCK] = 2.0
    call.run(backend, inv_scale=1.0)
    m = call["exp_avgs"][0].view(-1, codes.BLOCK)[:, 1:].double()
    z = torch.tensor(0.1234, dtype=torch.float32).double() / 2
    y = 127 * 2 * z / (1 + z)
    assert sorted(m.unique().tolist()) == [y.floor(), y.ceil()]
    assert abs(m.mean() - y) < 5 * 0.5 / m.numel() ** 0.5

    call = make_call(backend, LION, [n], state=torch.bfloat16, stochastic_state=True, seed=3)
    call.options.update(beta1=1.0, beta2=0.0)
    call["grads"][0].fill_(0.1234)
    call.run(backend, inv_scale=1.0)
    m = call["exp_avgs"][0].double()
    assert len(m.unique()) == 2
    assert abs(m.mean() - 2 * z) < 5 * (m.max() - m.min()) / n**0.5


@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
@on_kernels
def test_a_value_that_is_not_finite_makes_its_block_nan_and_no_other(backend, value):
    call = make_call(backend, ADAM, [3 * codes.BLOCK], state="8bit", stochastic_state=True)
    call["grads"][0][codes.BLOCK] = value
    call.run(backend)
    for name in ("exp_avgs", "exp_avg_sqs"):
        scales = call[CODED[name].scales][0]
        assert torch.isnan(scales).tolist() == [False, True, False]
        assert not call[name][0][codes.BLOCK : 2 * codes.BLOCK].any()
        assert torch.isnan(codes.decode(call[name][0], scales)).sum() == codes.BLOCK


# --- errors -----------------------------------------------------------------------------------------------------------


def _edited(**edits):
    def edit(call):
        for name, change in edits.items():
            call.lists[name] = change(call[name])

    return edit


ERRORS = {
    "no-scales": (_edited(exp_avg_scales=lambda s: []), "exp_avg_scales has 0 tensors, grads has 2"),
    "dtype-of-scales": (_edited(exp_avg_sq_scales=lambda s: [t.half() for t in s]),
        "exp_avg_sq_scales[0] has dtype torch.float16, expected float32"),
    "size-of-scales": (_edited(exp_avg_scales=lambda s: [s[0], torch.cat([s[1], s[1]])]),
        "exp_avg_scales[1] has 4 elements, expected 2: one for each 64 of grads[1]"),
    "gaps-in-scales": (_edited(exp_avg_scales=lambda s: [s[0], s[1].repeat_interleave(2)[::2]]),
        "exp_avg_scales[1] is not contiguous"),
    "sparse-scales": (_edited(exp_avg_scales=lambda s: [s[0], s[1].to_sparse()]),
        "exp_avg_scales[1] is not a strided tensor"),
    "scales-without-codes": (_edited(exp_avgs=lambda m: [t.float() for t in m]),
        "exp_avg_scales has 2 tensors, expected none: exp_avgs has no codes"),
    "the-other-code": (_edited(exp_avgs=lambda m: [t.view(torch.uint8) for t in m]),
        "exp_avgs[0] has dtype torch.uint8, expected float32, float16"),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), ERRORS.values(), ids=ERRORS)
def test_refused(backend, edit, message):
    call = make_call(backend, ADAM, [3, 100], state="8bit", stochastic_state=True)
    edit(call)
    assert_refuses(backend, call, message)


def assert_refuses(backend, call, message):
    before = call.clone()
    with refused(backend, call.op, message):
        call.run(backend)
    if not any(t.is_sparse for _, t in call.tensors()):
        call.assert_same(before)


def test_codes_are_for_fp32_arithmetic(backend):
    call = make_call(backend, LION, [3], grad=torch.float64, state="8bit")
    of_lists = "grads[0] has dtype torch.float64"  # for backends that take none at all
    assert_refuses(backend, call, "exp_avgs in codes does not go with float64" if backend.fp64 else of_lists)
    call = make_call(backend, LION, [3], grad=torch.float64, state=torch.bfloat16, stochastic_state=True)
    assert_refuses(backend, call, "stochastic_state does not go with float64" if backend.fp64 else of_lists)


def test_maxima_and_sums_are_never_rounded_down(backend):
    call = make_call(backend, AMSGRAD, [3], stochastic_state=True)
    message = "stochastic_state does not go with max_exp_avg_sqs, which must not be rounded down"
    assert_refuses(backend, call, message)
    call = make_call(backend, ADAGRAD, [3], state=torch.bfloat16, stochastic_state=True)
    assert_refuses(backend, call, "stochastic_state does not go with sums, which must not be rounded down")


NUMBERS = {
    "dtype": (lambda d: torch.zeros(2, device=d), "numbers has dtype torch.float32, expected int64"),
    "count": (lambda d: torch.arange(3, device=d),
        "numbers has 3 elements, expected none or 2: one for each tensor with elements"),
    "gaps": (lambda d: torch.arange(4, device=d)[::2], "numbers is not contiguous"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "message"), NUMBERS.values(), ids=NUMBERS)
def test_numbers_that_are_refused(backend, make, message):
    call = make_call(backend, ADAM, [3, 0, 100], numbers=make(backend.device))
    assert_refuses(backend, call, message)


# --- what the rounding is for -----------------------------------------------------------------------------------------


def roots_of_squares(state, stochastic):
    """sqrt(v) after noise of size 1, then after ten times smaller noise, 1,500 steps of Adam each; beta2 = 0.999."""
    generator = torch.Generator().manual_seed(0)
    call = make_call(COMPILED, ADAM, [1024], state=state, counts=[0], stochastic_state=stochastic)
    for name in ("exp_avgs", "exp_avg_sqs"):
        for t in (*call[name], *call.lists[CODED[name].scales]):
            t.zero_()
    call.options.update(beta1=0.9, beta2=0.999)
    for size in (1.0, 0.1):
        for _ in range(1500):
            call["grads"][0].normal_(std=size, generator=generator)
            call.run(COMPILED, inv_scale=1.0)
    v = call["exp_avg_sqs"][0]
    return (v.float() if v.is_floating_point() else codes.decode(v, call["exp_avg_sq_scales"][0])).sqrt()


@pytest.fixture(scope="module")
def exact_roots():
    return roots_of_squares(torch.float32, False)


@pytest.mark.parametrize("state", [torch.bfloat16, "8bit"], ids=str)
def test_averages_of_squares_follow_gradients_that_shrink(state, exact_roots):
    """A step shrinks v by a thousandth. A place of bf16 is more, so rounding to nearest would never let it shrink."""
    ratio = roots_of_squares(state, True) / exact_roots
    assert ratio.mean() == pytest.approx(1.0, abs=0.03)
    assert ratio.min() > 0.7
