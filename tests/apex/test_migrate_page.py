"""The program in docs/from_apex.md, before and after ``ampctx migrate``: the page shows what it and the tool print."""

import re

import pytest
from migrating import ROOT, run

pytest.importorskip("libcst")

PAGE = (ROOT / "docs" / "from_apex.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.S)


@pytest.fixture
def shown(tmp_path):
    """The diff and the report of the page; train.py in ``tmp_path`` is the program before it."""
    (diff,), (report,) = blocks("diff"), blocks("text")
    *head, body = re.split(r"(?<=@@\n)", diff)
    count = len(body.splitlines())
    assert re.fullmatch(r"--- a/train.py\n\+\+\+ b/train.py\n@@ -1,(\d+) \+1,(\d+) @@\n", "".join(head)), (
        "the whole file"
    )
    before = "".join(line[1:] for line in body.splitlines(keepends=True) if line[0] in " -")
    assert 20 < before.count("\n") < count
    (tmp_path / "train.py").write_text(before)
    return diff, report


def test_the_diff_and_report_are_what_the_tool_prints(shown, tmp_path):
    result = run("-m", "ampctx", "migrate", "train.py", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "".join(shown), "")


@pytest.mark.full
def test_the_program_prints_what_the_page_shows_before_and_after(shown, tmp_path):
    printed = next(b for b in blocks("console") if "--write" in b).splitlines()[-1]
    environment = {"CUDA_VISIBLE_DEVICES": "", "cwd": tmp_path}
    before = run("-m", "ampctx", "run", "train.py", **environment)
    assert run("-m", "ampctx", "migrate", "train.py", "--write", cwd=tmp_path).returncode == 0
    after = run("train.py", **environment)
    for result in (before, after):
        assert result.returncode == 0, result.stderr
        loss, scale = re.fullmatch(r"loss (\S+), loss scale (\S+)", result.stdout.splitlines()[-1]).groups()
        shown_loss, shown_scale = re.fullmatch(r"loss (\S+), loss scale (\S+)", printed).groups()
        assert scale == shown_scale
        # Kernels of other CPUs round otherwise, in fp16 and over 50 steps.
        assert float(loss) == pytest.approx(float(shown_loss), abs=0.02)
    assert before.stdout == after.stdout
