import inspect
import json
import subprocess
import sys
from types import ModuleType

import pytest
import torch

import ampctx
from ampctx.__main__ import info, main
from ampctx._version import why_no_torch
from ampctx.kernels import selftest


def test_info_json(capsys):
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == info()
    assert report["ampctx"] == ampctx.__version__
    assert report["extension"]["loaded"] == ampctx.ops.extension.loaded
    if report["extension"]["loaded"]:
        assert "cpu" in report["extension"]["backends"]
        assert report["extension"]["simd_used"] in report["extension"]["simd"]


def test_a_missing_extension_is_explained(capsys, monkeypatch):
    missing = ampctx.kernels.extension.Extension(False, reason="the file is not there: build it")
    monkeypatch.setattr(ampctx.ops, "extension", missing)
    main(["info"])
    out = capsys.readouterr().out
    assert "not loaded: the ops run on plain torch" in out
    assert "the file is not there: build it" in out


def test_info_tests_the_ops_of_a_device(capsys):
    assert main(["info", "--test", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("test       on cpu, "))
    kinds = ["scale", "axpby", "l2norm", "loss scale", "adam", "sgd", "adagrad", "lion", "muon", "lamb"]
    assert lines[begin + 1 :] == [f"{kind:11}same" for kind in kinds]


def _add_a_bit(tensors):
    for t in tensors:
        t.copy_(t * 1.01)


FAULTS = {
    "multi_tensor_adam": (lambda *args: _add_a_bit(args[1]), "adam       multi_tensor_adam differs in params"),
    "update_scale": (lambda *args: _add_a_bit(args[:1]), "loss scale update_scale differs in scale"),
    "multi_tensor_lion": (lambda *args: torch.ones(2).add(torch.ones(3)), "lion       multi_tensor_lion raises"),
}


def test_ops_that_differ_from_plain_torch_are_named(monkeypatch, capsys):
    for op, (fault, _) in FAULTS.items():

        def faulty(*args, former=selftest.FALLBACKS[op], fault=fault):
            result = former(*args)
            fault(*args)
            return result

        monkeypatch.setitem(selftest.FALLBACKS, op, faulty)
    assert main(["info", "--test", "--device", "cpu", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["test"]["differences"]
    told = sorted(f"{kind:11}{problem}" for kind, problem in found.items() if problem)
    expected = sorted(said for _, said in FAULTS.values())
    assert [text[: len(said)] for text, said in zip(told, expected, strict=True)] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--test", "--device", "gpu"], "Expected one of cpu, cuda"), (["--device", "cpu"], "--device goes with --test")],
)
def test_a_wrong_device_is_a_usage_error(options, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(["info", *options])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run train.py", "migrate ."])
def test_commands_of_ampctx_apex_are_named(command, capsys):
    assert main(command.split()) == 2
    name = command.split()[0]
    expected = f"ampctx has no command {name!r}. Install ampctx-apex and run 'ampctx-apex {name}'\n"
    assert capsys.readouterr() == ("", expected)


def test_public_names_exist_and_are_listed():
    assert all(hasattr(ampctx, name) for name in ampctx.__all__)
    for module in (ampctx.amp, ampctx.optimizers):
        names = {name for name, value in vars(module).items() if not name.startswith("_")}
        assert names >= set(module.__all__)
        assert {name for name in names if not isinstance(getattr(module, name), ModuleType)} == set(module.__all__)


@pytest.mark.parametrize("module", [ampctx, ampctx.amp])
def test_completion_offers_the_public_names(module):
    assert dir(module) == sorted([*module.__all__, *(["__version__"] if module is ampctx else [])])


def test_a_session_has_every_function_of_amp():
    functions = [name for name in ampctx.amp.__all__ if inspect.isroutine(getattr(ampctx.amp, name))]
    assert len(functions) > 20
    assert [name for name in functions if not hasattr(ampctx.AmpSession, name)] == []


def test_the_report_of_python_m_fits_80_columns_and_a_reader_may_leave():
    result = subprocess.run([sys.executable, "-m", "ampctx"], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == f"ampctx     {ampctx.__version__}"
    assert max(map(len, lines)) <= 80
    if ampctx.ops.extension.loaded:
        assert "loaded, kernels in use for cpu" in result.stdout
    # Nobody reads this pipe.
    gone = "import os; r, w = os.pipe(); os.dup2(w, 1); os.close(r); from ampctx.__main__ import main; exit(main([]))"
    result = subprocess.run([sys.executable, "-c", gone], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


# As after pip install --no-deps.
NO_TORCH = "import sys; sys.modules['torch'] = sys.modules['packaging'] = None; "
NEEDS = "ampctx needs PyTorch 2.11 to 2.15, and "


def without_torch(code):
    return subprocess.run([sys.executable, "-c", NO_TORCH + code], capture_output=True, text=True)


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_need_no_torch(option):
    result = without_torch(f"from ampctx.__main__ import main; main({option.split()!r})")
    assert result.returncode == 0, result.stderr
    assert "ampctx" in result.stdout


@pytest.mark.parametrize("command", [[], ["info"]])
def test_a_command_without_torch_says_in_one_line_what_to_install(command):
    result = without_torch(f"from ampctx.__main__ import main; sys.exit(main({command!r}))")
    assert result.returncode == 1
    assert result.stderr == NEEDS + "none is installed. Run: pip install torch\n"


def test_a_broken_torch_is_not_called_missing():
    code = "import sys; sys.modules['torch._C'] = None; import ampctx"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "none is installed" not in result.stderr
    assert "torch._C" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("statement", ["from ampctx import amp", "import ampctx; ampctx.GradScaler"])
def test_the_library_without_torch_says_what_to_install(statement):
    result = without_torch(statement)
    assert f"ImportError: {NEEDS}none is installed. Run: pip install torch" in result.stderr


def test_a_missing_packaging_and_an_old_torch_are_named(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "packaging.version", None)
        assert why_no_torch() == "ampctx needs packaging, and none is installed. Run: pip install packaging"
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu124")
    assert why_no_torch() == f"{NEEDS}2.5.1+cu124 is installed. Run: pip install --upgrade torch"
