"""The fixture ``backend``: each op test runs on the compiled CPU kernels, on the plain-torch reference, on the CUDA
kernels emulated on the CPU under two schedules, and on the CUDA kernels where there is a GPU. Ops that sum, where the
number of threads matters, also run emulated with as many threads to a block as on a GPU."""

from __future__ import annotations

import os

import emulation_build
import pytest
from backends import COMPILED, CUDA, EMULATED, FULL_BLOCKS, REFERENCE, SHUFFLED

from ampctx.kernels import definitions, ops

# Many fibers are slow, and the library takes half a minute to compile: these files alone run with FULL_BLOCKS, and
# with --full. `make test-ptx` runs blocks of that size too.
SUMS = ["test_multi_tensor_l2norm", "test_layerwise_formulas", "test_sum_order"]


def pytest_collection_modifyitems(config, items):
    def is_wanted(item):
        backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
        return backend is not FULL_BLOCKS or (config.getoption("full") and item.path.stem in SUMS)

    items[:] = filter(is_wanted, items)


def _emulation(backend, threads, *flags):
    defined = definitions.define(backend.namespace)
    # Set by tests/ptx, whose library runs what nvcc has made of the kernels.
    library = os.environ.get("AMPCTX_EMULATION_LIBRARY")
    if library is None:
        # Set by tests/reliability/sanitize.py, which preloads what such a library needs.
        if os.environ.get("AMPCTX_EMULATION_SANITIZE") == "1":
            flags = (*flags, *emulation_build.SANITIZE)
        library = emulation_build.build(emulation_build.FOLDER, *flags, threads=threads)
    yield emulation_build.load(library, backend.namespace)
    del defined


@pytest.fixture(scope="session")
def emulation():
    """The library of emulated CUDA kernels, registered in torch.ops.ampctx_emulated."""
    yield from _emulation(EMULATED, emulation_build.THREADS_PER_BLOCK)


@pytest.fixture(scope="session")
def emulation_256():
    """The same in torch.ops.ampctx_emulated_256."""
    # Compiled in a third of the time without optimization, for few tests.
    yield from _emulation(FULL_BLOCKS, emulation_build.THREADS_ON_A_GPU, "-O0")


@pytest.fixture
def runtime(emulation):
    """Has the runtime say that the stream is capturing, or that the driver is an older one."""

    def says(capturing=False, driver=13000):
        emulation.ampctx_test_capture(capturing)
        emulation.ampctx_test_driver(driver)

    yield says
    says()


@pytest.fixture(scope="session")
def reference():
    """torch.ops.ampctx_reference: the ops with nothing but their fallback."""
    return definitions.define(REFERENCE.namespace)


@pytest.fixture(
    params=[COMPILED, REFERENCE, EMULATED, SHUFFLED, FULL_BLOCKS, pytest.param(CUDA, marks=pytest.mark.cuda)],
    ids=lambda b: b.name,
)
def backend(request, monkeypatch):
    if request.param is COMPILED:
        assert "cpu" in ops.extension.backends, ops.extension.reason
    elif request.param is REFERENCE:
        request.getfixturevalue("reference")
    elif request.param.namespace == EMULATED.namespace:
        request.getfixturevalue("emulation")
        monkeypatch.setenv("AMPCTX_EMULATION_SEED", "7" if request.param is SHUFFLED else "0")
    elif request.param is FULL_BLOCKS:
        request.getfixturevalue("emulation_256")
        monkeypatch.setenv("AMPCTX_EMULATION_SEED", "0")
    return request.param
