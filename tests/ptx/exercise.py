"""Every kernel on lists of every dtype, checked: on a GPU, under compute-sanitizer, and on the PTX.

    python tests/ptx/exercise.py --device cuda|cpu --tensors 7,300

7 tensors travel in the small table of a kernel's parameters, 300 in the large one, for one to eight lists: the default.
Element-wise steps are compared with the plain-torch reference over all elements end to end, those with norms of tensors
with their formula. Results are collected on the device, which the host waits for once for each dtype.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout need not be installed

from ampctx import ops, optimizer_ops
from ampctx.kernels import codes
from ampctx.kernels import ops as inner_ops
from ampctx.kernels import reference_steps as reference
from ampctx.kernels.spec import SPECS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Tensors for each kind of table, some of them empty: see kCapacity in csrc/cuda/multi_tensor_apply.cuh.
EVERY_TABLE = (7, 300)
INV_SCALE, LR = 0.5, 0.5
_DECAY = {"weight_decay": 0.1}
_ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, **_DECAY}
_SGD = {"dampening": 0.0, "nesterov": False, "wd_after_momentum": False, **_DECAY}
_LAMB = {**_ADAM, "eps": 1e-6, "max_grad_norm": 1.0}
# Op, how many of its lists of state are in use, numbers.
Row = tuple[str, int, dict[str, Any]]
ELEMENTWISE: dict[str, Row] = {
    "adam": ("adam", 2, _ADAM),
    "amsgrad": ("adam", 3, _ADAM),
    "sgd": ("sgd", 0, {"momentum": 0.0, **_SGD}),
    "momentum": ("sgd", 1, {"momentum": 0.9, **_SGD}),
    "lion": ("lion", 1, {"beta1": 0.9, "beta2": 0.99, **_DECAY}),
    "muon": ("muon", 1, {"momentum": 0.95, "nesterov": True}),
    "adagrad": ("adagrad", 1, {"eps": 1e-8, "adagrad_w_mode": True, **_DECAY}),
}
LAYERWISE: dict[str, Row] = {
    "lamb": ("lamb", 2, _LAMB),
    "lamb without ratio": ("lamb", 2, {**_LAMB, "weight_decay": 0.0}),
    "nvlamb": ("lamb", 2, {**_LAMB, "weight_decay": 0.0, "use_nvlamb": True}),
}
STEPS = {**ELEMENTWISE, **LAYERWISE}
# Those whose states may be codes, or bf16 that is rounded at random, and such forms of their first list and the second.
ROUNDED = ("adam", "momentum", "lion", "muon", "lamb", "lamb without ratio")
FORMS = (("codes", "codes"), (torch.bfloat16, "codes"), ("codes", torch.float32))
# Tensors, some of them empty, that these kernels have in a small table.
ROUNDED_SMALL = 52


# Around nothing, a vector of 16 bytes, a warp, the 256 threads of a block, and the blocks of both backends.
EDGES = (0, 1, 7, 8, 9, 31, 33, 255, 256, 257, 511, 513, 2047, 2048, 2049)
TINY = (3, 1, 8, 0, 5, 9, 2)
# Elements that a tensor starts off its boundary, in the even and in the odd lists of a call: kernels go another way
# where lists differ. Four of them and 15 edges meet in all combinations.
OFFSETS = ((0, 0), (1, 1), (3, 3), (1, 0))
# Fewer tensors than this lie in memory of their own, where a sanitizer knows the end of each.
TOGETHER = 64
GUARD = 8  # elements at the least before each tensor of those that lie together


def sizes(count: int, turn: int) -> list[int]:
    """Of ``count`` tensors: edges, then tiny ones, then a large one, and none at the end. ``turn`` picks other edges
    where not all fit in."""
    few = max(0, count - 2)
    start = turn * few % len(EDGES)
    edges = (EDGES[start:] + EDGES[:start]) * len(OFFSETS)
    tiny = TINY * (few // len(TINY) + 1)
    large = 70001 if count < TOGETHER else 5000
    return [*edges[:few], *tiny[: max(0, few - len(edges))], large, 0][-count:]


def guard(dtype: torch.dtype) -> float:
    """What lies between tensors: a sum that reads it is nan."""
    return float("nan") if dtype.is_floating_point else 0x5A5A if dtype.itemsize > 1 else 0x5A


class TensorList:
    """``tensors`` with the values that they were made with; ``flat()`` has the values of now, end to end."""

    def __init__(self, layout: Layout, values: Tensor, odd: bool) -> None:
        self.layout, self.odd = layout, odd
        self.blocks = [torch.full((n,), guard(values.dtype), dtype=values.dtype, device=values.device)
                       for n in layout.block_sizes[odd]]  # fmt: skip
        if layout.together:
            self.blocks[0].index_copy_(0, layout.places[odd], values)
            self.tensors = list(self.blocks[0].split(layout.cuts[odd])[1::2])
        else:
            self.tensors = [b[offset[odd] :] for b, offset in zip(self.blocks, layout.offsets, strict=True)]
            for tensor, part in zip(self.tensors, values.split(layout.sizes), strict=True):
                tensor.copy_(part)

    def flat(self) -> Tensor:
        if self.layout.together:
            return self.blocks[0].index_select(0, self.layout.places[self.odd])
        return torch.cat(self.tensors)

    def is_intact(self) -> Tensor:
        """Whether all that lies around the tensors is as it was; a flag on the device."""
        if self.layout.together:
            around = self.blocks[0].index_select(0, self.layout.gaps[self.odd])
        else:
            starts = zip(self.blocks, self.layout.offsets, strict=True)
            around = torch.cat([block[: offset[self.odd]] for block, offset in starts])
        return (around.isnan() if around.is_floating_point() else around == guard(around.dtype)).all()


class Layout:
    """Where the tensors of the lists of a call lie: those of even and those of odd lists."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes, self.device, self.elements = list(sizes), device, sum(sizes)
        self.together = len(sizes) >= TOGETHER
        self.offsets = [OFFSETS[i % len(OFFSETS)] for i in range(len(sizes))]
        counts = torch.tensor(self.sizes)
        self.owner = torch.repeat_interleave(counts).to(device)  # the number of each element's tensor
        self.counts = counts.to(device)
        self.cuts, self.places, self.gaps, self.block_sizes = [], [], [], []
        for odd in (False, True):
            cuts = list(self._cuts(odd)) if self.together else []
            self.cuts.append(cuts)
            of_each = torch.tensor(cuts, dtype=torch.int64)
            is_tensor = torch.arange(len(cuts)) % 2 == 1
            belongs = torch.repeat_interleave(is_tensor, of_each) if cuts else torch.zeros(0, dtype=torch.bool)
            self.places.append(belongs.nonzero().flatten().to(device))
            self.gaps.append((~belongs).nonzero().flatten().to(device))
            self.block_sizes.append(
                [sum(cuts)] if self.together else [n + o[odd] for n, o in zip(self.sizes, self.offsets, strict=True)]
            )

    def _cuts(self, odd: bool) -> Iterator[int]:
        """The sizes of gap, tensor, gap, tensor, ..., gap."""
        place = 0
        for size, offset in zip(self.sizes, self.offsets, strict=True):
            gap = GUARD + (offset[odd] - place - GUARD) % 16
            yield gap
            yield size
            place += gap + size
        yield GUARD

    def make(self, values: Tensor, odd: bool = False) -> TensorList:
        return TensorList(self, values, odd)

    def full(self, value: float, dtype: torch.dtype, odd: bool = False) -> TensorList:
        return self.make(torch.full((self.elements,), value, dtype=dtype, device=self.device), odd)

    def norms(self, flat: Tensor) -> Tensor:
        """The norm of each tensor, from fp64."""
        sums = torch.zeros(len(self.sizes), dtype=torch.float64, device=self.device)
        return sums.index_add_(0, self.owner, flat.double().square()).sqrt()

    def spread(self, of_each: Tensor) -> Tensor:
        """A number of each tensor, for each of its elements."""
        return of_each.index_select(0, self.owner)


class Checks:
    """What is checked on the device, until ``settle`` waits for it."""

    def __init__(self) -> None:
        self.count = 0
        self.names: list[str] = []
        self.flags: list[Tensor] = []

    def add(self, name: str, flag: Tensor) -> None:
        self.names.append(name)
        self.flags.append(flag)

    def close(self, name: str, got: Tensor, want: Tensor, rtol: float, atol: float = 0.0) -> None:
        got, want = got.double(), want.double()
        self.add(name, ((got - want).abs() <= atol + rtol * want.abs()).all())

    def same(self, name: str, got: Tensor, want: Tensor) -> None:
        self.add(name, (got == want).all())

    def settle(self) -> None:
        """AssertionError that names what was wrong."""
        right = torch.stack(self.flags).tolist()
        wrong = [name for name, is_right in zip(self.names, right, strict=True) if not is_right]
        self.count += len(self.names)
        self.names, self.flags = [], []
        if wrong:
            raise AssertionError(f"{len(wrong)} checks failed: {'; '.join(wrong[:20])}")


def write_backs(dtype: torch.dtype) -> list[tuple[str, torch.dtype | None]]:
    """All for params of that dtype, with the dtype of their extras."""
    found: list[tuple[str, torch.dtype | None]] = [("nearest", None), ("copy", torch.float32), ("stochastic", None)]
    if dtype == torch.bfloat16:
        found.append(("split", torch.int16))
    if dtype != torch.float32:
        found.append(("kahan", dtype))
    return found


class Exercise:
    """The kernels on lists of ``sizes`` of one dtype."""

    def __init__(self, sizes: list[int], dtype: torch.dtype, device: torch.device, checks: Checks) -> None:
        self.dtype, self.device, self.checks = dtype, device, checks
        self.layout = Layout(sizes, device)
        self.lr = torch.full((), LR, device=device)
        # Of each step: it counts itself, and is clipped by a norm below the limit.
        self.skips = torch.zeros(5, device=device)
        self.skips[4].fill_(8.0)
        self.aside = {"skips": list(self.skips.unbind()), "grad_norm": self.lr, "max_norm": 1.0}
        eps = torch.finfo(dtype).eps
        self.rounding = {"rtol": eps, "atol": max(eps, 1e-5)}

    def flag(self, value: float = 0.0) -> Tensor:
        return torch.full((), value, device=self.device)

    def random(self) -> Tensor:
        """No value near 0, where a gradient would have no sign."""
        values = torch.randn(self.layout.elements, device=self.device)
        return (values + torch.where(values < 0, -0.1, 0.1)).to(self.dtype)  # torch draws 0 now and then

    def intact(self, name: str, lists: Iterable[TensorList]) -> None:
        for number, tensors in enumerate(lists):
            self.checks.add(f"{name}: memory around list {number}", tensors.is_intact())

    # --- scaling and norms --------------------------------------------------------------------------------------------

    def scaling(self) -> None:
        layout, flag = self.layout, self.flag()
        x = layout.make(self.random())
        for dtype in DTYPES:
            out, y = layout.full(0.0, dtype, odd=True), layout.make(self.random().to(dtype), odd=True)
            rounding = torch.finfo(dtype).eps
            before = y.flat()
            ops.multi_tensor_scale(x.tensors, out.tensors, flag, INV_SCALE)
            self.checks.close(f"scale to {dtype}", out.flat(), x.flat().float() * INV_SCALE, rounding, 1e-7)
            ops.multi_tensor_axpby(x.tensors, y.tensors, out.tensors, flag, torch.full_like(flag, 2.0), -1.0)
            want = x.flat().float() * 2 - before.float()
            self.checks.close(f"axpby to {dtype}", out.flat(), want, rounding, 1e-6)
            inner_ops.multi_tensor_scale_clipped(
                x.tensors, out.tensors, flag, INV_SCALE, torch.full_like(flag, 4.0), 2.0
            )
            self.checks.close(f"clipped to {dtype}", out.flat(), x.flat().float() * INV_SCALE / 2, 2 * rounding, 1e-7)
            ops.multi_tensor_scale(y.tensors, y.tensors, flag, 1.0)
            self.checks.same(f"scale in place, {dtype}", y.flat(), before)
            self.intact("scaling", (x, y, out))
        self.checks.same("finite lists are not flagged", flag, self.flag())

    def norms(self) -> None:
        layout, flag = self.layout, self.flag()
        x = layout.make(self.random(), odd=True)
        of_each = layout.norms(x.flat())
        for name, factor, call in (
            ("l2norm", 1.0, lambda: ops.multi_tensor_l2norm(x.tensors, flag, per_tensor=True)),
            ("unscaled l2norm", 0.5, lambda: ops.multi_tensor_unscale_l2norm(x.tensors, flag, 0.5, per_tensor=True)),
        ):
            (norm, each), again = call(), call()
            self.checks.close(name, norm, torch.linalg.vector_norm(of_each) * factor, 1e-5)
            self.checks.close(f"{name} of each", each, of_each * factor, 1e-5)
            self.checks.same(f"{name} again", torch.cat((norm.view(1), each)), torch.cat((again[0].view(1), again[1])))
        self.checks.close("l2norm alone", ops.multi_tensor_l2norm(x.tensors, flag)[0], again[0] / factor, 1e-6)
        self.intact("norms", (x,))

    def overflows(self) -> None:
        """An inf in the first and in the last element is seen, and what follows from that for the scale."""
        out = self.layout.full(0.0, torch.float32, odd=True)
        for place in (0, -1):
            values = self.random()
            values[place] = float("inf")
            x, seen = self.layout.make(values), [self.flag() for _ in range(5)]
            ops.multi_tensor_scale(x.tensors, out.tensors, seen[0], 1.0)
            ops.multi_tensor_axpby(x.tensors, out.tensors, out.tensors, seen[1], 1.0, 0.0, arg_to_check=0)
            ops.multi_tensor_l2norm(x.tensors, seen[2])
            ops.multi_tensor_unscale_l2norm(x.tensors, seen[3], 0.5)
            self.checks.same(f"inf at {place} is flagged", torch.stack(seen), torch.tensor([1, 1, 1, 1, 0]).to(seen[0]))
        # The rules of these are tests of their own: tests/ops/test_update_scale.py, test_op_properties.py.
        scale, growth = torch.full((), 8.0, device=self.device), torch.zeros((), dtype=torch.int32, device=self.device)
        update = inner_ops.ScaleUpdate(scale, growth, torch.ones_like(growth), 2.0, 0.5, 2, 1, 1.0, 16.0)
        ops.multi_tensor_scale(x.tensors, out.tensors, self.flag(), 1.0, update)
        inner_ops.unscale_l2norm_and_update(x.tensors, self.flag(), 0.5, True, update)
        self.checks.same("two overflows quarter the scale", scale.clone(), torch.full_like(scale, 2.0))
        copy, inverse, clear = inner_ops.block_factors(scale)
        self.checks.same("factors of a block", torch.stack((copy, inverse, clear)), torch.tensor([2, 0.5, 0]).to(scale))
        ops.update_scale(scale, growth, update[2], self.flag(), growth_interval=1)
        self.checks.same("a clean update doubles it", scale.clone(), torch.full_like(scale, 4.0))
        counts = torch.zeros(4, device=self.device)
        inner_ops.count_skip(counts, self.flag(1.0), self.flag(1.0), scale, 0, True)
        self.checks.same("counts of skips", counts.clone(), torch.tensor([1.0, 1.0, 1.0, 4.0]).to(counts))

    # --- steps --------------------------------------------------------------------------------------------------------

    def weights(self, params: Tensor, extras: Tensor | None, write_back: str) -> Tensor:
        """The weight that params and extras stand for, in fp32."""
        if extras is None:
            return params.float()
        if write_back == "split":
            return reference.join(params, extras)
        return extras if write_back == "copy" else params.float() + extras.float()

    def tolerance(self, write_back: str) -> dict[str, float]:
        if write_back == "kahan":  # what is left over is rounded, too
            return {"rtol": max(torch.finfo(self.dtype).eps ** 2, 1e-5), "atol": 1e-5}
        return self.rounding if write_back in ("nearest", "stochastic") else {"rtol": 1e-5, "atol": 1e-5}

    def prepared(
        self, name: str, write_back: str, extra: torch.dtype | None, form: Sequence = (torch.float32,) * 3, **more: Any
    ) -> tuple[dict[str, TensorList], dict[str, Tensor], dict[str, list[Tensor]], Callable[[Tensor], None]]:
        """Of a call of an op: its lists, its numbers of each tensor, both as tensors and the scales of codes, and what
        makes the call by a flag. ``form``: the types of the states."""
        layout, (op, states, options) = self.layout, STEPS[name]
        made = {"grads": layout.make(self.random()), "params": layout.make(self.random(), odd=True)}
        scales: dict[str, list[Tensor]] = {}
        for i, (state, dtype) in enumerate(zip(SPECS[op].sized[:states], form, strict=False)):
            if dtype == "codes":
                of_each = [codes.blocks_of(n) for n in layout.sizes]
                scales[state.scales] = list(torch.zeros(sum(of_each), device=self.device).split(of_each))
            made[state.name] = layout.full(0, codes.DTYPES[state.code] if dtype == "codes" else dtype, odd=i % 2 == 0)
        if extra:
            made["extras"] = layout.full(0, extra)
        numbers = {state.name: torch.zeros(len(layout.sizes), device=self.device) for state in SPECS[op].one_element}
        lists: dict[str, list[Tensor]] = {state.name: [] for state in SPECS[op].sized} | {"extras": []} | scales
        lists |= {key: x.tensors for key, x in made.items()} | {key: [*n.unbind()] for key, n in numbers.items()}
        given = {"inv_scale": INV_SCALE, "lr": self.lr, "seed": 1, **self.aside, **options, **more}

        def step(found_inf: Tensor) -> None:
            how = {"found_inf": found_inf, "write_back": write_back, "unscale_grads": self.unscales}
            getattr(optimizer_ops, op)(**lists, **how, **given)

        return made, numbers, lists, step

    def by_reference(self, name: str, lists: dict[str, list[Tensor]], write_back: str, **more: Any) -> None:
        """The step of the reference. ``lists``: what it changes."""
        op, _, options = STEPS[name]
        given: dict[str, Any] = {number.name: number.default for number in SPECS[op].numbers}
        given |= {"inv_scale": torch.tensor(INV_SCALE), "lr": self.lr, "found_inf": self.flag(), "maximize": False}
        given |= {"seed": 1, "write_back": reference.WRITE_BACKS.index(write_back)}
        reference.run(op, given | {key: [] for key in SPECS[op].lists} | options | more | lists)

    def stepped(
        self, name: str, lists: Sequence[TensorList], numbers: dict[str, Tensor], step: Callable[[Tensor], None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Runs a step that an overflow skips, and one that is taken: all values of the lists before and after.
        ``numbers`` are those of each tensor."""
        before, of_each = [x.flat() for x in lists], {key: n.clone() for key, n in numbers.items()}
        counted = self.skips + torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0], device=self.device)
        step(self.flag(1.0))
        for i, (x, old) in enumerate(zip(lists, before, strict=True)):
            self.checks.same(f"{name}: list {i} after an overflow", x.flat(), old)
        for key, n in numbers.items():
            self.checks.same(f"{name}: {key} after an overflow", n.clone(), of_each[key])
        step(self.flag())
        counted[1], counted[3] = 0.0, 8.0
        self.checks.same(f"{name}: counts of skips", self.skips.clone(), counted)
        self.checks.same(f"{name}: counts", numbers["steps"].clone(), of_each["steps"] + 1)
        self.intact(name, lists)
        return before, [x.flat() for x in lists]

    def left(self, name: str, grads: TensorList, given: Tensor) -> None:
        """Checks what a step has left of gradients."""
        want = (given.float() * INV_SCALE).to(given.dtype) if self.unscales else given
        self.checks.same(f"{name}, {'unscaled' if self.unscales else 'scaled'} gradients", grads.flat(), want)
        self.intact(name, (grads,))

    def elementwise(self, name: str, write_back: str, extra: torch.dtype | None) -> None:
        """Two steps, beside the reference's over one tensor with all elements."""
        made, numbers, _, step = self.prepared(name, write_back, extra)
        grads = made.pop("grads")
        # What a stochastic write back rounds is what a copy would hold.
        way, held = (write_back, extra) if write_back != "stochastic" else ("copy", torch.float32)
        for taken in (0.0, 1.0):
            what, g = f"{name}, {write_back}, step {taken + 1:.0f}", grads.flat()
            before, values = self.stepped(what, [*made.values()], numbers, step)
            self.left(what, grads, g)
            after = dict(zip(made, values, strict=True))
            whole = {"grads": [g], **{key: [value] for key, value in zip(made, before, strict=True)}}
            if held and not extra:
                whole["extras"] = [torch.zeros_like(whole["params"][0], dtype=held)]
            self.by_reference(name, {**whole, "steps": [torch.full((), taken, device=self.device)]}, way)
            got = self.weights(after["params"], after.get("extras"), write_back)
            want = self.weights(whole["params"][0], whole["extras"][0] if held else None, way)
            self.checks.close(what, got, want, **self.tolerance(write_back))
            for key in after.keys() - {"params", "extras"}:
                self.checks.close(f"{what}, {key}", after[key], whole[key][0], 1e-5, 1e-7)

    def layerwise(self, name: str, write_back: str, extra: torch.dtype | None) -> None:
        """A first step, beside its formula: Adam's direction is the sign of the gradient."""
        layout, options = self.layout, STEPS[name][2]
        made, numbers, _, step = self.prepared(
            name, write_back, extra, global_grad_norm=torch.full_like(self.lr, 2.0), eps=0.0
        )
        grads = made.pop("grads")
        what, given = f"{name}, {write_back}", grads.flat()
        before, after = self.stepped(what, [*made.values()], numbers, step)
        self.left(what, grads, given)
        w, g = before[0].double(), given.double() * INV_SCALE
        u = g.sign() + options["weight_decay"] * w
        of_w, of_u = layout.norms(w), layout.norms(u)
        has_ratio = (of_w != 0) & (of_u != 0) & (name != "lamb without ratio")
        u = layout.spread(torch.where(has_ratio, of_w / of_u, 1.0)) * u
        self.checks.close(f"{what}: moment", after[1], 0.1 * g / 2, 1e-5, 1e-7)
        got = self.weights(after[0], after[-1] if extra else None, write_back)
        self.checks.close(what, got, w - LR * u, **self.tolerance(write_back))

    def rounded(self, name: str, form: tuple[Any, Any], write_back: str, extra: torch.dtype | None) -> None:
        """Two steps of states in fewer bits, beside the reference's with the same random bits."""
        numbers = torch.arange(sum(n > 0 for n in self.layout.sizes), device=self.device).flip(0) * 3
        more = {"numbers": numbers, "stochastic_state": True}
        if STEPS[name][0] == "lamb":
            more["global_grad_norm"] = torch.full_like(self.lr, 2.0)
        made, of_each, lists, step = self.prepared(name, write_back, extra, form, **more)
        what = f"{name}, states {form}, {write_back}"
        for taken in (1, 2):
            expected = {key: [t.clone() for t in tensors] for key, tensors in lists.items()}
            written = [x for key, x in made.items() if key != "grads"]
            self.stepped(f"{what}, step {taken}", written, {"steps": of_each["steps"]}, step)
            self.by_reference(name, expected, write_back, unscale_grads=self.unscales, **more)
            self.alike(what, lists, expected, write_back)
        self.intact(what, made.values())

    def alike(self, what: str, lists: dict, expected: dict, write_back: str) -> None:
        """Checks what a rounded step has left. A last bit of fp32 may decide now and then how a state is rounded."""
        for key, tensors in lists.items():
            if not tensors or key in ("params", "extras"):
                continue
            got, want = (torch.cat([t.flatten() for t in of]) for of in (tensors, expected[key]))
            if got.dtype in codes.DTYPES.values():
                off = (got.int() - want.int()).abs()
                self.checks.add(f"{what}: {key}", (off.amax() <= 1) & (off.float().mean() < 1e-3))
            elif got.dtype == torch.bfloat16 and key != "grads":
                others = (got != want).float().mean() < 1e-3
                self.checks.add(f"{what}: {key}", others)
            else:
                self.checks.close(f"{what}: {key}", got, want, 1e-5, 1e-7)
        got, want = (
            self.weights(torch.cat(of["params"]), torch.cat(of["extras"]) if of["extras"] else None, write_back)
            for of in (lists, expected)
        )
        self.checks.close(f"{what}: weights", got, want, **self.tolerance(write_back))

    def run_rounded(self) -> None:
        """With many tensors, whose kernels differ in where their tables are, in one form."""
        for turn, (write_back, extra) in enumerate(write_backs(self.dtype)):
            self.unscales = turn % 2 == 1
            for name in ROUNDED:
                self.rounded(name, FORMS[turn % len(FORMS)], write_back, extra)
            if len(self.layout.sizes) > ROUNDED_SMALL:
                break
        self.checks.settle()

    def run(self) -> None:
        self.scaling()
        self.norms()
        self.overflows()
        for write_back, extra in write_backs(self.dtype):
            # Kernels of their own, with extras and without.
            for self.unscales in (False, True) if write_back in ("nearest", "copy") else (False,):
                for name in ELEMENTWISE:
                    self.elementwise(name, write_back, extra)
                for name in LAYERWISE:
                    self.layerwise(name, write_back, extra)
        self.checks.settle()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tensors", default=",".join(map(str, EVERY_TABLE)), metavar="N,...", help="2 at the least")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    for count in map(int, args.tensors.split(",")):
        start, checks = time.monotonic(), Checks()
        for turn, dtype in enumerate(DTYPES):
            exercise = Exercise(sizes(count, turn), dtype, torch.device(args.device), checks)
            exercise.run()
            exercise.run_rounded()
        seconds = time.monotonic() - start
        print(f"exercise: {count} tensors on {args.device}: {checks.count} checks, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
