"""What `make gpu-check` runs on a machine with a GPU: build, kernels, tests, compute-sanitizer, graph, ranks and
benchmarks.

    python benchmarks/gpu_check.py [--budget SECONDS] [--only STEP,...] [--resume] [--out DIR]
    python benchmarks/gpu_check.py exercise [--device cuda|cpu] [--tensors N,...]
    python benchmarks/gpu_check.py replay [--device cuda|cpu] [--iterations 1000]
    python benchmarks/gpu_check.py ranks [--device cuda|cpu]

DIR/gpu-check.json is the report, written anew after each part, and DIR/gpu-check.log the output of all commands. Exit
codes: 0 all is well; 1 something failed, was out of time or was not reached, and the last line names it; 2 a bad
argument; 3 torch finds no GPU. Installs nothing: the python that runs it must have torch with CUDA, pytest and
setuptools.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import gpu_facts
from check_runner import OK, ROOT, Check, Interrupted, Part, ended_by_signals, taken, write_atomically
from gpu_steps import SCRIPT, GpuCheck

sys.path.append(str(ROOT))  # a checkout need not be installed
STEPS = ("build", "exercise", "tests", "sanitize", "graph", "ranks", "bench")
FACTS_SECONDS = 90.0
ALL_WELL, NOT_WELL, NO_GPU = 0, 1, 3


def some_steps(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    for name in found:
        if name not in STEPS:
            raise argparse.ArgumentTypeError(f"{name!r} is no step; the steps are {', '.join(STEPS)}")
    return found


def seconds(text: str) -> float:
    found = float(text)
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} seconds are not above 0")
    return found


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gpu_check.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=seconds, default=540.0, metavar="SECONDS", help="of all together; default 540")
    parser.add_argument("--only", type=some_steps, metavar="STEP,...", help=f"some of {', '.join(STEPS)}")
    parser.add_argument(
        "--resume", action="store_true", help="leave out what has succeeded with these sources, this torch and GPU"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where report and log go; default build/gpu-check")
    args = parser.parse_args(arguments)
    if args.out and args.out.exists() and not args.out.is_dir():
        parser.error(f"--out: {args.out} is no directory")
    return args


def facts_of(check: Check) -> dict[str, Any] | None:
    def run(limit: float) -> dict[str, Any]:
        file = check.child_file("facts.json")
        done = check.run_child([sys.executable, SCRIPT, "facts", str(file)], limit)
        return {**done, "found": taken(file)}

    check.run_part(Part("facts", run), min(FACTS_SECONDS, check.left))
    return check.parts["facts"].pop("found", None)


def earlier(report: Path) -> dict[str, Any] | None:
    """A report to go on from, with the facts that say whether that can be."""
    try:
        found = json.loads(report.read_text())
    except (OSError, ValueError) as error:
        print(f"--resume: {report} cannot be read ({type(error).__name__}); all runs anew", flush=True)
        return None
    return found if found.get("facts") else None


def kept(before: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """The parts of an earlier report; those that are ok need not run again. The build does: it sees what is there."""
    if any(before["facts"].get(name) != facts[name] for name in gpu_facts.IDENTITY):
        return {}
    parts = ((name, part) for name, part in before["parts"].items() if name not in ("facts", "build"))
    return {name: {**part, "kept": True} if part["status"] == OK else part for name, part in parts}


def resume(check: Check, before: dict[str, Any], facts: dict[str, Any]) -> None:
    """Takes over what counts of an earlier report. One of which nothing does stays in a file of its own."""
    check.parts = {"facts": check.parts["facts"], **kept(before, facts)}
    if len(check.parts) == 1 < len(before["parts"]):
        file = check.report.with_suffix(".before.json")
        write_atomically(file, json.dumps(before, indent=1) + "\n")
        print(f"--resume: {file.name} is of other sources, another torch or another GPU; all runs anew", flush=True)


def run(check: Check, resumed: dict[str, Any] | None, only: tuple[str, ...] | None) -> int:
    """The exit code."""
    if resumed:  # what ends this run before it has the facts must not take the report away
        check.parts |= resumed["parts"]
        check.about["facts"] = resumed["facts"]
    facts = facts_of(check)
    if facts is None:
        return NOT_WELL
    if resumed:
        resume(check, resumed, facts)
    check.about["facts"] = facts
    check.write()
    if facts["gpu"] is None:
        check.about["reason"] = f"nothing has run: {facts['why_no_gpu']}. Run it with a torch that sees the GPU"
        return NO_GPU
    steps = GpuCheck(check, facts).steps()
    check.run_steps([step for step in steps if only is None or step.name in only])
    return ALL_WELL if all(part["status"] == OK for part in check.parts.values()) else NOT_WELL


def finish(check: Check, code: int, publish: bool) -> None:
    """Writes the last report and says in one line what it holds."""
    shutil.rmtree(check.children, ignore_errors=True)
    check.about["exit_code"] = code
    check.write()
    gpu = (check.about.get("facts") or {}).get("gpu")
    if publish and gpu:
        name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
        results = ROOT / "benchmarks" / "results" / f"gpu-check-{name}.json"
        write_atomically(results, check.report.read_text())
        print(f"wrote {results.relative_to(ROOT)}")
    print(f"wrote {check.report}, {check.log}")
    if code == ALL_WELL:
        print("gpu-check: all is well")
    elif "reason" in check.about:
        print(f"gpu-check: {check.about['reason']}")
    else:
        wrong = [f"{name} ({part['status']})" for name, part in check.parts.items() if part["status"] != OK]
        print(f"gpu-check: {', '.join(wrong)}; --resume goes on with these")


def main(arguments: list[str]) -> int:
    started = time.monotonic()
    if arguments[:1] == ["exercise"]:
        import gpu_exercise

        return gpu_exercise.main(arguments[1:], started)
    if arguments[:1] == ["replay"]:
        import graph_replay

        return graph_replay.main(arguments[1:])
    if arguments[:1] == ["ranks"]:
        import gpu_ranks

        return gpu_ranks.main(arguments[1:])
    if arguments[:1] in (["facts"], ["extension"]):
        return gpu_facts.main(arguments[0], arguments[-1])
    args = parse(arguments)
    # Children run in the checkout, wherever this was started.
    out = (args.out or ROOT / "build" / "gpu-check").resolve()
    check = Check(out, args.budget, " ".join(["python", SCRIPT, *arguments]))
    resumed = earlier(check.report) if args.resume else None
    if not args.resume:
        check.log.unlink(missing_ok=True)
    with ended_by_signals():
        try:
            code = run(check, resumed, args.only)
        except Interrupted as signalled:
            check.about["reason"], code = str(signalled), NOT_WELL
        finish(check, code, args.out is None)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
