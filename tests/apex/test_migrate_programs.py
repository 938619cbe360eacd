"""``ampctx-apex migrate`` changes names of whole programs, and no result. test_migrate_names.py has all imports."""

import re

import pytest
from processes import ROOT, output, python

pytest.importorskip("libcst")


# --- the program in docs/from_apex.md ---------------------------------------------------------------------------------


PAGE = (ROOT / "docs" / "from_apex.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.S)


@pytest.fixture
def shown(tmp_path):
    """The diff and the report of the page; train.py in ``tmp_path`` is the program before it."""
    (diff,), (report,) = blocks("diff"), blocks("text")
    *head, body = re.split(r"(?<=@@\n)", diff)
    count = body.count("\n-") + body.count("\n ") + 1
    assert "".join(head) == f"--- a/train.py\n+++ b/train.py\n@@ -1,{count} +1,{count} @@\n", "the whole file"
    (tmp_path / "train.py").write_text("".join(line[1:] for line in body.splitlines(keepends=True) if line[0] != "+"))
    return diff, report


def test_the_diff_and_report_are_what_the_tool_prints(shown, tmp_path):
    assert output("-m", "ampctx_apex", "migrate", "train.py", cwd=tmp_path) == "".join(shown)


@pytest.mark.full
def test_the_program_prints_what_the_page_shows_before_and_after(shown, tmp_path):
    printed = next(b for b in blocks("console") if "--write" in b).splitlines()[-1]
    environment = {"CUDA_VISIBLE_DEVICES": "", "cwd": tmp_path}
    before = python("-m", "ampctx_apex", "run", "train.py", **environment)
    assert python("-m", "ampctx_apex", "migrate", "train.py", "--write", cwd=tmp_path).returncode == 0
    after = python("-m", "ampctx_apex", "run", "train.py", **environment)
    assert before.returncode == 0, before.stderr
    assert (before.stdout.splitlines()[-1], before.stderr) == (after.stdout.splitlines()[-1], after.stderr)
    loss, scale = re.fullmatch(r"loss (\S+), loss scale (\S+)", after.stdout.splitlines()[-1]).groups()
    shown_loss, shown_scale = re.fullmatch(r"loss (\S+), loss scale (\S+)", printed).groups()
    assert scale == shown_scale
    # Kernels of other CPUs round otherwise, in fp16 and over 50 steps.
    assert float(loss) == pytest.approx(float(shown_loss), abs=0.02)
