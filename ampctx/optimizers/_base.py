"""The base of the fused optimizers. A step calls the op once for each (device, dtypes, write back): param groups share
calls where only numbers differ.

A step needs no host sync. What it is given, and the op calls, are in ``ampctx.optimizers._work``.

With ``master_weights``, ``state[p]`` of a 16-bit parameter holds ``master_param``, or ``remainder``: the 16 bits that a
bf16 weight lacks of fp32. The first step creates it, so that it includes an earlier broadcast of the weights.

With ``state_dtype`` a state is kept in fewer bits, see ``_state_types``. Its random bits, and those of the "stochastic"
write back, belong to the parameter: its number in all groups and its step count choose them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypedDict

import torch
from torch import Tensor

from ampctx._data_writes import DataWrites
from ampctx._decorators import may_be_profiled, profile_hook_step, without_grad
from ampctx._errors import AmpError, AmpTypeError, AmpValueError, unexpected
from ampctx.casts.arguments import autocast_off
from ampctx.kernels.foreach import Clipped, PerDevice, product, taken
from ampctx.kernels.ops import is_watched, noted
from ampctx.kernels.plan import marks
from ampctx.kernels.reference import KERNEL_DTYPES
from ampctx.kernels.reference_steps import LOW_PRECISION
from ampctx.kernels.sharding import wrote
from ampctx.kernels.spec import OPTIMIZERS
from ampctx.optimizers import _checkpoint, _guard, _options, _state_types, _work, layerwise
from ampctx.optimizers._checkpoint import SavedGroup
from ampctx.optimizers._guard import Guarded, guard_of
from ampctx.optimizers._options import Group, check_choice, param_name
from ampctx.optimizers._state_types import Forms, State
from ampctx.optimizers._step_plan import StepPlan, step_plan
from ampctx.optimizers._work import Work
from ampctx.weights.pending import clear_grads
from ampctx.weights.step import Given, Step
from ampctx.weights.store import EXTRAS, follow, joined

logger = logging.getLogger("ampctx")
# Attributes that exist only around a step, or that a copy creates again.
TRANSIENT = ("found_inf", "grad_scale", "_zero_flags", "_seen", "_plan", "_numbers", "_data_writes")
MasterWeights = bool | Literal["split"]


class CommonOptions(TypedDict, total=False):
    """Keywords that most of the classes take. ``FusedOptimizer`` explains them."""

    maximize: bool
    write_back: Literal["nearest", "stochastic", "kahan"]
    seed: int
    state_dtype: Any
    min_8bit_size: int
    skip_nonfinite: bool
    skip_norm_above: float | None
    process_group: Any


class SharedOptions(CommonOptions, total=False):
    master_weights: MasterWeights
    capturable: bool


_DEFAULTS = {"maximize": False, "write_back": "nearest", "seed": 0, "state_dtype": torch.float32, "min_8bit_size": 4096}
_DEFAULTS |= {"master_weights": False, "capturable": False, "set_grad_none": True}
_DEFAULTS |= {"skip_nonfinite": False, "skip_norm_above": None, "process_group": None}
# Arguments that are no group options.
_OF_CLASS = (*_guard.OPTIONS, "write_back", "master_weights")


class FusedOptimizer(Guarded, torch.optim.Optimizer):
    """Base of the fused optimizers: options, state, masters, scaling, checkpoints and op calls.

    A subclass names its op (``_op``); the op's spec defines state and options. Each rank steps its part of a DTensor;
    state of that size is a DTensor, too. Optimizers that need norms of whole parameters join them over the ranks, which
    must all step. Steps need no host sync.

    Args:
        params: parameters or groups, on any mix of devices and dtypes.
        lr: a number >= 0, or a one-element tensor. A group option.
        given: the arguments of the subclass by name; ``shared`` has its other keywords: those below.
        set_grad_none: whether ``zero_grad()`` sets gradients to None instead of 0.
        maximize: step along the gradient instead of against it. A group option.
        write_back: rounding of 16-bit parameters without masters: "nearest" (default); "stochastic", up or down with
            probability by distance; "kahan", nearest, with the rounding error kept for the next step.
        seed: for "stochastic", an int, 0 by default. A group option, so checkpoints contain it.
        master_weights: True keeps fp32 masters of 16-bit parameters. "split", for bf16, keeps the 16 bits that the
            weight lacks of fp32 instead. False, the default, keeps none. fp32 parameters need none.
        capturable: makes each group's lr an fp32 tensor on the device of its parameters, so that a captured CUDA graph
            reads changes. LR schedulers and ``load_state_dict`` fill it. A number assigned to ``group["lr"]`` becomes a
            new tensor at the next step.
        state_dtype: how averages are kept: torch.float32, the default; torch.bfloat16; "8bit", codes with a scale for
            each 64 elements; or a dict of these by state name. They are rounded at random, from ``seed``, which is
            right on average. A group option. If you change it, the next step converts the state.
        min_8bit_size: smaller parameters keep fp32 with "8bit"; 4096 elements by default. A group option.
        skip_nonfinite: skip steps whose gradients have inf or nan, or a norm above 1.8e19 (its square leaves fp32),
            without amp and scalers. Nothing is written then. One more read of the gradients, no host sync. Ranks of
            DTensors agree, by one more all_reduce.
        skip_norm_above: skip also steps whose gradients have a larger L2 norm, a number >= 0, now or before
            ``ampctx.clip_grad_norm_`` clipped them: once, by an L2 norm, not compiled. None, the default: any norm.
        process_group: ranks with other parameters, such as stages of a pipeline, which add up their norms and skip
            together. Every rank must step, with or without gradients.

    Raises:
        AmpValueError, AmpTypeError: an invalid argument or parameter, by name.
    """

    _step_supports_amp_scaling = True
    _op: str
    # That op, and others that some groups step by.
    _ops: ClassVar[tuple[str, ...]]
    # The step by norms or matrices of which ranks hold parts: (optimizer, calls, step).
    _split_step: Callable[..., None] | None = None
    # Whether a subclass makes op calls by itself, and whether a group has a parameter twice.
    _has_own_launch = _has_repeats = False
    # torch calls it for each class that has instances.
    profile_hook_step = staticmethod(profile_hook_step)  # type: ignore[assignment]
    # The arguments of ``__init__`` that are group options, and the shared options that it does not take.
    _defaults: ClassVar[tuple[str, ...]]
    _refused: ClassVar[tuple[str, ...]] = ()
    found_inf: Tensor  # a caller sets it, and grad_scale, for a step
    grad_scale: Tensor | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._has_own_launch = cls._launch is not FusedOptimizer._launch
        if "_op" in vars(cls):
            cls._ops = vars(cls).get("_ops", (cls._op,))
        elif "step" in vars(cls) and "_step_supports_amp_scaling" not in vars(cls):
            # A step that a program wrote without ``given`` does not read found_inf. amp unscales and skips.
            cls._step_supports_amp_scaling = "given" in inspect.signature(cls.step).parameters

    def __init__(self, params: Any, given: Group) -> None:
        keywords = SharedOptions.__optional_keys__.difference(self._refused)
        for name in given["shared"].keys() - keywords:
            known = {*given, *keywords}.difference(self._refused, (name, "self", "__class__", "shared"))
            raise unexpected(f"{type(self).__name__}.__init__", name, known)
        if given.get("amsgrad") and "amsgrad" not in self._defaults:
            raise AmpError(f"{type(self).__name__} does not support the AMSGrad variant. Use FusedAdam, which does.")
        options = {**_DEFAULTS, **given, **given["shared"]}
        self.set_grad_none = options["set_grad_none"]
        self.write_back = check_choice("write_back", options["write_back"], ("nearest", "stochastic", "kahan"))
        self.master_weights = check_choice("master_weights", options["master_weights"], (False, True, "split"))
        self.capturable = options["capturable"]
        self._zero_flags: dict[torch.device, Tensor] = {}
        # The marks of each weight when it agreed with its entry of EXTRAS. While there is a plan, it has them.
        self._seen: dict[Tensor, bytes] = {}
        self._data_writes = DataWrites()
        self._plan: StepPlan | None = None
        self._guard = guard_of(type(self).__name__, *(options[name] for name in _guard.OPTIONS))
        # Of op calls, on the devices.
        self._numbers: _work.Numbers = {}
        if self.write_back != "nearest" and self._master_dtypes:
            raise AmpValueError(
                f"write_back={self.write_back!r} is for 16-bit parameters without masters. With masters, weights are "
                "rounded to nearest. Leave out write_back, or the masters."
            )
        defaults = {name: options[name] for name in (*self._defaults, "maximize", "seed")}
        states = {name: options[name] for name in _state_types.DEFAULTS}
        defaults |= states if states != _state_types.DEFAULTS else {}  # groups of fp32 state are torch's
        if defaults["lr"] is not None:
            self._check_options(defaults)
        super().__init__(params, defaults)

    # --- definitions by a subclass or by the spec of its op -----------------------------------------------------------

    def _op_of(self, group: Group) -> str:
        """The op that steps a group."""
        return self._op

    def _flags(self, group: Group) -> tuple[str, ...]:
        """The bool options of a group."""
        return _options.FLAGS[self._op_of(group)]

    def _check_options(self, group: Group) -> None:
        """Checks the options of a group. Tensors among them, except lr, become numbers."""
        # ZeroRedundancyOptimizer puts the arguments of the class into its groups.
        if alone := [name for name in _OF_CLASS if name in group and group[name] != getattr(self, name, None)]:
            raise AmpTypeError(f"{alone[0]} is an argument of {type(self).__name__}, not of a param group.")
        if group["lr"] is None:
            raise AmpValueError("parameter group didn't specify a value of required optimization parameter lr.")
        _options.check_numbers(group, OPTIMIZERS[self._op_of(group)], self._flags(group))
        _state_types.check(type(self).__name__, self._ops, group)

    def _saved_options(self, group: Group) -> Sequence[str]:
        """The options that all versions of torch, apex and ampctx save, besides lr."""
        numbers = OPTIMIZERS[self._op_of(group)].numbers
        betas = ["betas"] if any(number.name == "beta1" for number in numbers) else []
        return betas + [number.name for number in numbers if number.type == "float" and not number.of]

    _op_options = _options.numbers_of

    @property
    def _master_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of parameters with masters."""
        return LOW_PRECISION if self.master_weights else ()

    def _global_norm(self, works: list[Work], step: Step) -> PerDevice | None:
        """The norm of all gradients for an op that needs it, else None."""
        return None

    # --- groups -------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        """Adds a param group, as in torch. Invalid options or parameters raise, and nothing is added. May be a host
        sync: reads tensors among the options."""
        super().add_param_group(param_group)
        g, group = len(self.param_groups) - 1, self.param_groups[-1]
        try:
            self._check_options(group)
            for i, p in enumerate(group["params"]):
                if p.dtype not in KERNEL_DTYPES:
                    _options.refuse_dtype(type(self).__name__, param_name(self.param_groups, g, i), p.dtype)
                self._check_param(g, i, p)
        except BaseException:
            del self.param_groups[g]
            raise
        # torch has warned. One op call with the parameter twice would write it twice in parallel.
        self._has_repeats |= len(set(group["params"])) != len(group["params"])
        if self.capturable:
            # A copy: the caller, or other groups, may use the same tensor.
            group["lr"] = _options.lr_tensor(group).detach().clone()

    def _check_param(self, g: int, i: int, p: Tensor) -> None:
        if p.dtype == torch.float16 and self.master_weights == "split":
            raise AmpValueError(
                "master_weights='split' keeps the 16 bits that bfloat16 lacks of float32, and "
                f"{param_name(self.param_groups, g, i)} is float16: pass master_weights=True."
            )
        if p.dtype == torch.float64 and _state_types.is_reduced(self.param_groups[g]):
            raise AmpValueError(
                f"state_dtype={self.param_groups[g]['state_dtype']!r} does not go with float64 parameters, and "
                f"{param_name(self.param_groups, g, i)} is one. Put it into a group with state_dtype=torch.float32."
            )

    # --- master weights -----------------------------------------------------------------------------------------------

    @property
    def param_groups_master(self) -> list[dict[str, list[Tensor | None]]]:
        """The fp32 weights, as ``{"params": [...]}`` for each group, with the master (for "split" a copy), or the
        parameter itself if it is not in 16 bits. None for a parameter without master, or before the first step."""

        def master_of(p: Tensor) -> Tensor | None:
            return p if p.dtype not in LOW_PRECISION else joined(p, self.state.get(p, {}))

        some = self._master_dtypes
        return [{"params": [master_of(p) if some else None for p in group["params"]]} for group in self.param_groups]

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Sets gradients to None or 0, by default as ``set_grad_none`` says. No host sync.

        To None: pending gradients of masters are dropped, and no fp32 gradient is made of them.
        """
        set_to_none = self.set_grad_none if set_to_none is None else set_to_none
        if set_to_none and not torch.compiler.is_compiling() and not may_be_profiled():
            clear_grads([p for group in self.param_groups for p in group["params"]])
        else:
            super().zero_grad(set_to_none)

    # --- the step -----------------------------------------------------------------------------------------------------

    @without_grad
    def step(self, closure: Callable[[], Any] | None = None, *, given: Given = None) -> Any:
        """Steps every parameter with a gradient, unless the attribute ``found_inf`` is set and not 0. No host sync.

        With an attribute ``grad_scale``, divides the gradients in ``.grad`` by it, in place, like torch's fused
        optimizers. A skipped step leaves them unchanged.

        Args:
            closure: evaluates the model, with gradients enabled. None by default.
            given: what amp gives a step, in place of ``found_inf``; see ``ampctx.weights.step``.

        Returns:
            The result of the closure, else None.

        Raises:
            AmpError: a sparse gradient, by the parameter's name.
            AmpRankError: with norms of DTensors, a collective failed.
            AmpValueError: an fp16 parameter with "split", or an lr, ``found_inf`` or ``grad_scale`` of several
                elements. Nothing has changed then.
        """
        loss = None if closure is None else _options.evaluated(closure)
        if self.capturable:
            _options.lr_to_tensors(self.param_groups)
        step = given() if callable(given) else given
        if step is None or getattr(self, "grad_scale", None) is not None:
            step = _work.given_to(self, step)
        # Options first, so that an error leaves everything as it was. A plan knows those that it has checked.
        if self._plan is None or not self._plan.knows(self):
            self._check_between_steps()
        if self._guard is not None:
            flag = None if step.found_inf is None else step.found_inf.value
            step = step._replace(found_inf=PerDevice(self._guard.check(self, flag)))
        if self.master_weights is True and self._data_writes.is_due() and not is_watched():
            _work.tell_of_data_writes(self)
        if self._plan is None or not self._plan.run(self, step):
            self._apply(step)
        if self._guard is not None:
            self._guard.concluded(self)
        return loss

    def _check_between_steps(self) -> None:
        for g, group in enumerate(self.param_groups):
            try:
                _options.check_between_steps(group, self._flags(group))
                _state_types.check(type(self).__name__, self._ops, group)
            except AmpError as error:
                raise type(error)(f"param_groups[{g}]: {error}") from None
        if self._plan is not None:
            self._plan.renew(self)

    def _apply(self, step: Step) -> None:
        """Steps all parameters that have a gradient, by op calls made anew, and makes the plan of the next step."""
        if self._plan is not None:
            self._seen.update(self._plan.seen())
            self._plan = None
        plan = None
        works = [work.drawing(self._numbers) for work in self._new_works(step)]
        calls = _work.each_gradient_once(works) if step.unscales else works
        if self._split_step is not None and layerwise.any_split(self.param_groups):
            self._split_step(calls, step)
        else:
            with noted() as made:
                norm = self._global_norm(works, step)
                for work in calls:
                    self._launch(work, step, norm)
            if made and not self._has_own_launch:
                plan = step_plan(self, calls, made, step)
        if step.unscales:
            _work.finish_unscaling(calls)
        for work in works:
            if work.kind[0] in EXTRAS:
                self._seen.update((p, marks([p])) for p in work.members)
        self._plan = plan
        if step.wrote is not None and _work.writes_all(works, step):
            step.wrote()

    def _new_works(self, step: Step) -> list[Work]:
        members = _work.members_of(self, step)
        works = [work for (_, kind), found in members.items() for work in _work.works_of(self, kind, found, step)]
        # Not those of parameters that have left.
        self._seen = {p: self._seen[p] for group in self.param_groups for p in group["params"] if p in self._seen}
        return works

    def layout_of(self, p: Tensor) -> str:
        """The destination of the new value of a 16-bit parameter, see ``_work.Kind``: "copy", "split", "kahan" keep
        more than its 16 bits."""
        if p.dtype not in LOW_PRECISION:
            return "nearest"
        if p.dtype in self._master_dtypes:
            return "split" if self.master_weights == "split" else "copy"
        return self.write_back

    def first_state(self, p: Tensor, group: Group) -> State:
        """The state of a parameter before its first step. Changes nothing; no collective, no host sync."""
        return _state_types.first_state(self, p, group)

    def _make_state(self, p: Tensor, state: State, forms: Forms, destination: str) -> None:
        """Creates missing entries."""
        _state_types.make_missing(self, p, state, forms, destination)

    @torch.no_grad()
    def masters_follow_model(self) -> None:
        """Resyncs masters, and the compensations of "kahan", from changed model weights, element by element. No host
        sync.

        ``step`` does this after changes that bump the version counter (``load_state_dict``, ``p.copy_()`` under
        no_grad). Call it after a change through ``p.data`` or by another library.
        """
        self._seen, self._plan = {}, None
        for p in (p for group in self.param_groups for p in group["params"] if p.dtype in LOW_PRECISION):
            follow(p, self.state.get(p, {}), self._seen)

    def _launch(self, work: Work, step: Step, norm: PerDevice | None) -> None:
        _work.call(self._op_of(work.group), work, self._arguments(work, step, norm))
        if work.sharded:
            wrote(work.members)

    def _numbers_of(self, work: Work) -> dict[str, Any]:
        """The numbers of an op call that the options of its groups give."""
        own = {"maximize": bool(work.group["maximize"]), "seed": work.group["seed"]}
        rows = _work.rows_of(self, work) if work.groups else {}
        return {**self._op_options(work.group), **own, **rows}

    def _arguments(self, work: Work, step: Step, norm: PerDevice | None = None) -> dict[str, Any]:
        """The arguments of a call's op besides lists. Takes the skip counts for the first call."""
        return {**self._numbers_of(work), **self._numbers_now(work, step, norm)}

    def _numbers_now(self, work: Work, step: Step, norm: PerDevice | None = None) -> dict[str, Any]:
        """The arguments that each step brings."""
        group, device = work.group, work.device
        inv_scale: Any = step.inv_scale
        if work.kind[1] and step.pending is not None:
            of_pending = step.pending.inv_scale
            inv_scale = of_pending if inv_scale == 1.0 else product(of_pending, inv_scale)
        found_inf, lr = step.found_inf, group["lr"]
        clip: dict[str, Any] = {}
        if isinstance(inv_scale, Clipped):
            clip = {"grad_norm": inv_scale.norm.on(device), "max_norm": inv_scale.max_norm}
            inv_scale = inv_scale.inv_scale
        arguments = {
            "found_inf": self._zero_flag(device) if found_inf is None else found_inf.on(device),
            "inv_scale": inv_scale.on(device) if isinstance(inv_scale, PerDevice) else inv_scale,
            "lr": _work.on_device(lr, device) if isinstance(lr, Tensor) else float(lr),
            "unscale_grads": step.unscales and not work.kind[1],
            **clip,
        }
        if norm is not None:
            arguments["global_grad_norm"] = norm.on(device)
        if step.counts is not None:
            arguments["skips"] = taken(step.counts, device)
        return arguments

    def _zero_flag(self, device: torch.device) -> Tensor:
        if device not in self._zero_flags:
            self._zero_flags[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._zero_flags[device]

    # --- checkpoints and copies ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns state and options, as in torch, with tensors of the optimizer. Host sync with ``skip_nonfinite`` or
        ``skip_norm_above`` alone, for the count.

        With ``state_dtype`` it has bf16 state and 8-bit codes. Codes of a DTensor that is not sharded by rows of whole
        blocks become fp32, which any ranks can load.
        """
        _checkpoint.refuse_strays(self)
        return _checkpoint.saved(self, super().state_dict())

    @autocast_off()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of this class, of the same optimizer of torch.optim, or of apex. May be a host sync.

        Copies the state and keeps it in fp32 for all parameter dtypes, or as ``state_dtype`` says: fp32 of a checkpoint
        is then rounded to nearest. Options come from the checkpoint, as in torch, but for ``state_dtype`` and
        ``min_8bit_size``, which stay.

        Args:
            state_dict: the dict to load.

        Raises:
            ValueError, KeyError: torch's, for a checkpoint of other groups.
            AmpKeyError: a partial state, state of another optimizer or of no parameter, a group without an option, or
                codes without scales.
            AmpValueError: state of another size or dtype, or with invalid values (nan, squares or scales below 0, a
                step that is no count).
            AmpValueError, AmpTypeError: an invalid option.

        All errors name group, parameter and key. Nothing has changed then.
        """
        _checkpoint.load_fused(self, super().load_state_dict, state_dict)

    def _useless_state(self, p: Tensor) -> set[str]:
        """The state keys of a checkpoint that this optimizer never reads for ``p``."""
        return {*EXTRAS.values()} - {EXTRAS.get(self.layout_of(p))}

    def _adapt_checkpoint(self, group: SavedGroup) -> None:
        """Converts the layout of other optimizers' checkpoints: apex has one step count for a group."""
        step = group.saved.pop("step", None)
        for _, _, state in group.states if step is not None else ():
            if state:
                state.setdefault("step", step)

    def __getstate__(self) -> dict[str, Any]:
        return _checkpoint.without_amp(self, *TRANSIENT)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A CUDA graph may read the existing flags, so keep them.
        self.__dict__.setdefault("_zero_flags", {})
        self.__dict__.setdefault("_numbers", {})
        self._seen, self._plan, self._data_writes = {}, None, DataWrites()
        # torch adds this default to every optimizer. Later groups and checkpoints must not get it.
        self.defaults.pop("differentiable", None)
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
