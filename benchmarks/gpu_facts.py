"""What a report of gpu-check was made on: GPU, tools, versions, sources. Nothing here fails where a tool is missing."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from check_runner import ROOT

GPU_FIELDS = (
    "name", "driver_version", "memory.total", "ecc.mode.current", "clocks.current.sm", "clocks.max.sm",
    "clocks.current.memory", "clocks.max.memory", "power.limit", "temperature.gpu", "mig.mode.current",
)  # fmt: skip
SOURCES = ("ampctx", "benchmarks", "csrc", "tests")
# What has to be the same for a part to count in a later run.
IDENTITY = ("commit", "sources", "torch", "gpu")


def output_of(*command: str) -> str | None:
    """None where the tool is missing, hangs or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def version_of(*command: str) -> str | None:
    """The first number with a dot in what the tool says of itself, on the line that names it as a version."""
    found = re.search(r"(?:release|version)\D*(\d+(?:\.\d+)+)", output_of(*command) or "", re.IGNORECASE)
    return found and found.group(1)


def cuda_tool(name: str) -> str:
    """Where a program of the CUDA toolkit is, as setup.py looks for nvcc; its bare name where it is not found."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [f"{home}/bin/{name}"] if home else []
    return next(filter(None, map(shutil.which, [*places, name, f"/usr/local/cuda/bin/{name}"])), name)


def sources() -> str:
    """A hash of all that a result depends on, for trees with changes and trees without git."""
    files = [ROOT / "setup.py", ROOT / "pyproject.toml"]
    for folder in SOURCES:
        files += [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".cpp", ".cu", ".h", ".cuh")]
    found = hashlib.sha256()
    for file in sorted(files):
        found.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return found.hexdigest()[:16]


def gpu_state() -> dict[str, str] | None:
    """What nvidia-smi says of the first GPU; fields that it does not know are left out."""

    def ask(*fields: str) -> dict[str, str]:
        query = f"--query-gpu={','.join(fields)}"
        values = (output_of("nvidia-smi", "-i", "0", query, "--format=csv,noheader") or "").split(", ")
        return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}

    found = ask(*GPU_FIELDS)
    if not found and output_of("nvidia-smi", "-L"):  # it refuses all for one that it does not know
        found = {field: value for one in GPU_FIELDS for field, value in ask(one).items()}
    return {field: value for field, value in found.items() if value and "N/A" not in value} or None


def facts() -> dict[str, Any]:
    import torch

    state, changes = gpu_state(), output_of("git", "status", "--porcelain")
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": output_of("git", "rev-parse", "HEAD"),
        "uncommitted_changes": None if changes is None else bool(changes),
        "sources": sources(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "gpu": None,
        "nvidia_smi": state,
        "machine": {"cpu_cores": os.cpu_count(), "system": platform.system(), "arch": platform.machine()},
        "tools": {
            "nvcc": version_of(cuda_tool("nvcc"), "--version"),
            "compute-sanitizer": version_of(cuda_tool("compute-sanitizer"), "--version"),
            "nvidia-smi": state and state.get("driver_version"),
            "pytest": None,
        },
    }
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["tools"]["pytest"] = importlib.metadata.version("pytest")
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "capability": [properties.major, properties.minor]}
        found["multiprocessors"] = properties.multi_processor_count
    else:
        found["why_no_gpu"] = f"torch {torch.__version__} finds no CUDA device"
    return found


def extension() -> dict[str, Any]:
    """What the built extension has, and whether it was built from the sources that are here."""
    import setup
    from ampctx import ops

    found = ops.extension
    return {
        "backends": list(found.backends),
        "reason": found.reason,
        "cuda_archs": found.build.get("cuda_archs", []),
        "is_current": found.build.get("source") == setup.source_digest(ROOT / "csrc"),
    }


def serves(found: dict[str, Any], capability: list[int]) -> bool:
    """Whether it has code for the GPU: that of the same generation and no newer one."""
    major, minor = capability
    numbers = [re.fullmatch(r"sm_(\d+)(\d)", arch) for arch in found["cuda_archs"]]
    has_code = any(int(n.group(1)) == major and int(n.group(2)) <= minor for n in numbers if n)
    return "cuda" in found["backends"] and found["is_current"] and has_code


def main(what: str, file: str) -> None:
    found = {"facts": facts, "extension": extension}[what]()
    Path(file).write_text(json.dumps(found) + "\n")
    json.dump(found, sys.stdout, indent=1)
