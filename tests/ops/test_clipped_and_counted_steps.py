"""What a step does besides: it clips by a norm on the device, counts itself for the host, and counts tensors without
elements."""

import pytest
import torch
from backends import COMPILED, EMULATED, REFERENCE, SIZES
from optimizer_calls import ADAM, LAMB, STEP_OPS, UNSCALING, make_call, on_optimizers

from ampctx.kernels.reference import clipped

NORMS = [0.0, 1e-6, 0.3, 0.99999905, 0.999999, 1.0, 1.1, 7.7, 1e30, 3e38, float("inf"), float("nan")]


@pytest.mark.parametrize("max_norm", [0.0, 1e-8, 0.1, 1.0, 3.3, 1e39, float("inf")])
def test_the_factor_is_rounded_as_torchs(backend, max_norm):
    flag = backend.flag()
    one, found = [torch.ones((), device=backend.device)], [torch.ones((), device=backend.device)]
    for norm in [*NORMS, *(torch.rand(10, generator=torch.Generator().manual_seed(1)) * 3).tolist()]:
        given = torch.full((), norm, device=backend.device)
        for inv_scale in (1.0, torch.full((), 1 / 3, device=backend.device)):
            expected = torch.clamp(max_norm / (given + 1e-6), max=1.0) * inv_scale
            backend.scale_clipped(one, found, flag, inv_scale, given, max_norm)
            torch.testing.assert_close(found[0], expected, rtol=0, atol=0, equal_nan=True)
    assert flag.item() == 0


def test_scale_clipped_flags_what_it_reads(backend):
    for bad in (0.0, float("inf"), float("nan")):
        src, dst, flag = [torch.full((3,), bad, device=backend.device)], backend.randn([3]), backend.flag()
        backend.scale_clipped(src, dst, flag, 1.0, float("nan"), 1.0)
        assert flag.item() == (bad != 0)
        assert dst[0].isnan().all()
    backend.scale_clipped([], [], flag, 1.0, 2.0, 1.0)


def test_a_clip_by_1_in_place_writes_nothing_where_the_flag_is_raised():
    nan = torch.full((9,), 0x7F800001, dtype=torch.int32)  # a signaling one: its products are quiet
    for flag in (0, 1):
        x, found_inf = nan.clone(), COMPILED.flag(flag)
        COMPILED.scale_clipped([x.view(torch.float32)], [x.view(torch.float32)], found_inf, 1.0, 0.5, 1.0)
        assert (torch.equal(x, nan), found_inf.item()) == (flag, 1)


@pytest.mark.parametrize("norm", [0.5, 3.0, "number"])
@pytest.mark.parametrize("optimizer", [*STEP_OPS, UNSCALING[0]], ids=lambda o: o.op.removeprefix("multi_tensor_"))
def test_a_clipped_step_is_one_by_the_clipped_factor(backend, optimizer, norm):
    grad_norm = torch.tensor(3.0, dtype=torch.float64) if norm == "number" else backend.flag(norm)
    inv_scale = backend.flag(1 / 3)
    call = make_call(backend, optimizer, SIZES["odd"], grad=torch.float16, grad_norm=grad_norm, max_norm=1.1)
    plain = call.clone()
    plain.options["max_norm"] = -1.0
    plain.run(backend, inv_scale=clipped(inv_scale, grad_norm, 1.1))
    call.run(backend, inv_scale=inv_scale)
    call.assert_same(plain)


SKIPS = {"skipped": 0, "in_a_row": 1, "overflowed": 2, "value": 3, "scale": 4}


def skips_of(backend):
    return [torch.full((), 8.0 if name == "scale" else 0.0, device=backend.device) for name in SKIPS]


@pytest.mark.full(but=80)
@on_optimizers
@pytest.mark.parametrize("sizes", [[], [0, 0], [5], [700, 3, 0, 9000]], ids=lambda s: f"{len(s)}-tensors")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_a_step_counts_itself_once(backend, optimizer, sizes, dtype):
    skips = skips_of(backend)
    call = make_call(backend, optimizer, sizes, skips=skips)
    expected = [0.0] * 4
    for step, flag in enumerate([1, 1, 0, 0, 2, 1, 1]):
        skips[4].fill_(2.0**step)
        call.run(backend, found_inf=backend.flag(flag, dtype))
        skipped = float(flag != 0)
        expected = [expected[0] + skipped, (expected[1] + 1) * skipped, expected[2] + skipped, 2.0**step]
        assert [t.item() for t in skips] == [*expected, 2.0**step]


@pytest.mark.usefixtures("emulation")
def test_an_emulated_list_of_several_launches_counts_once():
    for optimizer in (ADAM, LAMB):
        skips = skips_of(EMULATED)
        make_call(EMULATED, optimizer, [1] * 1400, skips=skips).run(EMULATED, found_inf=EMULATED.flag(1))
        assert [t.item() for t in skips] == [1, 1, 1, 8, 8]


@pytest.mark.full(but=12)
@pytest.mark.parametrize("empty", [1, 1400])
@pytest.mark.parametrize("optimizer", [ADAM, LAMB], ids=lambda o: o.name)
def test_tensors_without_elements_are_counted(backend, optimizer, empty):
    if backend is REFERENCE:
        empty = min(empty, 300)
    for sizes in ([0] * empty + [5, 0], [0] * empty):
        call = make_call(backend, optimizer, sizes)
        counts = [t.item() + 2 for t in call["steps"]]
        call.run(backend, found_inf=backend.flag(1)).run(backend, times=2)
        assert [t.item() for t in call["steps"]] == counts
