"""The examples of GANs, parallel training, custom functions and forced types, as a user runs them, in a short form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="the examples draw plots: pip install 'ampctx[examples]'")
pytest.importorskip("tqdm", reason="the examples show a progress bar: pip install 'ampctx[examples]'")
from example_runs import run
from matplotlib import image


def printed_by(script: str, *arguments: object, cwd: Path, ranks: int = 1) -> str:
    """In a process of its own where every warning is an error."""
    done = run(script, *arguments, cwd=cwd, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip()


# --- dcgan.py ---------------------------------------------------------------------------------------------------------

DCGAN = re.compile(
    r"distance to unseen digits ([\d.]+) \(untrained ([\d.]+), shuffled pixels ([\d.]+), seen digits ([\d.]+)\) \| "
    r"digits drawn (\d+) of 10 \| skipped steps (\d+) and (\d+) of (\d+)$"
)
LOSS_SCALES = re.compile(r"loss [\d.]+ \| loss scale ([\d.]+)$", re.MULTILINE)


def dcgan(printed: str) -> tuple[list[float], int, list[int], list[float]]:
    """The four distances, the digits drawn, skips of both optimizers and their steps, the three loss scales."""
    found = DCGAN.search(printed)
    assert found, printed
    numbers = [float(n) for n in found.groups()]
    return numbers[:4], int(numbers[4]), [int(n) for n in numbers[5:]], [float(s) for s in LOSS_SCALES.findall(printed)]


@pytest.mark.full
def test_dcgan_examples_samples_become_digits_at_o2(tmp_path):
    printed = printed_by("dcgan.py", "--device", "cpu", "--width", 8, "--steps", 150, cwd=tmp_path)
    (samples, untrained, shuffled, seen), drawn, (d_skips, g_skips, steps), scales = dcgan(printed)
    assert seen < samples < 0.9 * shuffled < shuffled < untrained
    assert drawn >= 8
    assert steps == 150
    # Each loss has halved a scale of its own; a step of the discriminator is skipped for either of its two.
    real, fake, generated = (round(torch.tensor(65536 / scale).log2().item()) for scale in scales)
    assert max(real, fake) <= d_skips <= real + fake
    assert generated == g_skips
    assert d_skips + g_skips >= 1
    assert "ampctx: O2: float16 model, fp32 masters, dynamic loss scale" in printed

    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcgan_losses.png", "dcgan_samples.png"]
    sheet = image.imread(tmp_path / "dcgan_samples.png")[..., :3]
    width = sheet.shape[1] // 2
    for half in (sheet[:, :width], sheet[:, width:]):
        assert (half < 0.1).mean() > 0.3, "digits are white on black"
        assert (half > 0.8).mean() > 0.1


# --- parallel.py ------------------------------------------------------------------------------------------------------

PARALLEL = re.compile(
    r"(amp|torch): test accuracy ([\d.]+)% \| (.*) \| loss scale ([\d.]+) \| skipped steps (\d+) of (\d+)$",
    re.MULTILINE,
)


def parallel(printed: str) -> dict[str, tuple[float, str, float, int, int]]:
    """By interface: accuracy, what is said of ranks or threads, loss scale, skipped steps, steps."""
    found = {f[1]: (float(f[2]), f[3], float(f[4]), int(f[5]), int(f[6])) for f in PARALLEL.finditer(printed)}
    assert found, printed
    assert PARALLEL.search(printed.splitlines()[-1])
    return found


@pytest.mark.full
def test_parallel_examples_skip_an_overflow_of_one_rank_on_both(tmp_path):
    options = ("--api", "amp", "torch", "--device", "cpu", "--epochs", 2, "--accumulate", 2, "--overflow-at", 3)
    found = parallel(printed_by("parallel.py", *options, cwd=tmp_path, ranks=2))
    assert list(found) == ["amp", "torch"]
    for accuracy, how, scale, skipped, steps in found.values():
        assert accuracy >= 92.0
        assert how == "the same weights, loss scale and skips on 2 ranks"
        assert (scale, skipped) == (32768.0, 1)
        assert steps == 2 * (1351 // 64)


@pytest.mark.parametrize(("api", "level", "dtype"), [("amp", "O4", "bfloat16"), ("torch", "O1", "float16")])
def test_parallel_examples_cast_in_threads(api, level, dtype, here):
    options = ("--api", api, "--opt-level", level, "--epochs", 2)
    out = here("parallel.py", *options, "--threads", 3)
    accuracy, how, _, _, _ = parallel(out)[api]
    assert accuracy >= 92.0
    assert how == f"3 threads with linear layers in torch.{dtype}"
    assert f"trained in: worker0_0, worker1_0, worker2_0; linear layers in torch.{dtype}" in out
    assert ("with torch.autocast around the call alone: linear layers in torch.float32" in out) == (api == "torch")


# --- custom_functions.py ----------------------------------------------------------------------------------------------

CUSTOM = re.compile(
    r"test accuracy ([\d.]+)% with torch.autocast, ([\d.]+)% with amp, ([\d.]+)% with amp and registered functions$"
)
ROWS = {
    "torch.square of 16 bits": ("inf float16", "90000 float32"),
    "variance of 16 bits": ("inf float16", "90000 float32"),
    "F.silu of fp32": ("300 float32", "300 float16"),
    "gate of fp32": ("300 float32", "300 float16"),
    "torch.lerp of both": ("RuntimeError", "300 float32"),
    "between of both": ("RuntimeError", "300 float32"),
}


def rows(printed: str) -> dict[str, tuple[str, str]]:
    """By function: what comes of it without casts, and with them."""
    lines = (line for line in printed.splitlines() if line.startswith(("float ", "half ", "promote ")))
    return {line[9:33].strip(): (line[34:54].strip(), line[55:]) for line in lines}


def types(where: str, matmul: str) -> str:
    custom = f"LogSumExp backward float32, LogSumExp forward float32, MatMul backward {matmul}, MatMul forward {matmul}"
    return f"{where}: {custom}"


def test_custom_functions_examples_at_o1(here):
    before = torch.square, torch.lerp, torch.nn.functional.silu
    printed = here("custom_functions.py", "--epochs", 2).rstrip()
    found = CUSTOM.search(printed)
    assert found, printed
    assert all(float(accuracy) >= 92.0 for accuracy in found.groups())
    lines = printed.splitlines()
    assert types("torch.autocast to torch.float16", "float16") in lines
    assert types("amp at O1", "float16") in lines
    assert "ForeignMatMul there: expected m1 and m2 to have the same dtype, but got: c10::Half != float" in lines
    assert rows(printed) == ROWS
    assert (torch.square, torch.lerp, torch.nn.functional.silu) == before


# --- forced_types.py --------------------------------------------------------------------------------------------------

FORCED = re.compile(r"(O\d): body in (\w+), norm in (\w+), head in (\w+), test accuracy ([\d.]+)%$", re.MULTILINE)


def test_forced_types_examples_are_the_same_at_every_level(forked, tmp_path):
    printed = forked("forced_types.py", "--epochs", 1, cwd=tmp_path)
    lowest = min(float(found[5]) for found in FORCED.finditer(printed))
    assert lowest >= 65.0
    body = {"O0": "float32", "O1": "float16", "O2": "float16", "O3": "float16", "O4": "bfloat16", "O5": "bfloat16"}
    assert {f[1]: f.groups()[1:4] for f in FORCED.finditer(printed)} == {
        level: (dtype, "float32", "float32") for level, dtype in body.items()
    }
    last = f"with keep_fp32, ops_fp32 at {', '.join(body)}: test accuracy of {lowest:.2f}% or more"
    assert printed.splitlines()[-1] == last


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_forced_types_examples_fail_without(level, here):
    options = ("--opt-level", level, "--epochs", 1)
    out = here("forced_types.py", *options, "--without", "keep_fp32")
    assert f"{level}: body in float16, norm in float16, head in float16, test accuracy 9.89%" in out
    out = here("forced_types.py", *options, "--without", "ops_fp32")
    assert f"{level}: NotImplementedError: \"cdist\" not implemented for 'Half'" in out
