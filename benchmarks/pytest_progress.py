"""A plugin of pytest for gpu-check: writes each result at once, so that a run that is ended still counts.

AMPCTX_CHECK_PROGRESS names the file: one JSON a line, ``{"collected": 12}``, ``{"start": ID}``, ``{"id": ID,
"outcome": "passed", "seconds": 0.1}``. Tests that have a result there already are not run again.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

# After one of these every call of the process fails.
LOST = ("CUDA error", "cudaError", "an illegal memory access", "unspecified launch failure")


def read(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def append(file: Path, entry: dict[str, Any]) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps(entry) + "\n")


def summary(file: Path) -> dict[str, Any]:
    """Counts, the tests that failed and were running at the end, and the slowest."""
    entries = read(file)
    results = {e["id"]: e for e in entries if "id" in e}
    started = [e["start"] for e in entries if "start" in e]
    collected = max((e["collected"] for e in entries if "collected" in e), default=0)
    slowest = sorted(results.values(), key=lambda e: -e["seconds"])[:5]
    return {
        **Counter(e["outcome"] for e in results.values()),
        "collected": collected,
        "not_run": max(0, collected - len(results)),
        "failing": [name for name, e in results.items() if e["outcome"] == "failed"],
        "running": [name for name in started[-1:] if name not in results],
        "slowest": {e["id"]: round(e["seconds"], 2) for e in slowest},
    }


class Progress:
    def __init__(self, file: Path) -> None:
        self.file, self.phases = file, {}
        self.done = {e["id"] for e in read(file) if "id" in e}
        self.session: Any = None

    def pytest_collection_finish(self, session: Any) -> None:
        self.session = session
        append(self.file, {"collected": len(session.items)})
        session.items[:] = [item for item in session.items if item.nodeid not in self.done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        append(self.file, {"start": nodeid})
        self.phases = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.phases[report.when] = report
        if report.when != "teardown":
            return
        outcomes = {phase.outcome for phase in self.phases.values()}
        outcome = next(o for o in ("failed", "skipped", "passed") if o in outcomes)
        seconds = sum(phase.duration for phase in self.phases.values())
        append(self.file, {"id": report.nodeid, "outcome": outcome, "seconds": seconds})
        text = "".join(str(phase.longrepr or "") for phase in self.phases.values() if phase.failed)
        if any(word in text for word in LOST):
            self.session.shouldstop = "the CUDA context may be lost: the other tests run in a process of their own"


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Progress(Path(os.environ["AMPCTX_CHECK_PROGRESS"])), "ampctx-check-progress")
