"""The table of apex's names is true of the modules and of the targets."""

import importlib
import inspect
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from ampctx_apex import names
from ampctx_apex.install import ApexImportError, refused
from ampctx_apex.names import NAMES, TABLE, lookup, refusal
from ampctx_apex.roots import MODULES
from apex import amp

from ampctx import AmpNotImplementedError

# Names on objects: the tests of those objects look at them.
OF_OBJECTS = tuple(f"{row['of']}." for row in TABLE["served"] if "names" in row)
# Modules whose import apex made fail, too, if it had no compiled extension for them.
AT_IMPORT = [n for n, e in NAMES.items() if e.at_import]
AT_CALL = [n for n, e in NAMES.items() if e.status == "refused" and not e.at_import]


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
def test_a_served_name_is_there_and_a_program_uses_it(name):
    entry, found = NAMES[name], resolved(name)
    assert entry.used_by
    if (module := sys.modules.get(name.rpartition(".")[0])) is not None and not isinstance(found, types.ModuleType):
        assert name.rpartition(".")[2] in module.__all__  # a star brings it, too
    # So that code which is moved to the target means what it meant.
    if entry.target:
        assert inspect.unwrap(found) == inspect.unwrap(resolved(entry.target))
        assert not isinstance(found, types.ModuleType)


def test_served_names_of_objects_are_there():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    unwrapped = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    amp.initialize(torch.nn.Linear(2, 2), unwrapped, opt_level="O1", verbosity=0)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    owners = {
        "apex.amp._amp_state": amp._amp_state,
        "apex.amp.scaler.LossScaler": amp._amp_state.loss_scalers[0],
        "optimizer": optimizer,
        "optimizer._amp_stash": optimizer._amp_stash,
    }
    for row in TABLE["served"]:
        for name in row.get("names", "").split():
            # This list is of optimizers without masters.
            owner = unwrapped._amp_stash if name == "all_fp32_params" else owners[row["of"]]
            assert hasattr(owner, name), name


def test_every_module_has_a_row():
    files = (path.relative_to(MODULES).with_suffix("") for path in Path(MODULES).rglob("*.py"))
    modules = {".".join(part for part in file.parts if part != "__init__") for file in files}
    private = {m for m in modules if m.rpartition(".")[2] in ("fused", "_stash")}
    assert modules - private <= {n for n, e in NAMES.items() if e.is_served}


@pytest.mark.parametrize("row", TABLE["served"], ids=lambda row: row["of"].split()[0])
def test_what_a_row_says_of_names_is_of_names_that_exist(row):
    told = [*row.get("same", {}).values(), *row.get("adapted", {}), *row.get("notes", {})]
    there = {name.rpartition(".")[2] for name, _ in names._served(row)}
    assert {name for several in told for name in re.sub(r">\w+", "", several).split()} <= there


@pytest.mark.parametrize("name", AT_CALL)
def test_what_is_refused_can_be_imported_and_says_what_to_write_when_called(name):
    assert NAMES[name].note.startswith("Use ")
    try:
        found = resolved(name)
    except AttributeError as error:
        pytest.fail(str(error))
    # A module: what is below it is refused.
    found = found if callable(found) else found.anything
    with pytest.raises(NotImplementedError, match=" is not supported by ampctx. Use ") as error:
        found()
    assert NAMES[name].note in str(error.value)


@pytest.mark.parametrize("name", AT_IMPORT)
def test_what_is_refused_at_import_says_what_to_write(name):
    owner, _, last = name.rpartition(".")
    for statement in (f"import {name}", f"from {name} import anything", f"from {owner} import {last}"):
        with pytest.raises(ModuleNotFoundError, match=r"^apex\.\S+ is not supported by ampctx. Use ") as error:
            exec(statement, {})
        assert type(error.value) is ApexImportError
    with pytest.raises((AttributeError, ImportError)):
        resolved(name)


@pytest.mark.parametrize("name", [n for n, e in NAMES.items() if e.status == "missing"])
def test_what_is_missing_is_not_there(name):
    assert NAMES[name].note.startswith("Use ")
    with pytest.raises(ImportError):
        resolved(name)


def test_names_below_a_refused_module_alone_are_refused():
    assert lookup("apex.amp.nothing_of_the_kind") is None
    assert refusal("apex.amp.initialize") is None
    assert refusal("apex.contrib.fmha.fmha.FMHAFun") == refusal("apex.contrib.fmha").replace(
        "apex.contrib.fmha", "apex.contrib.fmha.fmha.FMHAFun", 1
    )
    with pytest.raises(NotImplementedError, match="apex.contrib.fmha.FMHA is not supported by ampctx"):
        refused("apex.contrib.fmha.FMHA")(3)
    assert issubclass(ApexImportError, AmpNotImplementedError)
    with pytest.raises(ApexImportError, match=r"^apex.transformer\S* is not supported by ampctx. Use .*Megatron"):
        from apex.transformer.pipeline_parallel.utils import get_num_microbatches  # noqa: F401
