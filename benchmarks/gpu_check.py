"""What `make gpu-check` runs on a machine with a GPU and the CUDA toolkit. It installs nothing.

    python benchmarks/gpu_check.py [--only PART,...] [--budget SECONDS] [--out FILE.json]

    build      builds the extension for this GPU; nothing goes on without it
    bench      the commands of `make bench`: kernels, bf16, iterations, host time, 12 tails; the rest after the tests
    exercise   every kernel, with tables of every size, checked
    tests      the tests marked cuda, by folder; after a crash the rest goes on in a new process
    sanitize   the exercise under the tools of compute-sanitizer

Exercise, tests and sanitize run at the same time, the others alone.
The report, build/gpu-check.json, is written before and after each part, so that it keeps what was done, whatever ends
the run; build/gpu-check.log has the output of each command once it has ended. With the same commit, torch and GPU a
later run adds its parts to the report: run what is left with --only.
Without --out, a copy goes to benchmarks/results. Exit codes: 0 all parts of the report are "ok"; 1 one is not, and the
last line names it; 2 a bad argument; 3 torch finds no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # a checkout need not be installed
REPORT = ROOT / "build" / "gpu-check.json"
OK, RUNNING, FAILED, TIMED_OUT, NOT_STARTED = "ok", "running", "failed", "timed out", "not started"
PARTS = ("build", "bench", "exercise", "tests", "sanitize")
WORTH = ("kernels", "bf16", "loop", "host", "tail", "ops")  # scripts, by what their figures are worth
TAILS_FIRST, BENCH_S = 12, 120.0  # before the tests; the longest for one
FOLDERS = ("ops", "optimizers", "amp", "integration", "apex", "reliability")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
EXERCISE = "tests/ptx/exercise.py"
GPU_FIELDS = "name driver_version memory.total ecc.mode.current clocks.max.sm clocks.max.memory power.limit"
# After one of these, every CUDA call of the process fails.
LOST = ("CUDA error", "illegal memory access", "unspecified launch failure")
CHILDREN: set[int] = set()  # process groups that run
RESULT = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.M)


def output_of(*command: str) -> str | None:
    """None where the tool is missing, hangs or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cuda_tool(name: str) -> str:
    """Where a program of the CUDA toolkit is; its bare name if it is nowhere."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return next(filter(None, map(shutil.which, [f"{home}/bin/{name}", name, f"/usr/local/cuda/bin/{name}"])), name)


def facts() -> dict[str, Any]:
    import torch

    fields, changing = GPU_FIELDS.split(), ("ampctx", "csrc", "tests", "benchmarks/*.py", "setup.py")
    values = output_of("nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader") or ""
    versions = {tool: output_of(cuda_tool(tool), "--version") for tool in ("nvcc", "compute-sanitizer")}
    found = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": output_of("git", "rev-parse", "HEAD"),
        "changed": output_of("git", "status", "--porcelain", "--", *changing),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "nvidia_smi": dict(zip(fields, values.split(", "), strict=False)),
        **{tool: text and text.splitlines()[-1] for tool, text in versions.items()},
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "capability": f"{properties.major}{properties.minor}"}
        found["multiprocessors"] = properties.multi_processor_count
    return found


def kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def end_all(number: int, frame: Any) -> None:
    """At once: threads that wait for a process hold up an orderly exit. The report is on the disk."""
    for child in list(CHILDREN):
        kill(child)
    os._exit(128 + number)


def parts() -> list[str]:
    found = ["build", "exercise", *(f"tests-{folder}" for folder in FOLDERS), *(f"sanitize-{tool}" for tool in TOOLS)]
    return found + [f"bench-{entry.name}" for entries in benches() for entry in entries]


def benches() -> tuple[list[Any], list[Any]]:
    """The entries of the suite that run before the tests, and those after."""
    import suite

    found = sorted(suite.entries("cuda"), key=lambda entry: WORTH.index(entry.script))
    first = [entry.script for entry in found].index("tail") + TAILS_FIRST
    return found[:first], found[first:]


def is_of(name: str, parts: Iterable[str]) -> bool:
    """Whether a part is among these, or belongs to one: "tests-ops" to "tests"."""
    return any(name == part or name.startswith(f"{part}-") for part in parts)


class Check:
    """``report`` is the JSON, ``parts`` its parts by name, such as "tests-ops"."""

    def __init__(self, file: Path, facts: dict[str, Any], budget: float, command: str) -> None:
        self.file, self.end, self.budget = file, time.monotonic() + budget, budget
        self.report: dict[str, Any] = {"command": command, "facts": facts, "parts": {}}
        before = json.loads(file.read_text()) if file.exists() else {"facts": {}}
        if all(before["facts"].get(key, "") == facts[key] for key in ("commit", "changed", "torch", "gpu")):
            self.report["parts"] = before["parts"]
        self.parts: dict[str, dict[str, Any]] = self.report["parts"]
        self.lock = threading.Lock()  # of the report and the log

    def write(self, **parts: dict[str, Any]) -> None:
        with self.lock:
            self.parts.update(parts)
            new = self.file.with_suffix(".new")
            new.write_text(json.dumps(self.report, indent=1) + "\n")
            new.replace(self.file)

    def part(self, name: str, limit: float, run: Callable[[float], dict[str, Any]]) -> bool:
        """Runs a part for as many seconds at the most, within the budget; what it raises is a failure of its own."""
        limit = min(limit, self.end - time.monotonic())
        self.write(**{name: {"status": RUNNING}})
        start, found = time.monotonic(), {"status": NOT_STARTED, "reason": "no time is left"}
        try:
            found = run(limit) if limit >= 1 else found
        except Exception as error:
            found = {"status": FAILED, "reason": f"{type(error).__name__}: {error}"}
        self.write(**{name: {**found, "seconds": round(time.monotonic() - start, 1)}})
        lines = found.get("last_lines", []) if found["status"] != OK else []
        shown = {key: value for key, value in found.items() if key not in ("last_lines", "figures", "command")}
        print(f"{name}: {shown}", *lines, sep="\n    ", flush=True)
        return found["status"] == OK

    def child(self, limit: float, *command: str, **env: str) -> tuple[dict[str, Any], str]:
        """How a command in the checkout ended, and what it printed. Nothing that it started is left running."""
        mine = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "AMPCTX_REQUIRE_EXTENSION": "cuda"}
        env = {**os.environ, **mine, **env}
        with tempfile.TemporaryFile() as out:
            child = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
            CHILDREN.add(child.pid)
            try:
                code = child.wait(max(1.0, limit))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                kill(child.pid)
                child.wait()
                CHILDREN.discard(child.pid)
                out.seek(0)
                text = out.read().decode(errors="replace")
                with self.lock, self.file.with_suffix(".log").open("a") as log:
                    log.write(text)
        status = TIMED_OUT if code is None else FAILED if code else OK
        lines = [line[-300:].replace(str(ROOT), ".") for line in text.strip().splitlines()[-12:]]
        shown = " ".join(command).replace(sys.executable, "python").replace(str(ROOT), ".")
        return {"status": status, "command": shown, "exit_code": code, "last_lines": lines}, text

    # --- the parts ----------------------------------------------------------------------------------------------------

    def build(self) -> None:
        archs = {"AMPCTX_CUDA": "1", "AMPCTX_CUDA_ARCHS": self.report["facts"]["capability"]}
        command = (sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")  # compiles what has changed
        self.part("build", self.budget, lambda limit: self.child(limit, *command, **archs)[0])

    def pytest(self, folder: str, limit: float) -> dict[str, Any]:
        """Counts from the lines of `pytest -v`, so that a run that is ended still counts. A process that crashes or
        loses its CUDA context costs the test it was in: the others run in a new one."""
        command = ("-m", "pytest", "-v", "-m", "cuda", "--tb=short", "-p", "no:cacheprovider", "--maxfail=20", folder)
        end, results, code, known = time.monotonic() + limit, dict[str, str](), -1, -1
        while code not in (0, 5, None) and known < len(results):  # 5: nothing was left
            known, without = len(results), [f"--deselect={name}" for name in results]
            done, text = self.child(end - time.monotonic(), sys.executable, *command, *without)
            code, is_lost = done["exit_code"], any(words in text for words in LOST)
            for name, result in RESULT.findall(text):
                results[name] = result.lower()
                if is_lost and result in ("FAILED", "ERROR"):
                    break  # what came after it has to run again
            else:
                running = re.findall(r"^(tests/\S+::\S+)", text, re.M)[-1:] if code not in (0, 1, 2, 5) else []
                results |= dict.fromkeys({*running} - results.keys(), "timed out" if code is None else "crashed")
        counts = {result: list(results.values()).count(result) for result in sorted(set(results.values()))}
        bad = [name for name, result in results.items() if result not in ("passed", "skipped", "xfail")]
        if code in (0, 5):
            done["status"] = FAILED if bad or not results else OK
        return {**done, "command": f"python {' '.join(command)}", "counts": counts, "failing": bad}

    def sanitize(self, tool: str, limit: float) -> dict[str, Any]:
        words = [cuda_tool("compute-sanitizer"), "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
        if tool != "initcheck":  # which has to see who writes the memory that the kernels read
            words += ["--kernel-name", "kns=ampctx"]
        # Few tensors, which lie in memory of their own, without the caching allocator: it knows the end of each.
        env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {}
        words += [sys.executable, EXERCISE, "--tensors", "7" if tool in ("memcheck", "initcheck") else "300"]
        return self.child(limit, *words, **env)[0]

    def together(self, only: list[str]) -> None:
        """Each in a thread, which waits for its process: a test takes the host more time than the GPU."""
        calls: dict[str, Callable[[float], Any]] = {"exercise": lambda s: self.child(s, sys.executable, EXERCISE)[0]}
        calls |= {f"tests-{folder}": partial(self.pytest, f"tests/{folder}") for folder in FOLDERS}
        calls |= {f"sanitize-{tool}": partial(self.sanitize, tool) for tool in TOOLS}
        with ThreadPoolExecutor(len(calls)) as pool:
            wanted = [name for name in calls if is_of(name, only)]
            list(pool.map(lambda name: self.part(name, self.budget, calls[name]), wanted))

    def bench(self, entries: list[Any], only: list[str]) -> None:
        import measuring

        figures = self.file.with_suffix(".csv")

        def run(entry: Any, limit: float) -> dict[str, Any]:
            figures.unlink(missing_ok=True)
            done, _ = self.child(limit, sys.executable, *entry.command(figures, 11))
            return {**done, "figures": measuring.read(figures) if figures.exists() else {}}

        for entry in entries:
            if is_of(f"bench-{entry.name}", only):
                self.part(f"bench-{entry.name}", BENCH_S, partial(run, entry))
        figures.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,...", help="or parts of these: tests-ops")
    parser.add_argument("--budget", type=float, default=720.0, metavar="SECONDS", help="of all together; default 720")
    parser.add_argument("--out", type=Path, default=REPORT, metavar="FILE.json")
    args = parser.parse_args(arguments)
    only = args.only.split(",")
    if unknown := [name for name in only if not any(is_of(part, [name]) for part in parts())]:
        parser.error(f"--only: {', '.join(unknown)} is none of {', '.join(PARTS)}, and of none of these")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    command = f"python benchmarks/gpu_check.py --only {args.only} --budget {args.budget:g}"
    check = Check(args.out.resolve(), facts(), args.budget, command)
    check.write()
    check.file.with_suffix(".log").unlink(missing_ok=True)
    if (found := check.report["facts"])["gpu"] is None:
        print(f"gpu-check: nothing has run: torch {found['torch']} finds no CUDA device")
        return 3
    if "build" in only:
        check.build()
    if check.parts.get("build", {"status": OK})["status"] == OK:
        before, after = benches()
        check.bench(before, only)
        check.together(only)
        check.bench(after, only)
    if args.out == REPORT:
        name = re.sub(r"[^a-z0-9]+", "-", found["gpu"].lower()).strip("-")
        shutil.copy(REPORT, ROOT / "benchmarks" / "results" / f"gpu-check-{name}.json")
    bad = [f"{name} ({part['status']})" for name, part in check.parts.items() if part["status"] != OK]
    print(f"wrote {args.out}\ngpu-check: {', '.join(bad) or 'all is well'}")
    return min(len(bad), 1)


if __name__ == "__main__":
    for ends in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ends, end_all)
    sys.exit(main())
