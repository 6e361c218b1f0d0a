# Every verb makes or updates .venv itself. `make` alone lists the verbs.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.made

# Never put the working directory on sys.path: ./kernels would shadow another project's package.
export PYTHONSAFEPATH = 1

.PHONY: help dev demo test check bench

help:
	@echo 'make dev    make .venv with the tested versions of everything'
	@echo 'make demo   show blocks ebb and flow on this machine'
	@echo 'make test   run all tests'
	@echo 'make check  lint, format, types, import rules'
	@echo 'make bench  measure offloading'

dev: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'make: $(PYTHON) is older than 3.11. Name a newer one: make dev PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo 'make: $(PYTHON) cannot make virtual environments. Install its venv package (Debian: apt install python3-venv)' >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/ebbtide demo

test: $(STAMP)
	$(BIN)/pytest

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/ebbtide bench offload
