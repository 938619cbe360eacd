"""Leaves out what this machine cannot run, and without --full the rest of long tests: pyproject.toml has the marks."""

import gc
import warnings
from collections import Counter
from heapq import heapify, heappop, heapreplace
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ampctx import AmpSession, AmpWarning


@pytest.fixture
def sessions():
    """Makes sessions, which are undone afterwards."""
    made = []
    yield lambda: made.append(AmpSession()) or made[-1]
    for session in made:
        session.reset()


@pytest.fixture
def session(sessions):
    """A session of the test's own, undone afterwards."""
    return sessions()


@pytest.fixture(scope="module")
def mesh():
    """Of this process alone, and a process group."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def said():
    """What ampctx has warned of so far. The test goes on."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AmpWarning)
        yield lambda: [str(warning.message) for warning in caught if issubclass(warning.category, AmpWarning)]


@pytest.fixture
def only_new_objects():
    """``gc.get_objects`` gives what the test has made: what earlier tests have left may go at any time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_configure(config):
    """Many tests train wrongly on purpose. Those of the warnings take ``said``."""
    config.addinivalue_line("filterwarnings", "ignore::ampctx.AmpWarning")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="all cases of all tests: `make test-all`")


def pytest_collection_modifyitems(config, items):
    left_out = set()
    if not torch.cuda.is_available():
        left_out.update(item for item in items if item.get_closest_marker("cuda"))
    if "large" not in config.getoption("markexpr"):
        left_out.update(item for item in items if item.get_closest_marker("large"))
    if not config.getoption("full"):
        left_out.update(_beyond_the_fast_set([item for item in items if item not in left_out]))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _beyond_the_fast_set(items):
    """Tests marked ``full``; of those marked ``full(but=n)``, all but n cases. Tests of a GPU are never left out."""
    tests = {}
    for item in items:
        marker = item.get_closest_marker("full")
        if marker and not item.get_closest_marker("cuda"):
            tests.setdefault(item.nodeid.partition("[")[0], (marker.kwargs.get("but", 0), []))[1].append(item)
    for but, cases in tests.values():
        yield from set(cases) - set(_spread(cases, but))


def _spread(cases, n):
    """n of a test's cases, the same in each run: first every value of every parameter, then most pairs of values.

    More than n where the values need more; not where a parameter has another value in each case.
    """
    waiting = {case: _values(case) for case in cases} if n else {}
    singles = {value for values in waiting.values() for value in values}
    pairs = {pair for values in waiting.values() for pair in combinations(values, 2)}
    values_of = Counter((name, field) for name, field, _ in singles)
    needs_all = bool(waiting) and max(values_of.values()) < len(waiting)
    chosen = []

    def rank(place, case):
        values = waiting[case]
        gain = sum(v in singles for v in values), sum(pair in pairs for pair in combinations(values, 2))
        return -gain[0], -gain[1], place, case

    # What a case gains only falls: one that is the best by what it gained before, and gains that still, is the best.
    best = [rank(place, case) for place, case in enumerate(waiting)]
    heapify(best)
    while best and (len(chosen) < n or (needs_all and singles)):
        *_, place, case = former = best[0]
        if (now := rank(place, case)) != former:
            heapreplace(best, now)
            continue
        heappop(best)
        singles.difference_update(waiting[case])
        pairs.difference_update(combinations(waiting[case], 2))
        chosen.append(case)
    return chosen


def _values(case):
    """What the case is made of: parameters, and the fields of those that are named tuples."""
    values = []
    for name, value in case.callspec.params.items():
        fields = value._asdict() if hasattr(value, "_asdict") else {"": value}
        for field, x in fields.items():
            plain = x is None or isinstance(x, (bool, int, float, str, tuple, torch.dtype))
            values.append((name, field, repr(x) if plain else id(x)))
    return values
