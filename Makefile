# make demo      train one small model on real text in both frameworks, with and without full logits
# make test      lint, types and the tests that guard correctness: about 10 minutes on 2 cores
# make test-all  those, then the slow tests, then the tests with JAX alone under Python 3.12, where that is installed
# make lint      lint and types only
# make docs      the documentation as a site, in site/; a warning is an error
# make dist      the source distribution and the wheel, in dist/; the wheel passes the tests of the source distribution
# make clean     remove the environment and everything built
#
# PYTHON      the interpreter that makes the environment (default: the first of python3.11, python3 that runs)
# FRAMEWORKS  torch,jax (default), or jax: an environment without torch, for the tests that need none
# VENV        where the environment goes (default: .venv, or .venv-jax with FRAMEWORKS=jax)
# PYTEST_ARGS what to hand to pytest, for example PYTEST_ARGS="-k plan -x"
# PYTHON_312  the interpreter of test-all's second environment (default: one on PATH or of pyenv's that runs)

FRAMEWORKS ?= torch,jax
PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=

# A python3.12 on PATH may be a shim of pyenv's that runs nothing, so every candidate is tried.
PYTHON_312 ?= $(shell for name in python3.12 $$(pyenv root 2>/dev/null)/versions/3.12*/bin/python3.12; do \
	if $$name -c "import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))" >/dev/null 2>&1; then \
	echo $$name; break; fi; done)
# The second environment leaves out the tests of what both environments share, which the first one has run.
SHARED_TESTS := cases losses losses_jax losses_memory per_token logits_loss parity reference demo

ifndef PYTHON
PYTHON := $(shell for name in python3.11 python3; do \
	if $$name -c "" 2>/dev/null; then echo $$name; break; fi; done)
endif
ifeq ($(PYTHON),)
$(error no python3.11 or python3 that runs was found: install one, or name it with PYTHON=...)
endif

PYTHON_VERSION := $(shell $(PYTHON) -c "import sys; print('%d.%d' % sys.version_info[:2])")
ifneq ($(shell $(PYTHON) -c "import sys; print(sys.version_info >= (3, 11))"),True)
$(error $(PYTHON) is Python $(PYTHON_VERSION), 3.11 or newer is needed: name one with PYTHON=...)
endif

# The pins that the tests run with. jax 0.10.2 is the last one for Python 3.11.
TORCH_PIN := torch==2.13.0
# The CPU build of torch brings no triton; the tests interpret the kernels with it.
TRITON_PIN := "triton==3.9.0; sys_platform == 'linux'"
# The JAX examples besides the plain one.
EXAMPLE_PINS := $(if $(filter 3.11,$(PYTHON_VERSION)),flax==0.12.8,flax==0.12.12) equinox==0.13.8
# The models that torch_impl.patch is for, what trains and adapts them, and peers whose names we have: 93 MB.
HF_PINS := transformers==5.23.0 accelerate==1.15.0 peft==0.21.2 megatron-core==0.16.1 trl==1.16.0 lightning==2.6.6
HF_PINS += "liger-kernel==0.8.5; sys_platform == 'linux'" "cut-cross-entropy==25.1.1; sys_platform == 'linux'"
# The documentation site, which reads the sources and imports nothing of the project: 28 MB to download, and ruff, in
# the dev extra's version, which formats the signatures.
DOCS_PINS := mkdocs==1.6.1 mkdocs-material==9.8.1 mkdocstrings==1.0.8 mkdocstrings-python==2.0.11 griffelib==2.4.1
DOCS_PINS += $(shell sed -n 's/.*"\(ruff==[0-9.]*\)".*/\1/p' pyproject.toml)
# Compiles the Pallas kernels for a GPU that is not there: 142 MB.
CUDA_PIN := $(if $(filter 3.11,$(PYTHON_VERSION)),,"jax-cuda13-plugin==0.11.2; sys_platform == 'linux'")
JAX_PIN := $(if $(filter 3.11,$(PYTHON_VERSION)),jax==0.10.2,jax==0.11.2)

ifeq "$(FRAMEWORKS)" "torch,jax"
VENV ?= .venv
PINS := $(TORCH_PIN) $(JAX_PIN)
EXTRAS := demo
TEST_PINS := $(TRITON_PIN) $(EXAMPLE_PINS) $(HF_PINS)
TEST_NEEDS := lint
else ifeq "$(FRAMEWORKS)" "jax"
# Lint and types are left out: type checking needs both frameworks installed.
VENV ?= .venv-jax
PINS := $(JAX_PIN)
EXTRAS := jax,demo-tools
TEST_PINS := $(EXAMPLE_PINS) $(CUDA_PIN)
TEST_NEEDS :=
else
$(error FRAMEWORKS is '$(FRAMEWORKS)', allowed are 'torch,jax' and 'jax')
endif
BIN := $(VENV)/bin

# One thread each: the tests run in PYTEST_WORKERS processes.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# Compiled modules are kept even where the environment says otherwise: the tests start some hundred processes.
PYTEST = $(ONE_THREAD) PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal

# The project is installed as a strict editable install, a folder of links that type checkers can read too. A new file
# is not in it until the next install, so a list of the source files is kept, rewritten only when it has changed.
SOURCES := $(sort $(shell find core interop jax_impl torch_impl -name "*.py"))
SOURCE_LIST := $(VENV)/sources.txt
INSTALL := $(BIN)/python -m pip install --quiet
INSTALL_PROJECT := $(INSTALL) --config-settings editable_mode=strict --editable

.PHONY: demo test test-all test-slow test-jax lint docs dist clean FORCE
.NOTPARALLEL:
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-demo
	$(BIN)/python -m logitless demo

test: $(VENV)/.installed-test $(TEST_NEEDS)
	$(PYTEST) $(PYTEST_ARGS)

test-all: test test-slow test-jax

test-slow: $(VENV)/.installed-test
	$(PYTEST) -m slow $(PYTEST_ARGS)

test-jax:
ifeq "$(FRAMEWORKS)" "torch,jax"
	@if [ -n "$(PYTHON_312)" ]; then \
		$(MAKE) test FRAMEWORKS=jax PYTHON="$(PYTHON_312)" VENV="$(VENV)-jax" \
			PYTEST_ARGS='-m "" $(SHARED_TESTS:%=--ignore=tests/test_%.py) $(PYTEST_ARGS)'; \
	else echo "test-all: the tests with JAX alone did NOT run: no python3.12 that runs was found"; fi
endif

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The theme prints a notice about its own future, which is switched off. (--quiet would let warnings pass.)
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The tests run in the unpacked source distribution, and PYTHONPATH puts the wheel before the editable install.
DIST := $(CURDIR)/build/dist
dist: $(VENV)/.installed-test
	rm -rf dist $(DIST)
	$(BIN)/python -m build --no-isolation
	mkdir -p $(DIST)/source
	tar -xf dist/*.tar.gz -C $(DIST)/source --strip-components=1
	$(BIN)/python -m pip install --quiet --no-deps --target $(DIST)/wheel dist/*.whl
	cd $(DIST)/source && PYTHONPATH=$(DIST)/wheel $(ONE_THREAD) $(abspath $(BIN))/python -m pytest \
		-n $(PYTEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

clean:
	rm -rf .venv .venv-jax build dist site demo-output .hypothesis .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The pins go first: a range alone would let pip take another build of torch, several GB larger.
$(VENV)/.installed-pins: Makefile | $(BIN)/python
	$(INSTALL) $(PINS)
	touch $@

$(SOURCE_LIST): FORCE | $(BIN)/python
	@printf '%s\n' $(SOURCES) | cmp -s - $@ || printf '%s\n' $(SOURCES) > $@

$(VENV)/.installed-demo: $(VENV)/.installed-pins pyproject.toml $(SOURCE_LIST)
	$(INSTALL_PROJECT) '.[$(EXTRAS)]'
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed-pins pyproject.toml $(SOURCE_LIST)
	$(INSTALL_PROJECT) '.[$(EXTRAS),dev]' $(TEST_PINS)
	touch $@

$(VENV)/.installed-docs: Makefile | $(BIN)/python
	$(INSTALL) $(DOCS_PINS)
	touch $@
