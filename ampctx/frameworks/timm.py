"""timm: loss scalers for the loop of its training script, in the place of its ``NativeScaler``."""

from __future__ import annotations

from typing import Any

from timm.utils import NativeScaler, dispatch_clip_grad

from ampctx import GradScaler, amp


class AutocastScaler(NativeScaler):
    """``NativeScaler`` over ``ampctx.GradScaler``, for a loop under torch.autocast."""

    def __init__(self, device: str = "cuda") -> None:
        self._scaler = GradScaler(device)  # private in timm, whose constructor takes no scaler


class AmpScaler:
    """For a model and an optimizer that went through ``amp.initialize``, without autocast around them."""

    state_dict_key = "amp"  # timm's checkpoints have it under this name

    def __call__(
        self, loss, optimizer, clip_grad=None, clip_mode="norm", parameters=None, create_graph=False, need_update=True
    ):
        with amp.scale_loss(loss, optimizer, delay_unscale=not need_update) as scaled_loss:
            scaled_loss.backward(create_graph=create_graph)
        if need_update:
            if clip_grad is not None:
                dispatch_clip_grad(amp.master_params(optimizer), clip_grad, mode=clip_mode)
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return amp.state_dict(masters=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        amp.load_state_dict(state_dict)
