# Every verb makes or updates the environment it needs. `make` alone lists the verbs.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.made
COMPILED := allocator/block_hash.c kernels/host_copy.c tiers/slab_io.c
VLLM_BIN := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.made
VLLM_PIP := $(VLLM_BIN)/python -m pip install --quiet --quiet --disable-pip-version-check

# Never put the working directory on sys.path: ./kernels would shadow another project's package.
export PYTHONSAFEPATH = 1

.PHONY: help dev demo test test-alone test-live test-sim test-engine test-engine-inside test-engine-servers check bench fuzz chaos soak torture

help:
	@echo 'make dev    make .venv with the tested versions of everything'
	@echo 'make demo   show blocks ebb and flow on this machine'
	@echo 'make test   run all tests but those that need vLLM'
	@echo 'make test-engine  run the tests inside a real vLLM on the CPU; makes .venv-vllm (3 GB) first'
	@echo 'make check  lint, format, types, import rules, kernels compiled, wheels built'
	@echo 'make bench  measure offloading'
	@echo 'make fuzz   send 1,000,000 mutated frames to a store'
	@echo 'make chaos  kill and stop stores and engines while three engines serve: 50 of each'
	@echo 'make soak   run a store for ten minutes among clients that come, vanish and are killed'
	@echo 'make torture  the long forms: hundreds of kills, power cuts and simulated worlds, 10 killed vLLMs'

dev: $(STAMP)

$(STAMP): pyproject.toml constraints.txt setup.py $(COMPILED)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'make: $(PYTHON) is older than 3.11. Name a newer one: make dev PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo 'make: $(PYTHON) cannot make virtual environments. Install its venv package (Debian: apt install python3-venv)' >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# torch comes first and with its dependencies, so that any build of it works; then the list and nothing else.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt setup.py $(COMPILED)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'make: $(PYTHON) is older than 3.11. Name a newer one: make test-engine PYTHON=python3.11' >&2; exit 1; }
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_PIP) -c constraints-vllm.txt torch
	$(VLLM_PIP) --no-deps -r constraints-vllm.txt
	$(VLLM_PIP) --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP)
	$(BIN)/ebbtide demo

# What builds something whole: kernels for three GPUs, wheels.
BUILDS := tests/kernels/test_machine_code.py tests/unit/test_packaging.py

# Three parts side by side on two cores: the live tests wait most of the time.
test: $(STAMP)
	@$(MAKE) --no-print-directory -j3 -Otarget test-alone test-live test-sim

test-alone: $(STAMP)
	$(BIN)/pytest tests/conformance tests/kernels tests/unit $(addprefix --ignore=,$(BUILDS))

test-live: $(STAMP)
	$(BIN)/pytest tests/live

test-sim: $(STAMP)
	$(BIN)/pytest tests/power tests/sim

ENGINE_TESTS := $(VLLM_BIN)/pytest -c tests/engine/pytest.ini --rootdir=. tests/engine

# Two halves side by side: a test inside one vLLM keeps little more than one core busy.
test-engine: $(VLLM_STAMP)
	@$(MAKE) --no-print-directory -j2 -Otarget test-engine-inside test-engine-servers

test-engine-inside: $(VLLM_STAMP)
	$(ENGINE_TESTS) -m 'not long and not server'

test-engine-servers: $(VLLM_STAMP)
	$(ENGINE_TESTS) -m 'not long and server'

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest $(BUILDS)

bench: $(STAMP)
	$(BIN)/ebbtide bench offload

fuzz: $(STAMP)
	EBBTIDE_TEST_FUZZ_FRAMES=1000000 $(BIN)/pytest -s tests/live/test_protocol_fuzz.py

chaos: $(STAMP)
	EBBTIDE_TEST_CHAOS_KILLS=50 EBBTIDE_TEST_CHAOS_STOPPED_S=10 $(BIN)/pytest -s tests/live/test_chaos.py

soak: $(STAMP)
	EBBTIDE_TEST_SOAK_S=600 $(BIN)/pytest -s tests/live/test_soak.py

torture: $(STAMP) $(VLLM_STAMP)
	EBBTIDE_TEST_KILLS=50 $(BIN)/pytest -s tests/live/test_engine_store_lost.py
	EBBTIDE_TEST_STOPPED_S=10 EBBTIDE_TEST_RESTARTS=20 $(BIN)/pytest tests/live/test_process_engines.py tests/live/test_process_start.py
	EBBTIDE_TEST_SIM_SEEDS=500 EBBTIDE_TEST_SIM_STEPS=2000 $(BIN)/pytest tests/sim
	EBBTIDE_TEST_DISK_KILLS=500 EBBTIDE_TEST_POWER_STATES=500 EBBTIDE_TEST_BOUND_MIB=1024 \
	  $(BIN)/pytest -s tests/live/test_disk_killed.py tests/power tests/live/test_disk_bound.py
	EBBTIDE_TEST_ENGINE_KILLS=10 $(ENGINE_TESTS) -m long
