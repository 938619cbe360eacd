"""Members x borders of groups: whatever a program does to groups between steps, the next steps are those of a run that
began with such groups and has loaded the three states, or that made the change after it had loaded the model."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from kit import OPTIMIZERS, assert_same, params_of
from optimizer_cases import BY_NAME, STEPPED_BY
from torch import nn

from ampctx import AmpSession, GradScaler

# Options of bf16 weights without amp, and of amp.
BY_ITSELF = {
    "masters": {"master_weights": True},
    "split": {"master_weights": "split"},
    "kahan": {"write_back": "kahan"},
}
BY_AMP = {
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2", "keep_fp32": "seven.e"},
    "O5": {"opt_level": "O5", "keep_fp32": "seven.e"},
    "O5 split": {"opt_level": "O5", "keep_fp32": "seven.e", "master_weights": False},
}
TORCHS = {name: OPTIMIZERS[name] for name in ("SGD-plain", "SGD-foreach", "AdamW-foreach", "AdamW-fused")}
ROWS = [
    *((name, how) for name in STEPPED_BY for how in ("plain", "scaler", "O1", "O2", "O5")),
    *((name, how) for name in BY_NAME for how in (*BY_ITSELF, "O5 split")),
    ("split-masters", "O5 split"),
    *itertools.product(TORCHS, ("O1", "O2", "O5")),
]
# Refused: masters beside those on the host, and groups of fp16 weights.
ROWS = [row for row in ROWS if row not in (("offload", "O2"), ("offload", "O5"), ("split-masters", "O2"))]


class Weights(nn.Module):
    """``f`` and ``g`` are in no group at first, ``g`` is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.seven = nn.ModuleDict({name: nn.Linear(3, 2 + i, bias=False) for i, name in enumerate("abcdefg")})
        self["g"].requires_grad_(False)

    def __getitem__(self, name):
        return self.seven[name].weight

    def forward(self, x):
        return sum(layer(x.to(layer.weight.dtype)).float().sin().sum() for layer in self.seven.values())


def over(of, at, to, before):
    """A member of one group goes to its place in another."""
    return lambda groups, _: groups[to]["params"].insert(before, groups[of]["params"].pop(at))


def replace(groups, weights):
    groups[0]["params"][0] = weights["b"]


def swap_members(groups, _):
    first, last = groups[0], groups[-1]
    first["params"], last["params"] = last["params"], first["params"]


def merge(groups, _):
    groups[0]["params"] += groups.pop(1)["params"]


def trains(name, on):
    return lambda model: model[name].requires_grad_(on)


def new_weight(model):
    model.seven["b"].weight = nn.Parameter(torch.ones_like(model["b"]))


# One after the other, from groups ab, cd, e: what is done to the groups, and to the model before it.
CHANGES = {
    "the first to the group before": (over(1, 0, 0, 2), None),
    "the last to the group after": (over(0, 2, 1, 0), None),
    "over a group": (over(0, 0, 2, 1), None),
    "freeze": (None, trains("c", False)),
    "append": (lambda groups, weights: groups[1]["params"].append(weights["f"]), None),
    "thaw": (None, trains("c", True)),
    "replace": (replace, new_weight),
    "reorder": (lambda groups, _: [group["params"].reverse() for group in groups], None),
    "swap members": (swap_members, None),
    "remove": (lambda groups, _: groups[0]["params"].pop(), None),
    "add a group": ("add", trains("g", True)),
    "reorder groups": (lambda groups, _: groups.reverse(), None),
    "merge": (merge, None),
}


class Run:
    """``groups``: of options, with names as members."""

    def __init__(self, name, how, sessions, model, groups):
        self.name, self.how, self.sessions = name, how, sessions
        self.model, self.groups = model, [{**group, "params": list(group["params"])} for group in groups]
        if how in BY_ITSELF:
            model.bfloat16()
        members = [{**group, "params": [model[n] for n in group["params"]]} for group in groups]
        own = BY_ITSELF["split"] if how == "O5 split" and name in BY_NAME else BY_ITSELF.get(how, {})
        self.optimizer = {**STEPPED_BY, **TORCHS}[name](members, **own)
        self.scaler, self.session = GradScaler("cpu", enabled=how == "scaler"), AmpSession() if how in BY_AMP else None
        if self.session:
            sessions.append(self.session)
            self.session.initialize(model, self.optimizer, loss_scale=64.0, verbosity=0, **BY_AMP[how])

    def change(self, of_groups, of_model):
        if of_model:
            of_model(self.model)
        if of_groups == "add":
            self.optimizer.add_param_group({"params": [self.model["g"]], "lr": 0.25})
            self.groups.append({"params": ["g"]})
        elif of_groups:
            of_groups(self.optimizer.param_groups, self.model)
            of_groups(self.groups, {name: name for name in "abcdefg"})
        for p in self.optimizer.state.keys() - set(params_of(self.optimizer)):
            del self.optimizer.state[p]

    def like(self):
        """A new run with such groups."""
        model = Weights()
        for n in "abcdefg":
            model[n].requires_grad_(self.model[n].requires_grad)
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        groups = [{**o, "params": group["params"]} for o, group in zip(options, self.groups, strict=True)]
        return Run(self.name, self.how, self.sessions, model, groups)

    def load(self, source, *parts):
        for part in parts:
            if getattr(self, part):
                getattr(self, part).load_state_dict(copy.deepcopy(getattr(source, part).state_dict()))

    def step(self, step):
        loss = self.model(torch.cos(torch.arange(6.0).view(2, 3) + step))
        if self.session:
            with self.session.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.model.zero_grad()
        self.optimizer.zero_grad()

    def everything(self):
        """Weights, and what the optimizer has of those that train: a frozen one may have no master."""
        names = [name for group in self.groups for name in group["params"]]
        members = zip(names, params_of(self.optimizer), strict=True)
        trained = [p for name, p in members if self.model[name].requires_grad]
        return [*self.model.parameters(), *trained, [self.optimizer.state.get(p) for p in trained]]


@pytest.fixture
def sessions():
    made = []
    yield made
    for session in reversed(made):
        session.reset()


@pytest.mark.full(but=28)
@pytest.mark.parametrize(("name", "how"), ROWS)
def test_steps_after_a_change_are_those_of_a_run_that_began_with_it(name, how, sessions):
    groups = [{"params": list(names), "lr": lr} for names, lr in (("ab", 0.02), ("cd", 0.5), ("e", 0.0))]
    runs = [Run(name, how, sessions, Weights(), groups)]
    for i, (change, (of_groups, of_model)) in enumerate(CHANGES.items()):
        # The first, which has seen everything, and two that have loaded states: but frozen weights are loaded rounded.
        del runs[1 : None if change == "thaw" else -2]
        late = runs[0].like()
        for run in runs:
            run.step(3 * i)
            run.change(of_groups, of_model)
        late.load(runs[0], "model")
        late.change(of_groups, of_model)
        runs += [runs[0].like(), late]
        late.load(runs[0], "optimizer", "scaler", "session")
        runs[-2].load(runs[0], "model", "optimizer", "scaler", "session")
        for step in (3 * i + 1, 3 * i + 2):
            for run in reversed(runs):  # a block of any session ends what is kept of loads
                run.step(step)
        for other in runs[1:]:
            assert_same(other.everything(), runs[0].everything(), change)
