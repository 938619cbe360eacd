"""apex.contrib.clip_grad: ``ampctx.clip_grad_norm_``, which waits for no device."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

from .clip_grad import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
