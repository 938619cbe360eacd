"""Who resumes exactly: an AdamW that is killed and resumed from its file, beside the same run without interruption.

    python benchmarks/resume.py [--only torch,ampctx] [--steps 40]

Each side trains a small model in processes of its own: one takes all steps; one saves after half of them and gets
SIGKILL; one, fresh, loads the file and takes the rest. Prints how weights and optimizer state of the first and the last
differ. The file holds ``model.state_dict()`` and ``optimizer.state_dict()``; the batches follow from the step's number.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import machine
from peers import Make, ours, peer
from torch import Tensor, nn

WIDTH = 64  # two layers of 8192 weights, which all sides keep in 8 bits, and biases, which none does
ROLES = ("whole", "killed", "resumed")
WITH_RNG = " with torch.get_rng_state()"
BF16, FP32 = torch.bfloat16, torch.float32


def of_peer(against: str, **attributes: Any) -> Make:
    def make(params: Any) -> Any:
        optimizer = peer("FusedAdam", against, "cpu")(params)
        vars(optimizer).update(attributes)
        return optimizer

    return make


of_ampctx = partial(partial, ours, "FusedAdam")


# The dtype of the weights, and the optimizer. optimi turns Kahan summation on for bf16 by itself.
SIDES: dict[str, tuple[torch.dtype, Make]] = {
    "torch AdamW fp32": (FP32, of_peer("torch-default")),
    "torch AdamW bf16": (BF16, of_peer("torch-default")),
    "torchao AdamW8bit fp32": (FP32, of_peer("torchao-8bit")),
    "torchao AdamW8bit bf16": (BF16, of_peer("torchao-8bit")),
    "torchao AdamW8bit bf16 stochastic": (BF16, of_peer("torchao-8bit", bf16_stochastic_round=True)),
    f"torchao AdamW8bit bf16 stochastic{WITH_RNG}": (BF16, of_peer("torchao-8bit", bf16_stochastic_round=True)),
    "bitsandbytes AdamW8bit fp32": (FP32, of_peer("bitsandbytes-8bit")),
    "bitsandbytes AdamW8bit bf16": (BF16, of_peer("bitsandbytes-8bit")),
    "optimi AdamW bf16 Kahan": (BF16, of_peer("optimi")),
    "ampctx FusedAdam bf16 split": (BF16, of_ampctx(master_weights="split")),
    "ampctx FusedAdam bf16 kahan": (BF16, of_ampctx(write_back="kahan")),
    "ampctx FusedAdam bf16 stochastic": (BF16, of_ampctx(write_back="stochastic")),
    "ampctx FusedAdam bf16 split 8bit": (BF16, of_ampctx(master_weights="split", state_dtype="8bit")),
    "ampctx FusedAdam fp32 8bit": (FP32, of_ampctx(state_dtype="8bit")),
}


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor and number in a state, by name; of a tensor made of others, such as codes and scales, these."""
    if hasattr(value, "__tensor_flatten__"):
        value = {inner: getattr(value, inner) for inner in value.__tensor_flatten__()[0]}
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from tensors(inner, f"{name}/{key}")
    elif isinstance(value, (Tensor, int, float)):
        yield name, torch.as_tensor(value)


def differences(found: Any, expected: Any) -> str:
    """ "bit for bit", or how many numbers differ and how far."""
    pairs = {name: [t] for name, t in tensors(expected)}
    for name, t in tensors(found):
        pairs.setdefault(name, []).append(t)
    odd = [name for name, both in pairs.items() if len({(t.dtype, t.shape) for t in both}) > 1 or len(both) < 2]
    if odd:
        return f"other dtypes or names: {', '.join(odd)}"
    gaps = torch.cat([(a.double() - b.double()).abs().flatten() for a, b in pairs.values()])
    if all(torch.equal(a, b) for a, b in pairs.values()):
        return "bit for bit"
    return f"{(gaps != 0).double().mean():.1%} differ, by up to {gaps.max():.1e}"


def train(side: str, role: str, steps: int, folder: Path) -> None:
    """What a child process does. Prints the two differences where it resumed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype, make = SIDES[side]
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)).to(dtype)
    optimizer = make(model.parameters())
    if role == "resumed":
        saved = torch.load(folder / "killed.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if side.endswith(WITH_RNG):
            torch.set_rng_state(saved["rng"])
    for step in range(steps // 2 if role == "resumed" else 0, steps // 2 if role == "killed" else steps):
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
        (model(x) - x.sin()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    if role == "resumed":
        whole = torch.load(folder / "whole.pt")
        print(differences(state["model"], whole["model"]))
        print(differences(state["optimizer"]["state"], whole["optimizer"]["state"]))
        return
    torch.save(state, folder / f"{role}.pt")
    if role == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def result(side: str, steps: int) -> list[str]:
    """The cells of a side: weights and state, or what its process said last."""
    with tempfile.TemporaryDirectory() as folder:
        for role in ROLES:
            command = [sys.executable, __file__, "--side", side, "--role", role, "--steps", str(steps)]
            done = subprocess.run([*command, "--folder", folder], capture_output=True, text=True, timeout=900)
            if done.returncode != (-signal.SIGKILL if role == "killed" else 0):
                said = done.stderr.strip().rpartition("\n")[2]
                return ["not installed" if said.startswith("LookupError: ") else f"{role}: {done.returncode}", said]
    return done.stdout.strip().split("\n")[-2:]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the beginnings of sides' names, with commas between")
    parser.add_argument("--steps", type=int, default=40, help="of the run; it is killed after half of them")
    for hidden in ("side", "role", "folder"):  # of the children
        parser.add_argument(f"--{hidden}", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.side:
        return train(args.side, args.role, args.steps, Path(args.folder))
    if not (sides := [side for side in SIDES if side.startswith(tuple(args.only.split(",")))]):
        parser.error(f"--only: no side begins with {args.only}. There are: {'; '.join(SIDES)}")
    print(f"{machine('cpu')}, {args.steps} steps, killed after {args.steps // 2}\n")
    print("| Optimizer | Weights | Optimizer state |\n| --- | --- | --- |")
    for side in sides:
        print(f"| {side} | {' | '.join(result(side, args.steps))} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
