"""``ops_fp32``: torch functions that compute in fp32 at every opt level."""

from __future__ import annotations

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import get_overridable_functions

from ampctx._errors import AmpValueError
from ampctx.casts.arguments import LOW_PRECISION, Undo, autocast_off, map_arguments, map_leaves, names_dtype, widen
from ampctx.casts.functions import cast_function, replace_function, shared

_NAMESPACES: dict[str, Any] = {"torch": torch, "torch.nn.functional": F}
_NAMESPACES |= {f"torch.{name}": getattr(torch, name) for name in ("linalg", "special", "fft", "sparse")}
# The special methods of operators.
_OPERATORS = {name: (f"__{name}__", f"__r{name}__") for name in ("add", "sub", "mul", "pow", "matmul")}
_OPERATORS |= dict.fromkeys(("div", "true_divide"), ("__truediv__", "__rtruediv__"))
# These write into their arguments, which would be fp32 copies.
_WRITE_ARGUMENTS = ("batch_norm", "instance_norm", "embedding", "embedding_bag")

# --- names ------------------------------------------------------------------------------------------------------------


def _is_of_torch(fn: Callable) -> bool:
    return getattr(fn, "__globals__", {"__name__": "torch"})["__name__"].partition(".")[0] == "torch"


@functools.lru_cache(maxsize=1)
def _overridable() -> frozenset[Callable]:
    # torch caches what it finds at the first call. During a session that includes amp's wrappers, hence unwrap.
    found = [fn for functions in get_overridable_functions().values() for fn in functions]
    of_sparse = map(inspect.unwrap, vars(torch.sparse).values())  # torch omits these
    found += [fn for fn in of_sparse if isinstance(fn, types.BuiltinFunctionType)]
    return frozenset(inspect.unwrap(fn, stop=_is_of_torch) for fn in found)


def _function(namespace: Any, name: str) -> Callable | None:
    """torch's own function behind a name, without wrappers of amp or others."""
    fn = getattr(namespace, name, None)
    if not callable(fn):
        return None
    fn = inspect.unwrap(fn, stop=lambda f: f in _overridable())
    return fn if fn in _overridable() else None


def op_names(ops_fp32: Sequence[str | Callable]) -> tuple[str, ...]:
    """The plain names of torch functions, given by name (with or without namespace) or as functions.

    Raises:
        AmpValueError: an entry is not a torch function, or writes into other arguments than the first.
    """
    return tuple(dict.fromkeys(_name(op) for op in ops_fp32))


def _name(op: str | Callable) -> str:
    if isinstance(op, str):
        asked = repr(op)
        prefix, _, name = op.rpartition(".")
        prefixes = {prefix, f"torch.{prefix}", {"F": "torch.nn.functional"}.get(prefix, prefix)}
        spaces = [s for key, s in _NAMESPACES.items() if not prefix or key in prefixes]
        spaces += [Tensor] if prefix and "torch.Tensor" in prefixes else []
    else:
        asked, name, prefix = f"function {getattr(op, '__name__', op)!r}", _name_of(op), ""
        spaces = list(_NAMESPACES.values())
    if _is_in_place(name) and (not prefix or "torch.Tensor" in prefixes):
        return name
    known = dict.fromkeys(n for space in _NAMESPACES.values() for n in vars(space) if _function(space, n) is not None)
    if name not in known or not any(_function(space, name) for space in spaces):
        near = difflib.get_close_matches(name, known)
        raise AmpValueError(
            f"ops_fp32: {asked} is no function of {', '.join(_NAMESPACES)}. "
            + (f"Similar names: {', '.join(map(repr, near))}. " if near else "")
            + ("" if isinstance(op, str) else "For your own functions use amp.float_function.")
        )
    if name in _WRITE_ARGUMENTS:
        raise AmpValueError(
            f"ops_fp32: {asked} may write into its arguments, which would be fp32 copies, so the writes would be lost. "
            "Name the modules that call it in keep_fp32."
        )
    return name


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and _function(Tensor, name) is not None


def _name_of(fn: Callable) -> str:
    """torch's name for the function, or else its own ``__name__``."""
    names = [n for space in (*_NAMESPACES.values(), Tensor) for n in dir(space) if _function(space, n) == fn]
    own = getattr(fn, "__name__", repr(fn))
    plain = [next((op for op, methods in _OPERATORS.items() if n in methods), n) for n in names]
    return own if own in plain or not plain else plain[0]


# --- calls ------------------------------------------------------------------------------------------------------------


def _call_in_fp32(fn: Callable, args: tuple, kwargs: dict[str, Any], _: bool) -> Any:
    """Calls ``fn`` with 16-bit arguments cast to fp32.

    With autocast off, fp32 results are cast back to the widest 16-bit dtype among the arguments.
    """
    if writes := "out" in kwargs:
        fn = functools.partial(fn, out=kwargs.pop("out"))
    if names_dtype(args, kwargs):
        return fn(*args, **kwargs)
    low: set[torch.dtype] = set()
    devices: set[str] = set()

    def noted(t: Tensor) -> Tensor:
        devices.add(t.device.type)
        if t.dtype in LOW_PRECISION:
            low.add(t.dtype)
        return widen(t)

    args, kwargs = map_arguments(args, kwargs, noted)
    if any(map(torch.is_autocast_enabled, devices)):
        with autocast_off():
            return fn(*args, **kwargs)
    result = fn(*args, **kwargs)
    if writes or not low:
        return result
    back = functools.reduce(torch.promote_types, low)
    return map_leaves(result, lambda t: t.to(back) if t.dtype == torch.float32 else t, objects=False)


def _call_in_place(fn: Callable, args: tuple, kwargs: dict[str, Any], now: bool) -> Any:
    """``_call_in_fp32`` for a function that writes its first argument. In 16 bits that takes the rounded result."""
    target = args[0] if args else kwargs["input"]
    result = _call_in_fp32(fn, args, kwargs, now)
    return target.copy_(result) if target.dtype in LOW_PRECISION else target


def _in_fp32(function: tuple[Any, str], fn: Callable) -> Callable:
    # Other code may still hold the wrapper after the last user is gone, so it asks ``shared`` at each call.
    call = _call_in_place if _is_in_place(function[1]) else _call_in_fp32
    replacement = cast_function(fn, lambda: True if function in shared else None, call)
    if not isinstance(fn, types.MethodDescriptorType):
        # dynamo then puts calls into its graph, as it does for torch's functions. (It records methods by name.) The
        # original needs it too: dynamo looks up torch's functions once, maybe while one is replaced.
        torch.compiler.allow_in_graph(replacement)
        torch.compiler.allow_in_graph(fn)
    return replacement


def install_fp32_ops(names: Iterable[str]) -> Undo:
    """Makes torch functions compute in fp32 wherever Python calls them, as function, method or operator.

    Calls inside torch's own compiled functions are not affected. No host sync.

    Args:
        names: from ``op_names``.
    """
    functions = [(space, name) for name in names for space in (*_NAMESPACES.values(), Tensor)]
    functions += [(Tensor, method) for name in names for method in _OPERATORS.get(name, ())]
    with ExitStack() as stack:
        for function in dict.fromkeys(functions):
            if _function(*function) is not None:
                replace = functools.partial(replace_function, *function, functools.partial(_in_fp32, function))
                stack.callback(shared.acquire(function, replace))
        return stack.pop_all().close
