"""Runs the body of a test on several ranks, or a worker script whose output is collected."""

import contextlib
import datetime
import functools
import importlib
import inspect
import json
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import wait
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Ranks are forked from a process that has imported torch: an import takes longer than most workers.
CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = ("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "ampctx", "pytest")
CONTEXT.set_forkserver_preload([*_PRELOADED])

# Of a process that runs the bodies of tests.
RANK, RANKS = 0, 1
# Far beyond what a busy machine needs: only what hangs is ended.
BACKSTOP = 900.0


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_ranks(worker: str, ranks: int, rendezvous: Path, *more: str) -> list[dict]:
    """What each rank of ``tests/<worker>`` printed: one JSON object each. ``more``: arguments after the rank."""
    script, given = ROOT / "tests" / worker, environment()
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(ranks)]
        processes = [
            CONTEXT.Process(
                target=_rank, args=(script, [str(rendezvous), str(ranks), str(rank), *more], given, *written)
            )
            for rank, written in enumerate(files)
        ]
        end = time.monotonic() + BACKSTOP
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
    _become(script.parent, given, out, errors)
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def _become(folder: Path, given: dict[str, str], out: Path, errors: Path) -> None:
    import torch

    for number, file in ((1, out), (2, errors)):
        with file.open("wb") as written:
            os.dup2(written.fileno(), number)
    os.environ.clear()
    os.environ.update(given)
    torch.set_num_threads(1)
    sys.path[:0] = [str(folder), str(Path(__file__).parent)]
    import ampctx

    warnings.simplefilter("error")
    warnings.simplefilter("ignore", ampctx.AmpWarning)  # as in conftest.py


# --- bodies of tests --------------------------------------------------------------------------------------------------


def on_ranks(number: int):
    """Has the body of a test run on so many ranks, in a gloo process group; a test's parameters have to be picklable.

    The ranks stay for the next test of the folder, unless one has failed. What they compare between them goes through
    ``all_ranks``.
    """

    def decorate(test):
        @functools.wraps(test)
        def start(**params):
            script = Path(test.__code__.co_filename)
            for pool in [pool for pool in _POOLS.values() if pool.tests != script.parent]:
                pool.close()
            pool = _POOLS.get(number) or _Pool(script.parent, number)
            pool.run(script.stem, test.__name__, params)

        return start

    return decorate


def all_ranks(value: object) -> list:
    """What each rank has in the place of ``value``."""
    import torch.distributed as dist

    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@functools.cache
def flat_mesh():
    """All ranks in one dimension."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (RANKS,))


def whole(t):
    """A copy of a tensor, or of all parts of a DTensor, in fp32."""
    t = t.detach()
    return getattr(t, "full_tensor", lambda: t)().float().clone()


def weights(model) -> list:
    return [whole(p) for p in model.parameters()]


def distance(some, others) -> float:
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(some, others, strict=True))


@contextlib.contextmanager
def counted_all_reduce():
    """The bytes of each ``all_reduce`` of ours."""
    import torch.distributed as dist

    sizes, original = [], dist.all_reduce

    def counted(t, *args, **kwargs):
        sizes.append(t.nbytes)
        return original(t, *args, **kwargs)

    dist.all_reduce = counted
    try:
        yield sizes
    finally:
        dist.all_reduce = original


_POOLS: dict[int, "_Pool"] = {}


class _Pool:
    """The ranks of a folder of tests."""

    def __init__(self, tests: Path, number: int) -> None:
        self.tests, self._number = tests, number
        self._folder = tempfile.TemporaryDirectory()
        self._ranks = []
        for rank in range(number):
            mine, theirs = CONTEXT.Pipe()
            given = (tests, Path(self._folder.name), environment(), rank, number, theirs)
            process = CONTEXT.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((mine, process))
        _POOLS[number] = self

    def run(self, module: str, test: str, params: dict) -> None:
        pipes = [pipe for pipe, _ in self._ranks]
        for pipe in pipes:
            pipe.send((module, test, params))
        answers, end = {}, time.monotonic() + BACKSTOP
        while len(answers) < len(pipes):
            ready = wait([pipe for pipe in pipes if pipe not in answers], max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                try:
                    answers[pipe] = pipe.recv()
                except EOFError:
                    answers[pipe] = "the process has ended"
            if any(answers.values()):
                end = min(end, time.monotonic() + 5)  # the others may wait for it
        found = [f"rank {i}: {problem}" for i, pipe in enumerate(pipes) if (problem := answers.get(pipe, "no answer"))]
        if found:
            errors = [path.read_text() for path in sorted(Path(self._folder.name).glob("*.err"))]
            self.close()
            pytest.fail("\n".join([*found, *errors]), pytrace=False)

    def close(self) -> None:
        for pipe, process in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._folder.cleanup()
        del _POOLS[self._number]


def _serve(tests: Path, folder: Path, given: dict[str, str], rank: int, ranks: int, pipe) -> None:
    global RANK, RANKS
    RANK, RANKS = rank, ranks
    _become(tests, given, folder / f"{RANK}.out", folder / f"{RANK}.err")
    import torch.distributed as dist

    store, limit = f"file://{folder / 'rendezvous'}", datetime.timedelta(seconds=BACKSTOP)
    dist.init_process_group("gloo", init_method=store, rank=RANK, world_size=RANKS, timeout=limit)
    while True:
        module, test, params = pipe.recv()
        try:
            inspect.unwrap(getattr(importlib.import_module(module), test))(**params)
        except BaseException:
            pipe.send(traceback.format_exc())
        else:
            pipe.send("")
