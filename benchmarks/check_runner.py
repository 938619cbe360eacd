"""Runs the parts of a check, each within its own seconds, and keeps a report of what was found so far.

The report is one JSON, written anew, atomically, after each part: whatever ends the check leaves what was done. A part
that raises, that is killed or out of time, or whose tool is missing, is an entry of the report like any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OK, FAILED, TIMED_OUT, MISSING, NOT_STARTED = "ok", "failed", "timed out", "missing tool", "not started"
INTERRUPTED = "interrupted"
LEAST_SECONDS = 1.0  # a part is not started with less
LOG_OF_COMMAND, LOG_BYTES = 300_000, 15_000_000


class Interrupted(BaseException):
    """A signal asks the check to end. No Exception: no part may take it for an error of its own."""


@dataclass(frozen=True)
class Part:
    """``run`` takes the seconds that it has, and gives a dict with "status". It gets a share by ``weight`` of what its
    step has left, or ``seconds``, and is not started with less."""

    name: str
    run: Callable[[float], dict[str, Any]]
    seconds: float | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Step:
    """``seconds``: its share of the budget; ``needs``: the part that must not have failed before it."""

    name: str
    seconds: float
    parts: Callable[[], Iterable[Part]]
    needs: str | None = None


def share(left: float, seconds: list[float]) -> float:
    """Of the time left, what the first of several gets that should have ``seconds``. What one leaves, later ones
    share."""
    return max(0.0, left) * seconds[0] / sum(seconds)


def write_atomically(file: Path, text: str) -> None:
    new = file.with_name(f"{file.name}.new")
    new.write_text(text)
    new.replace(file)


def plain(text: str) -> str:
    """Without the paths of this machine."""
    for path, name in ((sys.executable, "python"), (f"{ROOT}/", ""), (str(ROOT), "."), (sys.prefix, "PREFIX")):
        text = text.replace(path, name)
    return text


def shortened(text: str, most: int) -> str:
    """Without its middle where it is longer."""
    if len(text) <= most:
        return text
    return f"{text[: most // 3]}\n... {len(text) - most} characters left out ...\n{text[-(most - most // 3) :]}"


def last_lines(text: str, count: int = 12) -> list[str]:
    return [line[-300:] for line in text.strip().splitlines()[-count:]]


@dataclass
class Check:
    """A run of steps within ``budget`` seconds from now; report, log and files of children are under ``out``."""

    out: Path
    budget: float
    command: str
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start = time.monotonic()
        self.children = self.out / "children"
        self.children.mkdir(parents=True, exist_ok=True)
        self.report, self.log = self.out / "gpu-check.json", self.out / "gpu-check.log"

    @property
    def left(self) -> float:
        return self.start + self.budget - time.monotonic()

    # --- the report ---------------------------------------------------------------------------------------------------

    def write(self) -> None:
        summary: dict[str, list[str]] = {}
        for name, part in self.parts.items():
            summary.setdefault(part["status"], []).append(name)
        found = {
            "command": self.command,
            "budget_seconds": self.budget,
            "seconds": round(time.monotonic() - self.start, 1),
            **self.about,
            "summary": summary,
            "parts": self.parts,
        }
        write_atomically(self.report, json.dumps(found, indent=1) + "\n")

    def record(self, name: str, part: dict[str, Any]) -> None:
        self.parts.pop(name, None)  # to the end, in the order of this run
        self.parts[name] = part
        self.write()
        shown = f", {part['seconds']} s" if "seconds" in part else ""
        why = f": {part['reason']}" if "reason" in part else ""
        print(f"[{self.budget - self.left:5.0f} s] {name}: {part['status']}{shown}{why}", flush=True)
        if part["status"] in (FAILED, TIMED_OUT):
            for line in part.get("last_lines", []):
                print(f"    {line}", flush=True)

    # --- running ------------------------------------------------------------------------------------------------------

    def run_steps(self, steps: list[Step]) -> None:
        """All that have not been done; ``parts`` with the status ok have."""
        for i, step in enumerate(steps):
            end = time.monotonic() + share(self.left, [s.seconds for s in steps[i:]])
            if step.needs and self.parts.get(step.needs, {"status": OK})["status"] != OK:
                self.record(step.name, {"status": NOT_STARTED, "reason": f"{step.needs} has not succeeded"})
                continue
            if self.parts.get(step.name, {}).get("status") != OK:
                self.parts.pop(step.name, None)  # what stood for all parts of the step
            try:
                parts = list(step.parts())
            except Exception as error:
                self.record(step.name, _failure(error, 0.0))
                continue
            for part in parts:
                if self.parts.get(part.name, {}).get("status") == OK:
                    print(f"{part.name}: kept from an earlier run", flush=True)
            todo = [part for part in parts if self.parts.get(part.name, {}).get("status") != OK]
            for j, part in enumerate(todo):
                left = end - time.monotonic()
                self.run_part(part, left if part.seconds else share(left, [p.weight for p in todo[j:]]))

    def run_part(self, part: Part, left: float) -> None:
        needed = part.seconds or LEAST_SECONDS
        if left < needed:
            reason = f"{max(0.0, left):.0f} s left, it needs {needed:.0f}"
            self.record(part.name, {"status": NOT_STARTED, "reason": reason})
            return
        limit, start = part.seconds or left, time.monotonic()
        try:
            found = part.run(limit)
        except Exception as error:
            found = _failure(error, time.monotonic() - start)
        except Interrupted as signalled:
            self.record(part.name, {"status": INTERRUPTED, "reason": str(signalled)})
            raise
        self.record(part.name, {"budget_seconds": round(limit, 1), **found})

    def run_child(self, command: list[str], limit: float, **env: str) -> dict[str, Any]:
        """Runs a command in the checkout: how it ended, its seconds and last lines. All its output goes to the log."""
        output, start = self.children / "output.txt", time.monotonic()
        found: dict[str, Any] = {"command": plain(" ".join(command)), "status": OK, "exit_code": 0}
        try:
            code = self._wait(command, output, limit, env)
        except OSError as error:
            reason = f"{command[0]} cannot be run: {error.strerror}"
            return {**found, "status": MISSING, "exit_code": 127, "reason": plain(reason)}
        finally:
            text = plain(output.read_text(errors="replace")) if output.exists() else ""
            seconds = round(time.monotonic() - start, 1)
            self._log(f"\n+ {found['command']}\n{shortened(text, LOG_OF_COMMAND)}\n({seconds} s)\n")
        if code is None:
            found |= {"status": TIMED_OUT, "reason": f"ended after its {limit:.0f} s"}
        elif code:
            found["status"] = FAILED
        return {**found, "exit_code": code, "seconds": seconds, "last_lines": last_lines(text)}

    def output(self) -> str:
        """All that the latest child has printed."""
        return (self.children / "output.txt").read_text(errors="replace")

    def _wait(self, command: list[str], output: Path, limit: float, env: dict[str, str]) -> int | None:
        """The exit code, or None for what was out of time. Nothing that the command started is left running."""
        path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")]))
        with output.open("wb") as file:
            child = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return child.wait(limit)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()

    def _log(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(text)
        if self.log.stat().st_size > LOG_BYTES:
            self.log.write_bytes(self.log.read_bytes()[-LOG_BYTES:])

    def child_file(self, name: str) -> Path:
        """Where a child may leave a file; none is there."""
        file = self.children / name
        file.unlink(missing_ok=True)
        return file


def _failure(error: Exception, seconds: float) -> dict[str, Any]:
    lines = last_lines(plain("".join(traceback.format_exception(error))))
    reason = f"{type(error).__name__}: {error}"
    return {"status": FAILED, "reason": plain(reason)[:300], "seconds": round(seconds, 1), "last_lines": lines}


def taken(file: Path) -> Any:
    """What a child left in a JSON file, None where it left none; the file goes."""
    if not file.exists():
        return None
    with contextlib.suppress(ValueError):  # it was ended while it wrote
        found = json.loads(file.read_text())
        file.unlink()
        return found
    return None


@contextlib.contextmanager
def ended_by_signals() -> Any:
    """SIGTERM and SIGINT raise Interrupted, the first of them alone."""

    def handle(number: int, frame: Any) -> None:
        for other in (signal.SIGTERM, signal.SIGINT):
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(f"ended by {signal.Signals(number).name}")

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
