"""Trains one net on the handwritten digits on one process or on many. The training loop is the same for all.

    python examples/mesh.py                                                # one process
    torchrun --nproc-per-node 2 examples/mesh.py --engine ddp              # DistributedDataParallel
    torchrun --nproc-per-node 2 examples/mesh.py --engine fsdp             # fully_shard (FSDP2)
    torchrun --nproc-per-node 4 examples/mesh.py --engine hsdp             # two replicas of a model in two shards
    torchrun --nproc-per-node 2 examples/mesh.py --engine tp               # tensor parallelism
    torchrun --nproc-per-node 4 examples/mesh.py --engine fsdp+tp          # both, on a 2-D mesh

All take the same batches: each data-parallel rank its share. They end with the same accuracy, within rounding.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist

# Import this before the default process group exists, as examples/parallel.py says.
import torch.distributed.nn
import torch.nn.functional as F
from digits import accuracy, load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ampctx import amp, clip_grad_norm_, optimizers

# torchrun sets these variables for each process.
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
# The dimensions of the mesh: their names, and the number of ranks in all but the last.
MESHES: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "none": ((), ()),
    "ddp": (("replicate",), ()),
    "fsdp": (("shard",), ()),
    "hsdp": (("replicate", "shard"), (2,)),
    "tp": (("tensor",), ()),
    "fsdp+tp": (("shard", "tensor"), (2,)),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# --- engines: torch's own calls ---------------------------------------------------------------------------------------


def make_mesh(engine: str, device: torch.device) -> DeviceMesh | None:
    names, sizes = MESHES[engine]
    if not names:
        return None
    known = torch.Size(sizes).numel()
    return init_device_mesh(device.type, (*sizes, WORLD_SIZE // known), mesh_dim_names=names)


def shard(model: Net, mesh: DeviceMesh | None) -> None:
    """Tensor parallelism and fully_shard come before amp.initialize."""
    names = () if mesh is None else mesh.mesh_dim_names
    if "tensor" in names:
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if "shard" in names:
        data = mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]
        for block in model.blocks:
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)


def data_rank(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Which share of each batch this rank takes, and the number of shares. The ranks of a tensor share theirs."""
    rank, count = 0, 1
    for name in () if mesh is None else mesh.mesh_dim_names:
        if name != "tensor":
            rank, count = rank * mesh[name].size() + mesh[name].get_local_rank(), count * mesh[name].size()
    return rank, count


# --- training ---------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace, device: torch.device, images: Tensor, labels: Tensor) -> tuple[nn.Module, str]:
    """Returns the model as it is called, and a line about the loss scale."""
    torch.manual_seed(0)
    model = Net().to(device)
    mesh = make_mesh(args.engine, device)
    shard(model, mesh)

    optimizer = optimizers.FusedAdam(model.parameters(), lr=0.003)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    called = DistributedDataParallel(model) if args.engine == "ddp" else model

    rank, ranks = data_rank(mesh)
    for epoch in range(args.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for batch in order[: len(order) // args.batch_size * args.batch_size].split(args.batch_size):
            mine = batch[rank::ranks].to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(called(images[mine]), labels[mine])
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            clip_grad_norm_(amp.master_params(optimizer), 1.0)  # the norm of the whole model
            optimizer.step()
    scale = amp.loss_scale()
    return called, f"loss scale {scale:g} | skipped steps {amp.skipped_steps(optimizer)}"


# --- command line -----------------------------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="none", choices=MESHES, help="default none: one process")
    parser.add_argument("--opt-level", default="O1", choices=["O0", "O1", "O2", "O4", "O5"], help="default O1")
    parser.add_argument("--epochs", type=int, default=4, help="default 4")
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together; default 32")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args()
    names, sizes = MESHES[args.engine]
    known = torch.Size(sizes).numel()
    if not names and WORLD_SIZE > 1:
        parser.error(f"--engine: there are {WORLD_SIZE} processes; choose one of {', '.join(list(MESHES)[1:])}")
    if names and "RANK" not in os.environ:
        parser.error(f"--engine {args.engine}: start it with torchrun --nproc-per-node N")
    if WORLD_SIZE % known:
        parser.error(f"--engine {args.engine}: {WORLD_SIZE} processes are no multiple of {known}")
    if args.batch_size < 1 or args.batch_size % WORLD_SIZE:
        parser.error(f"--batch-size: {args.batch_size} images cannot be shared by {WORLD_SIZE} processes")
    if args.epochs < 1:
        parser.error(f"--epochs: {args.epochs} is not above 0")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda was asked for and torch finds no CUDA device here; use --device cpu")
    return args


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)  # ops this small lose much on busy cores
    use_cuda = args.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if args.engine != "none":
        dist.init_process_group("nccl" if use_cuda else "gloo", device_id=device if use_cuda else None)

    images, labels, test_images, test_labels = load_digits(device)
    model, about = train(args, device, images, labels)
    result = accuracy(model, test_images, test_labels)  # every rank takes part in the forward
    if RANK == 0:
        print(f"{args.engine} on {WORLD_SIZE}: test accuracy {result:.2f}% | {about}", flush=True)
    amp.reset()
    if args.engine != "none":
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
