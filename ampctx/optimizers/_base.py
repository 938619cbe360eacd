"""The base of the fused optimizers. A step calls the op once for each (group, device, dtypes, write back).

A step needs no host sync. What it is given, and the op calls, are in ``ampctx.optimizers._work``.

With ``master_weights``, ``state[p]`` of a 16-bit parameter holds ``master_param``, or ``remainder``: the 16 bits that a
bf16 weight lacks of fp32. The first step creates it, so that it includes an earlier broadcast of the weights.
``amp.initialize(master_weights="split")`` creates the remainders of the weights that it casts.

With ``state_dtype`` a state is kept in fewer bits, see ``_state_types``. Its random bits, and those of the "stochastic"
write back, belong to the parameter: its number in all groups and its step count choose them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor

from ampctx._compiling import without_grad
from ampctx._errors import AmpError, AmpTypeError, AmpValueError
from ampctx._plan import PLANS
from ampctx.kernels.foreach import Clipped, Factor, PerDevice, product
from ampctx.kernels.reference import KERNEL_DTYPES
from ampctx.kernels.reference_steps import LOW_PRECISION
from ampctx.kernels.sharding import place_grads, wrote
from ampctx.kernels.spec import SPECS
from ampctx.kernels.steps import OPTIONS
from ampctx.kernels.tensor_loops import version_of
from ampctx.optimizers import _checkpoint, _hooks, _options, _state_types, _work, layerwise
from ampctx.optimizers._offload import Offload
from ampctx.optimizers._options import Group, check_choice, param_name
from ampctx.optimizers._saving import Saved
from ampctx.optimizers._state import EXTRAS, State, follow, joined, make_state
from ampctx.optimizers._state_types import Forms
from ampctx.optimizers._work import Kind, Members, Plan, Scaling, Work
from ampctx.weights.pending import clear_grads
from ampctx.weights.step import Given


class CommonOptions(TypedDict, total=False):
    """Keywords that most of the classes take. ``FusedOptimizer`` explains them."""

    maximize: bool
    write_back: str
    seed: int
    state_dtype: Any
    min_8bit_size: int
    offload: str | None


class SharedOptions(CommonOptions, total=False):
    master_weights: bool | str
    capturable: bool


_DEFAULTS = {"maximize": False, "write_back": "nearest", "seed": 0, "state_dtype": torch.float32, "min_8bit_size": 4096}
_DEFAULTS |= {"offload": None, "master_weights": False, "capturable": False, "set_grad_none": True}


class FusedOptimizer(Saved):
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
        offload: "cpu" keeps weights, masters and state in host memory and steps there, with the bits of the optimizer
            without it; ``step`` waits for the device. None, the default, steps where the parameters are. Not with
            ``capturable``.

    Raises:
        AmpValueError, AmpTypeError: an invalid argument or parameter, by name; too little host memory for ``offload``.
        AmpError: a DTensor with ``offload``.
    """

    _step_supports_amp_scaling = True
    _op: str
    # That op, and others that some groups step by.
    _ops: ClassVar[tuple[str, ...]]
    # The op's lists of one-element state -> the key in the state.
    _one_element: ClassVar[dict[str, str]]
    _initial_step = 0
    # The step by norms or matrices of which ranks hold parts: (optimizer, calls, scaling).
    _split_step: Callable[..., None] | None = None
    # Whether a group has a parameter twice.
    _has_repeats = False
    # torch calls it for each class that has instances.
    profile_hook_step = staticmethod(_hooks.profile_hook_step)  # type: ignore[assignment]
    # The arguments of ``__init__`` that are group options, and the shared options that it does not take.
    _defaults: ClassVar[tuple[str, ...]]
    _refused: ClassVar[tuple[str, ...]] = ()
    # Of ``Offload``, whose host optimizer splits its op calls.
    offload: str | None = None
    _call_elements: int | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_op" in vars(cls):
            cls._one_element = {state.name: state.key for state in reversed(SPECS[cls._op].one_element)}
            cls._ops = vars(cls).get("_ops", (cls._op,))
        elif "step" in vars(cls) and "_step_supports_amp_scaling" not in vars(cls):
            # A step that a program wrote without ``given`` does not read found_inf. amp unscales and skips.
            cls._step_supports_amp_scaling = "given" in inspect.signature(cls.step).parameters

    def __init__(self, params: Any, given: Group) -> None:
        for name in given["shared"]:
            if name in self._refused or name not in SharedOptions.__optional_keys__:
                raise AmpTypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument {name!r}")
        if given.get("amsgrad") and "amsgrad" not in self._defaults:
            raise AmpError(f"{type(self).__name__} does not support the AMSGrad variant. Use FusedAdam, which does.")
        options = {**_DEFAULTS, **given, **given["shared"]}
        self.set_grad_none = options["set_grad_none"]
        self.write_back = check_choice("write_back", options["write_back"], ("nearest", "stochastic", "kahan"))
        self.master_weights = check_choice("master_weights", options["master_weights"], (False, True, "split"))
        self.capturable = options["capturable"]
        self.offload = check_choice("offload", options["offload"], (None, "cpu"))
        if self.offload and self.capturable:
            raise AmpValueError("offload='cpu' steps on the CPU, which no CUDA graph captures: pass capturable=False.")
        self._make_offload()
        self._zero_flags: dict[tuple[torch.device, str], Tensor] = {}
        # The version of each weight when it agreed with its entry of EXTRAS.
        self._seen: dict[Tensor, int] = {}
        # The op calls of the latest step, kept for the next one.
        self._plan: Plan | None = None
        # Of op calls, on the devices.
        self._numbers: _work.Numbers = {}
        if self.write_back != "nearest" and self._may_keep_masters():
            raise AmpValueError(
                f"write_back={self.write_back!r} is for 16-bit parameters without masters. With masters, weights are "
                "rounded to nearest. Leave out write_back, or the masters."
            )
        states = _state_types.options_of(options["state_dtype"], options["min_8bit_size"])
        defaults = {name: options[name] for name in (*self._defaults, "maximize", "seed")} | states
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
        group["lr"] = _options.check_lr(group["lr"])
        for number in SPECS[self._op_of(group)].numbers:
            if number.type == "float" and not number.of:
                check = _options.check_number if number.checked else _options.check_finite
                group[number.name] = check(number.name, group[number.name])
            if number.name == "beta1":
                group["betas"] = _options.check_betas(group["betas"])
        for name in self._flags(group):
            group[name] = _options.check_flag(name, group[name])
        group["seed"] = _options.check_seed(group["seed"])
        _state_types.check(type(self).__name__, self._ops, group)

    def _saved_options(self, group: Group) -> Sequence[str]:
        """The options that all versions of torch, apex and ampctx save, besides lr."""
        return _checkpoint.options_of(SPECS[self._op_of(group)])

    def _state_lists(self, group: Group) -> dict[str, str | None]:
        """The op's lists of state of the parameters' size -> the key in the state; None for an empty list."""
        sized = SPECS[self._op_of(group)].sized
        return {state.name: state.key if not state.if_set or group[state.if_set] else None for state in sized}

    def _op_options(self, group: Group) -> dict[str, Any]:
        """The op's numbers, except those of all optimizers."""
        return OPTIONS[self._op_of(group)](self, group)

    def _may_keep_masters(self) -> bool:
        return bool(self.master_weights)

    def _keeps_master(self, p: Tensor) -> bool:
        """Whether a 16-bit parameter has a master."""
        return bool(self.master_weights)

    def _global_norm(self, works: list[Work], scaling: Scaling) -> PerDevice | None:
        """The norm of all gradients for an op that needs it, else None."""
        return None

    def _grad_factor(self) -> Factor:
        """An additional factor for the gradients in ``.grad``."""
        return 1.0

    def _make_offload(self) -> None:
        self._offload = Offload() if self.offload else None

    # --- groups -------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        """Adds a param group, as in torch. Invalid options or parameters raise, and nothing is added. May be a host
        sync: reads tensors among the options."""
        super().add_param_group(param_group)
        g = len(self.param_groups) - 1
        try:
            self._check_group(g)
            if self._offload is not None:
                self._offload.add(self, g)
        except BaseException:
            del self.param_groups[g]
            raise
        group = self.param_groups[g]
        # torch has warned. One op call with the parameter twice would write it twice in parallel.
        self._has_repeats |= len(set(group["params"])) != len(group["params"])
        if self.capturable:
            # A copy: the caller, or other groups, may use the same tensor.
            group["lr"] = _options.lr_tensor(group).detach().clone()

    def _check_group(self, g: int) -> None:
        group = self.param_groups[g]
        self._check_given(group)
        for i, p in enumerate(group["params"]):
            if p.dtype not in KERNEL_DTYPES:
                _options.refuse_dtype(type(self).__name__, param_name(self.param_groups, g, i), p.dtype)
            self._check_param(g, i, p)

    def _check_given(self, group: Group) -> None:
        if group["lr"] is None:
            raise AmpValueError("parameter group didn't specify a value of required optimization parameter lr.")
        self._check_options(group)

    def _check_param(self, g: int, i: int, p: Tensor) -> None:
        if p.dtype == torch.float16 and self.master_weights == "split":
            raise AmpValueError(
                "master_weights='split' keeps the 16 bits that bfloat16 lacks of float32, and "
                f"{param_name(self.param_groups, g, i)} is float16: pass master_weights=True."
            )
        if p.dtype == torch.float64 and _state_types.is_reduced(self.param_groups[g]):
            _state_types.refuse_fp64(self.param_groups[g], param_name(self.param_groups, g, i))

    def _lr_to_tensor(self) -> None:
        """Turns numbers assigned to a group's lr into tensors, with capturable. The former tensor keeps its value, as
        code that changes lr for one step puts that tensor back. No host sync.

        Raises:
            AmpValueError, AmpTypeError: an invalid lr. Nothing has changed then.
        """
        rates = [_options.lr_tensor(group) for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate

    # --- apex's attributes --------------------------------------------------------------------------------------------

    @property
    def _dummy_overflow_buf(self) -> Tensor:
        """apex's name for a flag, int32 of shape (1,), on the device of the first parameter. ``step`` does not use it:
        programs pass it to functions that write into it."""
        first = next((p for group in self.param_groups for p in group["params"]), None)
        return self._zero_flag(torch.device("cpu") if first is None else first.device, "dummy")

    def _zero_flag(self, device: torch.device, use: str = "step") -> Tensor:
        if (device, use) not in self._zero_flags:
            self._zero_flags[device, use] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._zero_flags[device, use]

    @property
    def param_groups_master(self) -> list[dict[str, list[Tensor | None]]]:
        """The fp32 weights, as ``{"params": [...]}`` for each group, with the master (for "split" a copy), or the
        parameter itself if it is not in 16 bits. None for a parameter without master, or before the first step."""
        return [{"params": [self._master_of(p) for p in group["params"]]} for group in self.param_groups]

    def _master_of(self, p: Tensor) -> Tensor | None:
        state = self.state.get(p, {})
        if not self._may_keep_masters():
            return None
        if p.dtype not in LOW_PRECISION:
            return p
        return joined(p, state)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Sets gradients to None or 0, by default as ``set_grad_none`` says. No host sync.

        To None: lazy gradients of masters are dropped, and no fp32 gradient is made of them.
        """
        set_to_none = self.set_grad_none if set_to_none is None else set_to_none
        if set_to_none and not torch.compiler.is_compiling() and not _hooks.may_be_profiled():
            clear_grads([p for group in self.param_groups for p in group["params"]])
        else:
            super().zero_grad(set_to_none)

    # --- the step -----------------------------------------------------------------------------------------------------

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
        return self._step(closure, given)

    @without_grad
    def _step(self, closure: Callable[[], Any] | None, given: Given = None) -> Any:
        """``step`` without the hooks, which torch wraps around the ``step`` of each class."""
        loss = _options.evaluated(closure)
        if self.capturable:
            self._lr_to_tensor()
        scaling = _work.scaling_of(self, self._grad_factor(), given() if callable(given) else given)
        # Every check first, so that an error leaves everything as it was.
        for g, group in enumerate(self.param_groups):
            if isinstance(group["lr"], Tensor):
                _options.check_one_element("lr", group["lr"])
            try:
                _options.check_between_steps(group, self._flags(group))
                _state_types.check(type(self).__name__, self._ops, group)
            except AmpError as error:
                raise _options.in_group(error, f"param_groups[{g}]") from None
        if self._offload is not None:
            self._offload.step(self, scaling)
        else:
            self._apply(scaling)
        return loss

    def _apply(self, scaling: Scaling, after: Callable[[list[Tensor]], None] | None = None) -> None:
        """Steps all parameters that have a gradient. ``after`` gets the parameters of each op call after it."""
        # handles.read_along does not work in graphs, so these always make new lists.
        kept = None if torch.compiler.is_compiling() else self._plan
        works = None if kept is None else kept.works(self, scaling)
        if works is None:
            self._plan, works = None, self._new_works(scaling)
        calls = _work.each_gradient_once(works) if scaling.unscales else works
        if self._split_step is not None and layerwise.any_split(self.param_groups):
            self._split_step(calls, scaling)
        else:
            norm = self._global_norm(works, scaling)
            for work in calls:
                self._launch(work, scaling, norm)
                if after is not None:
                    after(work.members)
        if scaling.unscales:
            _work.finish_unscaling(calls)
        if PLANS and self._plan is None and _work.can_be_kept(works, self.param_groups):
            self._plan = Plan(self, works, scaling)
        if self._plan is not None:
            self._plan.stepped(self._seen)
        else:
            followed = [p for work in works if work.kind[0] in EXTRAS for p in work.members]
            self._seen.update(zip(followed, map(version_of, followed), strict=True))

    def _new_works(self, scaling: Scaling) -> list[Work]:
        members = [self._members(g, scaling) for g in range(len(self.param_groups))]
        works: list[Work] = []
        for group, kinds in zip(self.param_groups, members, strict=True):
            lists = self._state_lists(group)
            for kind, found in kinds.items():
                forms = _state_types.forms_of(SPECS[self._op_of(group)], group, lists, kind[2])
                states = self._states(forms, kind[0], found.params)
                works += _work.works_of(group, kind, found, states, forms, self._one_element, scaling, self._numbers)
        if self._call_elements is not None:
            works = [piece for work in works for piece in _work.pieces(work, self._call_elements, self._numbers)]
        return works

    def _step_by(self, closure: Callable[[], Any] | None, given: Given, grad_scaler: Any = None, **unknown: Any) -> Any:
        """``step`` with the keywords of code for apex: the scaler steps after the closure, so that it checks the
        closure's gradients. With a named parameter, torch's GradScaler would pass itself and warn."""
        if unknown:
            kind = type(self).__name__
            raise AmpTypeError(f"{kind}.step() got an unexpected keyword argument {next(iter(unknown))!r}")
        if grad_scaler is None:
            return self._step(closure, given)
        loss = _options.evaluated(closure)
        grad_scaler.step(self)
        return loss

    def _members(self, g: int, scaling: Scaling) -> dict[Kind, Members]:
        """The parameters of a group with gradients, by kind, after all checks."""
        group = self.param_groups[g]
        lazy_grads = {} if scaling.lazy is None else scaling.lazy.grads
        place_grads(group["params"])
        first = sum(len(group["params"]) for group in self.param_groups[:g])
        strided, found, smallest_coded = torch.strided, {}, _state_types.smallest_coded(group)
        for i, p in _options.places(group["params"]) if self._has_repeats else enumerate(group["params"]):
            # Reading .grad of a master would materialize its lazy gradient.
            grad = lazy_grads.get(p)
            is_lazy = grad is not None
            if grad is None and (grad := p.grad) is None:
                continue
            if grad.layout is not strided:
                _options.refuse_sparse(type(self).__name__, param_name(self.param_groups, g, i))
            self._check_param(g, i, p)
            kind = (self._destination(p, scaling), is_lazy, p.numel() >= smallest_coded)
            if kind not in found:
                found[kind] = Members([], [], [])
            found[kind].params.append(p)
            found[kind].grads.append(grad)
            found[kind].numbers.append(first + i)
        return found

    def _destination(self, p: Tensor, scaling: Scaling) -> str:
        """The destination of a parameter's new value, see ``Kind``."""
        if p in scaling.models:
            return "model"
        if p.dtype not in LOW_PRECISION:
            return "nearest"
        if self._keeps_master(p):
            return "split" if self.master_weights == "split" else "copy"
        return self.write_back

    def layout_of(self, p: Tensor) -> str:
        """Where a step leaves the new value of a 16-bit parameter, see ``Kind``: "copy", "split", "kahan" keep more
        than its 16 bits."""
        return self._destination(p, Scaling())

    def _write_backs(self) -> tuple[Any, ...]:
        """The settings that ``_destination`` depends on, besides the parameter and its model weight."""
        return self.write_back, self.master_weights

    def _states(self, forms: Forms, destination: str, params: list[Tensor]) -> list[State]:
        """The states of parameters. Creates missing entries, converts those of another form, and resyncs masters from
        the weights."""
        needed = self._needed(forms, destination)
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if not _state_types.has_forms(state, forms):
                _state_types.convert(p, state, forms)
            if not needed.keys() <= state.keys():
                self._make_state(p, state, needed)
            if destination in EXTRAS:
                follow(p, state, self._seen)
        return states

    def _needed(self, forms: Forms, destination: str) -> dict[str, torch.dtype | None]:
        """The keys of a state and their dtypes, in the order of checkpoints. None: as ``make_state`` chooses."""
        sized = [key for key in forms.sized.values() if key is not None]
        extra = [EXTRAS[destination]] if destination in EXTRAS else []
        keys = [*self._one_element.values(), *sized, *forms.scales.values(), *extra]
        return {key: _state_types.dtype_of(key, forms) for key in keys}

    def _forms(self, p: Tensor, group: Group) -> Forms:
        """How the state of a parameter is kept."""
        in_codes = p.numel() >= _state_types.smallest_coded(group)
        return _state_types.forms_of(SPECS[self._op_of(group)], group, self._state_lists(group), in_codes)

    @torch.no_grad()
    def first_state(self, p: Tensor, group: Group) -> State:
        """The state of a parameter before its first step. Changes nothing; no collective, no host sync."""
        state: State = {}
        at = p.detach().cpu() if self._offload is not None else p
        self._make_state(at, state, self._needed(self._forms(p, group), self.layout_of(p)))
        return state

    def _make_state(self, p: Tensor, state: dict[str, Any], needed: Mapping[str, torch.dtype | None]) -> None:
        make_state(p, state, needed, self._one_element.values(), self._initial_step)

    @torch.no_grad()
    def masters_follow_model(self) -> None:
        """Resyncs masters, and the compensations of "kahan", from changed model weights, element by element. No host
        sync.

        ``step`` does this after changes that bump the version counter (``load_state_dict``, ``p.copy_()`` under
        no_grad). Call it after a change through ``p.data`` or by another library.
        """
        if self._offload is not None:
            return self._offload.masters_follow_model(self)
        self._seen, self._plan = {}, None
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                if p.dtype in LOW_PRECISION and not state.keys().isdisjoint(EXTRAS.values()):
                    follow(p, state, self._seen)

    def _launch(self, work: Work, scaling: Scaling, norm: PerDevice | None) -> None:
        arguments = self._arguments(work, scaling)
        if norm is not None:
            arguments["global_grad_norm"] = norm.on(work.device)
        _work.call(self._op_of(work.group), work, arguments)
        if work.sharded:
            wrote(work.members)

    def _arguments(self, work: Work, scaling: Scaling) -> dict[str, Any]:
        """What the op of a call is given besides lists. Takes the skip counts for the first call."""
        group, device = work.group, work.device
        inv_scale: Any = scaling.inv_scale
        if work.kind[1] and scaling.lazy is not None:
            inv_scale = product(scaling.lazy.inv_scale, inv_scale)
        found_inf, lr = scaling.found_inf, group["lr"]
        clip: dict[str, Any] = {}
        if isinstance(inv_scale, Clipped):
            clip = {"grad_norm": inv_scale.norm.on(device), "max_norm": inv_scale.max_norm}
            inv_scale = inv_scale.inv_scale
        arguments = {
            **self._op_options(group),
            "found_inf": self._zero_flag(device) if found_inf is None else found_inf.on(device),
            "inv_scale": inv_scale.on(device) if isinstance(inv_scale, PerDevice) else inv_scale,
            "lr": _work.on_device(lr, device) if isinstance(lr, Tensor) else lr,
            "maximize": bool(group["maximize"]),
            "seed": group["seed"],
            "unscale_grads": scaling.unscales and not work.is_lazy,
            **clip,
        }
        if scaling.skips is not None:
            arguments["skips"] = scaling.skips.take(device, work.lists["grads"])
        return arguments
