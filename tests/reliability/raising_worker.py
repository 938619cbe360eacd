"""One rank of two that share a process group: rank 1 raises at a point of its second step, and nobody catches it.

python raising_worker.py RENDEZVOUS_FILE RANKS RANK POINT
"""

import datetime
import sys

import torch
import torch.distributed as dist
from torch import nn

from ampctx import amp

FILE, RANKS, RANK, POINT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def reach(point, step):
    if (RANK, POINT, step) == (1, point, 1):
        raise ValueError(f"rank 1 raises {point}")


dist.init_process_group(
    "gloo", init_method=f"file://{FILE}", rank=RANK, world_size=RANKS, timeout=datetime.timedelta(minutes=10)
)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
amp.initialize(model, optimizer, opt_level="O1", verbosity=0, process_group=dist.group.WORLD)
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).float().square().mean()
    reach("before the block", step)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        reach("in the block", step)
        scaled_loss.backward()
        reach("after backward", step)
        if (RANK, POINT, step) == (1, "in the exit", 1):
            model.weight.grad = model.weight.detach().to_sparse_csr()  # a layout that the exit cannot unscale
    optimizer.step()
print("the end")
