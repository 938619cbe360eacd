"""Loads the compiled ops once, and says which backends have kernels and why others have none.

The library calls torch through torch's C shim (csrc/torch_abi.h), so one file fits every Python and torch version.
ctypes opens it after torch; an explicit call registers its kernels and returns an error code.

CUDA kernels are registered at the first CUDA tensor (``LateKernels``). Whether they run depends on the GPUs, and asking
for these initializes CUDA. An import must not do that, because the process could not fork afterwards.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampctx._errors import ExtensionError
from ampctx.kernels.cuda_support import driver_version, why_not

LIBRARY = Path(__file__).parent.with_name("_ops.so")
BUILD_HINT = "build it with 'pip install .' in a checkout (needs g++; nvcc for the CUDA kernels)"
if sys.platform != "linux":
    BUILD_HINT = "the compiled kernels are for Linux"


@dataclass(frozen=True)
class LateKernels:
    """Kernels to register at the first tensor of their device type."""

    namespace: str
    device_type: str
    # For each device, why the kernels do not run there, or "".
    problems: Callable[[], dict[torch.device, str]]
    # Registers the kernels for the ops of a namespace.
    register: Callable[[str], None]
    # Defines the ops in a namespace.
    define: Callable[[str], Any]
    required: str = ""  # AMPCTX_REQUIRE_EXTENSION


@dataclass
class Extension:
    """The loaded library: ``backends`` lists device types with compiled kernels, ``reason`` says why one is missing.

    ``backends`` includes the device type of ``late`` kernels until ``decide`` finds that they do not run.
    """

    loaded: bool
    backends: tuple[str, ...] = ()
    build: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    # Functions of csrc/python_lists.h. ``new_list`` gives a handle: its number, and an owner that frees the list.
    new_list: Callable[[], tuple[int, Any]] = lambda: (0, None)
    use_types: Callable[[list[type]], int] = lambda types: 0
    # The functions that read return whether they have read the tensors into the handle ``number``.
    read_tensors: Callable[[list[Tensor], int], int] = lambda tensors, number: 0
    read_grads: Callable[[list[Tensor], list[Any], bool, int], int] | None = None
    collect_grads: Callable[[list[Tensor], list[Any]], int] | None = None
    read_along: Callable[[list[Tensor], list[Any], int, int], int] = lambda params, grads, number, of_params: 0
    read_entries: Callable[[list[Any], str, list[Tensor], int], int] = lambda dicts, key, found, number: 0
    are_contiguous: Callable[[int], int] = lambda number: False
    lie_alike: Callable[[int, int], int] = lambda grads, params: False
    is_uniform: Callable[[int, bool], int] = lambda number, fill_storages: False
    are_apart: Callable[[list[int]], int] = lambda numbers: False
    # Functions of csrc/python_passes.h by name, for ``ampctx.kernels.tensor_loops``.
    passes: dict[str, Callable[..., Any]] = field(default_factory=dict)
    late: LateKernels | None = None
    # If the kernels run on only some GPUs: the ops for those.
    apart: dict[torch.device, Any] = field(default_factory=dict)
    _definitions: list[Any] = field(default_factory=list, repr=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def serves(self, device_type: str) -> bool:
        """Whether all devices of this type have compiled kernels."""
        if self.late is not None and self.late.device_type == device_type:
            self.decide()
        return device_type in self.backends

    def decide(self) -> None:
        """Registers the late kernels for the devices where they run, and warns about the others."""
        with self._lock:
            late = self.late
            if late is None:
                return
            problems = late.problems()
            lacking = {device: problem for device, problem in problems.items() if problem}
            where, reason = late.device_type.upper(), next(iter(lacking.values()), "")
            if apart := 0 < len(lacking) < len(problems):
                where = ", ".join(map(str, lacking))
                reason = f"{reason}, or hide {where} with CUDA_VISIBLE_DEVICES"
            if reason and late.required == "cuda":
                raise ExtensionError(_REQUIRED.format(reason))
            if apart:
                self._register_apart(late, [device for device in problems if device not in lacking])
            elif not lacking:
                late.register(late.namespace)
            if reason:
                self.backends = tuple(backend for backend in self.backends if backend != late.device_type)
                self.reason = reason
            self.late = None
        if reason and not late.required:
            _warn(f" on {where}", reason)

    def _register_apart(self, late: LateKernels, devices: list[torch.device]) -> None:
        namespace = f"{late.namespace}_apart"
        self._definitions.append(late.define(namespace))
        late.register(namespace)
        self.apart = dict.fromkeys(devices, getattr(torch.ops, namespace))

    def kernel_for(self, name: str, args: Sequence[Any]) -> Any:
        """The kernel that should serve a call that reached the fallback, or None."""
        late = self.late
        if late is None and not self.apart:
            return None
        lists = (arg if isinstance(arg, (list, tuple)) else [arg] for arg in args)
        devices = {t.device for tensors in lists for t in tensors if isinstance(t, Tensor)}
        if late is not None and any(device.type == late.device_type for device in devices):
            self.decide()
            # Without a registered kernel this call reaches the fallback again.
            return getattr(getattr(torch.ops, late.namespace), name).default
        ops = next((self.apart[device] for device in devices if device in self.apart), None)
        return ops and getattr(ops, name).default


_REQUIRED = "AMPCTX_REQUIRE_EXTENSION=cuda, but the CUDA kernels cannot run: {}"


def _warn(where: str, reason: str) -> None:
    warnings.warn(f"ampctx runs on plain torch{where}, slower: {reason}", RuntimeWarning, stacklevel=3)


def _hint(path: Path) -> str:
    """What to do about a missing library. In a checkout, Python imports its sources before the installed package."""
    places = (Path(str(found.locate_file("ampctx"))) for found in metadata.distributions(name="ampctx"))
    for place in places if path == LIBRARY else ():
        if place != path.parent and (place / path.name).exists():
            return (
                f"Python imported this source tree, not the ampctx installed in {place}. Start Python, and keep your "
                "scripts, outside of the tree, or build the kernels in it with 'pip install -e .'"
            )
    return BUILD_HINT


def _open(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise ExtensionError(f"{path} does not exist: {_hint(path)}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ExtensionError(f"{path} cannot be loaded ({error}): {BUILD_HINT}") from error
    library.ampctx_build_info.restype = ctypes.c_char_p
    return library


# Functions of csrc/python_lists.h and csrc/python_passes.h. Their arguments are objects (o), numbers (n) and flags (f);
# they return an int, or what a third part says.
_READERS = (
    "use_types:o read_tensors:on read_grads:oofn collect_grads:oo read_along:oonn read_entries:ooon are_contiguous:n"
    " lie_alike:nn is_uniform:nf are_apart:o"
)
_PASSES = (
    "same_items:oo same_members:oo nothing_changed:oonoo same_plan:ooooo are_plain:o are_resolved:o have_no_grad:of"
    " clear_grads:of bump_each:o held_kinds:n:o write_counts:on:o"
)


def _functions(library: ctypes.CDLL, signatures: str) -> dict[str, Any]:
    """The functions by name. They hold the GIL."""
    kinds: dict[str, Any] = {"o": ctypes.py_object, "n": ctypes.c_int64, "f": ctypes.c_int}
    found = {}
    for signature in signatures.split():
        name, arguments, *result = signature.split(":")
        address = ctypes.c_void_p.in_dll(library, f"ampctx_{name}").value or 0
        prototype = ctypes.PYFUNCTYPE(kinds[result[0] if result else "f"], *[kinds[kind] for kind in arguments])
        found[name] = prototype(address)
    return found


def _readers(library: ctypes.CDLL) -> dict[str, Any]:
    """The functions that own and read lists of tensors. Readers need torch's DLPack exchange."""
    found = _functions(library, "new_list::o")
    use_python = _functions(library, "use_python:oo")["use_python"]
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None or use_python(exchange, [None, Tensor.grad, Tensor._version]):
        return found
    found |= _functions(library, _READERS)
    found["use_types"]([Tensor, torch.nn.Parameter])
    _allow_hints(_functions(library, "use_hints:oon")["use_hints"])
    return found | {"passes": _functions(library, _PASSES)}


def _allow_hints(use_hints: Callable[[Any, list[int], int], int]) -> None:
    """Shows the library a parameter with a gradient, the addresses of its parts, of a plain tensor, its negation and
    parameters without a gradient, their dispatch keys, and a version. torch tells them in private attributes, which
    the library compares with what it finds."""
    # The variables keep all of them alive until the library has looked.
    plain, grad = (torch.zeros(1, device="cpu") for _ in range(2))
    param, *others = (torch.nn.Parameter(torch.zeros(1, device="cpu")) for _ in range(3))
    param.grad = grad
    for _ in range(3):
        plain.zero_()
    # z.conj().imag is the public way to a negated tensor.
    negated = torch.zeros(1, dtype=torch.complex64, device="cpu").conj().imag
    parts: list[Any] = [param, plain, grad, param.untyped_storage(), *others, negated]
    # Private, as no public name tells the dispatch keys; where they differ, the library reads no lists.
    keys = [torch._C._dispatch_keys(t).raw_repr() for t in (param, plain, negated)]
    names = torch._C.DispatchKey.Negative, torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.ZeroTensor
    unresolved = [torch._C.DispatchKeySet(name).raw_repr() for name in names]
    use_hints(param, [*(part._cdata for part in parts), *keys, sum(unresolved)], plain._version)


def _register_cpu(library: ctypes.CDLL, namespace: str) -> None:
    if code := library.ampctx_register_cpu(namespace.encode()):
        raise ExtensionError(f"torch refused the CPU kernels (code {code}). Import one copy of ampctx only.")


def _why_no_cuda(library: ctypes.CDLL, build: dict[str, Any]) -> str:
    """Why the CUDA kernels cannot run, as far as that is known without asking the GPUs; "" if nothing is."""
    if not torch.version.cuda:
        return "this torch was built without CUDA"
    if not hasattr(library, "ampctx_register_cuda"):
        return "built without nvcc: install the CUDA toolkit and rebuild with AMPCTX_CUDA=1"
    return why_not(driver_version(), _toolkit(build), build["cuda_archs"], None)


def _toolkit(build: dict[str, Any]) -> tuple[int, int]:
    major, minor = build["cuda"].split(".")[:2]
    return int(major), int(minor)


def _late_cuda(
    library: ctypes.CDLL, build: dict[str, Any], namespace: str, define: Callable[[str], Any], required: str
) -> LateKernels:
    def problems() -> dict[torch.device, str]:
        driver, toolkit, archs = driver_version(), _toolkit(build), build["cuda_archs"]
        gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        return {gpu: why_not(driver, toolkit, archs, torch.cuda.get_device_capability(gpu)) for gpu in gpus}

    def register(name: str) -> None:
        if code := library.ampctx_register_cuda(name.encode()):
            raise ExtensionError(f"torch refused the CUDA kernels (code {code}). Import one copy of ampctx only.")

    return LateKernels(namespace, "cuda", problems, register, define, required)


def _required() -> str:
    value = os.environ.get("AMPCTX_REQUIRE_EXTENSION", "").lower()
    if value not in ("", "0", "1", "cpu", "cuda"):
        raise ExtensionError(f"AMPCTX_REQUIRE_EXTENSION={value!r}: expected 1, cpu, cuda or nothing")
    return "" if value == "0" else value


def load(namespace: str, define: Callable[[str], Any], path: Path = LIBRARY) -> Extension:
    """Registers the compiled kernels for the ops of ``namespace``, which must be defined already.

    ``define`` defines the same ops in another namespace. A missing or unusable library gives one RuntimeWarning. It
    raises ExtensionError if the environment variable AMPCTX_REQUIRE_EXTENSION is 1 or cpu (CPU kernels) or cuda (both).
    """
    required = _required()
    try:
        library = _open(path)
        _register_cpu(library, namespace)
        build = json.loads(library.ampctx_build_info())
        found = Extension(True, ("cpu",), build, "", **_readers(library))
    except ExtensionError as error:
        if required:
            raise
        _warn("", str(error))
        return Extension(False, reason=str(error))
    found.reason = _why_no_cuda(library, build)
    if not found.reason:
        found.backends += ("cuda",)
        found.late = _late_cuda(library, build, namespace, define, required)
    elif required == "cuda":
        raise ExtensionError(_REQUIRED.format(found.reason))
    elif torch.version.cuda and not required:
        _warn(" on CUDA", found.reason)
    return found
