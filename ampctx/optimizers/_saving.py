"""What a fused optimizer saves and loads, and what copies of it have: the base of ``FusedOptimizer``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampctx._errors import AmpError
from ampctx.casts.arguments import autocast_off
from ampctx.kernels.spec import SPECS
from ampctx.optimizers import _checkpoint, _options, _state_types
from ampctx.optimizers._checkpoint import SavedGroup
from ampctx.optimizers._options import param_name
from ampctx.optimizers._state import EXTRAS

# Attributes that exist only around a step, or that a copy creates again.
TRANSIENT = (
    "found_inf",
    "grad_scale",
    "_zero_flags",
    "_seen",
    "_plan",
    "_numbers",
    "_offload",
)


class Saved(torch.optim.Optimizer):
    """State dicts, copies and pickles of a ``FusedOptimizer``, which this class is the base of alone."""

    def state_dict(self: Any) -> dict[str, Any]:
        """Returns state and options, as in torch, with tensors of the optimizer. No host sync. With ``offload``, waits
        for the step, and the tensors are on the CPU.

        With ``state_dtype`` it has bf16 state and 8-bit codes. Codes of a DTensor that is not sharded by rows of whole
        blocks become fp32, which any ranks can load.
        """
        found = super().state_dict()
        return {**found, "state": _state_types.for_any_ranks(found["state"])}

    @autocast_off()
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
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
        states: dict[Tensor, dict[str, Any]] = {}
        rates = [group["lr"] for group in self.param_groups]

        def before(_: Any, given: dict[str, Any]) -> dict[str, Any] | None:
            found = _checkpoint.matched(given, self.param_groups, lambda g, i: param_name(self.param_groups, g, i))
            if found is None:
                return None
            with torch.no_grad():
                states.update(self._restored(found))
            return {**given, "param_groups": [g.saved for g in found], "state": _checkpoint.leftover(given)}

        def after(_: Any) -> None:
            self.state.update(states)
            if not self.capturable:
                return
            self._lr_to_tensor()
            for i, (group, rate) in enumerate(zip(self.param_groups, rates, strict=True)):
                loaded, is_shared = group["lr"], any(rate is other for other in rates[:i])
                # A CUDA graph may read this tensor, so fill it.
                if not is_shared and _options.is_lr_on_device(rate, _options.device_of(group)):
                    with torch.no_grad():
                        rate.copy_(loaded.reshape(rate.shape))
                    group["lr"] = rate

        # The last hook before torch's own work and the first after it, so that the user's hooks see complete states.
        hooks = [
            self.register_load_state_dict_pre_hook(before),
            self.register_load_state_dict_post_hook(after, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _restored(self: Any, groups: list[SavedGroup]) -> dict[Tensor, dict[str, Any]]:
        result, names = {}, {}
        one_element = set(self._one_element.values())
        for g, group in enumerate(groups):
            self._adapt_checkpoint(group)
            spec = SPECS[self._op_of(group.saved)]
            _state_types.keep_options(group.saved, self.param_groups[g])
            # Adds defaults here, because __setstate__ runs after the checks.
            _checkpoint.check_options(("lr", *self._saved_options(group.saved)), g, group.saved)
            for name, default in self.defaults.items():
                group.saved.setdefault(name, default)
            try:
                self._check_given(group.saved)
            except AmpError as error:
                raise _options.in_group(error, f"param_groups[{g}] of the checkpoint") from None
            for p, name, state in group.states:
                names[p] = name
                _checkpoint.check_complete(spec, type(self).__name__, name, state, group.saved)
                at = p if self._offload is None else self._offload.twin_of(p)
                result[p] = _checkpoint.restored(at, name, state, one_element, self._useless_state(p))
        _checkpoint.check_values(result, names)
        for group in groups:
            for p, _, _ in group.states:
                at = p if self._offload is None else self._offload.twin_of(p)
                _state_types.convert(at, result[p], self._forms(p, group.saved))
        return result

    def _useless_state(self: Any, p: Tensor) -> set[str]:
        """The state keys of a checkpoint that this optimizer never reads for ``p``."""
        used = self.layout_of(p)
        return {key for write_back, key in EXTRAS.items() if write_back != used}

    def _adapt_checkpoint(self: Any, group: SavedGroup) -> None:
        """Converts the layout of other optimizers' checkpoints."""
        _checkpoint.take_step_from_group(group)

    def __getstate__(self: Any) -> dict[str, Any]:
        # Without hooks (private in torch), as torch's own optimizers.
        return {
            name: value
            for name, value in _checkpoint.without_amp(self).items()
            if name not in TRANSIENT and not (name.startswith("_optimizer_") and name.endswith("_hooks"))
        }

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A CUDA graph may read the existing flags, so keep them.
        self.__dict__.setdefault("_zero_flags", {})
        self.__dict__.setdefault("_numbers", {})
        self.__dict__.update(_seen={}, _plan=None)
        if (kept := self.__dict__.get("_offload")) is not None:
            kept.forget()
        else:
            self._make_offload()
        # torch adds this default to every optimizer. Later groups and checkpoints must not get it.
        self.defaults.pop("differentiable", None)
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
