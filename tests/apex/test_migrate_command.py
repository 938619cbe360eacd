"""``ampctx migrate`` as a command: which files it takes, how it writes them, what it prints, exit codes, and that
what it wrote runs."""

import codecs
import difflib
import json
import subprocess
import tempfile
from pathlib import Path

import pytest
from ampctx_apex.migrate import report
from ampctx_apex.migrate.report import Edit
from migrating import ROOT, dedent, run

from ampctx.__main__ import main

pytest.importorskip("libcst")

BEFORE, AFTER = b"from apex import amp\namp.initialize(m)\n", b"from ampctx import amp\namp.initialize(m)\n"

TREE = {
    "train.py": '''
        """Trains at the level of the command line."""
        from __future__ import print_function

        import sys

        import torch
        from apex import amp  # mixed precision
        from lib.optim import make
        from lib import loops


        def main(level):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
            optimizer = make(model.parameters())
            model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")
            for _ in range(4):
                print(loops.step(model, optimizer))
            print(sorted(amp.state_dict()["loss_scaler0"].items()))


        if __name__ == "__main__":
            main(sys.argv[1])
    ''',
    "lib/__init__.py": "",
    "lib/optim.py": """
        try:
            import apex.optimizers
        except ImportError:
            raise ImportError("Please install apex from https://github.com/nvidia/apex")


        def make(parameters):
            return apex.optimizers.FusedAdam(
                parameters,
                lr=1e-2,  # the learning rate
            )
    """,
    "lib/loops.py": """
        import torch


        def step(model, optimizer):
            import apex.amp as A
            loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            with A.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            torch.nn.utils.clip_grad_norm_(A.master_params(optimizer), 1.0)
            optimizer.step()
            return loss.item().hex()
    """,
    "lib/unrelated.py": "x = 1  # no mention\n",
}


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "project"
    for name, text in TREE.items():
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_text(dedent(text))
    return root


@pytest.mark.full
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_tree_runs_before_and_after_with_the_same_losses(tree, level):
    code = f"import ampctx_apex.apex, runpy, sys; sys.argv = ['', '{level}']; sys.path[0] = '.'; "
    original = run("-c", code + "runpy.run_path('train.py', run_name='__main__')", cwd=tree)
    assert (original.returncode, original.stderr) == (0, "")
    assert len(original.stdout.split()) > 4

    assert main(["migrate", str(tree), "--write"]) == 0
    assert main(["migrate", str(tree), "--check"]) == 0
    assert not any("apex." in p.read_text() for p in (tree / "lib").glob("*.py"))
    moved = run("train.py", level, cwd=tree)
    assert (moved.returncode, moved.stdout, moved.stderr) == (0, original.stdout, "")


def test_comments_and_layout_stay(tree):
    main(["migrate", str(tree), "--write"])
    for name, text in TREE.items():
        old, new = dedent(text).splitlines(), (tree / name).read_text().splitlines()
        changed = [line for line in difflib.ndiff(old, new) if line[0] in "-+"]
        assert all("apex" in line or "ampctx" in line for line in changed), changed


def test_without_write_a_diff_that_patch_takes(tree, capsys):
    assert main(["migrate", str(tree)]) == 0
    out = capsys.readouterr().out
    assert (tree / "train.py").read_text() == dedent(TREE["train.py"])
    diff = out[: out.index(f"\n{tree}") + 1]
    subprocess.run(["patch", "-p1", "-d", "/"], input=diff, text=True, check=True, capture_output=True)
    assert main(["migrate", str(tree), "--check"]) == 0


def test_report_in_words(tree, capsys):
    main(["migrate", str(tree), "--check"])
    lines = capsys.readouterr().out.splitlines()
    optimizer = "apex.optimizers.FusedAdam(parameters, lr=1e-2)"
    assert f"{tree / 'lib' / 'optim.py'}:8:12: moved: {optimizer}" in lines
    assert lines[-1] == (
        "5 files scanned, 3 to change. apex names: 5 moved, 0 adapted, 0 manual. Run with --write to apply."
    )


def test_report_of_what_was_written(tree, capsys):
    main(["migrate", str(tree), "--write"])
    end = "5 files scanned, 3 changed. apex names: 5 moved, 0 adapted, 0 manual."
    assert capsys.readouterr().out.splitlines()[-1] == end
    main(["migrate", str(tree)])
    end = "5 files scanned, 0 to change. apex names: 0 moved, 0 adapted, 0 manual."
    assert capsys.readouterr().out.splitlines()[-1] == end


# --- exit codes -------------------------------------------------------------------------------------------------------

PERSON = "from apex.contrib.nothing import Thing\nThing()\n"
CODES = {
    "nothing to do": ("x = 1\n", [], 0),
    "nothing to do, check": ("x = 1\n", ["--check"], 0),
    "to change": (BEFORE.decode(), [], 0),
    "to change, check": (BEFORE.decode(), ["--check"], 1),
    "to change, write": (BEFORE.decode(), ["--write"], 0),
    "kept below the shim, check": ("import ampctx_apex.apex\nfrom apex import amp\n", ["--check"], 0),
    "person": (PERSON, [], 1),
    "person, write": (PERSON, ["--write"], 1),
    "person, check": (PERSON, ["--check"], 1),
    "not Python": ("import apex\nx = = 1\n", [], 2),
}


@pytest.mark.parametrize(("text", "options", "code"), CODES.values(), ids=CODES)
def test_exit_codes(tmp_path, text, options, code):
    file = tmp_path / "a.py"
    file.write_text(text)
    assert main(["migrate", str(file), *options]) == code
    if "--write" not in options:
        assert file.read_text() == text


def test_a_path_that_does_not_exist_is_named_and_the_others_are_done(tmp_path, capsys):
    (tmp_path / "a.py").write_bytes(BEFORE)
    assert main(["migrate", str(tmp_path / "none"), str(tmp_path), "--write"]) == 2
    assert f"{tmp_path / 'none'}: error: no such file or directory" in capsys.readouterr().out
    assert (tmp_path / "a.py").read_bytes() == AFTER


@pytest.mark.parametrize("arguments", [[], ["--write", "--check", "x"], ["--to", "jax", "x"]])
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(["migrate", *arguments])
    assert error.value.code == 2
    assert "usage: ampctx migrate" in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["migrate", "--help"])
    out = capsys.readouterr().out
    assert "Rewrite apex imports to ampctx. Prints a diff; --write applies it." in out
    assert "exit codes:" in out
    assert "--to {ampctx,torch}" in out


@pytest.mark.full
def test_without_libcst_the_error_names_the_extra(tmp_path):
    blocker = "import sys; sys.modules['libcst'] = None; from ampctx.__main__ import main; "
    result = run("-c", blocker + f"sys.exit(main(['migrate', {str(tmp_path)!r}]))")
    assert (result.returncode, result.stdout) == (2, "")
    assert "pip install libcst" in result.stderr
    assert run("-c", blocker + "sys.exit(main(['info']))").returncode == 0


# --- files ------------------------------------------------------------------------------------------------------------

BYTES = {
    "CRLF": (BEFORE.replace(b"\n", b"\r\n"), AFTER.replace(b"\n", b"\r\n")),
    "CR": (BEFORE.replace(b"\n", b"\r"), AFTER.replace(b"\n", b"\r")),
    "mixed newlines": (BEFORE + b"x = 1\r\ny = 2\n", AFTER + b"x = 1\r\ny = 2\n"),
    "BOM": (codecs.BOM_UTF8 + BEFORE, codecs.BOM_UTF8 + AFTER),
    "no final newline": (BEFORE[:-1], AFTER[:-1]),
    "only an import": (BEFORE.split(b"\n")[0] + b"\namp.state_dict()", AFTER.split(b"\n")[0] + b"\namp.state_dict()"),
    "latin-1": (
        b"# -*- coding: latin-1 -*-\ns = '\xe4' # \xdf\n" + BEFORE,
        b"# -*- coding: latin-1 -*-\ns = '\xe4' # \xdf\n" + AFTER,
    ),
    "utf-8": ("s = '\u20ac\U0001f600'; ".encode() + BEFORE, "s = '\u20ac\U0001f600'; ".encode() + AFTER),
    "form feed": (b"x = 1\n\x0c\n" + BEFORE, b"x = 1\n\x0c\n" + AFTER),
    "tabs": (b"if x:\n\tfrom apex import amp\n\tamp.reset\n\tamp.initialize()\n", None),
    "invalid escape": (b"s = '\\d'\n" + BEFORE, b"s = '\\d'\n" + AFTER),
    "CRLF shim": (
        b"import os\r\nfrom apex import amp\r\n",
        b"import os\r\nimport ampctx_apex.apex  # makes the apex imports below work: keep it above them\r\n"
        b"from apex import amp\r\n",
    ),
}


@pytest.mark.parametrize(("before", "after"), BYTES.values(), ids=BYTES)
def test_bytes_that_are_not_part_of_a_name_stay(tmp_path, before, after):
    file = tmp_path / "a.py"
    file.write_bytes(before)
    file.chmod(0o751)
    main(["migrate", str(file), "--write"])
    if after is not None:
        assert file.read_bytes() == after
    assert file.stat().st_mode & 0o777 == 0o751
    assert [p.name for p in tmp_path.iterdir()] == ["a.py"]
    second = file.read_bytes()
    main(["migrate", str(file), "--write"])
    assert file.read_bytes() == second


BAD = {
    "binary": (b"apex \x00\x01\xff\xfe", "cannot be read"),
    "null bytes": (b"import apex\x00\n", "line 1: cannot be parsed"),
    "not in its encoding": (b"import apex\ns = '\xe4'\n", "cannot be read"),
    "unknown encoding": (b"# coding: klingon\nimport apex\n", "cannot be read: unknown encoding"),
    "Python 2": (b"import apex\nprint 1\n", "line 2: cannot be parsed"),
    "indentation": (b"import apex\n  x = 1\n", "line 2: cannot be parsed"),
}


@pytest.mark.parametrize(("data", "reason"), BAD.values(), ids=BAD)
def test_a_file_that_cannot_be_read_is_named_and_left(tmp_path, capsys, data, reason):
    (tmp_path / "a.py").write_bytes(data)
    (tmp_path / "b.py").write_bytes(BEFORE)
    assert main(["migrate", str(tmp_path), "--write"]) == 2
    assert f"{tmp_path / 'a.py'}: error: {reason}" in capsys.readouterr().out
    assert (tmp_path / "a.py").read_bytes() == data
    assert (tmp_path / "b.py").read_bytes() == AFTER


def test_a_file_without_a_mention_is_not_even_parsed(tmp_path, capsys):
    (tmp_path / "a.py").write_bytes(b"x = = \xff\n")
    assert main(["migrate", str(tmp_path), "--check"]) == 0
    assert "1 file scanned, 0 to change." in capsys.readouterr().out


def test_directories_that_are_skipped(tmp_path):
    for name in (".hidden", "env", "build", "node_modules", "__pycache__", "pkg/__pycache__", "pkg", "pkg/builder"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "a.py").write_bytes(BEFORE)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "pkg" / "notes.txt").write_bytes(BEFORE)
    assert main(["migrate", str(tmp_path), "--write"]) == 0
    moved = {str(p.parent.relative_to(tmp_path)) for p in tmp_path.rglob("a.py") if p.read_bytes() == AFTER}
    assert moved == {"pkg", "pkg/builder"}
    assert (tmp_path / "pkg" / "notes.txt").read_bytes() == BEFORE
    # Named on the command line, any directory and any file is taken.
    assert main(["migrate", str(tmp_path / ".hidden"), str(tmp_path / "pkg" / "notes.txt"), "--write"]) == 0
    assert (tmp_path / ".hidden" / "a.py").read_bytes() == (tmp_path / "pkg" / "notes.txt").read_bytes() == AFTER


def test_links(tmp_path, capsys):
    real, root = tmp_path / "real", tmp_path / "root"
    real.mkdir()
    root.mkdir()
    (real / "a.py").write_bytes(BEFORE)
    (root / "link.py").symlink_to(real / "a.py")
    (root / "again.py").symlink_to(real / "a.py")
    (root / "loop").symlink_to(root)
    (root / "self.py").symlink_to(root / "self.py")
    (root / "gone.py").symlink_to(root / "nothing")
    assert main(["migrate", str(root), str(root / "loop"), "--write"]) == 0
    assert "1 file scanned, 1 changed." in capsys.readouterr().out
    assert (root / "link.py").is_symlink()
    assert (real / "a.py").read_bytes() == AFTER
    assert main(["migrate", str(root / "self.py")]) == 2


def test_notebooks_are_for_a_person(tmp_path, capsys):
    cells = {"cells": [{"source": ["import torch\n", "from apex import amp\n"]}]}
    (tmp_path / "a.ipynb").write_text(json.dumps(cells, indent=1))
    (tmp_path / "b.ipynb").write_text(json.dumps({"cells": []}))
    before = (tmp_path / "a.ipynb").read_bytes()
    assert main(["migrate", str(tmp_path), "--write"]) == 1
    assert "a.ipynb:6:6: manual: apex\n    a notebook: edit its cells by hand" in capsys.readouterr().out
    assert (tmp_path / "a.ipynb").read_bytes() == before


# A dry run first: it imports what the command needs, while root can still read it.
AS_NOBODY = """
import contextlib, io, os, sys
from ampctx.__main__ import main
with contextlib.redirect_stdout(io.StringIO()):
    main(["migrate", sys.argv[1]])
if os.geteuid() == 0:
    os.setuid(65534)
sys.exit(main(["migrate", *sys.argv[1:]]))
"""


@pytest.mark.full(but=1)
@pytest.mark.parametrize("options", [["--write"], ["--write", "--json"]], ids=["text", "json"])
def test_a_directory_that_cannot_be_written(options):
    """Root may write anywhere, so that the command then runs as another user."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        locked, free = root / "locked", root / "free"
        for directory in (locked, free):
            directory.mkdir()
            (directory / "a.py").write_bytes(BEFORE)
        free.chmod(0o777)
        locked.chmod(0o555)
        try:
            result = run("-c", AS_NOBODY, root, *options)
            contents = [(d / "a.py").read_bytes() for d in (locked, free)]
            names = [p.name for d in (locked, free) for p in d.iterdir()]
        finally:
            locked.chmod(0o755)
    assert result.returncode == 2, result.stderr
    assert contents == [BEFORE, AFTER]
    assert names == ["a.py", "a.py"]
    check_what_is_claimed(result.stdout, options, locked / "a.py", free / "a.py", "Permission denied")


@pytest.mark.parametrize("options", [["--write"], ["--write", "--json"]], ids=["text", "json"])
def test_a_read_only_file_stays(tmp_path, capsys, options):
    locked, free = tmp_path / "a.py", tmp_path / "b.py"
    for file in (locked, free):
        file.write_bytes(BEFORE)
    locked.chmod(0o444)
    assert main(["migrate", str(tmp_path), *options]) == 2
    assert (locked.read_bytes(), free.read_bytes()) == (BEFORE, AFTER)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.py", "b.py"]
    check_what_is_claimed(capsys.readouterr().out, options, locked, free, "Permission denied")


def check_what_is_claimed(out, options, failed, written, reason):
    """Of two files, each with one name to move, one could not be written: nothing is told of it but the error."""
    if "--json" in options:
        result = json.loads(out)
        assert {f["file"]: f["status"] for f in result["files"]} == {str(failed): "error", str(written): "changed"}
        assert {entry["file"] for entry in [*result["edits"], *result["findings"]]} == {str(written)}
        assert result["summary"] == {"files": 2, "changed": 1, "served": 1, "adapted": 0, "person": 0, "errors": 1}
        (error,) = (f["error"] for f in result["files"] if f["error"])
        assert error.startswith("cannot be written: ")
        assert reason in error
        return
    lines = out.splitlines()
    assert f"{written}:2:1: moved: apex.amp.initialize(m)" in lines
    assert lines[-1] == "2 files scanned, 1 changed. apex names: 1 moved, 0 adapted, 0 manual. 1 file with errors."
    (line,) = (line for line in lines if str(failed) in line)
    assert line.startswith(f"{failed}: error: cannot be written: ")
    assert reason in line


@pytest.mark.parametrize("options", [["--write"], ["--write", "--json"]], ids=["text", "json"])
def test_a_name_that_leaves_no_room_for_a_temporary_file(tmp_path, capsys, options):
    """A failure of the system that root meets as well: names have 255 bytes at most."""
    long, short = tmp_path / f"{'a' * 252}.py", tmp_path / "b.py"
    for file in (long, short):
        file.write_bytes(BEFORE)
    assert main(["migrate", str(tmp_path), *options]) == 2
    assert (long.read_bytes(), short.read_bytes()) == (BEFORE, AFTER)
    assert sorted(p.name for p in tmp_path.iterdir()) == [long.name, short.name]
    check_what_is_claimed(capsys.readouterr().out, options, long, short, "File name too long")


def test_a_result_that_is_not_python_is_not_written(tmp_path, capsys, monkeypatch):
    from ampctx_apex.migrate import to_ampctx

    file = tmp_path / "a.py"
    file.write_bytes(BEFORE)
    monkeypatch.setattr(to_ampctx, "plan", lambda tree: ([Edit(0, 4, "(")], []))
    assert main(["migrate", str(file), "--write"]) == 2
    out = capsys.readouterr().out
    assert "a.py: error: the result would not be Python" in out
    assert out.endswith("1 file scanned, 0 changed. apex names: 0 moved, 0 adapted, 0 manual. 1 file with errors.\n")
    assert file.read_bytes() == BEFORE


def test_a_file_that_changed_meanwhile_is_left(tmp_path, capsys, monkeypatch):
    from ampctx_apex.migrate import cli

    file = tmp_path / "a.py"
    file.write_bytes(BEFORE)
    migrate = cli.migrate

    def slow(*arguments):
        results = migrate(*arguments)
        file.write_bytes(b"new\n")
        return results

    monkeypatch.setattr(cli, "migrate", slow)
    assert main(["migrate", str(file), "--write"]) == 2
    assert (
        "a.py: error: cannot be written: the file changed while ampctx migrate was running" in capsys.readouterr().out
    )
    assert file.read_bytes() == b"new\n"


# --- json -------------------------------------------------------------------------------------------------------------


def test_json(tmp_path, capsys):
    (tmp_path / "a.py").write_bytes(b"import os\nfrom apex import amp\nx = amp.initialize(m,\n   opt_level='O1')\n")
    (tmp_path / "b.py").write_text(PERSON)
    (tmp_path / "c.py").write_text("import apex\n(")
    assert main(["migrate", str(tmp_path), "--json"]) == 2
    result = json.loads(capsys.readouterr().out)
    a, b, c = (str(tmp_path / name) for name in ("a.py", "b.py", "c.py"))
    assert list(result) == ["to", "written", "files", "edits", "findings", "summary"]
    assert (result["to"], result["written"]) == ("ampctx", False)
    assert [(f["file"], f["status"]) for f in result["files"]] == [(a, "changed"), (b, "unchanged"), (c, "error")]
    assert "cannot be parsed" in result["files"][2]["error"]
    assert result["edits"] == [{"file": a, "line": 2, "column": 6, "removed": "apex", "inserted": "ampctx"}]
    first, *others = result["findings"]
    assert first == {
        "file": a,
        "line": 3,
        "column": 5,
        "name": "apex.amp.initialize",
        "arguments": ["m", "opt_level='O1'"],
        "status": "served",
        "message": "",
        "link": "docs/apex_differences.md#training-loop",
    }
    assert {f["status"] for f in others} == {"person"}
    assert result["summary"] == {"files": 3, "changed": 1, "served": 1, "adapted": 0, "person": 1, "errors": 1}


def test_links_lead_to_headings():
    pages = set()
    for name in ("apex.amp.initialize", "apex.optimizers.FusedAdam", "apex.parallel.LARC.LARC", "amp_C", "_amp_stash"):
        page, _, anchor = report.link(name).partition("#")
        text = (ROOT / page).read_text()
        headings = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
        assert anchor in {"", *(heading.lower().replace(",", "").replace(" ", "-") for heading in headings)}
        pages.add(page)
    assert pages == {"docs/apex_differences.md", "docs/apex_names.md"}


def test_the_command_is_there():
    result = run("-m", "ampctx", "migrate", "--help")
    assert "usage: ampctx migrate" in result.stdout
