"""The parameters of one optimizer, and their fp32 masters.

With master weights, every trainable fp16 or bf16 parameter of the optimizer has a *master*: an fp32 tensor that takes
its place in ``optimizer.param_groups``. The model weight is the rounded master. If they differ after a broadcast or
after ``load_state_dict``, the master takes the model's value, element by element. Loaded fp32 values set the master
itself, see ``state_dicts``.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ampctx._collectives import is_distributed
from ampctx._errors import AmpError
from ampctx.casts.arguments import LOW_PRECISION
from ampctx.casts.model_watch import ParameterNames
from ampctx.kernels import foreach, tensor_loops
from ampctx.kernels.foreach import Unread
from ampctx.kernels.handles import HeldTensors, hold
from ampctx.kernels.sharding import groups_of, is_sharded, steps_a_partition
from ampctx.kernels.tensor_loops import dtype_of, stored_grad, version_of
from ampctx.masters.lazy_grads import MasterParam, Masters, declares, has_grad

Group = dict[str, Any]


def _cast_state(optimizer: Any, p: Tensor, key: Tensor, dtype: torch.dtype) -> None:
    """Moves the optimizer's state of ``p`` to ``key``. Casts floating tensors of the parameter's shape to ``dtype``.

    State that is no dict moves unchanged, because ``reset`` must not stop halfway.
    """
    states = optimizer.state
    if isinstance(states, MutableMapping) and p in states:
        state = states.pop(p)
        if isinstance(state, Mapping):
            state = {
                k: v.to(dtype) if isinstance(v, Tensor) and v.shape == p.shape and v.is_floating_point() else v
                for k, v in state.items()
            }
        states[key] = state


def _members(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


# The masters of all sessions, to look up the master of a model parameter.
ALIVE: weakref.WeakSet[MasterParams] = weakref.WeakSet()


@torch.no_grad()
def resynced(p: Tensor, master: Tensor) -> Tensor:
    """The master where the model weight is the rounded master, elsewhere the model weight. On the model's device."""
    master = master.to(p.device)
    return torch.where(master.to(p.dtype) == p, master, p.to(master.dtype))


class MasterParams:
    """The model parameters behind ``optimizer.param_groups`` and their masters.

    ``pairs`` are (model parameter, master); ``model_of`` maps a master to its parameter. The optimizer steps
    ``params_without_master`` directly. All methods run under no_grad. No host sync unless a method says so.

    Args:
        optimizer: masters replace 16-bit parameters in its groups.
        master_weights: whether 16-bit parameters get masters.
        originals: the data of parameters before a cast; their masters start from it.
        taken: ids of parameters that have a master in another optimizer.
        name_of: gives the name of a parameter, for messages.

    Raises:
        AmpError: a 16-bit parameter without values (of a lazy module), or with a master already.
    """

    def __init__(
        self,
        optimizer: Any,
        master_weights: bool,
        originals: dict[Tensor, Tensor],
        taken: Container[int] = (),
        name_of: Callable[[Tensor], str] | None = None,
    ) -> None:
        self.master_weights = master_weights
        self._name_of = name_of or ParameterNames()
        # Whether the optimizer reads 16-bit gradients, so that those of the masters can stay lazy.
        self.lazy = declares(optimizer, "_step_supports_model_params")
        self._wide_state = self.lazy or declares(optimizer, "_state_is_fp32")
        # A master of the group whose lazy gradients belong together.
        self._like: MasterParam | None = None
        self.pairs: list[tuple[Tensor, Tensor]] = []
        # What is derived from the pairs and ``params_without_master``, see ``_membership_changed``.
        self._lists: tuple[list[Tensor], Masters] | None = None
        self._leaves: list[Tensor] | None = None
        self._held: HeldTensors | None = None
        self._checked_kinds: bytes | None = None
        self.model_of: dict[Tensor, Tensor] = {}
        # By the id of the parameter.
        self._master_of: dict[int, Tensor] = {}
        self.params_without_master: list[Tensor] = []
        # The process groups of the meshes of ``params_without_master``.
        self.groups: list[Any] = []
        self.has_sharded = False
        # Parameters without master that ``initialize`` has cast, with their former dtype.
        self._cast: list[tuple[Tensor, torch.dtype]] = []
        # 16-bit parameters without requires_grad: they get a master when they are unfrozen.
        self._frozen: list[Tensor] = []
        # Pairs that left the groups, while the optimizer keeps state for the master.
        self._left: list[tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = []
        # Ids of parameters without master that were 16-bit when they were added.
        self._low: set[int] = set()
        # The members of the groups at the last look.
        self._members: list[list[Tensor]] = []
        # The write counts of the 16-bit weights when they were last written from their masters.
        self._written = b""
        # The masters may have moved, and the 16-bit weights not yet.
        self.are_ahead = False
        # Names of parameters whose gradient was dropped when they joined, for a warning.
        self.dropped_grads: list[str] = []
        # The model's weights may differ from the rounded masters.
        self.may_disagree = True
        # Since the latest block, masters were loaded directly; weights were loaded into the model.
        self.were_restored = self.were_loaded = False
        # In a process group, the versions of weights whose masters a load has set, by id.
        self._loaded: dict[int, int] = {}
        if master_weights:
            ALIVE.add(self)
        try:
            for group in optimizer.param_groups:
                self.add_params(optimizer, group, originals, taken)
        except BaseException:
            self.restore_params(optimizer)
            raise

    # --- membership ---------------------------------------------------------------------------------------------------

    def _membership_changed(self) -> None:
        self._lists = self._leaves = self._held = self._checked_kinds = None

    def _pair_lists(self) -> tuple[list[Tensor], Masters]:
        if self._lists is None:
            self._lists = [p for p, _ in self.pairs], Masters(master for _, master in self.pairs)
        return self._lists

    @property
    def params_with_master(self) -> list[Tensor]:
        """The model parameters of ``pairs``. A list to read only."""
        return self._pair_lists()[0]

    @property
    def masters(self) -> Masters:
        """The masters of ``pairs``. A list to read only."""
        return self._pair_lists()[1]

    @property
    def leaves(self) -> list[Tensor]:
        """The parameters that a backward writes gradients into. A list to read only."""
        if self._leaves is None:
            self._leaves = [*self.params_with_master, *self.params_without_master]
        return self._leaves

    def _handle(self) -> HeldTensors | None:
        """A handle for all parameters and masters, those with a master first. None if the library cannot hold them."""
        if self._held is None:
            self._held = hold([*self.params_with_master, *self.masters, *self.params_without_master])
        return self._held

    @torch.no_grad()
    def add_params(
        self,
        optimizer: Any,
        group: Group,
        originals: dict[Tensor, Tensor] | None = None,
        taken: Container[int] = (),
        known: Container[int] = (),
    ) -> None:
        """Adds the parameters of a group. Puts masters into ``group["params"]`` in place of 16-bit parameters.

        ``known``: ids of tensors in the group that were added before. A parameter that is in the group twice counts
        once.
        """
        first: dict[int, int] = {}
        for i, p in enumerate(group["params"]):
            if id(p) in known:
                continue
            if first.setdefault(id(p), i) != i:
                # The first entry: the parameter, or now its master.
                group["params"][i] = group["params"][first[id(p)]]
                continue
            original = (originals or {}).get(p)
            if not self.master_weights or p.dtype not in LOW_PRECISION:
                self.params_without_master.append(p)
                if p.dtype in LOW_PRECISION:
                    self._low.add(id(p))
                if original is not None:
                    self._cast.append((p, original.dtype))
                    _cast_state(optimizer, p, p, self._state_dtype(p.dtype))
            elif id(p) in taken:
                raise AmpError(
                    f"a parameter of shape {tuple(p.shape)} is in two optimizers, and only one of them can keep its "
                    "fp32 master weight: with a master each, a step of one would undo those of the other. Pass each "
                    "parameter to one optimizer, use O1 or O4, or pass master_weights=False."
                )
            elif p.requires_grad:
                self._give_master(optimizer, group, i, original)
            else:
                self._frozen.append(p)
        self._membership_changed()
        self._members = tensor_loops.members_of(optimizer.param_groups)
        self.has_sharded = any(map(is_sharded, self.params_without_master))
        self.groups = groups_of(self.params_without_master)

    def model_params_with_master(self, optimizer: Any) -> list[Tensor]:
        """The model parameters whose masters are in the groups now."""
        return [self.model_of[p] for p in _members(optimizer) if p in self.model_of]

    def refuse_params_with_master(self, optimizer: Any, group: Group) -> None:
        """Raises AmpError if a parameter of the group has its master in the optimizer, which torch does not see."""
        have_master = {id(p) for p in self.model_params_with_master(optimizer)}
        for p in group["params"]:
            if id(p) in have_master:
                raise AmpError(
                    f"add_param_group: {self._name_of(p)} is in the optimizer already, by its fp32 master weight. Put "
                    "each parameter into one group."
                )

    def refuse_to_clip(self, without_grad: Container[int]) -> None:
        """Raises AmpError if a parameter with one of these ids has a master, and the master has the gradient."""
        for p, master in self.pairs:
            if id(p) in without_grad and has_grad(master):
                raise AmpError(
                    f"clip_grad_norm_: {self._name_of(p)} has no gradient, and clipping would not reach it. The "
                    "scale_loss block has moved it, unscaled, to the fp32 master weight. Pass "
                    "amp.master_params(optimizer) instead of model.parameters(). See "
                    "docs/errors.md#has-no-gradient-and-clipping-would-not-reach-it."
                )

    def look_again(self) -> None:
        """Makes the next ``follow_groups`` look at the groups again in any case."""
        self._members = []

    def drop_grads(self, params: Iterable[Tensor]) -> None:
        """Drops the earlier gradients of parameters that join: the scale of these gradients is unknown."""
        for p in params:
            if p.grad is not None:
                p.grad = None
                self.dropped_grads.append(self._name_of(p))

    def agrees_with(self, optimizer: Any) -> bool:
        """Whether the groups have the same members as at the last look, and nothing was unfrozen."""
        alike = tensor_loops.same_members(optimizer.param_groups, self._members)
        return bool(alike) and not (self._frozen and any(p.requires_grad for p in self._frozen))

    def nothing_changed(self, optimizer: Any) -> bool:
        """Whether neither groups nor dtypes and devices have changed since the last look, weights and masters agree,
        and no parameter has a gradient. False if it is not known."""
        if self.may_disagree or self.are_ahead or self._frozen or not self._checked_kinds or self._held is None:
            return False
        groups, kinds = optimizer.param_groups, self._checked_kinds
        return bool(tensor_loops.nothing_changed(groups, self._members, self._held.number, kinds, self.leaves))

    @torch.no_grad()
    def follow_groups(self, optimizer: Any, taken: Callable[[], Container[int]], drop_grads: bool) -> None:
        """Follows the user's changes of the groups: added, removed, replaced and unfrozen parameters. Replaces a model
        weight that has a master by its master.

        ``drop_grads``: drop the gradients of new parameters.
        """
        if not tensor_loops.same_members(optimizer.param_groups, self._members):
            members = _members(optimizer)
            known = {id(p) for p in (*self.model_of, *self.params_without_master, *self._frozen)}
            left = [(p(), master()) for p, master in self._left]
            pairs = self.pairs + [(p, master) for p, master in left if p is not None and master is not None]
            master_of = {id(p): master for p, master in pairs}
            joined = [p for p in members if id(p) not in known and id(p) not in master_of]
            for group in optimizer.param_groups:
                group["params"][:] = [master_of.get(id(p), p) for p in group["params"]]
            there = {id(p) for p in _members(optimizer)}
            back = [(p, master) for p, master in pairs if id(master) in there and master not in self.model_of]
            self._left = [(weakref.ref(p), weakref.ref(master)) for p, master in pairs if id(master) not in there]
            self.pairs = [(p, master) for p, master in pairs if id(master) in there]
            self._membership_changed()
            self._resync(back)
            self.model_of = {master: p for p, master in self.pairs}
            self._master_of = {id(p): master for p, master in self.pairs}
            self.params_without_master = [p for p in self.params_without_master if id(p) in there]
            self._frozen = [p for p in self._frozen if id(p) in there]
            known |= {id(master) for _, master in back}
            for group in optimizer.param_groups:
                self.add_params(optimizer, group, taken=taken(), known=known)
            if drop_grads:
                self.drop_grads(joined)
        self.add_unfrozen(optimizer)

    def check(self) -> None:
        """Checks dtypes and devices. No host sync.

        Raises:
            AmpError: a weight was converted or moved since it was added.
        """
        held = self._handle()
        kinds = None if held is None else tensor_loops.held_kinds(held.number)
        if kinds is not None and kinds == self._checked_kinds:
            return
        self._check_kinds()
        self._checked_kinds = kinds

    def _check_kinds(self) -> None:
        params, masters = self.params_with_master, self.masters
        # get_device gives numbers (-1 is the CPU). Creating device objects takes several times as long.
        moved = any(map(operator.ne, map(Tensor.get_device, params), map(Tensor.get_device, masters)))
        if moved or not set(map(dtype_of, params)) <= set(LOW_PRECISION):
            for p, master in self.pairs:
                if p.dtype not in LOW_PRECISION or p.device != master.device:
                    raise AmpError(
                        f"{self._name_of(p)} is {p.dtype} on {p.device} now, but its fp32 master weight on "
                        f"{master.device} needs a 16-bit weight on that device. Move the model before amp.initialize, "
                        "and do not call model.float(), half() or to(...) afterwards. amp.reset() restores an fp32 "
                        "model."
                    )
        if set(map(dtype_of, self.params_without_master)).isdisjoint(LOW_PRECISION):
            return
        for p in self.params_without_master:
            if p.dtype in LOW_PRECISION and id(p) not in self._low:
                raise AmpError(
                    f"{self._name_of(p)} was converted to {p.dtype} after amp.initialize, and has no fp32 master "
                    'weight. Remove model.half() or bfloat16(), and choose opt_level="O2" or "O5".'
                )

    def _state_dtype(self, of_param: torch.dtype) -> torch.dtype:
        """The dtype of the optimizer's state: at least fp32 for the optimizers of ampctx."""
        return torch.promote_types(of_param, torch.float32) if self._wide_state else of_param

    def _give_master(self, optimizer: Any, group: Group, i: int, original: Tensor | None) -> None:
        p = group["params"][i]
        if is_lazy(p):
            raise AmpError(
                "a parameter of a lazy module has no values yet, so it can have no fp32 master weight: run one "
                "forward before amp.initialize."
            )
        if steps_a_partition(optimizer):
            raise AmpError(
                f"{self._name_of(p)} is {p.dtype}, and ZeroRedundancyOptimizer would step it instead of its fp32 "
                "master weight. Use O1 or O4; or O5 with master_weights=False and "
                "ZeroRedundancyOptimizer(..., optimizer_class=ampctx.optimizers.FusedAdam, master_weights=True), "
                "which keeps the masters in its state."
            )
        if declares(optimizer, "_steps_on_host"):
            raise AmpError(
                f"{self._name_of(p)} is {p.dtype}, and amp would keep its fp32 master weight on {p.device}, where "
                f"{type(optimizer).__name__}(offload='cpu') has nothing else. Pass master_weights='split' to "
                "amp.initialize at O5; or False, and master_weights=True to the optimizer. See docs/guide/offload.md."
            )
        if is_sharded(p):
            raise AmpError(
                f"{self._name_of(p)} is a DTensor of {p.dtype}, and amp keeps fp32 master weights only for plain "
                "tensors. Leave the parameters in fp32: under fully_shard the shards are the masters then. With tensor "
                "parallelism alone use O1 or O4. See docs/guide/fsdp_zero.md#fsdp2."
            )
        # In a process group every rank starts from the rounded weight, because a broadcast makes only the model equal.
        source = p if original is None or is_distributed() else original
        # A copy even of fp32 data: state dicts from before initialize share the original.
        master = source.detach().to(torch.float32, copy=True).requires_grad_()
        if self.lazy:
            master = MasterParam(master.detach(), like=self._like)
            self._like = master
        group["params"][i] = master
        self.pairs.append((p, master))
        self._membership_changed()
        self.model_of[master] = p
        self._master_of[id(p)] = master
        _cast_state(optimizer, p, master, torch.float32)

    @torch.no_grad()
    def add_unfrozen(self, optimizer: Any) -> None:
        """Gives masters to 16-bit parameters that were frozen when they were added, and train now."""
        if unfrozen := {id(p) for p in self._frozen if p.requires_grad}:
            self._frozen = [p for p in self._frozen if id(p) not in unfrozen]
            for group in optimizer.param_groups:
                given: dict[int, Tensor] = {}
                for i, p in enumerate(group["params"]):
                    if id(p) in given:
                        group["params"][i] = given[id(p)]
                    elif id(p) in unfrozen:
                        self._give_master(optimizer, group, i, None)
                        given[id(p)] = group["params"][i]
            self._members = tensor_loops.members_of(optimizer.param_groups)

    @torch.no_grad()
    def restore_params(self, optimizer: Any) -> None:
        """Puts the model parameters back into the optimizer, in fp32 with the masters' values and gradients."""
        self.resync()
        for group in optimizer.param_groups:
            for i, master in enumerate(group["params"]):
                if master in self.model_of:
                    p = group["params"][i] = self.model_of[master]
                    grad, p.grad = master.grad, None
                    p.data = master.detach()
                    p.grad = grad
                    _cast_state(optimizer, master, p, torch.float32)
        for p, former in self._cast:
            _cast_state(optimizer, p, p, self._state_dtype(former))
        self.params_without_master += [p for p, _ in self.pairs]
        self.pairs, self.model_of, self._master_of, self._cast = [], {}, {}, []
        self._membership_changed()

    # --- values -------------------------------------------------------------------------------------------------------

    def model_changed(self) -> None:
        """Notes that model weights may have changed behind the masters."""
        self.may_disagree = True
        self._written = b""

    def restored(self) -> None:
        """Notes that a checkpoint has set the masters, and the model to the rounded masters."""
        self.may_disagree = self.were_restored = True

    def resync(self, weights_final: bool = False) -> None:
        """Resyncs masters from the model: where a weight is not the rounded master, the master takes its value.

        After a call with ``weights_final``, does nothing until ``model_changed``. First writes weights that an
        exception has left behind their masters.
        """
        self.finish_writing()
        if self.may_disagree:
            self._resync(self.pairs)
            self.may_disagree = not weights_final
            if weights_final:
                self.were_restored = self.were_loaded = False
                self._loaded = {}

    @torch.no_grad()
    def round_broadcast(self, optimizer: Any) -> None:
        """Rounds masters that a load has set if a broadcast has written their weights since. Ranks that loaded nothing
        know only the rounded weights.

        Not if optimizer state or masters were loaded, too: every rank loads those.
        """
        for p, master in self.pairs if self._loaded and not self.were_restored else ():
            if self._loaded.get(id(p), version_of(p)) != version_of(p) and not optimizer.state.get(master):
                master.copy_(p)

    @staticmethod
    @torch.no_grad()
    def _resync(pairs: list[tuple[Tensor, Tensor]]) -> None:
        for p, master in pairs:
            master.copy_(resynced(p, master))

    def pairs_of(self, params: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """(parameter, master) for those of the model parameters that have a master here."""
        return [(p, self._master_of[id(p)]) for p in params if id(p) in self._master_of]

    @torch.no_grad()
    def take_loaded(self, p: Tensor, value: Any) -> None:
        """Sets a master to the fp32 or fp64 ``value`` that was loaded into its model parameter, where the parameter is
        the rounded value. Host sync: only a copy to the device.

        Masters that amp.load_state_dict has set stay where ``value`` is an up-cast 16-bit value: earlier versions saved
        such values beside the masters.
        """
        if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.float64):
            return
        if value.shape != p.shape or value.is_meta or value.layout != torch.strided or is_sharded(value):
            return
        master = self._master_of[id(p)]
        value = value.to(p.device, master.dtype)
        taken = value.to(p.dtype) == p
        if self.were_restored:
            taken &= value != p
        master.copy_(torch.where(taken, value, resynced(p, master)))
        if is_distributed():
            self._loaded[id(p)] = version_of(p)

    def are_rounded(self) -> bool:
        """Whether masters were loaded from weights with only 16 bits of precision. Host syncs."""
        if not self.were_loaded or not self.pairs:
            return False
        self.resync()
        with torch.no_grad():
            return all(torch.equal(master.to(p.dtype).to(master.dtype), master) for p, master in self.pairs)

    def begin_writing(self) -> None:
        """Notes that masters are about to move. The model's weights are out of date until they are written."""
        self.are_ahead = bool(self.pairs)

    def finish_writing(self) -> None:
        """Writes the weights that an exception has left behind their masters."""
        if self.are_ahead:
            self.copy_to_model()

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """model = master, rounded to nearest even. If a kernel raises, writes the weights without it and re-raises."""
        if self.pairs:
            self.are_ahead = True
            try:
                foreach.scale(self.masters, self.params_with_master, Unread(), 1.0)
                self.mark_written()
            except BaseException:
                # Again, in a way that needs no memory.
                for p, master in self.pairs:
                    p.copy_(master)
                self.mark_written()
                raise

    def mark_written(self) -> None:
        """Notes that the 16-bit weights are the rounded masters."""
        if self.pairs:
            self._written = self._write_counts()
            self.are_ahead = False

    def _write_counts(self) -> bytes:
        """The identity, version and address of each model weight with a master, to detect later writes."""
        held = self._handle()
        return tensor_loops.counted(self.params_with_master, 0 if held is None else held.number)

    def overwritten(self) -> list[str]:
        """Names of weights that were changed in place since they were last written from their masters.

        Cannot detect changes through ``.data``. Host sync if versions have changed.
        """
        if self.may_disagree or self.are_ahead:
            return []  # a resync or a write is due
        now = self._write_counts()
        if now == self._written:
            return []
        former = {i: count for i, *count in tensor_loops.counts_in(self._written)}
        changed = {i for i, *count in tensor_loops.counts_in(now) if former.get(i, count) != count}
        pairs = [(p, master) for p, master in self.pairs if id(p) in changed]
        if pairs and pairs[0][0].is_cuda and torch.cuda.is_current_stream_capturing():
            return []
        with torch.no_grad():
            return [self._name_of(p) for p, master in pairs if not torch.equal(master.to(p.dtype), p)]

    def have_no_grads(self) -> bool:
        """Whether no master has a gradient, lazy ones aside. True also if autograd itself has written one, see
        ``ModelGrads.is_alone``."""
        masters = self.masters
        return (self.lazy and not masters.have_grads) or bool(tensor_loops.have_no_grad(masters, True))

    def drop_master_grads(self) -> None:
        """Sets ``grad`` of masters to None. Lazy gradients stay."""
        if not self.pairs:
            return
        if not self.have_no_grads():
            for master in self.masters:
                if stored_grad(master) is not None:
                    master.grad = None
        if self.lazy:
            self.masters.forget_grads()
