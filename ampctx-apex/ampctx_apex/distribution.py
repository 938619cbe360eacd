"""apex's entry in ``importlib.metadata``: many programs check a package's version before they import it."""

from __future__ import annotations

from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from ampctx_apex.roots import MODULES, ROOTS

# The version in every apex source tree.
FILES = {
    "METADATA": "Metadata-Version: 2.1\nName: apex\nVersion: 0.1\nSummary: apex's module names, provided by ampctx\n",
    "top_level.txt": "".join(f"{name}\n" for name in ROOTS),
}


class ApexDistribution(Distribution):
    """Distribution "apex" 0.1, without files."""

    def read_text(self, filename: str) -> str | None:
        return FILES.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(MODULES) / path
