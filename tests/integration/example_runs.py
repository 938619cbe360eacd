"""Runs examples as a user does: a process of their own. What they refuse, and variants, run in this process."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ampctx import amp

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / script), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # the package of this tree, not another that is installed
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )


def _main(script: str, arguments: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    threads = torch.get_num_threads()  # the examples set it
    try:
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
        amp.reset()


def refusal(script: str, *arguments: object, cwd: Path, monkeypatch, capsys) -> str:
    """What an example says on stderr when it exits with code 2; in this process, as no training is reached."""
    monkeypatch.chdir(cwd)
    with pytest.raises(SystemExit) as exit:
        _main(script, arguments, monkeypatch)
    assert exit.value.code == 2
    return capsys.readouterr().err


def output(script: str, *arguments: object, monkeypatch, capsys) -> str:
    """What an example prints, in this process: for variants of a run that had one of its own."""
    with torch.random.fork_rng():
        _main(script, arguments, monkeypatch)
    return capsys.readouterr().out
