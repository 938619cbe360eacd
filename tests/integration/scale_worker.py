"""One rank that runs programs, and trains examples/mesh.py with engines and levels: prints what each left.

python scale_worker.py RENDEZVOUS_FILE RANKS RANK ENGINES LEVELS PORTS [PROGRAM ...]
"""

import argparse
import contextlib
import datetime
import io
import json
import os
import sys

FILE, RANKS, RANK = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ENGINES, OPT_LEVELS = sys.argv[4].split(","), sys.argv[5].split(",")
# As torchrun sets them.
os.environ |= {"RANK": str(RANK), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost"}
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "examples"))

import mesh  # noqa: E402, it reads the variables
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from ampctx import AmpError, amp  # noqa: E402

CPU = torch.device("cpu")
IMAGES, LABELS = (t[:320] for t in mesh.load_digits(CPU)[:2])
OVERFLOW_AT = 3
# What programs leave: freeing a group may wait for a gloo thread that waits for Python's lock.
KEPT = []
# Their scales are dynamic.
SKIP = ("O1", "O2")


@contextlib.contextmanager
def overflow(rank):
    """One loss of a rank is infinite."""
    original, calls = F.cross_entropy, 0

    def cross_entropy(*args):
        nonlocal calls
        calls += 1
        loss = original(*args)
        return loss * float("inf") if calls == OVERFLOW_AT and rank == RANK else loss

    F.cross_entropy = cross_entropy
    try:
        yield
    finally:
        F.cross_entropy = original


def whole(p):
    return p.full_tensor() if hasattr(p, "full_tensor") else p.detach()


def trained(engine, level):
    args = argparse.Namespace(engine=engine, opt_level=level, epochs=1)
    # Without an engine each rank trains alone.
    last = RANK if engine == "none" else RANKS - 1
    try:
        with overflow(last if level in SKIP else None), contextlib.redirect_stdout(sys.stderr):
            model, about = mesh.train(args, CPU, IMAGES, LABELS)
    except AmpError as error:
        return {"refused": str(error)}
    finally:
        amp.reset()
    with torch.no_grad():
        loss = F.cross_entropy(model(IMAGES), LABELS).item()
        weights = torch.cat([whole(p).double().flatten() for p in model.parameters()])
    same = [torch.empty_like(weights) for _ in range(RANKS)]
    dist.all_gather(same, weights)
    return {"loss": loss, "about": about, "same": all(torch.equal(weights, others) for others in same)}


def printed_by(port, program):
    # One for each: a rank that is ahead would join the store of the program before.
    os.environ["MASTER_PORT"] = port
    KEPT.append({"__name__": "__main__"})
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(program, "a program", "exec"), KEPT[-1])
    return out.getvalue()


torch.set_num_threads(1)
printed = [printed_by(*each) for each in zip(sys.argv[6].split(","), sys.argv[7:], strict=False)]
dist.init_process_group(
    "gloo", store=dist.FileStore(FILE, RANKS), rank=RANK, world_size=RANKS, timeout=datetime.timedelta(minutes=10)
)
runs = {f"{engine} {level}": trained(engine, level) for engine in ["none", *ENGINES] for level in OPT_LEVELS}
dist.destroy_process_group()
print(json.dumps({"printed": printed, "runs": runs}), flush=True)
# gloo's threads may still be there at exit, and end the process with an abort then.
os._exit(0)
