"""What setup.py compiles again: what has changed in content, whatever the times of files say."""

import importlib.util
import os
import stat
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[1] / "setup.py"


@pytest.fixture
def compile_all(tmp_path, monkeypatch):
    """Compiles a small csrc with a compiler that notes the sources; returns those that it was given."""
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-fsyntax-only*) exit;; esac\n')
    with compiler.open("a") as file:
        file.write(f'for word; do case "$word" in *.cpp) echo "$word" >> {log};; esac; done\n')
        file.write('while [ "$1" != -o ]; do shift; done; echo made > "$2"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    for name in ("library.cpp", "shared.h", "cpu/one.cpp", "cpu/two.cpp"):
        path = tmp_path / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"// {name}\n")
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("ampctx_setup", SETUP)
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)

    def run():
        log.write_text("")
        setup.compile_all(str(compiler), None, tmp_path / "build")
        return sorted(Path(line).name for line in log.read_text().splitlines())

    return run


def test_what_has_changed_is_compiled_again(compile_all):
    assert compile_all() == ["library.cpp", "one.cpp", "two.cpp"]
    os.utime("csrc/cpu/one.cpp")
    assert compile_all() == []
    Path("csrc/cpu/one.cpp").write_text("// another, with an old time\n")
    os.utime("csrc/cpu/one.cpp", (0, 0))
    assert compile_all() == ["library.cpp", "one.cpp"], "library.cpp says which sources it was built from"
    Path("csrc/shared.h").write_text("// another header, which may be in any object\n")
    assert compile_all() == ["library.cpp", "one.cpp", "two.cpp"]
    Path("build/cpu_one.o").unlink()
    assert compile_all() == ["one.cpp"]
