"""apex.parallel.DistributedDataParallel and Reducer, over gloo: two processes, and one."""

import ddp_scenarios
import parallel_ranks
import pytest
import torch
from apex.parallel import DistributedDataParallel, ReduceOp
from ddp_scenarios import DTYPES, HOOKS, TRAINED_AT, TRAININGS
from torch import nn

from ampctx import AmpValueError


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return parallel_ranks.run("ddp_scenarios", tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return parallel_ranks.run("ddp_scenarios", tmp_path_factory.mktemp("one"), world_size=1)


# Of weight, which is 2 and 6 before, and of bias, 2 and 2.
JOINED = {"sum": (8.0, 4.0), "predivided-sum": (4.0, 2.0)}


@pytest.mark.full(but=12)
@pytest.mark.parametrize("options", HOOKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_joined(two, dtype, options):
    weight, bias = JOINED.get(options, (4.0, 2.0))
    assert two(f"joined-{dtype}-{options}") == [([weight], [bias])] * 2


@pytest.mark.full(but=4)
@pytest.mark.parametrize("options", HOOKS)
def test_one_process_keeps_its_gradients(one, options):
    divisor = 2.0 if options == "predivided-sum" else 1.0
    assert one(f"joined-fp32-{options}") == [([2.0 / divisor], [2.0 / divisor])]


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_a_copy_joins_gradients_the_same_way(two, copied):
    assert two(f"joined-{copied}") == [([8.0], [4.0])] * 2


@pytest.mark.parametrize(
    ("scenario", "expected"), [("large", torch.inf), ("large-fp32", 40000.0), ("large-predivided", 40000.0)]
)
def test_a_sum_that_fp16_cannot_hold(two, scenario, expected):
    assert two(scenario) == [[expected]] * 2


def test_disabled_gradients_are_each_ranks_own(two):
    # Then 2 + 2 and 6 + 6, averaged.
    assert two("disabled") == [[2.0, 8.0], [6.0, 8.0]]


def test_parameters_that_are_not_used(two):
    assert two("unused") == [(2.0, 1.0, None)] * 2


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("level", TRAINED_AT)
def test_a_training_is_that_of_torchs_wrapper(two, level, name):
    (ours, torchs), (others, _) = two(f"trained-{level}-{name}")
    assert torch.equal(ours, torchs)
    assert torch.equal(ours, others)
    assert torch.isfinite(ours).all()


@pytest.mark.parametrize("level", TRAINED_AT)
def test_a_training_is_that_of_one_process_with_all_batches(two, level):
    for ours, alone in two(f"one-process-{level}"):
        # 16-bit gradients are rounded before they are joined.
        tolerance = 1e-6 if level == "O0" else 2e-2
        torch.testing.assert_close(ours, alone, rtol=tolerance, atol=tolerance)


def test_construction(two):
    for rank, found in enumerate(two("construction")):
        refusal = found.pop("refusal")
        assert len(refusal) == 1
        assert refusal[0].startswith("AmpError: Incoming model is an instance of torch.nn.parallel.Distributed")
        # A tenth of the batch mean, which is 0 on all ranks, and the rest each rank's own.
        assert found.pop("running_mean") == pytest.approx([0.9 * rank], abs=1e-6)
        assert found == {
            "parameters": [[0.0]] * 4,
            "is torch's": True,
            "module": True,
            "keys": [
                *("module.0.weight", "module.0.bias", "module.1.weight", "module.1.bias"),
                *("module.1.running_mean", "module.1.running_var", "module.1.num_batches_tracked"),
            ],
            "world_size": 2.0,
            "bucket bytes": 4000,
        }


def test_reducer_of_a_module(two):
    assert two("reducer-module") == [([[5.0], [5.0]], [4.0], None)] * 2


def test_reducer_of_gradients(two):
    assert two("reducer-gradients") == [[[4.0]] * len(DTYPES)] * 2


def test_flat_calls(two):
    assert two("flat") == [([[1.0], [1.0]], [2.0])] * 2


def test_nothing_is_printed_but_what_torch_says_of_its_flag(two):
    lines = [line for output in two.printed for line in output.splitlines()]
    assert [line for line in lines if "find_unused_parameters=True" not in line] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_param": True}, "shared_param is no longer an option"),
        ({"delay_allreduce": True, "allreduce_trigger_params": []}, "allreduce_trigger_params may only be given with"),
        ({"delay_allreduce": True, "num_allreduce_streams": 2}, "num_allreduce_streams may only be above 1 with"),
    ],
    ids=["shared-param", "trigger-params", "streams"],
)
def test_options_that_exclude_each_other(options, message):
    with pytest.raises(AmpValueError, match=message):
        DistributedDataParallel(nn.Linear(1, 1), **options)


def test_without_a_process_group():
    with pytest.raises(ValueError, match="process group has not been initialized"):
        DistributedDataParallel(nn.Linear(1, 1))


def test_reduce_op_is_torchs():
    assert ReduceOp is torch.distributed.ReduceOp


def test_scenarios_are_all_looked_at():
    assert len(ddp_scenarios.SCENARIOS) == len(HOOKS) * len(DTYPES) + len(TRAINED_AT) * (len(TRAININGS) + 1) + 11
