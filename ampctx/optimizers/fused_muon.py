"""Muon for matrices, and AdamW for the other parameters, in one optimizer."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from ampctx._collectives import named_collective
from ampctx._errors import AmpTypeError, AmpValueError
from ampctx._saved import plain
from ampctx.casts.arguments import autocast_off
from ampctx.kernels.foreach import PerDevice
from ampctx.kernels.grouping import stacks
from ampctx.kernels.reference import KERNEL_DTYPES
from ampctx.kernels.sharding import by_layout, grids_of, is_sharded, local
from ampctx.optimizers import _options, _work, layerwise
from ampctx.optimizers._base import FusedOptimizer, SharedOptions
from ampctx.optimizers._checkpoint import SavedGroup
from ampctx.optimizers._options import Group, check_finite, check_flag, check_number, param_name
from ampctx.optimizers._work import Work
from ampctx.optimizers.fused_adam import compare_decay
from ampctx.weights.step import Step

# The bf16 elements of a stack: 64 MiB. Larger ones would only take more memory.
MOST_ELEMENTS = 2**25

Orthogonalize = Callable[[Tensor], Tensor]


class FusedMuon(FusedOptimizer):
    """Implements Muon (Jordan et al. 2024) as torch.optim.Muon does, and AdamW for groups with ``use_muon=False``. No
    host sync in ``step``.

    ``ampctx.optimizer_ops.muon`` averages the gradients of matrices of one shape, torch multiplies them in bf16 until
    they are orthogonal, and ``w -= lr (weight_decay w + adjustment O)``. State of each parameter, fp32: ``step`` and
    ``momentum_buffer``, or AdamW's. Checkpoints have the format of torch.optim.Muon, and of AdamW.

    Args:
        params: parameters or groups, on any mix of devices and dtypes. In groups with ``use_muon=True``, the default,
            parameters are (rows, columns) or (experts, rows, columns). Embeddings, the last layer, norms and biases go
            into groups with ``use_muon=False``. These have ``betas``, (0.9, 0.999) by default, ``eps``, 1e-8 by
            default, ``amsgrad`` and ``bias_correction`` of FusedAdam, and lr and weight_decay of the constructor.
        lr: a number >= 0, or a one-element tensor.
        weight_decay: decoupled.
        momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in torch.optim.Muon.
        orthogonalize: replaces the iterations: takes a bf16 tensor (k, m, n) of k matrices, returns the result in that
            shape. ``ns_coefficients``, ``eps`` and ``ns_steps`` have no effect then. None by default.
        state_dtype: a dict may have the state of both kinds of groups.
        set_grad_none, and shared keywords: see ``FusedOptimizer``.

    Raises:
        AmpValueError, AmpTypeError: an invalid argument, or a parameter that is no matrix or tensor parallel, by name.
    """

    _op = "muon"
    _ops = ("muon", "adam")
    _of_matrices = ("weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    _defaults = ("lr", *_of_matrices, "use_muon")
    # Groups of AdamW have its decoupled decay.
    adam_w_mode = 1
    _adamw: ClassVar[Group] = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "bias_correction": True}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        orthogonalize: Orthogonalize | None = None,
        set_grad_none: bool = True,
        **shared: Unpack[SharedOptions],
    ) -> None:
        if orthogonalize is not None and not callable(orthogonalize):
            raise AmpTypeError(f"orthogonalize must be a function of a tensor, got {type(orthogonalize).__name__}")
        self.orthogonalize = orthogonalize
        super().__init__(params, {**locals(), "use_muon": True})

    # --- groups -------------------------------------------------------------------------------------------------------

    def _op_of(self, group: Group) -> str:
        return "muon" if group["use_muon"] else "adam"

    def _flags(self, group: Group) -> tuple[str, ...]:
        return "use_muon", *super()._flags(group)

    def add_param_group(self, param_group: Group) -> None:
        """Adds a param group, as in torch. Invalid options or parameters raise, and nothing is added. May be a host
        sync: reads tensors among the options."""
        if isinstance(param_group, dict) and not check_flag("use_muon", param_group.get("use_muon", True)):
            for name, default in self._adamw.items():
                param_group.setdefault(name, default)
        super().add_param_group(param_group)

    def _check_options(self, group: Group) -> None:
        group["use_muon"] = check_flag("use_muon", group["use_muon"])
        super()._check_options(group)
        if not group["use_muon"]:
            return
        for name in ("weight_decay", "eps"):
            group[name] = check_number(name, group[name])
        given = group["ns_coefficients"]
        if isinstance(given, (str, bytes)) or not hasattr(given, "__len__") or len(given) != 3:
            raise AmpTypeError(f"ns_coefficients must be three numbers, got {given!r}")
        group["ns_coefficients"] = tuple(float(check_finite(f"ns_coefficients[{i}]", x)) for i, x in enumerate(given))
        steps = group["ns_steps"] = plain(group["ns_steps"])
        if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < 100:
            raise AmpValueError(f"ns_steps is {steps!r}, expected an int from 0 to 99")
        _options.check_choice("adjust_lr_fn", group["adjust_lr_fn"], (None, "original", "match_rms_adamw"))

    def _check_param(self, g: int, i: int, p: Tensor) -> None:
        super()._check_param(g, i, p)
        if self.param_groups[g]["use_muon"]:
            check_matrix(param_name(self.param_groups, g, i), p)

    # --- the step -----------------------------------------------------------------------------------------------------

    def _new_works(self, step: Step) -> list[Work]:
        """The calls, with those of Muon cut into one for each stack."""
        works: list[Work] = []
        for work in super()._new_works(step):
            if not work.group["use_muon"]:
                works.append(work)
                continue
            kinds = [(*p.shape[-2:], has_split_matrices(p)) for p in work.members]
            works += work.parts(kinds, MOST_ELEMENTS)
        return works

    def _launch(self, work: Work, step: Step, norm: PerDevice | None) -> None:
        if not work.group["use_muon"]:
            super()._launch(work, step, norm)
            return
        arguments = self._arguments(work, step)
        self._descend(work, arguments, self._orthogonalized(work.group, self._directions(work, arguments)))

    def _directions(self, work: Work, arguments: dict[str, Any]) -> list[Tensor]:
        """Averages the gradients, and returns the directions in bf16: zeros if the step is skipped."""
        found = [torch.zeros_like(p, dtype=torch.bfloat16, requires_grad=False) for p in work.lists["params"]]
        # A copy: ``_descend`` advances the counts, from which both calls draw random bits.
        steps = list(torch.stack([step.reshape(()) for step in work.lists["steps"]]).unbind())
        lists = {**work.lists, "params": found, "extras": [], "steps": steps}
        _work.call("muon", work._replace(kind=("nearest", *work.kind[1:]), lists=lists), arguments)
        return found

    def _orthogonalized(self, group: Group, directions: Sequence[Tensor]) -> list[Tensor]:
        """Orthogonalises directions (m, n) or (experts, m, n) of one shape, in stacks of at most ``MOST_ELEMENTS``."""
        function = self.orthogonalize
        if function is None:
            steps, eps = group["ns_steps"], group["eps"]
            function = partial(newton_schulz, coefficients=group["ns_coefficients"], steps=steps, eps=eps)
        # O1 and O4 leave autocast on between forward passes.
        with autocast_off():
            stack = torch.cat([u.reshape(-1, *u.shape[-2:]) for u in directions])
            if not stack.numel():
                return list(directions)
            parts = stack.split(max(1, MOST_ELEMENTS // stack[0].numel()))
            results = [_checked(function(part), part) for part in parts]
            result = results[0] if len(results) == 1 else torch.cat(results)
        counts = [math.prod(u.shape[:-2]) for u in directions]
        return [o.reshape(u.shape) for o, u in zip(result.split(counts), directions, strict=True)]

    def _descend(self, work: Work, arguments: dict[str, Any], updates: Sequence[Tensor]) -> None:
        moves = [_work.in_layout_of(p, update) for p, update in zip(work.lists["params"], updates, strict=True)]
        # As in torch.optim.Muon: Jordan et al. (2024), or Liu et al. (2025).
        rows, columns = work.members[0].shape[-2:]
        factor = math.sqrt(max(1.0, rows / max(columns, 1)))
        if work.group["adjust_lr_fn"] == "match_rms_adamw":
            factor = 0.2 * math.sqrt(max(rows, columns))
        layerwise.take_step(work, moves, arguments, inv_scale=factor, weight_decay=work.group["weight_decay"])

    def _split_step(self, works: Sequence[Work], step: Step) -> None:
        """A step where ranks hold parts of matrices. One all_gather for each stack of these, in bf16: each rank
        orthogonalises all of them, and takes its rows."""
        directions: dict[Tensor, Tensor] = {}
        calls = []
        for work in works:
            if work.group["use_muon"] and has_split_matrices(work.members[0]):
                arguments = self._arguments(work, step)
                directions.update(zip(work.members, self._directions(work, arguments), strict=True))
                calls.append((work, arguments))
            else:
                self._launch(work, step, None)
        for group in self.param_groups:
            if group["use_muon"]:
                # A parameter without gradient on this rank takes part: another rank may have one.
                members = [p for p in group["params"] if has_split_matrices(p) and (p in directions or p.requires_grad)]
                for placed, found in by_layout(members).items():
                    alike = [members[i] for i in found]
                    for places in stacks(((p.shape, p.numel()) for p in alike), MOST_ELEMENTS):
                        with autocast_off():
                            self._orthogonalize_rows(group, placed, [alike[i] for i in places], directions)
        for work, arguments in calls:
            self._descend(work, arguments, [directions[p] for p in work.members])

    def _orthogonalize_rows(
        self, group: Group, placed: Any, params: Sequence[Tensor], directions: dict[Tensor, Tensor]
    ) -> None:
        """Replaces the directions of the rank's rows of ``params``, of one shape. ``placed``: mesh and placements."""
        tensor, (mesh, placements) = sys.modules["torch.distributed.tensor"], placed
        own = [
            directions[p] if p in directions else torch.zeros_like(local([p])[0], dtype=torch.bfloat16) for p in params
        ]
        stacked = [tensor.Replicate() if each.is_replicate() else tensor.Shard(1) for each in placements]
        shape = torch.Size((len(params), *params[0].shape))
        strides = torch.empty(shape, device="meta").stride()
        rows = tensor.DTensor.from_local(torch.stack(own), mesh, stacked, run_check=False, shape=shape, stride=strides)
        call = f"{type(self).__name__}.step()"
        with named_collective(call, grids_of(params)[mesh].groups[0], f"{len(params)} of the matrices to gather"):
            whole = rows.full_tensor()
        if not any(p in directions for p in params):
            return
        updates = torch.stack(self._orthogonalized(group, whole.unbind()))
        everywhere = [tensor.Replicate()] * mesh.ndim
        gathered = tensor.DTensor.from_local(updates, mesh, everywhere, run_check=False)
        mine = gathered.redistribute(mesh, stacked).to_local()
        directions.update(zip(params, mine.unbind(), strict=True))

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _saved_options(self, group: Group) -> Sequence[str]:
        muon = ("weight_decay", "ns_coefficients", "eps", "ns_steps") if group["use_muon"] else ()
        return *super()._saved_options(group), *muon

    def _adapt_checkpoint(self, group: SavedGroup) -> None:
        saved, own = group.saved, group.own["use_muon"]
        if check_flag("use_muon", saved.setdefault("use_muon", own)) != own:
            raise AmpValueError(
                f"a param group of the checkpoint has use_muon={not own}, and the optimizer's group has use_muon={own}."
            )
        if not own:
            compare_decay(group, True, "groups with use_muon=False step by AdamW", "Save it from AdamW")
            for name in ("amsgrad", "bias_correction"):
                saved.setdefault(name, group.own[name])


# --- the orthogonalisation --------------------------------------------------------------------------------------------


def newton_schulz(stack: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Orthogonalises each matrix of a bf16 stack (k, m, n): U V' of its U S V', with singular values near 1.

    The quintic iteration of Jordan et al. (2024), as in torch.optim.Muon: x / max(norm, eps), divided in fp32, then
    ``steps`` times ``a x + (b A + c A A) x`` with A = x x' in bf16. Tall matrices are transposed. No host sync.
    """
    a, b, c = coefficients
    is_tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if is_tall else stack
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = (x / norms.clamp(min=eps)).to(stack.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _checked(result: Any, part: Tensor) -> Tensor:
    if not isinstance(result, Tensor):
        raise AmpTypeError(f"orthogonalize returned a {type(result).__name__}, expected a tensor")
    if result.shape != part.shape or result.device != part.device or result.dtype not in KERNEL_DTYPES:
        raise AmpValueError(
            f"orthogonalize returned shape {tuple(result.shape)} of {result.dtype} on {result.device}, expected a "
            f"floating tensor of shape {tuple(part.shape)} on {part.device}. Momenta have advanced: load a checkpoint."
        )
    return result


def _sharding(p: Any) -> list[Any]:
    """The placements that split a DTensor over several ranks."""
    if not is_sharded(p):
        return []
    sizes = [group.size() for group in p.device_mesh.get_all_groups()]
    return [each for each, size in zip(p.placements, sizes, strict=True) if size > 1 and not each.is_replicate()]


def has_split_matrices(p: Tensor) -> bool:
    """Whether ranks hold parts of the matrices. ``fully_shard`` splits a stack of experts between its matrices."""
    return p.dim() == 2 and bool(_sharding(p))


def check_matrix(name: str, p: Tensor) -> None:
    """Raises AmpValueError for a parameter that Muon cannot step, by its name."""
    if p.dim() not in (2, 3):
        raise AmpValueError(
            f"FusedMuon orthogonalises matrices, and {name} has shape {tuple(p.shape)}, expected (rows, columns) or "
            "(experts, rows, columns). Put it into a group with use_muon=False, which AdamW steps."
        )
    sharding = _sharding(p)
    if len(sharding) > 1 or any(not placement.is_shard(0) for placement in sharding):
        raise AmpValueError(
            f"FusedMuon steps DTensors that fully_shard splits along dimension 0, and {name} has placements "
            f"{tuple(p.placements)}. Put tensor-parallel parameters into a group with use_muon=False, "  # type: ignore[attr-defined]
            "which AdamW steps."
        )
