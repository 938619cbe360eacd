"""apex.amp.wrap: wrappers that cast while a handle is active. Functions that patched torch raise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ampctx_apex.install import refused

from ampctx.spi import call_cast

from . import utils
from ._amp_state import _amp_state


def make_cast_wrapper(
    orig_fn: Callable[..., Any], cast_fn: Callable[[Any], Any], handle: Any, try_caching: bool = False
) -> Callable[..., Any]:
    """``orig_fn`` with ``cast_fn`` of its floating arguments while ``handle`` is active; nothing is cached."""

    @functools.wraps(orig_fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not handle.is_active():
            return orig_fn(*args, **kwargs)
        return orig_fn(*utils.casted_args(cast_fn, args, kwargs), **kwargs)

    return wrapper


def make_promote_wrapper(orig_fn: Callable[..., Any], cast_fn: Any, handle: Any = None) -> Callable[..., Any]:
    """``orig_fn`` with its floating arguments in the widest type among them while the handle is active."""

    @functools.wraps(orig_fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        of_state = getattr(_amp_state, "handle", None)
        if of_state is None or not of_state.is_active():
            return orig_fn(*args, **kwargs)
        return call_cast("promote", orig_fn, args, kwargs)

    return wrapper


cached_cast = refused("apex.amp.wrap.cached_cast")
promote = refused("apex.amp.wrap.promote")
sequence_promote = refused("apex.amp.wrap.sequence_promote")
promote_match_arg0 = refused("apex.amp.wrap.promote_match_arg0")
err_if_any_half = refused("apex.amp.wrap.err_if_any_half")
err_if_arg0_half = refused("apex.amp.wrap.err_if_arg0_half")
rnn_cast = refused("apex.amp.wrap.rnn_cast")
new_rnn_cast = refused("apex.amp.wrap.new_rnn_cast")
disable_casts = refused("apex.amp.wrap.disable_casts")

__all__ = [
    "cached_cast",
    "disable_casts",
    "err_if_any_half",
    "err_if_arg0_half",
    "make_cast_wrapper",
    "make_promote_wrapper",
    "new_rnn_cast",
    "promote",
    "promote_match_arg0",
    "rnn_cast",
    "sequence_promote",
]
