# `make train` and `make test` each work alone on a fresh clone: the virtual environment is made on first use.

PYTHON  ?= python3
VENV    ?= .venv
RECIPE  ?= L0_sanity
WORKERS ?= 2

BIN     := $(VENV)/bin
METADATA := setup.py pyproject.toml constraints.txt
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all mutants check format doctest wheel clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- Environment: one stamp file for what training needs, one for the development tools ------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "isozyme needs Python 3.11 or newer: PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Name another one, for instance: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.runtime: $(METADATA) | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(METADATA) | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.runtime

setup: $(VENV)/.dev  ## make .venv with the tested versions and the development tools

# --- Use ------------------------------------------------------------------------------------------------------

train: $(VENV)/.runtime  ## train RECIPE (default L0_sanity: a tiny model, no GPU needed; ARGS="key=value ...")
	$(BIN)/isozyme train $(RECIPE) $(ARGS)

# --- Checks ---------------------------------------------------------------------------------------------------

test: $(VENV)/.dev  ## run the tests on WORKERS processes, without the slow ones (ARGS="..." goes to pytest)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(ARGS)

test-all: $(VENV)/.dev  ## run all tests, also those marked slow
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

mutants: $(VENV)/.dev  ## show that the testing toolkit finds faults (ARGS=--write-report writes docs/testing/mutants.md)
	$(BIN)/python -m tests.mutants.run --workers $(WORKERS) $(ARGS)

check: $(VENV)/.dev  ## style, types, layers and doctests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q -n $(WORKERS) --doctest-modules --pyargs isozyme

format: $(VENV)/.dev  ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

wheel: $(VENV)/.dev  ## build dist/ (sdist, then wheel from it) and import the wheel from another folder
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python tests/repo/wheel_smoke.py dist/*.whl

clean:  ## remove the environment, builds and caches
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
