# The two commands are `make demo` and `make test`; each builds .venv first where it is missing or out of date.

# Start-up of an engine is almost all Python imports: without byte code it takes three times as long.
unexport PYTHONDONTWRITEBYTECODE
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# One interpreter for all: 3.11 is the one that the pinned list was tried with.
PYTHON ?= $(firstword $(foreach name,python3.11 python3 python3.12 python3.13, \
	$(shell $(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --compile

# Of the demo: a model's folder (default: one made on the spot) and launch arguments to pass through.
MODEL ?=
ARGS ?=

.PHONY: help venv lint types test demo clean

help:
	@echo "make demo    two replicas share long prefixes, measured (MODEL=<folder> ARGS='--dtype bfloat16 …')"
	@echo "make test    lint, types and tests"
	@echo "make lint    ruff"
	@echo "make types   mypy"
	@echo "make venv    $(VENV) from the pinned list"
	@echo "make clean   removes what the commands above made, except $(VENV)"

venv: $(VENV)/.complete

$(VENV)/.complete: pyproject.toml $(wildcard requirements/*.txt)
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found: install it or say make PYTHON=<path>"; exit 1; }
	@echo "[1/5] $(VENV) from $$($(PYTHON) --version) ($(PYTHON))"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/5] $$(grep -v '^#' requirements/torch.txt) and its dependencies"
	@$(PIP) -r requirements/torch.txt
	@echo "[3/5] xinference, vLLM and all they need: $$(grep -vc '^#' requirements/cpu.txt) pinned packages, some 2 GB"
	@$(PIP) --no-deps -r requirements/cpu.txt
	@echo "[4/5] tools for development"
	@$(PIP) --no-deps -r requirements/dev.txt
	@echo "[5/5] xinference-xavier itself, editable"
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

lint: venv
	$(BIN)/ruff check .

types: venv
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest

demo: venv
	$(BIN)/python -m examples.demo $(if $(MODEL),--model "$(MODEL)") $(ARGS)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
