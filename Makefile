# TORCH is the torch requirement to install first, e.g. TORCH=torch==2.13.0 or TORCH=/path/to/wheel.
TORCH ?= torch
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What the environment was made with: another choice of torch installs anew.
CHOICE := $(VENV)/.choice
# kvpress caps transformers below what this project needs.
PARITY ?= .venv-parity
CHECKED := sekv train tests benchmarks

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install test demo parity lint types format clean FORCE

help:  ## Show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  variables: TORCH=torch==2.13.0 (the torch to install), PYTHON=python3.12, VENV=.venv'

install: $(STAMP)  ## Create the virtual environment with everything in it

test: $(STAMP)  ## Run the tests
	$(BIN)/python -m pytest

demo: $(STAMP)  ## Train, export, reload and compare on the default backbone
	$(BIN)/sekv train --config configs/demo.yaml
	$(BIN)/sekv export runs/demo/checkpoints/last.ckpt runs/demo/adapter
	$(BIN)/sekv evaluate --policy full,sekv,nestedkv,hubkv --adapter runs/demo/adapter \
		--tasks niah:2048 --budget 0.1,0.2 --limit 8 --output runs/demo/evaluation
	@echo 'plot: runs/demo/evaluation/scores.png   figures: runs/demo/evaluation/results.json'

parity: $(STAMP) $(PARITY)/.installed  ## Compare the methods with kvpress, in an environment of its own
	$(BIN)/python benchmarks/parity/ours.py runs/parity
	$(PARITY)/bin/python benchmarks/parity/theirs.py runs/parity
	$(BIN)/python benchmarks/parity/compare.py runs/parity docs/parity.md
	@echo 'table: docs/parity.md'

lint: $(STAMP)  ## Check style
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)

types: $(STAMP)  ## Check types
	$(BIN)/mypy

format: $(STAMP)  ## Rewrite files in the house style
	$(BIN)/ruff check --fix-only $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

clean:  ## Remove the virtual environment and what tools leave behind
	rm -rf $(VENV) $(PARITY) build *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find $(CHECKED) -type d -name __pycache__ -prune -exec rm -rf {} +

# Rewritten only when the choice differs, so that an unchanged one keeps its age.
$(CHOICE): FORCE
	@mkdir -p $(VENV)
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

# torch goes first and is then pinned by a constraint, so that no other package replaces the build the user chose.
$(STAMP): pyproject.toml $(CHOICE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -c "import importlib.metadata as m; print('torch==' + m.version('torch'))" > $(VENV)/torch.txt
	$(BIN)/python -m pip install -c $(VENV)/torch.txt -e '.[train,eval,lm-eval,dev]'
	@touch $@

$(PARITY)/.installed: $(STAMP)
	$(PYTHON) -m venv $(PARITY)
	$(PARITY)/bin/python -m pip install --quiet --upgrade pip
	$(PARITY)/bin/python -m pip install "$(TORCH)"
	$(PARITY)/bin/python -m pip install -c $(VENV)/torch.txt 'kvpress>=0.5.5'
	@touch $@
