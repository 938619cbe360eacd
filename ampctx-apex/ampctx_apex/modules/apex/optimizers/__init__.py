"""apex.optimizers: the classes of ``ampctx.optimizers``, with the kernels and the flag that apex's instances have."""

from __future__ import annotations

import functools
import importlib
from typing import Any
from weakref import WeakKeyDictionary

import torch
from ampctx_apex.install import at_uninstall
from torch import Tensor

from ampctx import AmpTypeError, AmpValueError, optimizers
from ampctx.spi import LOW_PRECISION, check_option

from ..contrib.optimizers import FP16_Optimizer


class FusedMixedPrecisionLamb(optimizers.FusedLAMB):
    """LAMB with lr and step counts on the device, and fp32 masters for the parameters of one 16-bit dtype.

    Args:
        lr: a number >= 0 or a one-element tensor. Each group gets its own tensor.
        step: the step count of new parameters, an int >= 0.
        reduced_precision_dtype: torch.float16 or torch.bfloat16. Programs may set it later, before the first step;
            masters of a checkpoint that was loaded before stay.
        Others as for ``ampctx.optimizers.FusedLAMB``.
    """

    _refused = ("master_weights",)
    param_groups_full_precision = optimizers.FusedLAMB.param_groups_master

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        if isinstance(step, bool) or not isinstance(step, int):
            raise AmpTypeError(f"step must be an int, the number of steps so far, got {type(step).__name__}")
        self._first_step = int(check_option("step", step))
        self.reduced_precision_dtype = reduced_precision_dtype
        options = (bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode, grad_averaging, True, max_grad_norm)
        super().__init__(params, lr, *options, use_nvlamb, capturable=True)

    @property
    def reduced_precision_dtype(self) -> torch.dtype | None:
        """The dtype of the parameters that have masters."""
        return self._reduced_precision_dtype

    @reduced_precision_dtype.setter
    def reduced_precision_dtype(self, dtype: torch.dtype | None) -> None:
        if dtype not in (None, torch.float32, *LOW_PRECISION):
            raise AmpValueError(f"reduced_precision_dtype is {dtype}, expected torch.float16 or torch.bfloat16")
        self._reduced_precision_dtype = dtype

    @property
    def _master_dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(dtype for dtype in LOW_PRECISION if dtype == self.reduced_precision_dtype)

    def _make_state(self, p: Tensor, state: dict[str, Any], *args: Any) -> None:
        is_new = "step" not in state
        super()._make_state(p, state, *args)
        if is_new:
            state["step"].fill_(self._first_step)

    def _useless_state(self, p: Tensor) -> set[str]:
        # A dtype set after loading may need them.
        kept = {"master_param"} if self.reduced_precision_dtype is None and p.dtype in LOW_PRECISION else set()
        return super()._useless_state(p) - kept


_overflow_bufs: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()


def _dummy_overflow_buf(optimizer: Any) -> Tensor:
    """A flag of one element on the device of the first parameter. ampctx's ``step`` does not use it."""
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
    if optimizer not in _overflow_bufs or _overflow_bufs[optimizer].device != device:
        _overflow_bufs[optimizer] = torch.zeros(1, dtype=torch.int32, device=device)
    return _overflow_bufs[optimizer]


# Programs' subclasses call self.multi_tensor_adam with self._dummy_overflow_buf in a step of their own.
_KERNELS = {
    optimizers.FusedAdam: ("multi_tensor_adam", "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master"),
    optimizers.FusedSGD: ("multi_tensor_sgd",),
    optimizers.FusedLAMB: ("multi_tensor_l2norm", "multi_tensor_lamb"),
    optimizers.FusedNovoGrad: ("multi_tensor_novograd",),
    optimizers.FusedAdagrad: ("multi_tensor_adagrad",),
}


def _add_kernels() -> None:
    amp_C = importlib.import_module("amp_C")
    for kind, names in _KERNELS.items():
        added: dict[str, Any] = {name: staticmethod(getattr(amp_C, name)) for name in names}
        for name, attribute in {**added, "_dummy_overflow_buf": property(_dummy_overflow_buf)}.items():
            setattr(kind, name, attribute)
            at_uninstall(functools.partial(delattr, kind, name))
    for name in _KERNELS[optimizers.FusedLAMB]:
        setattr(FusedMixedPrecisionLamb, name, staticmethod(getattr(amp_C, f"{name}_mp")))


_add_kernels()
