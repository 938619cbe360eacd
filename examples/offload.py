"""Trains a bf16 GPT under fully_shard, with fp32 masters and Adam's state in host memory, and resumes it bit for bit.

    torchrun --nproc-per-node 2 examples/offload.py                 # gloo on CPUs, nccl on GPUs

The run saves a checkpoint in the middle. A new model and a new optimizer load it and train the second half again.
"""

import os

import torch
import torch.distributed.checkpoint as dcp
from char_lm import GPT, Text, loss_of
from shared import RANK, WORLD_SIZE, Parser, processes
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ampctx import clip_grad_norm_
from ampctx.optimizers import FusedAdam, Offloaded


def build(args, text: Text) -> tuple[GPT, Offloaded]:
    torch.manual_seed(0)
    model = GPT(len(text.alphabet), args.context, args.layers, args.heads).to(args.device, torch.bfloat16)
    mesh = init_device_mesh(args.device, (WORLD_SIZE,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    # After fully_shard: each rank keeps its part of masters and state.
    return model, Offloaded(FusedAdam, model.parameters(), lr=0.003, master_weights=True, skip_nonfinite=True)


def train(args, text: Text, model: GPT, optimizer: Offloaded, steps: range) -> Tensor:
    """Returns the loss of each step, over all ranks."""
    losses = torch.zeros(len(steps), device=args.device)
    for i, step in enumerate(steps):
        own = torch.Generator().manual_seed(step * WORLD_SIZE + RANK)  # other batches on each rank, the same if resumed
        loss = loss_of(model, *text.batch(args.batch_size, args.context, own))
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)  # by the norm of the whole model
        optimizer.step()  # gradients go to the host, and weights come back
        losses[i] = loss.detach() / WORLD_SIZE
    torch.distributed.all_reduce(losses)
    return losses


def state_of(optimizer: Offloaded) -> list[Tensor]:
    return [t for entries in optimizer.state.values() for t in entries.values()]


def parts(tensors) -> list[Tensor]:
    """What this rank has of them, without step counts."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t.dim()]


def bytes_of(params, *others: Tensor) -> int:
    """With gradients."""
    return sum(t.nbytes for t in parts([*params, *(p.grad for p in params), *others]))


def run(args, text: Text) -> None:
    half = args.steps // 2
    model, optimizer = build(args, text)
    first = train(args, text, model, optimizer, range(half))
    weights, state = get_state_dict(model, optimizer)  # by the names of parameters, sharded; state is on the CPU
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=args.checkpoint)
    losses = train(args, text, model, optimizer, range(half, args.steps))

    resumed = build(args, text)
    weights, state = get_state_dict(*resumed)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=args.checkpoint)
    set_state_dict(*resumed, model_state_dict=weights, optim_state_dict=state)
    again = train(args, text, *resumed, range(half, args.steps))
    ends = (parts([*m.parameters(), *state_of(o)]) for m, o in ((model, optimizer), resumed))
    if not all(map(torch.equal, *ends)) or not torch.equal(losses, again):
        raise SystemExit(f"rank {RANK}: the resumed run ends with other bits")

    params, copies = list(model.parameters()), [p for group in optimizer.inner.param_groups for p in group["params"]]
    device, host = bytes_of(params), bytes_of(copies, *state_of(optimizer))
    count = sum(p.numel() for p in parts(params))
    memory = f"bytes per parameter {device / count:.2f} on the device, {host / count:.2f} on the host"
    if RANK == 0:
        print(f"loss {first[0]:.4f} -> {losses[-1]:.4f} | {memory} | resumed after {half} steps: the same bits")


def main() -> None:
    parser = Parser(__doc__, steps=60, batch_size=8, context=32, heads=2, layers=2)
    parser.add_argument("--checkpoint", default="offload", metavar="FOLDER", help="written to; default offload")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: fully_shard needs processes")
    with processes(args.device) as device:
        run(args, Text(device))


if __name__ == "__main__":
    main()
