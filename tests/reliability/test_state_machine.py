"""Any order of the calls of a training loop under amp, beside a reference in plain tensors that knows no amp.

hypothesis picks the calls. The reference computes gradients, momentum, weights, skips and loss scales by formulas. The
gradients are multiples of 1/8 and the scales powers of two, so 16 bits hold them exactly. Each operation of SGD is
rounded once, so its fp32 weights have to be equal bit for bit; those of Adam, and of all after a clip, nearly.
AMPCTX_HYPOTHESIS_EXAMPLES=1000 draws so many new runs.
"""

from __future__ import annotations

import copy
import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import INF, LOW, NAN, SAM, Factors, through_a_file
from torch import Tensor, nn

from ampctx import AmpError, AmpSession, clip_grad_norm_, optimizers

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

EXAMPLES = os.environ.get("AMPCTX_HYPOTHESIS_EXAMPLES")
LR = (0.125, 0.5, 0.25)  # of an optimizer's groups
MOMENTUM, DECAY, RHO, BETAS, EPS = 0.5, 0.125, 0.5, (0.5, 0.75), 0.125
GROWTH_INTERVAL = 2000

SGD = {"momentum": MOMENTUM, "weight_decay": DECAY}
ADAM = {"betas": BETAS, "eps": EPS}
KINDS: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, **SGD, foreach=True),
    "SGD-fused": partial(torch.optim.SGD, **SGD, fused=True),
    "FusedSGD": partial(optimizers.FusedSGD, **SGD),
    "SAM": partial(SAM, rho=RHO),
    "Adam": partial(torch.optim.Adam, **ADAM),
    "Adam-fused": partial(torch.optim.Adam, **ADAM, fused=True),
    "FusedAdam": partial(optimizers.FusedAdam, **ADAM),
    "FusedAdam-masters": partial(optimizers.FusedAdam, **ADAM),
}
# The groups of two optimizers. BatchNorm stays fp32 at O2 and O5; the first optimizer may get a third group.
PLACES = [[["a0", "a1", "norm.weight"], ["b0", "b1"]], [["c0", "norm.bias"], ["d0"]]]
SHAPES = {name: (3 + i % 2,) for i, name in enumerate(("a0", "a1", "b0", "b1", "late", "c0", "d0"))}
NAMES = (*SHAPES, "norm.weight", "norm.bias")


class Boom(Exception):
    pass


def param(value: Any = None, frozen: bool = False) -> SimpleNamespace:
    """``plain``: gradients that amp has yet to collect, of a weight with a master. ``window``: of delayed blocks.
    ``loaded``: all bits of a weight without master, until the next block or step."""
    grads = dict.fromkeys(("grad", "plain", "window", "loaded"))
    return SimpleNamespace(value=value, frozen=frozen, has_master=False, state={}, **grads)


def optimizer(kind: str) -> SimpleNamespace:
    """``flags``: the losses that overflowed since the last step or zeroing, -1: outside of blocks; they skip the next
    step. ``checked``, ``stepped``: a block has checked gradients since then, a step has left some. ``window``: the loss
    of the latest delayed block. ``open``: how many blocks are. ``scales``: of each loss since the last step.
    ``outcomes``: of steps, both."""
    facts = dict.fromkeys(("checked", "stepped"), False)
    return SimpleNamespace(kind=kind, window=None, open=0, flags=set(), scales={}, outcomes=[], **facts)


def scale_of(value: float) -> SimpleNamespace:
    """``waiting``: whether blocks that left the update to a later one overflowed, None without such blocks."""
    return SimpleNamespace(value=value, clean=0, waiting=None)


def plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def is_bad(grad: Tensor | None) -> bool:
    return grad is not None and not grad.isfinite().all()


MASK = st.integers(1, 2 ** len(NAMES) - 1)


# A block: optimizers, loss, which parameters, seed of factors, a bad value, how it ends, blocks inside it.
def blocks(inner: Any) -> Any:
    return st.builds(
        SimpleNamespace,
        opts=st.sampled_from([(0,), (0,), (1,), (0, 1)]),
        loss=st.integers(0, 1),
        ends=st.sampled_from(["", "", "", "unscale", "unscale", "check"]),
        names=MASK,
        refused=st.booleans(),
        seed=st.integers(0, 16),
        bad=st.sampled_from([0.0] * 7 + [INF, NAN]),
        fails=st.sampled_from([""] * 8 + ["early", "late", "through"]),
        inner=inner,
    )


PLAIN_BLOCKS = blocks(st.just(()))
BLOCKS = blocks(st.lists(blocks(st.lists(PLAIN_BLOCKS, max_size=1)), max_size=2) | st.just(()))
OPTS = st.integers(0, 1)
LEVELS_DRAWN = st.sampled_from(["O0", "O1", "O2", "O2", "O4", "O5", "O5"])
CLIPS = (clip_grad_norm_, nn.utils.clip_grad_norm_)
BETWEEN = st.sampled_from(["", "", "", "", "read", "read", *CLIPS])
ROUNDS = st.lists(st.tuples(st.lists(PLAIN_BLOCKS, min_size=1, max_size=3), BETWEEN, st.booleans()), max_size=3)


class Training(RuleBasedStateMachine):
    # --- start --------------------------------------------------------------------------------------------------------

    @initialize(
        level=LEVELS_DRAWN,
        kinds=st.tuples(st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(KINDS))),
        split=st.booleans(),
        scale=st.sampled_from(["dynamic", "dynamic", "dynamic", "held", 128.0, None]),
        bounds=st.sampled_from([(None, 2.0**8), (2.0**5, 2.0**7)]),
        frozen=st.sampled_from([(), (), ("a0",), ("b1", "c0")]),
    )
    def begin(self, level, kinds, split, scale, bounds, frozen):
        self.level, self.scale, self.bounds = level, scale, bounds
        self.kept, self.by_optimizer = None, None
        if "FusedAdam-masters" in kinds:
            self.level, self.by_optimizer = "O5", "split" if split else True
            kinds = ("FusedAdam-masters", "FusedAdam-masters")
        self.near = any("Adam" in kind for kind in kinds)
        self.opts = [optimizer(kind) for kind in kinds]
        self.layout = copy.deepcopy(PLACES)
        self.params = {name: param(frozen=name in frozen) for name in NAMES}
        self.build()
        for name, p in self.params.items():
            value = self.model.get_parameter(name).detach().clone()
            p.value = value.double() if self.near else value
        self.initialize()
        if scale == "dynamic":
            self.load_scales(GROWTH_INTERVAL - 5, 64.0)

    def build(self):
        """A model and its optimizers, with the groups that the reference has."""
        self.model, self.session, self.optimizers = Factors(SHAPES), AmpSession(), []
        for n, p in self.params.items():
            self.model.get_parameter(n).requires_grad_(not p.frozen or p.has_master)
        for opt, groups in zip(self.opts, self.layout, strict=True):
            members = [[self.model.get_parameter(n) for n in names] for names in groups]
            given = [{"params": params, "lr": LR[g]} for g, params in enumerate(members)]
            options = {"master_weights": self.by_optimizer} if self.by_optimizer else {}
            self.optimizers.append(KINDS[opt.kind](given, lr=1.0, **options))
        self.out = {}

    def initialize(self):
        low, high = self.bounds
        self.low = LOW.get(self.level, torch.float32)
        scale, options = self.scale, {"verbosity": 0}
        if scale == "dynamic":
            options |= {"min_loss_scale": low, "max_loss_scale": high}
        elif scale == "held":
            scale, options["skip_nonfinite"] = 64.0, True
        elif scale is None and self.level in ("O1", "O2"):
            scale = 128.0
        if self.by_optimizer:
            options["master_weights"] = False
        self.session.initialize(
            self.model, self.optimizers, opt_level=self.level, num_losses=2, loss_scale=scale, **options
        )
        self.checks = self.scale in ("dynamic", "held")
        self.scales = [scale_of(high if scale == "dynamic" else scale or 1.0) for _ in range(2)]
        for n, p in self.params.items():
            is_stepped = self.place(n) is not None and (p.has_master or not p.frozen)
            p.has_master = self.is_low(n) and is_stepped and not self.by_optimizer
            if self.is_low(n) and not p.has_master:
                p.value = self.rounded(p.value)
        self.opts = [optimizer(opt.kind) for opt in self.opts]

    # --- what the reference knows -------------------------------------------------------------------------------------

    def is_low(self, name):
        """Whether the model holds it in 16 bits."""
        return self.low != torch.float32 and not name.startswith("norm")

    def rounded(self, value):
        return value.float().to(self.low).to(value.dtype)

    def place(self, name):
        """The optimizer and the group of a parameter."""
        places = ((i, g) for i, groups in enumerate(self.layout) for g, names in enumerate(groups) if name in names)
        return next(places, None)

    def members(self, *opts):
        return {n: self.params[n] for i in opts for names in self.layout[i] for n in names}

    @property
    def idle(self):
        return all(opt.window is None for opt in self.opts)

    def factors(self, spec, can_be_bad):
        """Multiples of 1/8 for some of the parameters that train."""
        factors = {}
        for n, p in self.members(*spec.opts).items():
            if spec.names >> NAMES.index(n) & 1 and not p.frozen:
                places = torch.arange(len(p.value)) * 5 + NAMES.index(n) * 3 + spec.seed
                factors[n] = (places % 17 - 8) / 8
        if spec.bad and self.checks and factors and can_be_bad(next(iter(factors))):
            next(iter(factors.values()))[-1] = spec.bad
        return factors

    def follow(self, *opts):
        """amp looks at the groups: what was unfrozen gets a master."""
        for n, p in self.members(*opts).items():
            joins = self.is_low(n) and not (p.frozen or p.has_master or self.by_optimizer)
            p.value = p.loaded if joins and p.loaded is not None else p.value
            p.has_master |= joins

    def collect(self, *opts):
        """amp collects the gradients of plain backwards and checks them."""
        self.follow(*opts)
        for i in opts:
            for p in self.members(i).values():
                if self.checks and is_bad(p.plain):
                    self.opts[i].flags.add(-1)
                p.grad, p.plain = plus(p.grad, p.plain), None

    def forget_loaded(self):
        for p in self.params.values():
            p.loaded = None

    def arrive(self, i, factors):
        """Adds up what a block brings, and what delayed ones have left. Whether that has to skip the step."""
        opt, bad = self.opts[i], False
        for n, p in self.members(i).items():
            new = factors.get(n)
            if not opt.open:
                new, p.window = plus(p.window, new), None
            bad |= is_bad(new) or (is_bad(p.grad) and not p.has_master and not opt.checked)
            p.grad = plus(p.grad, new)
        opt.window = opt.window if opt.open else None
        return bad and self.checks

    def update_scale(self, loss, bad, wait=False):
        scale = self.scales[loss]
        bad |= bool(scale.waiting)
        if wait:
            scale.waiting = bad if self.checks else None
            return
        scale.waiting, scale.clean = None, 0 if bad else scale.clean + 1
        low, high = self.bounds
        if bad and self.scale == "dynamic":
            scale.value = max(scale.value / 2, low or 0.0)
        if scale.clean == GROWTH_INTERVAL and self.checks:
            scale.value, scale.clean = min(scale.value * 2, high) if self.scale == "dynamic" else scale.value, 0

    # --- gradients ----------------------------------------------------------------------------------------------------

    @rule(spec=BLOCKS)
    def block(self, spec):
        self.run_block(spec)

    @rule(rounds=ROUNDS)
    def iterations(self, rounds):
        """Usual ones: blocks, perhaps a look at the gradients or a clip, a step."""
        for specs, between, zero in rounds:
            i = specs[0].opts[-1]
            for spec in specs:
                self.run_block(spec)
            if self.idle and between == "read":
                self.read_gradients(i)
            elif self.idle and between and not self.by_optimizer:
                self.clip(i, 0.5, between)
            self.step(i)
            if zero:
                self.zero_grad(i, True)

    def run_block(self, spec, caller=False):
        """``caller``: an exception may leave the block."""
        opts = [self.opts[i] for i in spec.opts]
        factors = self.factors(spec, lambda n: True)
        loss = self.model.forward(factors)
        self.collect(*(i for i, opt in enumerate(self.opts) if opt.window is None and not opt.open))
        self.follow(*spec.opts)
        self.forget_loaded()
        scale = self.scales[spec.loss].value
        given, nested = [self.optimizers[i] for i in spec.opts], any(opt.open for opt in opts)
        delays = {"delay_unscale": spec.ends == "unscale", "delay_overflow_check": spec.ends == "check"}
        for opt in opts:
            opt.open += 1
        try:
            with self.session.scale_loss(loss, given if spec.opts != (0,) else given[0], spec.loss, **delays) as scaled:
                if spec.fails == "early":
                    raise Boom
                for inner in spec.inner[:1]:
                    self.run_block(inner, True)
                if scaled.requires_grad:
                    scaled.backward()
                for inner in spec.inner[1:]:
                    self.run_block(inner, True)
                if spec.refused:
                    with pytest.raises(AmpError, match="inside a scale_loss block"):
                        given[-1].step()
                if spec.fails:
                    raise Boom
        except Boom:
            if spec.fails == "through" and caller:
                raise
            return
        finally:
            for opt in opts:
                opt.open -= 1
        for opt in opts:
            opt.scales[spec.loss] = scale
        if spec.ends == "unscale" and not nested:
            for n, factor in factors.items():
                self.params[n].window = plus(self.params[n].window, factor)
            for opt in opts:
                opt.window = spec.loss
            return
        bad = max(self.arrive(i, factors) for i in spec.opts)  # all of them
        for opt in opts:
            opt.flags |= {spec.loss} if bad else set()
            opt.checked |= self.checks
        self.update_scale(spec.loss, bad, spec.ends != "")

    @precondition(lambda self: self.idle)
    @rule(spec=PLAIN_BLOCKS, step=st.booleans())
    def plain_backward(self, spec, step):
        factors = self.factors(spec, lambda n: self.params[n].has_master)
        if factors:
            self.model.forward(factors).backward()
        for n, factor in factors.items():
            p = self.params[n]
            if self.is_low(n) and not self.by_optimizer:
                p.plain = plus(p.plain, factor)
            else:
                p.grad = plus(p.grad, factor)
        if step:
            self.step(spec.opts[-1])

    @rule(i=OPTS, to_none=st.booleans())
    def zero_grad(self, i, to_none):
        opt = self.opts[i]
        to_none |= opt.window is not None or any(p.has_master for p in self.members(i).values())
        self.optimizers[i].zero_grad(set_to_none=to_none)
        self.follow(i)
        for p in self.members(i).values():
            p.grad = None if to_none or p.grad is None else torch.zeros_like(p.grad)
            p.plain = p.window = None
        opt.flags, opt.checked = set(), False
        opt.window, opt.stepped = None, False

    def zero_all(self):
        for i in range(2):
            self.zero_grad(i, True)

    def stepped_params(self, i):
        """What the optimizer steps, by name."""
        params = list(self.session.master_params(self.optimizers[i]))
        self.collect(i)
        return dict(zip(self.members(i), params, strict=True))

    @precondition(lambda self: self.idle)
    @rule(i=OPTS)
    def read_gradients(self, i):
        for n, p in self.stepped_params(i).items():
            want = self.params[n].grad
            assert (p.grad is None) == (want is None), n
            if want is not None:
                bounds = {"rtol": 1e-5, "atol": 1e-6} if self.near else {"rtol": 0.0, "atol": 0.0}
                torch.testing.assert_close(p.grad.double(), want.double(), equal_nan=True, **bounds)

    @precondition(lambda self: self.idle and not self.by_optimizer)
    @rule(i=OPTS, part=st.sampled_from([0.25, 0.5, 2.0]), clip=st.sampled_from(CLIPS))
    def clip(self, i, part, clip):
        if any(is_bad(p.grad) or is_bad(p.plain) for p in self.members(i).values()):
            return
        self.collect(i)
        if not (grads := [p.grad for p in self.members(i).values() if p.grad is not None]):
            return
        norm = torch.cat(grads).double().norm().item()
        found = clip(self.session.master_params(self.optimizers[i]), part * norm or 1.0)
        assert found.item() == pytest.approx(norm, rel=1e-5)
        if part < 1.0 and norm:
            self.near = True
            for p in self.members(i).values():
                p.grad = None if p.grad is None else p.grad * (part * norm / (norm + 1e-6))

    # --- steps --------------------------------------------------------------------------------------------------------

    @rule(i=OPTS)
    def step(self, i):
        self.optimizers[i].step()
        self.end_step(i)

    @precondition(lambda self: self.idle)
    @rule(i=OPTS, when=st.sampled_from(["pre", "post"]))
    def step_with_a_hook_that_raises(self, i, when):
        """Before the step it is as if nobody had called it; after it the weights are new. No outcome tells of it."""

        def refuse(*_):
            raise Boom

        self.collect(i)
        opt, grads = self.opts[i], [p.grad for p in self.members(i).values()]
        when = "pre" if opt.flags or any(map(is_bad, grads)) else when
        handle, raised = getattr(self.optimizers[i], f"register_step_{when}_hook")(refuse), False
        try:
            self.optimizers[i].step()
        except Boom:
            raised = True
        handle.remove()
        if not raised:
            assert self.end_step(i)  # the host skips without asking the hook
            return
        self.forget_loaded()
        if when == "post":
            checked = opt.checked
            self.end_step(i, self.update)
            opt.checked = checked  # amp gives the flags back
            for p, grad in zip(self.members(i).values(), grads, strict=True):
                p.grad = grad
        elif opt.window is None and self.left_bad(opt, [p.grad for p in self.members(i).values() if not p.has_master]):
            opt.flags.add(-1)

    @precondition(lambda self: self.idle)
    @rule(i=OPTS, spec=PLAIN_BLOCKS)
    def step_with_closure(self, i, spec):
        def closure():
            self.zero_grad(i, True)
            self.run_block(inside, True)
            return torch.zeros(())

        self.zero_grad(i, True)
        inside = SimpleNamespace(**{**vars(spec), "opts": (i,), "refused": False, "fails": spec.fails and "through"})
        if spec.fails:
            with pytest.raises(Boom):
                self.optimizers[i].step(closure)
        else:
            self.optimizers[i].step(closure)
            self.end_step(i)

    def left_bad(self, opt, grads):
        """Whether a step finds inf or nan in what an earlier one has left, and no block has checked since."""
        return self.checks and opt.stepped and not opt.checked and any(map(is_bad, grads))

    def end_step(self, i, update=None):
        """Whether it was skipped."""
        opt, members = self.opts[i], self.members(i)
        self.collect(i)
        self.forget_loaded()
        left = [p.grad for p in members.values() if not p.has_master]
        if opt.window is not None:
            unchecked = [p.grad for p in members.values() if not (p.has_master or opt.checked)]
            some = any(grad is not None for grad in [*unchecked, *(p.window for p in members.values())])
            loss = opt.window
            opt.flags |= {loss} if (bad := self.arrive(i, {})) else set()
            if self.checks and some:
                waiting, self.scales[loss].waiting = self.scales[loss].waiting, None
                self.update_scale(loss, bad)
                self.scales[loss].waiting = waiting
        elif self.left_bad(opt, left):
            opt.flags.add(-1)
        skipped = bool(opt.flags)
        if not skipped:
            (update or self.update)(i)
        for p in members.values():
            p.grad = None if p.has_master else p.grad
        if update is None or skipped:
            opt.outcomes.append((opt.flags, opt.scales))
            opt.scales = {}
        opt.flags, opt.checked = set(), False
        opt.stepped = True
        return skipped

    def update(self, i):
        """SGD and Adam, as their papers have them."""
        kind = self.opts[i].kind
        for g, names in enumerate(self.layout[i]):
            for p in (p for n in names if (p := self.params[n]).grad is not None):
                grad, state, lr = p.grad.to(p.value.dtype), p.state, LR[g]
                if kind == "SAM":
                    p.value = p.value - lr * grad
                elif "SGD" in kind:
                    grad = grad + DECAY * p.value
                    state["momentum"] = MOMENTUM * state["momentum"] + grad if state else grad
                    p.value = p.value - lr * state["momentum"]
                else:
                    t = state["t"] = state.get("t", 0) + 1
                    m = state["m"] = BETAS[0] * state.get("m", 0.0) + (1 - BETAS[0]) * grad
                    v = state["v"] = BETAS[1] * state.get("v", 0.0) + (1 - BETAS[1]) * grad * grad
                    root = (v / (1 - BETAS[1] ** t)).sqrt()
                    p.value = p.value - lr * m / (1 - BETAS[0] ** t) / (root + EPS)

    @precondition(lambda self: self.idle and "SAM" in [opt.kind for opt in self.opts])
    @rule(first=PLAIN_BLOCKS, spec=PLAIN_BLOCKS, twice=st.booleans())
    def sam(self, first, spec, twice):
        i = [opt.kind for opt in self.opts].index("SAM")
        self.run_block(SimpleNamespace(**{**vars(first), "opts": (i,), "ends": ""}))
        optimizer, before = self.optimizers[i], {n: p.value for n, p in self.members(i).items()}
        optimizer.first_step(zero_grad=True)
        skipped = self.end_step(i, self.perturb)
        self.zero_grad(i, True)
        self.compare()
        if twice and not skipped:
            with pytest.raises(AmpError, match="a second time"):
                optimizer.first_step()
        self.run_block(SimpleNamespace(**{**vars(spec), "opts": (i,), "ends": ""}))
        self.put(before)
        if spec.fails and not skipped:
            return  # which undoes the first step
        optimizer.second_step(zero_grad=True)
        if skipped:
            self.opts[i].flags, self.opts[i].checked = set(), False
        else:
            self.end_step(i)
        self.zero_grad(i, True)

    def perturb(self, i):
        for p in self.members(i).values():
            if p.grad is not None:
                p.value = p.value + RHO * p.grad

    def put(self, values):
        for n, value in values.items():
            self.params[n].value = value

    # --- groups -------------------------------------------------------------------------------------------------------

    def take_out(self, i, k):
        """A member of a group, and its name."""
        g = k % len(self.layout[i])
        if not self.layout[i][g]:
            return None, None
        k %= len(self.layout[i][g])
        return self.layout[i][g].pop(k), self.optimizers[i].param_groups[g]["params"].pop(k)

    @rule(i=OPTS, k=st.integers(0, 7), g=st.integers(0, 3))
    def move(self, i, k, g):
        name, p = self.take_out(i, k)
        if name:
            g %= len(self.layout[i])
            self.layout[i][g].append(name)
            self.optimizers[i].param_groups[g]["params"].append(p)

    @precondition(lambda self: self.idle and len(self.out) < 2)
    @rule(i=OPTS, k=st.integers(0, 7))
    def remove(self, i, k):
        self.zero_all()
        name, p = self.take_out(i, k)
        if name:
            self.out[name] = i, p

    @precondition(lambda self: self.idle and self.out)
    @rule(g=st.integers(0, 3), alone=st.booleans())
    def put_back(self, g, alone):
        """``alone``: in a group of its own, in whose place the model's parameter is given."""
        name, (i, p) = self.out.popitem()
        g = len(self.layout[i]) if alone else g % len(self.layout[i])
        if alone and g < len(LR):
            self.layout[i].append([name])
            self.optimizers[i].add_param_group({"params": [self.model.get_parameter(name)], "lr": LR[g]})
        else:
            g = min(g, len(self.layout[i]) - 1)
            self.layout[i][g].append(name)
            self.optimizers[i].param_groups[g]["params"].append(p)
        self.stepped_params(i)  # amp looks at the groups

    @precondition(lambda self: len(self.layout[0]) < 3 and self.place("late") is None and "late" not in self.out)
    @rule()
    def add_param_group(self):
        self.layout[0].append(["late"])
        self.optimizers[0].add_param_group({"params": [self.model.get_parameter("late")], "lr": LR[2]})
        self.follow(0)

    @rule(name=st.sampled_from(NAMES), frozen=st.booleans())
    def freeze(self, name, frozen):
        self.params[name].frozen = frozen
        self.model.get_parameter(name).requires_grad_(not frozen)

    # --- values -------------------------------------------------------------------------------------------------------

    def values(self, seed, names, is_exact=False):
        """For some parameters. 16 bits hold exact ones."""
        found = {}
        for k, (n, p) in enumerate(self.params.items()):
            if names >> k & 1:
                value = ((torch.arange(len(p.value)) * 7 + seed + k) % 23 - 11.5) / 4
                found[n] = (value if is_exact else value * 1.013).to(p.value.dtype)
        return found

    def take_rounded(self, n, value):
        """A 16-bit weight was written: its master follows where it is not the rounded master."""
        p, value = self.params[n], self.rounded(value)
        p.value = torch.where(self.rounded(p.value) == value, p.value, value)

    @precondition(lambda self: self.idle and not self.by_optimizer)
    @rule(seed=st.integers(0, 22), names=MASK, wide=st.booleans())
    def load_model(self, seed, names, wide):
        values = self.values(seed, names, not wide)
        given = {n: value.to(self.low) if self.is_low(n) and not wide else value.float() for n, value in values.items()}
        self.model.load_state_dict(given, strict=False)
        for n, value in values.items():
            p = self.params[n]
            if not self.is_low(n) or (wide and p.has_master and n not in self.out):
                p.value = value
            else:
                self.take_rounded(n, value)
            p.loaded = value if wide and self.is_low(n) and not p.has_master else None

    @rule(seed=st.integers(0, 22), names=MASK)
    def edit_model(self, seed, names):
        """A master follows its weight, at the next read of masters: a weight that is put back before that is none."""
        for i in range(2):
            self.stepped_params(i)
        for n, value in self.values(seed, names).items():
            place = self.place(n)
            if self.is_low(n) and (place is None or self.by_optimizer):
                continue
            with torch.no_grad():
                self.model.get_parameter(n).copy_(value)
            self.params[n].loaded = None
            if self.is_low(n):
                self.take_rounded(n, value)
            else:
                self.params[n].value = value

    @precondition(lambda self: self.idle and not self.by_optimizer)
    @rule(i=OPTS, seed=st.integers(0, 22), names=MASK)
    def edit_masters(self, i, seed, names):
        """The model follows."""
        values, params = self.values(seed, names), self.stepped_params(i)
        for n in values.keys() & params.keys():
            with torch.no_grad():
                params[n].copy_(values[n])
            p = self.params[n]
            p.value = values[n] if p.has_master or not self.is_low(n) else self.rounded(values[n])

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def layout_now(self):
        return copy.deepcopy(self.layout), [n for n, p in self.params.items() if p.has_master]

    @precondition(lambda self: not self.out and self.idle)
    @rule(masters=st.booleans())
    def save(self, masters):
        """Changes nothing. Gradients and their overflows are not in the state."""
        for i in range(2):
            self.stepped_params(i)
        states = {
            "model": self.model.state_dict(),
            "amp": self.session.state_dict(masters=masters),
            **{f"optimizer{i}": optimizer.state_dict() for i, optimizer in enumerate(self.optimizers)},
        }
        reference = copy.deepcopy((self.params, self.scales))
        self.kept = through_a_file(states), masters, reference, self.layout_now

    @precondition(lambda self: self.kept)
    @rule(order=st.permutations(["model", "amp", "optimizer0", "optimizer1"]), anew=st.booleans())
    def load(self, order, anew):
        states, has_masters, reference, layout = self.kept
        if not anew and (self.out or layout != self.layout_now):
            return
        if not has_masters:  # gradients stay
            anew |= any(scale.waiting is not None for scale in self.scales)
            self.zero_all()
        params, scales = copy.deepcopy(reference)
        if anew:
            self.session.reset()
            self.params, self.layout = copy.deepcopy(params), copy.deepcopy(layout[0])
            self.build()
            self.initialize()
        for name in order:
            kind, _, i = name.partition("optimizer")
            target = self.optimizers[int(i)] if i else self.model if kind == "model" else self.session
            target.load_state_dict(copy.deepcopy(states[name]))
        for n, p in self.params.items():
            p.value, p.state = params[n].value, params[n].state
            p.grad = p.plain = p.window = p.loaded = None
            self.model.get_parameter(n).requires_grad_(not p.frozen)
        self.scales = scales
        for scale in scales:
            scale.waiting = None
        for opt in self.opts:
            opt.flags, opt.checked, opt.stepped, opt.window = set(), False, False, None
            opt.scales = {} if has_masters else opt.scales

    @precondition(lambda self: not self.by_optimizer and not self.out)
    @rule(level=LEVELS_DRAWN)
    def reset_and_initialize(self, level):
        self.zero_all()
        self.session.reset()
        for n, p in self.model.named_parameters():
            assert p.dtype == torch.float32
            self.check_value(n, p.detach())
        for p in self.params.values():
            p.has_master = False
        self.level, self.kept = level, None
        self.initialize()

    @precondition(lambda self: self.scale == "dynamic" and self.idle)
    @rule(clean=st.integers(GROWTH_INTERVAL - 3, GROWTH_INTERVAL - 1), first=st.sampled_from([32.0, 64.0]))
    def load_scales(self, clean, first):
        entry = self.session.state_dict()
        for i, scale in enumerate(self.scales):
            scale.value, scale.clean = first * (1 + i), clean
            entry[f"loss_scaler{i}"] |= {"loss_scale": scale.value, "unskipped": clean}
        self.session.load_state_dict(entry)

    # --- what holds after each call -----------------------------------------------------------------------------------

    def check_value(self, n, found):
        want = self.params[n].value.float()
        if self.near:
            torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5, msg=lambda text: f"{n}: {text}")
        else:
            assert torch.equal(found, want), f"{n} is {found.tolist()}, expected {want.tolist()}"

    def of_master(self, n, master):
        """The weight of the model. A split one rounds ties away from 0: both halves are one fp32 number."""
        if self.by_optimizer == "split" and self.is_low(n):
            return (master.view(torch.int32) + 0x8000 >> 16).short().view(torch.bfloat16)
        return master.to(self.model.get_parameter(n).dtype)

    @invariant()
    def compare(self):
        state = self.session.master_state_dict(self.model)
        self.follow(0, 1)
        for n, p in self.model.named_parameters():
            if n not in self.out:
                self.check_value(n, state[n])
                assert torch.equal(p.detach(), self.of_master(n, state[n])), f"{n} is not the rounded master"
            assert p.dtype == (self.low if self.is_low(n) else torch.float32)
        amp = self.session.state_dict()
        for i, scale in enumerate(self.scales):
            entry = amp[f"loss_scaler{i}"]
            assert (entry["loss_scale"], entry["unskipped"]) == (scale.value, scale.clean), f"loss {i}"
        for opt, optimizer in zip(self.opts, self.optimizers, strict=True):
            skipped = [bool(flags) for flags, _ in opt.outcomes]
            assert self.session.skipped_steps(optimizer) == sum(skipped)
            assert self.session.history(optimizer).skipped == skipped
            outcome = self.session.outcome(optimizer)
            assert (outcome.stepped or outcome.skipped) == bool(opt.outcomes)
            if opt.outcomes:
                flags, scales = opt.outcomes[-1]
                assert (outcome.skipped, set(outcome.overflowed)) == (skipped[-1], flags)
                assert outcome.scales == scales

    def teardown(self):
        if hasattr(self, "session"):
            self.session.reset()


if EXAMPLES is None:
    seed(0)(Training)  # the same runs everywhere: derandomize goes by the path, too
TestTraining = Training.TestCase
TestTraining.settings = settings(
    max_examples=int(EXAMPLES or 100),
    stateful_step_count=30,
    phases=[Phase.generate],
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_a_delayed_block_inside_one_of_another_optimizer_keeps_its_gradients(session):
    models = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    opts = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    session.initialize(models, opts, opt_level="O2", loss_scale=8.0, verbosity=0)
    before = models[1].weight.detach().clone()
    with session.scale_loss(models[0](torch.ones(1, 2)).sum(), opts[0]) as outer:
        with session.scale_loss(models[1](torch.ones(1, 2)).sum(), opts[1], delay_unscale=True) as inner:
            inner.backward()
        outer.backward()
    opts[1].step()
    assert not torch.equal(models[1].weight, before)


def test_a_fused_step_without_gradients_shows_an_edit_of_masters(session):
    model = nn.Linear(2, 1, bias=False)
    optimizer = optimizers.FusedSGD(model.parameters(), lr=1.0)
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    optimizer.step()  # from now on the weights are final
    with torch.no_grad():
        next(session.master_params(optimizer)).fill_(3.0)
    optimizer.step()
    assert model.weight.eq(3.0).all()
