"""apex.contrib.clip_grad: ``ampctx.clip_grad_norm_``, which waits for no device."""
