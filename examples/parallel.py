"""Trains a small net on the UCI handwritten digits with several processes or threads, in mixed precision.

    torchrun --nproc-per-node 2 examples/parallel.py               # DistributedDataParallel: gloo on CPUs, nccl on GPUs
    torchrun --nproc-per-node 2 examples/parallel.py --api amp torch    # then again with torch.autocast and GradScaler
    torchrun --nproc-per-node 2 examples/parallel.py --overflow-at 5    # one rank overflows, both skip that step
    python examples/parallel.py                                    # nn.DataParallel; on a CPU, threads
    python examples/parallel.py --api amp torch

nn.DataParallel runs a replica of the model in one thread for each GPU. Without a GPU it uses only the
calling thread, so this program then uses the class ``Threads`` below.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

# Import this before the default process group exists. DistributedDataParallel imports it later, and default arguments
# would then keep the group alive after destroy_process_group. A gloo thread that frees a tensor while Python shuts down
# ends the process with SIGABRT.
import torch.distributed.nn
import torch.nn.functional as F
from digits import accuracy, load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ampctx import GradScaler, amp, optimizers

# torchrun sets these variables for each process.
DISTRIBUTED = "RANK" in os.environ
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
AUTOCAST_DTYPE = {"O0": None, "O1": torch.float16, "O4": torch.bfloat16}

# --- models and parallel wrappers -------------------------------------------------------------------------------------


def make_model() -> nn.Module:
    # No batch norm: the threads would write to the same running statistics.
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10))


class WithAutocast(nn.Module):
    """Runs a model under torch's autocast in every thread that calls it. ``dtype`` None: no autocast.

    amp.initialize does the same for its models at O1 and O4.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            return self.module(images)


class Threads(nn.Module):
    """nn.DataParallel for a CPU: every thread runs the model on its share of the batch."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.module = module
        self.workers = [ThreadPoolExecutor(1, thread_name_prefix=f"worker{i}") for i in range(count)]

    def forward(self, images: Tensor) -> Tensor:
        grad_enabled = torch.is_grad_enabled()  # a setting of the thread, too

        def run(share: Tensor) -> Tensor:
            with torch.set_grad_enabled(grad_enabled):
                return self.module(share)

        shares = images.chunk(len(self.workers))
        running = [worker.submit(run, share) for worker, share in zip(self.workers, shares, strict=False)]
        return torch.cat([share.result() for share in running])


def in_parallel(model: nn.Module, device: torch.device, threads: int) -> nn.Module:
    """Wraps a model. Call it after amp.initialize, which refuses wrapped models."""
    if DISTRIBUTED:
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    return nn.DataParallel(model) if device.type == "cuda" else Threads(model, threads)


# --- training ---------------------------------------------------------------------------------------------------------


def batches(args: argparse.Namespace, images: Tensor, labels: Tensor) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The micro-batches of each step of this rank."""
    for epoch in range(args.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch)).to(images.device)
        mine, size = order[RANK::WORLD_SIZE], args.batch_size * args.accumulate
        # Only steps for which every rank has images: all ranks must take part in each step.
        for indices in mine[: len(order) // (size * WORLD_SIZE) * size].split(size):
            yield [(images[i], labels[i]) for i in indices.split(args.batch_size)]


def overflow_in(args: argparse.Namespace, step: int) -> float:
    """The factor of the loss: inf on the last rank at step --overflow-at, else 1."""
    return float("inf") if step == args.overflow_at and RANK == WORLD_SIZE - 1 else 1.0


def without_sync(model: nn.Module, more: bool) -> contextlib.AbstractContextManager:
    """Skips DistributedDataParallel's reduction for all but the last micro-batch, which reduces the sums."""
    return model.no_sync() if more and isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


def train_with_amp(args: argparse.Namespace, device: torch.device, data) -> tuple[nn.Module, float, int]:
    """Trains with amp. Returns the wrapped model, the loss scale and the number of skipped steps."""
    model = make_model().to(device)
    optimizer = optimizers.FusedAdam(model.parameters(), lr=0.005)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    model = in_parallel(model, device, args.threads)

    for step, micro_batches in enumerate(data):
        for i, (images, labels) in enumerate(micro_batches):
            more = i + 1 < len(micro_batches)
            with without_sync(model, more):
                loss = F.cross_entropy(model(images), labels) / len(micro_batches) * overflow_in(args, step)
                with amp.scale_loss(loss, optimizer, delay_unscale=more) as scaled_loss:
                    scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, amp.loss_scale(), amp.skipped_steps(optimizer)


def train_with_autocast(args: argparse.Namespace, device: torch.device, data) -> tuple[nn.Module, float, int]:
    """Trains with torch's interface. Returns the same."""
    model = make_model().to(device)
    optimizer = optimizers.FusedAdam(model.parameters(), lr=0.005)
    model = in_parallel(WithAutocast(model, AUTOCAST_DTYPE[args.opt_level]), device, args.threads)
    scaler = GradScaler(device.type, enabled=args.opt_level == "O1")

    skipped = 0
    for step, micro_batches in enumerate(data):
        for i, (images, labels) in enumerate(micro_batches):
            with without_sync(model, i + 1 < len(micro_batches)):
                logits = model(images).float()
                loss = F.cross_entropy(logits, labels) / len(micro_batches) * overflow_in(args, step)
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped += not scaler.outcome(optimizer).stepped
        optimizer.zero_grad()
    return model, scaler.get_scale(), skipped


# --- checks -----------------------------------------------------------------------------------------------------------


def linear_layers_of(call: Callable[[], object]) -> tuple[set[str], set[torch.dtype]]:
    """The threads and the dtypes of linear layers during ``call()``."""
    threads, dtypes = set(), set()

    def look(module: nn.Module, args: tuple, output: Tensor) -> None:
        if isinstance(module, nn.Linear):
            threads.add(threading.current_thread().name)
            dtypes.add(output.dtype)

    with nn.modules.module.register_module_forward_hook(look):
        call()
    return threads, dtypes


def same_on_all_ranks(numbers: Tensor) -> bool:
    """Whether every rank has the same numbers."""
    everyone = [torch.empty_like(numbers) for _ in range(WORLD_SIZE)]
    dist.all_gather(everyone, numbers)
    return all(torch.equal(numbers, others) for others in everyone)


def report_threads(args: argparse.Namespace, api: str, model: nn.Module, images: Tensor) -> str:
    def listed(things: set) -> str:
        return ", ".join(sorted(map(str, things)))

    threads, _ = linear_layers_of(lambda: nn.DataParallel(make_model().to(images.device))(images))
    print(f"nn.DataParallel over {torch.cuda.device_count()} GPUs runs the model in: {listed(threads)}")
    threads, dtypes = linear_layers_of(lambda: model(images))
    print(f"trained in: {listed(threads)}; linear layers in {listed(dtypes)}")
    if api == "torch":
        bare = in_parallel(make_model().to(images.device), images.device, args.threads)
        with torch.autocast(images.device.type, AUTOCAST_DTYPE[args.opt_level], enabled=args.opt_level != "O0"):
            _, outside = linear_layers_of(lambda: bare(images))
        print(f"with torch.autocast around the call alone: linear layers in {listed(outside)}")
    return f"{len(threads)} threads with linear layers in {listed(dtypes)}"


def run(api: str, args: argparse.Namespace, device: torch.device, data, images: Tensor, labels: Tensor) -> bool:
    """Trains, and prints the result on rank 0. Returns False if ranks differ."""
    torch.manual_seed(0)
    train = train_with_amp if api == "amp" else train_with_autocast
    model, scale, skipped = train(args, device, data)
    result = accuracy(model, images, labels)
    same = True
    if DISTRIBUTED:
        weights = torch.cat([p.detach().double().flatten() for p in model.parameters()])
        same = same_on_all_ranks(torch.cat([weights, weights.new_tensor([scale, skipped, result])]))
        how = f"{'the same' if same else 'other'} weights, loss scale and skips on {WORLD_SIZE} ranks"
    else:
        how = report_threads(args, api, model, images)
    if RANK == 0:
        steps = f"skipped steps {skipped} of {len(data)}"
        print(f"{api}: test accuracy {result:.2f}% | {how} | loss scale {scale:g} | {steps}")
    amp.reset()
    return same


# --- command line -----------------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--api", nargs="+", default=["amp"], choices=["amp", "torch"], help="apex's API (default), torch's, or both"
    )
    parser.add_argument(
        "--opt-level", default="O1", choices=["O0", "O1", "O2", "O3", "O4", "O5"], help="default O1; torch: O0, O1, O4"
    )
    parser.add_argument("--epochs", type=positive, default=6, help="default 6")
    parser.add_argument("--batch-size", type=positive, default=16, help="micro-batch of each process; default 16")
    parser.add_argument("--accumulate", type=positive, default=1, help="micro-batches per step; default 1")
    parser.add_argument("--threads", type=positive, default=2, help="on a CPU without torchrun; default 2")
    parser.add_argument("--overflow-at", type=int, metavar="STEP", help="step, from 0, with an infinite loss on a rank")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args()
    if "torch" in args.api and args.opt_level not in AUTOCAST_DTYPE:
        parser.error(f"--opt-level: torch.autocast casts op by op, as O1 and O4 do; {args.opt_level} is for --api amp")
    if args.overflow_at is not None and args.opt_level not in ("O1", "O2"):
        parser.error("--overflow-at needs a dynamic loss scale, which checks gradients: --opt-level O1 or O2")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda was asked for and torch finds no CUDA device here; use --device cpu")
    per_step = args.batch_size * args.accumulate * WORLD_SIZE
    if per_step > 1351:
        parser.error(f"--batch-size: a step would take {per_step} images, and there are 1351")
    steps = args.epochs * (1351 // per_step)
    if args.overflow_at is not None and not 0 <= args.overflow_at < steps:
        parser.error(f"--overflow-at: there is no step {args.overflow_at}; the last one is {steps - 1}")
    return args


def main() -> int:
    args = parse_args()
    # Ops this small gain little from a second thread, and lose much on busy cores.
    torch.set_num_threads(1)
    use_cuda = args.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if DISTRIBUTED:
        dist.init_process_group("nccl" if use_cuda else "gloo", device_id=device if use_cuda else None)

    images, labels, test_images, test_labels = load_digits(device)
    data = list(batches(args, images, labels))
    same = [run(api, args, device, data, test_images, test_labels) for api in args.api]
    if DISTRIBUTED:
        dist.destroy_process_group()
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
