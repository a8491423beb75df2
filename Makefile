# Baton: `make help` lists the targets.

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
unexport PYTHON
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
MODEL  := models/smollm2-135m-instruct
# Builds of torch for CUDA bring the Triton they need; beside one for CPU it is installed for the kernels' tests.
TRITON := triton==3.6.0
# What `make lock` does not move.
HELD   := torch==2.13.0 transformers==5.15.0

.DEFAULT_GOAL := help
.PHONY: help env model demo test lint docs lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(STAMP) ## environment in .venv, from requirements.lock (PYTHON=python3.12 picks another interpreter)

$(STAMP): requirements.lock
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(None if sys.version_info >= (3, 11) else \
	  f"$(PYTHON) is Python {v}: the locked environment needs 3.11 or newer, set PYTHON=")'
	@echo "==> environment: $(VENV) with $$($(PYTHON) -V), $$(grep -c == requirements.lock) packages from requirements.lock"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --disable-pip-version-check --progress-bar off --requirement requirements.lock \
	  2> $(VENV)/pip-errors.txt | awk '/^Collecting/ {print "    " $$2; fflush()} /^Installing/ {print "    installing"; fflush()}' \
	  || { cat $(VENV)/pip-errors.txt >&2; exit 1; }
	@$(PY) -c 'import triton' 2> /dev/null || $(PY) -m pip install --quiet --disable-pip-version-check $(TRITON)
	@$(PY) -c 'import torch, transformers; print(f"    torch {torch.__version__}, transformers {transformers.__version__}")'
	@touch $@

model: env ## embedded model: SmolLM2-135M-Instruct, converted and checked, in models/
	@echo "==> model: $(MODEL)"
	@$(PY) -m engine.embedded_model $(MODEL)

demo: model ## disaggregated service on CPU, a small coding-agent replay, its report
	@$(PY) -m bench.demo

lint: env ## format, lint and type checks
	@echo "==> ruff format --check"
	@$(PY) -m ruff format --check .
	@echo "==> ruff check"
	@$(PY) -m ruff check .
	@echo "==> mypy"
	@$(PY) -m mypy

test: lint model ## lint, then the whole CPU test suite
	@echo "==> pytest"
	@$(PY) -m pytest

docs: env ## write the generated parts of README.md again
	@$(PY) -m bench.config_reference --write README.md

lock: ## resolve pyproject.toml anew and write requirements.lock
	@echo "==> lock: a fresh environment in build/lock"
	@rm -rf build/lock && $(PYTHON) -m venv build/lock
	@build/lock/bin/python -m pip install --quiet --disable-pip-version-check $(HELD) --editable '.[dev]'
	@{ sed -n '/^#/p' requirements.lock; build/lock/bin/python -m pip freeze --all --exclude-editable \
	  | tr 'A-Z_' 'a-z-' | sed 's/+.*//' | grep -vE '^(pip|triton|nvidia-.*|cuda-.*)==' | LC_ALL=C sort; } > build/requirements.lock
	@mv build/requirements.lock requirements.lock && rm -rf build/lock
	@echo "    $$(grep -c == requirements.lock) packages"

clean: ## remove caches and build output; environment and model stay
	@rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -exec rm -rf {} +
