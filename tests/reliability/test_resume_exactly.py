"""Resume must not shock the loss: a run that is saved and resumed in a new process goes on bit for bit."""

import itertools

import pytest
import torch
from kit import LEVELS, assert_same
from rank_processes import run_ranks
from resumed_runs import BY_ITSELF, KINDS, LOSSES, MOMENTS, ORDERS, UNUSABLE, Case, Run

CASES = [
    Case(level, name, moment, order=order, masters=masters)
    for (level, name, moment, masters), order in zip(
        itertools.product(LEVELS, KINDS, MOMENTS, (False, True)), itertools.cycle(ORDERS), strict=False
    )
    if (name not in BY_ITSELF or level == "O3") and (level, name) != UNUSABLE
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
    assert run_ranks("reliability/resumed_runs.py", 1, directory) == [len(cases)]
    return lambda case: (went_on[case], torch.load(directory / f"resumed-{case}.pt", weights_only=True))


@pytest.mark.full(but=36)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_three_states_resume_bit_for_bit(results, case):
    went_on, resumed = results(case)
    assert resumed["losses"] == went_on["losses"]
    assert len(went_on["losses"]) == LOSSES
    assert torch.tensor(went_on["losses"][5:]).isfinite().all()
    assert_same(resumed, went_on)
