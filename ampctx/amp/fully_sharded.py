"""O2 and O5 under ``fully_shard`` (FSDP2, HSDP).

The fp32 shards are the masters. The mixed-precision policy of each unit casts them for forward and backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ampctx._collectives import is_rank_zero
from ampctx._errors import AmpError, AmpTypeError, AmpValueError, listed, warn
from ampctx.amp.options import PrecisionPolicy, modules_or_classes, resolve
from ampctx.casts.arguments import LOW_PRECISION
from ampctx.casts.casting import modules_in_fp32
from ampctx.casts.fsdp_units import BY_US, Unit, UnknownTorchError, units_of
from ampctx.casts.kept_modules import KeptModules, find_kept
from ampctx.kernels.sharding import is_fully_sharded, is_sharded

# --- before initialize ------------------------------------------------------------------------------------------------


def mixed_precision_policy(opt_level: str, *, reduce_dtype: torch.dtype | None = torch.float32) -> Any:
    """Makes the ``MixedPrecisionPolicy`` of an opt level for torch's ``fully_shard``. No host sync.

    Example::

        fully_shard(layer, mesh=mesh, mp_policy=mixed_precision_policy("O5"))

    Args:
        opt_level: "O2" casts parameters and inputs to fp16, "O5" to bf16. "O0", "O1" and "O4" cast none.
        reduce_dtype: the floating dtype in which ranks sum gradients at "O2" and "O5". None: torch's choice.

    Raises:
        AmpValueError: an unknown level, or "O3", which keeps no fp32 weights.
        AmpTypeError: ``reduce_dtype`` is no floating dtype.
    """
    return _policy(_low_dtype(opt_level), reduce_dtype)


def fully_shard(
    model: nn.Module,
    opt_level: str,
    *,
    mesh: Any = None,
    units: Any = (),
    keep_fp32: Any = (),
    reduce_dtype: torch.dtype | None = torch.float32,
    **options: Any,
) -> nn.Module:
    """Applies torch's ``fully_shard`` with the policy of an opt level. Call it before you make the optimizer.

    At "O2" and "O5", modules that stay in fp32 become units of their own: torch gathers a unit in one dtype.

    Example::

        ampctx.distributed.fully_shard(model, "O5", mesh=mesh, units=[*model.layers])
        optimizer = FusedAdam(model.parameters())
        model, optimizer = amp.initialize(model, optimizer, opt_level="O5")

    Args:
        model: a module with fp32 parameters. Changed in place.
        opt_level: the level to pass to ``amp.initialize``, any but "O3".
        mesh: a ``DeviceMesh`` of one dimension, or of two for HSDP: (replicate, shard). None: all ranks.
        units: modules or module classes, one or several, to gather one at a time. The model itself is always a unit.
        keep_fp32: as in ``amp.initialize``. Pass the same there.
        reduce_dtype: see ``mixed_precision_policy``.
        options: other arguments of torch's ``fully_shard``.

    Returns:
        The model. Collectives and host syncs are torch's. Warns where torch drops a ``grad_dtype`` of parameters.

    Raises:
        AmpTypeError, AmpValueError, AmpError: an invalid argument; an entry that matches no module; the model is
            sharded already; torch 2.11 takes no parametrizations as units. Nothing has changed then.
    """
    if not isinstance(model, nn.Module):
        raise AmpTypeError(f"fully_shard: model must be a torch.nn.Module, got {type(model).__name__}.")
    if "mp_policy" in options:
        raise AmpTypeError("fully_shard: opt_level sets mp_policy. Leave it out, or call torch's fully_shard.")
    if is_fully_sharded(model):
        raise AmpError("fully_shard: the model is sharded already. Call one fully_shard, torch's or ampctx's.")
    low = _low_dtype(opt_level)
    level = resolve(opt_level, keep_fp32=keep_fp32)
    policy = _policy(low, reduce_dtype)
    chosen = {model}
    for unit in modules_or_classes(level, "units", units):
        is_class = isinstance(unit, type)
        if not (found := {m for m in model.modules() if m is unit or (is_class and isinstance(m, unit))}):
            name = (unit if is_class else type(unit)).__name__
            raise AmpValueError(f"fully_shard: units has a {name} that is no module of the model.")
        chosen |= found
    stays, hand_over = set[nn.Module](), set[nn.Module]()
    if low is not None:
        kept = find_kept([model], level.keep_fp32)
        others = modules_in_fp32(model, True) - kept.modules
        inside = {m for p in others if isinstance(p, ParametrizationList) for m in p.modules() if m is not p}
        hand_over = {m for m in (*kept.entries, *(others - inside)) if any(True for _ in m.parameters())} - {model}
        stays = hand_over | kept.modules
    wanted = {name: p.grad_dtype for name, p in model.named_parameters()}  # which torch before 2.15 drops
    from torch.distributed import fsdp

    # Inner units first: an outer one takes the parameters that are left. Before them parametrizations, which torch may
    # refuse.
    inner_first = reversed([m for m in model.modules() if m in chosen or m in hand_over])
    for module in sorted(inner_first, key=lambda m: not isinstance(m, ParametrizationList)):
        if is_fully_sharded(module):
            continue
        output = low if module in hand_over else None
        own = fsdp.MixedPrecisionPolicy(output_dtype=output) if module in stays else policy
        try:
            fsdp.fully_shard(module, mesh=mesh, mp_policy=own, **options)
        except ValueError as error:
            if not isinstance(module, ParametrizationList):
                raise
            raise AmpError(
                f"fully_shard: torch {torch.__version__} takes no parametrization as a unit, and at {opt_level} they "
                "compute in fp32. Pass the modules that have one to keep_fp32, here and to amp.initialize."
            ) from error
        BY_US[module] = own, mesh
    lost = [name for name, p in model.named_parameters() if wanted.get(name, p.grad_dtype) != p.grad_dtype]
    if lost and is_rank_zero():
        warn(
            "fully_shard: torch shards parameters without their grad_dtype, so gradients of "
            f"{listed(lost)} get the dtype of the parameter. reduce_dtype sets the dtype in which ranks sum them."
        )
    return model


def _low_dtype(opt_level: str) -> torch.dtype | None:
    level = resolve(opt_level)
    if level.input_dtype not in LOW_PRECISION:
        return None
    if not level.master_weights:
        raise AmpValueError(f"opt_level {opt_level} keeps no fp32 weights, and shards are fp32. Use O2 or O5.")
    return level.input_dtype


def _policy(low: torch.dtype | None, reduce_dtype: torch.dtype | None) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if reduce_dtype is not None and not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point):
        raise AmpTypeError(f"reduce_dtype is {reduce_dtype!r}, expected a floating torch.dtype or None.")
    return MixedPrecisionPolicy() if low is None else MixedPrecisionPolicy(low, reduce_dtype)


# --- initialize -------------------------------------------------------------------------------------------------------


class Sharded(NamedTuple):
    """A sharded model, whose weights torch casts. ``kept``: fp32 modules that are units, and hand their outputs over
    in 16 bits. ``casts_outputs``: the policy of the model itself has an ``output_dtype``; the
    level's comes after it."""

    kept: list[nn.Module]
    casts_outputs: bool


def checked(model: nn.Module, policy: PrecisionPolicy, kept: KeptModules) -> Sharded | None:
    """Checks the units of a model against the level: AmpError names what does not fit. None if the model has no units,
    or the level does not cast weights to 16 bits, or has to keep masters of none."""
    low = policy.input_dtype
    if low not in LOW_PRECISION:
        return None
    units, outside = units_of(model)
    if not units:
        return None
    wanted = _policy(low, torch.float32)
    if not policy.keeps_masters:
        if all(p.dtype == low for p in model.parameters() if p.is_floating_point()):
            return None  # 16-bit shards: the optimizer keeps what their dtype cannot
        raise _refused(
            f"{policy.opt_level} with master_weights={policy.master_weights!r} does not work "
            "under fully_shard, whose fp32 shards are the masters. Use O2 or O5, and leave master_weights at None."
        )
    if outside:
        raise _in_no_unit(next(iter(outside)), low)
    in_fp32 = modules_in_fp32(model, True, kept.modules)
    if not policy.keep_batchnorm_fp32 and (cast := in_fp32 - modules_in_fp32(model, False, kept.modules)):
        name = next(name for name, module in model.named_modules() if module in cast)
        raise _refused(
            f'keep_batchnorm_fp32=False would cast "{name}", and fully_shard casts no running statistics. Leave it out.'
        )
    keeper = {id(p): module for module in in_fp32 for p in module.parameters(recurse=False)}
    casts_outputs = False
    meshes, sums = list[tuple[Unit, Any]](), list[tuple[Unit, Any]]()
    for unit in units:
        if names := [name for name, p in unit.params.items() if not is_sharded(p)]:  # in ignored_params
            raise _in_no_unit(names[0], low)
        try:
            own, dtypes, ranks_of = unit.settings()
        except UnknownTorchError:
            text = f"ampctx cannot read the policy of {unit} in torch {torch.__version__}. Shard the model by:"
            raise _refused(text + _lines(wanted)[0]) from None
        meshes += [(unit, mesh) for mesh in ranks_of]
        casts_outputs |= model in unit.modules and own.output_dtype is not None
        if _is_16_bit(unit, own, dtypes, wanted, in_fp32, keeper):
            sums += [(unit, own.reduce_dtype)] * bool(unit.params)
    for one, ranks, other, others in _different(meshes):
        raise _refused(
            f"{one} is on the mesh {ranks}, {other} on the mesh {others}, so their ranks could not agree to skip a "
            "step. Pass the same mesh to each fully_shard."
        )
    for one, dtype, other, another in _different(sums):
        raise _refused(
            f"{one} and {other} have several policies: gradients are summed in {dtype} and in {another}. Pass one "
            f"policy to each fully_shard:{_lines(wanted)[1]}"
        )
    roots = [m for unit in units for m in unit.modules if m in in_fp32 and m is not model]
    return Sharded([m for m in roots if m not in kept.entries], casts_outputs)


def _is_16_bit(unit: Unit, policy: Any, dtypes: Any, wanted: Any, in_fp32: set[nn.Module], keeper: Any) -> bool:
    """Whether a unit computes in 16 bits at the level. ``keeper``: the module that keeps a parameter in fp32, by id.
    Refuses a unit without policy, a policy of another level, and two dtypes."""
    by_us, by_hand = _lines(wanted)
    floating = {name: p for name, p in unit.params.items() if p.is_floating_point()}
    kept = [name for name, p in floating.items() if id(p) in keeper]
    low = [name for name, p in floating.items() if id(p) not in keeper]
    if not low and (kept or in_fp32.issuperset(unit.modules)):
        for name, dtype in dtypes.items():
            if dtype not in (None, torch.float32):
                raise _refused(
                    f'"{name}" stays in fp32, and {unit} casts it to {dtype}. Leave mp_policy out of this fully_shard.'
                )
        return False
    level = f"and the level computes in {wanted.param_dtype}"
    if low and policy == type(policy)():
        raise _refused(
            f"{unit} has no mp_policy, {level}. torch takes a policy in fully_shard alone. Shard the model by:{by_us}"
            f"or pass the level's policy:{by_hand}"
        )
    for name in low:
        if dtypes[name] != wanted.param_dtype:
            has = f'casts "{name}" to {dtypes[name]}' if dtypes[name] else f'does not cast "{name}"'
            raise _refused(
                f"{unit} has a policy that {has}, {level}. If fully_shard got keep_fp32, pass the same to "
                f"amp.initialize. Else pass the level's policy:{by_hand}"
            )
    if not low and policy.param_dtype not in (None, wanted.param_dtype):
        raise _refused(
            f"{unit} has a policy that casts its inputs to {policy.param_dtype}, {level}. Pass its:{by_hand}"
        )
    for name in kept:
        if dtypes[name] not in (None, torch.float32):
            module = name.rpartition(".")[0]
            raise _refused(
                f'"{module}" stays in fp32, and shares {unit} with "{low[0]}", which the level casts to '
                f"{wanted.param_dtype}. torch gathers a unit in one dtype. Make it a unit of its own, first:\n"
                f'    fully_shard(model.get_submodule("{module}"), mesh=mesh)\n'
                "or let ampctx.distributed.fully_shard do that, or pass the module around it to keep_fp32."
            )
    return True


def _refused(text: str) -> AmpError:
    return AmpError(f"{text}{' ' if text[-1] == '.' else ''}See `ampctx explain sharded`.")


def _in_no_unit(name: str, low: torch.dtype | None) -> AmpError:
    return _refused(
        f'"{name}" is in no unit of fully_shard, so nothing casts it to {low}. Apply fully_shard to the model itself, '
        "after its layers, and leave ignored_params out:\n    fully_shard(model, mesh=mesh)\n"
    )


def _different(found: list[tuple[Unit, Any]]) -> list[tuple[Unit, Any, Unit, Any]]:
    """The first entry with each that has another value."""
    return [(*found[0], *entry) for entry in found if entry[1] != found[0][1]]


def _lines(wanted: Any) -> tuple[str, str]:
    """Lines to write: a call for the whole model, or one for each unit."""
    level, module = "O2" if wanted.param_dtype == torch.float16 else "O5", "ampctx.distributed"
    return (
        f'\n    model = {module}.fully_shard(model, "{level}", mesh=mesh, units=[...])\n',
        f'\n    fully_shard(module, mesh=mesh, mp_policy={module}.mixed_precision_policy("{level}"))  # each unit\n',
    )
