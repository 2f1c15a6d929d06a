# Two commands do all set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo layers test fuzz lint format bench docs check clean help

help:                ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

demo: $(READY)       ## the main job in a minute: train on handwritten digits, prove, certify, check, attack
	$(BIN)/onelip demo

layers: $(READY)     ## the layers at work: exact norms before and after, on real layers
	$(BIN)/python examples/layers_at_work.py

test: $(READY)       ## all tests, on all cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto

SECONDS ?= 60
fuzz: $(READY)       ## search for false bounds for SECONDS=60, on all cores; failures go to fuzz/corpus/
	OMP_NUM_THREADS=1 $(BIN)/python -m fuzz --seconds $(SECONDS) --seed $$(date +%s) --jobs $$(nproc)

lint: $(READY)       ## ruff (lint, format), pyright, the layers of imports and the word list
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/private_imports.py
	$(BIN)/python tools/words.py

format: $(READY)     ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)      ## speed and memory, as ratios within one run; writes results/*.json
	$(BIN)/python benchmarks/rescaling.py
	$(BIN)/python benchmarks/activation.py
	$(BIN)/python benchmarks/training_step.py
	$(BIN)/python benchmarks/inference.py
	$(BIN)/python benchmarks/epoch.py
	$(BIN)/python benchmarks/bounds.py
	$(BIN)/python benchmarks/certify.py
	$(BIN)/python benchmarks/update_readme.py

docs: $(READY)       ## the documentation site, into site/; readable without a network
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	PYTHONPATH=tools $(BIN)/zensical build --strict --clean

check: lint test     ## what a change must pass

# constraints.txt keeps pip on the one torch build that is meant; installed once, again when the inputs change.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:               ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist site
