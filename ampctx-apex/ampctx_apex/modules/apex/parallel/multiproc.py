"""``python -m apex.parallel.multiproc script args...``: one process of the script for each GPU of this machine.

Each gets ``--world-size N --rank i`` behind its arguments, or in place of the values given there. The output of ranks
above 0 goes to GPU_i.log in the current directory. N is ``--world-size`` where the arguments have it, ``--nproc N``
before the script, or the number of GPUs, and at least 1. The processes have apex's module names. When one fails, the
others are ended, and its exit code is that of the command.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch


def _with_option(arguments: Sequence[str], option: str, value: int) -> list[str]:
    result = list(arguments)
    if option in result[:-1]:
        result[result.index(option) + 1] = str(value)
        return result
    return [*result, option, str(value)]


def _world_size(arguments: list[str]) -> int:
    """The number of processes; removes ``--nproc N`` from ``arguments``."""
    world_size = max(torch.cuda.device_count(), 1)
    if arguments[:1] == ["--nproc"]:
        world_size = int(arguments[1])
        del arguments[:2]
    if "--world-size" in arguments:
        world_size = int(arguments[arguments.index("--world-size") + 1])
    return world_size


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """0 if all exit with 0, else the first failing exit code, after terminating the others."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()
            return failed[0]
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    world_size = _world_size(arguments)
    if not arguments:
        sys.exit("usage: python -m apex.parallel.multiproc [--nproc N] script [arguments]")
    arguments = _with_option(arguments, "--world-size", world_size)
    with ExitStack() as logs:
        processes = []
        for rank in range(world_size):
            stdout = logs.enter_context(open(f"GPU_{rank}.log", "w")) if rank else None
            command = [sys.executable, "-m", "ampctx", "run", *_with_option(arguments, "--rank", rank)]
            processes.append(subprocess.Popen(command, stdout=stdout))
        return _wait(processes)


if __name__ == "__main__":
    sys.exit(main())
