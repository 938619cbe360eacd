"""Writes the figures of a long run to a JSON file, with the machine, the versions and the command they came from."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from measuring import environment

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, found: Any) -> None:
    script, *arguments = sys.argv
    command = " ".join(["python", os.path.relpath(script, ROOT), *arguments])
    path.write_text(json.dumps({"command": command, **environment("cpu"), "found": found}, indent=2) + "\n")
