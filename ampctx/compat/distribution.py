"""apex as ``importlib.metadata`` sees it: many programs ask for the version of a package before they import it."""

from __future__ import annotations

from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

# The version that every source tree of apex gives itself.
FILES = {
    "METADATA": "Metadata-Version: 2.1\nName: apex\nVersion: 0.1\nSummary: apex's module names, served by ampctx\n",
    "top_level.txt": "apex\namp_C\napex_C\n",
}


class ApexDistribution(Distribution):
    """Distribution "apex" 0.1, with no files of its own: nothing of it is installed."""

    def read_text(self, filename: str) -> str | None:
        return FILES.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / "modules" / path
