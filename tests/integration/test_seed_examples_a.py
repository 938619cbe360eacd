"""The examples of training loops: typical, clipped, accumulated, with a penalty, with several losses, and GradScaler's.

Each runs once in a process of its own, as a user runs it; variants of it run in this one.
"""

from __future__ import annotations

import ast
import inspect
import re

import pytest
import torch
from example_runs import ROOT, run

import ampctx

pytest.importorskip("matplotlib", reason="the examples draw plots: pip install 'ampctx[examples]'")
pytest.importorskip("tqdm", reason="the examples show a progress bar: pip install 'ampctx[examples]'")
from matplotlib import image

NUMBER = r"(-?[\d.]+(?:e[+-]\d+)?|inf|nan)"


def numbers(printed: str, pattern: str) -> list[float]:
    """Those in the last line, which has the form of ``pattern``, where each is a #."""
    line = printed.rstrip().splitlines()[-1]
    found = re.fullmatch(re.escape(pattern).replace(r"\#", NUMBER), line)
    assert found, line
    return [float(number) for number in found.groups()]


TYPICAL = "test accuracy #% | loss # -> # | loss scale # | skipped steps # of #"


@pytest.mark.full
def test_examples_typical_training_at_o1(tmp_path):
    done = run("typical_training.py", "--device", "cpu", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    accuracy, first, last, scale, skipped, steps = numbers(done.stdout, TYPICAL)
    assert accuracy >= 95.0
    assert last < 0.2 < 2.0 < first
    assert (scale, steps) == (65536.0 / 2**skipped, 126)
    assert list(tmp_path.iterdir()) == []


CLIPPING = "error # -> # | clipped # of # steps: largest {} # before, # after | loss scale # | skipped steps #"


def test_examples_clipping_by_norm_at_o2(forked, tmp_path):
    printed = forked("clipping.py", cwd=tmp_path)
    start, end, clipped, steps, before, after, scale, skipped = numbers(printed, CLIPPING.format("norm"))
    assert end < 0.15 < 0.5 < start
    assert before > 4.0
    assert after == pytest.approx(1.0, rel=1e-3)
    assert 30 < clipped < 0.8 * steps
    assert skipped >= 1, "the outliers overflow at the first scale"
    assert (scale, steps + skipped) == (65536.0 / 2**skipped, 300)


ACCUMULATION = "loss # -> # in large batches, # with # parts | weights apart by #% of their way | scale updates # and #"


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    ("variant", "bound"),
    [
        pytest.param((), 0.1, id="O2"),
        pytest.param(("--opt-level", "O0", "--micro-batches", 8), 1e-3, id="O0-8-parts"),
        pytest.param(("--api", "torch"), 0.1, id="torch"),
    ],
)
def test_examples_accumulation_equals_the_large_batch(variant, bound, here, forked, tmp_path):
    """Within rounding; and the scale is updated once for each step, not for each micro-batch."""
    printed = here("accumulation.py", *variant) if variant else forked("accumulation.py", cwd=tmp_path)
    start, large, accumulated, parts, apart, *updates = numbers(printed, ACCUMULATION)
    assert large < 0.4 < 1.0 < start
    assert accumulated == pytest.approx(large, abs=0.002)
    assert parts == (variant[variant.index("--micro-batches") + 1] if "--micro-batches" in variant else 4)
    assert 0.0 < apart < bound
    assert updates == [60.0, 60.0]


PENALTY = "accuracy #% | gradient norm # at first, # in the last # steps | loss scale # | skipped steps # of #"


def test_examples_gradient_penalty_at_o2(forked, tmp_path):
    printed = forked("gradient_penalty.py", cwd=tmp_path)
    accuracy, first, last, _, scale, skipped, steps = numbers(printed, PENALTY)
    assert accuracy > 80.0
    assert last < 0.3 < first
    assert (scale, steps) == (65536.0 / 2**skipped, 200)


WGAN = "energy distance # -> # | loss scales # (critic) and # (generator)"


def test_examples_wgan_gp_at_o1_with_a_plot(forked, tmp_path):
    before, after, *scales = numbers(forked("wgan_gp.py", "--steps", 60, "--plot", "gan.png", cwd=tmp_path), WGAN)
    assert after < 0.15 * before
    assert all(64.0 <= scale <= 65536.0 for scale in scales)
    assert image.imread(tmp_path / "gan.png").shape[0] >= 400


SEVERAL = "loss 0: # -> # | loss 1: # -> # | loss scales {}"


def test_examples_several_losses_have_scales_of_their_own(forked, tmp_path):
    printed = forked("several_losses.py", cwd=tmp_path)
    first0, last0, first1, last1, *scales = numbers(printed, SEVERAL.format("# and #"))
    assert last0 < 0.1 < 0.5 < first0
    assert last1 < 10.0 < 100.0 < first1
    assert 4096.0 <= scales[0] <= 65536.0
    assert 1.0 <= scales[1] <= scales[0] / 32


SCALER = "loss # -> # | loss scale # -> # -> # | skipped steps # of #"


def test_examples_grad_scaler_finds_keeps_and_sets_the_scale(forked, tmp_path):
    printed = forked("grad_scaler.py", cwd=tmp_path)
    start, end, *scales, skipped, steps = numbers(printed, SCALER)
    assert end < 0.1 < 0.5 < start
    assert scales[0] == 16.0
    assert 1024.0 <= scales[1] <= 2.0**20
    assert scales[2] == scales[1] / 1024
    assert 0 < skipped < 30
    assert steps == 240
    assert re.findall(r"^step +(\d+): .*: (.*)$", printed, flags=re.M) == [
        ("0", "looking for the scale"),
        ("60", "found, now the usual rule"),
        ("120", "saved and loaded"),
        ("180", "set by hand"),
    ]


def test_examples_grad_scaler_prints_the_same_with_that_of_torch(here):
    assert here("grad_scaler.py", "--steps", 80) == here("grad_scaler.py", "--steps", 80, "--scaler", "torch")


def test_examples_grad_scaler_calls_every_public_method():
    tree = ast.parse((ROOT / "examples" / "grad_scaler.py").read_text())
    called = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "attr")}
    public = {name for name, _ in inspect.getmembers(torch.amp.GradScaler, callable) if not name.startswith("_")}
    assert len(public) >= 14
    assert public - called == set()
    assert public <= set(dir(ampctx.GradScaler))


LAST_LINES = {
    "typical_training": TYPICAL,
    "clipping": CLIPPING.format("norm"),
    "accumulation": ACCUMULATION,
    "gradient_penalty": PENALTY,
    "wgan_gp": WGAN,
    "several_losses": SEVERAL.format("# and #"),
    "grad_scaler": SCALER,
}


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("clipping", ("--api", "torch", "--opt-level", "O1"), "--opt-level belongs to --api apex"),
        ("parallel", ("--api", "torch", "--opt-level", "O2"), "O2 is for --api amp"),
        ("parallel", ("--threads", "-1"), "--threads: -1 is not above 0"),
        ("offload", (), "start it with torchrun"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
def test_examples_refuse(script, arguments, message, refusal, tmp_path):
    assert message in refusal(f"{script}.py", *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", LAST_LINES)
def test_examples_say_that_there_is_no_gpu(script, refusal, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = refusal(f"{script}.py", "--device", "cuda")
    assert "--device: cuda was asked for and torch finds no CUDA device here; use --device cpu" in message


@pytest.mark.parametrize("script", LAST_LINES)
def test_examples_readme_shows_the_last_line(script):
    shown = re.findall(r"^    (\S.*)$", (ROOT / "examples" / "README.md").read_text(), flags=re.M)
    form = re.escape(LAST_LINES[script]).replace(r"\#", NUMBER)
    assert len([line for line in shown if re.fullmatch(form, line)]) == 1


def test_examples_readme_has_every_example():
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    readme = (ROOT / "examples" / "README.md").read_text()
    assert {name for name in scripts if f"examples/{name}" in readme} == scripts
    of_sections = set(re.findall(r"\]\((\w+\.py)\)", readme))
    # Longer programs, of no section of their own, and what all of them import.
    others = {"digits.py", "state_types.py", "char_lm.py", "apex_digits.py", "mesh.py", "offload.py", "shared.py"}
    assert of_sections == scripts - others
