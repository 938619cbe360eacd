"""The steps of gpu-check, in order, with the share of its seconds that each has."""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gpu_facts
import pytest_progress
from check_runner import FAILED, LEAST_SECONDS, MISSING, OK, TIMED_OUT, Check, Part, Step, taken

SCRIPT = "benchmarks/gpu_check.py"
ON_CUDA = {"AMPCTX_REQUIRE_EXTENSION": "cuda"}
SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Worst first, and each in a process of its own: an access that is not allowed ends all CUDA calls of its process. With
# the weight of each in the time of all.
TESTS = {
    "tests-kernels": (3, "tests/ops --ignore=tests/ops/test_optimizer_steps.py --ignore=tests/ops/test_op_errors.py"),
    "tests-steps": (3, "tests/ops/test_optimizer_steps.py tests/ops/test_op_errors.py"),
    "tests-optimizers": (1, "tests/optimizers"),
    "tests-amp": (2, "tests/amp tests/integration"),
    "tests-compat": (2, "tests/compat"),
    "tests-rest": (
        1,
        "tests --ignore=tests/ops --ignore=tests/optimizers --ignore=tests/amp --ignore=tests/integration"
        " --ignore=tests/compat",
    ),
}
# What a benchmark is given, by script and model: the start of torch, the tensors, and rounds with room to spare.
BENCH_SECONDS = {
    ("tail", "resnet50"): 25.0, ("tail", "bert-large"): 40.0, ("tail", "tiny5000"): 40.0,
    ("ops", "resnet50"): 40.0, ("ops", "bert-large"): 60.0, ("ops", "tiny5000"): 60.0,
    ("host", ""): 60.0, ("loop", "resnet50"): 120.0,
}  # fmt: skip


class GpuCheck:
    """The steps on the GPU that the facts name."""

    def __init__(self, check: Check, facts: dict[str, Any]) -> None:
        self.check, self.facts = check, facts

    def steps(self) -> list[Step]:
        one = {"build": self.build, "exercise": self.exercise, "graph": self.graph, "ranks": self.ranks}

        def alone(name: str) -> Callable[[], list[Part]]:
            return lambda: [Part(name, one[name])]

        return [
            Step("build", 220, alone("build")),  # nothing goes on without it
            Step("exercise", 60, alone("exercise"), needs="build"),
            Step("tests", 200, self.tests, needs="build"),
            Step("sanitize", 150, self.sanitize, needs="build"),
            Step("graph", 30, alone("graph"), needs="build"),
            Step("ranks", 40, alone("ranks"), needs="build"),
            Step("bench", 60, self.bench, needs="build"),
        ]

    def python(self, limit: float, *command: str, file: str | None = None, **env: str) -> dict[str, Any]:
        """Runs a script of the checkout; what it leaves in its JSON is under "found"."""
        words = [sys.executable, *command]
        if file is None:
            return self.check.run_child(words, limit, **env)
        path = self.check.child_file(file)
        done = self.check.run_child([*words, "--json", str(path)], limit, **env)
        return {**done, "found": taken(path)}

    # --- build --------------------------------------------------------------------------------------------------------

    def extension(self, limit: float, **env: str) -> dict[str, Any]:
        return self.python(limit, SCRIPT, "extension", file="extension.json", **env)

    def build(self, limit: float) -> dict[str, Any]:
        """For this GPU alone, where what is there has no code for it or is older than its sources."""
        end = time.monotonic() + limit
        there = self.extension(limit)
        if there["found"] and gpu_facts.serves(there["found"], self.facts["capability"]):
            return {**there, "built": False}
        major, minor = self.facts["capability"]
        env = {"AMPCTX_CUDA": "1", "AMPCTX_CUDA_ARCHS": f"{major}{minor}"}
        left = max(LEAST_SECONDS, end - time.monotonic())
        done = self.python(left, "setup.py", "build_ext", "--inplace", "--force", **env)
        if done["status"] != OK:
            missing = next((line for line in done["last_lines"] if "was not found" in line), None)
            return {**done, **({"status": MISSING, "reason": missing} if missing else {}), "built": False}
        now = self.extension(max(LEAST_SECONDS, end - time.monotonic()), **ON_CUDA)
        seconds = round(limit - (end - time.monotonic()), 1)
        return {**now, "seconds": seconds, "built": True, "build_seconds": done["seconds"]}

    # --- kernels and tests --------------------------------------------------------------------------------------------

    def exercise(self, limit: float) -> dict[str, Any]:
        return self.python(limit, SCRIPT, "exercise", file="exercise.json", **ON_CUDA)

    def tests(self) -> Iterator[Part]:
        for name, (weight, paths) in TESTS.items():
            yield Part(name, partial(self.test_group, name, paths.split()), weight=weight)

    def test_group(self, name: str, paths: list[str], limit: float) -> dict[str, Any]:
        """What runs after a crash or a lost context does so in a new process, without the tests that have run."""
        if not self.facts["tools"]["pytest"]:
            return {"status": MISSING, "reason": "pytest is not installed"}
        end, progress = time.monotonic() + limit, self.check.child_file(f"{name}.jsonl")
        options = ["-q", "--tb=short", "-m", "cuda", "--continue-on-collection-errors"]
        options += ["-p", "no:cacheprovider", "-p", "pytest_progress"]
        if importlib.util.find_spec("pytest_timeout"):  # ends the process, and the rest goes on in the next
            options += ["--timeout", "60", "--timeout-method", "thread"]
        env = {"AMPCTX_CHECK_PROGRESS": str(progress), **ON_CUDA}
        processes, seconds, results = 0, 0.0, -1
        while True:
            done = self.python(end - time.monotonic(), "-m", "pytest", *options, *paths, **env)
            processes, seconds = processes + 1, seconds + done["seconds"]
            found = pytest_progress.summary(progress)
            if done["status"] == TIMED_OUT:
                break
            for test in found["running"]:  # the process ended within it
                pytest_progress.append(progress, {"id": test, "outcome": "failed", "seconds": 0.0})
            found = pytest_progress.summary(progress)
            before, results = results, found["collected"] - found["not_run"]
            if not found["not_run"] or results == before or end - time.monotonic() < LEAST_SECONDS:
                break
        progress.unlink(missing_ok=True)
        if done["status"] == OK and (found["failing"] or found["not_run"] or not found["collected"]):
            done["status"] = FAILED
        return {**done, "seconds": round(seconds, 1), "processes": processes, **found}

    # --- compute-sanitizer, graph, ranks ------------------------------------------------------------------------------

    def sanitize(self) -> Iterator[Part]:
        for tool in SANITIZER_TOOLS:
            yield Part(f"sanitize-{tool}", partial(self.sanitize_with, tool))

    def sanitize_with(self, tool: str, limit: float) -> dict[str, Any]:
        """The exercise over large tables and tables on the device; small ones, too, where the end of each tensor is
        known: under memcheck."""
        file = self.check.child_file("exercise.json")
        options = f"--tool {tool} --error-exitcode 9 --print-limit {1000 if tool == 'initcheck' else 20}"
        command = [gpu_facts.cuda_tool("compute-sanitizer"), *options.split()]
        if tool != "initcheck":  # which has to see who writes the memory that the kernels read
            command += ["--kernel-name", "kns=ampctx"]
        # Without the caching allocator, which would hide accesses beyond a tensor within its blocks.
        env = {**ON_CUDA, **({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {})}
        tensors = "7,300,2500" if tool == "memcheck" else "300,2500"
        command += [sys.executable, SCRIPT, "exercise", "--tensors", tensors, "--json", str(file)]
        done = self.check.run_child(command, limit, **env)
        counts = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", "\n".join(done.get("last_lines", [])))
        errors = int(counts[-1]) if counts else None
        if errors:
            # Where initcheck speaks of torch's kernels alone, this number is 0.
            in_ampctx = len(re.findall(r"^=+\s+at .*ampctx", self.check.output(), re.M))
            done |= {"reason": f"{errors} errors", "reported_in_ampctx": in_ampctx}
        return {**done, "errors": errors, "found": taken(file)}

    def graph(self, limit: float) -> dict[str, Any]:
        return self.python(limit, SCRIPT, "replay", "--iterations", "1000", file="replay.json", **ON_CUDA)

    def ranks(self, limit: float) -> dict[str, Any]:
        return self.python(limit, SCRIPT, "ranks", file="ranks.json", **ON_CUDA)

    # --- benchmarks ---------------------------------------------------------------------------------------------------

    def bench(self) -> list[Part]:
        """The shortest first. Imports ampctx, and so torch, in this process."""
        from peers import packages
        from suite import entries

        def seconds(entry: Any) -> float:
            options = dict(zip(entry.options, entry.options[1:], strict=False))
            return BENCH_SECONDS[entry.script, options.get("--model", "")]

        def run(entry: Any, limit: float) -> dict[str, Any]:
            file = self.check.child_file(f"{entry.file}.json")
            command = (
                with_peers(entry.command(file, 11), packages) if entry.script == "tail" else entry.command(file, 11)
            )
            return {**self.python(limit, *command, **ON_CUDA), "found": taken(file)}

        found = sorted(entries("cuda"), key=lambda entry: (seconds(entry), not entry.goal))
        return [Part(f"bench-{entry.file}", partial(run, entry), seconds(entry)) for entry in found]


def with_peers(command: list[str], packages: Callable[[str], list[str]]) -> list[str]:
    """The command of a tail, against apex and TransformerEngine too where they have its optimizer."""
    more = packages(command[command.index("--optimizer") + 1])
    if not more:
        return command
    if "--against" not in command:
        return [*command, "--against", ",".join(["torch-fused", *more])]
    place = command.index("--against") + 1
    return [*command[:place], ",".join([command[place], *more]), *command[place + 1 :]]
