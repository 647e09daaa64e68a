# `make help` lists the targets. Each sets up what it needs by itself.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONSTRAINTS := deploy/constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input --quiet

WORKERS ?= 2

EXAMPLES := grpo-ddp dpo-pairs sft-warm-start rollout-bridge verl-replay-buffer nemo-rl-data-plane roll-transfer-backend

# Tests start hundreds of processes, each of which would compile this project where the environment forbids bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup proto check test chaos cuda demo bench clean examples $(EXAMPLES)

help:  ## this list
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(READY)  ## a virtual environment in .venv with the pinned versions; again only when these change

# torch goes first: it decides the build (CPU or CUDA) that the rest must fit. setuptools comes with the pins, so the
# editable install needs no build environment of its own.
$(READY): pyproject.toml $(CONSTRAINTS) deploy/system-libs.sh
	@echo "setting up $(VENV) ..."
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "needs Python 3.10 or later: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c $(CONSTRAINTS) torch setuptools
	$(PIP) install -c $(CONSTRAINTS) --no-build-isolation -e '.[dev]'
	deploy/system-libs.sh
	touch $@

proto: $(READY)  ## the stubs in tqclient/wire/v1, from proto/tq/v1
	$(BIN)/python proto/generate.py
	$(BIN)/python -m tests.unit.wire.contract

check: $(READY)  ## formatting, lint, types, fresh stubs, layout
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python proto/generate.py --check
	$(BIN)/python -m pytest -q tests/unit/test_layout.py

test: $(READY)  ## every test but the long fault runs, two at a time: make test WORKERS=0 for one after the other
	$(BIN)/python -m pytest -m 'not chaos and not cuda' -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

chaos: $(READY)  ## the long fault runs: make chaos SEED=7 ROUNDS=100
	$(BIN)/python -m pytest -m chaos $(if $(SEED),--seed=$(SEED)) $(if $(ROUNDS),--rounds=$(ROUNDS)) $(ARGS)

cuda: $(READY)  ## what needs a CUDA device, and a torch that was built for it
	$(BIN)/python -m pytest -m cuda $(ARGS)

demo: $(READY)  ## rollout, reward and trainer processes over a service on this machine
	$(BIN)/python -m examples.grpo_addition $(ARGS)

examples: $(EXAMPLES)  ## each in turn; alone by its name: make grpo-ddp, dpo-pairs, sft-warm-start, rollout-bridge, ...

$(EXAMPLES): $(READY)
	$(BIN)/python -m examples.$(subst -,_,$@) $(ARGS)

bench: $(READY)  ## the service beside plain memory copies
	$(BIN)/tq-bench run $(ARGS)

clean:  ## everything that was built or cached
	rm -rf $(VENV) build dist out *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
