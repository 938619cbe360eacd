"""The signatures of the calls that ``steps.py`` makes, for type checkers."""

from collections.abc import Sequence

from torch import Tensor

from ampctx.kernels.spec import OpSpec

Factor = float | Tensor

def source(spec: OpSpec) -> str: ...
def adam(
    grads: Sequence[Tensor], params: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor], extras: Sequence[Tensor], steps: Sequence[Tensor], found_inf: Tensor,
    inv_scale: Factor, lr: Factor, *, beta1: float, beta2: float, eps: float, weight_decay: float,
    bias_correction: bool = True, adam_w_mode: bool = True, maximize: bool = False, write_back: str = "nearest",
    seed: int = 0
) -> None: ...  # fmt: skip
def sgd(
    grads: Sequence[Tensor], params: Sequence[Tensor], momentum_buffers: Sequence[Tensor], extras: Sequence[Tensor],
    steps: Sequence[Tensor], found_inf: Tensor, inv_scale: Factor, lr: Factor, *, momentum: float = 0.0,
    dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False, wd_after_momentum: bool = False,
    maximize: bool = False, write_back: str = "nearest", seed: int = 0
) -> None: ...  # fmt: skip
def adagrad(
    grads: Sequence[Tensor], params: Sequence[Tensor], sums: Sequence[Tensor], extras: Sequence[Tensor],
    steps: Sequence[Tensor], found_inf: Tensor, inv_scale: Factor, lr: Factor, *, eps: float,
    weight_decay: float = 0.0, adagrad_w_mode: bool = False, maximize: bool = False, write_back: str = "nearest",
    seed: int = 0
) -> None: ...  # fmt: skip
def lion(
    grads: Sequence[Tensor], params: Sequence[Tensor], exp_avgs: Sequence[Tensor], extras: Sequence[Tensor],
    steps: Sequence[Tensor], found_inf: Tensor, inv_scale: Factor, lr: Factor, *, beta1: float, beta2: float,
    weight_decay: float = 0.0, maximize: bool = False, write_back: str = "nearest", seed: int = 0
) -> None: ...  # fmt: skip
def lamb(
    grads: Sequence[Tensor], params: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    extras: Sequence[Tensor], steps: Sequence[Tensor], found_inf: Tensor, inv_scale: Factor, lr: Factor,
    global_grad_norm: Factor, *, beta1: float, beta2: float, eps: float, weight_decay: float,
    max_grad_norm: float = 0.0, bias_correction: bool = True, adam_w_mode: bool = True, grad_averaging: bool = True,
    use_nvlamb: bool = False, maximize: bool = False, write_back: str = "nearest", seed: int = 0
) -> None: ...  # fmt: skip
def novograd(
    grads: Sequence[Tensor], params: Sequence[Tensor], exp_avgs: Sequence[Tensor], extras: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor], steps: Sequence[Tensor], found_inf: Tensor, inv_scale: Factor, lr: Factor, *,
    beta1: float, beta2: float, eps: float, weight_decay: float, bias_correction: bool = True,
    grad_averaging: bool = True, reg_inside_moment: bool = False, inf_norm: bool = False, init_zero: bool = False,
    maximize: bool = False, write_back: str = "nearest", seed: int = 0
) -> None: ...  # fmt: skip
def larc(
    grads: Sequence[Tensor], params: Sequence[Tensor], found_inf: Tensor, inv_scale: Factor, lr: Factor, *,
    trust_coefficient: float = 0.02, eps: float = 1e-08, weight_decay: float = 0.0, clip: bool = True,
    maximize: bool = False
) -> None: ...  # fmt: skip
