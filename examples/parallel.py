"""Trains a small net on the UCI handwritten digits with several processes or threads, in mixed precision.

    torchrun --nproc-per-node 2 examples/parallel.py               # DistributedDataParallel: gloo on CPUs, nccl on GPUs
    torchrun --nproc-per-node 2 examples/parallel.py --api amp torch    # then again with torch.autocast and GradScaler
    python examples/parallel.py                                    # nn.DataParallel; on a CPU, threads

nn.DataParallel runs a replica of the model in a thread for each GPU. Without a GPU ``Threads`` below does so.
"""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared import RANK, WORLD_SIZE, Parser, accuracy, batches, load_digits, processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ampctx import GradScaler, amp, optimizers

BATCH = 16  # of each process
AUTOCAST_DTYPE = {"O0": None, "O1": torch.float16, "O4": torch.bfloat16}
# The threads and dtypes of the first layer's latest outputs.
seen: set[tuple[str, torch.dtype]] = set()


def make_model() -> nn.Module:
    def look(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        seen.add((threading.current_thread().name, output.dtype))

    first = nn.Linear(64, 128)
    first.register_forward_hook(look)
    # No batch norm: the threads would write to the same running statistics.
    return nn.Sequential(nn.Flatten(), first, nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10))


class WithAutocast(nn.Module):
    """Runs a model under torch's autocast in every thread that calls it, as amp.initialize does at O1 and O4."""

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
    if dist.is_initialized():
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    return nn.DataParallel(model) if device.type == "cuda" else Threads(model, threads)


def without_sync(model: nn.Module, more: bool):
    """Skips DistributedDataParallel's reduction for all but the last micro-batch, which reduces the sums."""
    return model.no_sync() if more and isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


def loss_of(args, logits: Tensor, targets: Tensor, step: int) -> Tensor:
    """The loss of a micro-batch; inf on the last rank at step --overflow-at."""
    factor = float("inf") if step == args.overflow_at and RANK == WORLD_SIZE - 1 else 1 / args.accumulate
    return F.cross_entropy(logits.float(), targets) * factor


def train_with_amp(args, device, data):
    model = make_model().to(device)
    optimizer = optimizers.FusedAdam(model.parameters(), lr=0.005)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    model = in_parallel(model, device, args.threads)
    for step, (images, labels) in enumerate(data):
        for i, (inputs, targets) in enumerate(zip(images.split(BATCH), labels.split(BATCH), strict=True), start=1):
            more = i < args.accumulate
            with without_sync(model, more):
                loss = loss_of(args, model(inputs), targets, step)
                with amp.scale_loss(loss, optimizer, delay_unscale=more) as scaled_loss:
                    scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, amp.loss_scale(), amp.skipped_steps(optimizer)


def train_with_autocast(args, device, data):
    model = make_model().to(device)
    optimizer = optimizers.FusedAdam(model.parameters(), lr=0.005)
    model = in_parallel(WithAutocast(model, AUTOCAST_DTYPE[args.opt_level]), device, args.threads)
    scaler, skipped = GradScaler(device.type, enabled=args.opt_level == "O1"), 0
    for step, (images, labels) in enumerate(data):
        for i, (inputs, targets) in enumerate(zip(images.split(BATCH), labels.split(BATCH), strict=True), start=1):
            with without_sync(model, i < args.accumulate):
                scaler.scale(loss_of(args, model(inputs), targets, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped += not scaler.outcome(optimizer).stepped
        optimizer.zero_grad()
    return model, scaler.get_scale(), skipped


def seen_in(model: nn.Module, images: Tensor) -> tuple[list[str], str]:
    """The threads and the dtypes of linear layers."""
    seen.clear()
    model(images)
    return sorted({thread for thread, _ in seen}), ", ".join(sorted({str(dtype) for _, dtype in seen}))


def report_threads(args, api: str, model: nn.Module, images: Tensor) -> str:
    threads, dtypes = seen_in(model, images)
    print(f"trained in: {', '.join(threads)}; linear layers in {dtypes}")
    if api == "torch":
        bare = in_parallel(make_model().to(images.device), images.device, args.threads)
        with torch.autocast(images.device.type, AUTOCAST_DTYPE[args.opt_level], enabled=args.opt_level != "O0"):
            print(f"with torch.autocast around the call alone: linear layers in {seen_in(bare, images)[1]}")
    return f"{len(threads)} threads with linear layers in {dtypes}"


def report_ranks(model: nn.Module, *numbers: float) -> str:
    weights = nn.utils.parameters_to_vector(model.parameters()).double()
    mine = torch.cat([weights, weights.new_tensor(numbers)])
    everyone = [torch.empty_like(mine) for _ in range(WORLD_SIZE)]
    dist.all_gather(everyone, mine)
    if not all(torch.equal(mine, others) for others in everyone):
        raise SystemExit(f"weights, loss scale or skips differ on {WORLD_SIZE} ranks")
    return f"the same weights, loss scale and skips on {WORLD_SIZE} ranks"


def main() -> None:
    parser = Parser(__doc__, opt_level="O1", epochs=6, accumulate=1, threads=2)
    parser.add_argument("--api", nargs="+", default=["amp"], choices=["amp", "torch"], help="default amp")
    parser.add_argument("--overflow-at", type=int, metavar="STEP", help="infinite loss on a rank; at O1 and O2")
    args = parser.parse_args()
    if "torch" in args.api and args.opt_level not in AUTOCAST_DTYPE:
        parser.error(f"--opt-level: torch.autocast casts op by op, as O1 and O4 do; {args.opt_level} is for --api amp")
    with processes(args.device) as device:
        images, labels, test_images, test_labels = load_digits(device)
        size = BATCH * args.accumulate
        data = [step for epoch in range(args.epochs) for step in batches(images, labels, size, epoch, RANK, WORLD_SIZE)]
        for api in args.api:
            torch.manual_seed(0)
            train = train_with_amp if api == "amp" else train_with_autocast
            model, scale, skipped = train(args, device, data)
            result = accuracy(model, test_images, test_labels)
            shared = report_ranks(model, scale, skipped, result) if dist.is_initialized() else None
            how = shared or report_threads(args, api, model, test_images)
            if RANK == 0:
                scaling = f"loss scale {scale:g} | skipped steps {skipped} of {len(data)}"
                print(f"{api}: test accuracy {result:.2f}% | {how} | {scaling}")
            amp.reset()
        del model


if __name__ == "__main__":
    main()
