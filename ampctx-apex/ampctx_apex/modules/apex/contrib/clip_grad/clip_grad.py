"""apex.contrib.clip_grad.clip_grad."""

from ampctx import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
