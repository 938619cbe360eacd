"""apex.amp.utils: cast helpers. They test dtypes, on any device; apex tested type strings."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from ampctx_apex.install import refused

from . import compat


def is_cuda_enabled() -> bool:
    """Whether torch is built with CUDA."""
    return torch.version.cuda is not None


def get_cuda_version() -> tuple[int, ...]:
    """The CUDA version that torch is built with, empty without CUDA."""
    return tuple(int(part) for part in (torch.version.cuda or "").split(".") if part)


def is_nested(x: Any) -> bool:
    return isinstance(x, (tuple, list))


def is_fp_tensor(x: Any) -> bool:
    """A floating tensor, or a list or tuple of nothing else."""
    return all(is_fp_tensor(y) for y in x) if is_nested(x) else compat.is_floating_point(x)


def should_cache(x: Any) -> bool:
    """An fp32 parameter, or a list or tuple of nothing else."""
    if is_nested(x):
        return all(should_cache(y) for y in x)
    return isinstance(x, torch.nn.Parameter) and x.dtype == torch.float32


def type_string(x: torch.Tensor) -> str:
    """ "FloatTensor", "HalfTensor" and so on, whatever the device."""
    return x.type().split(".")[-1]


def collect_fp_tensor_types(args: Iterable[Any], kwargs: dict[str, Any]) -> set[str]:
    """The type strings of the floating tensors among the arguments."""

    def leaves(x: Any) -> Iterable[Any]:
        return itertools.chain.from_iterable(map(leaves, x)) if is_nested(x) else [x]

    given = itertools.chain(args, kwargs.values())
    return {type_string(t) for x in given if is_fp_tensor(x) for t in leaves(x)}


def _maybe(dtype: torch.dtype, line: str, x: Any, name: str, verbose: bool) -> Any:
    if is_nested(x):
        elements = [_maybe(dtype, line, y, "", False) for y in x]
        return x._make(elements) if hasattr(x, "_make") else type(x)(elements)
    if x.dtype == dtype:
        return x
    if verbose:
        print(f"{line} ({name})")
    return x.to(dtype)


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """A tensor, or a list or tuple of tensors, in float16."""
    return _maybe(torch.float16, "Float->Half", x, name, verbose)


def maybe_bfloat16(x: Any, name: str = "", verbose: bool = False) -> Any:
    """A tensor, or a list or tuple of tensors, in bfloat16."""
    return _maybe(torch.bfloat16, "Float->BFloat16", x, name, verbose)


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """A tensor, or a list or tuple of tensors, in float32."""
    return _maybe(torch.float32, "Half->Float", x, name, verbose)


def casted_args(cast_fn: Callable[[Any], Any], args: Iterable[Any], kwargs: dict[str, Any]) -> list[Any]:
    """``args`` with ``cast_fn`` of what ``is_fp_tensor``; ``kwargs`` are replaced in place."""
    for name, value in kwargs.items():
        if is_fp_tensor(value):
            kwargs[name] = cast_fn(value)
    return [cast_fn(x) if is_fp_tensor(x) else x for x in args]


def cached_cast(cast_fn: Callable[[Any], Any], x: Any, cache: dict[Any, Any]) -> Any:
    """``cast_fn(x)``, kept in ``cache`` for as long as it can serve: gradients have to flow through it where ``x`` asks
    for them."""
    if is_nested(x):
        elements = [cached_cast(cast_fn, y, cache) for y in x]
        return x._make(elements) if hasattr(x, "_make") else type(x)(elements)
    cached = cache.get(x)
    if cached is None or (torch.is_grad_enabled() and x.requires_grad != cached.requires_grad):
        cached = cache[x] = cast_fn(x)
    return cached


def verbosify(cast_fn: Callable[..., Any], fn_name: str, verbose: bool) -> Callable[..., Any]:
    """``cast_fn``, which prints casts for ``fn_name`` if ``verbose``."""
    return functools.partial(cast_fn, name=fn_name, verbose=verbose) if verbose else cast_fn


def as_inplace(fns: Iterable[str]) -> Iterable[str]:
    """Each name with an underscore."""
    return (fn + "_" for fn in fns)


def has_func(mod: Any, fn: str) -> bool:
    return fn in mod if isinstance(mod, dict) else hasattr(mod, fn)


def get_func(mod: Any, fn: str) -> Any:
    return mod[fn] if isinstance(mod, dict) else getattr(mod, fn)


def set_func(mod: Any, fn: str, new_fn: Any) -> None:
    if isinstance(mod, dict):
        mod[fn] = new_fn
    else:
        setattr(mod, fn, new_fn)


def set_func_save(handle: Any, mod: Any, fn: str, new_fn: Any) -> None:
    """``mod.fn = new_fn``, until ``handle._deactivate()``."""
    handle._save_func(mod, fn, get_func(mod, fn))
    set_func(mod, fn, new_fn)


synthesize_flattened_rnn_weights = refused("apex.amp.utils.synthesize_flattened_rnn_weights")
new_synthesize_flattened_rnn_weights = refused("apex.amp.utils.new_synthesize_flattened_rnn_weights")

__all__ = [
    "as_inplace",
    "cached_cast",
    "casted_args",
    "collect_fp_tensor_types",
    "get_cuda_version",
    "get_func",
    "has_func",
    "is_cuda_enabled",
    "is_fp_tensor",
    "is_nested",
    "maybe_bfloat16",
    "maybe_float",
    "maybe_half",
    "new_synthesize_flattened_rnn_weights",
    "set_func",
    "set_func_save",
    "should_cache",
    "synthesize_flattened_rnn_weights",
    "type_string",
    "verbosify",
]
