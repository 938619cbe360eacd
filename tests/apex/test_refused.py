"""What is not served says so at the import or at the call, with what takes its place."""

import importlib
import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ampctx_apex import install
from ampctx_apex.install import ApexImportError, refused
from ampctx_apex.names import NAMES

from ampctx import AmpNotImplementedError, AmpValueError

ROOT = Path(__file__).resolve().parents[2]
WHOLE_MODULES = ["apex.RNN", "apex.amp.utils", *(n for n, entry in NAMES.items() if entry.at_import and n.islower())]


@pytest.fixture
def at_call(monkeypatch):
    """All refused modules can be imported, as with ``install_apex(refuse="call")``. They are gone afterwards."""
    (finder,) = (finder for finder in install._finders if isinstance(finder, install._RefusedFinder))
    monkeypatch.setattr(finder, "at_call", True)
    before = set(sys.modules)
    yield
    for name in [n for n in sys.modules if n not in before and n.startswith("apex.")]:
        module, (parent, _, last) = sys.modules.pop(name), name.rpartition(".")
        if vars(sys.modules.get(parent, module)).get(last) is module:
            delattr(sys.modules[parent], last)


@pytest.mark.parametrize("name", WHOLE_MODULES)
def test_a_refused_module_can_be_imported_and_its_members_refuse(name, capsys, at_call):
    module = importlib.import_module(name)
    with pytest.raises(AmpNotImplementedError) as error:
        module.Anything(1, key=2)
    assert str(error.value) == f"{name}.Anything is not supported by ampctx. {NAMES[name].note}"
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["LSTM", "GRU", "ReLU", "Tanh", "mLSTM"])
@pytest.mark.parametrize("module", ["apex.RNN", "apex.RNN.models"])
def test_rnns_name_their_replacement(module, name):
    with pytest.raises(AmpNotImplementedError, match=rf"{module}.{name} is not supported by ampctx. Use torch.nn."):
        getattr(importlib.import_module(module), name)(10, 20, 2)


@pytest.mark.parametrize("module", ["apex.RNN.cells", "apex.RNN.RNNBackend"])
def test_parts_of_the_rnns_refuse(module):
    with pytest.raises(AmpNotImplementedError, match="Use torch.nn.RNN, torch.nn.LSTM or torch.nn.GRU"):
        importlib.import_module(module).RNNCell(4, 10, 20)


def test_attention(at_call):
    from apex.contrib.multihead_attn import SelfMultiheadAttn
    from apex.contrib.multihead_attn.self_multihead_attn import SelfMultiheadAttn as InSubmodule

    message = r"SelfMultiheadAttn is not supported by ampctx. Use torch.nn.MultiheadAttention, or"
    with pytest.raises(AmpNotImplementedError, match=f"apex.contrib.multihead_attn.{message}"):
        SelfMultiheadAttn(64, 4, dropout=0.1)
    with pytest.raises(AmpNotImplementedError, match=f"apex.contrib.multihead_attn.self_multihead_attn.{message}"):
        InSubmodule(64, 4)


def test_a_submodule_taken_from_its_package_refuses_at_the_call(at_call):
    from apex.transformer import parallel_state

    with pytest.raises(
        AmpNotImplementedError, match="apex.transformer.parallel_state.initialize_model_parallel is not"
    ):
        parallel_state.initialize_model_parallel(1, 1)


def test_an_autograd_function_refuses_at_apply(at_call):
    from apex.contrib.fmha import FMHAFun

    with pytest.raises(AmpNotImplementedError, match="apex.contrib.fmha.FMHAFun.apply is not supported by ampctx"):
        FMHAFun.apply(None)


def test_a_subclass_can_be_written_and_refuses_when_made(at_call):
    from apex.contrib.multihead_attn import SelfMultiheadAttn

    class Attention(SelfMultiheadAttn):
        def __init__(self):
            super().__init__(64, 4)

    with pytest.raises(AmpNotImplementedError, match="Use torch.nn.MultiheadAttention"):
        Attention()
    assert not isinstance(object(), SelfMultiheadAttn)


@pytest.mark.parametrize("owner", [refused("apex.RNN.utils"), importlib.import_module("apex.RNN")])
def test_dunder_names_are_absent(owner):
    with pytest.raises(AttributeError, match="has no attribute '__torch_function__'"):
        owner.__torch_function__  # noqa: B018


def test_lazily_found_from_the_package():
    import apex

    with pytest.raises(
        AmpNotImplementedError, match="apex.pyprof.nvtx.init is not supported by ampctx. Use torch.profile"
    ):
        apex.pyprof.nvtx.init()


def test_a_module_that_apex_never_had_is_not_there():
    import apex

    with pytest.raises(ModuleNotFoundError, match="No module named 'apex.nonsense'"):
        importlib.import_module("apex.nonsense")
    assert not hasattr(apex, "nonsense")


# --- at the import ----------------------------------------------------------------------------------------------------

# As NeMo, Megatron-LM, and others look for apex.
PROBES = {
    "a module of a package": "from apex.transformer import parallel_state",
    "the package": "import apex.transformer",
    "of apex": "from apex import transformer",
    "deep": "from apex.transformer.pipeline_parallel.utils import get_num_microbatches",
    "contrib": "from apex.contrib.group_norm import GroupNorm",
    "of contrib": "from apex.contrib import fmha",
    "an optimizer": "from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam",
    "an optimizer of the package": "from apex.contrib.optimizers import DistributedFusedAdam",
}


@pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)
@pytest.mark.parametrize("caught", [ImportError, ModuleNotFoundError, AmpNotImplementedError])
def test_a_program_that_probes_learns_that_it_is_not_there(probe, caught):
    with pytest.raises(caught, match=r"^apex\.\S+ is not supported by ampctx. Use .*(Megatron|torch)") as error:
        exec(probe, {})
    assert type(error.value) is ApexImportError


def test_the_attribute_is_not_there_either():
    import apex
    import apex.contrib.optimizers

    assert not hasattr(apex, "transformer")
    with pytest.raises(AttributeError, match="apex.transformer is not supported by ampctx. Use Megatron Core"):
        apex.transformer.parallel_state  # noqa: B018
    with pytest.raises(AttributeError, match="DistributedFusedAdam is not supported by ampctx. Use torch.distrib"):
        apex.contrib.optimizers.DistributedFusedAdam  # noqa: B018


def test_modules_that_programs_import_without_a_need_can_be_imported():
    from apex import RNN, pyprof
    from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB
    from apex.reparameterization import apply_weight_norm

    assert callable(RNN.LSTM)
    assert callable(pyprof.nvtx.init)
    assert not isinstance(object(), DistributedFusedLAMB)
    with pytest.raises(AmpNotImplementedError, match="Use torch.nn.utils.parametrizations.weight_norm"):
        apply_weight_norm(None)


@pytest.fixture
def not_installed(monkeypatch):
    """Before install_apex, and with the former finders afterwards."""
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if finder not in install._finders])
    monkeypatch.setattr(install, "_finders", [])


@pytest.mark.parametrize(
    ("variable", "argument", "at_call"),
    [
        (None, None, False),
        ("", None, False),
        ("import", None, False),
        ("call", None, True),
        (None, "call", True),
        ("call", "import", False),
    ],
)
def test_who_asks_can_import_all(not_installed, monkeypatch, variable, argument, at_call):
    """The argument comes before the environment."""
    if variable is not None:
        monkeypatch.setenv("AMPCTX_APEX_REFUSE", variable)
    install.install_apex(argument)
    for name in ("apex.transformer.parallel_state", "apex.contrib.fmha"):
        if at_call:
            assert importlib.util.find_spec(name.rpartition(".")[0]) is not None
        else:
            with pytest.raises(ModuleNotFoundError, match="is not supported by ampctx"):
                importlib.util.find_spec(name)


@pytest.mark.full
def test_a_program_asks_by_the_environment():
    program = """
        import ampctx_apex
        ampctx_apex.install_apex()
        from apex.transformer import parallel_state
        from apex.contrib.optimizers import DistributedFusedAdam
        try:
            parallel_state.initialize_model_parallel(1)
        except NotImplementedError as error:
            print(error)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "AMPCTX_APEX_REFUSE": "call"}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("apex.transformer.parallel_state.initialize_model_parallel is not supported")


def test_bad_values(not_installed, monkeypatch):
    with pytest.raises(AmpValueError, match="^install_apex: refuse is 'late', expected 'import' or 'call'"):
        install.install_apex("late")
    monkeypatch.setenv("AMPCTX_APEX_REFUSE", "1")
    with pytest.raises(AmpValueError, match="^install_apex: AMPCTX_APEX_REFUSE is '1', expected 'import' or 'call'"):
        install.install_apex()
    assert install._finders == []


# --- beside what is served --------------------------------------------------------------------------------------------


@pytest.mark.full
def test_modules_of_an_installed_apex_come_before_the_refusal(tmp_path):
    """And ours before the installed ones where both have a name."""
    for path, text in {
        "apex/__init__.py": "raise RuntimeError('the installed apex itself is not imported')",
        "apex/contrib/__init__.py": "raise RuntimeError('nor is its contrib')",
        "apex/contrib/multihead_attn/__init__.py": "class SelfMultiheadAttn: origin = 'installed'",
        "apex/contrib/xentropy/__init__.py": "SoftmaxCrossEntropyLoss = 'installed'",
        "apex/transformer/__init__.py": "from . import parallel_state",
        "apex/transformer/parallel_state.py": "origin = 'installed'",
        "apex/normalization/extra.py": "origin = 'installed'",
    }.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    program = """
        from ampctx_apex import install_apex
        install_apex()
        import apex
        from apex.contrib.multihead_attn import SelfMultiheadAttn
        from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
        from apex.normalization import extra
        from apex.pyprof import nvtx
        print(SelfMultiheadAttn.origin, apex.transformer.parallel_state.origin, extra.origin)
        print(SoftmaxCrossEntropyLoss.apply, nvtx.__module__, sep="\\n")
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    origins, served, refusing = result.stdout.splitlines()
    assert origins == "installed installed installed"
    assert "SoftmaxCrossEntropyLoss.apply" in served
    assert refusing == "apex.pyprof"


def test_a_wrong_choice_is_an_error_after_the_first_call_too():
    install.install_apex()
    with pytest.raises(AmpValueError, match="^install_apex: refuse is 'never', expected 'import' or 'call'"):
        install.install_apex(refuse="never")
