"""The parameters of one optimizer: which are stepped as they are, which through an fp32 master, and where gradients go.

With master weights, every trainable fp16 or bf16 parameter of the optimizer has a *master*: an fp32 tensor that takes
its place in ``optimizer.param_groups``. The invariant that ties them: the model weight is the rounded master. Where it
does not hold (a broadcast, an edit, a loaded checkpoint), the model weight wins, element by element.

Gradients of one backward are kept apart from those already there (``begin``), unscaled into what the optimizer steps
and added to what was there (``finish``), or thrown away as if the backward never ran (``abandon``). The blocks may
nest.

Layouts: a master has the strides of its model parameter, a master gradient those of the model gradient it came from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ampctx import _reference, foreach
from ampctx.foreach import FoundInf, PerDevice

LOW_PRECISION = (torch.float16, torch.bfloat16)


def _owns_its_memory(t: Tensor) -> bool:
    """False for a view into a larger buffer, such as a gradient bucket that the next backward overwrites."""
    return t.layout == torch.strided and t.untyped_storage().nbytes() == t.numel() * t.element_size()


def _writable(t: Tensor) -> Tensor:
    """``t``, or a copy where its elements share memory (an expanded gradient)."""
    return t if t.is_contiguous() or _reference.is_dense(t) else t.contiguous()


def _add_sparse(new: Tensor, old: Tensor | None, factor: float | PerDevice, found_inf: FoundInf) -> Tensor:
    """``new * factor + old`` in fp32 or wider for a sparse gradient; duplicates are summed before the finite check."""
    new = new.coalesce()
    values = new.values()
    _reference.raise_flag(found_inf.on(values.device), values)
    scale = factor.on(values.device) if isinstance(factor, PerDevice) else factor
    wide = torch.sparse_coo_tensor(
        new.indices(),
        values.to(_reference.compute_dtype(values)) * scale,
        new.shape,
        is_coalesced=True,
        check_invariants=False,  # the indices are those of a tensor; left out, torch warns once per process
    )
    return wide if old is None else old.to(wide.dtype) + wide


class MasterParams:
    """The model parameters behind ``optimizer.param_groups`` and their masters.

    ``pairs`` are (model parameter, master); ``own`` the parameters that the optimizer steps directly. All methods run
    under no_grad and none waits for the device.
    """

    def __init__(self, optimizer: Any, master_weights: bool, originals: dict[Tensor, Tensor]) -> None:
        self.master_weights = master_weights
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.own: list[Tensor] = []
        # 16-bit parameters without requires_grad: they get a master when they are unfrozen.
        self._frozen: list[tuple[dict[str, Any], int]] = []
        # One frame per open scale_loss block: the gradients that were there before its backward.
        self._frames: list[dict[Tensor, Tensor]] = []
        self._may_disagree = True
        for group in optimizer.param_groups:
            self.adopt(optimizer, group, originals)

    # --- membership --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def adopt(self, optimizer: Any, group: dict[str, Any], originals: dict[Tensor, Tensor] | None = None) -> None:
        """Takes in the parameters of a group, putting masters into ``group["params"]`` where they are due."""
        for i, p in enumerate(group["params"]):
            if not self.master_weights or p.dtype not in LOW_PRECISION:
                self.own.append(p)
            elif p.requires_grad:
                self._give_master(optimizer, group, i, (originals or {}).get(p))
            else:
                self._frozen.append((group, i))

    def _give_master(self, optimizer: Any, group: dict[str, Any], i: int, original: Tensor | None) -> None:
        p = group["params"][i]
        # A clone even of fp32 data: state dicts taken before initialize alias the original.
        source = p if original is None else original
        master = source.detach().to(torch.float32, copy=True).requires_grad_()
        group["params"][i] = master
        self.pairs.append((p, master))
        if p in optimizer.state:
            state = optimizer.state.pop(p)
            optimizer.state[master] = {
                k: v.float() if isinstance(v, Tensor) and v.dtype in LOW_PRECISION else v for k, v in state.items()
            }

    def adopt_unfrozen(self, optimizer: Any) -> None:
        """Gives masters to 16-bit parameters that were frozen when they came in and train now."""
        if self._frozen and any(group["params"][i].requires_grad for group, i in self._frozen):
            frozen, self._frozen = self._frozen, []
            for group, i in frozen:
                if group["params"][i].requires_grad:
                    with torch.no_grad():
                        self._give_master(optimizer, group, i, None)
                else:
                    self._frozen.append((group, i))

    @torch.no_grad()
    def dissolve(self, optimizer: Any) -> None:
        """Puts the model parameters back into the optimizer, in fp32 with the masters' values and gradients."""
        model_of = {master: p for p, master in self.pairs}
        for group in optimizer.param_groups:
            for i, master in enumerate(group["params"]):
                if master not in model_of:
                    continue
                p = model_of[master]
                p.grad = None
                p.data = master.detach()
                p.grad = master.grad
                group["params"][i] = p
                if master in optimizer.state:
                    optimizer.state[p] = optimizer.state.pop(master)
        self.own += [p for p, _ in self.pairs]
        self.pairs = []

    # --- values ------------------------------------------------------------------------------------------------------

    def model_changed(self) -> None:
        """Notes that model weights may have changed behind the masters; they are compared before the next backward."""
        self._may_disagree = True

    @torch.no_grad()
    def follow_model(self) -> None:
        """Where a model weight is not the rounded master any more, the master takes the model's value."""
        if self._may_disagree:
            for p, master in self.pairs:
                master.copy_(torch.where(master.to(p.dtype) == p, master, p.to(master.dtype)))
            self._may_disagree = False

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """model = master, rounded to nearest even."""
        if self.pairs:
            foreach.scale([master for _, master in self.pairs], [p for p, _ in self.pairs], FoundInf(), 1.0)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def _leaves(self) -> Iterator[Tensor]:
        """The parameters that a backward writes gradients into."""
        for p, _ in self.pairs:
            yield p
        yield from self.own

    @torch.no_grad()
    def begin(self) -> None:
        """Sets aside the gradients that are there, so that the coming backward's can be told from them."""
        frame: dict[Tensor, Tensor] = {}
        for p in self._leaves():
            if (grad := p.grad) is not None:
                frame[p] = grad if _owns_its_memory(grad) else grad.clone()
                p.grad = None
        self._frames.append(frame)

    def abandon(self) -> None:
        """Drops what arrived since ``begin`` and puts back what was there."""
        frame = self._frames.pop()
        for p in self._leaves():
            p.grad = frame.get(p)

    @torch.no_grad()
    def finish(self, inv_scale: float | PerDevice, found_inf: FoundInf) -> None:
        """Unscales what arrived since ``begin`` and adds it to what was there."""
        frame = self._frames.pop()
        self._fold(inv_scale, found_inf)
        # In a nested block the unscaled gradients are those that the enclosing block set aside.
        outer = self._frames[-1] if self._frames else None
        arrived, before, alone = [], [], []
        for p in self.own:
            new, old = p.grad, frame.get(p) if outer is None else outer.get(p)
            if new is not None and new.layout != torch.strided:
                total: Tensor | None = _add_sparse(new, old, inv_scale, found_inf).to(p.dtype)
            elif new is not None and old is not None:
                new = _writable(new)
                old = old.to_dense() if old.layout != torch.strided else old
                arrived.append(new)
                before.append(old)
                total = new
            elif new is not None:
                total = _writable(new)
                alone.append(total)
            else:
                total = old
            self._put(p, total, frame, outer)
        if arrived:
            foreach.axpby(arrived, before, arrived, found_inf, inv_scale, 1.0, arg_to_check=0)
        if alone and inv_scale != 1.0:
            foreach.scale(alone, alone, found_inf, inv_scale)
        if outer is not None:
            for p, _ in self.pairs:
                p.grad = frame.get(p)

    @staticmethod
    def _put(p: Tensor, total: Tensor | None, frame: dict[Tensor, Tensor], outer: dict[Tensor, Tensor] | None) -> None:
        if outer is None:
            p.grad = total
        else:
            p.grad = frame.get(p)
            if total is not None:
                outer[p] = total

    def _fold(self, factor: float | PerDevice, found_inf: FoundInf) -> None:
        """master.grad += model.grad * factor; the model's gradient has done its work then and is freed."""
        fresh: tuple[list[Tensor], list[Tensor]] = ([], [])
        added: tuple[list[Tensor], list[Tensor]] = ([], [])
        for p, master in self.pairs:
            grad = p.grad
            if grad is None:
                continue
            p.grad = None
            if grad.layout != torch.strided:
                master.grad = _add_sparse(grad, master.grad, factor, found_inf)
            elif master.grad is None:
                # The layout of the gradient, so that the kernels can walk both in memory order.
                master.grad = torch.empty_like(grad, dtype=master.dtype, requires_grad=False)
                fresh[0].append(grad)
                fresh[1].append(master.grad)
            else:
                if master.grad.layout != torch.strided:
                    master.grad = master.grad.to_dense()
                added[0].append(grad)
                added[1].append(master.grad)
        if fresh[0]:
            foreach.scale(*fresh, found_inf, factor)
        if added[0]:
            foreach.axpby(added[0], added[1], added[1], found_inf, factor, 1.0, arg_to_check=0)

    @torch.no_grad()
    def fold_plain_gradients(self) -> FoundInf:
        """Takes over gradients of a backward that ran outside scale_loss: they are in the model and not scaled."""
        found_inf = FoundInf()
        if not self._frames:
            self._fold(1.0, found_inf)
        return found_inf

    def drop_master_grads(self) -> None:
        for _, master in self.pairs:
            master.grad = None

    def drop_model_grads(self) -> None:
        for p, _ in self.pairs:
            p.grad = None
