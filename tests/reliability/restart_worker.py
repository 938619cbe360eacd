"""One rank under torchrun that saves each step and goes on from what is saved: writes its last state.

python restart_worker.py FOLDER KILLED_AT

Rank 1 kills itself once, before it takes step KILLED_AT (-1: never).
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ampctx import amp
from ampctx.optimizers import FusedAdam

FOLDER, KILLED_AT = Path(sys.argv[1]), int(sys.argv[2])
SAVED, KILLED = FOLDER / "saved.pt", FOLDER / "killed"

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# A store of its own for each start: in torchrun's, gloo (2.13) finds the addresses of the processes that have ended.
store = dist.FileStore(str(FOLDER / f"store{os.environ['TORCHELASTIC_RESTART_COUNT']}"), ranks)
dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
optimizer = FusedAdam(model.parameters(), lr=0.0625)
amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
wrapped = DistributedDataParallel(model)


def state():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict(masters=True)}


first = 0
if SAVED.exists():
    saved = torch.load(SAVED, weights_only=True)
    first = saved.pop("next")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"], process_group=dist.group.WORLD)
for step in range(first, 8):
    if step == KILLED_AT and rank == 1 and not KILLED.exists():
        KILLED.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    loss = wrapped(x).float().square().mean()
    if step == 2:
        loss = loss * float("inf")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    if rank == 0:
        torch.save({**state(), "next": step + 1}, FOLDER / "new.pt")
        (FOLDER / "new.pt").replace(SAVED)
    dist.barrier()  # nobody goes on before the step is saved
amp.check_ranks()
torch.save(state(), FOLDER / f"end{rank}.pt")
dist.destroy_process_group()
