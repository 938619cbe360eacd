"""The parameters of one optimizer, and their fp32 masters.

With master weights, every trainable fp16 or bf16 parameter of the optimizer has a *master*: an fp32 tensor that takes
its place in ``optimizer.param_groups``. The model's weight is the rounded master. Where a program has written one of
the two, the other follows, see ``resync``. Loaded fp32 values set the master itself, see ``state_dicts``.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from ampctx._collectives import is_distributed
from ampctx._data_writes import DataWrites
from ampctx._decorators import without_grad
from ampctx._errors import AmpError
from ampctx._plan import PLANS
from ampctx.casts.arguments import LOW_PRECISION
from ampctx.casts.model_watch import ParameterNames
from ampctx.kernels import foreach
from ampctx.kernels.foreach import Unread
from ampctx.kernels.ops import is_watched
from ampctx.kernels.plan import advanced, as_before, changed, have_no_grads, marks
from ampctx.kernels.sharding import groups_of, is_sharded, steps_a_partition
from ampctx.kernels.tensor_loops import dtype_of, store_grads, version_of
from ampctx.weights.pending import MasterParam, Place, has_grad
from ampctx.weights.step import takes_step
from ampctx.weights.store import resynced

# The masters of all sessions, to look up the master of a model parameter.
ALIVE: weakref.WeakSet[MasterParams] = weakref.WeakSet()
# Until the next block: value and version of loaded 16-bit parameters without a master, for all bits when they get one.
LOADED: Any = WeakIdKeyDictionary()


class MasterParams:
    """The model parameters behind ``optimizer.param_groups`` and their masters.

    All methods run under no_grad. No host sync unless a method says so.

    Args:
        optimizer: masters replace 16-bit parameters in its groups. Held weakly.
        master_weights: whether 16-bit parameters get masters.
        originals: the data of parameters before a cast; their masters start from it.
        name_of: gives the name of a parameter, for messages.
        beside: those of the session, which these join. One of them alone may have the master of a parameter.

    Attributes:
        pairs: (model parameter, master). params_with_master, masters: the two as lists.
        model_of: master -> model parameter.
        params_without_master: the parameters that the optimizer steps directly.
        leaves: what a backward writes gradients into: the parameters of both kinds.
        groups: the process groups of the meshes of DTensors. has_sharded: whether there are DTensors.
        place: where pending gradients are.

    Raises:
        AmpError: a 16-bit parameter without values (of a lazy module), or with a master in another optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        master_weights: bool,
        originals: Mapping[Tensor, Tensor],
        name_of: Callable[[Tensor], str] | None = None,
        beside: weakref.WeakSet[MasterParams] | None = None,
        allows_16bit: bool = False,
    ) -> None:
        self._optimizer: Callable[[], Any] = weakref.ref(optimizer)
        self.beside = weakref.WeakSet() if beside is None else beside
        self.master_weights, self._name_of = master_weights, name_of or ParameterNames()
        self.place = Place()
        # Whether the optimizer takes a ``Step``: it writes the model's weights, and reads 16-bit gradients.
        self.takes_step = takes_step(optimizer)
        self.takes_pending = self.takes_step and PLANS
        # The optimizers of ampctx keep fp32 state of 16-bit parameters, too. For LARC, the optimizer inside decides.
        self._wide_state = hasattr(type(getattr(optimizer, "optim", optimizer)), "layout_of")
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.model_of: dict[Tensor, Tensor] = {}
        self.params_without_master: list[Tensor] = []
        # By the id of the parameter.
        self._master_of: dict[int, Tensor] = {}
        # 16-bit parameters without requires_grad: they get a master when they are unfrozen.
        self._frozen: list[Tensor] = []
        # Ids of parameters without master that were in 16 bits when they were added, and trained, in a cast model or
        # allowed.
        self._takes_frozen = bool(originals) or allows_16bit
        self._low: set[int] = set()
        # Masters that left the groups by their parameter, as long as the optimizer keeps state for them.
        self._left: Any = WeakIdKeyDictionary()
        # Parameters without master that ``initialize`` has cast, with their former dtype.
        self._cast: list[tuple[Tensor, torch.dtype]] = []
        # Names of parameters whose gradient was dropped when they joined.
        self.dropped_grads: list[str] = []
        # Weights may have been written in a way that versions do not show: by a broadcast before the first block, or by
        # ``load_state_dict``.
        self.unsure = True
        # Since the latest block, masters were loaded directly; weights were loaded into the model.
        self.were_restored = self.were_loaded = False
        # In a process group, the versions of weights whose masters a load has set, by id.
        self._loaded: dict[int, int] = {}
        # The marks of weights and of masters when they last agreed.
        self._agreed = b"", b""
        # The thread in which the optimizer may have moved masters, and the weights have yet to follow; else 0. Other
        # threads read then, and write nothing: neither weights that a backward needs, nor masters that a step moves.
        self.ahead = 0
        self.lock = threading.RLock()  # of what writes outside of that; a signal handler may save in the midst
        self._members: list[list[Tensor]] = []
        self._data_writes = DataWrites()
        self.follow(originals=originals)
        if master_weights:
            ALIVE.add(self)
            self.beside.add(self)

    # --- membership ---------------------------------------------------------------------------------------------------

    def is_current(self) -> bool:
        """Whether the groups have the same members as at the last look, and nothing was unfrozen."""
        same = bool(as_before(self._optimizer().param_groups, self._members, [], None))
        return same and not (self._frozen and any(p.requires_grad for p in self._frozen))

    def is_as_before(self, weights: bool) -> bool:
        """Whether nothing has happened since the latest block or step: the groups have the same members, and no leaf
        has a gradient. ``weights``: nobody has written or moved a weight with a master, and none of these has a
        gradient. False where this is not known. No host sync."""
        if self.ahead or self.unsure or self._frozen:
            return False
        params, former = (self.params_with_master, self._agreed[0]) if weights else (self.leaves, None)
        return bool(as_before(self._optimizer().param_groups, self._members, params, former))

    @torch.no_grad()
    def follow(self, drop_grads: bool = False, originals: Mapping[Tensor, Tensor] | None = None) -> None:
        """Follows the program's changes of the groups: added, removed, moved, replaced and unfrozen parameters. Puts
        masters into the groups in place of 16-bit parameters.

        ``drop_grads``: drop earlier gradients of parameters that join, whose scale is unknown.
        """
        self.resync()
        optimizer, originals = self._optimizer(), originals or {}
        groups, before = optimizer.param_groups, [list(group["params"]) for group in optimizer.param_groups]
        known = {id(p) for p in (*self.params_without_master, *self._frozen)}
        left = [(p, master) for p, reference in self._left.items() if (master := reference()) is not None]
        pair_of = {id(t): pair for pair in (*left, *self.pairs) for t in pair}  # by the ids of both
        pairs: list[tuple[Tensor, Tensor]] = []
        plain: list[Tensor] = []
        frozen: list[Tensor] = []
        made: list[tuple[Tensor, Tensor]] = []
        stands_for: dict[int, Tensor] = {}
        try:
            for group in groups:
                for i, p in enumerate(group["params"]):
                    if id(p) in stands_for:  # twice in the groups: it counts once
                        group["params"][i] = stands_for[id(p)]
                        continue
                    model, master = pair_of.get(id(p), (p, None))
                    if master is not None:
                        pairs.append((model, master))
                    elif not self.master_weights or p.dtype not in LOW_PRECISION:
                        plain.append(p)
                    elif not p.requires_grad:
                        frozen.append(p)
                    else:
                        if any(other.holds(p) for other in list(self.beside)):
                            raise AmpError(
                                f"a parameter of shape {tuple(p.shape)} is in two optimizers, and only one of them can "
                                "keep its fp32 master weight: with two, a step of one would undo those of the other. "
                                "Pass each parameter to one optimizer, use O1 or O4, or pass master_weights=False."
                            )
                        master = self._make(optimizer, p, originals.get(p))
                        pairs.append((p, master))
                        made.append((p, master))
                    here = group["params"][i] = p if master is None else master
                    stands_for[id(p)] = stands_for[id(model)] = stands_for[id(here)] = here
        except BaseException:
            for group, params in zip(groups, before, strict=True):
                group["params"][:] = params
            raise
        for p, master in left:
            if id(master) in stands_for:
                master.copy_(resynced(p, master))  # what the program has written since it left
                del self._left[p]
        for p, master in self.pairs:
            if id(master) not in stands_for:
                self._left[p] = weakref.ref(master)
        for p in plain:
            original = originals.get(p)
            if p.dtype in LOW_PRECISION and (p.requires_grad or self._takes_frozen) and id(p) not in known:
                self._low.add(id(p))
            if original is not None:
                self._cast.append((p, original.dtype))
                _move_state(optimizer, p, p, self._state_dtype(p.dtype))
        for p, master in made:
            _move_state(optimizer, p, master, torch.float32)
        self.pairs, self.params_without_master, self._frozen = pairs, plain, frozen
        self._derive(optimizer)
        for p, _ in made:
            value, version = LOADED.pop(p, (None, 0))
            if version == version_of(p):
                self.take_loaded(p, value)
        for p in (*plain, *(p for p, _ in made)) if drop_grads else ():
            if id(p) not in known and p.grad is not None:
                p.grad = None
                self.dropped_grads.append(self._name_of(p))
        self.agree()

    def _derive(self, optimizer: Any) -> None:
        """Makes the lists that follow from the pairs and the plain parameters. Others only read them."""
        self.params_with_master = [p for p, _ in self.pairs]
        self.masters = [master for _, master in self.pairs]
        self.model_of = {master: p for p, master in self.pairs}
        self._master_of = {id(p): master for p, master in self.pairs}
        self.leaves = [*self.params_with_master, *self.params_without_master]
        self._members = [list(group["params"]) for group in optimizer.param_groups]
        self.has_sharded = any(map(is_sharded, self.params_without_master))
        self.groups = groups_of(self.params_without_master)

    def _make(self, optimizer: Any, p: Tensor, original: Tensor | None) -> Tensor:
        """The master of a parameter. Raises where amp can keep none."""
        if is_lazy(p):
            raise AmpError(
                "a parameter of a lazy module has no values yet, and no master: run one forward before amp.initialize."
            )
        if steps_a_partition(optimizer):
            raise AmpError(
                f"{self._name_of(p)} is {p.dtype}, and ZeroRedundancyOptimizer would step it instead of its fp32 "
                "master weight. Use O1 or O4; or O5 with master_weights=False and "
                "ZeroRedundancyOptimizer(..., optimizer_class=ampctx.optimizers.FusedAdam, master_weights=True), "
                "which keeps the masters in its state."
            )
        if self._wide_state and getattr(optimizer, "offloads", False):
            raise AmpError(
                f"{self._name_of(p)} is {p.dtype}, and amp would keep its fp32 master weight on {p.device}, where "
                f"{type(optimizer).__name__} has nothing else. Pass master_weights=False to "
                "amp.initialize, and master_weights='split' (O5) or True to it. See `ampctx explain offload`."
            )
        if is_sharded(p):
            raise AmpError(
                f"{self._name_of(p)} is a DTensor of {p.dtype}, and amp keeps fp32 master weights only for plain "
                "tensors. Leave the parameters in fp32: under fully_shard the shards are the masters then. With tensor "
                "parallelism alone use O1 or O4. See `ampctx explain sharded`."
            )
        # In a process group every rank starts from the rounded weight, because a broadcast makes only the model equal.
        source = p if original is None or is_distributed() else original
        # A copy even of fp32 data: state dicts from before initialize share the original.
        master = source.detach().to(torch.float32, copy=True)
        return MasterParam(master, place=self.place) if self.takes_pending else nn.Parameter(master)

    def holds(self, p: Tensor) -> bool:
        """Whether a model parameter has a master that is in the groups now."""
        master, optimizer = self._master_of.get(id(p)), self._optimizer()
        if master is None or optimizer is None:
            return False
        return any(member is master for group in optimizer.param_groups for member in group["params"])

    def refuse_params_with_master(self, group: dict[str, Any]) -> None:
        """Raises AmpError if a parameter of the group has its master in the optimizer, which torch does not see."""
        for p in group["params"]:
            if id(p) in self._master_of:
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
                    "`ampctx explain clipping-would-not-reach-it`."
                )

    def check(self) -> None:
        """Checks dtypes and devices. No host sync.

        Raises:
            AmpError: a weight was converted or moved since it was added.
        """
        # get_device gives numbers (-1 is the CPU). Creating device objects takes several times as long.
        params, masters = self.params_with_master, self.masters
        moved = list(map(Tensor.get_device, params)) != list(map(Tensor.get_device, masters))
        low = set(map(dtype_of, params)) <= set(LOW_PRECISION)
        if not low or moved:
            for p, master in self.pairs:
                if p.dtype not in LOW_PRECISION or p.device != master.device:
                    raise AmpError(
                        f"{self._name_of(p)} is {p.dtype} on {p.device} now, but its fp32 master weight on "
                        f"{master.device} needs a 16-bit weight on that device. Move the model before amp.initialize, "
                        "and do not call model.float(), half() or to(...) afterwards. amp.reset() makes it fp32."
                    )
        if not set(map(dtype_of, self.params_without_master)).isdisjoint(LOW_PRECISION):
            for p in self.params_without_master:
                if p.dtype in LOW_PRECISION and p.requires_grad and id(p) not in self._low:
                    raise AmpError(
                        f"{self._name_of(p)} was converted to {p.dtype} after amp.initialize, or unfrozen, and has no "
                        'fp32 master weight. Remove model.half() or bfloat16(), and choose opt_level="O2" or "O5". If '
                        "a loss casts its weights to the type of its input, pass fp32: loss(output.float(), target)."
                    )

    def _state_dtype(self, of_param: torch.dtype) -> torch.dtype:
        """The dtype of the optimizer's state: at least fp32 for the optimizers of ampctx."""
        return torch.promote_types(of_param, torch.float32) if self._wide_state else of_param

    @torch.no_grad()
    def release(self) -> None:
        """Puts the model parameters back into the optimizer, in fp32 with the masters' values and gradients."""
        optimizer = self._optimizer()
        self.resync()
        self.place.materialize()
        for group in optimizer.param_groups:
            for i, master in enumerate(group["params"]):
                if master in self.model_of:
                    p = group["params"][i] = self.model_of[master]
                    grad, p.grad = master.grad, None
                    p.data = master.detach()
                    p.grad = grad if grad is None else grad.to(p.grad_dtype or grad.dtype)
                    _move_state(optimizer, master, p, torch.float32)
        for p, former in self._cast:
            _move_state(optimizer, p, p, self._state_dtype(former))
        self.params_without_master = self.leaves
        self.pairs, self._cast = [], []
        self._derive(optimizer)

    # --- values -------------------------------------------------------------------------------------------------------

    def agree(self) -> None:
        """Notes that weights equal the rounded masters."""
        if self.pairs and not self._are_busy():
            self._agreed, self.ahead = (marks(self.params_with_master), marks(self.masters)), 0

    def advance(self) -> None:
        """Notes that the step wrote each weight and master once."""
        self._agreed, self.ahead = (advanced(self._agreed[0]), advanced(self._agreed[1])), 0

    def begin(self) -> None:
        """Notes that this thread moves masters, until both agree."""
        with self.lock:
            self.ahead = threading.get_ident() if self.pairs else 0

    def _are_busy(self) -> bool:
        """Whether a step in another thread moves masters."""
        return self.ahead not in (0, threading.get_ident())

    @without_grad
    def resync(self, may_wait: bool = False) -> None:
        """Lets masters and weights agree again, at a block, a step or a read of masters. Of what was written since they
        did: where a weight is not the rounded master, the master takes its value; where only the master was written,
        the weight is rounded again. ``may_wait``: that may wait, as the step or the next forward rounds.
        """
        is_idle = may_wait and not (self.ahead or self.unsure)
        if not self.pairs or (is_idle and marks(self.params_with_master) == self._agreed[0]):
            return
        with self.lock:
            self.round_again()
            written = [] if self._are_busy() else self.written()
            for p in written:
                self._master_of[id(p)].copy_(self.exact(p))
            if written:
                self.agree()

    def round_again(self) -> None:
        """Lets weights follow masters that the program has written. Weights that it has written stay, and so do their
        masters: an average that is swapped in for a validation goes out again. No host sync."""
        if self.pairs and (self.ahead or marks(self.masters) != self._agreed[1]):
            with self.lock:
                self._round()

    @torch.no_grad()
    def _round(self) -> None:
        if self.ahead:
            return None if self._are_busy() else self.copy_to_model()
        now, params, before = marks(self.masters), self.params_with_master, self._agreed[0]
        moved = changed(self.masters, self._agreed[1], now)
        written = changed(params, before, marks(params))
        if pairs := [(p, master) for p, master in self.pairs if id(master) in moved and id(p) not in written]:
            foreach.scale([master for _, master in pairs], [p for p, _ in pairs], Unread(), 1.0)
        after = marks(params)
        each = ((before if id(p) in written else after, 16 * i) for i, p in enumerate(params))
        self._agreed = b"".join(of[at : at + 16] for of, at in each), now

    def written(self) -> list[Tensor]:
        """The weights that the program has written since both agreed, as versions tell. While ``unsure``, all."""
        ids = changed(self.params_with_master, self._agreed[0], marks(self.params_with_master))
        return [p for p in self.params_with_master if self.unsure or id(p) in ids] if ids or self.unsure else []

    def exact(self, p: Tensor) -> Tensor:
        """The fp32 value of a model parameter: its master, and what the program has written in place of that."""
        if p.numel() and not p.untyped_storage().nbytes():
            raise AmpError(
                f"{self._name_of(p)} has no memory: its storage was freed. amp reads the weight here, to see whether "
                "its fp32 master has to follow. Restore the storage and its values before that."
            )
        return resynced(p, self._master_of[id(p)])

    def written_through_data(self) -> list[str]:
        """The names of weights that were written in a way that no version tells. After ``resync``. No host sync."""
        is_due = bool(self.pairs) and self._data_writes.is_due() and not is_watched()
        looks = is_due and not self.unsure and marks(self.masters) == self._agreed[1]
        return list(map(self._name_of, self._data_writes.found(self.pairs))) if looks else []

    def values(self) -> dict[Tensor, Tensor]:
        """The fp32 value of each model parameter with a master: the master, if the program has not written it."""
        self.round_again()
        return {p: master.detach() for p, master in self.pairs} | {p: self.exact(p) for p in self.written()}

    @torch.no_grad()
    def take_broadcast(self, weights_final: bool) -> None:
        """After a ``resync`` while ``unsure``. ``weights_final``: no broadcast of weights can still come.

        Rounds masters that a load has set if a broadcast has written their weights since: ranks that loaded nothing
        know only the rounded weights. Not if optimizer state or masters were loaded, too: every rank loads those.
        """
        for p, master in self.pairs if self._loaded and not self.were_restored else ():
            if self._loaded.get(id(p), version_of(p)) != version_of(p) and not self._optimizer().state.get(master):
                master.copy_(p)
        self.agree()
        if weights_final:
            self.unsure = self.were_restored = self.were_loaded = False
            self._loaded = {}

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

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """model = master, rounded to nearest even. If a kernel raises, writes the weights without it and re-raises."""
        if self.pairs:
            self.begin()
            try:
                foreach.scale(self.masters, self.params_with_master, Unread(), 1.0)
                self.agree()
            except BaseException:
                # Again, in a way that needs no memory.
                for p, master in self.pairs:
                    p.copy_(master)
                self.agree()
                raise

    def have_no_grads(self) -> bool:
        """Whether no master has a gradient of its own."""
        if self.place.has_grads and have_no_grads(self.masters):
            self.place.has_grads = not self.takes_pending  # others do not tell when they get one
            return True
        return not self.place.has_grads

    def drop_grads(self) -> None:
        """Drops the gradients of masters, which a step has used or skipped, pending ones included."""
        self.place.checked = None
        if self.place.pending is not None:
            self.place.pending.drop()
        if self.pairs and self.place.has_grads:
            store_grads(self.masters, repeat(None))


def _move_state(optimizer: Any, p: Tensor, key: Tensor, dtype: torch.dtype) -> None:
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


def _renew_locks() -> None:
    for masters in list(ALIVE):
        masters.lock, masters.ahead = threading.RLock(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)  # the thread that held one is not there
