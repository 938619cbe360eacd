"""What is not served says so at the import or at the call, with what takes its place."""

import importlib
import importlib.util
import sys
import types

import pytest
from ampctx_apex import install
from ampctx_apex.names import NAMES

from ampctx import AmpError, AmpNotImplementedError, AmpValueError

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


def test_a_module_that_apex_never_had_is_not_there():
    import apex

    with pytest.raises(ModuleNotFoundError, match="No module named 'apex.nonsense'"):
        importlib.import_module("apex.nonsense")
    assert not hasattr(apex, "nonsense")


# --- at the import ----------------------------------------------------------------------------------------------------


def test_the_attribute_is_not_there_either():
    import apex
    import apex.contrib.optimizers

    assert not hasattr(apex, "transformer")
    with pytest.raises(AttributeError, match="apex.transformer is not supported by ampctx. Use Megatron Core"):
        apex.transformer.parallel_state  # noqa: B018
    with pytest.raises(AttributeError, match="DistributedFusedAdam is not supported by ampctx. Use torch.distrib"):
        apex.contrib.optimizers.DistributedFusedAdam  # noqa: B018


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


def test_an_apex_that_was_imported_before_is_named(not_installed, monkeypatch):
    other = types.ModuleType("apex")
    other.__file__ = "site/apex/__init__.py"
    monkeypatch.setitem(sys.modules, "apex", other)
    with pytest.raises(AmpError, match="^apex is already imported, from site/apex/__init__.py. Call "):
        install.install_apex()


def test_bad_values(not_installed, monkeypatch):
    with pytest.raises(AmpValueError, match="^install_apex: refuse is 'late', expected 'import' or 'call'"):
        install.install_apex("late")
    monkeypatch.setenv("AMPCTX_APEX_REFUSE", "1")
    with pytest.raises(AmpValueError, match="^install_apex: AMPCTX_APEX_REFUSE is '1', expected 'import' or 'call'"):
        install.install_apex()
    assert install._finders == []
    monkeypatch.delenv("AMPCTX_APEX_REFUSE")
    install.install_apex()  # a wrong choice is an error after the first call, too
    with pytest.raises(AmpValueError, match="^install_apex: refuse is 'never', expected 'import' or 'call'"):
        install.install_apex(refuse="never")
