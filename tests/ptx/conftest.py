"""The PTX of the library, and what runs it. `make test-ptx` builds both; without it these tests are skipped."""

from __future__ import annotations

import os
from pathlib import Path

import emulation_build
import pytest
from library import NAMESPACE, extract, functions

from ampctx.kernels import definitions


@pytest.fixture(scope="session")
def interpreter():
    """The library that runs PTX, in torch.ops.ampctx_ptx."""
    path = os.environ.get("AMPCTX_EMULATION_LIBRARY")
    if path is None:
        pytest.skip("runs through `make test-ptx`")
    defined = definitions.define(NAMESPACE)
    yield emulation_build.load(path, NAMESPACE)
    del defined


@pytest.fixture(scope="session")
def named_functions(interpreter):
    return functions(Path(os.environ["AMPCTX_EMULATION_LIBRARY"]))


@pytest.fixture(scope="session")
def modules(interpreter):
    """The PTX files of the target under test."""
    target = os.environ["AMPCTX_PTX_TARGET"]
    return extract(Path(os.environ["AMPCTX_PTX_EXTENSION"]), target)[target]
