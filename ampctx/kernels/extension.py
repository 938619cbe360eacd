"""Loads the compiled ops once, and says which backends have kernels and why others have none.

The library is a module of Python's stable ABI, and calls torch through torch's C shim (csrc/torch_abi.h): one file fits
every Python and torch version. An explicit call registers its kernels and returns an error code.

CUDA kernels are registered at the first CUDA tensor (``LateKernels``). Whether they run depends on the GPUs, and asking
for these initializes CUDA. An import must not do that, because the process could not fork afterwards.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx._errors import ExtensionError
from ampctx.kernels.cuda_support import driver_version, why_not
from ampctx.kernels.tensor_loops import increment_version

LIBRARY = Path(__file__).parent.with_name("_ops.so")
ON_LINUX = "build it with 'pip install .' in a checkout (needs g++)"
BUILD_HINT = ON_LINUX if sys.platform == "linux" else "the compiled kernels are for Linux"


# Those that plans read; none has a `grad` that torch does not store.
PLAIN_TYPES: list[type] = [Tensor, torch.nn.Parameter]


class LateKernels(NamedTuple):
    """Kernels to register at the first tensor of their device type.

    problems: for each device, why the kernels do not run there, or "".
    register, define: register the kernels, and define the ops, in a namespace.
    required: AMPCTX_REQUIRE_EXTENSION.
    """

    namespace: str
    device_type: str
    problems: Callable[[], dict[torch.device, str]]
    register: Callable[[str], None]
    define: Callable[[str], Any]
    required: str = ""


@dataclass
class Extension:
    """The loaded library: ``backends`` lists device types with compiled kernels, ``reason`` says why one is missing.

    ``backends`` includes the device type of ``late`` kernels until ``decide`` finds that they do not run.
    """

    loaded: bool
    backends: tuple[str, ...] = ()
    build: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    # The library where it reads tensors as Python objects, for plans and questions about many tensors; else None.
    reader: Any = None
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
                namespace = f"{late.namespace}_apart"
                self._definitions.append(late.define(namespace))
                late.register(namespace)
                self.apart = dict.fromkeys(problems.keys() - lacking.keys(), getattr(torch.ops, namespace))
            elif not lacking:
                late.register(late.namespace)
            if reason:
                self.backends = tuple(backend for backend in self.backends if backend != late.device_type)
                self.reason = reason
            self.late = None
        if reason and not late.required:
            _warn(f" on {where}", reason)

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
    """The fix for a missing library. In a checkout, Python imports its sources before the installed package."""
    places = (Path(str(found.locate_file("ampctx"))) for found in metadata.distributions(name="ampctx"))
    for place in places if path == LIBRARY else ():
        if place != path.parent and (place / path.name).exists():
            return (
                f"Python imported this source tree, not the ampctx installed in {place}. Start Python, and keep your "
                "scripts, outside of the tree, or build the kernels in it with 'pip install -e .'"
            )
    record = path.with_name("_why_no_ops.txt")  # setup.py writes it
    return f"the build left the kernels out: {record.read_text()}" if record.exists() else BUILD_HINT


def _open(path: Path) -> Any:
    if not path.exists():
        raise ExtensionError(f"{path} does not exist: {_hint(path)}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise ExtensionError("a free-threaded Python lacks the stable ABI that the kernels need: use one with the GIL")
    spec = spec_from_file_location("ampctx._ops", path)
    try:
        library = module_from_spec(spec)  # type: ignore[arg-type]
    except ImportError as error:
        raise ExtensionError(f"{path} cannot be loaded ({error}): {BUILD_HINT}") from error
    return library


def _reads_python(library: Any, namespace: str) -> bool:
    """Tells C what it needs to read tensors. Whether it does."""
    _register(library, "read", namespace)
    # Private names. torch has no public way to see a write without reading the tensor. Its docs name the second.
    version: Any = Tensor._version
    getters = Tensor.grad, version, increment_version, PLAIN_TYPES, torch._C.DisableTorchFunctionSubclass
    address_of, read = torch.empty(0, device="cpu").data_ptr, getattr(torch.ops, namespace).read.default
    return bool(library.use_python(read, *getters, address_of))


def _register(library: Any, backend: str, namespace: str) -> None:
    if code := library.register(backend, namespace):
        raise ExtensionError(
            f"torch refused the {backend.upper()} kernels (code {code}). Import one copy of ampctx only."
        )


def _why_no_cuda(build: dict[str, Any]) -> str:
    """Why the CUDA kernels cannot run, as far as that is known without asking the GPUs; "" if nothing is."""
    if not torch.version.cuda:
        return "this torch was built without CUDA"
    if not build["cuda"]:
        return f"the build left the CUDA kernels out: {build['why_no_cuda']}"
    return _why_not(build, None)


def _why_not(build: dict[str, Any], gpu: tuple[int, int] | None) -> str:
    major, minor = build["cuda"].split(".")[:2]
    return why_not(driver_version(), (int(major), int(minor)), build["cuda_archs"], gpu)


def _problems_of_gpus(build: dict[str, Any]) -> dict[torch.device, str]:
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return {gpu: _why_not(build, torch.cuda.get_device_capability(gpu)) for gpu in gpus}


def _required() -> str:
    value = os.environ.get("AMPCTX_REQUIRE_EXTENSION", "").lower()
    if value not in ("", "0", "1", "cpu", "cuda"):
        raise ExtensionError(f"AMPCTX_REQUIRE_EXTENSION={value!r}: expected 1, cpu, cuda or nothing")
    return "" if value == "0" else value


def load(namespace: str, define: Callable[[str], Any], path: Path = LIBRARY) -> Extension:
    """Registers the compiled kernels for the ops of ``namespace``; ``define`` defines these in another one. Without a
    usable library it warns, or raises ExtensionError where AMPCTX_REQUIRE_EXTENSION is 1, cpu, or cuda (both)."""
    required = _required()
    try:
        library = _open(path)
        _register(library, "cpu", namespace)
        build = json.loads(library.build_info())
        found = Extension(True, ("cpu",), build, "", library if _reads_python(library, namespace) else None)
    except ExtensionError as error:
        if required:
            raise
        _warn("", str(error))
        return Extension(False, reason=str(error))
    found.reason = _why_no_cuda(build)
    rest = partial(_register, library, "cuda"), define, required
    if not found.reason:
        found.backends += ("cuda",)
        found.late = LateKernels(namespace, "cuda", partial(_problems_of_gpus, build), *rest)
    elif required == "cuda":
        raise ExtensionError(_REQUIRED.format(found.reason))
    elif torch.version.cuda:
        found.late = LateKernels(namespace, "cuda", lambda: {torch.device("cuda"): found.reason}, *rest)
    return found
