# Two commands for a newcomer: `make demo` and `make test`. Each sets itself up.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)
# One thread per process: two test processes on two cores must not fight over them. The tests of a file share a
# process, and so the cluster that some of them start.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: demo test check quick lint bench clean help

help:  ## Show what there is.
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(VENV)/.base  ## Train a tiny model from nothing and show that it learnt.
	$(BIN)/practicum demo

test: lint  ## Lint, types and all tests.
	$(PYTEST)

check: $(VENV)/.dev  ## The inner loop: lint, types and the quick tests, side by side.
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint quick

quick: $(VENV)/.dev
	$(PYTEST) -q -m "not slow"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --warnings

bench:  ## Measure against transformers and TRL (its own environment).
	$(MAKE) -C benchmarks bench PYTHON=$(PYTHON)

clean:  ## Remove the environment and caches.
	rm -rf $(VENV) .pytest_cache .ruff_cache

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer, or make demo PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "practicum needs Python 3.11 or newer: make demo PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (once; torch is large)"
	$(INSTALL) --editable .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (once; torch is large)"
	$(INSTALL) --editable '.[dev]'
	touch $@ $(VENV)/.base
