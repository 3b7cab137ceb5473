# `make train` shows the whole thing, `make test` proves it, `make check` is what CI runs.
# Everything installs into .venv; nothing else is written outside ignored caches and runs/.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
BIN    := .venv/bin
STAMP  := .venv/.themis-installed

# One thread a process: ranks share the machine, and tests start several of them.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup train test check format clean

help:
	@echo "make train   set up and train the tiny recipe on two processes"
	@echo "make test    set up and run the tests"
	@echo "make check   formatting, lint, types, import walls and tests: what CI runs"
	@echo "make format  rewrite the sources in the house format"
	@echo "make clean   remove the environment, caches and build products (runs/ stays)"

setup: $(STAMP)

# torch first and by itself, so that a change of the project's own dependencies never downloads it again.
$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing torch and the rest into .venv; this takes a minute or two"
	@$(BIN)/python -m pip install --quiet "$(TORCH)"
	@$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

train: $(STAMP)
	$(BIN)/themis train tiny --nproc 2

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) test

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
