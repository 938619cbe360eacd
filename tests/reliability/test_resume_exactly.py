"""Resume must not shock the loss: a run that is saved and resumed in a new process goes on bit for bit."""

import itertools

import pytest
import torch
from kit import LEVELS, assert_same
from rank_processes import run_ranks
from resumed_runs import BY_ITSELF, KINDS, MOMENTS, ORDERS, UNUSABLE, Case, Run

AFTER_THE_STEP = [
    Case(level, name, moment, order=order, masters=masters)
    for (level, name, moment, masters), order in zip(
        itertools.product(LEVELS, KINDS, MOMENTS[:2], (False, True)), itertools.cycle(ORDERS), strict=False
    )
    if (name not in BY_ITSELF or level == "O3") and (level, name) != UNUSABLE
]
BEFORE_THE_FIRST = [
    Case(level, name, MOMENTS[2], 8, order)
    for (level, name), order in zip(
        itertools.product(("O0", "O1", "O2", "O3", "O5"), ("FusedAdam", "Adam-fused", "SGD-plain")),
        itertools.cycle(ORDERS),
        strict=False,
    )
]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """For each case what the run that saved, and the resumed one in another process, came to."""
    cases = [item.callspec.params["case"] for item in request.session.items if item.module is request.module]
    directory = tmp_path_factory.mktemp("resume")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    went_on = {}
    try:
        for case in cases:
            run = Run(case, seed=0).fresh().until_saved()
            torch.save(run.saved(), directory / f"{case}.pt")
            went_on[case] = run.rest()
            run.session.reset()
    finally:
        torch.set_num_threads(threads)
    torch.save([tuple(case) for case in cases], directory / "cases")
    assert run_ranks("reliability/resumed_runs.py", 1, directory, 600) == [len(cases)]
    return lambda case: (went_on[case], torch.load(directory / f"resumed-{case}.pt", weights_only=True))


def assert_resumed(results, case):
    went_on, resumed = results(case)
    assert resumed["losses"] == went_on["losses"]
    assert len(went_on["losses"]) == case.losses
    assert torch.tensor(went_on["losses"][5:]).isfinite().all()
    assert_same(resumed, went_on)


@pytest.mark.full(but=24)
@pytest.mark.parametrize("case", AFTER_THE_STEP, ids=str)
def test_the_three_states_resume_bit_for_bit(results, case):
    assert_resumed(results, case)


@pytest.mark.full(but=10)
@pytest.mark.parametrize("case", BEFORE_THE_FIRST, ids=str)
def test_saved_before_the_first_block(results, case):
    assert_resumed(results, case)
