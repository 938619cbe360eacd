"""Each optimizer's formula written out once more in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Formula:
    """One optimizer as its paper (or apex) defines it, tensor by tensor in the type of the parameters given."""

    kind: str
    params: list[Tensor]
    o: dict[str, Any]
    t: int = 0
    state: list[dict[str, Tensor]] = field(default_factory=list)

    def step(self, grads: list[Tensor]) -> None:
        self.t += 1
        o = self.o
        grads = [(-g if o.get("maximize") else g).to(p.dtype) for g, p in zip(grads, self.params, strict=True)]
        if not self.state:
            self.state = [{} for _ in grads]
        if self.kind == "lamb":
            norm, most = torch.cat([g.flatten() for g in grads]).norm(), o.get("max_grad_norm", 1.0)
            if most and norm > most:
                grads = [g / (norm / most) for g in grads]
        with torch.no_grad():
            for p, g, s in zip(self.params, grads, self.state, strict=True):
                getattr(self, self.kind)(p, g, s)

    def _average(self, s: dict[str, Tensor], name: str, beta: float, value: Tensor, weight: float) -> Tensor:
        s[name] = beta * s.get(name, torch.zeros_like(value)) + weight * value
        return s[name]

    def _corrections(self, beta1: float, beta2: float) -> tuple[float, float]:
        return (1 - beta1**self.t, 1 - beta2**self.t) if self.o.get("bias_correction", True) else (1.0, 1.0)

    def direction(self, g: Tensor, s: dict[str, Tensor], beta3: float) -> Tensor:
        beta1, beta2 = self.o.get("betas", (0.9, 0.999))
        m = self._average(s, "m", beta1, g, beta3)
        v = self._average(s, "v", beta2, g * g, 1 - beta2)
        if self.o.get("amsgrad"):
            v = s["max"] = torch.maximum(s.get("max", torch.zeros_like(v)), v)
        c1, c2 = self._corrections(beta1, beta2)
        return (m / c1) / ((v / c2).sqrt() + self.o["eps"])

    def adam(self, p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        o, wd = self.o, self.o.get("weight_decay", 0.0)
        decoupled = o.get("adam_w_mode", True)
        u = self.direction(g if decoupled else g + wd * p, s, 1 - o.get("betas", (0.9, 0.999))[0])
        p -= o["lr"] * (u + wd * p if decoupled else u)

    def lamb(self, p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        o, wd = self.o, self.o.get("weight_decay", 0.01)
        decoupled = o.get("adam_w_mode", True)
        beta3 = 1 - o.get("betas", (0.9, 0.999))[0] if o.get("grad_averaging", True) else 1.0
        u = self.direction(g if decoupled else g + wd * p, s, beta3)
        u = u + wd * p if decoupled else u
        of_p, of_u = p.norm(), u.norm()
        scaled = (wd != 0 or o.get("use_nvlamb")) and of_p > 0 and of_u > 0
        p -= o["lr"] * (of_p / of_u if scaled else 1.0) * u

    def sgd(self, p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        o, wd, momentum = self.o, self.o.get("weight_decay", 0.0), self.o.get("momentum", 0.0)
        after = o.get("wd_after_momentum", False)
        if not after:
            g = g + wd * p
        if momentum:
            s["b"] = momentum * s["b"] + (1 - o.get("dampening", 0.0)) * g if "b" in s else g
            g = g + momentum * s["b"] if o.get("nesterov") else s["b"]
        p -= o["lr"] * (g + wd * p if after else g)

    def adagrad(self, p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        o, wd = self.o, self.o.get("weight_decay", 0.0)
        decoupled = o.get("adagrad_w_mode", False)
        g = g if decoupled else g + wd * p
        s["h"] = s.get("h", torch.zeros_like(p)) + g * g
        u = g / (s["h"].sqrt() + o["eps"])
        p -= o["lr"] * (u + wd * p if decoupled else u)

    def lion(self, p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        o, m, (beta1, beta2) = self.o, s.get("m", torch.zeros_like(p)), self.o.get("betas", (0.9, 0.99))
        p -= o["lr"] * (torch.sign(beta1 * m + (1 - beta1) * g) + o.get("weight_decay", 0.0) * p)
        s["m"] = beta2 * m + (1 - beta2) * g

    def novograd(self, p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        o, wd = self.o, self.o.get("weight_decay", 0.0)
        beta1, beta2 = o.get("betas", (0.9, 0.999))
        c1, c2 = self._corrections(beta1, beta2)
        beta3 = 1 - beta1 if o.get("grad_averaging", True) else 1.0
        largest = o.get("norm_type", 2) == 0
        norm = g.abs().max() if largest and g.numel() else g.norm()
        old = s.get("n", torch.zeros_like(norm) if o.get("init_zero") else norm)
        s["n"] = beta2 * old + (1 - beta2) * norm if largest else (beta2 * old**2 + (1 - beta2) * norm**2).sqrt()
        d = s["n"] / c2**0.5 + o["eps"]
        if o.get("reg_inside_moment"):
            p -= o["lr"] * self._average(s, "m", beta1, g / d + wd * p, beta3) / c1
        else:
            p -= o["lr"] * (self._average(s, "m", beta1, g, beta3) / c1 / d + wd * p)
