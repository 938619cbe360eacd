"""Programs that say ``import apex``, started in every way that makes the names importable. Each in its own process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "apex_digits.py"
HERE = os.pathsep.join([str(ROOT), str(ROOT / "ampctx-apex")])


def python(*arguments, cwd, stdin=None, **environment):
    """A Python process with the package of this tree on its path; warnings are errors."""
    env = {k: v for k, v in os.environ.items() if k not in ("AMPCTX_APEX", "PYTHONPATH")}
    env |= {"PYTHONPATH": HERE, "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, input=stdin, capture_output=True, text=True, timeout=300)


def output(done):
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def program(tmp_path):
    """Writes a module file and returns its path."""

    def write(code, name="program.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
        return path

    return write


# --- without edited lines ---------------------------------------------------------------------------------------------

SAYS = """
import sys
from apex import amp
print(__name__, sys.argv[1:], sys.path[0])
print(type(amp.initialize.__self__).__module__.partition('.')[0])
"""


def test_run_script(program, tmp_path):
    path = program(SAYS)
    lines = output(python("-m", "ampctx_apex", "run", path, "--lr", "-m", "-h", cwd=ROOT)).splitlines()
    assert lines == [f"__main__ ['--lr', '-m', '-h'] {tmp_path}", "ampctx"]


def test_run_module(program, tmp_path):
    program("", "package/__init__.py")
    program(SAYS, "package/train.py")
    lines = output(python("-m", "ampctx_apex", "run", "-m", "package.train", "x", cwd=tmp_path)).splitlines()
    assert lines == [f"__main__ ['x'] {tmp_path}", "ampctx"]


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(7)", 7), ("sys.exit('wrong')", 1), ("raise KeyError('gone')", 1), ("", 0)]
)
def test_the_exit_code_of_the_program_goes_through(program, end, code):
    done = python("-m", "ampctx_apex", "run", program(f"import sys\n{end}\n"), cwd=ROOT)
    assert done.returncode == code
    assert ("wrong" in done.stderr) == ("wrong" in end)
    assert ("KeyError: 'gone'" in done.stderr) == ("gone" in end)


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the script, or with -m the module, to run"),
        (["-m"], "name the script, or with -m the module, to run"),
        (["missing.py"], "there is no script 'missing.py'"),
    ],
    ids=["nothing", "no-module", "missing"],
)
def test_what_cannot_be_run_is_said(tmp_path, arguments, message):
    done = python("-m", "ampctx_apex", "run", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_run_directory(program, tmp_path):
    path = program(SAYS, "tool/__main__.py").parent
    lines = output(python("-m", "ampctx_apex", "run", path, "x", cwd=ROOT)).splitlines()
    assert lines == [f"__main__ ['x'] {path}", "ampctx"]


@pytest.mark.full
def test_run_stdin(tmp_path):
    done = python("-m", "ampctx_apex", "run", "-", "x", cwd=tmp_path, stdin=SAYS)
    assert output(done).splitlines() == ["__main__ ['x'] ", "ampctx"]


# --- beside an installed apex -----------------------------------------------------------------------------------------


@pytest.fixture
def newer_apex(program, tmp_path):
    """An apex without amp, as it is since May 2025: its own modules, and an __init__ that imports them."""
    program("from . import optimizers, transformer", "site/apex/__init__.py")
    program("FusedAdam = 'theirs'", "site/apex/optimizers/__init__.py")
    program("LAMB = 'theirs'", "site/apex/optimizers/distributed_lamb.py")
    program("from .layers import Layer", "site/apex/transformer/__init__.py")
    program("import apex\nLayer = f'a layer of {apex.__name__}'", "site/apex/transformer/layers.py")
    program("", "site/apex/contrib/__init__.py")
    program("SelfMultiheadAttn = 'theirs'", "site/apex/contrib/multihead_attn.py")
    return tmp_path / "site"


BESIDE = """
import ampctx_apex
ampctx_apex.install_apex()
import apex
from apex import amp, transformer
from apex.optimizers import FusedAdam
from apex.optimizers.distributed_lamb import LAMB
from apex.contrib.multihead_attn import SelfMultiheadAttn
print(amp.__name__, FusedAdam.__module__, transformer.Layer, apex.transformer.Layer, LAMB, SelfMultiheadAttn, sep="; ")
"""


@pytest.mark.full
def test_modules_of_a_newer_apex_stay_reachable(program, newer_apex):
    path = os.pathsep.join([str(newer_apex), HERE])
    assert output(python(program(BESIDE), cwd=ROOT, PYTHONPATH=path)) == (
        "apex.amp; ampctx.optimizers.fused_adam; a layer of apex; a layer of apex; theirs; theirs\n"
    )


def test_an_apex_that_was_imported_before_is_named(program, newer_apex):
    code = "import apex, ampctx_apex\nampctx_apex.install_apex()"
    done = python(program(code), cwd=ROOT, PYTHONPATH=os.pathsep.join([str(newer_apex), HERE]))
    assert done.returncode == 1
    assert f"apex is already imported, from {newer_apex / 'apex' / '__init__.py'}" in done.stderr


INSTALLING = """
import sys
from ampctx_apex import install_apex, uninstall_apex
finders = list(sys.meta_path)
install_apex()
install_apex()
assert len(sys.meta_path) == len(finders) + 2
import apex.amp, apex.optimizers
initialize = apex.amp.initialize
uninstall_apex()
assert sys.meta_path == finders
assert not [n for n in sys.modules if n.split(".")[0] in ("apex", "amp_C", "apex_C")]
try:
    import apex
except ModuleNotFoundError as error:
    print(error)
install_apex()
from apex import amp
print(amp.initialize == initialize)
"""


def test_install_and_uninstall(program):
    assert output(python(program(INSTALLING), cwd=ROOT, AMPCTX_APEX="0")) == "No module named 'apex'\nTrue\n"


# --- a whole program --------------------------------------------------------------------------------------------------

EPOCH = re.compile(r"epoch (\d+): test accuracy ([\d.]+)% \| loss scale (\S+)")


def epochs(done):
    assert done.returncode == 0, done.stderr
    return [(int(n), float(accuracy), float(scale)) for n, accuracy, scale in EPOCH.findall(done.stdout)]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_program_for_apex_trains_in_one_process(tmp_path, level):
    lines = epochs(python("-m", "ampctx_apex", "run", DIGITS, "--opt-level", level, "--sync-bn", cwd=tmp_path))
    assert [n for n, _, _ in lines] == [1, 2, 3, 4, 5]
    assert lines[-1][1] > 96


@pytest.mark.full
def test_a_program_for_apex_resumes(tmp_path):
    def run(*arguments):
        return epochs(python("-m", "ampctx_apex", "run", DIGITS, *arguments, cwd=tmp_path))

    run("--epochs", "1", "--checkpoint", "c.pt", "--loss-scale", "dynamic")
    lines = run("--epochs", "2", "--resume", "c.pt")
    assert [n for n, _, _ in lines] == [2]
    saved = torch.load(tmp_path / "c.pt", weights_only=True)["amp"]["loss_scaler0"]
    assert lines[0][2] <= saved["loss_scale"]


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher", [("-m", "torch.distributed.run"), ("-m", "ampctx_apex", "run", "-m", "torch.distributed.run")]
)
def test_a_program_for_apex_trains_in_two_processes(tmp_path, launcher):
    torchrun = [*launcher, "--nproc-per-node", "2", "--standalone"]
    program = [DIGITS] if "ampctx_apex" in launcher else ["-m", "ampctx_apex", "run", DIGITS]
    lines = epochs(python(*torchrun, *program, "--sync-bn", "--epochs", "3", cwd=tmp_path))
    assert [n for n, _, _ in lines] == [1, 2, 3]
    assert lines[-1][1] > 93
