"""One rank of the tests of apex.parallel: runs every scenario of a test module and writes what each returned.

python parallel_worker.py SCENARIOS_MODULE RENDEZVOUS_FILE RESULT_FILE RANK WORLD_SIZE
"""

import datetime
import importlib
import os
import sys
import traceback
import warnings

import torch
import torch.distributed as dist
from ampctx_apex import install_apex

from ampctx import amp

MODULE, FILE, RESULT, RANK, WORLD = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])


def outcome(scenario):
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = scenario()
        return {"value": value, "warnings": [str(w.message) for w in caught]}
    except Exception:
        return {"error": traceback.format_exc()}
    finally:
        amp.reset()


install_apex()
timeout = datetime.timedelta(seconds=40)
dist.init_process_group("gloo", init_method=f"file://{FILE}", rank=RANK, world_size=WORLD, timeout=timeout)
scenarios = importlib.import_module(MODULE).SCENARIOS
results = {}
for name, scenario in scenarios.items():
    results[name] = outcome(scenario)
    dist.barrier()
torch.save(results, RESULT)
dist.barrier()
# gloo's threads may still be there at exit, and end the process with an abort then.
os._exit(0)
