"""Optimizers by name, and parameters for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from kit import OPTIMIZERS, assert_same, muon, params_of, snapshot
from torch import Tensor, nn

from ampctx.optimizers import LARC, FusedAdam, FusedSGD, Offloaded, SplitMasters

LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}
DTYPES = {"fp32": torch.float32, **LOW, "fp64": torch.float64}
SHAPES = [(3, 5), (), (0,), (1,), (17,), (2, 3, 4, 4), (5, 4)]

# Each with options that use all of its state.
BY_NAME: dict[str, Callable[..., Any]] = {
    "adam": partial(OPTIMIZERS["FusedAdam"], weight_decay=0.1, amsgrad=True),
    "sgd": partial(OPTIMIZERS["FusedSGD"], weight_decay=0.1, dampening=0.1),
    "lamb": OPTIMIZERS["FusedLAMB"],
    "novograd": partial(OPTIMIZERS["FusedNovoGrad"], weight_decay=0.1),
    "adagrad": partial(OPTIMIZERS["FusedAdagrad"], weight_decay=0.1),
    "lion": partial(OPTIMIZERS["FusedLion"], weight_decay=0.1),
    "muon": muon,
}
# And what steps in another way.
STEPPED_BY: dict[str, Callable[..., Any]] = {
    **BY_NAME,
    "offload": partial(Offloaded, FusedAdam),
    "split-masters": partial(SplitMasters, torch.optim.AdamW),
    "larc": lambda params: LARC(FusedSGD(params, lr=0.1)),
}
# Dtypes of parameters, and how an optimizer keeps what they round off.
MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "masters": (torch.float16, {"master_weights": True}),
    "split": (torch.bfloat16, {"master_weights": "split"}),
    "kahan": (torch.bfloat16, {"write_back": "kahan"}),
    "stochastic": (torch.float16, {"write_back": "stochastic"}),
}
# Those whose step is one op call for each bucket of parameters.
ONE_CALL = [name for name in BY_NAME if name not in ("muon", "novograd")]
STATE = {
    "adam": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "sgd": {"momentum_buffer"},
    "lamb": {"exp_avg", "exp_avg_sq"},
    "novograd": {"exp_avg", "exp_avg_sq"},
    "adagrad": {"sum"},
    "lion": {"exp_avg"},
    "muon": {"momentum_buffer"},
}


def make(name: str, mode: str, params: Any = None, **more: Any) -> Any:
    dtype, options = MODES[mode]
    return BY_NAME[name](parameters(dtype) if params is None else params, **options, **more)


def offloaded(name: str, mode: str, params: Any = None, **more: Any) -> Offloaded:
    """The same in host memory."""
    (dtype, options), made = MODES[mode], BY_NAME[name]
    params = parameters(dtype) if params is None else params
    return Offloaded(made.func, params, **{**made.keywords, **options, **more})


def masters_of(optimizer: Any) -> list:
    return [m for group in optimizer.param_groups_master for m in group["params"]]


def parameters(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES, seed: int = 0) -> list[nn.Parameter]:
    """Parameters of all shapes; one channels_last, one transposed."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in shapes:
        value = torch.randn(shape, generator=generator).to(dtype)
        if value.dim() == 4:
            value = value.to(memory_format=torch.channels_last)
        elif shape == (5, 4):
            value = value.t().contiguous().t()
        found.append(nn.Parameter(value))
    return found


def gradients(params: list, step: int, scale: float = 1.0) -> list[Tensor]:
    """Contiguous gradients, whatever the layout of the parameters, and the same on each device."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [(torch.randn(p.shape, generator=generator) * scale).to(p.device, p.dtype) for p in params]


def give(params: list, grads: list) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = g


def run(optimizer: Any, steps: int = 3, first: int = 0) -> None:
    for step in range(first, first + steps):
        give(params_of(optimizer), gradients(params_of(optimizer), step))
        optimizer.step()


def run_alike(one: Any, other: Any, steps: int = 1, first: int = 3) -> None:
    """Steps both: they come to the same weights and states."""
    run(one, steps, first)
    run(other, steps, first)
    assert_same(snapshot(one), snapshot(other))


def like(optimizer: Any) -> list[nn.Parameter]:
    """New parameters with the values of the optimizer's."""
    return [nn.Parameter(p.detach().clone()) for p in params_of(optimizer)]


# --- what may change between steps ------------------------------------------------------------------------------------


def freeze(optimizer: Any) -> None:
    optimizer.gives = params_of(optimizer)[1:]
    params_of(optimizer)[0].grad = None


def cast(optimizer: Any, dtype: torch.dtype, every: int = 1) -> None:
    for p in params_of(optimizer)[::every]:
        p.data = p.data.to(dtype)
        p.grad = None
    optimizer.masters_follow_model()


def all_in_fp64(optimizer: Any) -> None:
    cast(optimizer, torch.float64)
    for state in optimizer.state.values():
        state.update({key: value if key == "step" else value.double() for key, value in state.items()})


def replace_state_dict(optimizer: Any) -> None:
    p = params_of(optimizer)[0]
    optimizer.state[p] = {key: value.clone() + 1 for key, value in optimizer.state[p].items()}


def edit_data(optimizer: Any) -> None:
    params_of(optimizer)[0].data.mul_(1.01)
    optimizer.masters_follow_model()


def replace_data(optimizer: Any) -> None:
    p = params_of(optimizer)[0]
    p.data = torch.full_like(p, 2)
    optimizer.masters_follow_model()  # fp32 masters do not see it by themselves


def replace_parameter(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(3, 5))


def remove_parameters(optimizer: Any) -> None:
    del optimizer.param_groups[0]["params"][2:]


def load(optimizer: Any) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg"] += 1
    optimizer.load_state_dict(saved)


def state_of_first(optimizer: Any) -> dict[str, Tensor]:
    return optimizer.state[params_of(optimizer)[0]]


# Of an Adam with parameters of SHAPES.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "freeze": freeze,
    "add a group": lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones_like(params_of(o)[0]))], "lr": 0.5}),
    "remove a parameter": lambda o: o.param_groups[0]["params"].pop(3),
    "remove parameters": remove_parameters,
    "replace a parameter": replace_parameter,
    "reverse parameters": lambda o: o.param_groups[0]["params"].reverse(),
    "clear the state": lambda o: o.state.clear(),
    "remove the state of one": lambda o: o.state.pop(params_of(o)[0]),
    "replace a state": lambda o: state_of_first(o).update(exp_avg=torch.full_like(state_of_first(o)["exp_avg"], 2)),
    "replace a state dict": replace_state_dict,
    "replace memory of state": lambda o: setattr(state_of_first(o)["exp_avg"], "data", torch.full((3, 5), 2.0)),
    "replace data": replace_data,
    "negate a weight": lambda o: setattr(params_of(o)[0], "data", torch._neg_view(params_of(o)[0].data)),
    "negate a state": lambda o: state_of_first(o).update(exp_avg=torch._neg_view(state_of_first(o)["exp_avg"])),
    "edit data": edit_data,
    "edit a weight": lambda o: params_of(o)[0].detach().mul_(1.01),
    "cast to fp32": lambda o: cast(o, torch.float32),
    "cast to fp64": all_in_fp64,
    "cast half to bf16": lambda o: cast(o, torch.bfloat16, every=2),
    "load": load,
    "change numbers": lambda o: o.param_groups[0].update(
        lr=torch.tensor(0.5), weight_decay=0.5, maximize=True, eps=0.1
    ),
    "change the mode": lambda o: setattr(getattr(o, "inner", o), "adam_w_mode", 0),
    "end amsgrad": lambda o: o.param_groups[0].update(amsgrad=False),
    "round at random": lambda o: setattr(getattr(o, "inner", o), "write_back", "stochastic"),
    "skip": lambda o: setattr(o, "found_inf", torch.ones(())),
}
