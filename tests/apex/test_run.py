"""Programs that say ``import apex``, started in every way that makes the names importable. Each in its own process."""

import os
import re

import pytest
from ampctx_apex.cli import main
from processes import HERE, ROOT, output, python

DIGITS = ROOT / "examples" / "apex_digits.py"
RUN = ("-m", "ampctx_apex", "run")


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
print(type(amp.scale_loss.__self__).__module__.partition('.')[0])
"""
# What is run, and the first folder on the program's path.
WAYS = {
    "script": ("{}/package/train.py", "package"),
    "module": ("-m package.train", "."),
    "directory": ("{}/package", "package"),
    "stdin": ("-", ""),
}


# The tests below run scripts.
@pytest.mark.parametrize(
    "way", ["module", *(pytest.param(way, marks=pytest.mark.full) for way in sorted(WAYS.keys() - {"module"}))]
)
def test_every_way_to_run_a_program(program, tmp_path, way):
    for name in ("train", "__main__"):
        program(SAYS, f"package/{name}.py")
    what, first = WAYS[way]
    lines = output(*RUN, *what.format(tmp_path).split(), "--lr", "-m", "-h", cwd=tmp_path, stdin=SAYS).splitlines()
    assert lines == [f"__main__ ['--lr', '-m', '-h'] {tmp_path / first if first else ''}", "ampctx"]


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(7)", 7), ("sys.exit('wrong')", 1), ("raise KeyError('gone')", 1), ("", 0)]
)
def test_the_exit_code_of_the_program_goes_through(program, end, code):
    done = python(*RUN, program(f"import sys\n{end}\n"))
    assert done.returncode == code
    assert ("wrong" in done.stderr) == ("wrong" in end)
    assert ("KeyError: 'gone'" in done.stderr) == ("gone" in end)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the script, or with -m the module, to run"),
        (["-m"], "name the script, or with -m the module, to run"),
        (["missing.py"], "there is no script 'missing.py'"),
    ],
    ids=["nothing", "no-module", "missing"],
)
def test_what_cannot_be_run_is_said(capsys, arguments, message):
    with pytest.raises(SystemExit, match="^2$"):
        main(["run", *arguments])
    assert message in capsys.readouterr().err


# --- beside an installed apex -----------------------------------------------------------------------------------------


@pytest.fixture
def newer_apex(program, tmp_path):
    """A path with an apex without amp, as it is since May 2025: its own modules, and an __init__ that imports them."""
    program("from . import optimizers, transformer", "site/apex/__init__.py")
    program("FusedAdam = 'theirs'", "site/apex/optimizers/__init__.py")
    program("LAMB = 'theirs'", "site/apex/optimizers/distributed_lamb.py")
    program("from .layers import Layer", "site/apex/transformer/__init__.py")
    program("import apex\nLayer = f'a layer of {apex.__name__}'", "site/apex/transformer/layers.py")
    program("", "site/apex/contrib/__init__.py")
    program("SelfMultiheadAttn = 'theirs'", "site/apex/contrib/multihead_attn.py")
    return os.pathsep.join([str(tmp_path / "site"), HERE])


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
def test_modules_of_a_newer_apex_stay_reachable(newer_apex):
    assert output("-c", BESIDE, PYTHONPATH=newer_apex) == (
        "apex.amp; ampctx.optimizers.fused_adam; a layer of apex; a layer of apex; theirs; theirs\n"
    )


INSTALLING = """
import importlib, operator, sys
import ampctx, torch
from ampctx_apex import install_apex, uninstall_apex
finders = list(sys.meta_path)
install_apex()
install_apex()
assert len(sys.meta_path) == len(finders) + 2
import apex
modules = ["parallel", "normalization", "optimizers"]
modules += ["amp." + m for m in "_amp_state _initialize amp compat frontend handle rnn_compat scaler".split()]
for module in modules:
    operator.attrgetter(module)(apex)  # also before its import
    importlib.import_module("apex." + module)
uninstall_apex()
assert sys.meta_path == finders
assert not [n for n in sys.modules if n.split(".")[0] in ("apex", "amp_C", "apex_C")]
ampctx.amp.initialize(torch.nn.Linear(2, 2), opt_level="O3")
try:
    import apex
except ModuleNotFoundError as error:
    print(error)
install_apex()
from apex import amp
print(amp.__name__)
"""


def test_install_and_uninstall():
    """All modules are imported without a word."""
    lines = output("-c", INSTALLING, AMPCTX_APEX="0").splitlines()
    assert lines == ["ampctx: O3: float16 model, no masters, loss scale 1", "No module named 'apex'", "apex.amp"]


# --- a whole program --------------------------------------------------------------------------------------------------

EPOCH = re.compile(r"epoch (\d+): test accuracy ([\d.]+)% \| loss scale (\S+)")


def epochs(done):
    assert done.returncode == 0, done.stderr
    return [(int(n), float(accuracy), float(scale)) for n, accuracy, scale in EPOCH.findall(done.stdout)]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_program_for_apex_trains_in_one_process(tmp_path, level):
    lines = epochs(python(*RUN, DIGITS, "--opt-level", level, "--sync-bn", cwd=tmp_path))
    assert [n for n, _, _ in lines] == [1, 2, 3, 4, 5]
    assert lines[-1][1] > 96


@pytest.mark.full
@pytest.mark.parametrize("launcher", [("-m", "torch.distributed.run"), (*RUN, "-m", "torch.distributed.run")])
def test_a_program_for_apex_trains_in_two_processes(tmp_path, launcher):
    torchrun = [*launcher, "--nproc-per-node", "2", "--standalone"]
    program = [DIGITS] if "ampctx_apex" in launcher else [*RUN, DIGITS]
    lines = epochs(python(*torchrun, *program, "--sync-bn", "--epochs", "3", cwd=tmp_path))
    assert [n for n, _, _ in lines] == [1, 2, 3]
    assert lines[-1][1] > 93
