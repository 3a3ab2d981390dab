# Two commands for a newcomer: `make run` and `make test`. `make help` lists the others.
# VENV, PYTHON and TORCH_INDEX may be given: make test VENV=/tmp/venv PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
# The index of torch, such as https://download.pytorch.org/whl/cpu; by default that of all packages.
TORCH_INDEX ?=
BIN := $(VENV)/bin
WORKERS ?= 2 # test files or classes that run at once
PYTEST_OPTIONS = -n $(WORKERS) --dist loadscope --no-loadscope-reorder
PYTEST = $(BIN)/python -m pytest $(PYTEST_OPTIONS)
FAST := not slow and not exhaustive
# Tests of what torch, zarr, xarray, matplotlib and the trackers do for the package.
TRAINING := autocast checkpoint compilation cuda_graph loggers meshes optimizers parameter_shards
OF_PACKAGES := tests/data/sources tests/data/rechunk tests/domain_parallel/layers \
  tests/domain_parallel/band_tensor tests/evaluation/test_score_plots.py tests/test_torch_private.py \
  tests/test_private_names.py $(TRAINING:%=tests/training/test_%.py)
SETTINGS := pyproject.toml constraints.txt
# The first that runs: pyenv puts commands on PATH for versions that are not selected, too.
first_python = $(shell for python in $(foreach version,$(1), \
  python$(version) "$$HOME"/.pyenv/versions/$(version)*/bin/python3); do \
  "$$python" -c 'import ensurepip, venv' 2>/dev/null && { echo "$$python"; break; }; done)
newest_PYTHON ?= $(call first_python,3.13 3.12)
oldest_PYTHON ?= $(call first_python,3.11)
newest_RESOLUTION := highest
oldest_RESOLUTION := lowest-direct

# Each worker and each rank imports the package: it is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run test test-all test-slow test-newest test-oldest lint check docs notebooks bench

help:
	@echo "make run       install, then train a U-Net on two ranks on the quickstart data"
	@echo "make test      install, then the fast tests"
	@echo "make test-slow install, then the long tests"
	@echo "make test-all  install, then all tests, with those that CI leaves out"
	@echo "make test-newest  install the newest of all packages, then the fast tests that depend on packages most"
	@echo "make test-oldest  the same with the oldest packages that pyproject.toml allows"
	@echo "make check     install, then lint, types, import contract and the fast tests"
	@echo "make lint      the same without the tests"
	@echo "make docs      install, then build the documentation as a web site in site/html"
	@echo "make notebooks  install, then run the notebooks and store their results in them"
	@echo "make bench     install, then measure speed and memory; needs a machine that does nothing else"

# On the CPU, as two ranks need two GPUs.
run: $(VENV)/installed
	$(BIN)/python train.py model=unet parallel.domain=2 device=cpu

test: $(VENV)/installed-test
	$(PYTEST) -m "$(FAST)"

test-slow: $(VENV)/installed-test
	HYPOTHESIS_PROFILE=long $(PYTEST) -m "(slow or hypothesis) and not exhaustive"

test-all: $(VENV)/installed-test
	HYPOTHESIS_PROFILE=long $(PYTEST)

test-newest test-oldest: test-%: $(VENV)-%/installed-test
	$(VENV)-$*/bin/python -c 'import sys, torch, numpy, zarr, xarray; print("Python", \
	  sys.version.split()[0], *(f"{m.__name__} {m.__version__}" for m in (torch, numpy, zarr, xarray)))'
	$(VENV)-$*/bin/python -m pytest $(PYTEST_OPTIONS) -m "$(FAST)" $(OF_PACKAGES)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

# A warning is an error. Notebooks are shown with the results that are stored in them.
docs: $(VENV)/installed-dev
	$(BIN)/sphinx-build --quiet --fail-on-warning --builder html --fresh-env \
	  --conf-dir docs --doctree-dir site/doctrees . site/html

notebooks: $(VENV)/installed-test
	$(BIN)/python scripts/run_notebooks.py

bench: $(VENV)/installed-test
	$(BIN)/python benchmarks/bench.py

# A file in the environment says what is installed there; a change of the settings makes it stale.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: needs Python 3.11 or newer as $(PYTHON); give another one with make PYTHON=..." >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "error: $(PYTHON) comes without venv; on Debian and Ubuntu: apt install python3-venv" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/torch: $(BIN)/python
	@test -z "$(TORCH_INDEX)" || \
	  $(BIN)/python -m pip install --quiet -c constraints.txt torch --index-url $(TORCH_INDEX)
	@touch $@

$(VENV)/installed: $(VENV)/torch $(SETTINGS)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/installed-test: $(VENV)/torch $(SETTINGS)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	@touch $(VENV)/installed $@

$(VENV)/installed-dev: $(VENV)/torch $(SETTINGS)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(VENV)/installed $(VENV)/installed-test $@

# uv can choose the oldest packages, and reads neither the constraints nor pip's settings of this
# machine, which may hold some at older versions. It takes 7 GB, as torch comes with CUDA.
$(VENV)-%/installed-test: pyproject.toml
	@test -n "$($*_PYTHON)" || { \
	  echo "error: needs Python $(if $(filter oldest,$*),3.11,3.13 or 3.12), on PATH or installed by" \
	    "pyenv; found none; give one with make test-$* $*_PYTHON=..." >&2; \
	  exit 1; }
	$($*_PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet uv
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python \
	  --resolution $($*_RESOLUTION) -e '.[test]'
	@touch $@
