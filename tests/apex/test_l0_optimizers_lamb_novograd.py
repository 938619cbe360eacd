"""What apex's suite for LAMB and NovoGrad asks, through apex's names: the references are written here."""

import pytest
import torch
from apex.optimizers import FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad
from torch import nn

ITERATIONS = 7
SIZES = [[128, 64], [128], [128, 96], [1010, 32], [1]]
LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def drawn(sizes, seed=9876):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(size, generator=generator) for size in sizes]


class Lamb:
    """LAMB over fp32 tensors as NVIDIA defined it: clipped by the norm of all gradients, and scaled where there is no
    decay, too."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, most=1.0):
        self.params, self.lr, self.betas, self.eps, self.decay, self.most = params, lr, betas, eps, weight_decay, most
        self.steps = 0
        self.first = [torch.zeros_like(p) for p in params]
        self.second = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self, grads):
        self.steps += 1
        beta1, beta2 = self.betas
        norm = torch.sqrt(sum(g.double().square().sum() for g in grads)).float()
        clip = torch.clamp(norm / self.most, min=1.0)
        for p, g, m, v in zip(self.params, grads, self.first, self.second, strict=True):
            g = g / clip
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            root = (v / (1 - beta2**self.steps)).sqrt_()
            update = m / (1 - beta1**self.steps) / (root + self.eps) + self.decay * p
            ratio = p.norm() / update.norm()
            p.sub_(self.lr * ratio * update)


class NovoGrad:
    """NovoGrad over fp32 tensors, its running norm begun with the first gradient's, decay inside the moment."""

    def __init__(self, params, lr, betas, eps, weight_decay):
        self.params, self.lr, self.betas, self.eps, self.decay = params, lr, betas, eps, weight_decay
        self.moments = [torch.zeros_like(p) for p in params]
        self.norms = [None] * len(params)

    @torch.no_grad()
    def step(self, grads):
        beta1, beta2 = self.betas
        for i, (p, g, m) in enumerate(zip(self.params, grads, self.moments, strict=True)):
            square = g.square().sum()
            self.norms[i] = square if self.norms[i] is None else beta2 * self.norms[i] + (1 - beta2) * square
            g = g / (self.norms[i].sqrt() + self.eps) + self.decay * p
            m.mul_(beta1).add_(g)
            p.sub_(self.lr * m)


def run(optimizer, ours, reference, iterations, dtype=torch.float32):
    """Yields after each step on the same gradients."""
    for step in range(iterations):
        grads = [g.to(dtype) for g in drawn([p.shape for p in ours], step)]
        for p, g in zip(ours, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
        reference.step([g.float() for g in grads])
        yield


# --- LAMB -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", [0.0, 0.01], ids=["no-decay", "decay"])
@pytest.mark.parametrize(
    "options",
    [{"lr": 5e-4}, {"lr": 0.01, "betas": (0.6, 0.9), "eps": 3e-6}, {"lr": 0.01, "max_grad_norm": 1e6}],
    ids=["defaults", "lr-betas-eps", "no-clipping"],
)
@pytest.mark.parametrize("sizes", [[[18011]], SIZES], ids=["one", "many"])
@pytest.mark.parametrize("cls", [FusedLAMB, FusedMixedPrecisionLamb])
def test_lamb_is_the_reference(cls, sizes, options, weight_decay):
    start = drawn(sizes)
    ours = [nn.Parameter(t.clone()) for t in start]
    optimizer = cls(ours, weight_decay=weight_decay, use_nvlamb=True, **options)
    given = {("most" if name == "max_grad_norm" else name): value for name, value in options.items()}
    reference = Lamb([t.clone() for t in start], weight_decay=weight_decay, **given)
    for _ in run(optimizer, ours, reference, ITERATIONS):
        torch.testing.assert_close([p.detach() for p in ours], reference.params)
    assert all(not torch.equal(p, t) for p, t in zip(ours, start, strict=True))


@pytest.mark.parametrize("dtype", LOW.values(), ids=LOW)
@pytest.mark.parametrize("weight_decay", [0.0, 0.01], ids=["no-decay", "decay"])
@pytest.mark.parametrize("sizes", [[[18011]], SIZES], ids=["one", "many"])
def test_mixed_lamb_keeps_masters_of_the_reduced_dtype(dtype, sizes, weight_decay):
    start = [t.to(dtype) for t in drawn(sizes)]
    ours = [nn.Parameter(t.clone()) for t in start]
    optimizer = FusedMixedPrecisionLamb(ours, lr=5e-4, weight_decay=weight_decay, use_nvlamb=True)
    # Not an argument here, as in apex's suite.
    optimizer.reduced_precision_dtype = dtype
    reference = Lamb([t.float() for t in start], lr=5e-4, weight_decay=weight_decay)
    for _ in run(optimizer, ours, reference, ITERATIONS, dtype):
        (group,) = optimizer.param_groups_full_precision
        torch.testing.assert_close([m.detach() for m in group["params"]], reference.params)
        torch.testing.assert_close([p.detach() for p in ours], [p.to(dtype) for p in reference.params])
    assert all(torch.equal(p, m.to(dtype)) for p, m in zip(ours, group["params"], strict=True))


@pytest.mark.parametrize("dtype", LOW.values(), ids=LOW)
def test_lamb_steps_16_bit_parameters(dtype):
    start = [t.to(dtype) for t in drawn([[18011]])]
    ours = [nn.Parameter(t.clone()) for t in start]
    reference = Lamb([t.float() for t in start], lr=5e-4)
    for _ in run(FusedLAMB(ours, lr=5e-4, use_nvlamb=True), ours, reference, 1, dtype):
        torch.testing.assert_close(ours[0].detach(), reference.params[0].to(dtype))


@pytest.mark.parametrize("cls", [FusedLAMB, FusedMixedPrecisionLamb])
def test_lamb_groups_that_come_between_steps_are_stepped(cls):
    start = drawn([[33], [5, 7]])
    ours = [nn.Parameter(t.clone()) for t in start]
    optimizer = cls(ours[:1], lr=0.01, max_grad_norm=1e6)
    for step in range(2):
        for p, g in zip(ours, drawn([[33], [5, 7]], step), strict=True):
            p.grad = g
        optimizer.step()
    assert torch.equal(ours[1], start[1])
    optimizer.add_param_group({"params": ours[1:]})
    optimizer.step()
    reference = Lamb([start[1].clone()], lr=0.01, most=1e6)
    reference.step([ours[1].grad])
    torch.testing.assert_close(ours[1].detach(), reference.params[0])


# --- NovoGrad ---------------------------------------------------------------------------------------------------------

NOVOGRAD = {"lr": 1e-3, "betas": (0.95, 0.0), "eps": 1e-8, "weight_decay": 0.0}
# With these, FusedNovoGrad is the reference's algorithm.
MODES = {
    "bias_correction": False,
    "reg_inside_moment": True,
    "grad_averaging": False,
    "norm_type": 2,
    "init_zero": False,
}


@pytest.mark.parametrize(
    "options",
    [NOVOGRAD, {**NOVOGRAD, "betas": (0.9, 0.98), "weight_decay": 0.01}, {**NOVOGRAD, "lr": 5e-4, "eps": 1e-3}],
    ids=["suite", "betas-decay", "lr-eps"],
)
@pytest.mark.parametrize("sizes", [[[278011]], SIZES], ids=["one", "many"])
def test_novograd_is_the_reference(options, sizes):
    start = drawn(sizes)
    ours = [nn.Parameter(t.clone()) for t in start]
    reference = NovoGrad([t.clone() for t in start], **options)
    for _ in run(FusedNovoGrad(ours, **options, **MODES), ours, reference, ITERATIONS):
        torch.testing.assert_close([p.detach() for p in ours], reference.params)
    assert all(not torch.equal(p, t) for p, t in zip(ours, start, strict=True))


@pytest.mark.parametrize(("dtype", "place"), [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)], ids=LOW)
def test_novograd_steps_16_bit_parameters(dtype, place):
    start = [t.to(dtype) for t in drawn([[278011]])]
    ours = [nn.Parameter(t.clone()) for t in start]
    reference = NovoGrad([t.float() for t in start], **NOVOGRAD)
    for step, _ in enumerate(run(FusedNovoGrad(ours, **NOVOGRAD, **MODES), ours, reference, ITERATIONS, dtype)):
        # Weights are below 1, and a step rounds them by half a place at most.
        assert (ours[0].float() - reference.params[0]).abs().max() <= (step + 1) * place
