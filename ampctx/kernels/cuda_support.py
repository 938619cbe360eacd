"""Decides whether the compiled CUDA kernels run on a driver and a GPU; if not, says why and how to fix it.

A kernel is in the library as machine code for some architectures (``sm_90``) and as PTX (``compute_90``), which the
driver compiles for any newer GPU. The driver must support the major version of the CUDA that built the library, and
for PTX its minor version too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

Version = tuple[int, int]

_FIRST_DRIVER = {12: "525", 13: "580"}  # first driver of each CUDA major version
_OLDEST_ARCH = {12: 70, 13: 75}  # oldest GPU that both nvcc and the kernels support
_INTEGRATED = {72, 87, 101}  # Xavier, Orin and Thor do not run code for other GPUs of their generation


def driver_version() -> Version | None:
    """The newest CUDA version that the driver supports; None without a driver. Does not initialize CUDA."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10


def why_not(driver: Version | None, toolkit: Version, archs: Sequence[str], gpu: Version | None) -> str:
    """Why kernels built by CUDA ``toolkit`` for ``archs`` do not run on ``driver`` and ``gpu`` (compute capability); ""
    if they do. An unknown driver or GPU (None) is not checked."""
    if driver is not None and driver[0] < toolkit[0]:
        number = _FIRST_DRIVER.get(toolkit[0])
        newer = f"driver {number} or newer" if number else "a newer driver"
        rebuild = f", or rebuild with CUDA {driver[0]}" if driver[0] in _FIRST_DRIVER else ""
        return (
            f"the CUDA kernels were built with CUDA {dotted(toolkit)}, which needs {newer}, and this driver supports"
            f" CUDA {dotted(driver)}. Update the driver{rebuild}"
        )
    if gpu is None or _has_machine_code(archs, gpu):
        return ""
    arch = _number(gpu)
    built = f"the CUDA kernels were built for {', '.join(archs)}, and this GPU is {arch_name(gpu)}"
    if any(number <= arch for number in _numbers(archs, "compute_")):
        if driver is None or driver >= toolkit:
            return ""
        return (
            f"{built}, for which the driver must compile PTX of CUDA {dotted(toolkit)}. This driver supports CUDA"
            f" {dotted(driver)}. Update the driver, or rebuild with AMPCTX_CUDA_ARCHS={arch}"
        )
    if arch >= _OLDEST_ARCH.get(toolkit[0], arch):
        return f"{built}. Rebuild with AMPCTX_CUDA_ARCHS={arch}"
    if arch >= _OLDEST_ARCH[12]:
        return (
            f"{built}, which CUDA {toolkit[0]} does not compile for. Rebuild with CUDA 12 and AMPCTX_CUDA_ARCHS={arch}"
        )
    return f"{built}. ampctx has no kernels for GPUs older than sm_{_OLDEST_ARCH[12]}"


def _has_machine_code(archs: Sequence[str], gpu: Version) -> bool:
    """Machine code runs on its own architecture and on later ones of the same generation."""
    arch = _number(gpu)
    if arch in _INTEGRATED:
        return arch_name(gpu) in archs
    generation = [number for number in _numbers(archs, "sm_") if number // 10 == gpu[0]]
    return any(number <= arch and number not in _INTEGRATED for number in generation)


def _numbers(archs: Sequence[str], kind: str) -> list[int]:
    return [int(arch.removeprefix(kind)) for arch in archs if arch.startswith(kind)]


def _number(gpu: Version) -> int:
    return 10 * gpu[0] + gpu[1]


def arch_name(gpu: Version) -> str:
    return f"sm_{_number(gpu)}"


def dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
