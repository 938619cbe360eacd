"""Libraries that `make test-ptx` cannot use: one line that says why, and exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from library import EXTENSION, built_from

RUN = Path(__file__).with_name("run.py")


def refused(*arguments: str | Path) -> str:
    result = subprocess.run([sys.executable, str(RUN), *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 2, result.stdout + result.stderr
    (line,) = result.stderr.strip().splitlines()
    return line


@pytest.mark.parametrize("part", [0.001, 0.5, 0.99])
def test_a_library_cut_short(interpreter, tmp_path, part):
    short = tmp_path / "_ops.so"
    content = EXTENSION.read_bytes()
    short.write_bytes(content[: int(len(content) * part)])
    assert "was cut short" in refused("--extension", short)


def test_a_library_of_other_sources(interpreter, tmp_path):
    other, digest = tmp_path / "_ops.so", built_from(EXTENSION).encode()
    other.write_bytes(EXTENSION.read_bytes().replace(digest, b"0123456789abcdef"))
    assert "was built from other sources (0123456789abcdef)" in refused("--extension", other)


def test_a_library_without_ptx(interpreter, tmp_path):
    source, library = tmp_path / "ops.cpp", tmp_path / "_ops.so"
    info = f'R"({{"source": "{built_from(EXTENSION)}"}})"'
    source.write_text(f"extern const char ampctx_info[];\nconst char ampctx_info[] = {info};\n")
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    assert "has no PTX" in refused("--extension", library)
