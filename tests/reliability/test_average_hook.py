"""Averaging fp16 gradients over ranks neither overflows nor loses small ones, and accumulation equals one big batch."""

import math

import pytest
import torch
from rank_processes import run_ranks

from ampctx import AmpTypeError, AmpValueError
from ampctx.distributed import average_hook


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks("reliability/averaging_worker.py", 2, tmp_path_factory.mktemp("ranks") / "rendezvous")


@pytest.mark.full(but=2)
@pytest.mark.parametrize("hook", ["torch", "default", "fp32", "fp32 afterwards", "four", "same type"])
def test_gradients_near_the_largest_fp16_number_are_averaged(ranks, hook):
    for rank in ranks:
        assert rank["near max"][hook] == [60000.0, -65504.0, 1.0, 3.0]


def test_dividing_after_the_sum_alone_overflows(ranks):
    for rank in ranks:
        assert rank["near max"]["afterwards"] == [math.inf, -math.inf, 1.0, 3.0]


SMALLEST = 2.0**-24


@pytest.mark.parametrize("hook", ["fp32", "fp32 afterwards", "afterwards"])
def test_the_smallest_gradients_are_kept(ranks, hook):
    for rank in ranks:
        assert rank["tiny"][hook] == [SMALLEST, 2 * SMALLEST, 2.0**-10, 0.0]


@pytest.mark.parametrize("hook", ["torch", "default"])
def test_dividing_before_the_sum_loses_the_smallest(ranks, hook):
    """What the other options are for: half of the smallest number is 0 in fp16."""
    for rank in ranks:
        assert rank["tiny"][hook][0] == 0.0
        assert rank["tiny"][hook][2] == 2.0**-10


def test_other_types_and_bucket_views(ranks):
    for rank in ranks:
        assert rank["fp32 gradients"] == [2.0, 2.0, 2.0, 2.0]
        assert rank["bucket view"] == [60000.0, -65504.0, 1.0, 3.0]


@pytest.mark.parametrize("dtype", ["torch.float16", "torch.bfloat16"])
def test_gradients_of_o1_travel_in_16_bits(ranks, dtype):
    """Half of the bytes. What overflows on the way skips the step on all ranks, and the scale falls."""
    first, second = (rank["sent"][dtype] for rank in ranks)
    assert first == second
    full = ranks[0]["sent"]["None"]
    assert full["stepped"] == [True] * 4
    assert first["bytes"] * 2 == full["bytes"] == 4 * 4 * (8 * 4 + 8 + 2 * 8 + 2)
    skips = first["stepped"].index(True)
    assert first["stepped"] == [False] * skips + [True] * (4 - skips)
    assert (skips > 0) == (dtype == "torch.float16")
    assert first["scale"] == full["scale"] / 2**skips
    assert first["weights"] != full["weights"]


@pytest.mark.parametrize("delay", [False, True], ids=["every block reduces", "delay_unscale in no_sync"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_accumulation_equals_one_big_batch(ranks, level, delay):
    for rank in ranks:
        accumulated, big = rank[f"{level} {delay}"]
        assert accumulated == big
        assert any(big)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"predivide": "2"}, AmpTypeError, "predivide must be a number or None, got str"),
        ({"predivide": True}, AmpTypeError, "predivide must be a number or None, got bool"),
        ({"predivide": 0}, AmpValueError, "predivide is 0, expected a finite number > 0"),
        ({"predivide": math.inf}, AmpValueError, "predivide is inf, expected a finite number > 0"),
        ({"dtype": "float32"}, AmpTypeError, "dtype must be a torch.dtype or None, got str"),
        ({"dtype": torch.int32}, AmpValueError, "dtype is torch.int32, expected a floating type"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_arguments_are_checked(arguments, error, message):
    with pytest.raises(error, match=message):
        average_hook(**arguments)
