"""Optimizers that evaluate the model themselves (LBFGS, SAM) train under loss scaling and master weights as in fp32,
and an overflow in any of their evaluations skips the step and leaves no trace."""

import copy
from functools import partial

import pytest
import torch
from kit import INF, NAN, assert_same, start
from torch import nn

from ampctx import AmpError, optimizers

# Half the spacing of numbers near 1 in the type that the model computes in.
ROUNDING = {"O0": 2.0**-24, "O1": 2.0**-11, "O2": 2.0**-11, "O4": 2.0**-8, "O5": 2.0**-8}
all_levels = pytest.mark.parametrize("level", ROUNDING)
fp16 = pytest.mark.parametrize("level", ["O1", "O2"])
three_levels = pytest.mark.parametrize("level", ["O1", "O2", "O5"])


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization (Foret et al. 2021): gradients from the top of the slope, a step from the foot."""

    def __init__(self, params, base_optimizer, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["foot"] = p.data.clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["foot"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        self.first_step(zero_grad=True)
        with torch.enable_grad():
            loss = closure()
        self.second_step()
        return loss


class Lookahead(torch.optim.Optimizer):
    """Two steps of the wrapped optimizer in one, an evaluation before each."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure):
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
            self.inner.step()
        return loss


class Regression:
    """Least squares over 64 samples: the minimum comes from the normal equations in fp64."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(64, 6, generator=generator)
        self.y = self.x @ torch.randn(6, 2, generator=generator) + 0.3 * torch.randn(64, 2, generator=generator)
        x = torch.cat([self.x, torch.ones(64, 1)], dim=1).double()
        best = torch.linalg.lstsq(x, self.y.double()).solution
        self.minimum = (x @ best - self.y.double()).square().mean().item()
        self.power = self.y.double().square().mean().item()

    @staticmethod
    def model():
        torch.manual_seed(1)
        return nn.Linear(6, 2)

    def loss(self, model):
        return (model(self.x).float() - self.y).square().mean()

    def exact_loss(self, params):
        """Of the weights that are stepped, in fp64."""
        weight, bias = (p.detach().double() for p in params)
        return (self.x.double() @ weight.T + bias - self.y.double()).square().mean().item()


class Training:
    """A model, an optimizer made of its parameters, and a closure whose evaluations overflow or raise on demand."""

    def __init__(self, session, level, make_optimizer, **options):
        self.session, self.level = session, level
        self.problem = Regression()
        # A start that no gradient of the problem overflows.
        options = {"loss_scale": "dynamic", "max_loss_scale": 1024.0, **options}
        make = MAKE.get(make_optimizer, make_optimizer)
        self.model, self.optimizer = start(session, level, make, self.problem.model(), **options)
        self.evaluations = 0
        # What becomes of an evaluation: a factor of its loss, or an exception.
        self.faults = {}

    def backward(self):
        self.evaluations += 1
        fault = self.faults.get(self.evaluations, 1.0)
        if isinstance(fault, BaseException):
            raise fault
        loss = self.problem.loss(self.model) * fault
        with self.session.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        return loss

    def closure(self):
        self.optimizer.zero_grad()
        return self.backward()

    def excess(self):
        """How far above the minimum the stepped weights are."""
        return self.problem.exact_loss(self.session.master_params(self.optimizer)) - self.problem.minimum

    def everything(self):
        """Weights of the model, weights that are stepped, state and group options: copies."""
        kept = [self.optimizer, *(v for v in vars(self.optimizer).values() if isinstance(v, torch.optim.Optimizer))]
        return copy.deepcopy(
            {
                "model": [p.detach() for p in self.model.parameters()],
                "stepped": [p.detach() for p in self.session.master_params(self.optimizer)],
                "state": [list(one.state.values()) for one in kept],
                "options": [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups],
            }
        )


def allowed(training):
    """What rounding may do to the loss near its minimum, mean(r^2) with r = output - target.

    Weights, inputs and outputs are rounded once each: an output moves by d, up to 3 roundings of its size, and outputs
    have about the size of the targets. The loss moves by mean(2 r d) <= 2 rms(r) rms(d).
    """
    problem = training.problem
    return 2 * problem.minimum**0.5 * 3 * ROUNDING[training.level] * problem.power**0.5


MAKE = {
    "lbfgs": partial(torch.optim.LBFGS, max_iter=20),
    "lbfgs-wolfe": partial(torch.optim.LBFGS, max_iter=20, line_search_fn="strong_wolfe"),
    "sam-sgd": partial(SAM, base_optimizer=torch.optim.SGD, lr=0.1, momentum=0.9),
    "sam-adam": partial(SAM, base_optimizer=torch.optim.Adam, lr=0.05),
    "lookahead": lambda p: Lookahead(torch.optim.Adam(p, lr=0.05)),
}
every_optimizer = pytest.mark.parametrize("name", MAKE)


def step(training, name):
    """One iteration, in the words of the optimizer's users."""
    if name.startswith("sam"):
        training.backward()  # SAM.step starts from the gradients that are there
    result = training.optimizer.step(training.closure)
    training.optimizer.zero_grad()
    return result


# --- convergence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lbfgs", "lbfgs-wolfe"])
@all_levels
def test_lbfgs_reaches_the_minimum_that_rounding_allows(session, level, name):
    """In fp32 it ends at the minimum. ``allowed`` is how well it can know a loss elsewhere."""
    training = Training(session, level, name)
    for _ in range(3):
        assert step(training, name) is not None or session.skipped_steps(training.optimizer)
    assert training.evaluations > 10
    assert -1e-12 <= training.excess() <= allowed(training)


# --- overflows --------------------------------------------------------------------------------------------------------


@pytest.mark.full(but=30)
@every_optimizer
@three_levels
@pytest.mark.parametrize("fault", [INF, NAN, KeyError("data")], ids=["inf", "nan", "exception"])
@pytest.mark.parametrize("evaluation", [1, 2])
def test_a_fault_in_an_evaluation_leaves_no_trace(session, level, name, fault, evaluation):
    training = Training(session, level, name)
    for _ in range(2):
        step(training, name)
    before = training.everything()
    skipped = session.skipped_steps(training.optimizer)
    last = training.evaluations + evaluation
    training.faults = {last: fault}
    if isinstance(fault, KeyError):
        with pytest.raises(KeyError, match="data"):
            step(training, name)
    else:
        assert step(training, name) is None
        assert session.skipped_steps(training.optimizer) == skipped + 1
    assert training.evaluations == last
    training.optimizer.zero_grad()
    assert_same(before, training.everything())
    excess = training.excess()
    assert step(training, name) is not None
    assert training.excess() < excess + allowed(training)


@fp16
def test_a_first_step_that_raises_is_taken_back(session, level):
    class Clumsy(SAM):
        def first_step(self, zero_grad=False):
            super().first_step(zero_grad)
            raise OSError("no log")

    training = Training(session, level, partial(Clumsy, base_optimizer=torch.optim.SGD, lr=0.1))
    before = training.everything()
    training.backward()
    with pytest.raises(OSError, match="no log"):
        training.optimizer.first_step(zero_grad=True)
    assert_same(before, training.everything())


@all_levels
def test_zero_grad_and_second_step_take_the_first_step_back(session, level):
    """As the documentation advises after an exception at the top, outside of a block. This SAM, like most, restores
    only weights that have a gradient."""
    training = Training(session, level, "sam-adam")
    for _ in range(2):
        step(training, "sam-adam")
    before = training.everything()
    training.backward()
    training.optimizer.first_step(zero_grad=True)
    assert not torch.equal(before["stepped"][0], training.everything()["stepped"][0])
    training.optimizer.zero_grad()
    training.optimizer.second_step()
    assert_same(before, training.everything())
    excess = training.excess()
    assert step(training, "sam-adam") is not None
    assert training.excess() < excess + allowed(training)


@pytest.mark.parametrize("make", [optimizers.FusedAdam, torch.optim.Adam])
def test_a_closure_that_raises_leaves_weights_that_the_program_has_written(session, make):
    model = nn.Linear(2, 1)
    optimizer = make(model.parameters())
    session.initialize(model, optimizer, opt_level="O5", verbosity=0)
    with torch.no_grad():
        model.weight.fill_(3.0)
    with pytest.raises(KeyError):
        optimizer.step(lambda: {}["data"])
    assert all(t.eq(3.0).all() for t in (model.weight, next(session.master_params(optimizer))))


class Deaf(torch.optim.SGD):
    """Has no use for its closure."""

    def step(self, closure=None):
        return super().step()


class DeafFused(optimizers.FusedSGD):
    def step(self, closure=None):
        return super().step()


@fp16
@pytest.mark.parametrize("kind", [Deaf, DeafFused])
def test_a_closure_that_is_never_evaluated(session, level, kind):
    """The step is on the gradients that are there, and skipped where they overflowed."""
    training = Training(session, level, lambda p: kind(p, lr=0.1))
    training.faults = {1: INF}
    before = training.everything()
    for moves in (False, True):
        training.optimizer.zero_grad()
        training.backward()
        training.optimizer.step(lambda: pytest.fail("evaluated"))
        assert torch.equal(before["model"][0], training.model.weight) != moves
    assert session.skipped_steps(training.optimizer) == 1


@pytest.mark.parametrize("method", ["first_step", "second_step"])
def test_half_steps_inside_the_block_are_errors(session, method):
    training = Training(session, "O2", "sam-sgd")
    with (
        pytest.raises(AmpError, match=rf"optimizer.{method}\(\) was called inside a scale_loss block"),
        session.scale_loss(training.problem.loss(training.model), training.optimizer) as scaled,
    ):
        scaled.backward()
        getattr(training.optimizer, method)()
