"""Optimizers that evaluate the model within a step, as users have them, and a problem whose minimum is known."""

import torch
from torch import nn


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
