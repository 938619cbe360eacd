"""apex.parallel.LARC and apex.parallel.multiproc, which clients use as modules."""

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import apex
import pytest
import torch
from ampctx_apex.names import LAYERS, NAMES, PARALLEL
from apex.parallel import multiproc
from apex.parallel.LARC import LARC

from ampctx import amp, optimizers

ROOT = Path(__file__).resolve().parents[2]


def test_import_apex_brings_the_packages():
    assert set(apex.__all__) >= {"normalization", "parallel"}
    program = "import apex; print(apex.parallel.Reducer, apex.normalization.FusedLayerNorm)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "apex.parallel.distributed.Reducer" in result.stdout


def test_larc_is_a_module_with_the_class():
    assert apex.parallel.LARC is importlib.import_module("apex.parallel.LARC")
    assert LARC is optimizers.LARC is apex.parallel.LARC.LARC


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_larc_trains(level):
    model = torch.nn.Linear(4, 2)
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4), 0.02, clip=False)
    before = model.weight.detach().clone()
    amp.initialize(model, optimizer, opt_level=level, loss_scale=4.0, verbosity=0)
    with amp.scale_loss(model(torch.ones(3, 4)).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert not torch.equal(model.weight.float(), before)


# --- the table of names -----------------------------------------------------------------------------------------------


def found(name):
    """The object of a dotted name, with the modules on the way imported."""
    module, _, attribute = name.rpartition(".")
    try:
        owner = importlib.import_module(module)
    except ModuleNotFoundError:
        owner = found(module)
    return getattr(owner, attribute) if hasattr(owner, attribute) else importlib.import_module(name)


@pytest.mark.parametrize("name", [*PARALLEL, *LAYERS])
def test_names_of_the_table_are_there(name):
    assert found(name) is not None
    target = NAMES[name].target
    assert target is None or callable(found(target)) or target == "torch.distributed.ReduceOp"


@pytest.mark.parametrize(
    "module",
    [
        *("apex.parallel", "apex.parallel.distributed", "apex.normalization", "apex.normalization.fused_layer_norm"),
        *("apex.mlp", "apex.fused_dense", "apex.contrib.clip_grad", "apex.contrib.xentropy", "apex.contrib.layer_norm"),
    ],
)
def test_exported_names_are_in_the_table(module):
    for name in importlib.import_module(module).__all__:
        assert f"{module}.{name}" in NAMES


# --- multiproc --------------------------------------------------------------------------------------------------------


def launch(directory, *arguments):
    """``ampctx run -m apex.parallel.multiproc arguments`` in ``directory``."""
    command = [sys.executable, "-m", "ampctx", "run", "-m", "apex.parallel.multiproc", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)


def script(directory, text):
    file = directory / "train.py"
    file.write_text(textwrap.dedent(text))
    return str(file)


@pytest.mark.full
def test_multiproc_starts_ranks_that_have_apexs_names(tmp_path):
    program = script(
        tmp_path,
        """
        import sys
        from apex import amp
        print(amp.__name__, *sys.argv[1:])
        """,
    )
    result = launch(tmp_path, "--nproc", "2", program, "--lr", "0.1", "--rank", "7")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "apex.amp --lr 0.1 --rank 0 --world-size 2\n"
    assert (tmp_path / "GPU_1.log").read_text() == "apex.amp --lr 0.1 --rank 1 --world-size 2\n"
    assert not (tmp_path / "GPU_0.log").exists()


@pytest.fixture
def in_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return tmp_path


def test_multiproc_ends_the_others_when_one_fails(in_directory):
    program = script(
        in_directory,
        """
        import sys, time
        if sys.argv[-1] == "1":
            sys.exit(3)
        time.sleep(100)
        """,
    )
    assert multiproc.main([program, "--world-size", "2"]) == 3


@pytest.mark.full
def test_multiproc_without_gpus_starts_one_process(in_directory, capfd):
    assert multiproc.main([script(in_directory, "import sys; print(*sys.argv[1:])")]) == 0
    assert capfd.readouterr().out == "--world-size 1 --rank 0\n"


def test_multiproc_needs_a_script():
    with pytest.raises(SystemExit, match="usage: python -m apex.parallel.multiproc"):
        multiproc.main([])
