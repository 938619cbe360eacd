"""The version of ampctx, and the versions of PyTorch that it supports."""

from __future__ import annotations

__version__ = "0.1.0"
SUPPORTED = "2.11 to 2.15"
_OLDEST = (2, 11)


def why_no_torch() -> str:
    """Why ampctx cannot run with the installed torch, and the fix. "" if it can."""
    try:
        import torch
        from packaging.version import Version
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "packaging", "packaging.version"):
            raise
        name = "torch" if error.name == "torch" else "packaging"
        needed = f"PyTorch {SUPPORTED}" if name == "torch" else name
        return f"ampctx needs {needed}, and none is installed. Run: pip install {name}"
    if Version(torch.__version__).release < _OLDEST:
        return (
            f"ampctx needs PyTorch {SUPPORTED}, and {torch.__version__} is installed. Run: pip install --upgrade torch"
        )
    return ""
