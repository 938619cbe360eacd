# make demo   trains a real model, in seconds          make test    runs the tests, make test-all all of them
# Both make their own .venv, take a torch that is there or install one, and build the extension. Nothing else to set up.

TORCH  ?= torch==2.13.0
PYTHON ?= python3
VENV   ?= .venv
WORKERS ?= auto
ARGS   ?=
ABI    ?= 2.11.0=python3.10 2.15.0=python3.13
PEERS  := torch-optimi==0.3.3 bitsandbytes==0.50.2 torchao==0.18.0

PY      := $(VENV)/bin/python
SOURCES := $(wildcard csrc/*.* csrc/*/*.*) ampctx/kernels/spec.py setup.py pyproject.toml ampctx-apex/setup.py ampctx-apex/pyproject.toml
FORMATTED = $$(git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'tests/cuda_emulation/*.h' 'tests/cuda_emulation/*.cpp' 'tests/ops/*.cpp' 'tests/ptx/*.h' 'tests/ptx/*.cpp')
# The cuobjdump of a CUDA toolkit; where there is none, it is installed into .venv.
CUOBJDUMP  := $(or $(wildcard $(CUDA_HOME)/bin/cuobjdump /usr/local/cuda/bin/cuobjdump),$(shell command -v cuobjdump))
CUDA_TOOLS := $(VENV)/$(if $(CUOBJDUMP),built,cuda-tools).done
PYTEST  := OMP_NUM_THREADS=1 AMPCTX_REQUIRE_EXTENSION=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile
CLIENTS := OMP_NUM_THREADS=1 AMPCTX_REQUIRE_CLIENTS=1 PYTHONPATH=$(abspath $(VENV)/clients/packages)
BUILD   := $(PY) setup.py --quiet build_ext --inplace
PIP     := $(PY) -m pip install --quiet --disable-pip-version-check

# Targets about the CUDA kernels build them for a torch without CUDA, too, and into a tree that was built without.
machine-code test-hard test-ptx test-wheel wheel: export AMPCTX_CUDA := $(or $(AMPCTX_CUDA),$(if $(shell command -v nvcc),1,auto))

.PHONY: demo test test-all test-plain test-faults test-mutants test-ptx clients test-clients sanitize test-hard lint format docs wheel test-wheel bench machine-code abi-check gpu-check clean
.DELETE_ON_ERROR:

# The run of README's picture, in seconds; ARGS="--epochs 25" trains longer.
demo: $(VENV)/examples.done
	$(PY) examples/digits.py $(ARGS)

# For each change: long tests in a reduced form. One worker for each core, a file of tests at a time; WORKERS=0 runs
# them in this process.
test: $(VENV)/test.done
	$(PYTEST) $(ARGS)

# All cases of all tests.
test-all: $(VENV)/test.done
	$(PYTEST) --full $(ARGS)

# The plain code: each step makes its op calls anew, and no 16-bit gradient waits.
test-plain: $(VENV)/test.done
	AMPCTX_PLAN=0 $(PYTEST) tests/amp tests/optimizers tests/reliability $(ARGS)

# Plants faults in copies of the tree: the tests of `make test` have to notice each.
test-faults: $(VENV)/test.done
	$(PY) tests/planted_faults.py $(ARGS)

# Plants a small mutation in each function of amp, weights, scaling and optimizers, and lists those that no test notices.
test-mutants: $(VENV)/test.done
	OMP_NUM_THREADS=1 AMPCTX_REQUIRE_EXTENSION=1 $(PY) tests/mutants.py --measure
	OMP_NUM_THREADS=1 AMPCTX_REQUIRE_EXTENSION=1 $(PY) tests/mutants.py --jobs $$(nproc) $(ARGS)

# The PTX inside the built library, executed on the CPU. Skipped without nvcc. .ci/run does it where a source of the CUDA
# kernels has changed.
test-ptx: $(VENV)/test.done $(CUDA_TOOLS)
	$(BUILD)
	$(PY) tests/ptx/run.py $(ARGS)

# Programs of other people that use apex, run through ampctx_apex, and ampctx.frameworks, with transformers 4 and 5.
# clients installs them, apart from what is in .venv.
clients: $(VENV)/clients.done

test-clients: $(VENV)/clients.done
	$(CLIENTS) $(PY) -m pytest tests/clients $(ARGS)
	$(subst PYTHONPATH=,PYTHONPATH=$(abspath $(VENV)/clients/transformers-5):,$(CLIENTS)) $(PY) -m pytest tests/clients/test_frameworks.py $(ARGS)

# The C++ code under AddressSanitizer and UBSan, in a build of its own.
sanitize: $(VENV)/test.done
	$(PY) tests/reliability/sanitize.py $(ARGS)

# What takes too long for each change: the sanitizers, the CUDA kernels, minutes of wrong calls, 5,000 programs, many
# more examples for the properties.
test-hard: sanitize $(if $(shell command -v nvcc),machine-code) test-ptx
	$(PY) tests/reliability/fuzz_ops.py --seconds 300 --seed $$(date +%s)
	$(PY) tests/fuzz_programs.py --programs 5000 --seed $$(date +%s)
	AMPCTX_HYPOTHESIS_EXAMPLES=1000 $(PY) -m pytest -q --full tests/ops/test_op_properties.py tests/reliability/test_state_machine.py

lint: $(VENV)/lint.done $(VENV)/test.done
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -q --full tests/test_types.py
	$(VENV)/bin/clang-format --dry-run --Werror $(FORMATTED)

format: $(VENV)/lint.done
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(FORMATTED)

# The site, in build/docs. Warnings are errors, and so are references that lead nowhere.
docs: $(VENV)/docs.done
	$(PY) -m sphinx -W --keep-going -n -q -b html -c docs . build/docs
	@echo "build/docs/docs/index.html"

# The source archive and the wheel, with the tag that auditwheel grants it, in dist, and the wheel of ampctx-apex. Where
# nvcc is, the wheel has the CUDA kernels; AMPCTX_CUDA=0 leaves them out.
wheel: $(VENV)/wheel.done
	rm -rf dist ampctx-apex/build
	AMPCTX_KERNELS=1 $(PY) -m build --quiet --no-isolation --sdist --wheel --outdir dist/unaudited
	PATH="$(abspath $(VENV)/bin):$$PATH" $(PY) -m auditwheel repair --exclude libtorch.so --wheel-dir dist dist/unaudited/*.whl
	$(PY) -m build --quiet --no-isolation --wheel --outdir dist ampctx-apex
	mv dist/unaudited/*.tar.gz dist && rm -r dist/unaudited && ls dist

# The wheels in an environment without a compiler: the demo, an apex program and the tests of the ops.
test-wheel: wheel $(VENV)/test.done
	$(PY) .ci/wheel.py dist

# Records the figures of benchmarks/results/figures.csv: a quarter of an hour on two idle cores. One thread: with more,
# torch cuts each small tensor into shares for all threads, and slows down.
bench: $(VENV)/examples.done $(VENV)/peers.done
	OMP_NUM_THREADS=1 PYTHONPATH=$(abspath $(VENV)/peers) $(PY) benchmarks/suite.py $(ARGS)
	$(PY) benchmarks/report.py --picture docs/_static/gains.png

# Checks what nvcc has made of the kernels: no spills, no stack, 128-bit accesses.
machine-code: $(CUDA_TOOLS)
	$(BUILD)
	$(PY) benchmarks/machine_code.py $(ARGS)

# The wheel, then the build in this tree, under the oldest and newest torch that both promise to run on, each with a
# Python of its own: ABI="2.11.0=python3.10". Downloads the two (several GB).
abi-check: wheel $(VENV)/test.done
	for pair in $(ABI); do \
	  python=$$PWD/.abi/$$pair/bin/python; \
	  $${pair#*=} -m venv .abi/$$pair && \
	  $$python -m pip install --quiet --disable-pip-version-check 'pip>=25.1' && \
	  $$python -m pip install --quiet --disable-pip-version-check torch==$${pair%=*} dist/ampctx-*.whl && \
	  $$python -m pip install --quiet --disable-pip-version-check --group test && \
	  $$python .ci/wheel.py dist && \
	  OMP_NUM_THREADS=1 AMPCTX_REQUIRE_EXTENSION=1 PYTHONPATH=. $$python -m pytest -n $(WORKERS) --dist loadfile --full tests/ops tests/amp tests/optimizers $(ARGS) || exit 1; \
	done

# For a machine with a GPU, the CUDA toolkit and a python that has torch and pytest; installs nothing. 12 minutes;
# ARGS=--only=tests for one part.
gpu-check:
	$(PYTHON) benchmarks/gpu_check.py $(ARGS)

clean:
	rm -rf build dist *.egg-info ampctx-apex/build ampctx-apex/*.egg-info ampctx/_ops.so ampctx/_why_no_ops.txt .pytest_cache .mypy_cache .ruff_cache

$(VENV)/torch.done: .ci/bootstrap.py
	$(PYTHON) .ci/bootstrap.py $(VENV) '$(TORCH)'
	@touch $@

# --no-build-isolation: the build needs setuptools alone, and an isolated one would fetch it every time.
$(VENV)/built.done: $(VENV)/torch.done $(SOURCES)
	$(PIP) 'pip>=25.1' 'setuptools>=77'
	$(PIP) $$($(PY) -c 'import setup; print(*setup.with_nvcc(["wheel"]))') # nvcc, where a GPU lacks one
	$(BUILD)
	$(PIP) --no-build-isolation --editable . --editable ./ampctx-apex
	@touch $@

$(VENV)/clients.done: $(VENV)/test.done .ci/clients.py
	$(PY) .ci/clients.py $(VENV)/clients
	@touch $@

# What the benchmarks compare with, apart from what is in .venv. --no-deps: they would bring a torch of their own.
$(VENV)/peers.done: $(VENV)/built.done
	$(PIP) --no-deps --upgrade --target $(VENV)/peers $(PEERS)
	@touch $@

$(VENV)/%.done: $(VENV)/built.done
	$(PIP) --group $*
	@touch $@
