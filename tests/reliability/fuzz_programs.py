"""Runs training loops drawn at random with plans and without, and where that is defined beside plain torch in fp32.

    python tests/reliability/fuzz_programs.py --programs 5000 [--seed 0] [--only SEED] [--program 'SMALLEST']

A program has up to nine iterations: blocks, perhaps a clip, a step, zero_grad, and a few features, each in some of the
iterations. Both runs have to agree after each iteration, bit by bit, on weights, masters, state, outcomes and the types
of exceptions, and on gradients and norms where the program looks at them. Gradients are multiples of 1/8, scales powers
of two, so that torch's fp32 weights have to come out nearly equal.

Each program is its seed. Of one that fails, iterations and features are left out as long as it fails; what is left is
printed. The runs have processes of their own (AMPCTX_PLAN is read at import), so that a crash is a finding, too.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import logging
import os
import pickle
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kit import COPIES, INF, LEVELS, NAN, OPTIMIZERS, in_thread, params_of, through_a_file

from ampctx import AmpSession, GradScaler, clip_grad_norm_, optimizers

ITERATIONS = 9
SHAPES = {"a": (4, 3), "b": (3, 5), "c": (7,), "d": (1,), "e": (0,), "f": (2, 2), "g": (3, 5)}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
KINDS: dict[str, Callable[..., Any]] = {
    **OPTIMIZERS,
    "SplitMasters": partial(optimizers.SplitMasters, torch.optim.AdamW, lr=0.01),
}
# The same step in torch, for programs whose numbers torch knows, too.
TORCH = {name: make for name, make in OPTIMIZERS.items() if "-" in name} | {
    "FusedAdam": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0),
    "FusedSGD": OPTIMIZERS["SGD-plain"],
    "FusedAdagrad": partial(torch.optim.Adagrad, lr=0.01),
}
# Rounded parts add up to a total norm in another order.
OWN_NORM = ("FusedLAMB", "FusedMixedPrecisionLamb")


class Interrupted(Exception):
    pass


class Model(nn.Module):
    """The gradient of a parameter is its factor in the loss."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for i, name in enumerate(names):
            n = torch.Size(SHAPES[name]).numel()
            value = torch.linspace(-1.1, 1.3, n) + i / 3  # 16 bits do not hold these
            self.register_parameter(name, nn.Parameter(value.reshape(SHAPES[name])))
        self.norm = nn.BatchNorm1d(3)  # stays fp32 at O2 and O5

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        return sum(((self.get_parameter(n).float() * f.float()).sum() for n, f in factors.items()), torch.zeros(()))


# --- features ---------------------------------------------------------------------------------------------------------


def every_second(g: Tensor) -> Tensor:
    return torch.stack([g, torch.full_like(g, 7)], -1)[..., 0]


def columns(g: Tensor) -> Tensor:
    return torch.cat([g, torch.full_like(g, 7)], -1)[..., : g.shape[-1]]


def transposed(g: Tensor) -> Tensor:
    return g.t().contiguous().t()


def of_flat(g: Tensor) -> Tensor:
    """An unaligned slice of a flat buffer."""
    flat = torch.cat([g.new_full((3,), 7), g.flatten(), g.new_full((5,), 7)])
    return flat[3 : 3 + g.numel()].view(g.shape)


def negated(g: Tensor) -> Tensor:
    """The same numbers with torch's negative bit, contiguous."""
    if g.dtype == torch.bfloat16 or g.numel() == 0:  # torch has no complex numbers of these
        return every_second(g)
    flat = torch.cat([-g.flatten(), g.new_zeros(2 + g.numel() % 2)])
    values = torch.view_as_complex(flat.view(-1, 2)).conj().imag
    return values.as_strided(g.shape, g.contiguous().stride(), 0)


def conjugated(g: Tensor, part: str = "real") -> Tensor:
    """A part of a conjugated tensor: every second element, of the imaginary one with the negative bit."""
    if g.dtype == torch.bfloat16:
        return columns(g)
    rows = [g, torch.full_like(g, 7)] if part == "real" else [torch.full_like(g, 7), -g]
    return getattr(torch.view_as_complex(torch.stack(rows, -1)).conj(), part)


FORMS = (every_second, columns, transposed, of_flat, negated, conjugated, partial(conjugated, part="imag"), torch.clone)
Do = Callable[["Run", int, int], Any]


def of_grad(change: Callable[[Tensor, int], Tensor], stepped: bool = False) -> Do:
    """Replaces the gradient of a parameter, or of one that an optimizer steps."""

    def do(run: Run, n: int, k: int) -> None:
        if (p := run.with_grad(n, stepped)) is not None:
            p.grad = change(p.grad.detach(), k)

    return do


def of_weight(change: Callable[[Any, int], Any], stepped: bool = False) -> Do:
    """Calls ``change`` with a parameter of the model, or one that an optimizer steps."""

    def do(run: Run, n: int, k: int) -> None:
        params = run.stepped if stepped else list(run.model.parameters())
        with torch.no_grad():
            change(params[n % len(params)], k)

    return do


def of_state(change: Callable[[Tensor, int], Tensor]) -> Do:
    """Replaces an entry of a parameter's state."""

    def do(run: Run, n: int, k: int) -> None:
        states = [opt.state[p] for opt in run.inner_opts for p in params_of(opt) if opt.state.get(p)]
        entry = states[n % len(states)] if states else {}
        keys = [key for key, t in sorted(entry.items()) if isinstance(t, Tensor) and t.is_floating_point()]
        if keys and (key := keys[k % len(keys)]) != "step":
            entry[key] = change(entry[key], n + k)

    return do


def form(t: Tensor, k: int) -> Tensor:
    return FORMS[k % len(FORMS)](t)


def set_data(p: Any, t: Tensor) -> None:
    p.data = t


def bucket(run: Run, n: int, k: int) -> None:
    """A gradient is a view of a buffer, which the program fills with other numbers before the step."""
    if (p := run.with_grad(n)) is not None:
        buffer = torch.zeros(64, dtype=p.dtype)
        p.grad = buffer[k % 3 * 8 :][: p.numel()].view(p.shape).copy_(p.grad.detach())
        run.reuse(buffer)


def buckets(run: Run, n: int, k: int) -> None:
    """All gradients are views of one buffer, as those of communication are."""
    members = [p for p in run.model.parameters() if p.grad is not None and p.grad.layout == torch.strided]
    for dtype in {p.dtype for p in members}:
        own = [p for p in members if p.dtype == dtype]
        at, flat = 1, torch.cat([torch.zeros(1, dtype=dtype), *(p.grad.detach().flatten() for p in own)])
        for p in own:
            p.grad = flat[at : at + p.numel()].view(p.shape)
            at += p.numel()
        if k % 2:
            run.reuse(flat)


def share(run: Run, n: int, k: int) -> None:
    """Two parameters have one gradient, or two of the same memory."""
    params = run.stepped if run.now_at == "between" else run.model.parameters()
    found = [p for p in params if p.shape == SHAPES["b"] and p.grad is not None]
    p, q, *_ = *found[:: 1 - n % 2 * 2], None, None
    if q is not None and p.dtype == q.dtype:
        p.grad = q.grad if k % 3 else q.grad.view_as(q)


def shrunk(run: Run, n: int, k: int) -> None:
    """A gradient whose storage has been made smaller."""
    p = run.with_grad(n)
    if p is not None and p.numel() > 1 and run.is_ours and run.start["to_none"] is True:
        p.grad = p.grad.detach().clone()
        p.grad.untyped_storage().resize_(p.numel() * p.element_size() - 1)  # malloc gives more
        run.shrunk.append(p)


def clip(run: Run, n: int, k: int, of: Callable[[Any], Any] = lambda run: run.stepped) -> None:
    clips = (nn.utils.clip_grad_norm_ if run.is_torch else clip_grad_norm_), nn.utils.clip_grad_norm_
    run.see("norm", clips[n % 2](of(run), (0.25, 1.0, 100.0)[k % 3]))


def move_to_group(run: Run, n: int, k: int) -> None:
    groups = run.groups(n)
    if len(groups) > 1 and (members := groups[k % 2]["params"]):
        groups[1 - k % 2]["params"].append(members.pop(k % len(members)))


def drop_param(run: Run, n: int, k: int) -> None:
    if len(members := run.groups(n)[0]["params"]) > 1:
        members.pop(k % len(members))


def add_group(run: Run, n: int, k: int) -> None:
    if "f" in run.start["names"]:
        run.opts[0].add_param_group({"params": [run.model.get_parameter("f")]})


def state_goes(run: Run, n: int, k: int) -> None:
    opt = run.inner_opts[n % len(run.opts)]
    opt.state.clear() if k % 3 == 0 else opt.state.pop(params_of(opt)[k % len(params_of(opt))], None)


def load_now(run: Run, n: int, k: int) -> None:
    opt = run.opts[n % len(run.opts)]
    opt.load_state_dict(through_a_file(opt.state_dict()) if k % 2 else opt.state_dict())


def save_then_load(run: Run, n: int, k: int) -> None:
    """Saves the first time, loads from then on."""
    targets = {"model": run.model, **{str(i): opt for i, opt in enumerate(run.opts)}}
    targets |= {"amp": run.session} if run.start["level"] else {}
    if not run.saved:
        run.saved = {name: copy.deepcopy(of.state_dict()) for name, of in targets.items()}
        return
    for name in sorted(targets, reverse=k % 2 == 1):
        targets[name].load_state_dict(copy.deepcopy(run.saved[name]))


def copied(run: Run, n: int, k: int) -> None:
    """Goes on with a copy of all, or under amp, whose sessions are not copied, makes one."""
    made = COPIES["deepcopy" if k % 2 else "pickle"]((run.model, run.opts))
    if not run.start["level"] and not run.start["scaler"]:
        run.model, run.opts = made


def initialize_again(run: Run, n: int, k: int) -> None:
    if run.start["level"]:
        run.session.reset()
        run.initialize()


def hook(p: Any, k: int) -> None:
    if p.requires_grad and k % 2:
        p.register_hook(lambda g: g * 0.5)
    elif p.requires_grad:
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", every_second(p.grad)))


def step_hook(run: Run, n: int, k: int) -> None:
    def double(opt: Any, args: Any, kwargs: Any) -> None:
        for p in params_of(opt):
            if k % 2 and p.grad is not None:
                p.grad.mul_(2)

    opt = run.inner_opts[n % len(run.opts)]
    (opt.register_step_pre_hook if k % 3 else opt.register_step_post_hook)(double)


def option(run: Run, n: int, k: int) -> None:
    group = run.groups(n)[0]
    changes = {"lr": 0.005, "weight_decay": 0.25, "betas": (0.5, 0.75), "momentum": 0.5, "maximize": True, "eps": 1e-2}
    name = [name for name in changes if name in group][k % 3]
    group[name] = torch.tensor(0.005) if name == "lr" and n % 2 and run.is_ours else changes[name]


def scheduler(run: Run, n: int, k: int) -> None:
    if not run.schedulers:
        run.schedulers = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.5) for opt in run.inner_opts]
    for each in run.schedulers:
        each.step()


FLAGS = """accumulate delay_unscale some_without_gradient unscale_first keep_gradients inf nan raise_before raise_after
raise_in_inner inner_block delay_check closure step_twice step_in_thread no_step look_at_gradients other_zero_grad
zero_by_model"""
# Those that torch has, too.
IN_TORCH = """accumulate delay_unscale some_without_gradient unscale_first keep_gradients step_in_thread no_step
look_at_gradients other_zero_grad zero_by_model form form_later bucket buckets grad_in_place clip later_clip
move_to_group option reverse_group copy_group reverse_groups freeze state_in_place load_now hook collect scheduler"""
DTYPES_OF_STATE = (torch.float64, torch.float16, torch.bfloat16)
# By when they are done in an iteration; "": what ``Run`` asks for.
PLACED: dict[str, dict[str, Do]] = {
    "": dict.fromkeys(FLAGS.split()),
    "start": {
        "move_to_group": move_to_group,
        "reverse_group": lambda run, n, k: run.groups(n)[0]["params"].reverse(),
        "copy_group": lambda run, n, k: run.groups(n)[0].update(params=list(run.groups(n)[0]["params"])),
        "reverse_groups": lambda run, n, k: run.groups(n).reverse(),
        "add_group": add_group,
        "drop_param": drop_param,
        "freeze": of_weight(lambda p, k: p.requires_grad_(not p.requires_grad)),
        "replace_data": of_weight(lambda p, k: set_data(p, form(p.data * 0.5, k))),
        "strided_weight": of_weight(lambda p, k: set_data(p, form(p.data, k))),
        "copy_into_weight": of_weight(lambda p, k: p.copy_(torch.full_like(p, k % 4 / 4))),
        "edit_master": of_weight(lambda p, k: p.mul_(0.5), stepped=True),
        "master_elsewhere": of_weight(lambda p, k: set_data(p, form(p.data, k)), stepped=True),
        "swap": of_weight(lambda p, k: torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 0.5))),
        "state_in_place": of_state(lambda t, k: t.mul_(0.5)),
        "state_replaced": of_state(form),
        "state_of_other_dtype": of_state(lambda t, k: t.to(DTYPES_OF_STATE[k % 3])),
        "state_goes": state_goes,
        "load_now": load_now,
        "save_then_load": save_then_load,
        "load_model": lambda run, n, k: run.model.load_state_dict(
            {m: t * 0.5 for m, t in run.model.state_dict().items()}
        ),
        "load_amp": lambda run, n, k: run.session.load_state_dict(run.session.state_dict(masters=bool(k % 2))),
        "copied": copied,
        "initialize_again": initialize_again,
        "hook": of_weight(hook),
        "step_hook": step_hook,
        "collect": lambda run, n, k: gc.collect(),
        "option": option,
    },
    "block": {
        "form": of_grad(form),
        "expand": of_grad(lambda g, k: (g.flatten()[:1] if g.numel() else g.new_zeros(1)).squeeze(0).expand(g.shape)),
        "bucket": bucket,
        "buckets": buckets,
        "share": share,
        "sparse": of_grad(lambda g, k: g.to_sparse()),
        "none": of_grad(lambda g, k: None),
        "zeros": of_grad(lambda g, k: torch.zeros_like(g)),
        "shrunk": shrunk,
    },
    "between": {
        "form_later": of_grad(form, stepped=True),
        "share_later": share,
        "grad_in_place": of_grad(lambda g, k: g.mul_(0.5), stepped=True),
        "clip": clip,
        "later_clip": clip,
        "clip_model": partial(clip, of=lambda run: list(run.model.parameters())),
    },
    "end": {
        "scheduler": scheduler,
        "kept_gradient": lambda run, n, k: (p := run.with_grad(n)) is not None and run.kept.append(p.grad),
    },
}
FEATURES = {name: place for place, features in PLACED.items() for name in features}


# --- programs ---------------------------------------------------------------------------------------------------------


def drawn(seed: int) -> dict[str, Any]:
    """The program of a seed."""
    rng = random.Random(seed)
    kind = rng.choice([*KINDS, "FusedAdam", "FusedSGD", "FusedAdam", "FusedSGD"])
    start: dict[str, Any] = {"kind": kind, "options": {}, "dtype": "fp32", "scaler": False}
    start["level"] = level = rng.choice([*LEVELS, "O2", "O5", None, None, None])
    start["scale"] = rng.choice(["dynamic", "dynamic", 128.0, 1.0])
    start["names"] = [name for name in SHAPES if rng.random() < 0.85] or ["a"]
    start["groups"], start["opts"] = rng.choice([1, 1, 2]), rng.choice([1, 1, 1, 2])
    start["to_none"] = rng.choice([True, True, True, False, None])
    options = start["options"]
    if level is None:
        start["dtype"] = rng.choice(["fp32", "fp32", "bf16", "fp16", "fp64"])
        start["scaler"] = rng.random() < 0.5 and start["dtype"] != "fp16"
    if rng.random() < 0.3 and kind not in ("FusedLion", "FusedMuon"):
        options["weight_decay"] = 0.125
    if kind.startswith("Fused") and kind != "FusedMixedPrecisionLamb":
        if (level is None and start["dtype"] in ("bf16", "fp16")) or level == "O5":
            masters = (True, "split") if start["dtype"] == "bf16" else ("split",) if level else (True,)
            if rng.random() < 0.5:
                options["master_weights"] = rng.choice(masters)
            elif rng.random() < 0.5:
                options["write_back"] = rng.choice(["stochastic", "kahan"])
        if rng.random() < 0.2:
            options["state_dtype"] = rng.choice(["bf16", "8bit"])
            options |= {} if kind in ("FusedAdagrad", "FusedNovoGrad") else {"min_8bit_size": 4}
        if rng.random() < 0.15:
            options["capturable"] = True
    if kind.startswith(("Fused", "Split")) and level is None and not start["scaler"] and rng.random() < 0.3:
        options["skip_nonfinite"] = True
    most = [*FEATURES, *[*PLACED["block"]] * 2, *["clip", "share", "bucket"] * 3]
    features: list[Any] = []
    for name in sorted({rng.choice(most) for _ in range(rng.choice([1, 2, 3, 4, 5]))}):
        first = rng.randrange(ITERATIONS)
        some = [i for i in range(ITERATIONS) if rng.random() < 0.4]
        at = rng.choice([[first], [first], [first], list(range(first, ITERATIONS)), some, list(range(ITERATIONS))])
        features.append([name, rng.randrange(60), rng.randrange(60), at])
    return {"start": start, "features": features, "iterations": list(range(ITERATIONS))}


def is_in_torch(program: dict[str, Any]) -> bool:
    """Whether torch in fp32 comes to nearly the same weights."""
    start = program["start"]
    names = {name for name, *_ in program["features"]}
    is_plain = not set(start["options"]) - {"weight_decay"} and start["dtype"] == "fp32" and start["level"] != "O3"
    if start["scaler"] and names & {"clip", "later_clip", "keep_gradients", "no_step", "step_twice"}:
        return False  # of gradients that are scaled there
    if start["kind"] == "FusedSGD" and start["to_none"] is None:
        return False  # its default is another
    return is_plain and start["kind"] in TORCH and names <= {*IN_TORCH.split()}


def is_near(program: dict[str, Any]) -> bool:
    """Whether norms of several dtypes are joined."""
    start = program["start"]
    clips = any("clip" in name for name, *_ in program["features"]) or "skip_nonfinite" in start["options"]
    return start["kind"] in OWN_NORM or (clips and (start["level"] in ("O2", "O3", "O5") or start["dtype"] != "fp32"))


def readable(program: dict[str, Any]) -> str:
    start = program["start"]
    lines = [", ".join(f"{name}={value}" for name, value in start.items() if value not in ({}, False, None))]
    for i in program["iterations"]:
        now = {name: f"{name}({n}, {k})" for name, n, k, at in program["features"] if i in at}
        parts = [now[name] for name in PLACED["start"] if name in now]
        inside = [text for name, text in now.items() if FEATURES[name] in ("", "block")]
        parts.append(f"blocks[{', '.join(inside)}]")
        parts += [now[name] for name in PLACED["between"] if name in now]
        parts += ["step", *(now[name] for name in PLACED["end"] if name in now), "zero_grad"]
        lines.append(f"{i}: {'; '.join(parts)}")
    return "\n".join(lines)


# --- running them -----------------------------------------------------------------------------------------------------

# Where, what, and the value: text, (dtype, shape, bytes), or (RAISES, the class, the message).
Seen = tuple[str, str, Any]
RAISES = "raises"


class Run:
    """One run of a program. ``seen`` is what it came to."""

    def __init__(self, program: dict[str, Any], is_torch: bool) -> None:
        self.program, self.start, self.is_torch = program, program["start"], is_torch
        self.is_ours = not is_torch and "-" not in self.start["kind"] and self.start["kind"] != "SplitMasters"
        self.seen: list[Seen] = []
        self.where, self.now = "start", {}
        self.buckets: list[Tensor] = []
        self.kept: list[Tensor] = []
        self.shrunk: list[Tensor] = []
        self.saved: dict[str, Any] = {}
        self.schedulers: list[Any] = []
        self.session, self.scaler = AmpSession(), None
        torch.manual_seed(0)
        self.model = Model(self.start["names"]).to(DTYPES[self.start["dtype"]])
        self.opts: list[Any] = []

    # What features ask for.

    def reuse(self, buffer: Tensor) -> None:
        """The program writes to the buffer after the block, where blocks copy gradients."""
        has_masters = self.start["level"] in ("O2", "O5") and "master_weights" not in self.start["options"]
        if has_masters and buffer.dtype != torch.float32 and not self.is_torch:
            self.buckets.append(buffer)

    @property
    def inner_opts(self) -> list[Any]:
        return [getattr(opt, "optim", opt) for opt in self.opts]

    @property
    def stepped(self) -> list[Tensor]:
        return [p for opt in self.opts for p in params_of(opt)]

    def groups(self, n: int) -> list[Any]:
        return self.opts[n % len(self.opts)].param_groups

    def with_grad(self, n: int, stepped: bool = False) -> Any:
        params = self.stepped if stepped else self.model.parameters()
        found = [p for p in params if p.grad is not None and p.grad.layout == torch.strided]
        return found[n % len(found)] if found else None

    # Running.

    def initialize(self) -> None:
        if self.start["level"] is None or self.is_torch:
            return
        scale = self.start["scale"]
        options = {"master_weights": "split"} if self.start["options"].get("master_weights") else {}
        options |= {"init_scale": 256.0, "growth_interval": 3} if scale == "dynamic" else {}
        level = self.start["level"]
        self.session.initialize(self.model, self.opts, opt_level=level, loss_scale=scale, verbosity=0, **options)

    def begin(self) -> None:
        makes = TORCH if self.is_torch else KINDS
        names = [name for name in [*self.start["names"], "norm.weight", "norm.bias"] if name != "f"]
        for i in range(self.start["opts"]):
            own = names[i :: self.start["opts"]]
            count = self.start["groups"]
            given = [{"params": [self.model.get_parameter(n) for n in own[g::count]]} for g in range(count)]
            options = {name: DTYPES.get(value, value) for name, value in self.start["options"].items()}
            self.opts.append(makes[self.start["kind"]]([g for g in given if g["params"]], **options))
        self.initialize()
        if self.start["scaler"] and not self.is_torch:
            self.scaler = GradScaler("cpu", init_scale=256.0, growth_interval=3)

    def __call__(self) -> list[Seen]:
        try:
            if self.attempt("start", self.begin):
                for i in self.program["iterations"]:
                    self.where = f"iteration {i}"
                    self.iterate(i)
                    self.attempt("look", self.look)
        finally:
            self.attempt("reset", self.session.reset)
        self.where = "after reset"
        self.attempt("look", self.look)
        return self.seen

    def attempt(self, what: str, call: Callable[..., Any], *args: Any) -> bool:
        try:
            call(*args)
            return True
        except Exception as error:
            self.seen.append((self.where, what, (RAISES, type(error).__name__, str(error)[:200])))
            return False

    def do(self, place: str) -> None:
        self.now_at = place
        for name in PLACED[place]:
            if name in self.now:
                self.attempt(name, PLACED[place][name], self, *self.now[name])

    def iterate(self, i: int) -> None:
        self.now = {name: (n, k) for name, n, k, at in self.program["features"] if i in at}
        for grad in self.kept:
            grad.fill_(3.0)
        self.kept.clear()
        self.do("start")
        count = 1 + ("accumulate" in self.now) + ("accumulate" in self.now and self.now["accumulate"][1] % 2)
        for b in range(count):
            self.attempt("block", self.block, 5 * i + b, b + 1 == count)
        for buffer in self.buckets:
            buffer.fill_(100.0)
        self.buckets.clear()
        if "look_at_gradients" in self.now:
            self.attempt("look", self.look_at_gradients)
        self.do("between")
        if "no_step" not in self.now:
            for opt in self.opts * (1 + ("step_twice" in self.now)):
                step = partial(self.step, opt, i)
                self.attempt("step", in_thread if "step_in_thread" in self.now else lambda call: call(), step)
        if self.scaler is not None:
            self.attempt("update", self.scaler.update)
        self.do("end")
        for p in self.shrunk:
            p.grad = None
        self.shrunk.clear()
        if "keep_gradients" not in self.now:
            self.attempt("zero_grad", self.zero_grad)

    def loss(self, number: int) -> Tensor:
        """Different in each block; the gradients are multiples of 1/8."""
        factors = {}
        for j, (name, p) in enumerate(self.model.named_parameters()):
            left_out = self.now.get("some_without_gradient", (0, -1))[1]
            if p.requires_grad and (left_out < 0 or j % 3 != left_out % 3):
                places = torch.arange(p.numel()) * 5 + j * 3 + number
                factors[name] = ((places % 17 - 8) / 8).reshape(p.shape).to(p.dtype)
        for name, value in (("inf", INF), ("nan", NAN)):
            if name in self.now and factors:
                factor = list(factors.values())[self.now[name][0] % len(factors)]
                factor.flatten()[-1:].fill_(value)
        return self.model(factors)

    def block(self, number: int, is_last: bool, is_inner: bool = False) -> None:
        loss = self.loss(number)
        with self.scaled(loss, is_last) as scaled:
            if "raise_before" in self.now and not is_inner:
                raise Interrupted
            if "inner_block" in self.now and not is_inner:
                self.block(number + 1, True, True)
            scaled.backward()
            self.do("block")
            if ("raise_after" in self.now and not is_inner) or ("raise_in_inner" in self.now and is_inner):
                raise Interrupted

    @contextlib.contextmanager
    def scaled(self, loss: Tensor, is_last: bool) -> Iterator[Tensor]:
        if self.is_torch or (self.start["level"] is None and self.scaler is None):
            yield loss
        elif self.scaler is not None:
            yield self.scaler.scale(loss)
            if is_last and "unscale_first" in self.now:
                for opt in self.opts:
                    self.scaler.unscale_(opt)
        else:
            delays = {"delay_unscale": "delay_unscale" in self.now and not is_last}
            delays["delay_overflow_check"] = "delay_check" in self.now
            given = self.opts if len(self.opts) > 1 else self.opts[0]
            with self.session.scale_loss(loss, given, **delays) as scaled:
                yield scaled

    def step(self, opt: Any, i: int) -> None:
        if "closure" not in self.now:
            (opt.step if self.scaler is None else partial(self.scaler.step, opt))()
            return

        def closure() -> Tensor:
            opt.zero_grad()
            self.block(5 * i + 4, True)
            return torch.zeros(())

        opt.step(closure) if self.scaler is None else self.scaler.step(opt, closure)

    def zero_grad(self) -> None:
        to_none = self.start["to_none"]
        if "other_zero_grad" in self.now:
            to_none = not to_none
        given = {} if to_none is None else {"set_to_none": to_none}
        for of in [self.model] if "zero_by_model" in self.now else self.opts:
            of.zero_grad(**given)
        if "f" in self.start["names"]:
            self.model.get_parameter("f").grad = None

    # Looking.

    def see(self, what: str, value: Any) -> None:
        if isinstance(value, Tensor):
            t = value.detach()
            t = t.to_dense() if t.layout != torch.strided else t
            flat = t.resolve_neg().resolve_conj().contiguous().as_strided((t.numel(),), (1,))
            value = str(t.dtype), tuple(t.shape), flat.view(torch.uint8).numpy().tobytes()
        self.seen.append((self.where, what, value if isinstance(value, tuple) else repr(value)))

    def look_at_gradients(self) -> None:
        for i, p in enumerate([*self.model.parameters(), *self.stepped]):
            if not any(p is q for q in self.shrunk):
                self.see(f"gradient {i}", p.grad)

    def look(self) -> None:
        for name, t in self.model.state_dict().items():
            self.see(name, t)
        for i, opt in enumerate(self.inner_opts):
            for j, p in enumerate(params_of(opt)):
                self.see(f"optimizer {i}, parameter {j}", p)
                for key, value in sorted(opt.state.get(p, {}).items()):
                    self.see(f"optimizer {i}, parameter {j}, {key}", value)
            if self.is_torch:
                continue
            if self.start["level"]:
                self.see(f"optimizer {i} skipped", self.session.skipped_steps(self.opts[i]))
            elif "skip_nonfinite" in self.start["options"]:
                self.see(f"optimizer {i} skipped", opt.skipped_steps())
        if self.scaler is not None:
            self.see("scale", self.scaler.get_scale())
        elif self.start["level"] and not self.is_torch and self.session.policy is not None:
            self.see("scale", self.session.loss_scale())


def serve() -> None:
    """Answers (program, is_torch) by what its run has seen, until there are no more."""
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    while True:
        try:
            given = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(Run(*given)(), answers)
        answers.flush()


class Server:
    """A process that runs programs, started again where it has died."""

    def __init__(self, plans: bool) -> None:
        self.environment = {**os.environ, "AMPCTX_PLAN": str(int(plans)), "OMP_NUM_THREADS": "1"}
        self.process: Any = None

    def ask(self, program: dict[str, Any], is_torch: bool = False) -> None:
        if self.process is None:
            command = [sys.executable, __file__, "--serve"]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.environment
            )
        pickle.dump((program, is_torch), self.process.stdin)
        self.process.stdin.flush()

    def answer(self) -> list[Seen]:
        try:
            return pickle.load(self.process.stdout)
        except (EOFError, pickle.UnpicklingError):
            ended = self.process.wait()
            self.close()
            return [("process", "ended", str(ended))]

    def close(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.stdout.close()
            self.process.wait()
            self.process = None


# --- comparing and shrinking ------------------------------------------------------------------------------------------


def _values(value: tuple[str, Any, bytes]) -> Tensor:
    dtype, shape, content = value
    if not content:
        return torch.empty(shape)
    return torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype.removeprefix("torch."))).reshape(shape)


def _same(a: Any, b: Any, near: float | None) -> bool:
    if a == b:
        return True
    if not isinstance(a, tuple) or not isinstance(b, tuple):
        return False
    if RAISES in (a[0], b[0]):
        return a[:2] == b[:2]
    if (a[0] != b[0] and near is None) or a[1] != b[1]:
        return False
    x, y = _values(a), _values(b)
    if near is None:
        alike = torch.equal(x.isnan(), y.isnan()) if x.is_floating_point() else False
        return alike and torch.equal(x[~x.isnan()], y[~y.isnan()]) and torch.equal(x.signbit(), y.signbit())
    if not x.is_floating_point():  # codes, remainders
        return True
    wide = max(near, 0.01 if x.dtype in (torch.bfloat16, torch.float16) else 0.0)
    return torch.allclose(x.double(), y.double(), rtol=wide, atol=wide, equal_nan=True)


def _shown(seen: Seen) -> str:
    value = seen[2]
    is_tensor = isinstance(value, tuple) and value[0] != RAISES
    return f"{seen[0]}, {seen[1]}: {_values(value).tolist() if is_tensor else value}"


def difference(ours: list[Seen], theirs: list[Seen], near: float | None = None) -> str:
    """The first difference, "" if there is none."""
    for a, b in zip(ours, theirs, strict=False):
        if a[:2] != b[:2] or not _same(a[2], b[2], near):
            return f"{_shown(a)}\n  other: {_shown(b)}"
    return "" if len(ours) == len(theirs) else f"{len(ours)} and {len(theirs)} observations"


class Fuzz:
    def __init__(self) -> None:
        self.planned, self.plain = Server(True), Server(False)
        self.counts = {"programs": 0, "beside torch": 0, "refused at the start": 0}

    def check(self, program: dict[str, Any]) -> str:
        """What is wrong with a program, "" if nothing is."""
        for server in (self.planned, self.plain):
            server.ask(program)
        ours, plain = self.planned.answer(), self.plain.answer()
        self.counts["programs"] += 1
        self.counts["refused at the start"] += ours[0][:2] == ("start", "start")
        if found := difference(ours, plain, 1e-3 if is_near(program) else None):
            return f"with plans {found}"
        if is_in_torch(program):
            self.plain.ask(program, True)
            return self.beside_torch(ours, self.plain.answer())
        return ""

    def beside_torch(self, ours: list[Seen], torchs: list[Seen]) -> str:
        """Compares what the optimizers step."""
        if any(value[0] == RAISES for seen in (ours, torchs) for _, _, value in seen):
            return ""
        self.counts["beside torch"] += 1
        kept = [
            [s for s in seen if s[1].startswith("optimizer") and s[1].count(",") == 1 and s[0] != "after reset"]
            for seen in (ours, torchs)
        ]
        return (found := difference(*kept, 1e-3)) and f"with ampctx {found}"

    def smallest(self, program: dict[str, Any], most: int = 400) -> dict[str, Any]:
        """Leaves out iterations, then features, then options, while the program fails."""
        tried = 0
        while True:
            for smaller in self.smaller(program):
                tried += 1
                if tried > most:
                    return program
                if self.check(smaller):
                    program = smaller
                    break
            else:
                return program

    def smaller(self, program: dict[str, Any]) -> Iterator[dict[str, Any]]:
        def but(**changes: Any) -> dict[str, Any]:
            return {**program, **changes}

        def without(items: list[Any], i: int) -> list[Any]:
            return items[:i] + items[i + 1 :]

        iterations, features, start = program["iterations"], program["features"], program["start"]
        for n in (len(iterations) // 2, 1):
            for i in range(len(iterations) - n, -1, -1) if len(iterations) > n > 0 else ():
                yield but(iterations=iterations[:i] + iterations[i + n :])
        for i in range(len(features)):
            yield but(features=without(features, i))
        for i, (name, n, k, at) in enumerate(features):
            here = [j for j in at if j in iterations]
            for j in range(len(here)) if len(here) > 1 else ():
                yield but(features=[*features[:i], [name, n, k, without(here, j)], *features[i + 1 :]])
        for name in start["options"]:
            yield but(start={**start, "options": {k: v for k, v in start["options"].items() if k != name}})
        for name, simple in (("opts", 1), ("groups", 1), ("scale", 1.0), ("to_none", True), ("scaler", False)):
            if start[name] != simple:
                yield but(start={**start, name: simple})
        for i in range(len(start["names"])):
            if len(start["names"]) > 1:
                yield but(start={**start, "names": without(start["names"], i)})

    def close(self) -> None:
        self.planned.close()
        self.plain.close()


def fuzz(seeds: Any, most_failures: int = 10, shrinks: bool = True) -> tuple[list[str], dict[str, int]]:
    """Runs the programs of these seeds: a text for each that failed, and counts."""
    run, failures = Fuzz(), []
    try:
        for seed in seeds:
            if run.check(drawn(seed)):
                small = run.smallest(drawn(seed)) if shrinks else drawn(seed)
                failures.append(f"seed {seed}:\n{readable(small)}\n{run.check(small)}\n--program '{as_text(small)}'")
                print(failures[-1], flush=True)
                if len(failures) >= most_failures:
                    break
    finally:
        run.close()
    return failures, run.counts


def as_text(program: dict[str, Any]) -> str:
    return json.dumps(program)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    parser.add_argument("--only", type=int, help="the seed of one program")
    parser.add_argument("--program", type=json.loads, help="a program as it was printed")
    parser.add_argument("--failures", type=int, default=10, help="ends after so many; default 10")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return 0
    if arguments.program is not None or arguments.only is not None:
        run = Fuzz()
        program = arguments.program or drawn(arguments.only)
        found = run.check(program)
        print(readable(program), found or "nothing is wrong", sep="\n")
        run.close()
        return 1 if found else 0
    seed = arguments.seed
    failures, counts = fuzz(range(seed, seed + arguments.programs), arguments.failures)
    print(f"seed {seed}: {counts}, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
