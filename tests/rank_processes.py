"""Starts the ranks of a worker script over gloo and collects what they print."""

import json
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Ranks are forked from a process that has imported torch: an import takes longer than most workers.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed", "ampctx"])


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_ranks(worker: str, ranks: int, rendezvous: Path, timeout: float = 240, *more: str) -> list[dict]:
    """What each rank of ``tests/<worker>`` printed: one JSON object each. ``more``: arguments after the rank."""
    script, given = ROOT / "tests" / worker, environment()
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(ranks)]
        processes = [
            _CONTEXT.Process(
                target=_rank, args=(script, [str(rendezvous), str(ranks), str(rank), *more], given, *written)
            )
            for rank, written in enumerate(files)
        ]
        end = time.monotonic() + timeout
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(0.0, end - time.monotonic()))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
        for process, (_, errors) in zip(processes, files, strict=True):
            # None: killed after the timeout.
            assert process.exitcode == 0, f"exit code {process.exitcode}\n{errors.read_text()}"
        return [json.loads(out.read_text()) for out, _ in files]


def _rank(script: Path, arguments: list[str], given: dict[str, str], out: Path, errors: Path) -> None:
    import torch

    for number, file in ((1, out), (2, errors)):
        with file.open("wb") as written:
            os.dup2(written.fileno(), number)
    os.environ.clear()
    os.environ.update(given)
    torch.set_num_threads(1)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    warnings.simplefilter("error")
    runpy.run_path(str(script), run_name="__main__")
