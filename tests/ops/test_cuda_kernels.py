"""The CUDA kernels apart from their results: how lists are cut, what launches carry, what the emulation notices."""

import ctypes
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from backends import EMULATED, PLAIN_OPS, right_call
from emulation_build import FOLDER, SANITIZE, build
from optimizer_calls import STEP_OPS, make_call

TESTS = Path(__file__).parents[1]
HUGE = (1 << 31) + 1
VISIT = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)


def cut(library, sizes, max_blocks):
    """The pieces (launch, block, tensor, begin, size) that a GPU with ``max_blocks`` resident blocks would work on."""
    pieces = []
    numel = (ctypes.c_int64 * len(sizes))(*sizes)
    visit = VISIT(lambda *piece: pieces.append(piece))
    library.ampctx_test_cut(numel, ctypes.c_int64(len(sizes)), ctypes.c_int64(max_blocks), visit)
    return pieces


CUTS = {
    "one-element": [1],
    "one-tensor": [10_000],
    "whole-shares": [512] * 40,
    "mixed": [1, 511, 512, 513, 1_000_003, 7, 7],
    "small-table-full": [3] * 157,
    "small-table-and-one": [3] * 158,
    "20k-tiny": [1 + i % 5 for i in range(20_000)],
    "2^31+1": [HUGE],
    "beyond-2^31-in-sum": [1 << 30] * 5 + [9],
    "huge-among-tiny": [5, HUGE, 5, 1 << 40, 1],
}


@pytest.mark.parametrize("max_blocks", [1, 3, 1056, 4096])
@pytest.mark.parametrize("sizes", CUTS.values(), ids=CUTS.keys())
def test_each_element_is_in_one_piece(emulation, sizes, max_blocks):
    pieces = cut(emulation, sizes, max_blocks)
    assert pieces == sorted(pieces), "tensors and blocks go up together"
    assert max_blocks < 4096 or max(Counter(piece[:2] for piece in pieces).values()) <= 8
    reached = [0] * len(sizes)
    for _, _, tensor, begin, size in pieces:
        assert begin == reached[tensor]
        assert size > 0
        reached[tensor] += size
    assert reached == sizes


@pytest.mark.parametrize("sizes", CUTS.values(), ids=CUTS.keys())
def test_blocks_have_equal_shares(emulation, sizes):
    max_blocks, shares = 100, {}
    for launch, block, _, _, size in cut(emulation, sizes, max_blocks):
        shares.setdefault(launch, {}).setdefault(block, 0)
        shares[launch][block] += size
    for of_launch in shares.values():
        *full, last = (of_launch[block] for block in range(len(of_launch)))
        assert len(of_launch) <= max_blocks
        assert len(set(full)) <= 1
        assert 0 < last <= max(full, default=last)


OLD_DRIVER, FIRST_WITH_MANY_PARAMETERS = 12000, 12010


@pytest.mark.parametrize(
    ("driver", "tensors", "expected"),
    [(13000, 3000, {0: 1350, 1: 2701, 2: 2999}), (OLD_DRIVER, 500, {0: 156, 1: 313, 2: 470, 3: 499})],
)
def test_launches_hold_as_many_tensors_as_parameters_can(emulation, runtime, driver, tensors, expected):
    """24 bytes for each tensor of two lists, in nearly 32 KB, or nearly 4 KB for an older driver."""
    runtime(driver=driver)
    assert {launch: tensor for launch, _, tensor, _, _ in cut(emulation, [1] * tensors, 3)} == expected


def parameter_bytes(library, name, tensors, **how):
    """Of the kernel of a call that has most of them."""
    library.ampctx_test_parameter_bytes.restype = ctypes.c_int64
    library.ampctx_test_parameter_bytes()
    run_once(name, [1] * tensors, **how)
    return library.ampctx_test_parameter_bytes()


@pytest.mark.parametrize(
    ("tensors", "how", "limit"),
    [
        (78, {}, 4096),
        (65, {"param": torch.bfloat16, "write_back": "split"}, 4096),
        (161, {}, 32764),  # ResNet-50
        (607, {}, 32764),
    ],
)
def test_parameters_are_no_larger_than_the_list_needs(emulation, runtime, tensors, how, limit):
    runtime(driver=FIRST_WITH_MANY_PARAMETERS)
    assert limit // 2 < parameter_bytes(emulation, "adam", tensors, **how) <= limit
    runtime(driver=OLD_DRIVER)
    assert parameter_bytes(emulation, "adam", tensors, **how) <= 4096


@pytest.mark.full(but=1)
@pytest.mark.parametrize("driver", [OLD_DRIVER, FIRST_WITH_MANY_PARAMETERS])
def test_no_driver_gets_more_parameters_than_it_takes(emulation, runtime, driver):
    runtime(driver=driver)
    limit = 4096 if driver == OLD_DRIVER else 32764
    for name in LAUNCHES:
        for tensors in (161, 700):
            for how in ({}, IN_CODES) if name in WITH_CODES else ({},):
                assert parameter_bytes(emulation, name, tensors, **how) <= limit, (name, tensors, how)


# Kernels of each op for 161 tensors (as ResNet-50 has) and 400: one for a step; those with norms of tensors have a walk
# for the norms besides. And those for 4,000, which the parameters of one kernel do not hold.
LAUNCHES = {
    "multi_tensor_axpby": (1, 4),
    **dict.fromkeys(("multi_tensor_scale", "multi_tensor_scale_clipped", "multi_tensor_scale_and_update"), (1, 3)),
    **dict.fromkeys(("multi_tensor_l2norm", "multi_tensor_unscale_l2norm_and_update"), (1, 3)),
    **dict.fromkeys(("block_factors", "count_skip", "update_scale"), (1, 1)),
    "adam": (1, 7),
    "sgd": (1, 5),
    **dict.fromkeys(("momentum", "adagrad", "lion", "muon"), (1, 6)),
    "lamb": (2, 12),
}


WITH_CODES, IN_CODES = ("adam", "lion", "lamb"), {"state": "8bit"}
WITHOUT_LISTS = ("update_scale", "block_factors", "count_skip")


@pytest.mark.full(but=8)
@pytest.mark.parametrize("name", LAUNCHES)
def test_launches(emulation, runtime, name):
    emulation.ampctx_test_launches.restype = ctypes.c_int64

    def launches(tensors, **how):
        before = emulation.ampctx_test_launches()
        run_once(name, [1] * tensors, **how)
        return emulation.ampctx_test_launches() - before

    few, many = LAUNCHES[name]
    assert [launches(n) for n in (161, 400, 4000)] == [few, few, many]
    assert name not in WITH_CODES or launches(161, **IN_CODES) == few


@pytest.mark.parametrize(("driver", "rows", "launches"), [(13000, 28, 1), (13000, 465, 15), (OLD_DRIVER, 28, 465)])
def test_a_launch_has_up_to_32_rows_of_numbers(emulation, runtime, driver, rows, launches):
    """Equal ones are one. With few parameters it has one."""
    runtime(driver=driver)
    lrs = torch.arange(465, dtype=torch.float64) % rows
    table = torch.stack([lrs, *torch.full((4, 465), 0.5, dtype=torch.float64)], dim=1).contiguous()
    before = emulation.ampctx_test_launches()
    run_once("adam", [1] * 465, table=table, rows=torch.arange(465))
    assert emulation.ampctx_test_launches() - before == launches


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", [name for name in LAUNCHES if name not in WITHOUT_LISTS])
def test_tables_of_both_sizes_give_the_same(runtime, name):
    sizes = [1 + i % 5 for i in range(1400)]
    # Partial sums of norms are cut in other places.
    rtol = 1e-6 if "l2norm" in name or name == "lamb" else 0
    runtime(driver=FIRST_WITH_MANY_PARAMETERS)
    expected = run_once(name, sizes)
    runtime(driver=OLD_DRIVER)
    torch.testing.assert_close(run_once(name, sizes), expected, rtol=rtol, atol=0)


@pytest.fixture
def tickets(emulation):
    """The set of tickets that a call in this stream would get, by its number, -1 for memory of its own."""

    def of(stream):
        emulation.ampctx_test_tickets.restype = ctypes.c_int64
        return emulation.ampctx_test_tickets(ctypes.c_void_p(stream))

    yield of
    emulation.ampctx_test_forget_tickets()


def test_launches_that_may_run_at_once_have_tickets_of_their_own(emulation, runtime, tickets):
    emulation.ampctx_test_forget_tickets()
    streams = range(1000, 1016)
    sets = [tickets(stream) for stream in streams]
    assert sets == list(range(16))
    assert [tickets(stream) for stream in streams] == sets, "the launches of a stream run one after the other"
    assert tickets(2000) == -1, "no set is left for a stream"
    runtime(capturing=True)
    assert [tickets(1000) for _ in range(113)] == [*range(16, 128), -1], "a graph may be replayed beside its stream"
    runtime()
    assert tickets(1000) == 0


def test_the_stream_of_each_thread_has_no_set(emulation, tickets):
    """One handle stands for several streams."""
    emulation.ampctx_test_forget_tickets()
    assert [tickets(stream) for stream in (2, 2, 0, 2)] == [-1, -1, 0, -1]


@pytest.mark.parametrize("name", ["multi_tensor_l2norm", "multi_tensor_unscale_l2norm_and_update", "adam", "lamb"])
def test_without_a_set_of_tickets_calls_give_the_same(emulation, runtime, tickets, name):
    emulation.ampctx_test_forget_tickets()
    expected = run_once(name, [700] * 40)
    runtime(capturing=True)
    torch.testing.assert_close(run_once(name, [700] * 40), expected, rtol=0, atol=0)
    while tickets(0) != -1:  # of the sets that are left
        pass
    for _ in range(2):
        torch.testing.assert_close(run_once(name, [700] * 40), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["multi_tensor_l2norm", "multi_tensor_unscale_l2norm_and_update", "adam", "lamb"])
def test_tickets_are_0_after_a_call(emulation, runtime, name):
    run_once(name, [1, 700, 5000, 3, 9000])
    runtime(capturing=True)
    run_once(name, [3] * 1400)
    assert emulation.ampctx_test_tickets_taken() == 0


def run_once(name, sizes, **how):
    """Calls an op and returns the tensors that it has written, or may have."""
    if name in PLAIN_OPS:
        given = right_call(EMULATED, name, sizes)
        made = getattr(EMULATED.ops, name).default(*given.values())
        tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
        return [*tensors, *(t for value in given.values() if isinstance(value, list) for t in value), *(made or ())]
    (optimizer,) = [o for o in STEP_OPS if o.name == name]
    clip = {"grad_norm": torch.full((), 2.0), "max_norm": 1.0, "skips": [torch.zeros(()) for _ in range(5)]}
    call = make_call(EMULATED, optimizer, sizes, **clip, **how).run(EMULATED)
    return [t for tensors in call.lists.values() for t in tensors]


@pytest.mark.parametrize("vectors", [1, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("has_f32", [False, True], ids=["16-bit", "fp32"])
def test_lanes_are_side_by_side_in_memory(emulation, vectors, has_f32):
    """The fours of neighbouring lanes follow each other where a list is fp32, so that what a warp accesses at once has
    no gaps; the two fours of a lane do where none is. Each element is accessed once."""
    first = 24
    places = []
    for v in range(vectors):
        low_high = (ctypes.c_int64 * 2)()
        emulation.ampctx_test_places(
            ctypes.c_int64(first), ctypes.c_int64(v), ctypes.c_int64(vectors), has_f32, low_high
        )
        places.append(tuple(low_high))
    reached = sorted(four + k for both in places for four in both for k in range(4))
    assert reached == list(range(first, first + 8 * vectors))
    for v in range(1, vectors):
        is_full = has_f32 and v // 32 * 32 + 32 <= vectors
        if v % 32:
            assert [b - a for a, b in zip(places[v - 1], places[v], strict=True)] == [4 if is_full else 8] * 2
        assert places[v][1] - places[v][0] == (128 if is_full else 4)


# --- the emulation notices what a GPU would do wrong ------------------------------------------------------------------


def run_kernel(library, name, first=0):
    """Runs a kernel on 64 numbers from ``first`` on; returns the error and the numbers."""
    numbers = (ctypes.c_int * 64)(*range(first, first + 64))
    library.ampctx_test_kernel.restype = ctypes.c_char_p
    error = library.ampctx_test_kernel(name.encode(), numbers).decode()
    return error, list(numbers)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("divergent_barrier", "32 of 64 threads are at a barrier, 32 have exited"),
        ("exited_lane", "names lanes that have exited"),
        ("foreign_mask", "a lane is not in its own mask"),
    ],
)
def test_wrong_synchronization_is_an_error(emulation, kernel, message):
    assert message in run_kernel(emulation, kernel)[0]
    assert run_kernel(emulation, "reverse") == ("", list(range(63, -1, -1)))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_missing_barrier_gives_a_wrong_result(emulation, monkeypatch, seed):
    monkeypatch.setenv("AMPCTX_EMULATION_SEED", str(seed))
    first = 64 * seed  # shared memory still holds the numbers of an earlier run
    right = list(range(first + 63, first - 1, -1))
    assert run_kernel(emulation, "reverse", first) == ("", right)
    error, numbers = run_kernel(emulation, "reverse_without_barrier", first)
    assert error == ""
    assert numbers != right


ADDRESSES = """
import sys, numpy, torch
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from ampctx.kernels import definitions
from backends import EMULATED as backend
from emulation_build import load
from optimizer_calls import ADAM, AMSGRAD, LAMB, make_call
defined = definitions.define(backend.namespace)
library = load(Path(sys.argv[1]), backend.namespace)
sizes = [1, 7, 8, 9, 0, 511, 512, 513, 1543]
for dtype in (torch.float32, torch.float16):
    for shift in (0, 1, 3):
        src = [torch.ones(n + shift, dtype=dtype)[shift:] for n in sizes]
        dst = [torch.empty(n) for n in sizes]
        flag = torch.zeros(())
        backend.scale(src, dst, flag, 2.0)
        backend.axpby(src, dst, [t.clone() for t in dst], flag, 1.0, 2.0)
        norm, each = backend.l2norm(src, flag, 0.5, per_tensor=True)
        assert abs(norm.item() ** 2 - sum(sizes) / 4) < 1e-2, norm
for optimizer, write_back in ((ADAM, "nearest"), (AMSGRAD, "copy"), (ADAM, "split"), (ADAM, "stochastic"),
                              (LAMB, "split"), (LAMB, "copy"), (ADAM, "kahan")):
    for state in (torch.float32, torch.bfloat16, "8bit") if optimizer is not AMSGRAD else (torch.float32,):
        how = {"state": state, "stochastic_state": state is not torch.float32}
        call = make_call(backend, optimizer, sizes, param=torch.bfloat16, write_back=write_back, **how)
        call.run(backend)
print("end of the valid calls", flush=True)
short = torch.from_numpy(numpy.lib.stride_tricks.as_strided(numpy.ones(90, dtype=numpy.float32), (100,)))
backend.scale([torch.ones(100)], [short], flag, 2.0)
"""


@pytest.mark.full
def test_no_access_out_of_bounds():
    """The kernels under AddressSanitizer, which stops them at a tensor that claims more memory than it has."""
    command = ["g++", "-print-file-name=libasan.so"]
    sanitizer = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not Path(sanitizer).is_absolute():
        pytest.skip("this g++ comes without AddressSanitizer")
    library = build(FOLDER, *SANITIZE, "-O0")  # takes half as long to compile, and little is called
    paths = [str(TESTS / "ops"), str(TESTS / "cuda_emulation")]
    environment = {**os.environ, "LD_PRELOAD": sanitizer, "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ADDRESSES, str(library), *paths]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "end of the valid calls" in result.stdout, result.stderr
    assert result.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in result.stderr
    assert "Store::" in result.stderr or "store_element" in result.stderr
