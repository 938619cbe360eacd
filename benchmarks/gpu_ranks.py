"""Two processes train together: the ranks must skip the same steps and stay equal.

    python benchmarks/gpu_check.py ranks [--device cuda|cpu] [--json FILE]

On GPUs over NCCL, with a GPU for each process where there are two. NCCL may refuse two processes on one GPU: then they
talk over gloo, and NCCL runs with one process. On the CPU over gloo. Each process is ``gpu_check.py ranks --rank I``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Import this before the default process group exists: DistributedDataParallel would do it later, and a gloo thread
# could then outlive Python.
import torch.distributed.nn
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ampctx import AmpRankError, clip_grad_norm_
from ampctx.amp import AmpSession
from ampctx.optimizers import FusedAdam

SCRIPT = str(Path(__file__).resolve().parent / "gpu_check.py")
STEPS, OVERFLOW_AT, START = 5, 2, 2.0**16
STEPPED = [i != OVERFLOW_AT for i in range(STEPS)]
GROUP_SECONDS = 60
# What NCCL says of two processes on one GPU.
REFUSED = ("Duplicate GPU detected", "invalid usage")


class Rank:
    """One process of the group."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.rank, self.ranks = device, dist.get_rank(), dist.get_world_size()
        self.mesh = dist.init_device_mesh(device.type, (self.ranks,))

    def start(self, level: str, model: nn.Module, **options: Any) -> tuple[AmpSession, FusedAdam]:
        session, optimizer = AmpSession(), FusedAdam(model.parameters(), lr=1e-2)
        session.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0, **options)
        return session, optimizer

    def model(self, width: int = 7, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 2)).to(self.device)

    def batch(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        return torch.randn(8, 4, generator=generator).to(self.device)

    def step(self, session: AmpSession, called: nn.Module, optimizer: FusedAdam, i: int, clip: bool = False) -> Any:
        """One step; the last rank overflows in one of them. Returns the norm if it clips."""
        optimizer.zero_grad()
        loss = called(self.batch(i)).float().square().mean()
        if i == OVERFLOW_AT and self.rank == self.ranks - 1:
            loss = loss * float("inf")
        with session.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        norm = clip_grad_norm_(session.master_params(optimizer), 0.5) if clip else None
        optimizer.step()
        return norm

    def train(self, session: AmpSession, called: nn.Module, optimizer: FusedAdam, clip: bool = False) -> list[Any]:
        norms, stepped = [], []
        for i in range(STEPS):
            norms.append(self.step(session, called, optimizer, i, clip))
            stepped.append(session.outcome(optimizer).stepped)
        assert stepped == STEPPED, f"steps that ran: {stepped}, expected {STEPPED}"
        scale = session.state_dict()["loss_scaler0"]["loss_scale"]
        assert scale == START / 2, f"loss scale {scale}, expected {START / 2}"
        return norms

    def same(self, what: str, tensors: Iterable[Tensor]) -> None:
        """Every rank has the same bits."""
        mine = torch.cat([t.detach().double().flatten() for t in tensors])
        everyone = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(everyone, mine)
        differ = [i for i, others in enumerate(everyone) if not torch.equal(mine, others)]
        assert not differ, f"{what} differ from those of ranks {differ}"

    # --- the cases ----------------------------------------------------------------------------------------------------

    def ddp(self, level: str) -> None:
        """DistributedDataParallel: an overflow on one rank skips the step on all."""
        model = self.model()
        session, optimizer = self.start(level, model)
        self.train(session, DistributedDataParallel(model), optimizer)
        self.same("masters", session.master_params(optimizer))
        session.check_ranks()
        session.reset()

    def different_parameters(self) -> None:
        """A process group: ranks with other parameters skip together."""
        model = self.model(width=5 + self.rank)
        session, optimizer = self.start("O2", model, process_group=dist.group.WORLD)
        self.train(session, model, optimizer)
        session.check_ranks(same_parameters=False)
        session.reset()

    def sharded(self, level: str) -> None:
        """fully_shard: ranks skip together, and clip by the norm of the whole model."""
        model = self.model()
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=self.mesh)
        session, optimizer = self.start(level, model)
        norms = self.train(session, model, optimizer, clip=True)
        self.same("norms", [norm for i, norm in enumerate(norms) if i != OVERFLOW_AT])
        session.reset()

    def uneven(self) -> None:
        """Ranks that run out of batches follow the last one."""
        model = self.model()
        session, optimizer = self.start("O2", model)
        called = DistributedDataParallel(model)
        with Join([called, session.joinable(optimizer)]):
            for i in range(2 + self.rank):
                self.step(session, called, optimizer, i)
        self.same("masters", session.master_params(optimizer))
        session.check_ranks()
        session.reset()

    def scales_that_differ(self) -> None:
        """Every rank raises."""
        session, _ = self.start("O1", self.model())
        scale = START if self.rank == 0 else 1024.0
        told = ""
        try:
            state = {"loss_scaler0": {"loss_scale": scale, "unskipped": 0}}
            session.load_state_dict(state, process_group=dist.group.WORLD)
        except AmpRankError as error:
            told = str(error)
        assert self.ranks == 1 or "loss scales differ between ranks" in told, f"the error is {told!r}"
        session.reset()

    def run(self) -> dict[str, str]:
        cases: dict[str, Callable[[], None]] = {
            f"ddp {level}": partial(self.ddp, level) for level in ("O1", "O2", "O5")
        }
        others = [self.different_parameters, self.uneven, self.scales_that_differ]
        if self.device.type == "cpu" or "nccl" in dist.get_backend_config():
            # gloo need not have its collectives for CUDA tensors.
            cases |= {f"sharded {level}": partial(self.sharded, level) for level in ("O1", "O2", "O5")}
        cases |= {case.__name__: case for case in others}
        found = {}
        for name, case in cases.items():
            start = time.monotonic()
            case()  # the other ranks wait for one that fails, so that it ends this process
            found[name] = f"ok in {time.monotonic() - start:.2f} s"
        return found


def one_rank(args: argparse.Namespace) -> None:
    """Prints what was found, as JSON."""
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", args.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store = dist.FileStore(args.rendezvous, args.ranks)
    timeout = datetime.timedelta(seconds=GROUP_SECONDS)
    dist.init_process_group(args.backend, store=store, rank=args.rank, world_size=args.ranks, timeout=timeout)
    print(json.dumps(Rank(device).run()), flush=True)
    dist.destroy_process_group()


def together(device: str, backend: str, ranks: int) -> dict[str, Any]:
    """What the ranks found. ``refused``: NCCL does not take two processes on a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, SCRIPT, "ranks", "--device", device, "--backend", backend, "--ranks", str(ranks)]
        words += ["--rendezvous", str(Path(folder) / "store"), "--rank"]
        files = [(Path(folder) / f"{rank}.out", Path(folder) / f"{rank}.err") for rank in range(ranks)]
        processes = []
        for rank, (out, err) in enumerate(files):
            with out.open("w") as stdout, err.open("w") as stderr:
                processes.append(subprocess.Popen([*words, str(rank)], stdout=stdout, stderr=stderr))
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):
                    time.sleep(2)  # for the errors of the others, which would wait for the one that has failed
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
        codes = [process.wait() for process in processes]
        return found_by(codes, [(out.read_text(), err.read_text()) for out, err in files])


def found_by(codes: list[int], outputs: list[tuple[str, str]]) -> dict[str, Any]:
    """From the exit codes and outputs of all ranks."""
    if not any(codes):
        return {"cases": [json.loads(out.strip().splitlines()[-1]) for out, _ in outputs]}
    errors = [error for _, error in outputs]
    if any(words in error for error in errors for words in REFUSED):
        return {"refused": "two processes on one GPU"}
    raise AssertionError("a rank failed\n" + "\n".join(errors))


def check(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"gloo, 2 ranks": together(device, "gloo", 2)}
    found = {"nccl, 2 ranks": together(device, "nccl", 2)}
    if "refused" in found["nccl, 2 ranks"]:
        found["nccl, 1 rank"] = together(device, "nccl", 1)
        found["gloo, 2 ranks"] = together(device, "cpu:gloo,cuda:gloo", 2)
    return found


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gpu_check.py ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    for name, kind in (("--rank", int), ("--ranks", int), ("--backend", str), ("--rendezvous", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)  # of a process that this one starts
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda was asked for and torch finds no CUDA device here")
    if args.rank is not None:
        one_rank(args)
        return
    found = check(args.device)
    print(json.dumps(found, indent=1), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found) + "\n")
