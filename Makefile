# Every target makes the environment first if needed; nothing but Python and a package index is assumed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help install demo test lint types check collections matrix inspect sweep pruning production clean

help:  ## Show the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

install: $(READY)  ## Make .venv and install the package into it

demo: $(READY)  ## Train, evaluate and plot with and without rescaling: see demo-out/report.md
	$(BIN)/st-sparse-rescale demo --output demo-out

test: $(READY)  ## Run all tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(READY)  ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## Check types
	$(BIN)/mypy

check: lint types test  ## All that must pass before a change is merged

collections: $(READY)  ## Evaluate BM25, the shipped backbones and earlier results on real collections, where there are any
	$(BIN)/python scripts/evaluate_collections.py

matrix: $(READY)  ## Regenerate docs/architectures.md
	$(BIN)/python scripts/head_matrix.py

inspect: $(READY)  ## Regenerate docs/choosing-k
	$(BIN)/python scripts/inspect_models.py

sweep: $(READY)  ## Regenerate docs/sweeps from the runs in experiments/results
	$(BIN)/python scripts/report_sweeps.py

pruning: $(READY)  ## Measure what pruning documents costs, where there are real collections
	$(BIN)/python scripts/measure_pruning.py

production: $(READY)  ## From a mini model to two search engines: examples/production.py
	$(BIN)/python examples/production.py

clean:  ## Remove the environment and everything generated
	rm -rf $(VENV) build dist demo-out production-out .pytest_cache .mypy_cache .ruff_cache
