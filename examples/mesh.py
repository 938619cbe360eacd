"""Trains one net on the handwritten digits on one process or on many. The training loop is the same for all.

    python examples/mesh.py                                                # one process
    torchrun --nproc-per-node 2 examples/mesh.py --engine fsdp             # fully_shard (FSDP2)
    torchrun --nproc-per-node 4 examples/mesh.py --engine fsdp+tp          # both, on a 2-D mesh

All take the same batches: each data-parallel rank its share. They end with the same accuracy, within rounding.
"""

import os

import torch
import torch.nn.functional as F
from shared import LEVELS_OF_ADAM, RANK, WORLD_SIZE, Parser, accuracy, batches, load_digits, processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ampctx import amp, clip_grad_norm_, optimizers
from ampctx.distributed import mixed_precision_policy

BATCH = 32  # of all ranks together
# The dimensions of the mesh. The first of two has two ranks.
MESHES: dict[str, tuple[str, ...]] = {"none": (), "ddp": ("replicate",), "fsdp": ("shard",), "tp": ("tensor",)}
MESHES |= {"hsdp": ("replicate", "shard"), "fsdp+tp": ("shard", "tensor")}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


# Engines: torch's own calls.
def make_mesh(engine: str, device: torch.device) -> DeviceMesh | None:
    names = MESHES[engine]
    sizes = (2, WORLD_SIZE // 2) if len(names) == 2 else (WORLD_SIZE,)
    return init_device_mesh(device.type, sizes, mesh_dim_names=names) if names else None


def shard(model: nn.Sequential, mesh: DeviceMesh | None, opt_level: str) -> None:
    """Tensor parallelism and fully_shard come before amp.initialize."""
    names = () if mesh is None else mesh.mesh_dim_names
    blocks = [module for module in model if isinstance(module, Block)]
    if "tensor" in names:
        for block in blocks:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if "shard" in names:
        data = mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]
        for module in (*blocks, model):
            fully_shard(module, mesh=data, mp_policy=mixed_precision_policy(opt_level))


def data_rank(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Which share of each batch this rank takes, and the number of shares. The ranks of a tensor share theirs."""
    rank, count = 0, 1
    for name in () if mesh is None else mesh.mesh_dim_names:
        if name != "tensor":
            rank, count = rank * mesh[name].size() + mesh[name].get_local_rank(), count * mesh[name].size()
    return rank, count


def train(args, device: torch.device, images: Tensor, labels: Tensor) -> tuple[nn.Module, str]:
    """Returns the model as it is called, and a line about the loss scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), Block(64), Block(64), nn.Linear(64, 10)).to(device)
    mesh = make_mesh(args.engine, device)
    shard(model, mesh, args.opt_level)

    optimizer = optimizers.FusedAdam(model.parameters(), lr=0.003)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    called = DistributedDataParallel(model) if args.engine == "ddp" else model

    rank, ranks = data_rank(mesh)
    for epoch in range(args.epochs):
        for inputs, targets in batches(images, labels, BATCH // ranks, epoch, rank, ranks):
            optimizer.zero_grad()
            loss = F.cross_entropy(called(inputs), targets)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            clip_grad_norm_(amp.master_params(optimizer), 1.0)  # the norm of the whole model
            optimizer.step()
    return called, f"loss scale {amp.loss_scale():g} | skipped steps {amp.skipped_steps(optimizer)}"


def main() -> None:
    parser = Parser(__doc__, opt_level="O1", levels=LEVELS_OF_ADAM, epochs=4)
    parser.add_argument("--engine", default="none", choices=MESHES, help="with torchrun; default none, for one process")
    args = parser.parse_args()
    if (args.engine == "none") == ("RANK" in os.environ) or WORLD_SIZE % max(1, len(MESHES[args.engine])):
        parser.error(f"--engine {args.engine}: only none goes without torchrun; two axes need an even number")
    with processes(args.device) as device:
        images, labels, test_images, test_labels = load_digits(device)
        model, about = train(args, device, images, labels)
        result = accuracy(model, test_images, test_labels)  # every rank takes part in the forward
        amp.reset()
        del model
    if RANK == 0:
        print(f"{args.engine} on {WORLD_SIZE}: test accuracy {result:.2f}% | {about}", flush=True)


if __name__ == "__main__":
    main()
