"""One declaration per optimizer op. Must not import torch, because the build reads this file without it.

Schemas, fakes, checks and typed calls come from it, and the state keys and numbers of the optimizer classes.
``csrc/generate.py`` writes the C++ side and ``steps.py``. Written by hand: the arithmetic (``csrc/functors/<op>.h``,
``reference_steps``), the class, and the entry points of LAMB (which walks elements more than once).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from inspect import cleandoc
from textwrap import indent
from typing import Any


@dataclass(frozen=True)
class Number:
    """A hyperparameter, "float" or "bool". Without ``default`` the typed call requires it.

    ``of``: where a fused optimizer has its value: an attribute; the option of a group and an index; or a function of
    (optimizer, group). By default it is ``group[name]``. ``checked``: a float must be at least 0.
    """

    name: str
    type: str = "float"
    default: float | bool | None = None
    of: str | tuple[str, int] | Callable[[Any, Any], Any] = ""
    checked: bool = True


@dataclass(frozen=True)
class State:
    """A state list and its key in the optimizer's state. ``if_set``: empty unless ``group[if_set]`` is true.

    ``code``: the 8-bit code that may hold it (``ampctx.kernels.codes``), "signed" or "unsigned"; none by default.
    """

    name: str
    key: str
    if_set: str = ""
    one_element: bool = False  # one 0-d fp32 tensor per parameter
    code: str = ""

    @cached_property
    def codes_key(self) -> str:
        """Its key where it is kept in codes."""
        return f"{self.key}_codes"

    @cached_property
    def scales(self) -> str:
        """The list with the scales of codes, and its key. Empty for state that is no codes."""
        return f"{self.key}_scales"


# The last arguments of every step.
END = {"maximize": "bool", "write_back": "int", "seed": "int", "max_norm": "float", "stochastic_state": "bool"}


class OpSpec:
    """An optimizer op: a subclass declares it by its own name in lower case, and documents its typed call.

    Declared:
        functors: the C++ functors that step an element, one per possible number of state lists.
        factors: more arguments that are a number or a one-element tensor.

    Derived:
        op, unscaling_op: their names; the second also stores the unscaled gradients. ops: both.
        sized, one_element: state lists with tensors of the parameters' size, and of one element. coded: those that may
            hold 8-bit codes.
        lists, tensors: the arguments: lists, and single tensors after them. values: all after the lists, in order.
        columns: the numbers in which tensors of a call may differ, as in its table.
    """

    numbers: tuple[Number, ...]
    states: tuple[State, ...] = ()
    functors: tuple[str, ...] = ()
    factors: tuple[str, ...] = ()
    elementwise = True
    name: str
    op: str
    unscaling_op: str
    ops: tuple[str, str]
    sized: tuple[State, ...]
    one_element: tuple[State, ...]
    coded: tuple[State, ...]
    lists: tuple[str, ...]
    tensors: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[str, ...]

    def __init_subclass__(cls) -> None:
        cls.name, states = cls.__name__.lower(), (*cls.states, State("steps", "step", one_element=True))
        cls.ops = cls.op, cls.unscaling_op = f"multi_tensor_{cls.name}", f"multi_tensor_unscaling_{cls.name}"
        cls.sized, cls.one_element = (tuple(s for s in states if s.one_element is alone) for alone in (False, True))
        cls.coded = tuple(state for state in states if state.code)
        sized, alone = ([state.name for state in some] for some in (cls.sized, cls.one_element))
        cls.lists = ("grads", "params", *sized, "extras", *alone, *(state.scales for state in cls.coded), "skips")
        cls.tensors = ("found_inf", "inv_scale", "lr", *cls.factors, "grad_norm", "numbers", "table", "rows")
        cls.columns = ("lr", *(number.name for number in cls.numbers if number.type == "float"))
        cls.values = (*cls.tensors, *(number.name for number in cls.numbers), *END)

    @property
    def doc(self) -> str:
        """The docstring of the typed call, with the indentation of its body."""
        return indent(cleandoc(self.__doc__ or ""), "    ").lstrip()

    @property
    def schemas(self) -> list[str]:
        return [self._schema(self.op, "grads"), self._schema(self.unscaling_op, "")]

    def _schema(self, op: str, reads: str) -> str:
        """``reads``: the list that the op does not write."""
        letters = iter("abcdefghijk")
        lists = [f"Tensor[] {name}" if name == reads else f"Tensor({next(letters)}!)[] {name}" for name in self.lists]
        end = [f"{type} {name}" for name, type in END.items()]
        numbers = [f"{number.type} {number.name}" for number in self.numbers]
        return f"{op}({', '.join([*lists, *(f'Tensor {t}' for t in self.tensors), *numbers, *end])}) -> ()"


BETAS = (Number("beta1", of=("betas", 0)), Number("beta2", of=("betas", 1)))
EPS, WEIGHT_DECAY = Number("eps"), Number("weight_decay")
NO_DECAY = Number("weight_decay", default=0.0)
BIAS_CORRECTION = Number("bias_correction", "bool", True)
ADAM_W_MODE = Number("adam_w_mode", "bool", True, of="adam_w_mode")
GRAD_AVERAGING = Number("grad_averaging", "bool", True)
EXP_AVG = State("exp_avgs", "exp_avg", code="signed")
EXP_AVG_SQ = State("exp_avg_sqs", "exp_avg_sq", code="unsigned")


class Adam(OpSpec):
    """Adam; with decoupled weight decay in ``adam_w_mode``; AMSGrad where ``max_exp_avg_sqs`` is not empty.

    m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,  u = (m / c1) / (sqrt(v / c2) + eps),
    p -= lr (u + weight_decay p), with c = 1 - beta^step, or 1 without ``bias_correction``. Without ``adam_w_mode``
    weight decay adds weight_decay p to g instead. No host sync."""

    numbers = (*BETAS, EPS, WEIGHT_DECAY, BIAS_CORRECTION, ADAM_W_MODE)
    states = (EXP_AVG, EXP_AVG_SQ, State("max_exp_avg_sqs", "max_exp_avg_sq", if_set="amsgrad"))
    functors = ("Adam<T, false>", "Adam<T, true>")


class Sgd(OpSpec):
    """SGD: p -= lr b, or p -= lr (g + momentum b) with ``nesterov``.

    b = momentum b + (1 - dampening) g; at step count 0, b = g. Without momentum ``momentum_buffers`` is empty. Weight
    decay adds weight_decay p to g, or with ``wd_after_momentum`` to the factor of lr. No host sync."""

    numbers = (
        *(Number("momentum", default=0.0), Number("dampening", default=0.0, checked=False), NO_DECAY),
        Number("nesterov", "bool", False),
        Number("wd_after_momentum", "bool", False, of="wd_after_momentum"),
    )
    states = (State("momentum_buffers", "momentum_buffer", if_set="momentum", code="signed"),)
    functors = ("Sgd<T, false>", "Sgd<T, true>")


class Adagrad(OpSpec):
    """Adagrad: h += g^2, p -= lr g / (sqrt(h) + eps); weight decay through g, or decoupled in ``adagrad_w_mode``.

    No host sync."""

    numbers = (EPS, NO_DECAY, Number("adagrad_w_mode", "bool", False, of="adagrad_w_mode"))
    states = (State("sums", "sum"),)
    functors = ("Adagrad<T>",)


class Lion(OpSpec):
    """Lion: u = sign(beta1 m + (1 - beta1) g), then m = beta2 m + (1 - beta2) g; p -= lr (u + weight_decay p). No
    host sync."""

    numbers = (*BETAS, NO_DECAY)
    states = (EXP_AVG,)
    functors = ("Lion<T>",)


class Muon(OpSpec):
    """The average of Muon, which comes before the orthogonalisation: ``params`` become the directions u.

    m = m + (1 - momentum) (g - m), then u = g + momentum (m - g) with ``nesterov``, else u = m. Reads neither lr nor
    the former ``params``. The step of the weights is that of ``sgd``. No host sync."""

    numbers = (Number("momentum"), Number("nesterov", "bool", True))
    states = (State("momentum_buffers", "momentum_buffer", code="signed"),)
    functors = ("Muon<T>",)


class Lamb(OpSpec):
    """LAMB: p -= lr ||p|| / ||u|| u, with Adam's direction u (plus weight_decay p in ``adam_w_mode``).

    The ratio is per tensor. It is 1 if a norm is 0, and without weight decay unless ``use_nvlamb``. Gradients are first
    scaled down to ``max_grad_norm`` if ``global_grad_norm``, the norm of all unscaled gradients, exceeds it (0: never).
    Without ``grad_averaging``, m = beta1 m + g. No host sync."""

    numbers = (
        *(*BETAS, EPS, WEIGHT_DECAY),
        Number("max_grad_norm", default=0.0, of=lambda _, group: group["max_grad_norm"] or 0.0),
        *(BIAS_CORRECTION, ADAM_W_MODE, GRAD_AVERAGING),
        Number("use_nvlamb", "bool", False, of="use_nvlamb"),
    )
    states = (EXP_AVG, EXP_AVG_SQ)
    factors = ("global_grad_norm",)
    elementwise = False


class Novograd(OpSpec):
    """No op of its own: norms, and two calls of ``sgd``. Its state and its numbers."""

    numbers = (
        *(*BETAS, EPS, WEIGHT_DECAY, BIAS_CORRECTION, GRAD_AVERAGING),
        Number("reg_inside_moment", "bool", False, of=lambda self, _: self.moment_mode == 0),
        Number("inf_norm", "bool", False, of=lambda _, group: group["norm_type"] == 0),
        Number("init_zero", "bool", False),
    )
    states = (EXP_AVG, State("exp_avg_sqs", "exp_avg_sq", one_element=True))


SPECS: dict[str, OpSpec] = {spec.name: spec for spec in (Adam(), Sgd(), Adagrad(), Lion(), Muon(), Lamb())}
# The optimizers, by those names, and the one that has no op of its own.
OPTIMIZERS = SPECS | {"novograd": Novograd()}
