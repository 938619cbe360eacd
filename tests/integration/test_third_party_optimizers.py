"""Optimizers as other packages have them x level x resume: each trains as in fp32, skips steps with the loss scale, and
goes on bit for bit from three states. Written from their papers."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from kit import INF, assert_same, backward, params_of, through_a_file
from torch import nn

from ampctx import AmpSession


class ByParameter(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, p.grad, self.state[p], group["lr"])


class AdaBelief(ByParameter):
    """Zhuang et al. 2020: Adam by the variance of gradients around their average."""

    def update(self, p, grad, state, lr, beta1=0.9, beta2=0.999, eps=1e-8):
        state["step"] = state.get("step", 0) + 1
        m = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(grad, 1 - beta1)
        s = state.setdefault("exp_avg_var", torch.zeros_like(p)).lerp_((grad - m).square(), 1 - beta2).add_(eps)
        bias1, bias2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        p.addcdiv_(m, (s / bias2).sqrt().add_(eps), value=-lr / bias1)


class Muon(ByParameter):
    """Jordan et al. 2024: orthogonalized momentum."""

    def update(self, p, grad, state, lr, momentum=0.9):
        moment = state.setdefault("momentum_buffer", torch.zeros_like(p)).lerp_(grad, 1 - momentum)
        update = grad.lerp(moment, momentum)
        update = update / (update.norm() + 1e-7)
        for _ in range(5):
            gram = update @ update.T
            update = 3.4445 * update + (-4.775 * gram + 2.0315 * gram @ gram) @ update
        p.sub_(update, alpha=lr)


class ScheduleFree(torch.optim.Optimizer):
    """SGD of Defazio et al. 2024: gradients at y, which is the parameter; ``eval`` puts the average x there."""

    def __init__(self, params, lr=0.2, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def swap(self, to_train):
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != to_train else ():
                p.lerp_(self.state[p].get("z", p), 1 - (group["beta"] if to_train else 1 / group["beta"]))
            group["train_mode"] = to_train

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            c, lr, beta = 1 / group["k"], group["lr"], group["beta"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, c).add_(p.grad, alpha=lr * (beta * (1 - c) - 1))
                z.sub_(p.grad, alpha=lr)


class Wrapper(torch.optim.Optimizer):
    """Shares the groups of the optimizers inside."""

    def __init__(self, *inside):
        super().__init__([group for one in inside for group in one.param_groups], {})
        self.inside = inside
        self.share()

    def share(self):
        self.param_groups = [group for one in self.inside for group in one.param_groups]

    def step(self, closure=None):
        for one in self.inside:
            one.step()

    def state_dict(self):
        return {"own": super().state_dict()["state"], "inside": [one.state_dict() for one in self.inside]}

    def load_state_dict(self, state):
        for one, content in zip(self.inside, state["inside"], strict=True):
            one.load_state_dict(content)
        self.share()
        members = dict(enumerate(params_of(self)))
        self.state.update({members.get(key, key): own for key, own in state["own"].items()})


def by_shape(*params):
    matrices, others = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
    return Wrapper(Muon(matrices, lr=0.05), AdaBelief(others, lr=0.02))


MAKE = {
    "schedule-free": ScheduleFree,
    "muon and adabelief": lambda params: by_shape(*params),
}
# A rounding moves an output by about its unit, and through the layers and back some add up.
ROUNDINGS = {"O1": 8 * 2.0**-11, "O2": 8 * 2.0**-11, "O5": 8 * 2.0**-8}
STEPS, SAVED, OVERFLOW = 40, 15, 8
X = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
Y = torch.sin(X[:, :2])


class Run:
    """``session`` None: without amp."""

    def __init__(self, name, session=None, level="", seed=0):
        torch.manual_seed(seed)
        self.model, self.amp = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)), session
        self.optimizer = MAKE[name](self.model.parameters())
        if self.amp:
            options = {"loss_scale": "dynamic", "max_loss_scale": 1024.0, "verbosity": 0}
            self.amp.initialize(self.model, self.optimizer, opt_level=level, **options)

    def loss(self):
        return (self.model(X).float() - Y).square().mean()

    def backward(self, factor=1.0):
        self.optimizer.zero_grad()
        loss = self.loss() * factor
        backward(self.amp, loss, self.optimizer) if self.amp else loss.backward()

    def step(self, overflows):
        swap = getattr(self.optimizer, "swap", lambda to_train: None)
        swap(to_train=True)
        if self.amp or not overflows:
            self.backward(INF if overflows else 1.0)
            self.optimizer.step()
        swap(to_train=False)
        with torch.no_grad():
            return self.loss().item()

    def train(self, first, last):
        return [self.step(i == OVERFLOW) for i in range(first, last)]

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "amp": self.amp}

    def states(self):
        return {name: part.state_dict() for name, part in self.parts().items()}


@pytest.mark.parametrize("level", ROUNDINGS)
@pytest.mark.parametrize("name", MAKE)
def test_it_trains_as_in_fp32_and_resumes_bit_for_bit(session, name, level):
    expected = Run(name).train(0, STEPS)
    run = Run(name, session, level)
    losses = run.train(0, SAVED)
    saved = through_a_file(run.states())
    losses += run.train(SAVED, STEPS)
    assert expected[-1] < expected[0] / 4
    assert (torch.tensor(losses) - torch.tensor(expected)).abs().max() < ROUNDINGS[level] * expected[0]
    assert session.skipped_steps(run.optimizer) == 1
    for order in (run.parts(), reversed(run.parts())):
        content = through_a_file(saved)  # torch keeps tensors that it loads
        with ExitStack() as resets:
            resets.callback((fresh := AmpSession()).reset)
            other = Run(name, fresh, level, seed=2)
            for part in order:
                other.parts()[part].load_state_dict(content[part])
            assert other.train(SAVED, STEPS) == losses[SAVED:]
            assert_same(other.states(), run.states())
