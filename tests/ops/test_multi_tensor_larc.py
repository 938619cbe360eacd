"""multi_tensor_larc on every backend, against the formula in fp64 and the reference."""

import pytest
import torch
from backends import ALL_FLOATS, COMPILED, FLOATS, SIZES, combination_id, combinations, compute_dtype
from optimizer_calls import LARC, MANY, bits, make_call, on_kernels

SMALL = [5, 0, 700, 1, 64]


def larc(g, w, lr, options):
    """The gradient afterwards. In fp64; rows of the last dimension are tensors."""
    o = options
    of_g, of_w = g.norm(dim=-1, keepdim=True), w.norm(dim=-1, keepdim=True)
    rate = o["trust_coefficient"] * of_w / (of_g + o["weight_decay"] * of_w + o["eps"])
    if o["clip"]:
        rate = (rate / lr).clamp(max=1)
    decay = -o["weight_decay"] if o["maximize"] else o["weight_decay"]
    return torch.where((of_g > 0) & (of_w > 0), rate * (g + decay * w), g)


@pytest.mark.parametrize("maximize", [False, True], ids=["down", "up"])
@pytest.mark.parametrize("clip", [False, True], ids=["scale", "clip"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("lr", [1e-4, 0.5], ids=["clipped", "below"])
def test_formula(backend, clip, weight_decay, lr, maximize):
    options = {"clip": clip, "weight_decay": weight_decay, "maximize": maximize}
    call = make_call(backend, LARC, [33, 1, 700, 2500, 0], **options)
    before = call.clone()
    call.run(backend, inv_scale=0.125, lr=lr)
    for got, g, w in zip(call["grads"], before["grads"], before["params"], strict=True):
        want = larc(g.double() * 0.125, w.double(), lr, call.options)
        torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-8)
        if clip and lr == 1e-4 and weight_decay == 0:
            assert torch.equal(got, g * 0.125)
    assert all(torch.equal(a, b) for a, b in zip(call["params"], before["params"], strict=True))


@pytest.mark.parametrize("sizes", [pytest.param(s, id=i) for i, s in SIZES.items() if i != "20k-tiny"])
@on_kernels
def test_sizes(backend, reference, sizes):
    if backend.name.startswith("emulated") and sizes == SIZES["one-large"]:
        sizes = [1 << 14]
    call = make_call(backend, LARC, sizes)
    expected = call.expected()
    call.run(backend).assert_agrees(expected)


def test_many_tensors(backend):
    """Several launches, each with the norms of its own tensors."""
    call = make_call(backend, LARC, [3] * MANY[backend.name])
    g, w = (torch.stack(call[name]).double() for name in ("grads", "params"))
    call.run(backend, inv_scale=0.5, lr=0.1)
    want = larc(g * 0.5, w, 0.1, call.options).float()
    torch.testing.assert_close(torch.stack(call["grads"]), want, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dtypes", combinations(ALL_FLOATS, 2), ids=combination_id)
@on_kernels
def test_dtypes(backend, reference, dtypes):
    call = make_call(backend, LARC, SMALL, grad=dtypes[0], param=dtypes[1])
    before = call.clone()
    if not backend.serves(*dtypes):
        with pytest.raises(RuntimeError, match="has dtype torch.float64, expected float32, float16 or bfloat16"):
            call.run(backend)
        call.assert_same(before)
        return
    expected = call.expected()
    call.run(backend).assert_agrees(expected)
    wide = compute_dtype(*dtypes)
    for got, g, w in zip(call["grads"], before["grads"], before["params"], strict=True):
        want = larc(g.to(wide).double() * 0.5, w.double(), 0.01, call.options)
        torch.testing.assert_close(got, want.to(got.dtype))


@pytest.mark.parametrize("dtypes", combinations(FLOATS, 2), ids=combination_id)
@on_kernels
def test_every_alignment(backend, reference, dtypes):
    """Gradients and params at every storage offset, not in step, and nothing written beside the gradients."""
    size, room = 43, 60
    whole = make_call(backend, LARC, [room] * 17, grad=dtypes[0], param=dtypes[1])
    views, beside = whole.clone(), whole.clone()
    for name, stride in (("grads", 1), ("params", 3)):
        for i, t in enumerate(whole[name]):
            views[name][i] = t[i * stride % 17 :][:size]
            beside[name][i][i * stride % 17 :][:size] = 0
    expected = views.expected()
    views.run(backend).assert_agrees(expected)
    for t, view, want in zip(whole["grads"], views["grads"], beside["grads"], strict=True):
        view.zero_()
        assert torch.equal(t, want)


def test_layouts(backend):
    call = make_call(backend, LARC, [(2, 3, 4, 5), (6, 4)])
    flat = call.clone()
    for name in ("grads", "params"):
        call[name][0] = call[name][0].to(memory_format=torch.channels_last)
        call[name][1] = call[name][1].t().contiguous().t()
    call.run(backend)
    flat.run(backend)
    torch.testing.assert_close(call["grads"], flat["grads"])
    assert call["grads"][0].is_contiguous(memory_format=torch.channels_last)


def test_tensors_with_a_norm_of_zero_are_unscaled_alone(backend):
    call = make_call(backend, LARC, [700, 5, 33], weight_decay=0.1, grad=torch.float16)
    call["params"][0].zero_()
    call["grads"][1].zero_()
    before = call.clone()
    call.run(backend, inv_scale=0.25)
    assert torch.equal(call["grads"][0], before["grads"][0] * 0.25)
    assert not call["grads"][1].any()
    assert not torch.equal(call["grads"][2], before["grads"][2] * 0.25)


@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
@on_kernels
def test_non_finite_stays_in_its_tensor(backend, reference, value):
    call = make_call(backend, LARC, [700, 2100, 5])
    call["grads"][1][2050] = value
    expected = call.expected()
    call.run(backend)
    for i in (0, 2):
        torch.testing.assert_close(call["grads"][i], expected["grads"][i])
    assert torch.equal(call["grads"][1].isnan(), expected["grads"][1].isnan())
    assert call["grads"][1][2050].isnan()


@on_kernels
def test_exact_norms_give_exact_gradients(backend, reference):
    """Small whole numbers sum up exactly in any order: with the same norms nothing may differ in one bit."""
    call = make_call(backend, LARC, [1000, 17, 0, 4099])
    for t in call["grads"] + call["params"]:
        t.mul_(4).round_()
    expected = call.expected()
    call.run(backend).assert_same(expected)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(1.0, torch.float32), (2.0, torch.float32), (float("nan"), torch.float32), (1, torch.int32), (-7, torch.int32)],
    ids=["1", "2", "nan", "int-1", "int-negative"],
)
def test_found_inf_leaves_the_gradients(backend, value, dtype):
    call = make_call(backend, LARC, SMALL, grad=torch.bfloat16)
    before, flag = call.clone(), backend.flag(value, dtype)
    kept = flag.clone()
    call.run(backend, found_inf=flag)
    call.assert_same(before)
    assert torch.equal(bits(flag), bits(kept))


@pytest.mark.parametrize("value", [0.0, -0.0], ids=["0", "-0"])
def test_a_clear_flag_stays_clear(backend, value):
    call, flag = make_call(backend, LARC, SMALL), backend.flag(value)
    call["grads"][0][0] = float("nan")
    before, kept = call.clone(), flag.clone()
    call.run(backend, found_inf=flag)
    assert torch.equal(bits(flag), bits(kept))
    assert not torch.equal(call["grads"][2], before["grads"][2])


FACTORS = {
    "fp64-cpu": lambda d: (torch.tensor(0.5, dtype=torch.float64), torch.tensor([0.01], dtype=torch.float64)),
    "fp32-cpu": lambda d: (torch.tensor(0.5), torch.tensor(0.01)),
    "on-the-device": lambda d: (torch.tensor([0.5], device=d), torch.tensor(0.01, device=d)),
}


@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS.keys())
def test_factor_forms(backend, factors):
    inv_scale, lr = factors(backend.device)
    call = make_call(backend, LARC, SMALL)
    floats = call.clone().run(backend, inv_scale=0.5, lr=0.01)
    call.run(backend, inv_scale=inv_scale, lr=lr).assert_same(floats)


def test_two_runs_agree_to_the_last_bit(backend):
    results, threads = [], torch.get_num_threads()
    sizes = [100_003, 5, 70_001] if backend.name == COMPILED.name else [3_001, 5, 600]
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            results.append(make_call(backend, LARC, sizes).run(backend))
    finally:
        torch.set_num_threads(threads)
    results[0].assert_same(results[1])
    results[0].assert_same(results[2])
