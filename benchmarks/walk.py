"""The walk of one training step through ampctx: every function that is entered, in order, as an indented list.

    python benchmarks/walk.py                   counts, of every part of a step
    python benchmarks/walk.py step exit         the walks of these parts, in full

A function counts once, however often it is entered. So does a lambda, and up to Python 3.11 a comprehension. The fourth
iteration is counted, when everything that is kept from step to step is there. AMPCTX_PLAN=0 shows the plain walk.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import ampctx
from ampctx import GradScaler, amp
from ampctx.optimizers import FusedAdam

PACKAGE = Path(ampctx.__file__).resolve().parent
ROUNDS = 4


class Entry(NamedTuple):
    """A function that was entered: how deep, and the file below ampctx/."""

    depth: int
    file: str
    function: str


def walked(call: Callable[[], Any]) -> list[Entry]:
    """The functions of ampctx that ``call`` enters."""
    entries: list[Entry] = []
    depths: dict[FrameType, int] = {}  # kept, so that no later frame is taken for one of them

    def notice(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(PACKAGE) or frame in depths:
            return
        above = frame.f_back
        while above is not None and above not in depths:
            above = above.f_back
        depths[frame] = depths[above] + 1 if above else 0
        name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        entries.append(Entry(depths[frame], str(path.relative_to(PACKAGE)), name))

    sys.setprofile(notice)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entries


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def parts_of_a_block() -> dict[str, list[Entry]]:
    """Forward, enter, exit and step of FusedAdam at O2."""
    amp.reset()
    model = _network()
    model, optimizer = amp.initialize(model, FusedAdam(model.parameters(), lr=1e-3), opt_level="O2", verbosity=0)
    parts: dict[str, list[Entry]] = {}
    made: list[Any] = []  # the loss, and the scaled one
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        parts["forward"] = walked(lambda: made.append(model(torch.ones(2, 8)).sum()))
        block, stack = amp.scale_loss(made[-1], optimizer), ExitStack()
        parts["enter"] = walked(lambda stack=stack, block=block: made.append(stack.enter_context(block)))
        made[-1].backward()
        parts["exit"] = walked(stack.close)
        parts["step"] = walked(optimizer.step)
    amp.reset()
    return parts


def parts_of_a_scaler() -> dict[str, list[Entry]]:
    """``GradScaler.step`` with FusedAdam."""
    model = _network()
    optimizer, scaler = FusedAdam(model.parameters(), lr=1e-3), GradScaler("cpu")
    parts: dict[str, list[Entry]] = {}
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 8)).sum()).backward()
        parts["GradScaler.step"] = walked(lambda: scaler.step(optimizer))
        scaler.update()
    return parts


def counts(entries: list[Entry]) -> str:
    functions = {(entry.file, entry.function) for entry in entries}
    return f"{len(functions)} functions in {len({file for file, _ in functions})} files, {len(entries)} calls"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="forward, enter, exit, step, GradScaler.step; none: counts alone")
    args = parser.parse_args(arguments)
    parts = parts_of_a_block() | parts_of_a_scaler()
    if unknown := set(args.parts) - parts.keys():
        parser.error(f"{min(unknown)} is none of {', '.join(parts)}")
    for name in args.parts:
        print(name, *(f"{'  ' * e.depth}{e.function}  ({e.file})" for e in parts[name]), "", sep="\n")
    for name, entries in parts.items():
        print(f"{name}: {counts(entries)}")


if __name__ == "__main__":
    main()
