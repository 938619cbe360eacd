"""The signatures of the calls that ``steps.py`` makes, for type checkers. A test compares them."""

from collections.abc import Sequence

from torch import Tensor

from ampctx.kernels.spec import OpSpec

Factor = float | Tensor
Tensors = Sequence[Tensor]
NO_NUMBERS: Tensor

def source(spec: OpSpec) -> str: ...
def adam(
    grads: Tensors, params: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, max_exp_avg_sqs: Tensors, extras: Tensors,
    steps: Tensors, found_inf: Tensor, inv_scale: Factor, lr: Factor, *, beta1: float, beta2: float, eps: float,
    weight_decay: float, bias_correction: bool = True, adam_w_mode: bool = True, maximize: bool = False,
    write_back: str = "nearest", seed: int = 0, unscale_grads: bool = False, grad_norm: Factor = 1.0,
    max_norm: float = -1.0, exp_avg_scales: Tensors = (), exp_avg_sq_scales: Tensors = (), skips: Tensors = (),
    stochastic_state: bool = False, numbers: Tensor = NO_NUMBERS
) -> None: ...  # fmt: skip
def sgd(
    grads: Tensors, params: Tensors, momentum_buffers: Tensors, extras: Tensors, steps: Tensors, found_inf: Tensor,
    inv_scale: Factor, lr: Factor, *, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0,
    nesterov: bool = False, wd_after_momentum: bool = False, maximize: bool = False, write_back: str = "nearest",
    seed: int = 0, unscale_grads: bool = False, grad_norm: Factor = 1.0, max_norm: float = -1.0,
    momentum_buffer_scales: Tensors = (), skips: Tensors = (), stochastic_state: bool = False,
    numbers: Tensor = NO_NUMBERS
) -> None: ...  # fmt: skip
def adagrad(
    grads: Tensors, params: Tensors, sums: Tensors, extras: Tensors, steps: Tensors, found_inf: Tensor,
    inv_scale: Factor, lr: Factor, *, eps: float, weight_decay: float = 0.0, adagrad_w_mode: bool = False,
    maximize: bool = False, write_back: str = "nearest", seed: int = 0, unscale_grads: bool = False,
    grad_norm: Factor = 1.0, max_norm: float = -1.0, skips: Tensors = (), stochastic_state: bool = False,
    numbers: Tensor = NO_NUMBERS
) -> None: ...  # fmt: skip
def lion(
    grads: Tensors, params: Tensors, exp_avgs: Tensors, extras: Tensors, steps: Tensors, found_inf: Tensor,
    inv_scale: Factor, lr: Factor, *, beta1: float, beta2: float, weight_decay: float = 0.0, maximize: bool = False,
    write_back: str = "nearest", seed: int = 0, unscale_grads: bool = False, grad_norm: Factor = 1.0,
    max_norm: float = -1.0, exp_avg_scales: Tensors = (), skips: Tensors = (), stochastic_state: bool = False,
    numbers: Tensor = NO_NUMBERS
) -> None: ...  # fmt: skip
def muon(
    grads: Tensors, params: Tensors, momentum_buffers: Tensors, extras: Tensors, steps: Tensors, found_inf: Tensor,
    inv_scale: Factor, lr: Factor, *, momentum: float, nesterov: bool = True, maximize: bool = False,
    write_back: str = "nearest", seed: int = 0, unscale_grads: bool = False, grad_norm: Factor = 1.0,
    max_norm: float = -1.0, momentum_buffer_scales: Tensors = (), skips: Tensors = (), stochastic_state: bool = False,
    numbers: Tensor = NO_NUMBERS
) -> None: ...  # fmt: skip
def lamb(
    grads: Tensors, params: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, extras: Tensors, steps: Tensors,
    found_inf: Tensor, inv_scale: Factor, lr: Factor, global_grad_norm: Factor, *, beta1: float, beta2: float,
    eps: float, weight_decay: float, max_grad_norm: float = 0.0, bias_correction: bool = True, adam_w_mode: bool = True,
    grad_averaging: bool = True, use_nvlamb: bool = False, maximize: bool = False, write_back: str = "nearest",
    seed: int = 0, unscale_grads: bool = False, grad_norm: Factor = 1.0, max_norm: float = -1.0,
    exp_avg_scales: Tensors = (), exp_avg_sq_scales: Tensors = (), skips: Tensors = (), stochastic_state: bool = False,
    numbers: Tensor = NO_NUMBERS
) -> None: ...  # fmt: skip
def novograd(
    grads: Tensors, params: Tensors, exp_avgs: Tensors, extras: Tensors, exp_avg_sqs: Tensors, steps: Tensors,
    found_inf: Tensor, inv_scale: Factor, lr: Factor, *, beta1: float, beta2: float, eps: float, weight_decay: float,
    bias_correction: bool = True, grad_averaging: bool = True, reg_inside_moment: bool = False, inf_norm: bool = False,
    init_zero: bool = False, maximize: bool = False, write_back: str = "nearest", seed: int = 0,
    unscale_grads: bool = False, grad_norm: Factor = 1.0, max_norm: float = -1.0, exp_avg_scales: Tensors = (),
    skips: Tensors = (), stochastic_state: bool = False, numbers: Tensor = NO_NUMBERS
) -> None: ...  # fmt: skip
def larc(
    grads: Tensors, params: Tensors, found_inf: Tensor, inv_scale: Factor, lr: Factor, *,
    trust_coefficient: float = 0.02, eps: float = 1e-08, weight_decay: float = 0.0, clip: bool = True,
    maximize: bool = False
) -> None: ...  # fmt: skip
