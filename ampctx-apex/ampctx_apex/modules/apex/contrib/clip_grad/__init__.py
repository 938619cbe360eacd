"""apex.contrib.clip_grad: ``ampctx.clip_grad_norm_``, which waits for no device."""

from ampctx_apex.install import also_called

also_called(__name__, "clip_grad")
