"""The table of apex's names: true of the modules, of the targets, and of the page in docs."""

import importlib
import sys
import types

import pytest
from ampctx_apex.install import refused
from ampctx_apex.names import NAMES, lookup, refusal

# Names that exist on objects, or from amp.initialize on: the tests of those objects look at them.
OF_OBJECTS = (
    "optimizer.",
    "apex.amp._amp_state.",
    "apex.amp._process_optimizer.AmpOptimizerState.",
    "apex.amp.handle.AmpHandle.",
    "apex.amp.scaler.LossScaler.",
    "apex.fp16_utils.",
    "apex.contrib.optimizers.FP16_Optimizer.",
    *(f"apex.optimizers.{name}." for name in ("FusedAdam", "FusedSGD", "FusedLAMB", "FusedMixedPrecisionLamb")),
    *(f"apex.optimizers.{name}." for name in ("FusedNovoGrad", "FusedAdagrad")),
)


def resolved(name):
    """What a dotted name leads to: attributes, and modules imported on the way where there are none.

    In this order: a refused class that was imported as a module would be one for the tests that come after.
    """
    path, *parts = name.split(".")
    found = importlib.import_module(path)
    for part in parts:
        # The module, where something has taken its place: apex.amp._amp_state.
        found = next((owner for owner in (found, sys.modules.get(path)) if hasattr(owner, part)), None)
        path = f"{path}.{part}"
        found = importlib.import_module(path) if found is None else getattr(found, part)
    return found


@pytest.mark.parametrize("name", [n for n, e in NAMES.items() if e.is_served and not n.startswith(OF_OBJECTS)])
def test_what_is_served_is_there(name):
    resolved(name)


@pytest.mark.parametrize(
    "name",
    [n for n, e in NAMES.items() if e.status == "refused" and not e.at_import and not n.startswith(OF_OBJECTS)],
)
def test_what_is_refused_can_be_imported_and_says_so_when_called(name):
    assert lookup(name) is NAMES[name]
    assert NAMES[name].note
    found = resolved(name)
    if callable(found):
        with pytest.raises(NotImplementedError) as error:
            found()
        assert NAMES[name].note.split(".")[0] in str(error.value)


@pytest.mark.parametrize("name", [n for n, e in NAMES.items() if e.at_import])
def test_what_is_refused_at_import_says_so(name):
    assert NAMES[name].status == "refused"
    owner, _, last = name.rpartition(".")
    for statement in (f"import {name}", f"from {name} import anything", f"from {owner} import {last}"):
        with pytest.raises(ModuleNotFoundError, match=" is not supported by ampctx. Use ") as error:
            exec(statement, {})
        assert isinstance(error.value, NotImplementedError)
    with pytest.raises((AttributeError, ImportError)):
        resolved(name)


@pytest.mark.parametrize("name", [n for n, e in NAMES.items() if e.status == "missing"])
def test_what_is_missing_is_not_there(name):
    assert NAMES[name].note.startswith("Use ")
    with pytest.raises(ImportError):
        resolved(name)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # by torch.distributed.optim
@pytest.mark.parametrize("target", sorted({e.target for e in NAMES.values() if e.target}))
def test_targets_are_there(target):
    assert resolved(target) is not None


# Functions of torch of the same meaning, which code is moved to where its arguments fit.
OF_TORCH = ("torch.nn.functional.linear",)


@pytest.mark.parametrize("name", sorted(n for n, e in NAMES.items() if e.target and e.is_served))
def test_a_target_is_the_same_object(name):
    """So that code which is moved to it means what it meant."""
    target, found = NAMES[name].target, resolved(name)
    if target not in OF_TORCH and not isinstance(found, types.ModuleType):
        assert found == resolved(target)


@pytest.mark.parametrize("module", ["", ".fused_adam", ".fused_sgd", ".fused_lamb"])
def test_the_old_optimizers_have_no_target(module):
    prefix = f"apex.contrib.optimizers{module}."
    rows = {name: entry for name, entry in NAMES.items() if name.startswith(f"{prefix}Fused")}
    assert rows
    for name, entry in rows.items():
        assert entry.target is None
        assert f"ampctx.optimizers.{name.removeprefix(prefix)}" in entry.note


def test_a_name_below_a_refused_module_is_refused():
    assert refusal("apex.contrib.fmha.fmha.FMHAFun") == refusal("apex.contrib.fmha").replace(
        "apex.contrib.fmha", "apex.contrib.fmha.fmha.FMHAFun", 1
    )
    with pytest.raises(NotImplementedError, match="apex.contrib.fmha.FMHA is not supported by ampctx"):
        refused("apex.contrib.fmha.FMHA")(3)


def test_a_name_that_nobody_knows():
    assert lookup("apex.amp.nothing_of_the_kind") is None
    assert refusal("apex.amp.initialize") is None
