"""Loads the compiled ops once, and says which backends serve and why.

The library speaks to torch through torch's C shim (csrc/torch_abi.h), so the file has no tie to a Python or torch
version: it is opened with ctypes after torch, and its kernels are registered by an explicit call that returns an error
code.
"""

from __future__ import annotations

import ctypes
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from ampctx._errors import ExtensionError

LIBRARY = Path(__file__).with_name("_ops.so")
OLDEST_TORCH = Version("2.11")
BUILD_HINT = "build it with 'pip install .' in a checkout (needs g++; nvcc for the CUDA kernels)"


@dataclass(frozen=True)
class Extension:
    """What was found: ``backends`` are the device types with compiled kernels, ``reason`` why one is missing."""

    loaded: bool
    backends: tuple[str, ...] = ()
    build: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    # Lets a list go that the library knows by a number.
    release_tensors: Callable[[int], None] = lambda number: None
    # csrc/python_lists.h: a number for a list that was read, or 0.
    read_types: Callable[[list[type]], None] = lambda types: None
    read_tensors: Callable[[list[Tensor]], int] = lambda tensors: 0
    read_grads: Callable[[list[Tensor], list[Any], bool], int] | None = None
    read_is_contiguous: Callable[[int], int] = lambda number: False


def _open(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise ExtensionError(f"{path} does not exist: {BUILD_HINT}")
    if Version(torch.__version__).release < OLDEST_TORCH.release:
        raise ExtensionError(f"torch {torch.__version__} is older than {OLDEST_TORCH}: upgrade torch")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ExtensionError(f"{path} cannot be loaded ({error}): {BUILD_HINT}") from error
    library.ampctx_build_info.restype = ctypes.c_char_p
    library.ampctx_release_tensors.argtypes = [ctypes.c_int64]
    library.ampctx_release_tensors.restype = None
    library.ampctx_read_is_contiguous.argtypes = [ctypes.c_int64]
    library.ampctx_read_is_contiguous.restype = ctypes.c_int
    return library


def _readers(path: Path, opened: ctypes.CDLL) -> dict[str, Callable]:
    """What reads lists of tensors as the interpreter has them; nothing where torch does not offer its side."""
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        return {}
    library = ctypes.PyDLL(str(path))  # the same library, called with the GIL held
    use, tensors, grads = library.ampctx_use_python, library.ampctx_read_tensors, library.ampctx_read_grads
    use.argtypes, use.restype = [ctypes.py_object, ctypes.py_object], ctypes.c_int
    tensors.argtypes, tensors.restype = [ctypes.py_object], ctypes.c_int64
    grads.argtypes, grads.restype = [ctypes.py_object, ctypes.py_object, ctypes.c_int], ctypes.c_int64
    if use(exchange, [None, Tensor, torch.nn.Parameter]):
        return {}

    def read_types(types: list[type]) -> None:
        use(exchange, [None, *types])

    is_contiguous = opened.ampctx_read_is_contiguous
    return {
        "read_types": read_types,
        "read_tensors": tensors,
        "read_grads": grads,
        "read_is_contiguous": is_contiguous,
    }


def _register(library: ctypes.CDLL, namespace: str) -> tuple[tuple[str, ...], str]:
    """Registers the kernels of both backends; returns the backends that serve and why CUDA does not."""
    name = namespace.encode()
    if code := library.ampctx_register_cpu(name):
        raise ExtensionError(f"torch refused the CPU kernels (code {code}): is another copy of ampctx loaded?")
    if not torch.version.cuda:
        return ("cpu",), "this torch was built without CUDA"
    if not hasattr(library, "ampctx_register_cuda"):
        return ("cpu",), "built without nvcc: install the CUDA toolkit and rebuild with AMPCTX_CUDA=1"
    if code := library.ampctx_register_cuda(name):
        return ("cpu",), f"torch refused the CUDA kernels (code {code})"
    return ("cpu", "cuda"), ""


def _required() -> str:
    value = os.environ.get("AMPCTX_REQUIRE_EXTENSION", "").lower()
    if value not in ("", "0", "1", "cpu", "cuda"):
        raise ExtensionError(f"AMPCTX_REQUIRE_EXTENSION={value!r}: expected 1, cpu, cuda or nothing")
    return "" if value == "0" else value


def load(namespace: str, path: Path = LIBRARY) -> Extension:
    """Registers the compiled kernels for the ops of ``namespace``, which must be defined already.

    A missing or unusable library is reported once as a RuntimeWarning, or raised as ExtensionError when the environment
    variable AMPCTX_REQUIRE_EXTENSION is 1 or cpu (the CPU kernels) or cuda (both).
    """
    required = _required()
    try:
        library = _open(path)
        backends, reason = _register(library, namespace)
        build = json.loads(library.ampctx_build_info())
        found = Extension(True, backends, build, reason, library.ampctx_release_tensors, **_readers(path, library))
    except ExtensionError as error:
        if required:
            raise
        warnings.warn(f"ampctx runs on plain torch, slower: {error}", RuntimeWarning, stacklevel=2)
        return Extension(False, reason=str(error))
    if required == "cuda" and "cuda" not in found.backends:
        raise ExtensionError(f"AMPCTX_REQUIRE_EXTENSION=cuda, and the CUDA kernels do not serve: {found.reason}")
    if torch.version.cuda and "cuda" not in found.backends and not required:
        warnings.warn(f"ampctx runs on plain torch on CUDA, slower: {found.reason}", RuntimeWarning, stacklevel=2)
    return found
