"""``ampctx-apex migrate`` as a command: which files it takes, how it writes them, what it prints, and exit codes."""

import codecs
import json
import subprocess

import pytest

pytest.importorskip("libcst")
from ampctx_apex.cli import main
from ampctx_apex.migrate import cli, rewrite

BEFORE, AFTER = b"from apex import amp\namp.initialize(m)\n", b"from ampctx import amp\namp.initialize(m)\n"
MANUAL = b"from apex.contrib.fmha import Thing\nThing()\n"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Three files, of which two change. The working directory is theirs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "train.py").write_bytes(BEFORE + b"# end of \xc3\xa4")
    (tmp_path / "lib" / "optim.py").write_bytes(
        b"# coding: latin-1\nimport apex  # \xe4\no = apex.optimizers.FusedAdam(\n    p,  # all\n    lr=1,\n)\n"
    )
    (tmp_path / "lib" / "unrelated.py").write_bytes(b"x = = \xff  # is not even parsed\n")
    return tmp_path


@pytest.mark.parametrize("tool", [["patch", "-p1"], ["git", "apply"]], ids=["patch", "git"])
def test_without_write_it_prints_a_diff_that_tools_take(tree, capfdbinary, tool):
    assert main(["migrate", "."]) == 0
    diff, _, report = capfdbinary.readouterr().out.partition(b"train.py:2:1: moved: ")
    assert report.endswith(b" Run with --write to apply.\n")
    assert (tree / "train.py").read_bytes().startswith(BEFORE)
    subprocess.run(tool, input=diff, check=True, capture_output=True)
    assert (tree / "train.py").read_bytes() == AFTER + b"# end of \xc3\xa4"
    assert b"\no = ampctx.optimizers.FusedAdam(\n" in (tree / "lib" / "optim.py").read_bytes()
    assert main(["migrate", ".", "--check"]) == 0


def test_report(tree, capsys):
    (tree / "ddp.py").write_text("from apex.parallel import DistributedDataParallel as DDP\nDDP(m)\n")
    (tree / "fmha.py").write_bytes(MANUAL)
    assert main(["migrate", ".", "--check"]) == 1
    ddp, fmha, train, optim, end = capsys.readouterr().out.splitlines()
    assert ddp.startswith("ddp.py:2:1: adapted: apex.parallel.DistributedDataParallel(m): keeps its apex name, which ")
    assert fmha.startswith("fmha.py:2:1: manual: apex.contrib.fmha.Thing(): Use torch.nn.functional.")
    assert optim == "lib/optim.py:3:5: moved: apex.optimizers.FusedAdam(p, lr=1)"
    assert train == "train.py:2:1: moved: apex.amp.initialize(m)"
    names = "apex names: 2 moved, 1 adapted, 1 manual."
    assert end == f"5 files scanned, 2 to change. {names} Run with --write to apply."
    assert main(["migrate", ".", "--write"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"5 files scanned, 2 changed. {names}"


CODES = {
    "to change": (BEFORE, [], 0),
    "to change, write": (BEFORE, ["--write"], 0),
    "manual": (MANUAL, [], 1),
    "manual, check": (MANUAL, ["--check"], 1),
    "not Python": (b"import apex\nx = = 1\n", [], 2),
}


@pytest.mark.parametrize(("text", "options", "code"), CODES.values(), ids=CODES)
def test_exit_codes(tmp_path, text, options, code):
    file = tmp_path / "a.py"
    file.write_bytes(text)
    assert main(["migrate", str(file), *options]) == code
    assert (file.read_bytes() == text) == (text != BEFORE or "--write" not in options)


def test_a_path_that_does_not_exist_is_named_and_the_others_are_done(tmp_path, capsys):
    (tmp_path / "a.py").write_bytes(BEFORE)
    assert main(["migrate", str(tmp_path / "none"), str(tmp_path), "--write"]) == 2
    assert f"{tmp_path / 'none'}: error: no such file or directory" in capsys.readouterr().out
    assert (tmp_path / "a.py").read_bytes() == AFTER


SHAPES = {
    "CRLF": BEFORE.replace(b"\n", b"\r\n"),
    "BOM": codecs.BOM_UTF8 + BEFORE,
    "latin-1": b"# -*- coding: latin-1 -*-\ns = '\xe4' # \xdf\n" + BEFORE,
    "utf-8": "s = '\u20ac\U0001f600'; ".encode() + BEFORE,
    "layout": b"from  apex  import(amp)  ;x=1#c\nif(x) :\n   amp . initialize( m,\n\n  o )  \n\n\n",
    "CRLF, split": b"from apex import amp, optimizers\r\noptimizers.FusedAdam(amp)\r\n",
}


@pytest.mark.parametrize("before", SHAPES.values(), ids=SHAPES)
def test_bytes_that_are_not_part_of_a_name_stay(tmp_path, before):
    file = tmp_path / "a.py"
    file.write_bytes(before)
    file.chmod(0o751)
    main(["migrate", str(file), "--write"])
    after = before.replace(b"apex", b"ampctx")
    if b", optimizers" in before:
        after = before.replace(b", optimizers\r\n", b"\r\nfrom ampctx import optimizers\r\n")
    assert file.read_bytes() == after
    assert file.stat().st_mode & 0o777 == 0o751
    assert [p.name for p in tmp_path.iterdir()] == ["a.py"]


BAD = {
    "binary": (b"apex \x00\x01\xff\xfe", "cannot be read"),
    "not in its encoding": (b"import apex\ns = '\xe4'\n", "cannot be read"),
    "Python 2": (b"import apex\nprint 1\n", "line 2: cannot be parsed"),
    "layout that libcst changes": (BEFORE + b"\\\nx = 1\n", "cannot be read: libcst does not keep the layout"),
}


@pytest.mark.parametrize(("data", "reason"), BAD.values(), ids=BAD)
def test_a_file_that_cannot_be_read_is_named_and_left(tmp_path, capsys, data, reason):
    (tmp_path / "a.py").write_bytes(data)
    (tmp_path / "b.py").write_bytes(BEFORE)
    assert main(["migrate", str(tmp_path), "--write"]) == 2
    assert f"{tmp_path / 'a.py'}: error: {reason}" in capsys.readouterr().out
    assert [(tmp_path / name).read_bytes() for name in ("a.py", "b.py")] == [data, AFTER]


def test_directories_that_are_skipped(tmp_path):
    for name in (".hidden", "env", "build", "node_modules", "__pycache__", "pkg/__pycache__", "pkg", "pkg/builder"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "a.py").write_bytes(BEFORE)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "pkg" / "notes.txt").write_bytes(BEFORE)
    assert main(["migrate", str(tmp_path), "--write"]) == 0
    moved = {str(p.parent.relative_to(tmp_path)) for p in tmp_path.rglob("a.py") if p.read_bytes() == AFTER}
    assert moved == {"pkg", "pkg/builder"}
    # Named on the command line, any directory and any file is taken.
    assert main(["migrate", str(tmp_path / ".hidden"), str(tmp_path / "pkg" / "notes.txt"), "--write"]) == 0
    assert (tmp_path / ".hidden" / "a.py").read_bytes() == (tmp_path / "pkg" / "notes.txt").read_bytes() == AFTER


def test_notebooks_are_named(tmp_path, capsys):
    cells = {"cells": [{"source": ["import torch\n", "from apex import amp\n"]}]}
    (tmp_path / "a.ipynb").write_text(json.dumps(cells, indent=1))
    before = (tmp_path / "a.ipynb").read_bytes()
    assert main(["migrate", str(tmp_path), "--write"]) == 1
    assert "a.ipynb:6:6: manual: apex: A notebook: edit its cells by hand." in capsys.readouterr().out
    assert (tmp_path / "a.ipynb").read_bytes() == before


def test_a_file_that_changed_meanwhile_is_told_of_and_not_written(tmp_path, capsys, monkeypatch):
    file, planned = tmp_path / "a.py", cli.migrate
    file.write_bytes(BEFORE)

    def slow(paths):
        results = planned(paths)
        file.write_bytes(BEFORE + b"# new\n")
        return results

    monkeypatch.setattr(cli, "migrate", slow)
    assert main(["migrate", str(tmp_path), "--write", "--json"]) == 2
    (failed,) = (result := json.loads(capsys.readouterr().out))["files"]
    assert failed["error"].startswith("cannot be written: the file changed while ampctx-apex migrate was running")
    assert (failed["diff"], result["findings"]) == ("", [])
    assert result["summary"] == {"files": 1, "changed": 0, "moved": 0, "adapted": 0, "manual": 0, "errors": 1}
    assert file.read_bytes() == BEFORE + b"# new\n"


def test_a_result_that_is_not_python_is_not_written(tmp_path, capsys, monkeypatch):
    file = tmp_path / "a.py"
    file.write_bytes(BEFORE)
    monkeypatch.setattr(rewrite, "rewritten", lambda path, data: (b"(" + data, []))
    assert main(["migrate", str(file), "--write"]) == 2
    out = capsys.readouterr().out
    assert "a.py: error: the result would not be Python" in out
    assert out.endswith("1 file scanned, 0 changed. apex names: 0 moved, 0 adapted, 0 manual. 1 file with errors.\n")
    assert file.read_bytes() == BEFORE


def test_json(tmp_path, capsys):
    source = "from apex import amp\nx = amp.initialize(m,\n   opt_level='O1')\nf = amp.scale_loss\n"
    (tmp_path / "a.py").write_text(source)
    assert main(["migrate", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == ["written", "files", "findings", "summary"]
    assert "\n-from apex import amp\n+from ampctx import amp\n" in result["files"][0]["diff"]
    keys = ["file", "line", "column", "name", "arguments", "status", "message"]
    assert [list(finding.items()) for finding in result["findings"]] == [
        list(zip(keys, [str(tmp_path / "a.py"), *values], strict=True))
        for values in (
            [2, 5, "apex.amp.initialize", ["m", "opt_level='O1'"], "moved", ""],
            [4, 5, "apex.amp.scale_loss", None, "moved", ""],
        )
    ]
