"""Runs training loops drawn at random with plans and without, and where that is defined beside plain torch in fp32.

    python tests/fuzz_programs.py --programs 5000 [--seed 0] [--program 'SMALLEST']

A program has up to nine iterations, and a few features in some of them. Both runs have to agree after each iteration,
bit by bit. Gradients are multiples of 1/8, scales powers of two: so the run without plans may have another scale, and
torch's fp32 weights have to come out nearly equal. Of a program that fails, what is left out as long as it fails is
left out, and the rest is printed. The runs have processes of their own, so that a crash is a finding, too.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kit import HALF, INF, LEVELS, NAN, OPTIMIZERS, Factors, in_thread, params_of, through_a_file

from ampctx import AmpSession, GradScaler, clip_grad_norm_, optimizers

ITERATIONS = 9
SHAPES = {"a": (4, 3), "b": (3, 5), "c": (7,), "d": (1,), "e": (0,), "f": (2, 2), "g": (3, 5)}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
FACTORS = (torch.arange(40) * 5 % 17 - 8) / 8
KINDS = OPTIMIZERS | {"SplitMasters": partial(optimizers.SplitMasters, torch.optim.AdamW, lr=0.01)}
# The same step in torch, for programs whose numbers torch knows, too.
TORCH = {name: make for name, make in OPTIMIZERS.items() if "-" in name} | {
    "FusedAdam": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0),
    "FusedSGD": OPTIMIZERS["SGD-plain"],
    "FusedAdagrad": partial(torch.optim.Adagrad, lr=0.01),
}
OWN = {}, {"lr": 0.005, "weight_decay": 0.125}, {"lr": 0.02, "betas": (0.5, 0.75), "momentum": 0.5, "eps": 1e-3}
Program = dict[str, Any]
# Where, what, and the value: text, (dtype, shape, bytes), or (RAISES, the class, the message).
Seen = tuple[str, str, Any]
RAISES = "raises"


class Idle(Exception):
    """A feature has nothing to change."""


def form(t: Tensor, k: int) -> Tensor:
    """The same numbers, laid out in another way."""
    sevens, can_be_complex = torch.full_like(t, 7), t.dtype != torch.bfloat16
    match k % 8:
        case 0:
            return torch.cat([t, sevens], -1)[..., : t.shape[-1]]
        case 1:
            return t.t().contiguous().t()
        case 2:  # unaligned
            return torch.cat([t.new_full((3,), 7), t.flatten()])[3:].view(t.shape)
        case 3 if can_be_complex and t.numel():  # contiguous, with torch's negative bit
            flat = torch.cat([-t.flatten(), t.new_zeros(2 + t.numel() % 2)])
            return torch.view_as_complex(flat.view(-1, 2)).conj().imag.as_strided(t.shape, t.contiguous().stride(), 0)
        case 4 if can_be_complex:  # with the bit, every second element
            return torch.view_as_complex(torch.stack([sevens, -t], -1)).conj().imag
        case 5:
            return t.clone()
    return torch.stack([t, sevens], -1)[..., 0]


def pick(items: Any, n: int) -> Any:
    if not (items := list(items)):
        raise Idle
    return items[n % len(items)]


def two(items: list[Any]) -> list[Any]:
    return items if len(items) > 1 else pick((), 0)


Do = Callable[["Run", int, int], Any]


def of_grad(change: Callable[[Tensor, int], Any], stepped: bool = False) -> Do:
    """Replaces the gradient of a parameter, or of one that an optimizer steps."""
    return lambda run, n, k: setattr(p := pick(run.with_grads(stepped), n), "grad", change(p.grad.detach(), k))


def of_weight(change: Callable[[Any, int], Any], stepped: bool = False) -> Do:
    """Calls ``change`` with a parameter of the model, or one that an optimizer steps."""
    return lambda run, n, k: torch.no_grad()(change)(pick(run.params(stepped), n), k)


def of_state(change: Callable[[Tensor, int], Tensor]) -> Do:
    """Replaces an entry of a parameter's state."""

    def do(run: Run, n: int, k: int) -> None:
        entry = pick([opt.state[p] for opt in run.inner_opts for p in params_of(opt) if opt.state.get(p)], n)
        floats = {key for key, t in entry.items() if isinstance(t, Tensor) and t.is_floating_point()}
        key = pick(sorted(floats - {"step"}), k)
        entry[key] = change(entry[key], n + k)

    return do


def of_members(change: Callable[[list[Any], list[Any], int], Any]) -> Do:
    """Calls ``change`` with the groups of an optimizer, and the parameters of the first."""
    return lambda run, n, k: change(groups := pick(run.opts, n).param_groups, groups[0]["params"], k)


def bucket(run: Run, n: int, k: int) -> None:
    """A gradient is a view of a buffer, which the program fills with other numbers before the step."""
    p = pick(run.with_grads(), n)
    run.buckets.append(torch.zeros(64, dtype=p.dtype))
    p.grad = run.buckets[-1][k % 3 * 8 :][: p.numel()].view(p.shape).copy_(p.grad.detach())


def share(run: Run, n: int, k: int, stepped: bool = False) -> None:
    """Two parameters of one optimizer have one gradient, or two of the same memory."""
    pick(run.opts if len(run.opts) == 1 else (), 0)
    p, q, *_ = two([p for p in run.with_grads(stepped) if p.shape == SHAPES["b"]])[:: 1 - n % 2 * 2]
    p.grad = q.grad if k % 3 else q.grad.view_as(q)


def clip(run: Run, n: int, k: int, stepped: bool = True) -> None:
    clips = (nn.utils.clip_grad_norm_ if run.is_torch else clip_grad_norm_), nn.utils.clip_grad_norm_
    pick(run.with_grads(stepped), n)
    run.see("norm", clips[n % 2](run.params(stepped), (0.25, 1.0, 100.0)[k % 3]))


def move_to_group(groups: list[Any], own: list[Any], k: int) -> None:
    moved = pick(two(groups)[k % 2]["params"], k)
    groups[k % 2]["params"][:] = [p for p in groups[k % 2]["params"] if p is not moved]
    groups[1 - k % 2]["params"].append(moved)


def option(run: Run, n: int, k: int) -> None:
    group = pick(pick(run.opts, n).param_groups, k // 3)
    changes = {"lr": 0.005, "weight_decay": 0.25, "betas": (0.5, 0.75), "momentum": 0.5, "maximize": True, "eps": 1e-2}
    name = [name for name in changes if name in group][k % 3]
    group[name] = torch.tensor(0.005) if name == "lr" and n % 2 and run.is_ours else changes[name]


FLAGS = """accumulate delay_unscale some_without_gradient unscale_first keep_gradients inf nan raise_before raise_after
raise_in_inner inner_block delay_check closure step_twice step_in_thread no_step look_at_gradients other_zero_grad
zero_by_model"""
# By when they are done in an iteration; "": what ``Run`` asks for.
PLACED: dict[str, dict[str, Do]] = {
    "": dict.fromkeys(FLAGS.split()),
    "start": {
        "move_to_group": of_members(move_to_group),
        "reverse_group": of_members(lambda groups, own, k: two(own).reverse()),
        "copy_group": of_members(lambda groups, own, k: groups[0].update(params=list(own))),
        "reverse_groups": of_members(lambda groups, own, k: two(groups).reverse()),
        "drop_param": of_members(lambda groups, own, k: two(own).pop(k % len(own))),
        "add_group": lambda run, n, k: run.opts[0].add_param_group({"params": [run.model.get_parameter("f")]}),
        "freeze": of_weight(lambda p, k: p.requires_grad_(not p.requires_grad)),
        "replace_data": of_weight(lambda p, k: setattr(p, "data", form(p.data * 0.5, k))),
        "strided_weight": of_weight(lambda p, k: setattr(p, "data", form(p.data, k))),
        "copy_into_weight": of_weight(lambda p, k: p.copy_(torch.full_like(p, k % 4 / 4))),
        "edit_master": of_weight(lambda p, k: p.mul_(0.5), stepped=True),
        "master_elsewhere": of_weight(lambda p, k: setattr(p, "data", form(p.data, k)), stepped=True),
        "swap": of_weight(lambda p, k: torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 0.5))),
        "state_in_place": of_state(lambda t, k: t.mul_(0.5)),
        "state_replaced": of_state(form),
        "state_of_other_dtype": of_state(lambda t, k: t.to((torch.float64, *HALF)[k % 3])),
        "state_goes": lambda run, n, k: pick([opt.state for opt in run.inner_opts if opt.state], n).popitem(),
        "state_clear": lambda run, n, k: pick([opt.state for opt in run.inner_opts if opt.state], n).clear(),
        "load_now": lambda run, n, k: pick(run.opts, n).load_state_dict(through_a_file(run.opts[0].state_dict())),
        "option": option,
        "schedule": lambda run, n, k: [g.update(lr=g["lr"] * 0.75) for opt in run.opts for g in opt.param_groups],
    },
    "block": {
        "form": of_grad(form),
        "expand": of_grad(lambda g, k: (g.flatten()[:1] if g.numel() else g.new_zeros(1)).squeeze(0).expand(g.shape)),
        "bucket": bucket,
        "share": share,
        "sparse": of_grad(lambda g, k: g.to_sparse()),
        "none": of_grad(lambda g, k: None),
        "zeros": of_grad(lambda g, k: torch.zeros_like(g)),
    },
    "between": {
        "form_later": of_grad(form, stepped=True),
        "share_later": partial(share, stepped=True),
        "grad_in_place": lambda run, n, k: pick(run.with_grads(True), n).grad.mul_(0.5),
        "clip": clip,
        "later_clip": clip,
        "clip_model": partial(clip, stepped=False),
    },
    "end": {"kept_gradient": lambda run, n, k: run.kept.append(pick(run.with_grads(), n).grad)},
}
FEATURES = {name: place for place, features in PLACED.items() for name in features}
IN_TORCH = f"""{FLAGS.partition("inf")[0]} step_in_thread no_step look_at_gradients other_zero_grad zero_by_model form
form_later grad_in_place clip later_clip move_to_group option schedule reverse_group copy_group reverse_groups freeze
state_in_place load_now""".split()


def drawn(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    is_plain = rng.random() < 0.15  # as torch
    kind = rng.choice([*TORCH] if is_plain else [*KINDS, "FusedAdam", "FusedSGD", "FusedAdam", "FusedSGD"])
    options: dict[str, Any] = {}
    start: dict[str, Any] = {"kind": kind, "options": options, "dtype": "fp32", "scaler": False}
    start["level"] = level = rng.choice([*LEVELS, "O2", "O5", None, None, None])
    start["scale"] = rng.choice(["dynamic", "dynamic", 128.0, 1.0])
    start["names"] = [name for name in SHAPES if rng.random() < 0.85] or ["a"]
    start["groups"], start["opts"] = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 1, 2])
    start["own"] = rng.choice([0, 1, 2])  # 0: all groups have the same options
    start["to_none"] = rng.choice([True, True, True, False, None])
    if level is None:
        start["dtype"] = rng.choice(["fp32"] if is_plain else ["fp32", "fp32", "bf16", "fp16", "fp64"])
        start["scaler"] = rng.random() < 0.5 and start["dtype"] != "fp16"
    options |= {"weight_decay": 0.125} if rng.random() < 0.3 and kind not in ("FusedLion", "FusedMuon") else {}
    if kind.startswith("Fused") and not is_plain:
        if (level is None and start["dtype"] in ("bf16", "fp16")) or level == "O5":
            masters = (True, "split") if start["dtype"] == "bf16" else ("split",) if level else (True,)
            if rng.random() < 0.5:
                options["master_weights"] = rng.choice(masters)
            elif rng.random() < 0.5:
                options["write_back"] = rng.choice(["stochastic", "kahan"])
        if rng.random() < 0.2:
            options["state_dtype"] = rng.choice(["bf16", "8bit"])
            options |= {} if kind in ("FusedAdagrad", "FusedNovoGrad") else {"min_8bit_size": 4}
        options |= {"capturable": True} if rng.random() < 0.15 else {}
    if kind.startswith(("Fused", "Split")) and not (level or start["scaler"] or is_plain) and rng.random() < 0.3:
        options["skip_nonfinite"] = True
    most = [*FEATURES, *[*PLACED["block"]] * 2, *["clip", "bucket", "form", "keep_gradients"] * 3, *["share"] * 6]
    lacking = set() if start["level"] else {"delay_unscale", "delay_check"}
    lacking |= set() if start["scaler"] else {"unscale_first"}
    lacking |= set() if "f" in start["names"] else {"add_group"}
    lacking |= {"load_now"} if "-fused" in kind else set()  # torch's kernels read on behind state of other shapes
    most = [m for m in most if m not in lacking and (m in IN_TORCH or not is_plain)]
    features: list[Any] = []
    for name in sorted({rng.choice(most) for _ in range(rng.choice([1, 2, 3, 4, 5]))}):
        first, some = rng.randrange(ITERATIONS), [i for i in range(ITERATIONS) if rng.random() < 0.4]
        at = rng.choice([[first], [first], [first], list(range(first, ITERATIONS)), some, list(range(ITERATIONS))])
        features.append([name, rng.randrange(60), rng.randrange(60), at])
    plain = {"options": {}, "dtype": "fp32", "scaler": False, "kind": rng.choice(["FusedAdam", "FusedSGD"])}
    late = [rng.randrange(3, ITERATIONS)]  # when there is a plan
    if seed % 8 == 7:  # a gradient in a buffer, where the plan keeps those of 16-bit weights
        start |= plain | {"level": rng.choice(["O2", "O5"])}
        features = [["bucket", rng.randrange(60), 0, late]]
    if seed % 8 == 3:  # torch's negative bit, or a gradient with holes, and a clip
        start |= plain | {"level": rng.choice(["O0", "O1", None])}
        features = [["form_later", rng.randrange(60), 7 - seed // 8 % 2 * 4, late], ["clip", 0, 0, late]]
    if seed % 8 == 5:  # a gradient that is shared while the plan is made, or one that another block adds to
        start |= {"names": ["a", "b", "g"], "opts": 1, "level": level or "O0", "scaler": False}
        features = [["share", rng.randrange(60), rng.randrange(60), [0, 2]]]
        features += [["keep_gradients", 0, 0, [0, 1, 2]]] if seed // 8 % 2 else []
    # The run without plans has its scale divided by this, where no scaled gradient is looked at: of "f", which no
    # optimizer has at first, or of a window.
    names = {name for name, *_ in features}
    looks = ("f" in start["names"] and names & {"look_at_gradients", "clip_model"}) or "delay_unscale" in names
    start["divided"] = 16 if start["level"] and start["scale"] != 1 and not looks else 1
    return {"seed": seed, "start": start, "features": features, "iterations": list(range(ITERATIONS))}


def is_in_torch(program: Program) -> bool:
    """Whether torch in fp32 comes to nearly the same weights."""
    start = program["start"]
    names = {name for name, *_ in program["features"]}
    is_plain = not set(start["options"]) - {"weight_decay"} and start["dtype"] == "fp32" and start["level"] != "O3"
    if start["scaler"] and names & {"clip", "later_clip", "keep_gradients", "no_step", "step_twice"}:
        return False  # of gradients that are scaled there
    if start["level"] in ("O2", "O5") and (not start["to_none"] or names & {"keep_gradients", "other_zero_grad"}):
        return False  # a step drops the gradients of masters
    if "-fused" in start["kind"] and names & {"form", "form_later"}:
        return False  # torch's kernels take a gradient as it lies in memory
    is_plain &= start["kind"] != "FusedSGD" or start["to_none"] is not None  # its default is another
    return is_plain and start["kind"] in TORCH and names <= {*IN_TORCH}


def is_near(program: Program) -> bool:
    """Whether norms of several dtypes are joined: rounded parts add up in another order."""
    clips = any("clip" in name for name, *_ in program["features"])
    return program["start"]["kind"] == "FusedLAMB" or (clips and program["start"]["level"] in ("O2", "O5"))


class Run:
    """One run of a program. ``seen`` is what it came to, ``did`` how often each feature has changed something."""

    def __init__(self, program: Program, is_torch: bool = False, is_plain: bool = False) -> None:
        self.program, self.start, self.is_torch = program, program["start"], is_torch
        self.is_ours = not is_torch and "-" not in self.start["kind"] and self.start["kind"] != "SplitMasters"
        self.divided = self.start["divided"] if is_plain else 1
        self.seen: list[Seen] = []
        self.did: Counter[str] = Counter()
        self.where, self.now, self.asked = "start", dict[str, Any](), set[str]()
        self.buckets, self.kept, self.opts = list[Tensor](), list[Tensor](), list[Any]()
        self.session, self.scaler = AmpSession(), None
        torch.manual_seed(0)
        self.model = Factors({name: SHAPES[name] for name in self.start["names"]}).to(DTYPES[self.start["dtype"]])

    @property
    def inner_opts(self) -> list[Any]:
        return [getattr(opt, "optim", opt) for opt in self.opts]

    def params(self, stepped: bool = False) -> list[Any]:
        return [p for opt in self.opts for p in params_of(opt)] if stepped else list(self.model.parameters())

    def with_grads(self, stepped: bool = False) -> list[Any]:
        return [p for p in self.params(stepped) if p.grad is not None and p.grad.layout == torch.strided]

    def has(self, name: str) -> bool:
        """Whether a feature without a place is on. The caller does it."""
        self.asked |= {name} & self.now.keys()
        return name in self.now

    def begin(self) -> None:
        makes = TORCH if self.is_torch else KINDS
        names = [name for name in [*self.start["names"], "norm.weight", "norm.bias"] if name != "f"]
        for i in range(self.start["opts"]):
            own, count = names[i :: self.start["opts"]], self.start["groups"]
            given = [{"params": [self.model.get_parameter(n) for n in own[g::count]]} for g in range(count)]
            for g, group in enumerate(given):
                group.update(OWN[g * self.start["own"] % len(OWN)])
            options = {name: DTYPES.get(value, value) for name, value in self.start["options"].items()}
            self.opts.append(makes[self.start["kind"]]([g for g in given if g["params"]], **options))
        scale, moves = self.start["scale"], {"init_scale": 256.0 / self.divided, "growth_interval": 5}
        if self.start["level"] and not self.is_torch:
            options = {"master_weights": False} if self.start["options"].get("master_weights") else {}
            options |= moves if scale == "dynamic" else {"loss_scale": scale / self.divided}
            options = {"loss_scale": scale, "verbosity": 0, **options}
            self.session.initialize(self.model, self.opts, opt_level=self.start["level"], **options)
        elif self.start["scaler"] and not self.is_torch:
            self.scaler = GradScaler("cpu", **moves)

    def __call__(self) -> tuple[list[Seen], Counter[str]]:
        if self.attempt("start", self.begin):
            for i in self.program["iterations"]:
                self.where = f"iteration {i}"
                self.iterate(i)
                self.attempt("look", self.look)
        self.attempt("reset", self.session.reset)
        self.where = "after reset"
        self.attempt("look", self.look)
        return self.seen, self.did

    def attempt(self, what: str, call: Callable[..., Any], *args: Any) -> bool:
        """Calls, notes an exception, and otherwise counts ``what`` and the features that were asked for."""
        outer, self.asked = self.asked, {what}
        try:
            call(*args)
        except Idle:
            return False
        except Exception as error:
            self.seen.append((self.where, what, (RAISES, type(error).__name__, str(error)[:200])))
            if not isinstance(error, InterruptedError):
                return False
        finally:
            done, self.asked = self.asked, outer
        self.did.update(done)
        return True

    def do(self, place: str) -> None:
        for name in PLACED[place]:
            if name in self.now:
                self.attempt(name, PLACED[place][name], self, *self.now[name])

    def iterate(self, i: int) -> None:
        self.now = {name: (n, k) for name, n, k, at in self.program["features"] if i in at}
        self.asked = set()
        while self.kept:
            self.kept.pop().fill_(3.0)
        self.do("start")
        count = 2 + self.now["accumulate"][1] % 2 if self.has("accumulate") else 1 + ("delay_unscale" in self.now)
        for b in range(count):
            self.attempt("block", self.block, 5 * i + b, b + 1 == count)
        while self.buckets:
            self.buckets.pop().fill_(100.0)
        for i, p in enumerate([*self.params(), *self.params(True)] if self.has("look_at_gradients") else ()):
            self.see(f"gradient {i}", p.grad)
        self.do("between")
        for opt in [] if self.has("no_step") else self.opts * (1 + self.has("step_twice")):
            self.attempt("step", in_thread if self.has("step_in_thread") else lambda call: call(),
                         partial(self.step, opt, i))  # fmt: skip
        if self.scaler is not None:
            self.attempt("update", self.scaler.update)
        self.do("end")
        if not self.has("keep_gradients"):
            self.attempt("zero_grad", self.zero_grad)
        self.did.update(self.asked)

    def loss(self, number: int) -> Tensor:
        """Different in each block; the gradients are multiples of 1/8."""
        factors = {}
        for j, (name, p) in enumerate(self.model.named_parameters()):
            left_out = "some_without_gradient" in self.now and (j + self.now["some_without_gradient"][1]) % 3 == 0
            if p.requires_grad and not (left_out and self.has("some_without_gradient")):
                factors[name] = FACTORS[(j * 3 + number) % 17 :][: p.numel()].reshape(p.shape).to(p.dtype, copy=True)
        for name, value in (("inf", INF), ("nan", NAN)):
            if factors and self.has(name):
                pick(factors.values(), self.now[name][0]).flatten()[-1:].fill_(value)
        return self.model(factors)

    def block(self, number: int, is_last: bool, is_inner: bool = False) -> None:
        loss = self.loss(number)
        with self.scaled(loss, is_last) as scaled:
            if not is_inner and self.has("raise_before"):
                raise InterruptedError
            if not is_inner and (self.has("inner_block") or self.has("raise_in_inner")):
                self.block(number + 1, True, True)
            scaled.backward()
            self.do("block")
            if self.has("raise_in_inner" if is_inner else "raise_after"):
                raise InterruptedError

    @contextlib.contextmanager
    def scaled(self, loss: Tensor, is_last: bool) -> Iterator[Tensor]:
        if self.is_torch or (self.start["level"] is None and self.scaler is None):
            yield loss
        elif self.scaler is not None:
            yield self.scaler.scale(loss)
            for opt in self.opts if is_last and self.has("unscale_first") else ():
                self.scaler.unscale_(opt)
        else:
            delays = {"delay_unscale": not is_last and self.has("delay_unscale")}
            delays["delay_overflow_check"] = self.has("delay_check")
            given = self.opts if len(self.opts) > 1 else self.opts[0]
            with self.session.scale_loss(loss, given, **delays) as scaled:
                yield scaled

    def step(self, opt: Any, i: int) -> None:
        def closure() -> Tensor:
            opt.zero_grad()
            self.block(5 * i + 4, True)
            return torch.zeros(())

        given = (closure,) if self.has("closure") else ()
        opt.step(*given) if self.scaler is None else self.scaler.step(opt, *given)

    def zero_grad(self) -> None:
        to_none = not self.start["to_none"] if self.has("other_zero_grad") else self.start["to_none"]
        for of in [self.model] if self.has("zero_by_model") else self.opts:
            of.zero_grad(**({} if to_none is None else {"set_to_none": to_none}))
        if "f" in self.start["names"]:
            self.model.get_parameter("f").grad = None

    def see(self, what: str, value: Any) -> None:
        if isinstance(value, Tensor):
            t = value.detach() if value.layout == torch.strided else value.detach().to_dense()
            flat = t.resolve_neg().resolve_conj().contiguous().as_strided((t.numel(),), (1,))
            value = str(t.dtype), tuple(t.shape), flat.view(torch.uint8).numpy().tobytes()
        self.seen.append((self.where, what, value if isinstance(value, tuple) else repr(value)))

    def look(self) -> None:
        for name, t in self.model.state_dict().items():
            self.see(name, t)
        for i, opt in enumerate(self.inner_opts):
            for j, p in enumerate(params_of(opt)):
                self.see(f"optimizer {i}, parameter {j}", p)
                for key, value in sorted(opt.state.get(p, {}).items()):
                    self.see(f"optimizer {i}, parameter {j}, {key}", value)
            if self.start["level"] and not self.is_torch:
                self.see(f"optimizer {i} skipped", self.session.skipped_steps(self.opts[i]))
            elif "skip_nonfinite" in self.start["options"]:
                self.see(f"optimizer {i} skipped", opt.skipped_steps())
        if self.scaler is not None:
            self.see("scale", self.scaler.get_scale())
        elif self.start["level"] and not self.is_torch and self.session.policy is not None:
            self.see("scale", self.session.loss_scale() * self.divided)


def begin() -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    gc.freeze()


def answer(*question: Any) -> tuple[list[Seen], Counter[str]]:
    return Run(*question)()


def _values(value: Any) -> Any:
    if not isinstance(value, tuple) or value[0] == RAISES:
        return value
    dtype = getattr(torch, value[0].removeprefix("torch."))
    return torch.frombuffer(bytearray(value[2]), dtype=dtype).reshape(value[1]) if value[2] else torch.empty(value[1])


def _same(a: Any, b: Any, near: float | None, any_dtype: bool) -> bool:
    if a == b or not isinstance(a, tuple) or not isinstance(b, tuple) or RAISES in (a[0], b[0]):
        return a[:2] == b[:2] if isinstance(a, tuple) and RAISES in a else a == b
    if (a[0] != b[0] and not any_dtype) or a[1] != b[1]:
        return False
    x, y = _values(a), _values(b)
    if not x.is_floating_point():  # codes, remainders
        return near is not None
    wide = 0.0 if near is None else max(near, 0.01 if x.dtype in HALF else 0.0)
    return torch.allclose(x.double(), y.double(), rtol=wide, atol=wide, equal_nan=True)


def difference(ours: list[Seen], theirs: list[Seen], near: float | None = None, any_dtype: bool = False) -> str:
    """The first difference, "" if there is none."""
    for a, b in zip(ours, theirs, strict=False):
        if a[:2] != b[:2] or not _same(a[2], b[2], near, any_dtype):
            return f"{a[:2]}: {_values(a[2])}\n  other: {b[:2]}: {_values(b[2])}"
    return "" if len(ours) == len(theirs) else f"{len(ours)} and {len(theirs)} observations"


class Fuzz:
    """``counts``: programs of each sort, and how often each feature did something. ``pools``: with plans, without."""

    def __init__(self) -> None:
        self.counts, self.pools = Counter[str](), dict[bool, ProcessPoolExecutor]()

    def ask(self, plans: bool, program: Program, is_torch: bool = False) -> Future[tuple[list[Seen], Counter[str]]]:
        with mock.patch.dict(os.environ, {"AMPCTX_PLAN": str(int(plans)), "OMP_NUM_THREADS": "1"}):
            if plans not in self.pools:
                self.pools[plans] = ProcessPoolExecutor(1, get_context("spawn"), begin)
            return self.pools[plans].submit(answer, program, is_torch, not plans)

    def check(self, program: Program) -> str:
        """What is wrong with a program, "" if nothing is."""
        asked = [self.ask(plans, program) for plans in (True, False)]
        try:
            (ours, did), (plain, _) = [one.result() for one in asked]
        except BrokenProcessPool as error:
            self.pools.clear()
            return str(error)
        self.counts.update(did, programs=1, refused=ours[0][:2] == ("start", "start"))
        if found := difference(ours, plain, 1e-3 if is_near(program) else None):
            return f"with plans {found}"
        if not is_in_torch(program):
            return ""
        torchs, _ = self.ask(False, program, True).result()
        if any(value[0] == RAISES for seen in (ours, torchs) for _, _, value in seen):
            return ""
        self.counts["beside torch"] += 1
        is_weight = re.compile(r"optimizer \d+, parameter \d+").fullmatch
        stepped = [[s for s in seen if is_weight(s[1]) and s[0] != "after reset"] for seen in (ours, torchs)]
        return (found := difference(*stepped, 1e-3, True)) and f"with ampctx {found}"

    def smallest(self, program: Program, most: int = 400) -> Program:
        """Leaves out iterations, then features, then options, while the program fails."""
        found: Program | None = program
        while found:
            program, tried = found, islice(_smaller(found), most)
            found = next((smaller for smaller in tried if self.check(smaller)), None)
        return program


def _smaller(program: Program) -> Iterator[Program]:
    start, features = program["start"], program["features"]
    for key in ("iterations", "features"):
        for i in reversed(range(len(program[key]))):
            yield {**program, key: program[key][:i] + program[key][i + 1 :]}
    for i, (*feature, at) in enumerate(features):
        for j in at if len(at) > 1 else ():
            fewer = [*feature, [other for other in at if other != j]]
            yield {**program, "features": [*features[:i], fewer, *features[i + 1 :]]}
    simple = {"opts": 1, "groups": 1, "scale": 1.0, "to_none": True, "scaler": False, "divided": 1, "options": {}}
    changes = [{name: value} for name, value in simple.items() if start[name] != value]
    changes += [{"names": [n for n in start["names"] if n != name]} for name in start["names"]]
    yield from ({**program, "start": {**start, **change}} for change in changes)


def fuzz(programs: Any) -> tuple[list[str], Counter[str]]:
    """Runs programs until ten have failed: a text for each of these, and counts."""
    run, failures = Fuzz(), []
    for program in programs:
        if len(failures) < 10 and run.check(program):
            small = run.smallest(program)
            failures.append(f"seed {small['seed']}: {run.check(small)}\n--program '{json.dumps(small)}'")
            print(failures[-1], flush=True)
    return failures, run.counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    parser.add_argument("--program", type=json.loads, help="one program as it was printed")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.programs)
    programs = [arguments.program] if arguments.program else map(drawn, seeds)
    failures, counts = fuzz(programs)
    print(f"seed {arguments.seed}: {dict(counts)}, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
