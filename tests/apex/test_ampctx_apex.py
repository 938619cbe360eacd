"""The distribution ampctx-apex: programs for apex run with plain ``python``; an apex from elsewhere is never hidden."""

import importlib.metadata
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import apex_environment as environments
import pytest
from ampctx_apex import install

import ampctx

ROOT = environments.ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return environments.ours(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """ampctx of this tree, and ampctx-apex as pip installs it."""
    environment = environments.Environment(tmp_path_factory.mktemp("environment"), ROOT)
    environment.install(wheel)
    return environment


@pytest.fixture
def new_environment(tmp_path):
    return environments.Environment(tmp_path / "environment", ROOT)


def info(environment, **variables):
    """What ``ampctx-apex info`` tells of apex."""
    line = environment.run("-m", "ampctx_apex", "info", **variables).splitlines()[0]
    assert line.startswith("apex       ")
    return line[11:]


# --- the files --------------------------------------------------------------------------------------------------------


def test_the_wheel_has_its_modules_and_one_file_for_the_start_of_python(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        line = archive.read("ampctx_apex.pth").decode()
        metadata = Parser().parsestr(archive.read(f"ampctx_apex-{ampctx.__version__}.dist-info/METADATA").decode())
    source = ROOT / "ampctx-apex"
    files = (p for p in (source / "ampctx_apex").rglob("*") if p.suffix in (".py", ".toml"))
    assert names == {"ampctx_apex.pth", *(str(p.relative_to(source)) for p in files)}
    assert line == "import ampctx_apex.startup; ampctx_apex.startup.serve()\n"
    assert metadata["Version"] == ampctx.__version__
    assert metadata.get_all("Requires-Dist")[0] == f"ampctx=={ampctx.__version__}"


# --- programs ---------------------------------------------------------------------------------------------------------

TRAIN = """
import importlib.metadata
import pickle
import sys
version = importlib.metadata.version("apex")
import amp_C
import apex_C
import torch
import apex
from apex import amp
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel

def main(level):
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model, optimizer = amp.initialize(model, FusedAdam(model.parameters(), lr=0.01), opt_level=level, verbosity=0)
    losses = []
    for _ in range(60):
        loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(losses[-1] < losses[0] / 4)

main("O1")
amp._amp_state.loss_scalers  # apex's private state
main("O2")
print(pickle.loads(pickle.dumps(amp.scaler.LossScaler)) is amp.scaler.LossScaler)
print(version, apex.__version__, type(amp.scale_loss.__self__).__name__)
print(DistributedDataParallel.__module__, amp_C.__name__, apex_C.__name__, sys.argv[1:])
"""


def test_a_program_trains_with_plain_python(environment, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    assert environment.run("train.py", "--fp16", cwd=tmp_path).splitlines() == [
        "True",
        "True",
        "True",
        "0.1 0.1 AmpSession",
        "apex.parallel.distributed amp_C apex_C ['--fp16']",
    ]


STATEMENTS = [
    "import apex.amp; print(apex.amp.initialize)",
    "import amp_C, apex; print(amp_C.multi_tensor_scale, apex.amp)",
    "from apex.normalization.fused_layer_norm import FusedLayerNorm; print(FusedLayerNorm)",
    "import importlib.util as u; print(u.find_spec('apex.amp').origin)",
    "import runpy, warnings; warnings.simplefilter('ignore'); print(runpy.run_module('apex.amp.scaler')['LossScaler'])",
    "import pickle; print(pickle.loads(b'capex.amp.scaler\\nLossScaler\\n.'))",
    "import ampctx_apex; ampctx_apex.install_apex(); import apex; print(apex.amp)",
    "import importlib, apex; print(importlib.reload(apex))",
]


@pytest.mark.full
@pytest.mark.parametrize("statement", STATEMENTS)
def test_every_first_import(environment, statement):
    out = environment.run("-c", f"{statement}\nimport apex; print(apex.__file__)").splitlines()[-1]
    assert out == str(environment.site / "ampctx_apex" / "modules" / "apex" / "__init__.py")


WITHOUT_AN_IMPORT = """
import sys
print([name for name in ("torch", "ampctx", "typing") if name in sys.modules])
import importlib.util, importlib.metadata as metadata
print(metadata.version("apex"), metadata.version("ampctx-apex"))
print([d.metadata["Name"] for d in metadata.distributions()].count("apex"))
print([name for name in ("apex", "amp_C", "apex_C") if not importlib.util.find_spec(name)])
import apex
print(metadata.version("apex"))
"""


def test_names_and_versions_are_found_without_an_import_and_the_start_imports_no_torch(environment):
    lines = environment.run("-I", "-c", WITHOUT_AN_IMPORT).splitlines()
    assert lines == ["[]", f"0.1 {ampctx.__version__}", "0", "[]", "0.1"]


@pytest.mark.full
def test_a_variable_switches_the_names_off(environment):
    code = "import importlib.util; print(importlib.util.find_spec('amp_C'))"
    assert environment.run("-c", code, AMPCTX_APEX="0") == "None\n"
    assert info(environment, AMPCTX_APEX="0") == "not served, because AMPCTX_APEX=0"


# --- beside another apex ----------------------------------------------------------------------------------------------

WHICH = """
import importlib.metadata, sys
import apex
print(apex.KIND, importlib.metadata.version("apex"))
try:
    import amp_C
except ImportError as error:
    print(error)
print("apex.amp" in sys.modules)
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return environments.other(tmp_path_factory.mktemp("other"))


@pytest.mark.full
@pytest.mark.parametrize("first", ["ours", "other"])
def test_another_apex_in_the_same_directory_stays_in_use(new_environment, wheel, other, first):
    """pip writes no file of one over the other's, so that either can go."""
    new_environment.install(*([wheel, other] if first == "ours" else [other, wheel]))
    assert new_environment.run("-c", WHICH).splitlines() == ["other 0.1", "No module named 'amp_C'", "False"]
    assert info(new_environment) == (
        f"another apex, version 0.1, in {new_environment.site / 'apex'}, without amp. "
        "Use 'ampctx-apex run', or run 'pip uninstall apex'"
    )
    (new_environment.site / "train.py").write_text("import apex, amp_C; print(apex.amp.initialize.__name__)")
    assert new_environment.run("-m", "ampctx_apex", "run", new_environment.site / "train.py") == "initialize\n"

    new_environment.pip("uninstall", "--yes", "apex")
    assert new_environment.run("-c", "from apex import amp; print(amp.__name__)") == "apex.amp\n"
    new_environment.install(other)
    new_environment.pip("uninstall", "--yes", "ampctx-apex")
    assert new_environment.run("-c", "import apex.transformer; print(apex.KIND)") == "other\n"
    assert "No module named 'amp_C'" in new_environment.run("-c", "import amp_C", code=1)


@pytest.mark.full
def test_a_folder_named_apex_is_no_apex(environment, tmp_path):
    """Such as a checkout of apex, in whose parent a program runs."""
    (tmp_path / "apex" / "docs").mkdir(parents=True)
    (tmp_path / "train.py").write_text("import apex; print(apex.amp.__name__)")
    assert environment.run("train.py", cwd=tmp_path) == "apex.amp\n"


@pytest.mark.full
def test_info_without_another_apex(environment, new_environment):
    assert info(environment) == f"from ampctx-apex {ampctx.__version__}"
    path = str(ROOT / "ampctx-apex")
    assert info(new_environment, PYTHONPATH=path) == (
        "not served: ampctx_apex.pth is not in site-packages. Use 'ampctx-apex run', or install ampctx-apex with pip"
    )


# --- in this process --------------------------------------------------------------------------------------------------


def test_apex_has_a_version_and_is_among_all_distributions():
    assert importlib.metadata.version("apex") == "0.1"
    assert importlib.metadata.metadata("apex")["Name"] == "apex"
    names = [distribution.metadata["Name"] for distribution in importlib.metadata.distributions()]
    assert names.count("apex") == 1
    assert "torch" in names
    assert importlib.metadata.version("torch").startswith("2.")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("no-such-package-of-anybody")


def test_the_roots_are_the_files_of_the_modules():
    modules = Path(install.MODULES)
    assert set(install.ROOTS) == {"apex", *(path.stem for path in modules.glob("*.py"))}
    assert not any(name in sys.stdlib_module_names for name in install.ROOTS)
