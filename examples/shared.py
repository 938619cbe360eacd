"""What the examples share: their options, the handwritten digits and a net for them, and the frame of their plots.

Nothing here is about mixed precision. Each program has its training loop.
"""

import argparse
import contextlib
import gc
import gzip
import os
from pathlib import Path

import torch

# Before the process group exists: DistributedDataParallel imports it later, and default arguments would keep the group
# alive. A gloo thread that frees a tensor while Python shuts down ends the process with SIGABRT.
import torch.distributed.nn
from torch import Tensor, nn

OPT_LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
# At O3 Adam's averages are fp16, where squared gradients and eps become 0.
LEVELS_OF_ADAM = [level for level in OPT_LEVELS if level != "O3"]
# torchrun sets these variables for each process.
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Parser(argparse.ArgumentParser):
    """Has --device, --opt-level and --api where a program has them, and for each of ``counts`` a number above 0."""

    def __init__(self, doc, opt_level=None, levels=OPT_LEVELS, apis=False, device=True, **counts: int) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.apis, self.opt_level = apis, opt_level
        if apis:
            self.add_argument("--api", default="apex", choices=["apex", "torch"], help="default apex")
        if opt_level:
            self.add_argument("--opt-level", choices=levels, help=f"for apex's interface; default {opt_level}")
        if device:
            found = "cuda" if torch.cuda.is_available() else "cpu"
            self.add_argument("--device", default=found, choices=["cpu", "cuda"], help=f"default {found}, found here")
        for name, default in counts.items():
            self.add_argument("--" + name.replace("_", "-"), type=positive, default=default, help=f"default {default}")

    def parse_args(self, *given) -> argparse.Namespace:
        """Also seeds torch, and limits it to one thread."""
        args = super().parse_args(*given)
        if self.apis and args.api == "torch" and args.opt_level:
            self.error("--opt-level belongs to --api apex: torch's interface has no opt levels, autocast is like O1")
        if self.opt_level:
            args.opt_level = args.opt_level or self.opt_level
        if getattr(args, "device", None) == "cuda" and not torch.cuda.is_available():
            self.error("--device: cuda was asked for and torch finds no CUDA device here; use --device cpu")
        torch.manual_seed(0)
        torch.set_num_threads(1)  # ops this small gain little from a second thread, and lose much on busy cores
        return args


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def writable(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path} cannot be written: it is a directory or lies in none")
    return path


@contextlib.contextmanager
def processes(device: str):
    """Joins the processes of torchrun, if there are any, gives the device of this process, and leaves them."""
    here = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else "cpu")
    if device == "cuda":
        torch.cuda.set_device(here)
    if "RANK" in os.environ:
        on_gpu = {"backend": "nccl", "device_id": here}
        torch.distributed.init_process_group(**on_gpu if device == "cuda" else {"backend": "gloo"})
    yield here
    if torch.distributed.is_initialized():
        gc.collect()  # a model holds the group, and would free it with Python's lock, for which a gloo thread may wait
        torch.distributed.destroy_process_group()


def load_digits(device: torch.device | str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (N, 1, 8, 8) in [-1, 1] and labels (N,): training, then test. Every fourth of a class is for test."""
    with gzip.open(Path(__file__).resolve().parent / "data" / "digits.csv.gz", "rt") as file:
        table = torch.tensor([[float(number) for number in line.split(",")] for line in file])
    images, labels = table[:, :64].reshape(-1, 1, 8, 8) / 8 - 1, table[:, 64].long()
    test = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        test[(labels == digit).nonzero().flatten()[3::4]] = True
    return tuple(t.to(device) for t in (images[~test], labels[~test], images[test], labels[test]))


def batches(images: Tensor, labels: Tensor, size: int, seed: int | None = None, rank: int = 0, ranks: int = 1):
    """The full batches of an epoch, shuffled by ``seed``. With several processes, the share of ``rank``."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator).to(images.device)
    # Only batches for which every rank has images: all ranks must take part in each step.
    for batch in order[rank::ranks][: len(order) // (size * ranks) * size].split(size):
        yield images[batch], labels[batch]


def make_model(width: int = 16) -> nn.Module:
    def conv(n_in: int, n_out: int) -> list[nn.Module]:
        return [nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU()]

    features = [*conv(1, width), nn.MaxPool2d(2), *conv(width, 2 * width), nn.MaxPool2d(2)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(2 * width * 4, 10))


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of images that the model classifies correctly, in percent."""
    model.eval()
    with torch.no_grad():
        correct = (model(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return 100 * correct


def progress(steps, name: str | None = None):
    """Counts steps on a terminal, with amp's log above the bar."""
    from tqdm import tqdm  # here, because most examples do without
    from tqdm.contrib.logging import logging_redirect_tqdm

    with logging_redirect_tqdm():
        yield from tqdm(steps, name, disable=None)


@contextlib.contextmanager
def plot(path: Path | str, rows: int = 1, columns: int = 1, size: tuple[float, float] = (9, 6), **options):
    """Gives axes to draw on, and writes them to a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    axes = figure.subplots(rows, columns, **options)
    for axis in figure.axes:
        axis.set_axisbelow(True)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    yield axes
    figure.savefig(path, format="png")
    print(f"plot written to {path}")
