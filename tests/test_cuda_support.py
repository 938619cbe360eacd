"""Which GPUs and drivers the compiled CUDA kernels serve, by NVIDIA's rules, and the message for the others."""

import pytest

from ampctx.kernels.cuda_support import why_not

DEFAULT_12_8 = ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "compute_75", "compute_100"]
DEFAULT_13_0 = ["sm_75", "sm_80", "sm_90", "compute_75", "sm_100", "sm_110", "sm_120", "compute_100"]
ONLY_90 = ["sm_90", "compute_90"]
ONLY_80 = ["sm_80", "compute_80"]
CUDA_12_8, CUDA_13_0 = (12, 8), (13, 0)
DRIVERS = {"12.4": (12, 4), "12.8": (12, 8), "13.0": (13, 0), "13.5": (13, 5)}

GPUS = {
    "V100": (7, 0),
    "T4": (7, 5),
    "A100": (8, 0),
    "RTX 3090": (8, 6),
    "Orin": (8, 7),
    "RTX 4090": (8, 9),
    "H100": (9, 0),
    "B200": (10, 0),
    "B300": (10, 3),
    "RTX 5090": (12, 0),
    "DGX Spark": (12, 1),
}
NOT_V100 = set(GPUS) - {"V100"}
# Machine code alone serves these; the others need PTX, and so a driver as new as the toolkit.
BY_CODE = {"default": NOT_V100 - {"Orin"}, "90": {"H100"}, "80": {"A100", "RTX 3090", "RTX 4090"}}
BY_PTX = {
    "default": {"Orin"},
    "90": {"B200", "B300", "RTX 5090", "DGX Spark"},
    "80": {"Orin", "H100", "B200", "B300", "RTX 5090", "DGX Spark"},
}
BUILDS = {
    (toolkit, name): (version, archs)
    for toolkit, version, default in (("12.8", CUDA_12_8, DEFAULT_12_8), ("13.0", CUDA_13_0, DEFAULT_13_0))
    for name, archs in (("default", default), ("90", ONLY_90), ("80", ONLY_80))
}
# A driver of the same major version serves the code, one that is as new the PTX, too.
CODE_BY_DRIVER = {"12.8": {"12.4", "12.8", "13.0", "13.5"}, "13.0": {"13.0", "13.5"}}
PTX_BY_DRIVER = {"12.8": {"12.8", "13.0", "13.5"}, "13.0": {"13.0", "13.5"}}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(("toolkit", "archs"), BUILDS, ids=lambda part: part)
def test_which_gpu_is_served(toolkit, archs, driver, gpu):
    reason = why_not(DRIVERS[driver], *BUILDS[toolkit, archs], GPUS[gpu])
    by_code = gpu in BY_CODE[archs] and driver in CODE_BY_DRIVER[toolkit]
    by_ptx = gpu in BY_PTX[archs] and driver in PTX_BY_DRIVER[toolkit]
    assert (reason == "") == (by_code or by_ptx), reason


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("toolkit", "archs"), BUILDS, ids=lambda part: part)
def test_what_is_not_known_speaks_against_nothing(toolkit, archs, gpu):
    build = BUILDS[toolkit, archs]
    served = gpu in BY_CODE[archs] | BY_PTX[archs]
    assert (why_not(None, *build, GPUS[gpu]) == "") == served
    for driver, version in DRIVERS.items():
        assert (why_not(version, *build, None) == "") == (driver in CODE_BY_DRIVER[toolkit])


WORDS = {
    "old-driver": (
        ((12, 8), CUDA_13_0, DEFAULT_13_0, None),
        "the CUDA kernels were built with CUDA 13.0, which needs driver 580 or newer, and this driver supports CUDA"
        " 12.8. Update the driver, or rebuild with CUDA 12",
    ),
    "older-driver": (
        ((11, 8), CUDA_12_8, DEFAULT_12_8, None),
        "the CUDA kernels were built with CUDA 12.8, which needs driver 525 or newer, and this driver supports CUDA"
        " 11.8. Update the driver",
    ),
    "driver-before-a-future-cuda": (
        ((13, 5), (14, 1), ONLY_90, None),
        "the CUDA kernels were built with CUDA 14.1, which needs a newer driver, and this driver supports CUDA 13.5."
        " Update the driver, or rebuild with CUDA 13",
    ),
    "older-gpu": (
        (CUDA_13_0, CUDA_13_0, ONLY_90, (8, 0)),
        "the CUDA kernels were built for sm_90, compute_90, and this GPU is sm_80. Rebuild with AMPCTX_CUDA_ARCHS=80",
    ),
    "ptx-newer-than-the-driver": (
        (CUDA_13_0, (13, 2), ONLY_90, (12, 0)),
        "the CUDA kernels were built for sm_90, compute_90, and this GPU is sm_120, for which the driver must compile"
        " PTX of CUDA 13.2. This driver supports CUDA 13.0. Update the driver, or rebuild with AMPCTX_CUDA_ARCHS=120",
    ),
    "gpu-that-cuda-13-dropped": (
        (CUDA_13_0, CUDA_13_0, ONLY_90, (7, 0)),
        "the CUDA kernels were built for sm_90, compute_90, and this GPU is sm_70, which CUDA 13 does not compile for."
        " Rebuild with CUDA 12 and AMPCTX_CUDA_ARCHS=70",
    ),
    "gpu-without-kernels": (
        (CUDA_12_8, CUDA_12_8, ONLY_90, (6, 1)),
        "the CUDA kernels were built for sm_90, compute_90, and this GPU is sm_61. ampctx has no kernels for GPUs"
        " older than sm_70",
    ),
}


@pytest.mark.parametrize(("asked", "reason"), WORDS.values(), ids=WORDS.keys())
def test_the_reason_says_what_helps(asked, reason):
    assert why_not(*asked) == reason
