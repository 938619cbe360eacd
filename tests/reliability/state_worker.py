"""One rank of one, two or four that saves runs by names or loads them: prints digests of the state and of what follows.

python state_worker.py RENDEZVOUS_FILE RANKS RANK ACTION DIRECTORY [layouts with commas]

ACTION: "both" (a fast check of everything), "save", "load" (what every number of ranks has saved) or "convert"
(every layout into every other).
"""

import copy
import datetime
import json
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from digests import digest
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ampctx import optimizers
from ampctx.amp import AmpSession
from ampctx.amp.named_entries import names_of

FILE, RANKS, RANK, ACTION, DIRECTORY = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5])
GIVEN = sys.argv[6].split(",") if len(sys.argv) > 6 else []
OVERFLOW_AT, SAVED_AT, STEPS = 2, 5, 15

KEPT_BY_OPTIMIZER = {"opt_level": "O5", "master_weights": False}
# The engine, arguments of initialize and of the optimizer.
LAYOUTS = {
    "ddp-O1": ("ddp", {"opt_level": "O1"}, {}),
    "ddp-O2": ("ddp", {"opt_level": "O2"}, {}),
    "ddp-O5": ("ddp", {"opt_level": "O5"}, {}),
    "ddp-O5-torch": ("ddp", {"opt_level": "O5"}, torch.optim.AdamW),
    "ddp-masters": ("ddp", KEPT_BY_OPTIMIZER, {"master_weights": True}),
    "ddp-split": ("ddp", KEPT_BY_OPTIMIZER, {"master_weights": "split"}),
    "shards": ("policy", {"opt_level": "O0"}, {}),
    "shards-torch": ("policy", {"opt_level": "O0"}, torch.optim.AdamW),
    "masters": ("16 bits", KEPT_BY_OPTIMIZER, {"master_weights": True}),
    "split": ("16 bits", KEPT_BY_OPTIMIZER, {"master_weights": "split"}),
    "kahan": ("16 bits", KEPT_BY_OPTIMIZER, {"write_back": "kahan"}),
    "stochastic": ("16 bits", KEPT_BY_OPTIMIZER, {"write_back": "stochastic", "seed": 3}),
}


class Run:
    """A model whose sizes no number of ranks divides, in one layout."""

    def __init__(self, layout, seed=0):
        engine, options, of_optimizer = LAYOUTS[layout]
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.session = AmpSession()
        if engine != "ddp":
            self.session.allow_incoming_model_not_fp32 = True
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            model = model.to(torch.bfloat16 if engine == "16 bits" else None)
            for module in (model[0], model[2], model):
                fully_shard(module, mesh=MESH, **({"mp_policy": policy} if engine == "policy" else {}))
        if isinstance(of_optimizer, dict):
            self.optimizer = optimizers.FusedAdam(model.parameters(), lr=0.01, **of_optimizer)
        else:
            self.optimizer = of_optimizer(model.parameters(), lr=0.01)
        self.session.initialize(model, self.optimizer, loss_scale="dynamic", verbosity=0, **options)
        self.model, self.level = (DistributedDataParallel(model) if engine == "ddp" else model), options["opt_level"]
        self.heard = []
        self.session.on_step(lambda *_: self.heard.append(1))

    def train(self, first, last):
        for step in range(first, last):
            generator = torch.Generator().manual_seed(100 * step + RANK)
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(4, 5, generator=generator)).float().square().mean()
            loss = loss * float("inf") if step == OVERFLOW_AT and RANK == 0 else loss
            with self.session.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
            self.optimizer.step()
            for name, buffer in self.model.named_buffers():
                if name.endswith("steps"):
                    buffer.add_(1)
        return self

    def stateful(self, **options):
        return self.session.stateful(self.model, self.optimizer, **options)

    def save(self, path):
        dcp.save({"app": self.stateful()}, checkpoint_id=path)

    def load(self, path, partial=False, **options):
        planner = dcp.DefaultLoadPlanner(allow_partial_load=partial)
        dcp.load({"app": self.stateful(**options)}, checkpoint_id=path, planner=planner)
        return self

    def full(self, **options):
        return self.session.get_state_dict(self.model, self.optimizer, full_state_dict=True, **options)

    def digests(self):
        """Of weights, of moments, of the loss scale, and of everything, with whole tensors."""
        state = self.full()
        in_fp32 = {name: value.float() for name, value in state["model"].items()}
        return [digest(part) for part in (in_fp32, state["optim"], state["amp"]["loss_scaler0"], state)]

    def end(self):
        self.session.reset()


def save(layouts) -> dict:
    """Saves each layout in the middle of a run. Digests of then, and of the end."""
    found = {}
    for layout in layouts:
        run = Run(layout).train(0, SAVED_AT)
        run.save(DIRECTORY / f"{layout}-{RANKS}")
        found[layout] = {"saved": run.digests()}
        found[layout]["end"] = run.train(SAVED_AT, STEPS).digests()
        found[layout]["level"] = run.level
        run.end()
    return found


def load(layouts, numbers) -> dict:
    """Loads what each number of ranks has saved; with the number of these ranks, goes on to the end."""
    found = {}
    for layout in layouts:
        for number in numbers:
            run = Run(layout, seed=1)
            if number == RANKS and isinstance(run.model, DistributedDataParallel):
                # Its second iteration orders buckets anew, so that sums over four ranks round otherwise in the first.
                run.train(0, 2)
                run.heard.clear()
            run.load(DIRECTORY / f"{layout}-{number}")
            found[f"{layout} {number}"] = {"loaded": run.digests(), "heard": len(run.heard)}
            if number == RANKS:
                found[f"{layout} {number}"]["end"] = run.train(SAVED_AT, STEPS).digests()
            run.end()
    return found


def convert(layouts) -> dict:
    """Loads each layout into each."""
    found = {}
    for there in layouts:
        for here in layouts:
            other_level = LAYOUTS[there][1]["opt_level"] != LAYOUTS[here][1]["opt_level"]
            # No other layout has entries for the compensations.
            partial = here == "kahan" != there
            run = Run(here, seed=1).load(DIRECTORY / f"{there}-{RANKS}", partial, allow_level_change=other_level)
            found[f"{there} {here}"] = run.digests()
            run.end()
    return found


# --- what two ranks check in the fast set -----------------------------------------------------------------------------


def error_of(call) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def whole_states() -> dict:
    """State dicts of whole tensors, between engines and through one rank's file."""
    split = Run("split").train(0, SAVED_AT)
    expected, full = split.digests(), split.full(cpu_offload=True)
    if RANK == 0:
        torch.save(full, DIRECTORY / "whole")
    dist.barrier()
    loaded = torch.load(DIRECTORY / "whole", weights_only=True)
    kinds = {str(t.dtype) for t in loaded["model"].values()}
    ddp = Run("ddp-O5", seed=1)
    ddp.session.set_state_dict(ddp.model, ddp.optimizer, loaded, process_group=dist.group.WORLD)
    back = Run("split", seed=1)
    back.session.set_state_dict(back.model, back.optimizer, ddp.full())
    # DTensors into plain parameters, of the same process.
    plain = Run("ddp-O5", seed=1)
    plain.session.set_state_dict(plain.model, plain.optimizer, back.session.get_state_dict(back.model, back.optimizer))
    result = {
        "empty elsewhere": full == {} or RANK == 0,
        "kinds": sorted(kinds),
        "ddp": ddp.digests()[:3] == expected[:3],
        "back": back.digests() == expected,
        "plain": plain.digests()[:3] == expected[:3],
        "heard": len(back.heard + ddp.heard),
    }
    for run in (split, ddp, back, plain):
        run.end()
    return result


def torch_functions() -> dict:
    """torch's own functions under amp: none hears of the step that builds state, and masters are refused by name."""
    run, saved = Run("shards"), Run("shards").train(0, 2)
    set_optimizer_state_dict(run.model, run.optimizer, get_optimizer_state_dict(saved.model, saved.optimizer))
    same = digest(run.full()["optim"]) == digest(saved.full()["optim"])
    found = {"heard": run.heard, "outcome": run.session.outcome(run.optimizer), "same": same}
    ddp = Run("ddp-O5")
    found["masters"] = error_of(lambda: get_optimizer_state_dict(ddp.model, ddp.optimizer))
    found["state"] = len(ddp.optimizer.state)
    ddp.train(0, 2)
    found["masters later"] = error_of(lambda: get_optimizer_state_dict(ddp.model, ddp.optimizer))
    for each in (run, saved, ddp):
        each.end()
    return found


def names() -> list[bool]:
    """Whether names are those of torch: around and inside of a model."""
    outside, inside = DistributedDataParallel(nn.Linear(2, 2)), nn.ModuleDict({"a": nn.Linear(2, 2)})
    inside["module"] = DistributedDataParallel(nn.Sequential(nn.ModuleDict({"module": nn.Linear(2, 2)})))
    return [list(names_of(model)) == list(get_model_state_dict(model)) for model in (outside, inside)]


def refusals() -> dict:
    """Messages for trees that do not fit, and whether anything changed."""
    run = Run("split").train(0, 2)
    tree, before, found = run.full(), run.digests(), {}

    def refused_where(name, change):
        given = copy.deepcopy(tree)
        change(given)
        found[name] = error_of(lambda: run.session.set_state_dict(run.model, run.optimizer, given))

    refused_where("no model", lambda t: t.pop("model"))
    refused_where("missing weight", lambda t: t["model"].pop("0.weight"))
    refused_where("unknown weight", lambda t: t["model"].update(head=torch.ones(2)))
    refused_where("shape", lambda t: t["model"].update({"0.weight": torch.ones(2, 2)}))
    refused_where("missing state", lambda t: t["optim"].pop("2.bias"))
    refused_where("unknown state", lambda t: t["optim"].update(head={"step": torch.ones(())}))
    refused_where("missing moment", lambda t: t["optim"]["2.bias"].pop("exp_avg"))
    refused_where("moment", lambda t: t["optim"]["2.bias"].update(exp_avg=torch.ones(4)))
    refused_where("nan", lambda t: t["optim"]["2.bias"]["exp_avg"].fill_(torch.nan))
    refused_where("level", lambda t: t["amp"].update(opt_level="O2"))
    refused_where("scale", lambda t: t["amp"]["loss_scaler0"].pop("loss_scale"))
    refused_where("facts", lambda t: t["optimizers"].update({"0.weight": {}}))
    found["same"] = run.digests() == before
    run.end()
    return found


def in_fast_set() -> dict:
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("ampctx").addHandler(handler)
    found = {"saved": save(GIVEN), "loaded": load(GIVEN, [RANKS]), "converted": convert(GIVEN)}
    found |= {"whole": whole_states(), "torch": torch_functions(), "names": names(), "refused": refusals()}
    return {**found, "messages": messages}


dist.init_process_group(
    "gloo", init_method=f"file://{FILE}", rank=RANK, world_size=RANKS, timeout=datetime.timedelta(seconds=20)
)
MESH = init_device_mesh("cpu", (RANKS,))
results = {
    "both": in_fast_set,
    "save": lambda: save(LAYOUTS),
    "load": lambda: load(LAYOUTS, (1, 2, 4)),
    "convert": lambda: convert(LAYOUTS),
}[ACTION]()
print(json.dumps(results), flush=True)
dist.barrier()
# gloo's threads may still be there at exit, and end the process with an abort then.
os._exit(0)
