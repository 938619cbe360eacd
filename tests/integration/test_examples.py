"""The examples as a user runs them, in a short form: a process of their own, real training, the files they leave.

Other levels and optimizers run in forks of one process.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="the examples draw plots: pip install 'ampctx[examples]'")
pytest.importorskip("tqdm", reason="the examples show a progress bar: pip install 'ampctx[examples]'")
from example_runs import run
from matplotlib import image

LAST_LINE = re.compile(
    r"test accuracy ([\d.]+)%(?:, in fp32 [\d.]+%)? \| loss scale (\S+) \| skipped steps (\d+) of (\d+)$", flags=re.M
)
STEPS_PER_EPOCH = 84  # 1,351 training images in batches of 16


def last_line(printed: str) -> tuple[float, float, int, int]:
    """Test accuracy, loss scale, skipped steps and steps, from the last line but that about the plot."""
    found = LAST_LINE.search(printed)
    assert found, printed
    return float(found[1]), float(found[2]), int(found[3]), int(found[4])


def share_of_colour(png: Path, red: int, green: int, blue: int) -> float:
    """The share of pixels close to a colour."""
    pixels = image.imread(png)[..., :3] * 255
    distance = abs(pixels - torch.tensor((red, green, blue)).numpy()).max(axis=-1)
    return float((distance < 24).mean())


@pytest.fixture(scope="module")
def short_run(forked, tmp_path_factory) -> tuple[Path, str]:
    """What `make demo` runs, and a checkpoint: O1 from a loss scale that overflows, then fp32."""
    folder = tmp_path_factory.mktemp("digits")
    return folder, forked("digits.py", "--checkpoint", "digits.pt", cwd=folder)


def test_digits_trains_and_skips_overflows(short_run):
    _, printed = short_run
    accuracy, scale, skipped, steps = last_line(printed)
    assert accuracy >= 97.0
    assert steps == 3 * STEPS_PER_EPOCH
    assert 1 <= skipped <= 16
    assert scale == 2.0 ** (24 - skipped)
    assert float(re.search(r", in fp32 ([\d.]+)% ", printed)[1]) >= 97.0
    assert "ampctx: O1: float16 autocast, dynamic loss scale 16777216\n" in printed


def test_digits_checkpoint_holds_masters_and_scale(short_run):
    folder, printed = short_run
    _, scale, skipped, _ = last_line(printed)
    checkpoint = torch.load(folder / "digits.pt", weights_only=True)
    assert (checkpoint["opt_level"], checkpoint["epoch"]) == ("O1", 3)
    clean_at_the_end = checkpoint["history"]["skipped"][::-1].index(True)
    assert checkpoint["amp"]["loss_scaler0"] == {"loss_scale": scale, "unskipped": clean_at_the_end}
    weights = [value for value in checkpoint["model"].values() if value.is_floating_point()]
    assert {value.dtype for value in weights} == {torch.float32}
    assert any(not torch.equal(value, value.half().float()) for value in weights)
    assert sum(checkpoint["history"]["skipped"]) == skipped
    assert sorted(path.name for path in folder.iterdir()) == ["digits.png", "digits.pt"]


@pytest.mark.full
def test_digits_resumed_run_equals_the_uninterrupted_one(short_run, forked, tmp_path):
    folder, uninterrupted = short_run
    part = ("--epochs", 1, "--checkpoint", "part.pt")
    forked("digits.py", *part, cwd=tmp_path)
    rest = ("--epochs", 3, "--resume", "part.pt", "--checkpoint", "part.pt")
    resumed = forked("digits.py", *rest, cwd=tmp_path)

    assert "resumed part.pt after epoch 1" in resumed
    assert last_line(resumed) == last_line(uninterrupted)
    one, other = (torch.load(path, weights_only=True) for path in (folder / "digits.pt", tmp_path / "part.pt"))
    assert len(other["history"]["accuracy"]) == other["epoch"] == 3
    assert one["history"] == other["history"]
    assert one["amp"] == other["amp"]
    assert one["model"].keys() == other["model"].keys()
    assert all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--resume none.pt", "digits.py: error: --resume: none.pt cannot be read as a checkpoint (FileNotFoundError"),
        ("--resume half.pt", "half.pt cannot be read as a checkpoint"),
        ("--resume text.pt", "text.pt cannot be read as a checkpoint"),
        ("--resume other.pt", "other.pt is not a checkpoint of this example"),
        ("--resume digits.pt --opt-level O5", "trained at O1 with FusedSGD, and this run is at O5 with FusedSGD"),
        ("--resume digits.pt --optimizer SGD", "trained at O1 with FusedSGD, and this run is at O1 with SGD"),
        ("--resume digits.pt --epochs 3", "ask for more than 3"),
        ("--plot none/plot.png", "--plot: none/plot.png cannot be written"),
        ("--checkpoint .", "--checkpoint: . cannot be written"),
        ("--epochs 0", "0 is not above 0"),
        ("--opt-level 02", "invalid choice: '02'"),
    ],
    ids=lambda text: text.replace(" ", ""),
)
def test_digits_refuses(arguments, message, short_run, refusal, tmp_path):
    good = (short_run[0] / "digits.pt").read_bytes()
    (tmp_path / "digits.pt").write_bytes(good)
    (tmp_path / "half.pt").write_bytes(good[: len(good) // 2])
    (tmp_path / "text.pt").write_text("not a checkpoint")
    torch.save({"weights": torch.ones(2)}, tmp_path / "other.pt")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    # The outputs point at a file that is there: an error must leave it alone.
    outputs = ("--checkpoint", "digits.pt", "--plot", "digits.pt")
    assert message in refusal("digits.py", *outputs, *arguments.split())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


BITS_LINE = re.compile(
    r"held-out bits per char ([\d.]+) \(untrained ([\d.]+)\) \| loss scale (\S+) \| skipped steps (\d+) of (\d+)$"
)


def bits(printed: str) -> re.Match[str]:
    found = BITS_LINE.search(printed.rstrip())
    assert found, printed
    assert "sample:\nThe " in printed
    return found


SMALL_LM = ("--layers", 1, "--context", 32, "--lr", 0.01)


@pytest.mark.full
def test_char_lm_learns_at_o5(tmp_path):
    arguments = ("--heads", 2, "--steps", 120, "--eval-every", 60, "--plot", "lm.png")
    done = run("char_lm.py", "--device", "cpu", *SMALL_LM, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = bits(done.stdout)
    assert float(found[1]) < 4.0 < 6.0 < float(found[2])
    assert (found[3], found[4], found[5]) == ("1", "0", "120")
    assert image.imread(tmp_path / "lm.png").shape[0] >= 400
    assert share_of_colour(tmp_path / "lm.png", 31, 119, 180) > 1e-4


OFFLOAD_LINE = re.compile(
    r"^loss ([\d.]+) -> ([\d.]+) \| bytes per parameter ([\d.]+) on the device, ([\d.]+) on the host \| "
    r"resumed after 4 steps: the same bits$"
)


def test_offload_resumes_on_two_ranks(tmp_path):
    arguments = ("--heads", 1, "--layers", 1, "--context", 16, "--steps", 8)
    done = run("offload.py", "--device", "cpu", *arguments, cwd=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    first, last, device, host = map(float, OFFLOAD_LINE.fullmatch(done.stdout.rstrip()).groups())
    assert last < first - 0.3
    assert (device, host) == (4.0, 16.0)
    assert {path.name for path in (tmp_path / "offload").iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}


STATE_LINE = re.compile(r"^(\w+) state: held-out bits per char ([\d.]+) \| ([\d.]+) bytes per parameter$", flags=re.M)


def test_state_types_compares_losses_and_memory(forked, tmp_path):
    sizes = ("--heads", 1, "--layers", 1, "--context", 8, "--batch-size", 4, "--min-8bit-size", 0)
    arguments = ("--steps", 30, "--large-steps", 10, "--lr", 0.01, "--eval-every", 15, "--plot", "states.png")
    lines = STATE_LINE.findall(forked("state_types.py", *sizes, *arguments, cwd=tmp_path))
    assert [kind for kind, _, _ in lines] == ["fp32", "bf16", "8bit"]
    fp32, bf16, codes = (float(bits) for _, bits, _ in lines)
    assert fp32 < 5.5
    assert abs(bf16 - fp32) < 0.1
    assert abs(codes - fp32) < 0.1
    assert [size for _, _, size in lines][:2] == ["8.00", "4.00"]
    assert 2.12 <= float(lines[2][2]) < 2.2
    for colour in ((31, 119, 180), (255, 127, 14), (44, 160, 44)):
        assert share_of_colour(tmp_path / "states.png", *colour) > 1e-4
