"""The fixture ``backend``: each op test runs on the compiled CPU kernels, on the plain-torch reference, on the CUDA
kernels emulated on the CPU under two schedules, and on the CUDA kernels where there is a GPU."""

from __future__ import annotations

import os

import emulation_build
import pytest
from backends import COMPILED, CUDA, EMULATED, REFERENCE, SHUFFLED

from ampctx import ops


@pytest.fixture(scope="session")
def emulation():
    """The library of emulated CUDA kernels, registered in torch.ops.ampctx_emulated."""
    definitions = ops.define(EMULATED.namespace)
    # Set by tests/ptx, whose library runs what nvcc has made of the kernels.
    library = os.environ.get("AMPCTX_EMULATION_LIBRARY")
    if library is None:
        # Set by tests/reliability/sanitize.py, which preloads what such a library needs.
        flags = emulation_build.SANITIZE if os.environ.get("AMPCTX_EMULATION_SANITIZE") == "1" else ()
        library = emulation_build.build(emulation_build.FOLDER, *flags)
    yield emulation_build.load(library, EMULATED.namespace)
    del definitions


@pytest.fixture(scope="session")
def reference():
    """torch.ops.ampctx_reference: the ops with nothing but their fallback."""
    return ops.define(REFERENCE.namespace)


@pytest.fixture(
    params=[COMPILED, REFERENCE, EMULATED, SHUFFLED, pytest.param(CUDA, marks=pytest.mark.cuda)], ids=lambda b: b.name
)
def backend(request, monkeypatch):
    if request.param is COMPILED:
        assert "cpu" in ops.extension.backends, ops.extension.reason
    elif request.param is REFERENCE:
        request.getfixturevalue("reference")
    elif request.param.namespace == EMULATED.namespace:
        request.getfixturevalue("emulation")
        monkeypatch.setenv("AMPCTX_EMULATION_SEED", "7" if request.param is SHUFFLED else "0")
    return request.param
