"""One loop on one process, DistributedDataParallel, FSDP2, HSDP, tensor parallelism and a 2-D mesh."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

pytest.importorskip("matplotlib", reason="the examples draw plots: pip install 'ampctx[examples]'")
pytest.importorskip("tqdm", reason="the examples show a progress bar: pip install 'ampctx[examples]'")
from example_runs import ROOT
from kit import LEVELS
from page_programs import programs
from rank_processes import run_ranks

PAGE = ROOT / "docs" / "guide" / "scale.md"
# The engines of examples/mesh.py, as the page calls them, and how many ranks train with each.
ENGINES = {
    "ddp": ("DistributedDataParallel", 2),
    "fsdp": ("FSDP2", 2),
    "tp": ("tensor parallelism", 2),
    "hsdp": ("HSDP", 4),
    "fsdp+tp": ("FSDP2 x tensor parallelism", 4),
}


def run(tmp_path_factory, ranks: int, engines: list[str], levels: list[str], *some: str) -> list[dict]:
    rendezvous = tmp_path_factory.mktemp("ranks") / "rendezvous"
    with ExitStack() as until_all_are_found:
        ports = [str(until_all_are_found.enter_context(free_port())) for _ in some]
    words = ",".join(engines), ",".join(levels), ",".join(ports)
    return run_ranks("integration/scale_worker.py", ranks, rendezvous, *words, *some)


@contextmanager
def free_port() -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        yield free.getsockname()[1]


def check_runs(found: list[dict], engines: list[str], levels: list[str]) -> None:
    for level in levels:
        alone = found[0]["runs"][f"none {level}"]
        skips = level in ("O1", "O2")
        assert alone["about"] == f"loss scale {32768 if skips else 1} | skipped steps {int(skips)}"
        for engine in engines:
            runs = [rank["runs"][f"{engine} {level}"] for rank in found]
            if "refused" in runs[0]:
                assert all("refused" in other for other in runs)
                continue
            for other in runs:
                assert other["same"], f"{engine} {level}: weights differ between ranks"
                assert other["about"] == alone["about"]
                assert other["loss"] == pytest.approx(alone["loss"], rel=0.01)


def check_printed(found: list[dict], shown: list[str]) -> None:
    number = re.compile(r"\d+\.\d+")
    assert all(not any(rank["printed"]) for rank in found[1:])
    for printed, text in zip(found[0]["printed"], shown, strict=True):
        last = printed.splitlines()[-1]  # amp says first how it trains
        assert number.sub("#", last) == number.sub("#", text.strip())
        assert float(number.search(last)[0]) == pytest.approx(float(number.search(text)[0]), rel=0.02)


def test_two_ranks(tmp_path_factory):
    """The programs of the page for two ranks print what it shows. The example with two engines learns as alone."""
    (_, _), *two, _ = programs(PAGE.read_text())
    found = run(tmp_path_factory, 2, ["ddp", "fsdp"], ["O1"], *(program for program, _ in two))
    check_runs(found, ["ddp", "fsdp"], ["O1"])
    check_printed(found, [text for _, text in two])


@pytest.mark.full
def test_every_engine_and_level(tmp_path_factory):
    program, text = programs(PAGE.read_text())[-1]
    works: dict[str, list[str]] = {}
    for ranks in (2, 4):
        engines = [engine for engine, (_, count) in ENGINES.items() if count == ranks]
        found = run(tmp_path_factory, ranks, engines, list(LEVELS), *([program] if ranks == 4 else []))
        check_runs(found, engines, list(LEVELS))
        if ranks == 4:
            check_printed(found, [text])
        for engine in engines:
            runs = [found[0]["runs"][f"{engine} {level}"] for level in LEVELS]
            works[engine] = ["refused" if "refused" in one else "works" for one in runs]
    rows = [["engine", "processes", *LEVELS], ["---"] * (2 + len(LEVELS))]
    rows += [[name, str(ranks), *works[engine]] for engine, (name, ranks) in ENGINES.items()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    shown = re.search(r"<!-- engines: .*? -->\n\n(.*?)\n*<!-- end of engines -->", PAGE.read_text(), flags=re.S)
    assert shown[1] == table, f"{PAGE.name} shows another table; this is the one:\n{table}"
