"""Trains a bf16 GPT under fully_shard, with fp32 masters, Adam's state and its step in host memory, and resumes it.

    torchrun --nproc-per-node 2 examples/offload.py                 # gloo on CPUs, nccl on GPUs

Weights and gradients are on the device: 4 bytes a parameter. The run saves a checkpoint in the middle. A new model and
a new optimizer load it and train the second half once more. They have to end with the same bits.
"""

import os

import torch
import torch.distributed.checkpoint as dcp
from char_lm import GPT, Text, loss_of
from shared import RANK, WORLD_SIZE, Parser, join_processes, leave_processes
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
    options = {"lr": args.lr, "weight_decay": 0.05, "master_weights": True, "skip_nonfinite": True}
    return model, Offloaded(FusedAdam, model.parameters(), **options)


def train(args, text: Text, model: GPT, optimizer: Offloaded, steps: range) -> Tensor:
    """Returns the loss of each step, the mean of all ranks."""
    losses = []
    for step in steps:
        own = torch.Generator().manual_seed(step * WORLD_SIZE + RANK)  # another batch on each rank, at each step
        optimizer.zero_grad()
        loss = loss_of(model, *text.batch(args.batch_size, args.context, own))
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)  # of the whole model, on the device
        optimizer.step()  # gradients go to the host, weights come back
        losses.append(loss.detach().float())
    total = torch.stack(losses)
    torch.distributed.all_reduce(total)
    return total / WORLD_SIZE


def state_of(model: GPT, optimizer: Offloaded) -> dict[str, dict]:
    """Weights and state by the names of parameters. What is sharded stays so, and the state stays on the CPU."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def parts(tensors) -> list[Tensor]:
    """The parts of this rank."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t.dim()]


def bytes_per_parameter(model: GPT, optimizer: Offloaded) -> tuple[float, float]:
    """On the device: weights and gradients. On the host: the optimizer's copies of both, masters and Adam's state."""
    params, twins = list(model.parameters()), [p for group in optimizer.inner.param_groups for p in group["params"]]
    state = [t for entries in optimizer.state.values() for t in entries.values()]
    device, host = ([t for p in some for t in (p.detach(), p.grad)] for some in (params, twins))
    numel = sum(p.numel() for p in parts(params))
    return tuple(sum(t.nbytes for t in parts(tensors)) / numel for tensors in (device, host + state))


def run(args, text: Text) -> str:
    half = args.steps // 2
    model, optimizer = build(args, text)
    first = train(args, text, model, optimizer, range(half))
    dcp.save(state_of(model, optimizer), checkpoint_id=args.checkpoint)
    losses = train(args, text, model, optimizer, range(half, args.steps))

    others = build(args, text)
    saved = state_of(*others)
    dcp.load(saved, checkpoint_id=args.checkpoint)
    set_state_dict(*others, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    again = train(args, text, *others, range(half, args.steps))

    one, other = (
        [losses_, *parts(t for p in m.parameters() for t in (p.detach(), *o.state[p].values()))]
        for losses_, m, o in ((losses, model, optimizer), (again, *others))
    )
    if not all(map(torch.equal, one, other)):
        raise SystemExit(f"rank {RANK}: the resumed run ends with other bits")
    device, host = bytes_per_parameter(model, optimizer)
    return (
        f"loss {first[0]:.4f} -> {losses[-1]:.4f} | bytes per parameter {device:.2f} on the device, {host:.2f} on the "
        f"host | skipped steps {optimizer.skipped_steps()} of {args.steps} | resumed after {half}: the same bits"
    )


def main() -> None:
    parser = Parser(__doc__, steps=60, batch_size=8, context=32, heads=2, layers=2)
    parser.add_argument("--lr", type=float, default=3e-3, help="default 0.003")
    parser.add_argument("--checkpoint", default="offload", metavar="FOLDER", help="written to; default offload")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: fully_shard needs processes")
    join_processes(args.device)
    line = run(args, Text(args.device))
    if RANK == 0:
        print(line, flush=True)
    leave_processes()


if __name__ == "__main__":
    main()
